"""The steps built of the TPU kernels, in the TPU interpreter, beside those of the portable forms.

Both run the same plans in lockstep: an image cut by a chunk's end, text that joins while it
decodes, decodes alone.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxmm.config import EngineConfig, load_config
from jaxmm.device.backend import Backend
from jaxmm.device.runner import Runner
from jaxmm.dispatch import Dispatcher, Sampled
from jaxmm.host.plan import Plan
from jaxmm.host.sequence import Sequence
from jaxmm.request import SamplingParams
from jaxmm.start import Parts, build_parts
from tests.checkpoints import checkpoint
from tests.engines import SMALL, picture, png, turn

LOGPROB_ATOL = 2e-4
"""Powers of two for powers of e, and sums in another order, through three attention layers."""

SIZES = {
    "max_model_len": 256,
    "buckets.min_step_tokens": 32,
    "buckets.max_step_tokens": 64,
    "buckets.min_lane_patches": 512,
    "buckets.max_patches_per_step": 512,
    "pages.num_pages": 48,
    "arena.num_rows": 128,
    "media.max_pixels": 50176,
}
"""What both can take: steps of 32 or 64 tokens, lanes of 512 patches."""


@pytest.fixture
def interpreting() -> Iterator[None]:
    """On all threads; memory starts as NaN, DMAs run when they are waited for."""
    pltpu.set_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan"))
    yield
    pltpu.set_tpu_interpret_mode(None)  # type: ignore[arg-type]
    pltpu.reset_tpu_interpret_mode_state()


@pytest.fixture
def parts() -> Iterator[Parts]:
    model = str(checkpoint("qwen2_5_vl", wide=True))
    settings = {**SMALL, **SIZES, "model": model, "compile_cache_dir": ""}
    (built,) = build_parts(load_config(EngineConfig, None, settings))
    yield built
    built.close()


def with_pallas(parts: Parts) -> Parts:
    """The same parts but for a runner of its own, with the same weights."""
    runner = Runner(
        parts.model,
        parts.sizes,
        np.float32,
        backend=Backend("pallas"),
        ledger=parts.ledger,
        compile_cache_dir="",
    )
    runner.place(parts.runner._params)
    runner.warm_up(progress=False)
    return dataclasses.replace(parts, runner=runner)


def sequence(parts: Parts, name: str, messages: Any, images: list[bytes], num: int) -> Sequence:
    """A greedy request of so many tokens, with logprobs."""
    ids, slots = parts.tokenizer.encode_chat(messages)
    items = parts.preparer.prepare_items(images)
    return Sequence(
        request_id=name,
        prompt=parts.preparer.prompt(ids, slots, items),
        sampling=SamplingParams(max_tokens=num, ignore_eos=True, logprobs=3),
    )


@pytest.mark.slow
def test_mixed_traffic_gives_the_tokens_and_logprobs_of_the_portable_steps(
    parts: Parts, interpreting: None
) -> None:
    def tokens_of(side: Dispatcher, plan: Plan) -> list[Sampled]:
        pending = side.dispatch(plan)
        return list(side.sampled(pending, side.fetch(pending)))

    sides = [Dispatcher(parts), Dispatcher(with_pallas(parts))]
    image = png(picture(224, 168))  # 16 x 12 patches, 48 rows: windows of 64 and of 32 patches
    first = sequence(parts, "first", turn("describe", "<image>", "and the house"), [image], 3)
    late = sequence(parts, "late", turn("what is in the picture"), [], 2)
    parts.scheduler.add(first)
    shapes = []
    while parts.scheduler.has_work:
        plan = parts.scheduler.plan()
        assert plan is not None
        shapes.append((len(plan.decodes), [len(chunk.span) for chunk in plan.extends]))
        portable, pallas = (tokens_of(side, plan) for side in sides)
        assert [s.token_id for s in pallas] == [s.token_id for s in portable]
        for ours, theirs in zip(pallas, portable, strict=True):
            assert ours.logprob is not None and theirs.logprob is not None
            np.testing.assert_allclose(
                [value for _, value in ours.logprob.top],
                [value for _, value in theirs.logprob.top],
                atol=LOGPROB_ATOL,
            )
        for sampled in portable:
            parts.scheduler.append(sampled.sequence, sampled.token_id)
            if len(sampled.sequence.output_ids) == sampled.sequence.sampling.max_tokens:
                parts.scheduler.finish(sampled.sequence, "length")
        if len(first.output_ids) == 1 and late.num_computed == 0:
            parts.scheduler.add(late)
    (rows,) = first.prompt.items[0].offsets
    assert rows.start < 64 < rows.stop  # the first chunk ends inside the image
    assert shapes[0] == (0, [64])
    assert any(decodes and extends for decodes, extends in shapes)
    assert any(decodes and not extends for decodes, extends in shapes)
