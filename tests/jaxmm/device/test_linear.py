"""The linear layer against numpy, for few rows and for many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmm.device.linear import MAX_WIDENED, gated_linear, linear
from kernels_pallas import native
from tests.engines import cache_dir


@pytest.mark.parametrize("rows", [1, 64, 65])
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_equals_numpy(rows: int, with_bias: bool) -> None:
    random = np.random.default_rng(rows)
    x = random.standard_normal((rows, 24), np.float32)
    weight = random.standard_normal((40, 24), np.float32)
    bias = random.standard_normal(40, np.float32) if with_bias else None
    expected = x.astype(np.float64) @ weight.T + (0.0 if bias is None else bias)
    np.testing.assert_allclose(jax.jit(linear)(x, weight, bias), expected, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 64, 160])
def test_weight_of_three_axes_gives_outputs_of_two(rows: int) -> None:
    random = np.random.default_rng(rows)
    x = random.standard_normal((rows, 24), np.float32)
    weight = random.standard_normal((2, 40, 24), np.float32)
    expected = np.stack([x.astype(np.float64) @ part.T for part in weight], axis=1)
    np.testing.assert_allclose(jax.jit(linear)(x, weight), expected, atol=1e-5)


def test_large_step_writes_no_transposed_copy_of_a_weight() -> None:
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((160, 96), (2, 256, 96))]
    text = jax.jit(linear).lower(*shapes).compile().as_text()
    assert "f32[96,512]" not in text, "D first: the weight was transposed"


@pytest.mark.parametrize("rows", [1, 65])
def test_bfloat16_sums_are_float32(rows: int) -> None:
    # 1 + 511 * 2^-9: bfloat16 sums would stay at 1, float32 ones reach 1.998, which rounds to 2
    x = jnp.full((rows, 512), 2.0**-9, jnp.bfloat16).at[:, 0].set(1.0)
    y = linear(x, jnp.ones((3, 512), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y.astype(jnp.float32), 2.0)


@pytest.fixture
def has_kernels() -> None:
    if not native.is_available():
        pytest.skip("no numba, or another jaxlib")
    native.register(cache_dir())


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 65])
@pytest.mark.parametrize("width", [128, 40])
@pytest.mark.usefixtures("has_kernels")
def test_gated_layer_of_any_form_is_the_same(rows: int, width: int) -> None:
    """In float32, and from the bits of bfloat16; with a bias, and without."""
    random = np.random.default_rng(rows)
    x = random.standard_normal((rows, 32), np.float32)
    weight = jnp.asarray(random.standard_normal((2, width, 32)), jnp.bfloat16)
    bits = jax.lax.bitcast_convert_type(weight, jnp.uint16)
    for bias in (None, random.standard_normal((2, width), np.float32)):
        gate, up = (x.astype(np.float64) @ np.asarray(w, np.float64).T for w in weight)
        if bias is not None:
            gate, up = gate + bias[0], up + bias[1]
        expected = gate / (1 + np.exp(-gate)) * up
        for given in (bits, weight.astype(jnp.float32)):
            y = jax.jit(gated_linear)(x, given, bias)
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.usefixtures("has_kernels")
def test_no_step_widens_a_head_before_it_multiplies(rows: int) -> None:
    """A row of more than `MAX_WIDENED` is one that XLA would."""
    x = jax.ShapeDtypeStruct((rows, MAX_WIDENED + 1), jnp.float32)
    head = jax.ShapeDtypeStruct((4096, MAX_WIDENED + 1), jnp.bfloat16)
    memory = jax.jit(linear).lower(x, head).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1 << 20  # in float32 it is 64 MiB
