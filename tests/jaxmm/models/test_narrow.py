"""Weights in bfloat16 where steps are in float32: the same numbers, so the same answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmm.config import EngineConfig, load_config
from jaxmm.device.linear import MAX_WIDENED, linear
from jaxmm.engine import Engine
from jaxmm.models import read_config
from jaxmm.models.loading import load_params, param_shapes
from jaxmm.models.narrow import (
    as_bits,
    bfloat16_parts,
    bits_shapes,
    make_twin,
    of_step,
    twin_shapes,
)
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
    for dtype, expected in (("bfloat16", ("vision", "text")), ("float32", ())):
        directory = checkpoint("qwen2_5_vl", dtype=dtype)
        assert bfloat16_parts(directory, read_config(directory)) == expected


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
        assert engine.replicas[0].runner.backend.native is (
            kernels == "auto" and native.is_available()
        )
        alone = ask(engine, request(*questions[0]))
        together = ask(engine, *(request(*question) for question in questions[1:]))
    for (messages, images), result in zip(questions, alone + together, strict=True):
        expected, scores = greedy(
            directory, messages, images, 16, max_pixels=SMALL["media.max_pixels"]
        )
        assert list(result.token_ids) == expected
        chosen = scores[np.arange(16), expected]
        np.testing.assert_allclose(logprobs(result), chosen, rtol=1e-3, atol=1e-3)


def test_what_only_the_kernels_read_is_bits() -> None:
    halves = np.array([[1.5, -2.0]], np.float32)  # 0x3FC0, 0xC000
    bits = as_bits(("text", "layers", 0, "qkv_OD"), halves)
    np.testing.assert_array_equal(bits, np.array([[0x3FC0, 0xC000]], np.uint16))
    embed = as_bits(("text", "embed_VD"), halves)
    assert embed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(embed.astype(np.float32), halves)
    for path in (("vision", "patch_EU"), ("vision", "positions_XE"), ("vision", "row_ED")):
        assert as_bits(path, halves) is halves
    assert as_bits(("vision", "layers", 0, "qkv_3O"), halves) is halves


def test_shapes_are_those_of_what_is_loaded() -> None:
    directory = checkpoint("qwen2_5_vl", dtype="bfloat16")
    config = read_config(directory)
    loaded = load_params(directory, config, np.float32, as_bits)
    shapes = bits_shapes(param_shapes(config, np.float32), ("vision", "text"))
    loaded, shapes = jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), (loaded, shapes))
    assert loaded == shapes


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_no_matrix_of_a_layer_is_left_in_float32(family: str) -> None:
    """Its family would be slow, and nobody the wiser."""
    shapes = param_shapes(read_config(checkpoint(family)), np.float32)
    shapes = bits_shapes(shapes, ("vision", "text"))
    for path, x in jax.tree.leaves_with_path(shapes):
        is_bias = path[-1].key in ("qkv_3O", "gate_up_2F")
        if len(x.shape) > 1 and path[1].key == "layers":
            assert x.dtype == (np.float32 if is_bias else np.uint16), path


def test_without_kernels_one_token_alone_takes_the_twin() -> None:
    params, twin = {"layers": "wide"}, {"layers": "narrow"}
    assert of_step(params, twin, 1) is twin
    assert of_step(params, twin, 2) is params
    assert of_step(params, None, 1) is params
