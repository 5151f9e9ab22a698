"""A plan on its way through the device: lanes, history and batch in, sampled tokens out.
Host only."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.host.batch import SampleRow, build_batch, sampled_rows
from jaxmm.host.lanes import EncodeBatch, join_lanes, spread
from jaxmm.host.plan import EncodeJob, Plan, ScoreJob
from jaxmm.host.sequence import Sequence as Generation
from jaxmm.models.lane_forms import pack_items
from jaxmm.request import TokenLogprob
from jaxmm.start import Parts


class Pending(NamedTuple):
    """A step on the device whose tokens and scores have not been read."""

    rows: list[SampleRow]
    sampled: Any
    """None: no language step."""
    logprobs: bool
    jobs: tuple[ScoreJob, ...]
    scores: Any


class Fetched(NamedTuple):
    """What has been read of a step."""

    scores: npt.NDArray[np.float32] | None
    """Of all its jobs, one after the other."""
    sampled: Any


class Sampled(NamedTuple):
    """One token that a step sampled."""

    sequence: Generation
    token_id: int
    logprob: TokenLogprob | None


class Dispatcher:
    """Runs plans in their order; one thread calls it. Nothing but `fetch` waits for the device, and
    that another thread may call."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def dispatch(self, plan: Plan) -> Pending:
        """Start a step; the plan's sequences must not have changed since it was made."""
        parts, runner = self._parts, self._parts.runner
        for job in plan.encodes:
            if job.item.embeddings is not None:
                runner.upload(job.item.embeddings, job.lease.slots)
        self._encode([job for job in plan.encodes if job.item.embeddings is None])
        scores = self._score(plan.scores)
        if plan.num_tokens == 0:
            return Pending([], None, False, plan.scores, scores)
        self._prime(plan)
        layout = runner.layout(plan.num_tokens)
        batch = build_batch(
            plan,
            layout,
            page_size=parts.sizes.page_size,
            num_ids=parts.tokenizer.vocab_size,
            eos_ids=parts.eos_ids,
        )
        sampled = runner.step(batch)
        pending = Pending(
            sampled_rows(plan), sampled, bool(batch["any_logprobs"]), plan.scores, scores
        )
        parts.padding.add(plan.num_tokens, layout.num_tokens)
        parts.ledger.check(f"a step of {plan.num_tokens} tokens in bucket {layout.num_tokens}")
        return pending

    def fetch(self, pending: Pending) -> Fetched:
        """Wait for a step, and read what it compared and sampled."""
        runner = self._parts.runner
        scores = runner.read_scores(pending.scores) if pending.jobs else None
        if pending.sampled is None:
            return Fetched(scores, None)
        return Fetched(scores, runner.fetch(pending.sampled, logprobs=pending.logprobs))

    def sampled(self, pending: Pending, fetched: Fetched) -> Iterator[Sampled]:
        """The tokens of a step, from what `fetch` gave for it."""
        return iter(()) if fetched.sampled is None else self._tokens(pending, fetched.sampled)

    def scored(
        self, pending: Pending, fetched: Fetched
    ) -> Iterator[tuple[ScoreJob, npt.NDArray[np.float32]]]:
        """The scores of a step, float32[M] for each job, from what `fetch` gave for it."""
        start = 0
        for job in pending.jobs:
            assert fetched.scores is not None, "a step with jobs has their scores"
            yield job, fetched.scores[start : start + len(job.after)]
            start += len(job.after)

    def _tokens(self, pending: Pending, fetched: Any) -> Iterator[Sampled]:
        tokens: list[int] = fetched.token_B[: len(pending.rows)].tolist()
        for r, (row, token) in enumerate(zip(pending.rows, tokens, strict=True)):
            wanted = row.sequence.sampling.logprobs
            logprob = None if wanted is None else _token_logprob(fetched, r, token, wanted)
            yield Sampled(row.sequence, token, logprob)

    def _encode(self, jobs: Sequence[EncodeJob]) -> None:
        """Start the encoder on all jobs, on each chip a lane of them."""
        parts = self._parts
        sizes = [parts.packed_patches(job.item) for job in jobs]
        for lanes in spread(sizes, parts.sizes.num_lanes, parts.sizes.buckets.patches[-1]):
            fullest = max(sum(sizes[i] for i in lane) for lane in lanes)
            rung = parts.sizes.buckets.lane_patches(fullest)
            packed = [self._lane([jobs[i] for i in lane], rung) for lane in lanes]
            parts.runner.encode(join_lanes(packed))

    def _score(self, jobs: Sequence[ScoreJob]) -> Any:
        if not jobs:
            return None
        before, after = (
            np.concatenate([job.before for job in jobs]),
            np.concatenate([job.after for job in jobs]),
        )
        return self._parts.runner.score(before, after)

    def _lane(self, jobs: Sequence[EncodeJob], rung: int) -> EncodeBatch:
        return pack_items(
            [job.item.features for job in jobs if job.item.features is not None],
            [job.item.grid_thw for job in jobs],
            [job.lease.slots for job in jobs],
            self._parts.model.vision,
            lane_patches=rung,
            drop_slot=self._parts.sizes.num_rows,
        )

    def _prime(self, plan: Plan) -> None:
        """Tell the device the history of sequences that were just admitted and need it."""
        for sequence, _, _ in plan.extends:
            params = sequence.sampling
            if not params.changes_logits or sequence.primed_at == sequence.num_admissions:
                continue
            sequence.primed_at = sequence.num_admissions
            prompt = sequence.prompt
            self._parts.runner.prime(
                sequence.slot,
                prompt.ids[prompt.item_index < 0],
                np.array(sequence.output_ids, np.int64),
                dict(params.logit_bias),
            )


def _token_logprob(fetched: Any, row: int, token: int, num_top: int) -> TokenLogprob:
    ids = fetched.top_id_BX[row, :num_top].tolist()
    values = fetched.top_logprob_BX[row, :num_top].tolist()
    return TokenLogprob(
        token_id=token,
        logprob=float(fetched.logprob_B[row]),
        top=tuple(zip(ids, values, strict=True)),
    )
