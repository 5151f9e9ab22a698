"""The loop: plan on the host, step on the device, read, emit. Host only.

One thread runs it, for all replicas. It dispatches step n + 1 of each before it reads what step n
sampled, so no device waits for Python; the device itself feeds each sampled token to the next step.
"""

import logging
import queue
import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Any

from jaxmm.answer import Answer, tell
from jaxmm.errors import EngineStopped, GrammarError, JaxmmError, NotFinite
from jaxmm.host.item import Item
from jaxmm.host.kept import Keep
from jaxmm.host.router import Offer, Router
from jaxmm.host.scheduler import Scheduler
from jaxmm.host.scoring import Scoring
from jaxmm.host.sequence import Sequence, Status
from jaxmm.replica import Replica
from jaxmm.request import Delta
from jaxmm.start import Parts

logger = logging.getLogger(__name__)

LoadFeatures = Callable[[Answer, Sequence, int], None]
"""Asks for the features of an item, by its index; answered with `Loop.provide` or `Loop.fail`."""


class Loop:
    """Runs prepared requests to their ends. But for `post`, `stop`, `serves` and `end_all`, the
    methods are called on the thread that is in `run`."""

    def __init__(self, replicas: Several[Parts]) -> None:
        """Take the parts of each replica; `run` does the work."""
        wake = (lambda: self.post(_nothing)) if len(replicas) > 1 else None
        self._replicas = [Replica(parts, wake) for parts in replicas]
        self._router = Router(len(replicas))
        self._answers: dict[str, Answer] = {}
        self._homes: dict[str, Replica] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop = False
        self._turn_began: float | None = None

    def post(self, action: Callable[[], None]) -> None:
        """Have something done between two steps."""
        self._inbox.put(action)

    def stop(self) -> None:
        """Let `run` return after the step that it is in."""
        self._stop = True
        self.post(_nothing)

    def serves(self, request_id: str) -> bool:
        """Whether the request has entered and not ended."""
        return request_id in self._answers

    @property
    def turn_seconds(self) -> float:
        """How long the turn in progress takes already, or a device that the loop need not wait for
        takes for its step; 0 while the loop waits to be asked for something. For any thread."""
        began = self._turn_began
        turn = 0.0 if began is None else time.monotonic() - began
        return max(turn, *(replica.waiting_seconds for replica in self._replicas))

    def run(self, load_features: LoadFeatures) -> None:
        """Serve until `stop`; nothing runs on a device any more when this returns."""
        while not self._stop:
            action = self._next_action()
            self._turn_began = time.monotonic()
            self._do(action)
            for replica in self._replicas:
                self._turn(replica, load_features)
            self._turn_began = None
        self._turn_began = time.monotonic()
        for replica in self._replicas:
            replica.settle()
        self._turn_began = None

    def close(self, *, wait: bool) -> None:
        """Free what `run` needed; it has returned. Without `wait`, no step is waited for."""
        for replica in self._replicas:
            replica.close(wait=wait)

    def home_of(self, sequence: Sequence, keep: Any = None) -> Parts:
        """The replica that would serve a sequence that came now, as a turn of a conversation."""
        return self._replicas[self._choose(keep, lambda s: s.offer(sequence))].parts

    def enter(self, answer: Answer) -> None:
        """Note a request; `start` follows."""
        self._answers[answer.request.id] = answer

    def start(self, answer: Answer) -> None:
        """Queue a request's sequences, or tell its caller why they cannot be."""
        chosen = answer.home
        if chosen is None:
            chosen = self._choose(answer.request.keep, lambda s: s.offer(answer.sequences[0]))
        home = self._replicas[chosen]
        try:
            home.scheduler.add(*answer.sequences)
        except JaxmmError as error:
            self._answers.pop(answer.request.id, None)
            self._tell(answer, error)
            return
        if answer.home is None:
            self._router.note(chosen)
        self._homes[answer.request.id] = home
        home.stalled = False

    def abort(self, request_id: str) -> None:
        """Drop a request; an unknown id is no error."""
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            home = self._homes.pop(request_id)
            home.scheduler.abort(request_id)
            answer.gone.set_result(None)
            home.stalled = False

    def fail(self, sequence: Sequence, error: JaxmmError) -> None:
        """End the request of a sequence with an error, if it has not ended."""
        answer = self._answer_of(sequence)
        if answer is not None:
            self.abort(sequence.request_id)
            self._tell(answer, error)

    def provide(self, sequence: Sequence, first: int, items: Several[Item]) -> None:
        """Take an item, or all steps of a video, with the features that were asked for."""
        if self._answer_of(sequence) is not None:
            home = self._homes[sequence.request_id]
            home.scheduler.provide_features(sequence, first, items)
            home.stalled = False

    def score(self, scoring: Scoring, keep: Any = None) -> int:
        """Encode a request's videos and compare their steps; it is told the scores on this thread.

        Args:
            scoring: The videos.
            keep: The conversation that the request is a turn of.

        Returns:
            The replica that has their rows then: `Answer.home`.
        """
        chosen = self._choose(keep, lambda s: s.offer_rows(scoring.steps, scoring.salt))
        self._router.note(chosen)
        home = self._replicas[chosen]
        home.scheduler.scorings.add(scoring)
        home.stalled = False
        return chosen

    def end_all(self, error: EngineStopped) -> None:
        """End every request with an error, each once, whoever else calls this; for any thread.

        `run` has returned, or is told to and hangs in a step.
        """
        while True:
            try:
                _, answer = self._answers.popitem()
            except KeyError:
                return
            answer.gone.set_result(None)
            self._tell(answer, error)

    def _choose(self, keep: Any, offer: Callable[[Scheduler], Offer]) -> int:
        """A turn goes where its conversation is kept; other requests where the router says."""
        for index, replica in enumerate(self._replicas):
            if len(self._replicas) == 1 or keep in replica.scheduler.pins:
                return index
        return self._router.best([offer(replica.scheduler) for replica in self._replicas])

    def _next_action(self) -> Callable[[], None] | None:
        """What another thread asked for; with nothing to compute, wait for that, or until a
        conversation expires or a rehearsal is due."""
        idle = not any(replica.can_go for replica in self._replicas)
        try:
            action = self._inbox.get(block=idle, timeout=self._seconds_left)
        except queue.Empty:
            return self._rehearse if idle else None
        for replica in self._replicas:
            replica.parts.rehearsal.put_off()
        return action

    def _do(self, action: Callable[[], None] | None) -> None:
        """Do what is to be done between two steps, and what other threads ask for meanwhile."""
        while action is not None:
            action()
            try:
                action = self._inbox.get_nowait()
            except queue.Empty:
                return

    def _rehearse(self) -> None:
        for replica in self._replicas:
            replica.rehearse()

    @property
    def _seconds_left(self) -> float | None:
        """Time until something is to be done that no other thread asks for; None: never."""
        left = (replica.seconds_left for replica in self._replicas)
        return min((seconds for seconds in left if seconds is not None), default=None)

    def _turn(self, replica: Replica, load_features: LoadFeatures) -> None:
        """Dispatch the next step, then read the one before it.

        With grammars alone to decode, the order is the other way round: their next step needs
        the tokens of this one, and a step with half of them takes as long as one with all.
        """
        replica.scheduler.pins.expire()
        if replica.awaits_tokens:
            if not replica.readable:
                return
            self._read(replica)
        plan = replica.scheduler.plan() if replica.plannable else None
        dispatched = False
        if plan is not None:
            for sequence, index in plan.missing_features:
                if (answer := self._answer_of(sequence)) is not None:
                    load_features(answer, sequence, index)
            if plan.is_for_device:
                replica.dispatch(plan)
                dispatched = True
        if replica.readable and (replica.is_ahead or not dispatched):
            self._read(replica)
        elif not dispatched:
            replica.stalled = True

    def _read(self, replica: Replica) -> None:
        """Wait for a step's tokens and scores, and pass them on."""
        scores, tokens = replica.read()
        for job, values in scores:
            job.pair.scoring.take(job.pair.step, values)
        for sequence, token, logprob in tokens:
            answer = self._answer_of(sequence)
            if sequence.status is Status.FINISHED or answer is None:
                continue  # it stopped, was aborted or given up while this step was on its way
            if token < 0:
                logger.error("hidden state not finite request=%s", sequence.request_id)
                self.fail(sequence, NotFinite("the model gives no finite numbers for it"))
                continue
            replica.scheduler.append(sequence, token)
            try:
                delta = answer.take(sequence, token, logprob)
            except GrammarError as error:
                self.fail(sequence, error)
                continue
            if delta.finish_reason is not None:  # all is given back before anybody hears of it
                replica.scheduler.finish(sequence, delta.finish_reason)
                self._keep(sequence, answer)
                if answer.num_open == 0:
                    self._answers.pop(answer.request.id, None)
                    self._homes.pop(answer.request.id, None)
            self._tell(answer, delta)
        replica.stalled = False

    def _keep(self, sequence: Sequence, answer: Answer) -> None:
        """Pin the prefix of a conversation that goes on."""
        keep = answer.request.keep
        if isinstance(keep, Keep) and not keep.closed:
            self._homes[sequence.request_id].scheduler.keep(sequence, keep)

    def _answer_of(self, sequence: Sequence) -> Answer | None:
        """None when the request has ended, even if another one has its id now."""
        answer = self._answers.get(sequence.request_id)
        return answer if answer is not None and sequence in answer.sequences else None

    def _tell(self, answer: Answer, event: Delta | JaxmmError) -> None:
        """Pass an event on; a listener that fails ends its own request, and nobody else's."""
        if not tell(answer.request, answer.on_event, event):
            self.post(lambda: self.abort(answer.request.id))


def _nothing() -> None:
    """Wakes the loop."""
