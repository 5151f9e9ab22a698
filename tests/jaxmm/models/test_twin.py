"""The decoder's weights in bfloat16 beside float32: the same numbers, so the same answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmm.config import EngineConfig, load_config
from jaxmm.device.linear import MAX_WIDENED, linear
from jaxmm.engine import Engine
from jaxmm.models import read_config
from jaxmm.models.twin import make_twin, text_is_bfloat16, twin_shapes
from jaxmm.sizes import has_room_for_twin, settle_sizes
from tests.checkpoints import checkpoint
from tests.engines import SMALL, ask, cache_dir, logprobs, picture, request, turn
from tests.reference import greedy


def test_twin_holds_the_same_numbers() -> None:
    # 1.5 = 0x3FC00000, -0.1 as bfloat16 = 0xBDCD0000, the smallest normal number, zero
    bits = np.array([[0x3FC00000, 0xBDCD0000], [0x00800000, 0x80000000]], np.uint32)
    vector = jnp.array([0.1, 0.2])
    twin = make_twin({"w": jnp.asarray(bits.view(np.float32)), "b": vector})
    assert twin["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(twin["w"], np.float32).view(np.uint32), bits)
    assert twin["b"] is vector
    shapes = twin_shapes({"w": jnp.zeros((2, 2)), "b": vector})
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), twin
    )


def test_number_that_is_no_bfloat16_makes_no_twin() -> None:
    with pytest.raises(AssertionError, match="no bfloat16"):
        make_twin({"w": jnp.full((2, 2), 0.1)})


def test_matrix_with_rows_too_long_to_be_widened_meanwhile_is_shared() -> None:
    wide = jnp.ones((2, MAX_WIDENED + 1))
    assert make_twin({"w": wide})["w"] is wide
    assert make_twin({"w": wide[:, 1:]})["w"].dtype == jnp.bfloat16


def test_only_files_in_bfloat16_have_one() -> None:
    for dtype, expected in (("bfloat16", True), ("float32", False)):
        directory = checkpoint("qwen2_5_vl", dtype=dtype)
        assert text_is_bfloat16(directory, read_config(directory)) is expected


def test_memory_decides() -> None:
    config, model = load_config(EngineConfig), read_config(checkpoint("qwen2_5_vl"))
    sizes = settle_sizes(config, model, 4096, platform="cpu", memory_bytes=1 << 30, itemsize=4)
    assert has_room_for_twin(config, model, sizes, 4 << 30)
    assert not has_room_for_twin(config, model, sizes, 1 << 26)


def test_row_times_weights_in_bfloat16_is_exact() -> None:
    rng = np.random.default_rng(0)
    weight_FD = jnp.asarray(rng.standard_normal((48, 64)), jnp.bfloat16)
    x_TD = jnp.asarray(rng.standard_normal((1, 64)), jnp.float32)
    wide = np.asarray(x_TD, np.float64) @ np.asarray(weight_FD, np.float64).T
    y_TF = jax.jit(linear)(x_TD, weight_FD)
    assert y_TF.dtype == jnp.float32
    np.testing.assert_allclose(y_TF, wide, rtol=1e-5, atol=1e-5)


def test_answers_are_those_of_transformers_in_float32() -> None:
    directory = checkpoint("qwen2_5_vl", dtype="bfloat16")
    messages, images = turn("<image>", "describe the picture"), [picture(200, 130, 1)]
    expected, scores = greedy(directory, messages, images, 16, max_pixels=SMALL["media.max_pixels"])
    settings = {**SMALL, "model": str(directory), "compile_cache_dir": cache_dir()}
    with Engine(load_config(EngineConfig, None, settings)) as engine:
        [result] = ask(engine, request(messages, images))
    assert list(result.token_ids) == expected
    chosen = scores[np.arange(16), expected]
    np.testing.assert_allclose(logprobs(result), chosen, rtol=1e-3, atol=1e-3)
