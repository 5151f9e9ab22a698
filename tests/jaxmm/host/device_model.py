"""A plain model of the device and of the engine's loop, for tests of the scheduler.

The KV of a token is a digest of everything up to it, kept at its page and offset; a row of the
arena is the identity and row that were encoded into it. So whatever a plan reads can be compared
with what it must be, and the tokens that come out with those of the sequence alone.
"""

import hashlib
from functools import lru_cache

import numpy as np

from jaxmm.host.item import Prompt, Span
from jaxmm.host.plan import Plan, ScoreJob
from jaxmm.host.scheduler import Scheduler
from jaxmm.host.sequence import Sequence, Status

STOP = 0


def digest(before: bytes, content: object) -> bytes:
    return hashlib.sha256(before + repr(content).encode()).digest()


def next_token(kv: bytes) -> int:
    return 1 + kv[0] % 2 if kv[1] > 20 else STOP


@lru_cache(maxsize=256)
def prompt_contents(prompt: Prompt) -> list[object]:
    """What the language model sees at each token."""
    return [
        (prompt.items[i].identity, int(row)) if i >= 0 else int(token)
        for token, i, row in zip(prompt.ids, prompt.item_index, prompt.row_index, strict=True)
    ]


def reference_output(sequence: Sequence) -> list[int]:
    """The tokens of a sequence that is served alone, with nothing cached."""
    kv = b""
    for content in prompt_contents(sequence.prompt):
        kv = digest(kv, content)
    output: list[int] = []
    while len(output) < sequence.max_output:
        output.append(next_token(kv))
        if output[-1] == STOP:
            break
        kv = digest(kv, output[-1])
    return output


class DeviceModel:
    """Runs plans in order, and asserts that each reads only what was written for it."""

    def __init__(self, page_size: int, num_rows: int, num_slots: int) -> None:
        self.page_size = page_size
        self.kv: dict[tuple[int, int], bytes] = {}
        self.rows: list[object] = [None] * num_rows
        self.last_sampled = [-1] * num_slots
        self.encoded: list[bytes] = []

    def run(self, plan: Plan) -> list[tuple[Sequence, int]]:
        """Returns each sequence that sampled, with its token."""
        for job in plan.encodes:
            self.encoded.append(job.item.identity)
            for row, slot in enumerate(job.lease.slots.tolist()):
                self.rows[slot] = (job.item.identity, row)
        for job in plan.scores:
            self._check_pair(job)
        work = [(s, Span(i, i + 1), True) for s, i in plan.decodes] + list(plan.extends)
        sequences = [sequence for sequence, _, _ in work]
        assert len(set(map(id, sequences))) == len(sequences), "a sequence is planned twice"
        slots = [sequence.slot for sequence in sequences]
        assert len(set(slots)) == len(slots), "two sequences have one state slot"
        owner: dict[tuple[int, int], Sequence] = {}
        for sequence, span, _ in work:
            for token in range(span.start, span.stop):
                assert owner.setdefault(self.place(sequence, token), sequence) is sequence
        return [result for row in work if (result := self._run_row(*row, owner)) is not None]

    def place(self, sequence: Sequence, token: int) -> tuple[int, int]:
        page, offset = divmod(token, self.page_size)
        return int(sequence.pages.array[page]), offset

    def _check_pair(self, job: ScoreJob) -> None:
        """Two steps of one video next to each other are compared, row by row."""
        scoring, step = job.pair
        pair = scoring.steps[step - 1 : step + 1]
        assert pair[1].step == pair[0].step + 1
        for item, slots in zip(pair, (job.before, job.after), strict=True):
            found = [self.rows[slot] for slot in slots.tolist()]
            assert found == [(item.identity, row) for row in range(item.num_rows)]

    def _run_row(self, sequence, span, samples, owner) -> tuple[Sequence, int] | None:
        kv = self._check_prefix(sequence, span.start, owner)
        for token in range(span.start, span.stop):
            kv = digest(kv, self._input(sequence, token))
            self.kv[self.place(sequence, token)] = kv
        if not samples:
            return None
        self.last_sampled[sequence.slot] = next_token(kv)
        return sequence, self.last_sampled[sequence.slot]

    def _check_prefix(self, sequence, stop, owner) -> bytes:
        """Compare the KV before `stop` with what the known tokens must give."""
        length = sequence.prompt.num_tokens
        contents = [*prompt_contents(sequence.prompt), *sequence.output_ids][:stop]
        kv = b""
        for token, content in enumerate(contents):
            kv = digest(kv, content)
            place = self.place(sequence, token)
            assert self.kv[place] == kv, f"token {token} of {length} reads another's KV"
            assert place not in owner, "a step reads a slot that it writes for another token"
        for token in range(len(contents), stop):  # in flight, not known to the host yet
            kv = self.kv[self.place(sequence, token)]
        return kv

    def _input(self, sequence: Sequence, token: int) -> object:
        if token >= sequence.num_known:
            return self.last_sampled[sequence.slot]
        span = Span(token, token + 1)
        content = [*prompt_contents(sequence.prompt), *sequence.output_ids][token]
        if isinstance(content, tuple):
            (slot,) = sequence.arena_rows(span).tolist()
            assert self.rows[slot] == content, "a token reads another's row"
        else:
            assert sequence.ids(span).tolist() == [content]
        return content


