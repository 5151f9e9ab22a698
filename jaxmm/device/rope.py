"""Rotary embedding of pairs half a head apart. Traced."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float


class Rope(NamedTuple):
    """Tables of a step, float32, made once and read by every layer."""

    cos_TX: Float[Array, "T X"]
    """X is C/2."""
    sin_T2X: Float[Array, "T 2 X"]
    """Minus the sine for the first half of a head, plus it for the second."""

    @classmethod
    def of(cls, angle_TX: Float[Array, "T X"]) -> "Rope":
        """Tables of each token's C/2 angles."""
        sin_TX = jnp.sin(angle_TX)
        # Else XLA computes them again in each layer; on a CPU, where a cosine alone would be fused
        # with what reads it behind the barrier too, one array of all three keeps it from that.
        table_T3X = lax.optimization_barrier(
            jnp.stack([-sin_TX, sin_TX, jnp.cos(angle_TX)], axis=1)
        )
        return cls(table_T3X[:, 2], table_T3X[:, :2])

    def whole_heads(self) -> tuple[Float[Array, "T C"], Float[Array, "T C"]]:
        """Cosine and sine for all C channels; the sine is negative in the first half."""
        return jnp.tile(self.cos_TX, 2), self.sin_T2X.reshape(len(self.sin_T2X), -1)


def rotate(x_THC: Float[Array, "T H C"], rope: Rope) -> Float[Array, "T H C"]:
    """Rotate channel i with channel i + C/2 (arXiv:2104.09864, GPT-NeoX's half-split form).

    Returns:
        The rotated heads in x's dtype, computed in float32.
    """
    num_tokens, num_heads, channels = x_THC.shape
    halves_TH2X = x_THC.astype(jnp.float32).reshape(num_tokens, num_heads, 2, channels // 2)
    # Reversing an axis of two swaps the halves without a concatenation, which XLA's CPU backend
    # computes element by element.
    turned_TH2X = (
        halves_TH2X * rope.cos_TX[:, None, None] + halves_TH2X[:, :, ::-1] * rope.sin_T2X[:, None]
    )
    return turned_TH2X.reshape(x_THC.shape).astype(x_THC.dtype)
