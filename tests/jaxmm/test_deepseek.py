"""DeepSeek-VL2 served: the authors' answers, and pictures that depend on how many there are.

The families' common properties (one answer however served, nothing compiled, encoded once, no
picture for another) are tested where those of the others are.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxmm.api import generate
from jaxmm.device.backend import model_obstacles
from jaxmm.engine import Engine
from jaxmm.errors import MediaError, RequestError
from jaxmm.host.arena import RowKey
from jaxmm.models import read_config
from jaxmm.request import Embeddings
from tests import deepseek
from tests.engines import (
    ask,
    assert_same,
    engine,
    logprobs,
    make_engine,
    on_loop,
    pages_left,
    picture,
    png,
    request,
    scheduling,
    solo,
    turn,
)

LOGITS = 1e-3
"""Of logits up to 40, float32 on both sides; the authors' own arrays tell right from wrong at
1e-2."""

WIDE, TALL, SQUARE = (png(picture(*size)) for size in ((200, 130, 1), (90, 210, 2), (72, 72, 3)))
ONE_TILE = 3 * 4 + 1 + 3 * 4
"""Rows of a picture that is not cut: 3 x 3, a line end for each line, a separator between."""
WIDE_ROWS = 3 * 4 + 1 + 6 * 10
"""3 x 2 tiles."""


@pytest.fixture
def on() -> Engine:
    """The shared engine, its caches empty."""
    shared = engine("deepseek_vl2_mla")
    shared.flush_caches()
    return shared


ONE_BUCKET = {"buckets.min_step_tokens": 128, "buckets.min_lane_patches": 250}
"""One executable for all language steps and one for all lanes: what these engines are asked is
little, and most of a start is compiling."""


@pytest.fixture(scope="module", params=deepseek.VARIANTS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[deepseek.Variant, Engine]]:
    """A variant and its engine: the shared one of the form that all tests here use."""
    if request.param == "mla":
        yield request.param, engine("deepseek_vl2_mla")
        return
    with make_engine(f"deepseek_vl2_{request.param}", **ONE_BUCKET) as own:  # type: ignore[arg-type]
        yield request.param, own


@pytest.mark.parametrize("case", deepseek.CASES)
def test_sixteen_greedy_tokens_are_the_authors(
    served: tuple[deepseek.Variant, Engine], case: str
) -> None:
    variant, on = served
    given, golden = deepseek.cases(variant)[case], deepseek.arrays(variant)
    asked = request(deepseek.conversation(given), deepseek.pictures(given))
    [result] = ask(on, asked)
    assert list(result.token_ids) == given["greedy"]
    assert result.usage.prompt_tokens == given["n_tokens"]
    assert result.usage.image_tokens == sum(given.get("image_tokens", ()))
    last = golden[f"{case}/logits_last"].astype(np.float64)
    first = last - last.max() - np.log(np.exp(last - last.max()).sum())
    assert abs(logprobs(result)[0] - first[given["greedy"][0]]) < LOGITS
    assert result.logprobs is not None
    best = golden[f"{case}/greedy_topv"][:, :3]  # logits: what is between them is no matter of norm
    ours = np.array([[value for _, value in entry.top] for entry in result.logprobs])
    np.testing.assert_allclose(ours - ours[:, :1], best - best[:, :1], rtol=0, atol=LOGITS)


def test_every_form_gives_one_answer_however_it_is_served(
    served: tuple[deepseek.Variant, Engine],
) -> None:
    _, on = served
    messages, images = turn("describe", "<image>", "and the house", "<image>"), [WIDE, TALL]
    expected = solo(on, messages, images, max_tokens=64)
    for num_tokens in (17, 50):
        with scheduling(on, max_step_tokens=num_tokens):
            assert_same(solo(on, messages, images, max_tokens=64), expected)
    others = [request(turn("<image>", "what is it"), [SQUARE]), request(turn("two dogs " * 20))]
    [hit, *_] = ask(on, request(messages, images, max_tokens=64), *others)
    assert hit.usage.cached_tokens > 0
    assert_same(hit, expected)
    rival = request(turn("one red house " * 12), max_tokens=64)
    before = on.scheduler.counters.retracts
    with pages_left(on, 21), scheduling(on, reserve_tokens=0):
        assert_same(ask(on, rival, request(messages, images, max_tokens=64))[1], expected)
    assert on.scheduler.counters.retracts > before


def test_a_picture_is_another_one_among_more_than_two(on: Engine) -> None:
    one, three = turn("<image>", "what"), turn("<image>", "<image>", "<image>", "what")
    alone = solo(on, one, [WIDE])
    among = solo(on, three, [WIDE, TALL, SQUARE])
    assert alone.usage.image_tokens == WIDE_ROWS
    assert among.usage.image_tokens == 3 * ONE_TILE
    on.flush_caches()
    before = on.scheduler.counters.encoded_items
    for messages, images, expected in (
        (one, [WIDE], alone),
        (three, [WIDE, TALL, SQUARE], among),
        (one, [WIDE], alone),
        (three, [WIDE, TALL, SQUARE], among),
    ):
        assert_same(ask(on, request(messages, images))[0], expected)
    assert on.scheduler.counters.encoded_items == before + 4  # the wide one in two forms


def test_a_picture_of_one_tile_is_the_same_among_many(on: Engine) -> None:
    before = on.scheduler.counters.encoded_items
    ask(on, request(turn("<image>", "what"), [SQUARE]))
    ask(on, request(turn("<image>", "<image>", "<image>", "what"), [SQUARE] * 3))
    assert on.scheduler.counters.encoded_items == before + 1


def test_known_pictures_whose_rows_are_gone_are_cut_as_before(on: Engine) -> None:
    messages, images = turn("<image>", "<image>", "<image>", "and"), [WIDE, TALL, WIDE]
    expected = solo(on, messages, images)

    def forget() -> None:
        on._parts.prefix_cache.clear()
        on._parts.arena.clear()

    on_loop(on, forget)
    assert_same(ask(on, request(messages, images))[0], expected)


def test_a_third_picture_makes_those_of_earlier_turns_smaller(on: Engine) -> None:
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    with on.session() as chat:
        first = chat.send("what is this", WIDE, **fields)
        second = chat.send("and this", TALL, **fields)
        third = chat.send("and all three", SQUARE, **fields)
        messages, images = list(chat.messages[:-1]), list(chat.images)
    assert first.usage.image_tokens == WIDE_ROWS < second.usage.image_tokens
    assert third.usage.image_tokens == 3 * ONE_TILE
    on.flush_caches()
    assert generate(messages, images, engine=on, **fields).text == third.text


def test_a_plan_tells_what_a_picture_takes(on: Engine) -> None:
    asked = request(turn("<image>", "what"), [WIDE])
    cost = asyncio.run(on.cost(asked))
    [image] = cost.images
    assert (image.tokens, image.grid_thw, image.cached) == (WIDE_ROWS, (1, 10, 15), "no")
    assert image.lane_patches in on.sizes.buckets.patches
    assert image.padding == pytest.approx(1 - 7 * 25 / image.lane_patches)
    [result] = ask(on, asked)
    assert cost.prompt_tokens == result.usage.prompt_tokens
    three = asyncio.run(on.cost(request(turn(*["<image>"] * 3), [WIDE, TALL, SQUARE])))
    assert [image.tokens for image in three.images] == [ONE_TILE] * 3


def test_rows_in_place_of_a_picture_give_its_answer(on: Engine) -> None:
    messages = turn("describe", "<image>", "in one sentence")
    expected = solo(on, messages, [WIDE])
    (item,) = on._parts.preparer.prepare_items([WIDE])
    slots = on._parts.arena._leases[RowKey.of(item, "")].slots
    rows = on_loop(on, lambda: np.asarray(on._parts.runner._arena)[slots])
    given = Embeddings(rows=rows, grid_thw=item.grid_thw)
    with scheduling(on, max_step_tokens=23):  # cut inside
        assert_same(solo(on, messages, [given]), expected)
    wrong = Embeddings(rows=rows, grid_thw=(1, 10, 16))
    with pytest.raises(MediaError, match=r"both multiples of 5"):
        ask(on, request(messages, [wrong]))


def test_limits_that_no_tiling_keeps_are_refused_by_name(on: Engine) -> None:
    two = 2 * 72 * 72
    [small] = ask(on, request(turn("<image>"), [WIDE], max_pixels=two))
    assert small.usage.image_tokens == 3 * 4 + 1 + 3 * 7
    with pytest.raises(RequestError, match="max_pixels=500 is outside"):
        ask(on, request(turn("<image>"), [WIDE], max_pixels=500))
    with pytest.raises(RequestError, match="with more than 2 images each is one tile"):
        ask(on, request(turn(*["<image>"] * 3), [WIDE, TALL, SQUARE], min_pixels=two))


def test_videos_are_refused_by_name(on: Engine) -> None:
    with pytest.raises(RequestError, match=f"^{on.model_name} takes no videos; send pictures"):
        ask(on, request(turn("<video>", "what"), videos=([SQUARE],)))


def test_a_picture_that_is_referred_to_by_grounding_tokens(on: Engine) -> None:
    """`<|ref|>` is a token of its own in what people write, and in answers that say it."""
    ids = on.tokenizer.encode_plain("<|ref|>the red disc<|/ref|>")
    assert (ids[0], ids[-1]) == (516, 517)
    assert not on.tokenizer.special_ids & {516, 517, 518, 519, 520}


@pytest.mark.parametrize("variant", ["mha", "mla"])
def test_the_tpu_kernels_take_both_kinds_of_rows(variant: deepseek.Variant) -> None:
    """All but the width of these checkpoints."""
    [reason] = model_obstacles(read_config(deepseek.FOLDER / variant), np.float32)
    assert "a text width of 64" in reason
