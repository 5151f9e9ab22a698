"""The decoder's weights in bfloat16 beside float32: the same numbers, so the same answers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmm.config import EngineConfig, load_config
from jaxmm.device.linear import MAX_WIDENED, linear
from jaxmm.engine import Engine
from jaxmm.models import read_config
from jaxmm.models.twin import make_twin, of_step, text_is_bfloat16, twin_shapes
from jaxmm.sizes import has_room_for_twin, settle_sizes
from kernels_pallas import native
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


@pytest.mark.parametrize("kernels", ["auto", "portable"])
def test_answers_are_those_of_transformers_in_float32(kernels: str) -> None:
    """Alone and with others: of one token, of several, and the head of a whole prompt."""
    directory = checkpoint("qwen2_5_vl", dtype="bfloat16")
    settings = {**SMALL, "model": str(directory), "compile_cache_dir": cache_dir()}
    questions = [
        (turn("<image>", "describe the picture"), [picture(200, 130, 1)]),
        (turn("what is a page"), []),
        (turn("name three colours, and then three more"), []),
    ]
    with Engine(load_config(EngineConfig, None, settings | {"kernels": kernels})) as engine:
        assert engine.replicas[0].runner.backend.native is (kernels == "auto" and native.there())
        alone = ask(engine, request(*questions[0]))
        together = ask(engine, *(request(*question) for question in questions[1:]))
    for (messages, images), result in zip(questions, alone + together, strict=True):
        expected, scores = greedy(
            directory, messages, images, 16, max_pixels=SMALL["media.max_pixels"]
        )
        assert list(result.token_ids) == expected
        chosen = scores[np.arange(16), expected]
        np.testing.assert_allclose(logprobs(result), chosen, rtol=1e-3, atol=1e-3)


def test_with_kernels_for_few_rows_what_only_they_read_is_bits() -> None:
    halves = jnp.array([[1.5, -2.0]])  # 0x3FC0, 0xC000
    params = {"layers": {"w": halves, "b": halves[0]}, "embed_VD": halves, "norm_D": halves[0]}
    twin = make_twin(params, native=True)
    np.testing.assert_array_equal(twin["layers"]["w"], np.array([[0x3FC0, 0xC000]], np.uint16))
    assert twin["embed_VD"].dtype == jnp.bfloat16
    assert twin["layers"]["b"] is params["layers"]["b"]
    shapes = twin_shapes(params, native=True)
    assert jax.tree.map(lambda x: x.dtype, shapes) == jax.tree.map(lambda x: x.dtype, twin)


def test_each_step_takes_what_it_is_quickest_with() -> None:
    params = {"layers": "wide", "embed_VD": "wide", "norm_D": "wide"}
    twin = {"layers": "bits", "embed_VD": "narrow", "norm_D": "wide"}
    few = partial(of_step, params, twin)
    assert few(1, native=False) is twin
    assert few(2, native=False) is params
    assert few(16, native=True) is twin
    # a large step samples few rows: they meet the head in bfloat16
    assert few(32, native=True) == {"layers": "wide", "embed_VD": "narrow", "norm_D": "wide"}
    assert of_step(params, None, 1, native=True) is params
