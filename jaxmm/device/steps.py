"""Every jit boundary of jaxmm: encode, upload, score, language and prime step. Traced.

The steps are compiled ahead of time, one executable for each bucket, and called by bucket; a call
can therefore never compile by accident. `Executables` keeps the executables and tells the ledger.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int32, UInt32

from jaxmm.device.backend import Backend
from jaxmm.device.image_rows import ImageRows, change_of_rows
from jaxmm.device.kv import KVPages, PagedAttention
from jaxmm.device.lane import Lane
from jaxmm.device.sampling import (
    Sampled,
    SampleParams,
    SamplerState,
    prime,
    remember,
    sample_rows,
)
from jaxmm.device.sharding import WHOLE
from jaxmm.host.batch import FLOAT_FIELDS, StepLayout
from kernels_pallas.ragged_paged_attention import Ragged
from kernels_pallas.scatter_rows import write_rows

Params = Mapping[str, Any]
Logits = Callable[[Array], Array]
"""Rows of a decoder's output to float32 logits."""

MAX_GATHERED_ROWS = 16384
"""Rows of all lanes that are gathered at once: 64 KiB of slots, 0.1 to 0.5 GB of rows."""
ROW_ALIGN = 64

MAX_SAMPLE_GROUP = 16
PALLAS_SAMPLE_GROUP = 128
"""On a TPU a row more costs little beside reading the head."""


def _encode_step(
    encoder: nnx.GraphDef[Any],
    backend: Backend,
    params: Params,
    arena: Float[Array, "R ..."],
    lane: Lane,
) -> Float[Array, "R ..."]:
    """Encode packed images into the arena: on each chip a lane, or one on all of them.

    Static: encoder, backend. Donated: arena. Bucketed: N, the patches of all lanes.
    Every chip gets the rows of all of them, since it has the whole arena. The arena's last row
    takes what padding writes.
    """

    def encode(params: Params, arena: Array, lane: Lane) -> Array:
        vision = nnx.merge(encoder, params)
        rows_MX = vision(lane)
        with jax.named_scope("arena"):
            return _write_gathered(backend, arena, rows_MX, lane.slot_M)

    present = {name for name, x in lane._asdict().items() if x is not None}
    lanes = backend.lane_spec
    specs: dict[str, Any] = {name: lanes if "_N" in name else WHOLE for name in present}
    weights = jax.tree.map_with_path(
        lambda path, _: backend.param_spec(("vision", *(key.key for key in path))), params
    )
    per_chip = backend.per_chip(encode, (weights, WHOLE, lane._replace(**specs)), WHOLE)
    return per_chip(params, arena, lane)


