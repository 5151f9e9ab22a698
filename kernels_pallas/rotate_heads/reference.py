"""What the rotation must equal (arXiv:2104.09864, GPT-NeoX's half-split form). Traced."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def rotate(
    x_THC: Float[Array, "T H C"], cos_TC: Float[Array, "T C"], sin_TC: Float[Array, "T C"]
) -> Float[Array, "T H C"]:
    """Rotate channel i with channel i + C/2, in float32; the sine is negative in the first half."""
    x_THC = x_THC.astype(jnp.float32)
    first, second = jnp.split(x_THC, 2, axis=-1)
    turned_THC = jnp.concatenate([second, first], axis=-1)
    return x_THC * cos_TC[:, None] + turned_THC * sin_TC[:, None]
