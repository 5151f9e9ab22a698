"""One generation: what it was asked, how far it is, and what it holds. Host only.

A request with `n` completions is `n` sequences. Token `i` of a sequence is prompt token `i`, or
output token `i - prompt.num_tokens`. Two counts run ahead of what the host has seen, because
plans are made before the results of the plans before them are known:

    num_computed   tokens whose KV the plans so far write
    num_sampled    output tokens that the plans so far sample; `output_ids` holds those known
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from jaxmm.host.arena import Lease
from jaxmm.host.grammar import Matcher
from jaxmm.host.item import Prompt, Span
from jaxmm.host.page_pool import Pages
from jaxmm.host.prefix_cache import Node
from jaxmm.host.prefix_key import Ids, Marks, PrefixKey, marks_of
from jaxmm.request import FinishReason, SamplingParams


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    """Holds nothing but its place in the queue; new, or retracted."""
    RUNNING = "running"
    """Holds pages and a state slot."""
    FINISHED = "finished"


class PageTable:
    """The pages of one sequence, in the order of its tokens."""

    __slots__ = ("_buffer", "_length")

    def __init__(self) -> None:
        self._buffer = np.zeros(16, np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def array(self) -> Pages:
        """int32[num_pages]: a view, good until the next call that changes the table."""
        return self._buffer[: self._length]

    def extend(self, pages: Pages) -> None:
        stop = self._length + len(pages)
        if stop > len(self._buffer):
            grown = np.zeros(max(stop, 2 * len(self._buffer)), np.int32)
            grown[: self._length] = self.array
            self._buffer = grown
        self._buffer[self._length : stop] = pages
        self._length = stop

    def exchange(self, pages: Pages) -> tuple[Pages, Pages]:
        """Put `pages` in place of the first ones.

        Returns:
            Pages that are new to the table, and those that they replaced.
        """
        first = self.array[: len(pages)]
        differs = first != pages
        gained, dropped = pages[differs], first[differs]
        first[:] = pages
        return gained, dropped

    def clear(self) -> Pages:
        """Empty the table; returns the pages that were in it."""
        pages = self.array.copy()
        self._length = 0
        return pages


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """One generation. The caller fills the first block; the scheduler owns the rest."""

    request_id: str
    index: int = 0
    """Which of the request's `n` completions."""
    prompt: Prompt
    sampling: SamplingParams
    salt: str = ""
    seed: tuple[int, int] = (0, 0)
    """Two int32 words: the key of its random draws."""
    matcher: Matcher | None = None
    """Follows the grammar that its output must match."""

    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    output_ids: list[int] = field(default_factory=list)
    max_output: int = 0
    """Output tokens at most: `max_tokens`, less where the model's length or the pool end it."""
    num_sampled: int = 0
    num_computed: int = 0
    extend_stop: int = 0
    """Tokens known when it was admitted; it extends up to here and decodes from here on."""
    num_cached: int = 0
    """Prompt tokens read from the prefix cache when first admitted."""
    num_admissions: int = 0
    """One more than how often it was retracted."""
    primed_at: int = 0
    """Admission for which its state slot has been given its history; 0: none."""

    pages: PageTable = field(default_factory=PageTable)
    slot: int = -1
    """State slot on the device while running, else -1."""
    leases: dict[int, Lease] = field(default_factory=dict)
    """By item; kept until the plan after the one that passed the item's last row."""
    node: Node | None = None
    """End of the cached path whose pages it shares; locked while it is set."""
    missing: set[int] = field(default_factory=set)
    """Items whose features have been asked for; one set for all completions of a request."""

    order: int = -1
    """Place in the order of arrival."""
    overtaken: int = 0
    """How often a later sequence was admitted before this one."""
    deferrals: int = 0
    """Plans for which it waited for another one's prefill of the same prompt."""

    marks: Marks = field(init=False)
    item_spans: tuple[tuple[Span, int], ...] = field(init=False)
    """All spans of all items in the order of the prompt, each with its item's index."""

    def __post_init__(self) -> None:
        self.marks = marks_of(self.prompt.items)
        self.item_spans = tuple(
            sorted((span, i) for i, item in enumerate(self.prompt.items) for span in item.offsets)
        )

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host knows."""
        return self.prompt.num_tokens + len(self.output_ids)

    def held_back(self, eos_ids: Iterable[int]) -> tuple[int, ...]:
        """Ids that the next output token known to the host must not be, by the request's wish."""
        early = len(self.output_ids) < self.sampling.min_tokens
        ends = tuple(eos_ids) if early or self.sampling.ignore_eos else ()
        return ends + (self.sampling.stop_token_ids if early else ())

    @property
    def awaits_token(self) -> bool:
        """Its next token needs a mask that depends on one which has not been read."""
        return self.matcher is not None and len(self.output_ids) < self.num_sampled

    @property
    def is_full(self) -> bool:
        """Every token that it may have is known: finish it with reason "length"."""
        return len(self.output_ids) >= self.max_output

    def ids(self, span: Span) -> Ids:
        """int64[len(span)]: ids for the device; the whole span must be known."""
        return self._with_outputs(self.prompt.ids, span)

    def cache_ids(self, span: Span) -> Ids:
        """int64[len(span)]: ids for the prefix cache; the whole span must be known."""
        return self._with_outputs(self.prompt.cache_ids, span)

    def prefix_key(self, num_tokens: int) -> PrefixKey:
        """The first `num_tokens` tokens as the prefix cache compares them."""
        return PrefixKey(self.cache_ids(Span(0, num_tokens)), self.marks, self.salt)

    def positions(self, span: Span) -> npt.NDArray[np.int32]:
        """int32[A, len(span)]: the prompt's positions, then token index + delta in every row."""
        table, length = self.prompt.positions, self.prompt.num_tokens
        if span.stop <= length:
            return table[:, span.start : span.stop]
        after = np.arange(max(span.start, length), span.stop, dtype=np.int32)
        tail = np.broadcast_to(after + np.int32(self.prompt.delta), (len(table), len(after)))
        return np.concatenate([table[:, span.start : length], tail], axis=1)

    def arena_rows(self, span: Span) -> npt.NDArray[np.int32]:
        """int32[len(span)]: device row that each token reads, -1 for text; needs the leases."""
        rows = np.full(len(span), -1, np.int32)
        for offset, index in self.spans_after(span.start):
            if offset.start >= span.stop:
                break
            start, stop = max(offset.start, span.start), min(offset.stop, span.stop)
            slots = self.leases[index].slots
            rows[start - span.start : stop - span.start] = slots[self.prompt.row_index[start:stop]]
        return rows

    def last_seen(self, span: Span) -> npt.NDArray[np.int32]:
        """int32[len(span)]: last token that each one sees: of an item that of its span."""
        last = np.arange(span.start, span.stop, dtype=np.int32)
        for offset, _ in self.spans_after(span.start):
            if offset.start >= span.stop:
                break
            assert span.start <= offset.start and offset.stop <= span.stop, "an item was cut"
            last[offset.start - span.start : offset.stop - span.start] = offset.stop - 1
        return last

    def spans_after(self, token: int) -> tuple[tuple[Span, int], ...]:
        """Spans of items that are not over at `token`, each with its item's index."""
        first = bisect_right(self.item_spans, token, key=lambda entry: entry[0].stop)
        return self.item_spans[first:]

    def items_after(self, token: int) -> set[int]:
        """Items that have rows at or beyond `token`."""
        return {index for _, index in self.spans_after(token)}

    def item_start(self, token: int) -> int:
        """Start of the span that has tokens on both sides of a cut before `token`, else `token`."""
        for span, _ in self.spans_after(token)[:1]:
            return min(span.start, token)
        return token

    def _with_outputs(self, prompt_ids: Ids, span: Span) -> Ids:
        length = self.prompt.num_tokens
        assert span.stop <= self.num_known, "an id was asked for before it was known"
        if span.stop <= length:
            return prompt_ids[span.start : span.stop]
        known = self.output_ids[max(0, span.start - length) : span.stop - length]
        return np.concatenate([prompt_ids[span.start :], np.array(known, np.int64)])
