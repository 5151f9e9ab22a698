"""What the attention kernels share: softmax over keys, a block at a time. Traced.

Online softmax (arXiv:1805.02867) with powers of two; maxima, sums and outputs stay in float32.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from kernels_pallas.tiling import LANES

LOG2_E = math.log2(math.e)
VMEM_LIMIT_BYTES = 48 << 20
"""Leaves 16 MiB of the 64 of v5p and tpu7x to XLA; the other generations have 128."""
LOWEST = -1e30
"""Maximum of a row that has seen no key."""
MASKED = -2e38
"""A hidden score: so far below LOWEST that 2^(MASKED - LOWEST) is 0, never NaN."""


def scores(q: Any, key: Any, *, seen: Any | None, soft_cap: float | None = None) -> Any:
    """Scores of some query rows against one block of keys, hidden ones far below all others.

    Args:
        q: [rows, C], scaled.
        key: [keys, C].
        seen: bool[rows, keys], or None when every row sees every key.
        soft_cap: Natural units, or None.
    """
    score = lax.dot_general(q, key, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if soft_cap is not None:
        cap = soft_cap * LOG2_E
        score = cap * jnp.tanh(score / cap)
    return score if seen is None else jnp.where(seen, score, MASKED)


def absorb(
    score: Any, value: Any, max_ref: Any, sum_ref: Any, acc_ref: Any, *, first: Any | None = None
) -> None:
    """Add one block of keys to the running maximum, sum and output of some query rows.

    Args:
        score: float32[rows, keys], keys a multiple of 128.
        value: [keys, C].
        max_ref: float32[rows, 128], every lane alike.
        sum_ref: float32[rows, 128]; the sum is that of the lanes.
        acc_ref: float32[rows, C], not yet divided by the sum.
        first: Whether the running values are void (scalar); None: never.
    """
    channels = acc_ref.shape[1]
    old_max, old_sum, old_acc = max_ref[...], sum_ref[...], acc_ref[...]
    if first is not None:
        old_max = jnp.where(first, LOWEST, old_max)
        old_sum, old_acc = jnp.where(first, 0.0, old_sum), jnp.where(first, 0.0, old_acc)
    new_max = jnp.maximum(old_max, jnp.max(score, axis=1, keepdims=True))
    weight = jnp.exp2(score - _widen(new_max, score.shape[1]))
    fade = jnp.exp2(old_max - new_max)
    out = dot(weight.astype(value.dtype), value)
    max_ref[...] = new_max
    sum_ref[...] = fade * old_sum + _fold(weight)
    acc_ref[...] = _widen(fade, channels) * old_acc + out


def normalise(total: Any, acc: Any) -> Any:
    """Divide outputs by their sums; a row that saw no key gives zeros."""
    total = jnp.sum(total, axis=1, keepdims=True)
    return acc / jnp.where(total == 0.0, 1.0, total)


def _widen(x: Any, width: int) -> Any:
    """As many equal lanes as wanted, out of 128; no data moves."""
    if width < LANES:
        return x[:, :width]
    return jnp.concatenate([x] * (width // LANES), axis=1)


def _fold(x: Any) -> Any:
    """Add the groups of 128 lanes; crossing lanes waits until the end."""
    return sum(x[:, at : at + LANES] for at in range(0, x.shape[1], LANES))


def dot(x: Any, y: Any) -> Any:
    """Matrix product, summed in float32."""
    return jnp.dot(x, y, preferred_element_type=jnp.float32)