def tell_scores(plan: Plan) -> None:
    """Of every row that was compared, the number of its step."""
    for job in plan.scores:
        scoring, step = job.pair
        item = scoring.steps[step]
        scoring.take(step, np.full(item.num_rows, item.step, np.float32))


class Loop:
    """The engine's loop: the results of a step are known only after the next one is planned."""

    def __init__(self, scheduler: Scheduler, device: DeviceModel) -> None:
        self.scheduler = scheduler
        self.device = device
        self.in_flight: list[tuple[Sequence, int]] = []
        self.unanswered: list[tuple[Sequence, int]] = []
        self.computed: dict[Sequence, tuple[int, int]] = {}
        self.plans: list[Plan] = []

    def step(self) -> Plan | None:
        plan = self.scheduler.plan()
        results = []
        if plan is not None:
            self._check(plan)
            results = self.device.run(plan)
            tell_scores(plan)
            self.unanswered += plan.missing_features
            self.plans.append(plan)
        self._deliver(self.in_flight)
        self.in_flight = results
        return plan

    def drain(self, max_steps: int, answer=None) -> None:
        """Run until nothing is left; `answer(sequence, item_index)` gives features."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            busy = self.in_flight or self.unanswered
            plan = self.step()
            assert plan or busy or not self.scheduler.has_work, "nothing would ever go on"
            while self.unanswered and answer:
                answer(*self.unanswered.pop())
        raise AssertionError(f"work is left after {max_steps} steps")

    def _deliver(self, results: list[tuple[Sequence, int]]) -> None:
        for sequence, token in results:
            if sequence.status is Status.FINISHED:
                continue
            self.scheduler.append(sequence, token)
            if token == STOP or sequence.is_full:
                self.scheduler.finish(sequence, "stop" if token == STOP else "length")

    def _check(self, plan: Plan) -> None:
        config = self.scheduler.config
        assert plan.num_tokens <= config.max_step_tokens
        lengths = [row.token_index for row in plan.decodes]
        assert lengths == sorted(lengths, reverse=True)
        patches = [job.item.num_patches for job in plan.encodes]
        assert sum(patches) <= config.max_patches_per_step or len(patches) == 1
        keys = [job.lease.key for job in plan.encodes]
        assert len(set(keys)) == len(keys), "an item is encoded twice in one step"
        spans = [(s, Span(i, i + 1)) for s, i in plan.decodes]
        for sequence, span in [*spans, *(chunk[:2] for chunk in plan.extends)]:
            self._check_order(sequence, span)

    def _check_order(self, sequence: Sequence, span: Span) -> None:
        """Every token once, in order, from the end of what was cached at admission."""
        admission, stop = self.computed.get(sequence, (0, 0))
        if admission == sequence.num_admissions:
            assert span.start == stop
        assert len(span) > 0
        assert span.stop <= sequence.prompt.num_tokens + sequence.max_output - 1
        if self.scheduler.config.whole_items:
            assert sequence.item_start(span.stop) == span.stop
        self.computed[sequence] = (sequence.num_admissions, span.stop)
