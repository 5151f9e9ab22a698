"""A picture goes through the encoder once, however often it is asked about."""

import gc
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxmm.engine import Engine
from tests.engines import ask, assert_same, engine, on_loop, picture, png, request, solo, turn

PICTURE = png(picture(160, 120, 31))
OTHER = png(picture(150, 130, 32))


@pytest.fixture(params=["qwen2_vl", "qwen3_vl", "deepseek_vl2_mla"])
def on(request: pytest.FixtureRequest) -> Engine:
    """The shared engine, its caches empty."""
    shared = engine(request.param)
    shared.flush_caches()
    return shared


def encoded(on: Engine) -> int:
    return on.scheduler.counters.encoded_items


def test_ten_requests_behind_different_text_one_after_the_other(on: Engine) -> None:
    before = encoded(on)
    for i in range(10):
        [result] = ask(on, request(turn(f"{i} and", "<image>", "what is it"), [PICTURE]))
        assert result.usage.image_tokens > 0
    assert encoded(on) == before + 1


def test_ten_requests_behind_different_text_together(on: Engine) -> None:
    before = encoded(on)
    ask(on, *(request(turn(f"{i} and", "<image>", "what"), [PICTURE]) for i in range(10)))
    assert encoded(on) == before + 1


def test_identical_pictures_in_one_request(on: Engine) -> None:
    before = encoded(on)
    messages = turn("<image>", "<image>", "and", "<image>")
    [result] = ask(on, request(messages, [PICTURE, OTHER, PICTURE]))
    assert encoded(on) == before + 2
    assert_same(result, solo(on, messages, [PICTURE, OTHER, PICTURE]))


def test_one_picture_in_two_files(on: Engine) -> None:
    before = encoded(on)
    image = picture(160, 120, 31)
    ask(on, request(turn("a", "<image>"), [PICTURE]), request(turn("b", "<image>"), [image]))
    assert encoded(on) == before + 1


def test_picture_that_the_prefix_covers_is_neither_encoded_nor_looked_up(on: Engine) -> None:
    messages = turn("<image>", "what is in the picture and how many cats are there")
    [first] = ask(on, request(messages, [PICTURE]))
    on._parts.arena.clear()
    before, arena = encoded(on), on._parts.arena
    lookups = arena.hits + arena.misses
    [second] = ask(on, request(messages, [PICTURE]))
    assert second.usage.cached_tokens >= second.usage.image_tokens
    assert (encoded(on), arena.hits + arena.misses) == (before, lookups)
    assert_same(second, first)


@pytest.mark.parametrize("form", [np.asarray, Image.fromarray])
def test_pixels_that_the_prefix_covers_are_not_even_processed(on: Engine, form: Any) -> None:
    pixels = np.asarray(picture(160, 120, 33))
    messages = turn("<image>", "what is in the picture and how many cats are there")
    [first] = ask(on, request(messages, [form(pixels)]))
    on_loop(on, gc.collect)
    media, before, held = on._parts.media_map, encoded(on), on._parts.decodes.num_held
    hits, misses = media.num_hits, media.num_misses
    [second] = ask(on, request(messages, [form(pixels.copy())]))
    assert (media.num_hits, media.num_misses) == (hits + 1, misses)
    assert on._parts.decodes.num_held <= held
    assert encoded(on) == before
    assert_same(second, first)


def test_all_completions_of_a_request_share_the_rows(on: Engine) -> None:
    before = encoded(on)
    ask(on, request(turn("<image>", "what"), [PICTURE], n=4, temperature=1.0, seed=1))
    assert encoded(on) == before + 1


def test_tenants_do_not_share_rows(on: Engine) -> None:
    before = encoded(on)
    ask(on, *(request(turn("<image>"), [PICTURE], salt=salt) for salt in ("a", "b", "a")))
    assert encoded(on) == before + 2
