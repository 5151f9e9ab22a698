"""Mixture of experts: each token through a few of many MLPs, sorted by expert. Traced.

    tokens      a b c        with the experts that the router chose:  a: 2 0   b: 0 1   c: 2 1
    sorted      a b | b c | a c        one run of rows for each expert
                 0     1     2         each run is multiplied by its own expert's weights
    back        a b c                  weighted and summed

On a TPU the runs are one ragged matmul. XLA's CPU backend computes a ragged dot as a dense one
over all experts; there a loop takes the runs in blocks, so that the cost follows the rows.

Several chips have so many whole experts each. The rows of a chip's experts follow each other, so a
chip turns them to the front, multiplies them alone, and the sums over tokens are added up; nothing
else is sent (docs/decisions/experts-by-chips.md).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxmm.device.backend import Backend
from jaxmm.device.sharding import MESH_AXIS, WHOLE, spec_of

_BLOCK = 16
"""Rows of one turn of the CPU loop."""


class Routing(NamedTuple):
    """Which experts take which tokens; M = T * experts of a token."""

    order_M: Int32[Array, " M"]
    """Pairs of token and expert, sorted by expert: index into [T, experts of a token]."""
    counts_Z: Int32[Array, " Z"]
    """Rows of each expert."""
    weight_M: Float[Array, " M"]
    """Share of each pair in its token's output, sorted likewise."""


def route(logits_TZ: Float[Array, "T Z"], per_token: int) -> Routing:
    """Choose the `per_token` most likely experts; their probabilities are made to sum to 1."""
    chance_TZ = jax.nn.softmax(logits_TZ.astype(jnp.float32), axis=-1)
    top_TX, expert_TX = lax.top_k(chance_TZ, per_token)
    top_TX = top_TX / top_TX.sum(axis=-1, keepdims=True)
    return sort_pairs(expert_TX, top_TX, logits_TZ.shape[1])


def route_scores(
    scores_TZ: Float[Array, "T Z"],
    bias_Z: Float[Array, " Z"] | None,
    per_token: int,
    *,
    shares: bool,
    scale: float,
) -> Routing:
    """Choose experts by score plus a bias, and weight them by the score (arXiv:2412.19437, §2.1.2).

    Args:
        scores_TZ: Float32, of every expert.
        bias_Z: What keeps the experts' loads even; None: there is none.
        per_token: Experts of a token.
        shares: The chosen scores are divided by their sum.
        scale: What they are multiplied by then.
    """
    biased_TZ = scores_TZ if bias_Z is None else scores_TZ + bias_Z.astype(jnp.float32)
    _, expert_TX = lax.top_k(biased_TZ, per_token)
    weight_TX = jnp.take_along_axis(scores_TZ, expert_TX, axis=1)
    if shares:
        weight_TX /= weight_TX.sum(axis=-1, keepdims=True) + 1e-20
    return sort_pairs(expert_TX, weight_TX * scale, scores_TZ.shape[1])


def sort_pairs(
    expert_TX: Int32[Array, "T X"], weight_TX: Float[Array, "T X"], num_experts: int
) -> Routing:
    """Lay the pairs of token and expert out by expert."""
    expert_M = expert_TX.reshape(-1).astype(jnp.int32)
    order_M = jnp.argsort(expert_M, stable=True).astype(jnp.int32)
    counts_Z = jnp.zeros(num_experts, jnp.int32).at[expert_M].add(1)
    return Routing(order_M, counts_Z, weight_TX.reshape(-1)[order_M])


def expert_mlp(
    x_TD: Float[Array, "T D"],
    gate_up_ZDO: Float[Array, "Z D 2*F"],
    down_ZFD: Float[Array, "Z F D"],
    routing: Routing,
    backend: Backend,
) -> Float[Array, "T D"]:
    """Weighted sum of the chosen experts' SwiGLU outputs, in the dtype of x."""
    mlp = backend.per_chip(
        partial(_own_experts, backend.num_shards),
        (WHOLE, spec_of("ZDO"), spec_of("ZFD"), WHOLE),
        WHOLE,
    )
    summed_TD: Array = mlp(x_TD, gate_up_ZDO, down_ZFD, routing)
    return summed_TD


