"""Cases of public bug reports that no other file shows: what went wrong there goes right here."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from jaxmm.engine import Engine
from jaxmm.errors import PromptTooLong, RequestError
from jaxmm.models.qwen2_vl.processor import ImageProcessor
from tests.checkpoints import SERVED, Family, checkpoint
from tests.engines import (
    MEDIA,
    ask,
    assert_same,
    engine,
    in_parallel,
    logprobs,
    on_loop,
    pages_left,
    png,
    request,
    rows_left,
    scheduling,
    solo,
    turn,
)
from tests.held import now_or_soon, quiet
from tests.reference import greedy
from tests.serving.soak_server import resident_bytes
from tests.serving.test_clients import wait_until

QUESTION = turn("<image>", "what is in the picture")


def media(name: str) -> bytes:
    return (MEDIA / name).read_bytes()


@pytest.fixture(scope="module")
def on() -> Engine:
    return engine("qwen2_vl")


# Several pictures and turns


@pytest.mark.parametrize("family", SERVED)
def test_two_turns_of_the_user_in_a_row_have_a_picture_each(family: Family) -> None:
    on = engine(family)
    both = [*turn("<image>", "and"), *turn("<image>", "what")]
    red, blue = media("red.png"), media("blue.png")
    one = solo(on, turn("<image>", "and"), [red])
    result = solo(on, both, [red, blue])
    assert result.usage.image_tokens == 2 * one.usage.image_tokens
    assert logprobs(result).tolist() != logprobs(solo(on, both, [blue, red])).tolist()


def test_pictures_stay_between_the_texts_where_they_were_put(on: Engine) -> None:
    """Against the prompt as transformers' tokenizer encodes it, written by hand."""
    red, blue = media("red.png"), media("blue.png")
    parts = ("a red house", "<image>", "and", "<image>", "the left part")
    theirs = AutoTokenizer.from_pretrained(checkpoint("qwen2_vl"))
    pad = theirs.convert_ids_to_tokens(on._parts.model.image_token_id)
    picture = f"<|vision_start|>{pad}<|vision_end|>"
    text = theirs.apply_chat_template(turn("@"), tokenize=False, add_generation_prompt=True)
    text = text.replace("@", "".join(parts).replace("<image>", picture))
    by_hand = theirs(text, add_special_tokens=False).input_ids
    between = solo(on, turn(*parts), [red, blue])
    [written] = ask(on, request(None, [red, blue], token_ids=by_hand))
    assert_same(written, between)
    before = solo(
        on, turn("<image>", "<image>", *(p for p in parts if p != "<image>")), [red, blue]
    )
    assert before.usage.image_tokens == between.usage.image_tokens
    assert logprobs(before).tolist() != logprobs(between).tolist()


@pytest.mark.parametrize("num_tokens", [16, 17, 18, 19, 50])
def test_three_pictures_cut_by_chunks_cold_and_behind_a_cached_one(
    on: Engine, num_tokens: int
) -> None:
    names = ("red.png", "size_112x84.png", "size_448x448.png")
    messages = turn("<image>", "one", "<image>", "two", "<image>", "what")
    pictures = [media(name) for name in names]
    expected = solo(on, messages, pictures)
    assert expected.usage.image_tokens == 16 + 12 + 11 * 11  # the last within 100352 pixels
    with scheduling(on, max_step_tokens=num_tokens):
        assert_same(solo(on, messages, pictures), expected)
        solo(on, turn("<image>", "one", "and"), pictures[:1])
        [again] = ask(on, request(messages, pictures))
    assert again.usage.cached_tokens >= 16
    assert_same(again, expected)


def test_deep_features_of_rows_in_one_step_are_not_mixed() -> None:
    on = engine("qwen3_vl")
    asked: list[tuple[Any, list[bytes]]] = [
        (turn("<image>", "what is it"), [media("big.png")]),
        (turn("<image>", "and this"), [media("size_448x448.png")]),
        (turn("one red house " * 150), []),
    ]
    alone = [solo(on, *one) for one in asked]
    assert alone[2].usage.prompt_tokens > 600
    on.flush_caches()
    for result, expected in zip(ask(on, *(request(*one) for one in asked)), alone, strict=True):
        assert_same(result, expected)


# Retraction


