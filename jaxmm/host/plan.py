"""What the scheduler decides for one step, and the draft in which it decides it. Host only."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.host.arena import Lease
from jaxmm.host.item import Item, Span
from jaxmm.host.sequence import Sequence

if TYPE_CHECKING:
    from jaxmm.host.scoring import Pair


class DecodeRow(NamedTuple):
    """One token of a running sequence; the step samples the token after it.

    The token's id is `output_ids[token_index - prompt.num_tokens]` where the host knows it
    already, else the last one sampled in the sequence's state slot.
    """

    sequence: Sequence
    token_index: int
    """Token whose KV is computed."""


class ExtendChunk(NamedTuple):
    """Known tokens of a sequence whose KV is computed, items among them read from the arena."""

    sequence: Sequence
    span: Span
    samples: bool
    """The span ends with the last known token: the step samples the token after it."""


class EncodeJob(NamedTuple):
    """An item to encode, or finished embeddings to copy, into its rows."""

    item: Item
    lease: Lease


class ScoreJob(NamedTuple):
    """Two steps of a video whose rows are compared, once both are encoded."""

    pair: "Pair"
    before: npt.NDArray[np.int32]
    """int32[M]: arena row of each row of the earlier step."""
    after: npt.NDArray[np.int32]
    """int32[M]: the same of the later one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step: run the encodes, then the scores, then decodes and extends together."""

    decodes: tuple[DecodeRow, ...]
    """Longest first: the cost of their attention follows the length."""
    extends: tuple[ExtendChunk, ...]
    """In order of service, at most one a sequence."""
    encodes: tuple[EncodeJob, ...]
    scores: tuple[ScoreJob, ...] = ()
    missing_features: tuple[tuple[Sequence, int], ...]
    """Items whose features are needed and not there, told once; answer each with
    `Scheduler.provide_features`, or abort the request. Their sequences wait, others do not."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the language step; 0: there is none."""
        return len(self.decodes) + sum(len(chunk.span) for chunk in self.extends)

    @property
    def is_for_device(self) -> bool:
        """It does more than ask for features."""
        return bool(self.decodes or self.extends or self.encodes or self.scores)


@dataclass(slots=True)
class Draft:
    """A plan in the making, with what is left of the step's budgets."""

    tokens_left: int
    patches_left: int
    max_lane_patches: int
    decodes: list[DecodeRow] = field(default_factory=list)
    extends: list[ExtendChunk] = field(default_factory=list)
    encodes: list[EncodeJob] = field(default_factory=list)
    scores: list[ScoreJob] = field(default_factory=list)
    missing_features: list[tuple[Sequence, int]] = field(default_factory=list)
    num_patches: int = 0
    """Patches that `encodes` put through the encoder."""

    def decode(self, sequence: Sequence) -> None:
        self.decodes.append(DecodeRow(sequence, sequence.num_computed))
        self.tokens_left -= 1
        sequence.num_computed += 1
        sequence.num_sampled += 1

    def extend(self, sequence: Sequence, stop: int) -> None:
        span = Span(sequence.num_computed, stop)
        samples = stop == sequence.extend_stop
        self.extends.append(ExtendChunk(sequence, span, samples))
        self.tokens_left -= len(span)
        sequence.num_computed = stop
        sequence.num_sampled += samples

    def can_encode(self, item: Item) -> bool:
        """Tell whether an item fits; one beyond the step's budget may be encoded alone."""
        alone = self.num_patches == 0
        return encode_patches(item) <= (self.max_lane_patches if alone else self.patches_left)

    def encode(self, item: Item, lease: Lease) -> None:
        self.encodes.append(EncodeJob(item, lease))
        self.patches_left -= encode_patches(item)
        self.num_patches += encode_patches(item)
        lease.ready = True

    def build(self) -> Plan | None:
        """Freeze the draft; None when there is nothing to do or to ask."""
        plan = Plan(
            decodes=tuple(sorted(self.decodes, key=lambda row: -row.token_index)),
            extends=tuple(self.extends),
            encodes=tuple(self.encodes),
            scores=tuple(self.scores),
            missing_features=tuple(self.missing_features),
        )
        return plan if plan.is_for_device or plan.missing_features else None


def encode_patches(item: Item) -> int:
    """Patches that an item puts through the encoder; finished embeddings put none."""
    return 0 if item.embeddings is not None else item.num_patches