def _own_experts(
    num_chips: int,
    x_TD: Float[Array, "T D"],
    gate_up_ZDO: Float[Array, "Z D 2*F"],
    down_ZFD: Float[Array, "Z F D"],
    routing: Routing,
) -> Float[Array, "T D"]:
    """The same with the experts that this chip has, and the sum over chips."""
    num_rows, num_own = len(routing.order_M), len(gate_up_ZDO)
    per_token = num_rows // len(x_TD)
    order_M, counts_Z, weight_M = routing
    if num_chips > 1:
        first = lax.axis_index(MESH_AXIS["Z"]) * num_own
        before = jnp.where(jnp.arange(len(counts_Z)) < first, counts_Z, 0).sum()
        counts_Z = lax.dynamic_slice_in_dim(counts_Z, first, num_own)
        order_M, weight_M = jnp.roll(order_M, -before), jnp.roll(weight_M, -before)
    y_MD = lax.platform_dependent(
        x_TD[order_M // per_token],
        gate_up_ZDO,
        down_ZFD,
        counts_Z,
        cpu=by_blocks,
        default=by_ragged_dot,
    )
    weighted_MD = (y_MD * weight_M[:, None].astype(y_MD.dtype)).astype(jnp.float32)
    if num_chips > 1:  # rows of other chips' experts are whatever memory held
        own_M = jnp.arange(num_rows) < counts_Z.sum()
        weighted_MD = jnp.where(own_M[:, None], weighted_MD, 0)
    back_MD = jnp.zeros_like(weighted_MD).at[order_M].set(weighted_MD, unique_indices=True)
    sum_TD = back_MD.reshape(len(x_TD), per_token, -1).sum(axis=1).astype(x_TD.dtype)
    return lax.psum(sum_TD, MESH_AXIS["Z"]) if num_chips > 1 else sum_TD


def by_ragged_dot(
    x_MD: Float[Array, "M D"],
    gate_up_ZDO: Float[Array, "Z D 2*F"],
    down_ZFD: Float[Array, "Z F D"],
    counts_Z: Int32[Array, " Z"],
) -> Float[Array, "M D"]:
    """Each run of rows through its expert, as two ragged matmuls."""
    up_MO = lax.ragged_dot(x_MD, gate_up_ZDO, counts_Z, preferred_element_type=jnp.float32)
    up_MF = _gated(up_MO).astype(x_MD.dtype)
    y_MD = lax.ragged_dot(up_MF, down_ZFD, counts_Z, preferred_element_type=jnp.float32)
    return y_MD.astype(x_MD.dtype)


def by_blocks(
    x_MD: Float[Array, "M D"],
    gate_up_ZDO: Float[Array, "Z D 2*F"],
    down_ZFD: Float[Array, "Z F D"],
    counts_Z: Int32[Array, " Z"],
) -> Float[Array, "M D"]:
    """Each run of rows through its expert, a block of rows at a time; rows after them give zeros.

    A block at the end of a run holds rows of the next one as well; that one's first block, which
    begins where the run does, overwrites them.
    """
    stop_Z = jnp.cumsum(counts_Z)
    padded_MD = jnp.pad(x_MD, ((0, _BLOCK), (0, 0)))

    def run(state: tuple[Array, Array]) -> tuple[Array, Array]:
        start, y_MD = state
        expert = jnp.searchsorted(stop_Z, start, side="right")
        x_BD = lax.dynamic_slice_in_dim(padded_MD, start, _BLOCK)
        up_BO = jnp.dot(x_BD, gate_up_ZDO[expert], preferred_element_type=jnp.float32)
        up_BF = _gated(up_BO).astype(x_MD.dtype)
        y_BD = jnp.dot(up_BF, down_ZFD[expert], preferred_element_type=jnp.float32)
        y_MD = lax.dynamic_update_slice_in_dim(y_MD, y_BD.astype(y_MD.dtype), start, 0)
        return jnp.minimum(start + _BLOCK, stop_Z[expert]), y_MD

    state = (jnp.int32(0), jnp.zeros_like(padded_MD))
    _, y_MD = lax.while_loop(lambda state: state[0] < stop_Z[-1], run, state)
    return y_MD[: len(x_MD)]


def _gated(gate_up_MO: Float[Array, "M 2*F"]) -> Float[Array, "M F"]:
    gate_MF, up_MF = jnp.split(gate_up_MO, 2, axis=1)
    return jax.nn.silu(gate_MF) * up_MF
