"""The linear layer against numpy, for few rows and for many."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmm.device.linear import linear


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
