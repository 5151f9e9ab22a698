"""Plan -> StepBatch: everything one language step needs, in one int32 buffer. Host only.

One buffer is one transfer to the device, and one message to another host. `StepLayout` says where
each field lies; the device reads the same layout back.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.host.plan import Plan
from jaxmm.host.sequence import Sequence
from jaxmm.request import MAX_STOP_TOKEN_IDS

MAX_BANNED = MAX_STOP_TOKEN_IDS + 8
"""Ids that `min_tokens` can hold back: a request's stop ids and the model's own end ids."""

FLOAT_FIELDS = frozenset(
    {
        "temperature_B",
        "top_p_B",
        "min_p_B",
        "repetition_B",
        "presence_B",
        "frequency_B",
    }
)


@dataclass(frozen=True)
class StepLayout:
    """Names, shapes and places of a step's fields, for one bucket of tokens."""

    num_tokens: int
    """T, the bucket."""
    num_sequences: int
    """B, the most sequences of a step; a constant of the engine."""
    num_table_pages: int
    """Q, pages of the longest request."""
    num_mask_words: int
    """O, words of a token mask."""
    both_ways: bool = False
    """Tokens of an item see each other, later ones too."""

    @cached_property
    def fields(self) -> Mapping[str, tuple[int, tuple[int, ...]]]:
        """Name -> (offset in the buffer, shape)."""
        t, b, q = self.num_tokens, self.num_sequences, self.num_table_pages
        shapes: dict[str, tuple[int, ...]] = {
            # how much of the padded arrays is real
            "num_tokens": (),
            "num_decodes": (),
            "num_sequences": (),
            "num_samples": (),
            "num_ids": (),  # ids that may be sampled; logits beyond are padding
            # 1 when any sampled row needs the dearer path
            "any_random": (),
            "any_penalty": (),
            "any_masked": (),
            "any_logprobs": (),
            # tokens
            "ids_T": (t,),
            "feed_T": (t,),  # state slot whose last sampled token is the input; -1: ids_T
            "row_T": (t,),  # arena row; -1: text
            "positions_AT": (3, t),
            "kv_slot_T": (t,),
            # sequences: decodes, then extends
            "starts_B": (b,),
            "counts_B": (b,),
            "lengths_B": (b,),
            "tables_BQ": (b, q),
            # rows to sample
            "sample_token_B": (b,),
            "sample_slot_B": (b,),
            "temperature_B": (b,),
            "top_k_B": (b,),
            "top_p_B": (b,),
            "min_p_B": (b,),
            "repetition_B": (b,),
            "presence_B": (b,),
            "frequency_B": (b,),
            "num_bias_B": (b,),
            "seed_B2": (b, 2),
            "draw_B": (b,),  # how many tokens the sequence drew before this one
            "num_banned_B": (b,),
            "banned_BX": (b, MAX_BANNED),
        }
        if self.both_ways:
            shapes["seen_T"] = (t,)  # last key that the token sees
        offset, fields = 0, {}
        for name, shape in shapes.items():
            fields[name] = (offset, shape)
            offset += math.prod(shape)
        return fields

    @property
    def size(self) -> int:
        """Words in the buffer."""
        return sum(math.prod(shape) for _, shape in self.fields.values())


