"""The linear layer: weights stand as in the checkpoint files, outputs first. Traced."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels_pallas.native import MAX_ROWS, VECTOR
from kernels_pallas.tiling import LANES

_FEW_ROWS = 128
"""Up to this many rows XLA's CPU matmul is up to twice as fast with the weight on the left."""

MAX_WIDENED = 4095
"""Length of the longest row that XLA's CPU backend multiplies by weights that it widens meanwhile:
16 KiB of float32 are too many."""


def linear(
    x_TD: Float[Array, "T D"],
    weight_FD: Float[Array, "*F D"],
    bias_F: Float[Array, " F"] | None = None,
) -> Float[Array, "T *F"]:
    """x @ weight.T + bias, summed in float32, in the dtype of x.

    Float32 rows take weights in bfloat16, or uint16 with its bits, as the numbers that they are.
    """
    if _is_native(x_TD, weight_FD):
        return _native(x_TD, weight_FD, bias_F)
    if len(x_TD) == 1:
        y_TF = _one_row(x_TD, weight_FD)
    elif len(x_TD) <= _FEW_ROWS:
        y_TF = lax.platform_dependent(x_TD, weight_FD, cpu=_weight_left, default=_weight_right)
    else:
        y_TF = lax.platform_dependent(x_TD, weight_FD, cpu=_weight_in_place, default=_weight_right)
    if bias_F is not None:
        y_TF = y_TF + bias_F.astype(jnp.float32)
    return y_TF.astype(x_TD.dtype)


def gated_linear(
    x_TD: Float[Array, "T D"],
    weight_2FD: Float[Array, "2 F D"],
    bias_2F: Float[Array, "2 F"] | None = None,
) -> Float[Array, "T F"]:
    """silu(gate) * up of two linear layers of one input, the gate first (arXiv:2002.05202)."""
    is_native = _is_native(x_TD, weight_2FD)
    if is_native and len(x_TD) > MAX_ROWS:
        from kernels_pallas.native import many_rows

        return many_rows.gated_rows(x_TD, weight_2FD, bias_2F)
    if is_native or weight_2FD.shape[1] % LANES == 0:
        both_T2F = linear(x_TD, weight_2FD, bias_2F)
        gate_TF, up_TF = both_T2F[:, 0], both_T2F[:, 1]
    else:  # halves of one product that do not begin at a whole register are copied
        biases = (None, None) if bias_2F is None else bias_2F
        gate_TF, up_TF = (linear(x_TD, weight_2FD[i], biases[i]) for i in range(2))
    return jax.nn.silu(gate_TF) * up_TF


def summed_linear(
    x_TF: Float[Array, "T F"],
    weight_DF: Float[Array, "D F"],
    bias_D: Float[Array, " D"],
    axis: str | None,
) -> Float[Array, "T D"]:
    """The same where each chip has some of the inputs, and the weights of those: all get the sum.

    Args:
        x_TF: This chip's inputs.
        weight_DF: Their weights.
        bias_D: Whole.
        axis: Mesh axis that F is split over, within a `shard_map`; None: it is whole.
    """
    if axis is None:
        return linear(x_TF, weight_DF, bias_D)
    y_TD = lax.psum(linear(x_TF, weight_DF), axis)
    return (y_TD + bias_D.astype(jnp.float32)).astype(x_TF.dtype)


def _weight_left(x_TD: Array, weight_FD: Array) -> Array:
    # The barriers keep XLA from folding the transposes into the product, which would swap its
    # operands again.
    x_DT = lax.optimization_barrier(x_TD.T)
    y_FT = jnp.einsum("...D,DT->...T", weight_FD, x_DT, preferred_element_type=jnp.float32)
    return jnp.moveaxis(lax.optimization_barrier(y_FT), -1, 0)


def _weight_right(x_TD: Array, weight_FD: Array) -> Array:
    return jnp.tensordot(x_TD, weight_FD, (1, -1), preferred_element_type=jnp.float32)


def _weight_in_place(x_TD: Array, weight_FD: Array) -> Array:
    # A weight of three axes would be written out transposed in every step; as a batch it is not.
    # Nor by reshape: chips that each hold a part of F would have to put the weight together.
    if weight_FD.ndim == 2:
        return _weight_right(x_TD, weight_FD)
    x_GTD = jnp.broadcast_to(x_TD, (len(weight_FD), *x_TD.shape))
    y_GTF = jnp.einsum("GTD,GFD->GTF", x_GTD, weight_FD, preferred_element_type=jnp.float32)
    return jnp.moveaxis(y_GTF, 0, 1)


def _is_native(x_TD: Array, weight_FD: Array) -> bool:
    """Only where `Backend.native` holds are there bits, and narrower weights for what XLA would
    widen before it multiplies: several rows, or a long one."""
    narrower = x_TD.dtype == jnp.float32 and weight_FD.dtype == jnp.bfloat16
    is_widened = len(x_TD) > 1 or weight_FD.shape[-1] > MAX_WIDENED
    return weight_FD.dtype == jnp.uint16 or (narrower and is_widened)


def _native(x_TD: Array, weight_FD: Array, bias_F: Array | None) -> Array:
    from kernels_pallas.native import few_rows, many_rows

    flat_XD = weight_FD.reshape(-1, weight_FD.shape[-1])
    if len(x_TD) <= MAX_ROWS and flat_XD.shape[1] % VECTOR == 0:
        y_TF = few_rows.few_rows(x_TD, flat_XD).reshape(len(x_TD), *weight_FD.shape[:-1])
        return y_TF if bias_F is None else y_TF + bias_F
    flat_bias_X = None if bias_F is None else bias_F.reshape(-1)
    y_TX = many_rows.many_rows(x_TD, flat_XD, flat_bias_X)
    return y_TX.reshape(len(x_TD), *weight_FD.shape[:-1])


def _one_row(x_1D: Array, weight_FD: Array) -> Array:
    # In this form alone XLA's CPU backend widens the weights inside the product (`MAX_WIDENED`).
    flat_XD = weight_FD.reshape(-1, weight_FD.shape[-1]).astype(x_1D.dtype)
    return (x_1D @ flat_XD.T).reshape(1, *weight_FD.shape[:-1])
