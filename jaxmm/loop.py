"""The loop: plan on the host, step on the device, read, emit. Host only.

One thread runs it. It dispatches step n + 1 before it reads what step n sampled, so the device
never waits for Python; the device itself feeds each sampled token to the next step.
"""

import queue
import time
from collections import deque
from collections.abc import Callable

from jaxmm.answer import Answer, tell
from jaxmm.dispatch import Dispatcher, Pending
from jaxmm.errors import EngineStopped, GrammarError, JaxmmError
from jaxmm.host.item import Item
from jaxmm.host.kept import Keep
from jaxmm.host.scoring import Scoring
from jaxmm.host.sequence import Sequence, Status
from jaxmm.request import Delta
from jaxmm.start import Parts

_AHEAD = 1  # steps dispatched beyond the one whose tokens are read

LoadFeatures = Callable[[Answer, Sequence, int], None]
"""Asks for the features of an item, by its index; answered with `Loop.provide` or `Loop.fail`."""


class Loop:
    """Runs prepared requests to their ends. But for `post`, `stop`, `serves` and `end_all`, the
    methods are called on the thread that is in `run`."""

    def __init__(self, parts: Parts) -> None:
        """Take the parts; `run` does the work."""
        self._scheduler = parts.scheduler
        self._dispatcher = Dispatcher(parts)
        self._rehearsal = parts.rehearsal
        self._answers: dict[str, Answer] = {}
        self._pending: deque[Pending] = deque()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop = False
        self._turn_began: float | None = None
        self._stalled = False  # the last plan had nothing to compute; nothing has changed since

    def post(self, action: Callable[[], None]) -> None:
        """Have something done between two steps."""
        self._inbox.put(action)

    def stop(self) -> None:
        """Let `run` return after the step that it is in."""
        self._stop = True
        self.post(lambda: None)

    def serves(self, request_id: str) -> bool:
        """Whether the request has entered and not ended."""
        return request_id in self._answers

    @property
    def turn_seconds(self) -> float:
        """How long the turn in progress takes already; 0 between turns. For any thread."""
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    def run(self, load_features: LoadFeatures) -> None:
        """Serve until `stop`."""
        while not self._stop:
            self._take_inbox()
            self._turn_began = time.monotonic()
            self._turn(load_features)
            self._turn_began = None

    def enter(self, answer: Answer) -> None:
        """Note a request; `start` follows."""
        self._answers[answer.request.id] = answer

    def start(self, answer: Answer) -> None:
        """Queue a request's sequences, or tell its caller why they cannot be."""
        try:
            self._scheduler.add(*answer.sequences)
        except JaxmmError as error:
            self._answers.pop(answer.request.id, None)
            self._tell(answer, error)
            return
        self._stalled = False

    def abort(self, request_id: str) -> None:
        """Drop a request; an unknown id is no error."""
        answer = self._answers.pop(request_id, None)
        if answer is not None:
            self._scheduler.abort(request_id)
            answer.gone.set_result(None)
            self._stalled = False

    def fail(self, sequence: Sequence, error: JaxmmError) -> None:
        """End the request of a sequence with an error, if it has not ended."""
        answer = self._answer_of(sequence)
        if answer is not None:
            self.abort(sequence.request_id)
            self._tell(answer, error)

    def provide(self, sequence: Sequence, index: int, item: Item) -> None:
        """Take an item with the features that were asked for."""
        if self._answer_of(sequence) is not None:
            self._scheduler.provide_features(sequence, index, item)
            self._stalled = False

    def score(self, scoring: Scoring) -> None:
        """Encode a video and compare its steps; it is told the scores on this thread."""
        self._scheduler.scorings.add(scoring)
        self._stalled = False

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

    def _take_inbox(self) -> None:
        """Do what other threads asked for; with nothing to compute, wait for that, or until a
        conversation expires or a rehearsal is due."""
        idle = not self._pending and not self._plannable
        while True:
            try:
                action = self._inbox.get(block=idle, timeout=self._seconds_left)
            except queue.Empty:
                if idle and not self._scheduler.has_work:
                    self._rehearsal.go_on()
                return
            action()
            self._rehearsal.put_off()
            idle = False

    @property
    def _seconds_left(self) -> float | None:
        """Time until something is to be done that no other thread asks for; None: never."""
        times = [self._scheduler.pins.seconds_left]
        if not self._scheduler.has_work:
            times.append(self._rehearsal.seconds_left)
        return min((seconds for seconds in times if seconds is not None), default=None)

    @property
    def _plannable(self) -> bool:
        return self._scheduler.has_work and not self._stalled

    def _turn(self, load_features: LoadFeatures) -> None:
        """Dispatch the next step, then read the one before it.

        With grammars alone to decode, the order is the other way round: their next step needs
        the tokens of this one, and a step with half of them takes as long as one with all.
        """
        self._scheduler.pins.expire()
        if self._pending and self._scheduler.awaits_tokens:
            self._read(self._pending.popleft())
        plan = self._scheduler.plan() if self._plannable else None
        dispatched = False
        if plan is not None:
            for sequence, index in plan.missing_features:
                if (answer := self._answer_of(sequence)) is not None:
                    load_features(answer, sequence, index)
            if plan.is_for_device:
                self._pending.append(self._dispatcher.dispatch(plan))
                dispatched = True
        if self._pending and (len(self._pending) > _AHEAD or not dispatched):
            self._read(self._pending.popleft())
        elif not dispatched:
            self._stalled = True

    def _read(self, pending: Pending) -> None:
        """Wait for a step's tokens and scores, and pass them on."""
        for job, scores in self._dispatcher.read_scores(pending):
            job.pair.scoring.take(job.pair.step, scores)
        for sequence, token, logprob in self._dispatcher.read(pending):
            answer = self._answer_of(sequence)
            if sequence.status is Status.FINISHED or answer is None:
                continue  # it stopped, was aborted or given up while this step was on its way
            self._scheduler.append(sequence, token)
            try:
                delta = answer.take(sequence, token, logprob)
            except GrammarError as error:
                self.fail(sequence, error)
                continue
            if delta.finish_reason is not None:  # all is given back before anybody hears of it
                self._scheduler.finish(sequence, delta.finish_reason)
                self._keep(sequence, answer)
                if answer.num_open == 0:
                    self._answers.pop(answer.request.id, None)
            self._tell(answer, delta)
        self._stalled = False

    def _keep(self, sequence: Sequence, answer: Answer) -> None:
        """Pin the prefix of a conversation that goes on."""
        keep = answer.request.keep
        if isinstance(keep, Keep) and not keep.closed:
            self._scheduler.keep(sequence, keep)

    def _answer_of(self, sequence: Sequence) -> Answer | None:
        """None when the request has ended, even if another one has its id now."""
        answer = self._answers.get(sequence.request_id)
        return answer if answer is not None and sequence in answer.sequences else None

    def _tell(self, answer: Answer, event: Delta | JaxmmError) -> None:
        """Pass an event on; a listener that fails ends its own request, and nobody else's."""
        if not tell(answer.request, answer.on_event, event):
            self.post(lambda: self.abort(answer.request.id))