def _write_gathered(
    backend: Backend,
    arena: Float[Array, "R ..."],
    rows_MX: Float[Array, "M X"],
    slot_Y: Int32[Array, " Y"],
) -> Float[Array, "R ..."]:
    """Write the rows of all lanes into the arena of each chip, a piece of every lane at a time.

    All rows of many chips would take gigabytes, and their slots all of a core's scalar memory.

    Args:
        rows_MX: Of this chip's lane.
        slot_Y: Where each row of all lanes goes, lane after lane.
    """
    num_rows, num_lanes = len(rows_MX), backend.num_lanes
    slot_LM = slot_Y.reshape(num_lanes, num_rows)
    piece = max(ROW_ALIGN, MAX_GATHERED_ROWS // num_lanes // ROW_ALIGN * ROW_ALIGN)
    if num_rows <= piece:
        rows_YX = backend.gathered(rows_MX)
        return write_rows(arena, rows_YX, slot_Y, implementation=backend.kernels)

    def write(i: Int32[Array, ""], arena: Array) -> Array:
        start = jnp.minimum(i * piece, num_rows - piece)  # the last one writes some rows again
        rows_YX = backend.gathered(lax.dynamic_slice_in_dim(rows_MX, start, piece))
        slot_Y = lax.dynamic_slice_in_dim(slot_LM, start, piece, axis=1).reshape(-1)
        return write_rows(arena, rows_YX, slot_Y, implementation=backend.kernels)

    return lax.fori_loop(0, -(-num_rows // piece), write, arena)


def _upload_step(
    backend: Backend,
    arena: Float[Array, "R ..."],
    rows_MX: Float[Array, "M X"],
    slot_M: Int32[Array, " M"],
) -> Float[Array, "R ..."]:
    """Put rows that a caller gave into the arena.

    Static: backend. Donated: arena. M is always the same; the arena's last row takes the filler.
    """
    put = partial(write_rows, implementation=backend.kernels)
    return backend.per_chip(put, WHOLE, WHOLE)(arena, rows_MX, slot_M)


def _score_step(
    backend: Backend,
    width: int,
    arena: Float[Array, "R ..."],
    before_M: Int32[Array, " M"],
    after_M: Int32[Array, " M"],
) -> Float[Array, " M"]:
    """Compare rows of a video's steps; see `change_of_rows`.

    Static: backend, width of the text. M is always the same; -1 is filler.
    """
    return backend.whole(change_of_rows(arena, before_M, after_M, width, backend))


def _language_step(
    decoder: nnx.GraphDef[Any],
    backend: Backend,
    layout: StepLayout,
    params: Params,
    kv_pages: KVPages,
    state: SamplerState,
    arena: Float[Array, "R ..."],
    buffer: Int32[Array, " X"],
    allowed_BO: UInt32[Array, "B O"],
) -> tuple[KVPages, SamplerState, Sampled]:
    """Extend and decode one step's tokens, and sample.

    Static: decoder, backend, layout (the bucket). Donated: kv_pages, state. Bucketed: T.
    The token masks come beside the buffer: a step without grammars sends none, and gives the same
    array again, which is not read.
    """
    step = _unpack(layout, buffer)
    text = nnx.merge(decoder, params)
    with jax.named_scope("embed"):
        fed_T = state.last_B[jnp.maximum(step["feed_T"], 0)]
        ids_T = jnp.where(step["feed_T"] >= 0, fed_T, step["ids_T"])
        rows = ImageRows(arena, step["row_T"], backend)
        hidden_TD = rows.into(text.embed(ids_T).astype(kv_pages[0].dtype))
    ragged = Ragged(
        num_decodes=step["num_decodes"],
        num_sequences=step["num_sequences"],
        starts_B=step["starts_B"],
        counts_B=step["counts_B"],
        lengths_B=step["lengths_B"],
        tables_BQ=step["tables_BQ"],
        seen_T=step["seen_T"] if layout.both_ways else None,
    )
    few_are_sampled = layout.num_sequences < layout.num_tokens
    attention = PagedAttention.of_step(
        ragged,
        step["kv_slot_T"],
        step["num_tokens"],
        page_size=kv_pages[0].shape[2],
        backend=backend,
        wanted_B=step["sample_token_B"] if few_are_sampled else None,
    )
    hidden_XD, kv_pages = text(hidden_TD, step["positions_AT"], kv_pages, attention, rows)
    with jax.named_scope("sample"):
        group = _sample_group(layout, backend)
        logits: Logits = text.logits
        if backend.kernels == "portable" and group < layout.num_tokens:
            logits = partial(_logits_of_few, logits, step["num_samples"])
        if few_are_sampled:
            step["sample_token_B"] = jnp.arange(layout.num_sequences, dtype=jnp.int32)
        sampled = _sample(logits, hidden_XD, step, allowed_BO, state, group)
        state = remember(
            state,
            step["sample_slot_B"],
            sampled.token_B,
            step["num_samples"],
            step["any_penalty"] > 0,
        )
    return kv_pages, *backend.whole((state, sampled))


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


def _sample_group(layout: StepLayout, backend: Backend) -> int:
    """Rows whose logits are made together; the head is read once for each group."""
    num_tokens = layout.num_tokens
    if backend.kernels == "pallas":
        return math.gcd(layout.num_sequences, PALLAS_SAMPLE_GROUP)
    if num_tokens <= MAX_SAMPLE_GROUP:
        return num_tokens
    # Small steps are all decodes, large ones mostly prompt: few rows, often one.
    return MAX_SAMPLE_GROUP if num_tokens <= 2 * MAX_SAMPLE_GROUP else MAX_SAMPLE_GROUP // 2


def _logits_of_few(
    logits: Logits, num_samples: Int32[Array, ""], hidden_BD: Float[Array, "B D"]
) -> Float[Array, "B V"]:
    """Logits of a group of rows; where the step samples one, of that one, and zeros.

    The end of a prompt is mostly alone in its step, and on a CPU one row takes two thirds of the
    time that eight take.
    """

    def first(hidden_BD: Array) -> Array:
        return jnp.pad(logits(hidden_BD[:1]), ((0, len(hidden_BD) - 1), (0, 0)))

    few_BV: Array = lax.cond(num_samples == 1, first, logits, hidden_BD)
    return few_BV


def _sample(
    logits: Logits,
    hidden_XD: Float[Array, "X D"],
    step: Mapping[str, Array],
    allowed_BO: UInt32[Array, "B O"],
    state: SamplerState,
    group: int,
) -> Sampled:
    """Sample the rows that the host asked for, a group at a time: cost follows their number."""
    num_rows = step["sample_token_B"].shape[0]
    given = {**step, "slot_B": step["sample_slot_B"], "allowed_BO": allowed_BO}
    columns = SampleParams(**{name: given[name] for name in SampleParams._fields})

    def run(g: Int32[Array, ""], out: Sampled) -> Sampled:
        rows = SampleParams(*(lax.dynamic_slice_in_dim(c, g * group, group) for c in columns))
        token_B = lax.dynamic_slice_in_dim(step["sample_token_B"], g * group, group)
        hidden_BD = hidden_XD[token_B]
        sampled = sample_rows(
            logits(hidden_BD),
            rows,
            state,
            num_ids=step["num_ids"],
            any_random=step["any_random"] > 0,
            any_penalty=step["any_penalty"] > 0,
            any_masked=step["any_masked"] > 0,
            any_logprobs=step["any_logprobs"] > 0,
        )
        is_finite_B = jnp.isfinite(hidden_BD).all(axis=1)
        sampled = sampled._replace(token_B=jnp.where(is_finite_B, sampled.token_B, -1))
        return jax.tree.map(
            lambda o, s: lax.dynamic_update_slice_in_dim(o, s, g * group, 0), out, sampled
        )

    shapes = jax.eval_shape(
        lambda: sample_rows(
            logits(hidden_XD[:group]),
            SampleParams(*(c[:group] for c in columns)),
            state,
            num_ids=jnp.int32(0),
            any_random=jnp.bool(False),
            any_penalty=jnp.bool(False),
            any_masked=jnp.bool(False),
            any_logprobs=jnp.bool(False),
        )
    )
    empty = jax.tree.map(lambda s: jnp.zeros((num_rows, *s.shape[1:]), s.dtype), shapes)
    groups = (step["num_samples"] + group - 1) // group
    return lax.fori_loop(0, groups, run, empty)


def _prime_step(
    backend: Backend,
    state: SamplerState,
    slot: Int32[Array, ""],
    fresh: Array,
    prompt_X: Int32[Array, " X"],
    output_X: Int32[Array, " X"],
    bias_id_X: Int32[Array, " X"],
    bias_X: Float[Array, " X"],
) -> SamplerState:
    """Give a state slot its request's history and bias. See `prime`.

    Static: backend. Donated: state.
    """
    return backend.whole(prime(state, slot, fresh, prompt_X, output_X, bias_id_X, bias_X))


encode_step = jax.jit(
    _encode_step, static_argnames=("encoder", "backend"), donate_argnames=("arena",)
)
upload_step = jax.jit(_upload_step, static_argnames=("backend",), donate_argnames=("arena",))
score_step = jax.jit(_score_step, static_argnames=("backend", "width"))
language_step = jax.jit(
    _language_step,
    static_argnames=("decoder", "backend", "layout"),
    donate_argnames=("kv_pages", "state"),
)
prime_step = jax.jit(_prime_step, static_argnames=("backend",), donate_argnames=("state",))
