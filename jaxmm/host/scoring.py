"""Videos whose rows are encoded and compared before their prompt is made. Host only.

Two steps of a video next to each other are compared where the arena holds both. One video is
scored at a time, as far as each plan's patches and the arena's rows allow. Between two plans
nothing is held but the rows of the last step; those are given up, and encoded again later, where a
running sequence needs the room: so neither can wait for the other for ever.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.errors import PromptTooLong
from jaxmm.host.arena import Arena, Lease
from jaxmm.host.item import Item
from jaxmm.host.plan import Draft, ScoreJob
from jaxmm.host.staging import lease_rows

OnScores = Callable[[npt.NDArray[np.float32]], None]


class Pair(NamedTuple):
    """Steps `step - 1` and `step` of a video, to be compared."""

    scoring: "Scoring"
    step: int


class Scoring:
    """One video on its way to its scores."""

    def __init__(
        self,
        steps: tuple[Item, ...],
        salt: str,
        on_scores: OnScores,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take the video.

        Args:
            steps: All its steps, at least two, with features.
            salt: The tenant.
            on_scores: Gets float32[T, M] once: of each step and row, 1 minus the cosine similarity
                with the step before; zeros for the first step.
            is_gone: Whether nobody waits any more.
        """
        self.steps = steps
        self.salt = salt
        self.is_gone = is_gone
        self.next_step = 0
        """First step that no plan has encoded and compared."""
        self.last: Lease | None = None
        """Rows of the step before, as long as they are held."""
        self._on_scores = on_scores
        self._scores = np.zeros((len(steps), steps[0].num_rows), np.float32)
        self._unread = len(steps) - 1

    def take(self, step: int, scores: npt.NDArray[np.float32]) -> None:
        """Note the scores of a step that was compared, float32[M]."""
        self._scores[step] = scores
        self._unread -= 1
        if self._unread == 0 and not self.is_gone():
            self._on_scores(self._scores)


class Scorings:
    """The videos that wait for their scores, in the order in which they came."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._queue: deque[Scoring] = deque()
        self._used: list[Lease] = []  # by the last plan; they go back when the next one begins

    @property
    def has_work(self) -> bool:
        """A video waits, or the next plan has rows of the last one to give back."""
        return bool(self._queue or self._used)

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
        """Queue a video."""
        self._queue.append(scoring)

    def settle(self) -> None:
        """Give back what the last plan used, and forget videos that nobody waits for."""
        for lease in self._used:
            self._arena.release(lease)
        self._used.clear()
        for scoring in [s for s in self._queue if s.is_gone()]:  # asked once: any thread may abort
            self._let_go(scoring)
            self._queue.remove(scoring)

    def yield_rows(self) -> bool:
        """Give up rows that are held between plans; False: there are none."""
        return any(self._let_go(scoring) for scoring in self._queue)

    def plan(self, draft: Draft) -> None:
        """Go on with the videos, the oldest first, as far as the draft has room."""
        while self._queue and self._advance(self._queue[0], draft):
            self._queue.popleft()

    def _advance(self, scoring: Scoring, draft: Draft) -> bool:
        """Plan the steps of one video; True when the last one is planned."""
        while scoring.next_step < len(scoring.steps):
            step = scoring.next_step
            if step and scoring.last is None:
                scoring.last = self._lease(scoring, step - 1, draft)
                if scoring.last is None:
                    return False
            lease = self._lease(scoring, step, draft)
            if lease is None:
                return False
            if scoring.last is not None:
                job = ScoreJob(Pair(scoring, step), scoring.last.slots, lease.slots)
                draft.scores.append(job)
                self._used.append(scoring.last)
            scoring.last = lease
            scoring.next_step += 1
        assert scoring.last is not None, "a video has steps"
        self._used.append(scoring.last)
        scoring.last = None
        return True

    def _lease(self, scoring: Scoring, step: int, draft: Draft) -> Lease | None:
        lease, _ = lease_rows(scoring.steps[step], scoring.salt, self._arena, draft)
        return lease

    def _let_go(self, scoring: Scoring) -> bool:
        if scoring.last is None:
            return False
        self._arena.release(scoring.last)
        scoring.last = None
        return True
