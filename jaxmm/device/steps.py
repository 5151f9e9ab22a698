"""Every jit boundary of jaxmm: encode, language and prime step, and their executables. Traced.

The steps are compiled ahead of time, one executable for each bucket, and called by bucket; a call
can therefore never compile by accident. `Executables` keeps the executables and tells the ledger.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int32

from jaxmm.device.image_rows import ImageRows
from jaxmm.device.kv import PagedAttention
from jaxmm.device.lane import Lane
from jaxmm.device.sampling import (
    Sampled,
    SampleParams,
    SamplerState,
    prime,
    remember,
    sample_rows,
)
from jaxmm.host.batch import FLOAT_FIELDS, StepLayout
from kernels_pallas.ragged_paged_attention import Ragged

Params = Mapping[str, Any]
KVPages = tuple[Float[Array, "P J S C"], ...]

MAX_SAMPLE_GROUP = 16


def _encode_step(
    encoder: nnx.GraphDef[Any], params: Params, arena_RX: Float[Array, "R X"], lane: Lane
) -> Float[Array, "R X"]:
    """Encode one lane of packed images into the arena.

    Static: encoder. Donated: arena_RX. Bucketed: N, the lane's patches.
    The arena's last row takes what padding writes.
    """
    vision = nnx.merge(encoder, params)
    rows_MX = vision(lane).astype(arena_RX.dtype)

    def write(m: Int32[Array, ""], arena: Array) -> Array:
        return lax.dynamic_update_slice(
            arena, lax.dynamic_slice_in_dim(rows_MX, m, 1), (lane.slot_M[m], 0)
        )

    with jax.named_scope("arena"):
        return lax.fori_loop(0, lane.slot_M.shape[0], write, arena_RX)


def _language_step(
    decoder: nnx.GraphDef[Any],
    layout: StepLayout,
    params: Params,
    kv_pages: KVPages,
    state: SamplerState,
    arena_RX: Float[Array, "R X"],
    buffer: Int32[Array, " X"],
) -> tuple[KVPages, SamplerState, Sampled]:
    """Extend and decode one step's tokens, and sample.

    Static: decoder, layout (the bucket). Donated: kv_pages, state. Bucketed: T.
    """
    step = _unpack(layout, buffer)
    text = nnx.merge(decoder, params)
    with jax.named_scope("embed"):
        fed_T = state.last_B[jnp.maximum(step["feed_T"], 0)]
        ids_T = jnp.where(step["feed_T"] >= 0, fed_T, step["ids_T"])
        rows = ImageRows(arena_RX, step["row_T"])
        hidden_TD = rows.into(text.embed(ids_T))
    attention = PagedAttention(
        slot_T=step["kv_slot_T"],
        num_tokens=step["num_tokens"],
        ragged=Ragged(
            num_decodes=step["num_decodes"],
            num_sequences=step["num_sequences"],
            starts_B=step["starts_B"],
            counts_B=step["counts_B"],
            lengths_B=step["lengths_B"],
            tables_BQ=step["tables_BQ"],
        ),
    )
    hidden_TD, kv_pages = text(hidden_TD, step["positions_AT"], kv_pages, attention, rows)
    with jax.named_scope("sample"):
        sampled = _sample(text.logits, hidden_TD, step, state)
        state = remember(
            state,
            step["sample_slot_B"],
            sampled.token_B,
            step["num_samples"],
            step["any_penalty"] > 0,
        )
    return kv_pages, state, sampled


def _unpack(layout: StepLayout, buffer: Int32[Array, " X"]) -> dict[str, Array]:
    """The fields of a step's buffer."""
    fields = {}
    for name, (offset, shape) in layout.fields.items():
        size = 1
        for n in shape:
            size *= n
        flat = lax.slice(buffer, (offset,), (offset + size,))
        if name in FLOAT_FIELDS:
            flat = lax.bitcast_convert_type(flat, jnp.float32)
        fields[name] = flat.reshape(shape)
    return fields


def _sample_group(num_tokens: int) -> int:
    """Rows whose logits are made together; the head is read once for each group."""
    if num_tokens <= MAX_SAMPLE_GROUP:
        return num_tokens
    # Small steps are all decodes, large ones mostly prompt: few rows, often one.
    return MAX_SAMPLE_GROUP if num_tokens <= 2 * MAX_SAMPLE_GROUP else MAX_SAMPLE_GROUP // 2


def _sample(
    logits: Callable[[Array], Array],
    hidden_TD: Float[Array, "T D"],
    step: Mapping[str, Array],
    state: SamplerState,
) -> Sampled:
    """Sample the rows that the host asked for, a group at a time: cost follows their number."""
    num_tokens, num_rows = hidden_TD.shape[0], step["sample_token_B"].shape[0]
    group = _sample_group(num_tokens)
    names = SampleParams._fields
    columns = SampleParams(
        step["sample_slot_B"],
        **{name: step[name] for name in names if name != "slot_B"},
    )

    def run(g: Int32[Array, ""], out: Sampled) -> Sampled:
        rows = SampleParams(*(lax.dynamic_slice_in_dim(c, g * group, group) for c in columns))
        token_B = lax.dynamic_slice_in_dim(step["sample_token_B"], g * group, group)
        sampled = sample_rows(
            logits(hidden_TD[token_B]),
            rows,
            state,
            num_ids=step["num_ids"],
            any_random=step["any_random"] > 0,
            any_penalty=step["any_penalty"] > 0,
            any_logprobs=step["any_logprobs"] > 0,
        )
        return jax.tree.map(
            lambda o, s: lax.dynamic_update_slice_in_dim(o, s, g * group, 0), out, sampled
        )

    shapes = jax.eval_shape(
        lambda: sample_rows(
            logits(hidden_TD[:group]),
            SampleParams(*(c[:group] for c in columns)),
            state,
            num_ids=jnp.int32(0),
            any_random=jnp.bool(False),
            any_penalty=jnp.bool(False),
            any_logprobs=jnp.bool(False),
        )
    )
    empty = jax.tree.map(lambda s: jnp.zeros((num_rows, *s.shape[1:]), s.dtype), shapes)
    groups = (step["num_samples"] + group - 1) // group
    return lax.fori_loop(0, groups, run, empty)


def _prime_step(
    state: SamplerState,
    slot: Int32[Array, ""],
    fresh: Array,
    prompt_X: Int32[Array, " X"],
    output_X: Int32[Array, " X"],
    bias_id_X: Int32[Array, " X"],
    bias_X: Float[Array, " X"],
) -> SamplerState:
    """Give a state slot its request's history and bias. Donated: state. See `prime`."""
    return prime(state, slot, fresh, prompt_X, output_X, bias_id_X, bias_X)


encode_step = jax.jit(_encode_step, static_argnames=("encoder",), donate_argnames=("arena_RX",))
language_step = jax.jit(
    _language_step,
    static_argnames=("decoder", "layout"),
    donate_argnames=("kv_pages", "state"),
)
prime_step = jax.jit(_prime_step, donate_argnames=("state",))
