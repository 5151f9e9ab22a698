"""A plan on its way through the device: lanes, history and batch in, sampled tokens out.
Host only."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmm.host.batch import SampleRow, build_batch, sampled_rows
from jaxmm.host.lanes import LaneItem, pack_lanes, spread
from jaxmm.host.plan import EncodeJob, Plan
from jaxmm.host.sequence import Sequence as Generation
from jaxmm.request import TokenLogprob
from jaxmm.start import Parts


class Pending(NamedTuple):
    """A step on the device whose tokens have not been read."""

    rows: list[SampleRow]
    sampled: Any
    logprobs: bool


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
        pending = Pending(sampled_rows(plan), sampled, bool(batch["any_logprobs"]))
        parts.padding.add(plan.num_tokens, layout.num_tokens)
        parts.ledger.check(f"a step of {plan.num_tokens} tokens in bucket {layout.num_tokens}")
        return pending

    def fetch(self, pending: Pending) -> Any:
        """Wait for a step and read what it sampled."""
        return self._parts.runner.fetch(pending.sampled, logprobs=pending.logprobs)

    def read(self, pending: Pending) -> Iterator[Sampled]:
        """Wait for a step's tokens."""
        return self.sampled(pending, self.fetch(pending))

    def sampled(self, pending: Pending, fetched: Any) -> Iterator[Sampled]:
        """The tokens of a step, from what `fetch` gave for it."""
        tokens: list[int] = fetched.token_B[: len(pending.rows)].tolist()
        for r, (row, token) in enumerate(zip(pending.rows, tokens, strict=True)):
            wanted = row.sequence.sampling.logprobs
            logprob = None if wanted is None else _token_logprob(fetched, r, token, wanted)
            yield Sampled(row.sequence, token, logprob)

    def _encode(self, jobs: Sequence[EncodeJob]) -> None:
        """Start the encoder on all jobs, in as few lanes as take them."""
        parts, vision, buckets = self._parts, self._parts.model.vision, self._parts.sizes.buckets
        sizes = [parts.packed_patches(job.item) for job in jobs]
        for lanes in spread(sizes, parts.sizes.num_lanes, buckets.patches[-1]):
            batch = pack_lanes(
                [[_lane_item(jobs[i]) for i in lane] for lane in lanes],
                lane_patches=buckets.lane_patches(max(sum(sizes[i] for i in x) for x in lanes)),
                patch_values=vision.patch_values,
                window_patches=vision.window_patches,
                with_sizes=vision.position_side > 0,
                drop_slot=parts.sizes.num_rows,
            )
            parts.runner.encode(batch)

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


def _lane_item(job: EncodeJob) -> LaneItem:
    assert job.item.features is not None, "an item is encoded from its features"
    return LaneItem(job.item.features, job.item.grid_thw, job.lease.slots)


def _token_logprob(fetched: Any, row: int, token: int, num_top: int) -> TokenLogprob:
    ids = fetched.top_id_BX[row, :num_top].tolist()
    values = fetched.top_logprob_BX[row, :num_top].tolist()
    return TokenLogprob(
        token_id=token,
        logprob=float(fetched.logprob_B[row]),
        top=tuple(zip(ids, values, strict=True)),
    )
