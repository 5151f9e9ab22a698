"""Counters of the parts, as an engine's numbers."""

import dataclasses
from types import SimpleNamespace
from typing import Any

from jaxmm.stats import stats_of
from tests.engines import ask, engine, picture, png, request, turn


def test_pictures_found_are_counted_in_rows_and_in_items() -> None:
    on = engine("qwen2_vl")
    on.flush_caches()
    before = on.stats()
    for text in ("what", "where"):  # before the picture: the prefixes differ
        [result] = ask(on, request(turn(text, "<image>"), [png(picture(160, 120, 51))]))
    after, rows = on.stats(), result.usage.image_tokens
    assert rows > 1
    for now, was, step in (
        (after.arena, before.arena, 1),
        (after.arena_rows, before.arena_rows, rows),
    ):
        assert (now.hits - was.hits, now.misses - was.misses) == (step, step)
    assert after.replicas[0].arena_rows == after.arena_rows


def test_decodes_without_shared_memory_are_counted() -> None:
    decoder: Any = SimpleNamespace(inline_count=3)
    parts = dataclasses.replace(engine("qwen2_vl")._parts, decoder=decoder)
    assert stats_of([parts], preparing=0).inline_decodes == 3
