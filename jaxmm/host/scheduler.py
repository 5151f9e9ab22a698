"""Decides what each step computes: who runs, with which pages, rows and tokens. Host only.

A plan is made before the results of the plan before it are known; device steps run in the order
of their plans. So what a sequence gives back may be handed out again at once, and whatever is
planned counts as computed for all later plans, but not inside its own: pages enter the prefix
cache, and rows that were passed go back, when the next plan begins.

The oldest running sequence always gets on: every page that it does not hold is free, evictable,
or held by a newer one that can be retracted.
"""

import dataclasses
import logging
from bisect import insort
from collections.abc import Sequence as Several
from dataclasses import dataclass
from operator import attrgetter

from jaxmm.errors import Overloaded, RequestError
from jaxmm.host.arena import Arena, RowKey
from jaxmm.host.item import Item
from jaxmm.host.kept import Keep
from jaxmm.host.limits import SchedulerConfig, check_fits, output_limit
from jaxmm.host.page_pool import PagePool
from jaxmm.host.pins import Pins
from jaxmm.host.plan import Draft, Plan
from jaxmm.host.prefix_cache import PrefixCache
from jaxmm.host.residency import Residency
from jaxmm.host.router import Offer
from jaxmm.host.scoring import Scorings
from jaxmm.host.sequence import Sequence, Status
from jaxmm.host.sharing import is_being_computed, num_shared_soon, num_usable
from jaxmm.host.staging import Shortage, ask_for_features, stage_chunk
from jaxmm.host.waiting import WaitingQueue, is_entitled, overtake
from jaxmm.request import FinishReason

logger = logging.getLogger(__name__)

MAX_DEFERRALS = 256
"""Plans for which a sequence waits for another one's prefill of the same prompt."""

_by_order = attrgetter("order")


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    plans: int = 0
    decode_tokens: int = 0
    extend_tokens: int = 0
    encoded_items: int = 0
    uploaded_items: int = 0
    """Whose rows came with their request."""
    encoded_patches: int = 0
    prompt_tokens: int = 0
    """Of sequences admitted, each counted once."""
    cached_tokens: int = 0
    """Of `prompt_tokens`, read from the prefix cache."""
    output_tokens: int = 0
    """Sampled and read."""
    retracts: int = 0
    finished: int = 0
    aborted: int = 0


