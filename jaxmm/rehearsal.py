"""Runs the executables of small buckets once while there is nothing else to do. Host only.

XLA's CPU back end prepares the products of an executable at its first run, on one thread: 250 ms
for a step of 320 tokens that takes 370. So the first request of each size would wait for it.
"""

import time
from collections import deque

import numpy as np

from jaxmm.device.runner import Runner
from jaxmm.host.batch import StepBatch
from jaxmm.host.lanes import MERGE_SIZE, EncodeBatch, join_lanes
from jaxmm.host.page_pool import PagePool
from jaxmm.models.config import ModelConfig
from jaxmm.models.lane_forms import pack_items
from jaxmm.sizes import Sizes

MAX_TOKENS, MAX_PATCHES = 512, 2048
"""A bucket above takes longer than a request should wait for a rehearsal, and saves little."""
_REST_SECONDS = 0.5  # after other work: a request is often followed by another one
_RETRY_SECONDS = 0.2  # executables are still being read, or no page is free
_PREFIX_TOKENS = 600  # that the step's tokens see: enough for every loop over keys to run


class Rehearsal:
    """The buckets whose first run is still to come; belongs to the engine's thread.

    Nothing is seen of it: what a rehearsal writes goes to a page that nobody has and to the
    arena's row for filler.
    """

    def __init__(self, runner: Runner | None, sizes: Sizes, model: ModelConfig, pool: PagePool):
        """Plan all rehearsals, the smallest first, as executables are read; without a runner none.

        Args:
            runner: Of an engine of one device.
            sizes: Its sizes.
            model: Dimensions.
            pool: Lends a page for each rehearsal.
        """
        self._runner = runner
        self._sizes, self._model, self._pool = sizes, model, pool
        buckets = [("language", rung) for rung in sizes.buckets.tokens if rung <= MAX_TOKENS]
        buckets += [("encode", rung) for rung in sizes.buckets.patches if rung <= MAX_PATCHES]
        buckets += [("score", 0)] if model.video_token_id >= 0 else []
        self._left = deque(sorted(buckets, key=lambda bucket: bucket[1]) if runner else ())
        self._due = time.monotonic() + _REST_SECONDS

    @property
    def seconds_left(self) -> float | None:
        """Time until the next one is due; None when all are done."""
        return max(0.0, self._due - time.monotonic()) if self._left else None

    def put_off(self) -> None:
        """There was other work: rest."""
        self._due = time.monotonic() + _REST_SECONDS

    def go_on(self) -> None:
        """Run the next one if it is due and can be; no sequence is running or waiting."""
        if self._runner is None or self.seconds_left != 0.0:
            return
        step, size = self._left[0]
        if self._runner.was_run(step, size):
            self._left.popleft()
        elif self._pool.num_free == 0 or not self._runner.is_ready(step, size):
            self._due = time.monotonic() + _RETRY_SECONDS
        else:
            self._left.popleft()
            self._run(self._runner, step, size)

    def _run(self, runner: Runner, step: str, size: int) -> None:
        if step == "score":
            filler = np.array([self._sizes.num_rows], np.int32)
            runner.read_scores(runner.score(filler, filler))
            return
        if step == "encode":
            runner.encode(join_lanes([self._lane(size)] * self._sizes.num_lanes))
            size = self._sizes.buckets.tokens[0]  # a step reads the arena: its end is the lane's
        page = self._pool.allocate(1)
        sampled = runner.step(self._batch(runner, size, int(page[0])))
        self._pool.release(page)  # steps run in order
        runner.fetch(sampled, logprobs=False)

    def _batch(self, runner: Runner, num_tokens: int, page: int) -> StepBatch:
        """One decode, and one chunk of all other tokens, whose keys all lie in one page."""
        sizes = self._sizes
        batch = StepBatch(runner.layout(num_tokens))
        num_sequences = min(num_tokens, 2)
        prefix = min(_PREFIX_TOKENS, sizes.num_table_pages * sizes.page_size - num_tokens)
        counts = np.array([1, num_tokens - 1], np.int32)[:num_sequences]
        batch["num_tokens"][...] = num_tokens
        batch["num_decodes"][...] = batch["num_samples"][...] = 1
        batch["num_sequences"][...] = num_sequences
        batch["num_ids"][...] = self._model.text.vocab_size
        batch["feed_T"][:] = batch["row_T"][:] = -1
        batch["kv_slot_T"][:] = page * sizes.page_size + np.arange(num_tokens) % sizes.page_size
        batch["tables_BQ"][:num_sequences] = page
        batch["starts_B"][:num_sequences] = np.arange(num_sequences)
        batch["counts_B"][:num_sequences] = counts
        batch["lengths_B"][:num_sequences] = prefix + counts
        if batch.layout.both_ways:
            batch["seen_T"][:] = prefix + counts[-1] - 1  # as within a picture: the last key
        return batch

    def _lane(self, num_patches: int) -> EncodeBatch:
        """A lane full of black patches that all belong together, whose rows nobody reads."""
        vision = self._model.vision
        lane = pack_items(
            [], [], [], vision, lane_patches=num_patches, drop_slot=self._sizes.num_rows
        )
        lane.segment[:] = 0
        if lane.window is not None:
            lane.window[:] = np.arange(num_patches) // vision.window_patches
        if lane.sizes is not None:
            lane.sizes[:] = (MERGE_SIZE, num_patches // MERGE_SIZE)
        return lane
