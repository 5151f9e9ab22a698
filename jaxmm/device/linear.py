"""Linear layers with weights stored [out, in], as checkpoints have them. Traced."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

_FEW_ROWS = 64


def linear(
    x_TD: Float[Array, "T D"],
    weight_FD: Float[Array, "F D"],
    bias_F: Float[Array, " F"] | None = None,
) -> Float[Array, "T F"]:
    """x @ weight.T + bias, accumulated in float32."""
    if x_TD.shape[0] <= _FEW_ROWS and jax.default_backend() == "cpu":
        # few rows: the weight as left operand streams it once (docs/decisions)
        y_FT = lax.dot_general(
            weight_FD, x_TD, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        y_TF = y_FT.T
    else:
        y_TF = lax.dot_general(
            x_TD, weight_FD, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
    if bias_F is not None:
        y_TF = y_TF + bias_F
    return y_TF.astype(x_TD.dtype)
