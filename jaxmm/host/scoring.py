"""Requests whose videos are encoded and compared before their prompts are made. Host only.

Two steps of a video next to each other are compared where the arena holds both. The requests take
turns, a step of a video at a time, as far as each plan's patches and the arena's rows allow.
Between two plans nothing is held but the rows of each one's last step. Those are given up, and
encoded again later, where a running sequence or an older request needs the room: so the oldest
always gets on, and neither it nor a sequence can wait for another for ever.
"""

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.errors import PromptTooLong
from jaxmm.host.arena import Arena, Lease, RowKey
from jaxmm.host.item import Item
from jaxmm.host.plan import Draft, ScoreJob
from jaxmm.host.staging import lease_rows

Scores = npt.NDArray[np.float32]
"""float32[T, M]: of each step and row of a video, 1 minus the cosine similarity with the row in the
same place one step before; zeros for the first step."""
OnScores = Callable[[list[Scores]], Any]

_by_order = attrgetter("order")


class Pair(NamedTuple):
    """Steps `step - 1` and `step` of a scoring, to be compared."""

    scoring: "Scoring"
    step: int


class Scoring:
    """The videos of one request on their way to their scores."""

    def __init__(
        self,
        videos: Sequence[tuple[Item, ...]],
        salt: str,
        on_scores: OnScores,
        *,
        num_tokens: int = 0,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take the videos.

        Args:
            videos: Of each all its steps, at least two, with features.
            salt: The tenant.
            on_scores: Gets the scores of each video, once.
            num_tokens: Tokens that are computed for the request once it has them.
            is_gone: Whether nobody waits any more.
        """
        self.steps = tuple(step for video in videos for step in video)
        self.salt = salt
        self.is_gone = is_gone
        self.order = 0
        """Place in the order of arrival."""
        self.next_step = 0
        """First step that no plan has encoded and compared."""
        self.last: Lease | None = None
        """Rows of the step before, as long as they are held."""
        self._num_tokens = num_tokens
        self._on_scores = on_scores
        self._scores = [np.zeros((len(v), v[0].num_rows), np.float32) for v in videos]
        self._of_step = [of_step for scores in self._scores for of_step in scores]  # views
        self._unread = len(self.steps) - len(videos)

    @property
    def is_planned(self) -> bool:
        """Every step is encoded and compared by the plans so far."""
        return self.next_step == len(self.steps)

    @property
    def needs_last(self) -> bool:
        """The next step is compared with the one before."""
        return self.steps[self.next_step].step > 0

    @property
    def num_ahead(self) -> int:
        """Rows still to encode, and tokens after them."""
        return self._num_tokens + sum(step.num_rows for step in self.steps[self.next_step :])

    def take(self, step: int, scores: npt.NDArray[np.float32]) -> None:
        """Note the scores of a step that was compared, float32[M]."""
        self._of_step[step][:] = scores
        self._unread -= 1
        if self._unread == 0 and not self.is_gone():
            self._on_scores(self._scores)


class Scorings:
    """The requests that wait for scores of their videos."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._turns: deque[Scoring] = deque()  # whose turn it is first
        self._used: list[Lease] = []  # by the last plan; they go back when the next one begins
        self._num_added = 0
        self.got_on = False
        """Whether a request got on in the last plan, be it by rows alone that were there."""

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def has_work(self) -> bool:
        """A request waits, or the next plan has rows of the last one to give back."""
        return bool(self._turns or self._used)

    @property
    def num_ahead(self) -> int:
        """Rows still to encode, and tokens that are computed then."""
        return sum(scoring.num_ahead for scoring in self._turns)

    def check(self, step: Item) -> None:
        """Refuse a video of which the arena cannot hold two steps.

        Raises:
            PromptTooLong: The message has the figures.
        """
        needed = 2 * self._arena.rounded(step.num_rows)
        if needed > self._arena.num_rows:
            raise PromptTooLong(
                f"pruning compares two steps of the video, {needed} rows; the arena has "
                f"{self._arena.num_rows}. Send smaller frames, set video_pruning_rate to 0, or "
                "raise arena.num_rows."
            )

    def add(self, scoring: Scoring) -> None:
        """Queue a request."""
        scoring.order = self._num_added
        self._num_added += 1
        self._turns.append(scoring)

    def settle(self) -> None:
        """Give back what the last plan used, and forget requests that nobody waits for."""
        for lease in self._used:
            self._arena.release(lease)
        self._used.clear()
        for scoring in [s for s in self._turns if s.is_gone()]:  # asked once: any thread may abort
            self._let_go(scoring)
            self._turns.remove(scoring)

    def yield_rows(self, spare: Scoring | None = None) -> bool:
        """Give up the rows that the newest request holds between plans, before this plan has any.

        Args:
            spare: Keeps its rows.

        Returns:
            Whether there were any.
        """
        holding = [s for s in self._turns if s.last is not None and s is not spare]
        if not holding:
            return False
        self._let_go(max(holding, key=_by_order))
        return True

    def plan(self, draft: Draft) -> None:
        """Plan a step of each request in turn, as far as the draft has room.

        Who found no room comes first the next time; where rows are short, the oldest does.
        """
        self._make_room()
        self.got_on = False
        without_room: deque[Scoring] = deque()
        while self._turns:
            scoring = self._turns.popleft()
            if not self._advance(scoring, draft):
                without_room.append(scoring)
                continue
            self.got_on = True
            if not scoring.is_planned:
                self._turns.append(scoring)
        self._turns = without_room

    def _make_room(self) -> None:
        """Where the oldest request lacks rows, put it first and have newer ones give up theirs."""
        oldest = min(self._turns, key=_by_order, default=None)
        if oldest is None or self._has_room(oldest):
            return
        self._turns.remove(oldest)
        self._turns.appendleft(oldest)
        while not self._has_room(oldest) and self.yield_rows(spare=oldest):
            pass

    def _has_room(self, scoring: Scoring) -> bool:
        """Whether the arena can hold the next pair of steps, beside what is leased."""
        start = scoring.next_step
        if scoring.last is None:
            pair = scoring.steps[start - scoring.needs_last :][:2]
        else:
            pair = scoring.steps[start : start + 1]
        # rows of the pair that nobody leases are no room for the other step
        keys = {RowKey.of(step, scoring.salt) for step in pair}
        lacking = [key for key in keys if not self._arena.is_leased(key)]
        needed = sum(self._arena.rounded(key.num_rows) for key in lacking)
        return needed <= self._arena.num_free + self._arena.num_evictable

    def _advance(self, scoring: Scoring, draft: Draft) -> bool:
        """Plan the next step of a request; False: there is no room."""
        if not self._has_room(scoring):
            return False
        step = scoring.next_step
        if scoring.needs_last and scoring.last is None:
            scoring.last = self._lease(scoring, step - 1, draft)
            if scoring.last is None:
                return False
        lease = self._lease(scoring, step, draft)
        if lease is None:
            return False
        if scoring.last is not None:
            if scoring.needs_last:
                job = ScoreJob(Pair(scoring, step), scoring.last.slots, lease.slots)
                draft.scores.append(job)
            self._used.append(scoring.last)
        scoring.last = lease
        scoring.next_step += 1
        if scoring.is_planned:
            self._used.append(scoring.last)
            scoring.last = None
        return True

    def _lease(self, scoring: Scoring, step: int, draft: Draft) -> Lease | None:
        lease, _ = lease_rows(scoring.steps[step], scoring.salt, self._arena, draft)
        return lease

    def _let_go(self, scoring: Scoring) -> None:
        if scoring.last is not None:
            self._arena.release(scoring.last)
            scoring.last = None