class StepBatch:
    """One step's buffer, with a writable view for each field."""

    def __init__(self, layout: StepLayout) -> None:
        self.layout = layout
        self.buffer: npt.NDArray[np.int32] = np.zeros(layout.size, np.int32)
        self.allowed_BO: npt.NDArray[np.uint32] | None = None
        """Token masks of the rows to sample; None when no row has one."""
        self._views = {
            name: self._view(name, offset, shape) for name, (offset, shape) in layout.fields.items()
        }

    def _view(self, name: str, offset: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        flat = self.buffer[offset : offset + math.prod(shape)]
        return (flat.view(np.float32) if name in FLOAT_FIELDS else flat).reshape(shape)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._views[name]


class SampleRow(NamedTuple):
    """One row that a step samples: the sequence, and which of its output tokens that will be."""

    sequence: Sequence
    output_index: int


def sampled_rows(plan: Plan) -> list[SampleRow]:
    """Rows that a plan samples, in the order in which the step gives them back."""
    rows = [SampleRow(s, token_index + 1 - s.prompt.num_tokens) for s, token_index in plan.decodes]
    rows += [
        SampleRow(s, span.stop - s.prompt.num_tokens)
        for s, span, samples in plan.extends
        if samples
    ]
    return rows


def build_batch(
    plan: Plan, layout: StepLayout, *, page_size: int, num_ids: int, eos_ids: tuple[int, ...]
) -> StepBatch:
    """Write a plan into a step's buffer.

    Args:
        plan: Made last, so that its sequences hold the pages, rows and slots that it needs.
        layout: Of a bucket with at least `plan.num_tokens` tokens.
        page_size: Tokens per page.
        num_ids: Ids of the tokenizer.
        eos_ids: Ids that end an answer, for `min_tokens`.
    """
    batch = StepBatch(layout)
    batch["feed_T"][:] = -1
    batch["row_T"][:] = -1
    num_decodes = len(plan.decodes)
    batch["num_tokens"][...] = plan.num_tokens
    batch["num_ids"][...] = num_ids
    batch["num_decodes"][...] = num_decodes
    batch["num_sequences"][...] = num_decodes + len(plan.extends)
    _write_decodes(batch, plan, page_size)
    _write_extends(batch, plan, page_size)
    _write_samples(batch, plan, eos_ids)
    return batch


def _write_decodes(batch: StepBatch, plan: Plan, page_size: int) -> None:
    n = len(plan.decodes)
    if not n:
        return
    sequences = [row.sequence for row in plan.decodes]
    index = np.array([row.token_index for row in plan.decodes], np.int32)
    tables = batch["tables_BQ"]
    for b, sequence in enumerate(sequences):
        pages = sequence.pages.array
        tables[b, : len(pages)] = pages
    page = tables[np.arange(n), index // page_size]
    batch["kv_slot_T"][:n] = page * page_size + index % page_size
    batch["feed_T"][:n] = [s.slot for s in sequences]
    batch["positions_AT"][:, :n] = index + np.array([s.prompt.delta for s in sequences], np.int32)
    batch["starts_B"][:n] = np.arange(n)
    batch["counts_B"][:n] = 1
    batch["lengths_B"][:n] = index + 1
    batch["sample_token_B"][:n] = np.arange(n)
    if batch.layout.both_ways:
        batch["seen_T"][:n] = index


def _write_extends(batch: StepBatch, plan: Plan, page_size: int) -> None:
    b = t = sampled = len(plan.decodes)
    for sequence, span, samples in plan.extends:
        pages = sequence.pages.array
        here = slice(t, t + len(span))
        index = np.arange(span.start, span.stop, dtype=np.int32)
        batch["ids_T"][here] = sequence.ids(span)
        batch["row_T"][here] = sequence.arena_rows(span)
        batch["positions_AT"][:, here] = sequence.positions(span)
        batch["kv_slot_T"][here] = pages[index // page_size] * page_size + index % page_size
        batch["tables_BQ"][b, : len(pages)] = pages
        if batch.layout.both_ways:
            batch["seen_T"][here] = sequence.last_seen(span)
        batch["starts_B"][b] = t
        batch["counts_B"][b] = len(span)
        batch["lengths_B"][b] = span.stop
        b, t = b + 1, here.stop
        if samples:
            batch["sample_token_B"][sampled] = t - 1
            sampled += 1


def _write_samples(batch: StepBatch, plan: Plan, eos_ids: tuple[int, ...]) -> None:
    rows = sampled_rows(plan)
    n = len(rows)
    batch["num_samples"][...] = n
    params = [row.sequence.sampling for row in rows]
    batch["sample_slot_B"][:n] = [row.sequence.slot for row in rows]
    batch["any_logprobs"][...] = any(p.logprobs is not None for p in params)
    if any(p.temperature > 0 for p in params):
        batch["any_random"][...] = 1
        batch["temperature_B"][:n] = [p.temperature for p in params]
        batch["top_k_B"][:n] = [p.top_k for p in params]
        batch["top_p_B"][:n] = [p.top_p for p in params]
        batch["min_p_B"][:n] = [p.min_p for p in params]
        batch["seed_B2"][:n] = [row.sequence.seed for row in rows]
        batch["draw_B"][:n] = [row.output_index for row in rows]
    banned = [_banned(row, eos_ids) for row in rows]
    if any(banned) or any(p.changes_logits for p in params):
        batch["any_penalty"][...] = 1
        batch["repetition_B"][:n] = [p.repetition_penalty for p in params]
        batch["presence_B"][:n] = [p.presence_penalty for p in params]
        batch["frequency_B"][:n] = [p.frequency_penalty for p in params]
        batch["num_bias_B"][:n] = [len(p.logit_bias) for p in params]
        for r, ids in enumerate(banned):
            batch["num_banned_B"][r] = len(ids)
            batch["banned_BX"][r, : len(ids)] = ids
    _write_masks(batch, [row.sequence for row in rows])


def _write_masks(batch: StepBatch, sequences: list[Sequence]) -> None:
    if all(sequence.matcher is None for sequence in sequences):
        return
    layout = batch.layout
    masks = np.zeros((layout.num_sequences, layout.num_mask_words), np.uint32)
    for mask, sequence in zip(masks, sequences, strict=False):
        if sequence.matcher is None:
            mask[:] = ~np.uint32(0)
        else:
            own = sequence.matcher.mask
            mask[: len(own)] = own
    batch["any_masked"][...] = 1
    batch.allowed_BO = masks


def _banned(row: SampleRow, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that must not be sampled yet."""
    params = row.sequence.sampling
    if row.output_index >= params.min_tokens:
        return ()
    return eos_ids[: MAX_BANNED - MAX_STOP_TOKEN_IDS] + params.stop_token_ids
