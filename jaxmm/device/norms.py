"""Normalisation of the last axis, computed in float32. Traced."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(
    x_TD: Float[Array, "*T D"], scale_D: Float[Array, " D"], eps: float
) -> Float[Array, "*T D"]:
    """x over its root mean square, times a scale (arXiv:1910.07467), in the dtype of x.

    Rounded before a scale of that dtype, as Llama's and Qwen's norms are, and behind one that is
    float32, as Gemma's.
    """
    wide_TD = x_TD.astype(jnp.float32)
    square_T1 = jnp.mean(wide_TD * wide_TD, axis=-1, keepdims=True)
    normed_TD = wide_TD * lax.rsqrt(square_T1 + eps)
    product = jnp.promote_types(x_TD.dtype, scale_D.dtype)
    return (normed_TD.astype(product) * scale_D).astype(x_TD.dtype)


def layer_norm(
    x_TD: Float[Array, "*T D"],
    scale_D: Float[Array, " D"],
    bias_D: Float[Array, " D"],
    eps: float,
) -> Float[Array, "*T D"]:
    """Zero mean, unit variance, then scale and shift (arXiv:1607.06450), in the dtype of x."""
    wide_TD = x_TD.astype(jnp.float32)
    centred_TD = wide_TD - jnp.mean(wide_TD, axis=-1, keepdims=True)
    variance_T1 = jnp.mean(centred_TD * centred_TD, axis=-1, keepdims=True)
    y_TD = centred_TD * lax.rsqrt(variance_T1 + eps)
    return (y_TD * scale_D.astype(jnp.float32) + bias_D.astype(jnp.float32)).astype(x_TD.dtype)


def offset_rms_norm(
    x_TD: Float[Array, "*T D"], offset_D: Float[Array, " D"], eps: float
) -> Float[Array, "*T D"]:
    """`rms_norm` whose scale is 1 plus a weight, in float32."""
    return rms_norm(x_TD, 1.0 + offset_D.astype(jnp.float32), eps)
