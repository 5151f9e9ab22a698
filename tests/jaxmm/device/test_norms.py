"""Normalisation against torch and transformers."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import Array
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRMSNorm

from jaxmm.device.norms import layer_norm, offset_rms_norm, rms_norm


def test_layer_norm_equals_torch() -> None:
    x, scale, bias = (
        np.random.default_rng(0).standard_normal(s, np.float32) for s in [(5, 32), 32, 32]
    )
    expected = torch.nn.functional.layer_norm(
        *(torch.from_numpy(x + 3), (32,), torch.from_numpy(scale), torch.from_numpy(bias)), eps=1e-6
    )
    out = layer_norm(jnp.asarray(x + 3), jnp.asarray(scale), jnp.asarray(bias), 1e-6)
    np.testing.assert_allclose(out, expected, atol=2e-5)


def test_rms_norm_equals_torch() -> None:
    x, scale = (np.random.default_rng(0).standard_normal(s, np.float32) for s in [(5, 32), 32])
    expected = torch.nn.functional.rms_norm(
        torch.from_numpy(x), (32,), torch.from_numpy(scale), eps=1e-6
    )
    out = rms_norm(jnp.asarray(x), jnp.asarray(scale), 1e-6)
    np.testing.assert_allclose(out, expected, atol=2e-6)


def test_bfloat16_is_normalised_in_float32() -> None:
    # 4096 equal values: a bfloat16 sum of squares would stop growing at 256
    x = jnp.full((1, 4096), 2.0, jnp.bfloat16)
    out = rms_norm(x, jnp.ones(4096, jnp.bfloat16), 1e-6)
    np.testing.assert_array_equal(out.astype(jnp.float32), 1.0)


def scaled_by_float32(x_TD: Array, weight_D: Array) -> Array:
    """As the norms of Gemma's queries and keys come to attention."""
    return rms_norm(x_TD, 1.0 + weight_D.astype(jnp.float32), 1e-6)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (Gemma3RMSNorm, lambda x, w: offset_rms_norm(x, w, 1e-6)),
        (Gemma3RMSNorm, scaled_by_float32),
        (Qwen3VLTextRMSNorm, lambda x, w: rms_norm(x, w, 1e-6)),
    ],
)
def test_bfloat16_is_rounded_where_transformers_rounds(theirs: type, ours: Callable) -> None:
    """Rounded at the other side of the scale, a quarter of the values would be others."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((400, 32), np.float32), rng.standard_normal(32, np.float32)
    norm = theirs(32, eps=1e-6).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(weight))
        expected = norm(torch.from_numpy(x).bfloat16()).float().numpy()
    found = ours(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16))
    assert found.dtype == jnp.bfloat16
    assert np.mean(np.asarray(found, np.float32) != expected) < 1e-3
