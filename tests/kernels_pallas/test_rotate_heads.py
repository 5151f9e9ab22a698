"""Rotary kernels in the TPU interpreter, against the plain formula."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.rotate_heads import Norms, rotate_grouped, rotate_packed, takes_packed
from kernels_pallas.rotate_heads.reference import rotate
from tests.kernels_pallas.interpreter import interpret

FLOAT32_TOLERANCE = 1e-6
"""Two products and a sum, in another order."""
BFLOAT16_TOLERANCE = 2**-7
"""The result is rounded to 8 bits; it is below 8."""


def tables(num: int, channels: int) -> tuple[np.ndarray, np.ndarray]:
    angle = np.random.default_rng(0).uniform(-3, 3, (num, channels // 2)).astype(np.float32)
    sin = np.sin(angle)
    return np.concatenate([np.cos(angle)] * 2, 1), np.concatenate([-sin, sin], 1)


def test_reference_on_numbers_worked_out_by_hand() -> None:
    # a quarter turn: (1, 2) and (3, 4) are pairs (1, 3), (2, 4); (x, y) becomes (-y, x)
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = np.zeros((1, 4)), np.array([[-1.0, -1.0, 1.0, 1.0]])
    assert rotate(x, cos, sin).ravel().tolist() == [-3.0, -4.0, 1.0, 2.0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("with_norms", [False, True])
def test_grouped_heads(dtype: type, with_norms: bool) -> None:
    T, K, G, C = 48, 2, 3, 128
    rng = np.random.default_rng(1)
    qkv = rng.normal(size=(T, K * (G + 2) * C)).astype(dtype)
    cos, sin = tables(T, C)
    scales = [rng.uniform(0.5, 1.5, C).astype(np.float32) for _ in range(2)]
    norms = Norms(*scales) if with_norms else None
    options = {"num_kv_heads": K, "scale": 0.3, "norms": norms, "eps": 1e-6}
    q, kv = interpret(rotate_grouped, qkv, cos, sin, **options)
    heads = qkv.astype(np.float32).reshape(T, K, G + 2, C)

    def normed(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        if not with_norms:
            return x
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    wanted_q = rotate(normed(heads[:, :, :G], scales[0]).reshape(T, K * G, C), cos, sin) * 0.3
    wanted_k = rotate(normed(heads[:, :, G], scales[1]), cos, sin)
    wanted_kv = np.stack([wanted_k, heads[:, :, G + 1]], axis=2)
    tolerance = FLOAT32_TOLERANCE if dtype == jnp.float32 else BFLOAT16_TOLERANCE
    for got, wanted in ((q, wanted_q), (kv, wanted_kv)):
        np.testing.assert_allclose(
            got.astype(np.float32), wanted.reshape(T, -1), atol=4 * tolerance, rtol=tolerance
        )


@pytest.mark.parametrize(("heads", "channels"), [(16, 80), (2, 64), (1, 128), (16, 72)])
@pytest.mark.parametrize("keys_by_head", [False, True])
def test_packed_heads(heads: int, channels: int, keys_by_head: bool) -> None:
    N = 32
    qkv = np.random.default_rng(2).normal(size=(N, 3 * heads * channels)).astype(np.float32)
    cos, sin = tables(N, channels)
    got = interpret(rotate_packed, qkv, cos, sin, scale=0.3, keys_by_head=keys_by_head)
    q, k, _ = qkv.reshape(N, 3, heads, channels).swapaxes(0, 1)
    k = rotate(k, cos, sin)
    wanted_k = k.swapaxes(0, 1) if keys_by_head else k.reshape(N, -1)
    wanted_q = (rotate(q, cos, sin) * 0.3).reshape(N, -1)
    for x, y in zip(got, (wanted_q, wanted_k), strict=True):
        np.testing.assert_allclose(x, y, atol=4 * FLOAT32_TOLERANCE, rtol=FLOAT32_TOLERANCE)


def test_heads_that_do_not_fill_registers_are_refused() -> None:
    assert takes_packed(16, 80) and takes_packed(16, 72) and not takes_packed(4, 80)
    cos, sin = tables(8, 80)
    with pytest.raises(ValueError, match="do not fill"):
        rotate_packed(jnp.zeros((8, 3 * 4 * 80)), cos, sin, scale=1.0, keys_by_head=False)
