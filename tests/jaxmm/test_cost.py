"""What a request would cost, by hand; against served requests it is tested with the server."""

from types import SimpleNamespace

from jaxmm.cost import estimate
from jaxmm.host.buckets import Buckets
from tests.jaxmm.host.prompts import MERGE, Picture
from tests.jaxmm.host.test_scheduler import PAGE, build, sequence_of


def parts_of(**changes):  # type: ignore[no-untyped-def]
    """As much of an engine's parts as an estimate needs; nothing is cached."""
    loop, pool, cache, arena = build(**changes)
    return SimpleNamespace(
        scheduler=loop.scheduler,
        pool=pool,
        prefix_cache=cache,
        arena=arena,
        sizes=SimpleNamespace(page_size=PAGE, buckets=Buckets(tokens=(8, 16), patches=(24, 48))),
        packed_patches=lambda item: item.num_patches,
    )


def test_buckets_and_their_filler() -> None:
    # 3 + 5 + 12 tokens: a step of 16 and one of 4 in a bucket of 8; 20 patches in a lane of 24
    cost = estimate(sequence_of([1] * 3, Picture("a", 5), [2] * 12), parts_of())
    assert (cost.prompt_tokens, cost.step_tokens, cost.cached_tokens) == (20, (16, 8), 0)
    assert cost.step_padding == 1 - 20 / 24
    [image] = cost.images
    assert (image.tokens, image.lane_patches, image.cached) == (5, 24, "no")
    assert image.padding == 1 - 5 * MERGE / 24


def test_steps_end_before_pictures_that_stay_whole() -> None:
    asked = sequence_of([1] * 12, Picture("a", 8), [2] * 4)
    assert estimate(asked, parts_of()).step_tokens == (16, 8)
    whole = estimate(asked, parts_of(whole_items=True))  # 12 tokens of text, then the others
    assert whole.step_tokens == (16, 16)
    assert whole.step_padding == 1 - 24 / 32


def test_a_step_that_is_scored_is_encoded_whether_it_keeps_tokens_or_not() -> None:
    asked = sequence_of([1], Picture("a", 4), [2])
    asked.item_spans = ()  # as of a step of which nothing is kept
    [kept_nothing] = estimate(asked, parts_of()).images
    [scored] = estimate(asked, parts_of(), {0}).images
    assert (kept_nothing.lane_patches, scored.lane_patches) == (0, 24)
    assert scored.cached == "no"