def test_two_long_answers_that_do_not_fit_together(on: Engine) -> None:
    """A pool of 1.4 requests; each has a picture of 121 rows and 200 tokens of output."""
    asked = [(turn("<image>", text), [media("big.png")]) for text in ("what is it", "and how many")]
    expected = [solo(on, *one, max_tokens=200) for one in asked]
    pages = -(-(expected[0].usage.prompt_tokens + 200) // 16)
    retracts = on.scheduler.counters.retracts
    with pages_left(on, pages * 7 // 5), scheduling(on, reserve_tokens=0):
        results = ask(on, *(request(*one, max_tokens=200) for one in asked))
    assert on.scheduler.counters.retracts > retracts
    for result, alone in zip(results, expected, strict=True):
        assert_same(result, alone)


@pytest.mark.parametrize("num_rows", [160, 176])
def test_resumed_requests_whose_prefix_and_rows_are_gone(on: Engine, num_rows: int) -> None:
    """No prefix cache, and an arena that holds the rows of one request, or one picture more; what
    it holds is forgotten while the retracted request waits.

    The rival alone fills the pages, and together the two outgrow them whenever the request joins,
    for which it has the time of some 400 steps.
    """
    names = ("big.png", "red.png", "blue.png")
    messages = turn("<image>", "<image>", "<image>", "what")
    pictures = [media(name) for name in names]
    text = turn("one red house " * 20)
    expected = solo(on, messages, pictures, max_tokens=480)
    prompt = solo(on, text, max_tokens=1).usage.prompt_tokens
    parts, counters = on._parts, on.scheduler.counters
    retracts, misses = counters.retracts, parts.arena.misses
    pages = -(-(prompt + 640) // 16)
    with (
        pages_left(on, pages),
        rows_left(on, num_rows),
        scheduling(on, reserve_tokens=0),
        ThreadPoolExecutor(1) as thread,
    ):
        on_loop(on, lambda: setattr(parts.prefix_cache, "enabled", False))
        try:
            rival = request(text, max_tokens=640)
            both = thread.submit(ask, on, rival, request(messages, pictures, max_tokens=480))
            wait_until(lambda: counters.retracts > retracts or both.done())
            on_loop(on, parts.arena.clear)
            result = both.result()[1]
        finally:
            on_loop(on, lambda: setattr(parts.prefix_cache, "enabled", True))
    assert counters.retracts == retracts + 1
    assert parts.arena.misses == misses + 1 + 2 * len(names)  # one is what `rows_left` holds
    assert result.usage.cached_tokens == 0
    assert_same(result, expected)


def test_steps_of_resumed_completions_alone(on: Engine) -> None:
    """Four requests of two completions each, in pages for three: whole steps only resume."""
    messages, image = QUESTION, media("size_640x480.png")
    expected = solo(on, messages, [image], max_tokens=64)
    pages = -(-(expected.usage.prompt_tokens + 64) // 16)
    before = quiet(on) | {"threads": None}  # those that prepare begin with the first that need them
    retracts = on.scheduler.counters.retracts
    with pages_left(on, 3 * pages), scheduling(on, reserve_tokens=0):
        asked = [request(messages, [image], max_tokens=64, n=2, salt=str(i)) for i in range(4)]
        results = ask(on, *asked)
    assert on.scheduler.counters.retracts > retracts
    for result in results:
        assert [c.token_ids for c in result.completions] == [expected.token_ids] * 2
    assert now_or_soon(lambda: quiet(on) | {"threads": None}, before) == before


# Small pictures


@pytest.mark.parametrize(
    ("family", "name", "tokens"),
    [("qwen2_vl", "size_1x1.png", 4), ("qwen2_5_vl", "size_1x1.png", 4),
     ("qwen2_vl", "size_22x3.png", 6), ("qwen2_vl", "size_3x22.png", 6)],
)  # fmt: skip
def test_pictures_of_few_pixels_are_answered(family: Family, name: str, tokens: int) -> None:
    """Also beside another one; as an array, whose axes cannot be guessed from its shape."""
    on, red = engine(family), media("red.png")
    result = solo(on, QUESTION, [media(name)])
    assert result.usage.image_tokens == tokens
    pixels = np.asarray(opened(name))
    assert_same(solo(on, QUESTION, [pixels]), result)
    [beside] = ask(on, request(turn("<image>", "<image>", "what"), [media(name), red]))
    assert beside.usage.image_tokens == tokens + 16
    processor = ImageProcessor(min_pixels=3136, max_pixels=1003520)
    assert processor.patches(pixels)[0].any()


def opened(name: str) -> Image.Image:
    return Image.open(MEDIA / name).convert("RGB")


# Others in the same steps


def test_text_pictures_and_a_clip_join_a_request_that_decodes(on: Engine) -> None:
    clip, red, blue = map(media, ("10f_10fps.mp4", "red.png", "blue.png"))
    asked: list[tuple[Any, list[bytes], dict[str, Any]]] = [
        (QUESTION, [red], {"max_tokens": 128}),
        (turn("what is in the house"), [], {}),
        (turn("<image>", "<image>", "and"), [blue, red], {}),
        (turn("<video>", "what happens"), [], {"videos": (clip,)}),
        (turn("one red house " * 20), [], {}),
    ]
    alone = [solo(on, messages, images, **fields) for messages, images, fields in asked]
    on.flush_caches()

    def late(i: int) -> Any:
        time.sleep(0.05 * i)
        messages, images, fields = asked[i]
        return ask(on, request(messages, images, **fields))[0]

    for result, expected in zip(in_parallel(late, len(asked)), alone, strict=True):
        assert_same(result, expected)


def test_sixty_at_once_with_stop_strings_and_long_texts(on: Engine) -> None:
    """One tokenizer serves all threads; nobody waits much longer than the others."""
    pictures = [media(name) for name in ("red.png", "green.png", "blue.png", "black.png")]
    asked: list[tuple[Any, list[bytes], dict[str, Any]]] = [
        (QUESTION, [pictures[i % 4]], {}) if i % 2 else (turn(f"{i} red house " * 40), [], {})
        for i in range(20)
    ]
    fields = {"stop": ("zzz", "\n\n\n"), "max_tokens": 4}
    alone = [solo(on, *one[:2], **fields) for one in asked]
    on.flush_caches()

    def timed(i: int) -> tuple[Any, float]:
        start = time.monotonic()
        [result] = ask(on, request(*asked[i % 20][:2], **fields))
        return result, time.monotonic() - start

    results, seconds = zip(*in_parallel(timed, 60), strict=True)
    for i, result in enumerate(results):
        assert_same(result, alone[i % 20])
    assert max(seconds) < 3 * np.median(seconds)


def test_a_picture_above_the_arena_is_refused_at_once_and_others_go_on(on: Engine) -> None:
    """Its 121 rows take eight pages of 16."""
    arena = on._parts.arena
    whole = arena.num_rows
    on.flush_caches()
    on_loop(on, lambda: setattr(arena, "num_rows", 100))
    try:
        start = time.monotonic()
        with pytest.raises((PromptTooLong, RequestError), match=r"128 rows .*100"):
            ask(on, request(QUESTION, [media("big.png")]))
        assert time.monotonic() - start < 10
        assert ask(on, request(QUESTION, [media("red.png")]))[0].usage.image_tokens == 16
    finally:
        on_loop(on, lambda: setattr(arena, "num_rows", whole))


# Penalties


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_a_penalty_counts_the_text_of_a_prompt_alone(family: Family) -> None:
    """Not its pictures: neither the id that stands for them, nor one at an end of the vocabulary.

    By arXiv:1909.05858, section 4.1, a penalty of 1.3 divides a score of 100 by 1.3. So tokens
    with a bias of 100 lose to one of 90 if they are penalised and it is not, 76.9 to 90; they win
    if none is, 100 to 90, or all are, 76.9 to 69.2. The model's own scores are too close
    together to change that; transformers computes them.
    """
    messages, image = QUESTION, opened("red.png")
    _, [scores] = greedy(checkpoint(family), messages, [image], 1, max_pixels=100352)
    on = engine(family)
    ids, slots = on.tokenizer.encode_chat(messages)
    text_ids = sorted(set(np.delete(ids, slots).tolist()))
    last = on.tokenizer.vocab_size - 1
    watched = [i for i in (0, 1, last - 1, last, int(ids[slots[0]])) if i not in text_ids]
    assert np.ptp(scores[[*text_ids, *watched]]) < 7
    for token in watched:
        bias = dict.fromkeys(text_ids, 100.0) | {token: 90.0}
        fields: dict[str, Any] = {"logit_bias": bias, "max_tokens": 1}
        asked = [request(messages, [image], repetition_penalty=by, **fields) for by in (1.0, 1.3)]
        free, penalised = ask(on, *asked)
        assert free.token_ids[0] in text_ids
        assert penalised.token_ids[0] == token


# Memory


def test_memory_does_not_grow_with_pictures(on: Engine) -> None:
    def some(seeds: range) -> int:
        for seed in seeds:
            pixels = np.random.default_rng(seed).integers(0, 256, (112, 112, 3), np.uint8)
            ask(on, request(QUESTION, [png(Image.fromarray(pixels))], max_tokens=1))
        return resident_bytes()

    some(range(60))
    half = some(range(60, 140))
    assert some(range(140, 220)) < half * 1.05
    stats = on.stats()
    assert stats.total_rows == 1024 and stats.total_pages == 512
    assert len(on._parts.media_map) <= on.config.media.map_entries
    assert on._parts.decodes.num_held <= 1 + on.config.max_running
