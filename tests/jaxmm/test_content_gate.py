"""Answers follow the pictures: the content gate of the shipped model.

Random weights answer every picture with much the same words, so an answer about the wrong picture
could pass. Here the model has learnt to read and to count: 100 different pictures, and pairs of
them, each with the answer that transformers' own model gives when asked alone, in float32
(`expected` in `tests/data/content/cases.json`, written by `examples/train_tiny_vlm/assets.py`).
"""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxmm
from jaxmm.asking import new_request_id
from jaxmm.config import EngineConfig, load_config
from jaxmm.engine import Engine
from jaxmm.request import Request, SamplingParams
from tests.engines import SMALL, cache_dir

CONTENT = Path(__file__).parents[1] / "data" / "content"
TENANTS = ("", "other")
Case = dict[str, Any]


def published() -> tuple[list[Case], float]:
    """The cases on pictures (not those on clips), and the share of right answers among them."""
    cases = [
        c for c in json.loads((CONTENT / "cases.json").read_text())["cases"] if "pictures" in c
    ]
    return cases, sum(c["right"] for c in cases) / len(cases)


@pytest.fixture(scope="module")
def trained() -> Iterator[Engine]:
    settings = {
        **SMALL,
        "model": str(jaxmm.default_model()),
        "compile_cache_dir": cache_dir(),
        "max_running": 16,
        "pages.num_pages": 1024,
        "media.max_pixels": 672 * 336,
    }
    with Engine(load_config(EngineConfig, None, settings)) as engine:
        yield engine


def to_request(case: Case, salt: str) -> Request:
    """Ask the last turn's question, the turns before it answered rightly; pictures come first."""
    messages: list[dict[str, Any]] = []
    for turn in case["turns"]:
        parts = [] if messages else [{"type": "image"} for _ in case["pictures"]]
        content = [*parts, {"type": "text", "text": turn["question"]}]
        messages += [
            {"role": "user", "content": content},
            {"role": "assistant", "content": turn["answer"]},
        ]
    return Request(
        id=new_request_id("content"),
        messages=messages[:-1],
        images=tuple((CONTENT / name).read_bytes() for name in case["pictures"]),
        sampling=SamplingParams(max_tokens=40),
        salt=salt,
    )


async def streamed(on: Engine, request: Request) -> str:
    return "".join([delta.text async for delta in on.astream(request)])


def ask_at_once(on: Engine, asked: list[tuple[Case, str]]) -> list[str]:
    """Stream every request, all of them open together."""

    async def gather() -> list[str]:
        return await asyncio.gather(*(streamed(on, to_request(*each)) for each in asked))

    return asyncio.run(gather())


def test_every_answer_at_once_is_the_one_given_alone(trained: Engine) -> None:
    """Shuffled and streamed, each asked by two tenants and a third of them once more."""
    cases, accuracy = published()
    assert len({name for case in cases for name in case["pictures"]}) == 100
    asked = [(case, salt) for case in cases for salt in TENANTS]
    asked += [(case, TENANTS[i % 2]) for i, case in enumerate(cases[::3])]
    random.Random(0).shuffle(asked)
    answers = ask_at_once(trained, asked)
    wrong = [
        (case["pictures"], case["turns"][-1]["question"], answer, case["expected"])
        for (case, _), answer in zip(asked, answers, strict=True)
        if answer != case["expected"]
    ]
    assert wrong == []
    once = {id(case): answer for (case, _), answer in zip(asked, answers, strict=True)}
    right = sum(once[id(case)] == case["turns"][-1]["answer"] for case in cases)
    assert right / len(cases) == pytest.approx(accuracy)
