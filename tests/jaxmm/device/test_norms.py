"""Normalisation against torch."""

import jax.numpy as jnp
import numpy as np
import torch

from jaxmm.device.norms import layer_norm, rms_norm


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