class Scheduler:
    """Turns sequences into plans. One thread calls it; it never blocks."""

    def __init__(
        self, config: SchedulerConfig, pool: PagePool, prefix_cache: PrefixCache, arena: Arena
    ) -> None:
        self.config = config
        self.counters = SchedulerCounters()
        self._pool = pool
        self._cache = prefix_cache
        self._arena = arena
        self.pins = Pins(
            prefix_cache, config.max_pinned_pages, config.max_sessions, config.max_kept_bytes
        )
        self.scorings = Scorings(arena)
        self._residency = Residency(pool, prefix_cache, self.pins, arena, config.max_running)
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []  # in order of arrival
        self._extended: list[Sequence] = []  # by the last plan
        self._requests: dict[str, list[Sequence]] = {}
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished, or a video waits for its scores or has rows to give
        back; `plan` may still give None while one waits."""
        return bool(self._requests) or self.scorings.has_work

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def awaits_tokens(self) -> bool:
        """Sequences wait for tokens that were sampled and not read, and no other could decode."""
        going = [s for s in self._running if s.num_sampled < s.max_output]
        awaiting = [s.awaits_token for s in going if s.num_computed >= s.extend_stop]
        return bool(awaiting) and all(awaiting)

    def offer(self, sequence: Sequence) -> Offer:
        """What there is for a sequence that has not been added; changes nothing."""
        cached = self._num_usable(sequence)
        unread = [s for s in self._running if s.num_computed < s.extend_stop]
        unread += [*self._extended, *self._waiting.window()]
        cached = num_shared_soon(sequence, cached, unread, self.config.page_size)
        rows = sum(
            sequence.prompt.items[i].num_rows
            for i in sequence.items_after(cached)
            if RowKey.of(sequence.prompt.items[i], sequence.salt) in self._arena
        )
        return Offer(cached + rows, self.num_ahead, self._is_full)

    def offer_rows(self, items: Several[Item], salt: str) -> Offer:
        """What there is for items that shall be encoded and compared; changes nothing."""
        rows = sum(item.num_rows for item in items if RowKey.of(item, salt) in self._arena)
        return Offer(rows, self.num_ahead, self._is_full)

    @property
    def _is_full(self) -> bool:
        taken = len(self._running) + len(self._waiting) + len(self.scorings)
        return taken >= self.config.max_running

    @property
    def num_ahead(self) -> int:
        """Tokens still to compute for what has been added: prompts, and a bounded part of output,
        whose length is not known; of videos that are scored, rows still to encode as well."""
        unfinished = [s for siblings in self._requests.values() for s in siblings]
        prompts = sum(
            max(0, s.extend_stop - s.num_computed) if s.status is Status.RUNNING else s.num_known
            for s in unfinished
        )
        expected = self.config.reserve_tokens
        outputs = sum(min(expected, s.max_output - s.num_sampled) for s in unfinished)
        return prompts + outputs + self.scorings.num_ahead

    def expected_tokens(self, sequence: Sequence) -> int:
        """What a sequence that has not been added would add to `num_ahead`."""
        output = output_limit(sequence, self.config, self._pool)
        return sequence.prompt.num_tokens + min(self.config.reserve_tokens, output)

    def add(self, *sequences: Sequence) -> None:
        """Queue sequences, all or none: the `n` completions of one request together.

        Raises:
            RequestError: One can never fit (`check_fits`), or all of them the queue; the message
                has the figures.
            Overloaded: The queue is full.
        """
        for sequence in sequences:
            check_fits(sequence, self.config, self._pool, self._arena)
        if len(sequences) > self.config.max_waiting:
            raise RequestError(
                f"the request has {len(sequences)} completions; the queue holds "
                f"{self.config.max_waiting}. Ask for fewer, or raise max_waiting."
            )
        num_waiting = len(self._waiting) + len(sequences)
        if num_waiting > self.config.max_waiting:
            raise Overloaded(
                f"{len(self._waiting)} requests are waiting; the limit is "
                f"{self.config.max_waiting}. Send the request again later."
            )
        for sequence in sequences:
            self._enqueue(sequence)

    def plan(self) -> Plan | None:
        """Decide the next step; None when nothing can be computed now.

        The counts of all sequences in the plan move on at once, so the plan must be run, and
        runs before the next one. Batch it before the next call of any method: until then pages,
        slot and leases are those that the step needs.
        """
        plan = self._plan()
        while plan is None and self.scorings.got_on:  # with nothing for the device: others may now
            plan = self._plan()
        return plan

    def _plan(self) -> Plan | None:
        for sequence in self._extended:
            if sequence.status is Status.RUNNING:
                self._residency.settle(sequence)
        self.scorings.settle()
        draft = Draft(
            tokens_left=self.config.max_step_tokens,
            patches_left=self.config.max_patches_per_step,
            max_lane_patches=self.config.max_lane_patches,
        )
        self._plan_decodes(draft)
        self._plan_chunks(draft)
        if self.counters.plans % 2:  # they take turns at what is left of the patches
            self._plan_admissions(draft)
            self.scorings.plan(draft)
        else:
            self.scorings.plan(draft)
            self._plan_admissions(draft)
        self._extended = [chunk.sequence for chunk in draft.extends]
        plan = draft.build()
        if plan is not None:
            self._count(plan, draft)
        return plan

    def append(self, sequence: Sequence, token_id: int) -> None:
        """Take note of the next sampled token of an unfinished sequence, in order."""
        assert sequence.status is not Status.FINISHED, "a finished sequence gets no tokens"
        assert len(sequence.output_ids) < sequence.num_sampled, "no plan sampled this token"
        sequence.output_ids.append(token_id)
        self.counters.output_tokens += 1

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, running or not, and take back everything it holds, at once."""
        assert sequence.status is not Status.FINISHED, "a sequence was finished twice"
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
            self._residency.give_back(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        siblings = self._requests[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request_id]
        self.counters.finished += reason != "abort"
        self.counters.aborted += reason == "abort"

    def abort(self, request_id: str) -> None:
        """End all sequences of a request that are unfinished; an unknown id is no error."""
        for sequence in list(self._requests.get(request_id, ())):
            self.finish(sequence, "abort")

    def keep(self, sequence: Sequence, keep: Keep) -> None:
        """Pin what is cached of a finished sequence as the prefix of a conversation."""
        assert sequence.status is Status.FINISHED, "a running sequence has its pages locked"
        self.pins.keep(keep, sequence.prefix_key(sequence.num_known))

    def provide_features(self, sequence: Sequence, first: int, items: Several[Item]) -> None:
        """Answer `Plan.missing_features`, for all sequences of the same request.

        Args:
            sequence: One of them.
            first: Index of the first item that is answered.
            items: It and those after it, the same as before with `features` or `embeddings`.
        """
        here = slice(first, first + len(items))
        for sibling in self._requests.get(sequence.request_id, ()):
            known = list(sibling.prompt.items)
            same = [item.identity for item in known[here]] == [item.identity for item in items]
            assert same, "features of another item"
            known[here] = items
            sibling.prompt = dataclasses.replace(sibling.prompt, items=tuple(known))
            sibling.missing.difference_update(range(here.start, here.stop))
            if not sibling.missing:
                self._waiting.unpark(sibling)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.order = self._num_added
        self._num_added += 1
        sequence.max_output = output_limit(sequence, self.config, self._pool)
        siblings = self._requests.setdefault(sequence.request_id, [])
        if siblings:
            sequence.missing = siblings[0].missing  # one question a request, not one a completion
        siblings.append(sequence)
        self._waiting.add(sequence)

    # Decodes

    def _plan_decodes(self, draft: Draft) -> None:
        """One token for each sequence past its extend; the oldest first, it may retract others."""
        running, page_size = self._running, self.config.page_size
        position = 0
        while position < len(running):  # retracts shorten it, from the end
            sequence = running[position]
            position += 1
            index = sequence.num_computed
            if index < sequence.extend_stop or sequence.num_sampled >= sequence.max_output:
                continue
            if sequence.awaits_token:
                continue
            if index < len(sequence.pages) * page_size or self._grow(sequence):
                draft.decode(sequence)

    def _grow(self, sequence: Sequence) -> bool:
        """Get one more page, retracting the newest running ones; False: that was this one."""
        while not self._residency.grow(sequence, 1):
            newest = self._running[-1]
            self._retract(newest)
            if newest is sequence:
                return False
        return True

    def _retract(self, sequence: Sequence) -> None:
        """Take everything from a running sequence and queue it again; it is in no draft."""
        logger.info(
            "retract request=%s index=%d pages=%d pages_free=%d",
            sequence.request_id, sequence.index, len(sequence.pages), self._pool.num_free,
        )  # fmt: skip
        self._running.remove(sequence)
        self._residency.give_back(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed = sequence.extend_stop = 0
        self._waiting.add(sequence)
        self.counters.retracts += 1

    # Chunks of admitted sequences

    def _plan_chunks(self, draft: Draft) -> None:
        for sequence in [s for s in self._running if s.num_computed < s.extend_stop]:
            if draft.tokens_left == 0:
                return
            if sequence.status is not Status.RUNNING:
                continue  # retracted for the rows of one before it
            while (  # if an older one gets on, rows will be passed without a retract
                self._extend(sequence, draft) is Shortage.ROWS
                and not draft.extends
                and (self.scorings.yield_rows() or self._retract_for_rows(sequence))
            ):
                pass

    def _extend(self, sequence: Sequence, draft: Draft) -> Shortage:
        """Plan the longest chunk that the step has room for, if any.

        Returns:
            NONE if the sequence got on, even by less than wanted; else what it lacks.
        """
        start = sequence.num_computed
        stop = min(start + draft.tokens_left, sequence.extend_stop)
        if self.config.whole_items:
            stop = sequence.item_start(stop)
        if stop <= start:
            return Shortage.TOKENS
        stop, shortage = stage_chunk(sequence, stop, self._arena, draft)
        if stop == start:
            return shortage
        draft.extend(sequence, stop)
        return Shortage.NONE

    def _retract_for_rows(self, sequence: Sequence) -> bool:
        """Retract the newest sequence that holds rows, if it is newer than this one."""
        for newest in reversed(self._running):
            if newest is sequence:
                return False
            if newest.leases:
                self._retract(newest)
                return True
        return False

    # Admissions

    def _plan_admissions(self, draft: Draft) -> None:
        if not (len(self._waiting) and draft.tokens_left and self._residency.num_slots):
            return
        reserve = sum(map(self._reserve, self._running))
        queue = self._candidates(draft)
        passed = [sequence for sequence, _ in queue]
        for sequence, cached in queue:
            if not (draft.tokens_left and self._residency.num_slots):
                return
            shortage = self._admit(sequence, cached, reserve, draft)
            if shortage in (Shortage.NONE, Shortage.PREFILL):
                passed.remove(sequence)
            if shortage is Shortage.NONE:
                overtake(sequence, passed)
                reserve += self._reserve(sequence)
            elif shortage is Shortage.PAGES or (shortage.is_transient and is_entitled(sequence)):
                return

    def _reserve(self, sequence: Sequence) -> int:
        """Pages to keep free for a running sequence."""
        size = self.config.page_size
        last = sequence.prompt.num_tokens + sequence.max_output
        return min(-(-last // size) - len(sequence.pages), -(-self.config.reserve_tokens // size))

    def _candidates(self, draft: Draft) -> list[tuple[Sequence, int]]:
        """Waiting sequences that could start now, in the order in which they may.

        Returns:
            Each with the number of its tokens that are cached.
        """
        ready: list[tuple[Sequence, int]] = []
        for sequence in list(self._waiting.retracted):
            if sequence.num_sampled >= sequence.max_output:
                continue  # its last token is on its way
            if len(sequence.output_ids) < sequence.num_sampled:
                return ready  # a token away from being ready: nobody takes its pages meanwhile
            ready += self._unless_parked(sequence, draft)
        ranked = [
            entry
            for sequence in self._waiting.window()
            for entry in self._unless_parked(sequence, draft)
        ]
        ranked.sort(key=lambda entry: (not is_entitled(entry[0]), -entry[1]))
        return ready + ranked

    def _unless_parked(self, sequence: Sequence, draft: Draft) -> list[tuple[Sequence, int]]:
        """A waiting sequence and its cached tokens; nothing if it has to wait for features."""
        cached = self._num_usable(sequence)
        if ask_for_features(sequence, cached, self._arena, draft):
            self._waiting.park(sequence)
            return []
        return [(sequence, cached)]

    def _num_usable(self, sequence: Sequence) -> int:
        return num_usable(sequence, self._cache, whole_items=self.config.whole_items)

    def _admit(self, sequence: Sequence, cached: int, reserve: int, draft: Draft) -> Shortage:
        """Start a waiting sequence with a first chunk, or say what it lacks."""
        if self._waits_for_prefill(sequence, cached, draft):
            sequence.deferrals += 1
            return Shortage.PREFILL
        match = self._cache.match(sequence.prefix_key(cached))
        if match.num_tokens < cached:  # evicted for one admitted in this very plan
            cached = self._num_usable(sequence)
            match = self._cache.match(sequence.prefix_key(cached))
        self._cache.lock(match.node)
        num_pages = sequence.num_known // self.config.page_size + 1  # for one output token more
        shortage = Shortage.PAGES
        if self._residency.can_have(num_pages - len(match.pages) + reserve):
            sequence.num_computed, sequence.extend_stop = cached, sequence.num_known
            shortage = self._extend(sequence, draft)
        if shortage is not Shortage.NONE:
            sequence.num_computed = sequence.extend_stop = 0
            self._cache.unlock(match.node)
            return shortage
        self._residency.take(sequence, match, num_pages)
        self._start(sequence, cached)
        return Shortage.NONE

    def _start(self, sequence: Sequence, cached: int) -> None:
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=_by_order)
        sequence.status = Status.RUNNING
        sequence.num_admissions += 1
        if sequence.num_admissions == 1:
            sequence.num_cached = cached
            self.counters.prompt_tokens += sequence.prompt.num_tokens
            self.counters.cached_tokens += cached

    def _waits_for_prefill(self, sequence: Sequence, cached: int, draft: Draft) -> bool:
        """Tell whether most of what a sequence would compute is being computed by another."""
        if not self._cache.enabled or sequence.deferrals >= MAX_DEFERRALS:
            return False
        extending = [s for s in self._running if s.num_computed < s.extend_stop]
        extending += [chunk.sequence for chunk in draft.extends if chunk.samples]
        return is_being_computed(sequence, cached, extending, self.config.page_size)

    def _count(self, plan: Plan, draft: Draft) -> None:
        self.counters.plans += 1
        self.counters.decode_tokens += len(plan.decodes)
        self.counters.extend_tokens += plan.num_tokens - len(plan.decodes)
        uploads = sum(job.item.embeddings is not None for job in plan.encodes)
        self.counters.uploaded_items += uploads
        self.counters.encoded_items += len(plan.encodes) - uploads
        self.counters.encoded_patches += draft.num_patches
