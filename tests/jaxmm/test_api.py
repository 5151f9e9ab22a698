"""`generate` in its forms; the oracle is the same request served through the engine."""

import asyncio
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmm.api import agenerate, generate
from jaxmm.asking import make_request, picture_sources, sampling_params, video_sources
from jaxmm.engine import Engine
from jaxmm.errors import MediaError, RequestError
from jaxmm.request import Delta
from tests.engines import ask, engine, make_engine, on_loop, picture, png, request, turn

IMAGE = picture(112, 84, 71)
FIELDS = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def on() -> Engine:
    return engine("qwen2_vl")


def expected(on: Engine, question: str = "what is it", *images: Any, **fields: Any) -> Any:
    parts = ["<image>"] * len(images)
    return ask(on, request(turn(*parts, question), images, **{**FIELDS, **fields}))[0]


def test_question(on: Engine) -> None:
    result = generate("what is it", engine=on, **FIELDS)
    assert result.token_ids == expected(on).token_ids
    assert result.text == expected(on).text
    assert result.logprobs is None
    assert result.usage.completion_tokens == 12
    assert result.usage.total_tokens == result.usage.prompt_tokens + 12


def test_picture_in_every_form(on: Engine, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(IMAGE))
    sources: list[Any] = [IMAGE, png(IMAGE), path, str(path), np.asarray(IMAGE), [IMAGE], (IMAGE,)]
    answers = {generate("what is it", source, engine=on, **FIELDS).token_ids for source in sources}
    assert answers == {expected(on, "what is it", IMAGE).token_ids}


def test_several_pictures_stand_before_the_question_in_order(on: Engine) -> None:
    other = picture(84, 84, 72)
    result = generate("and", [IMAGE, other], engine=on, **FIELDS)
    assert result.token_ids == expected(on, "and", IMAGE, other).token_ids


def test_list_of_prompts(on: Engine) -> None:
    results = generate(["what is it", "and"], [IMAGE, None], engine=on, **FIELDS)
    assert [r.token_ids for r in results] == [
        expected(on, "what is it", IMAGE).token_ids,
        expected(on, "and").token_ids,
    ]


def test_empty_list_of_prompts_has_no_results(on: Engine) -> None:
    assert generate([], [], engine=on) == []


def test_list_of_more_prompts_than_may_wait(on: Engine) -> None:
    with make_engine("qwen2_vl", max_waiting=4) as small:
        results = generate([f"{i} and" for i in range(30)], engine=small, **FIELDS, n=2)
    assert results[-1].token_ids == expected(on, "29 and").token_ids


def test_progress_is_shown_unless_it_is_turned_off(
    on: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    with make_engine("qwen2_vl", progress=True) as loud:
        generate(["what", "and"], engine=loud, **FIELDS)
    shown = capfd.readouterr().err
    assert all(name in shown for name in ("load", "generate"))
    with make_engine("qwen2_vl") as silent:
        generate(["what", "and"], engine=silent, **FIELDS)
    assert capfd.readouterr() == ("", "")


def test_chat_turns(on: Engine) -> None:
    messages = [
        *turn("<image>", "what is it"),
        {"role": "assistant", "content": "a house"},
        {"role": "user", "content": "and"},
    ]
    result = generate(messages, IMAGE, engine=on, **FIELDS)
    assert result.token_ids == ask(on, request(messages, [IMAGE], **FIELDS))[0].token_ids


def test_list_of_chats(on: Engine) -> None:
    results = generate([turn("what is it"), turn("and")], engine=on, **FIELDS)
    assert [r.token_ids for r in results] == [
        expected(on).token_ids, expected(on, "and").token_ids
    ]  # fmt: skip


def test_stream_gives_what_the_result_gives(on: Engine) -> None:
    deltas: list[Delta] = list(generate("what is it", IMAGE, engine=on, stream=True, **FIELDS))
    whole = expected(on, "what is it", IMAGE)
    assert "".join(d.text for d in deltas) == whole.text
    assert tuple(t for d in deltas for t in d.token_ids) == whole.token_ids
    assert [d.finish_reason for d in deltas] == [None] * 11 + ["length"]
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == 12


def test_next_step_is_on_its_way_before_a_token_is_told(on: Engine) -> None:
    """The device feeds its own token to it; nothing waits for the host."""
    before, plans = on.scheduler.counters.plans, []
    heard: queue.SimpleQueue[None] = queue.SimpleQueue()

    def hear(event: Any) -> None:
        plans.append(on.scheduler.counters.plans - before)
        if event.finish_reason is not None:
            heard.put(None)

    on.submit(request(turn("what is it"), max_tokens=6), hear)
    heard.get(timeout=60)
    assert plans == [2, 3, 4, 5, 6, 6]  # no step after the last token


def test_steps_write_their_caches_in_place(on: Engine) -> None:
    runner = on._parts.runner
    old = on_loop(on, lambda: (runner._arena, *runner._kv_pages))
    on.flush_caches()
    generate("what is it", IMAGE, engine=on, **FIELDS)
    assert all(array.is_deleted() for array in old)  # donated, not copied


def test_stream_of_several_completions_ends_with_the_last(on: Engine) -> None:
    deltas = generate("what is it", engine=on, stream=True, n=3, temperature=1.0, seed=2, **FIELDS)
    ended = [d.index for d in deltas if d.finish_reason is not None]
    assert sorted(ended) == [0, 1, 2]


def test_leaving_a_stream_early_aborts_its_request(on: Engine) -> None:
    aborted = on.scheduler.counters.aborted
    stream = generate("what is it", engine=on, stream=True, max_tokens=900, ignore_eos=True)
    next(stream)
    stream.close()
    on_loop(on, lambda: None)
    assert not on.scheduler.has_work
    assert on.scheduler.counters.aborted == aborted + 1


def test_agenerate_gives_what_generate_gives(on: Engine) -> None:
    async def gather() -> list[list[Delta]]:
        async def one(question: str) -> list[Delta]:
            return [d async for d in agenerate(question, IMAGE, engine=on, **FIELDS)]

        return await asyncio.gather(one("what is it"), one("and"))

    first, second = asyncio.run(gather())
    for deltas, question in ((first, "what is it"), (second, "and")):
        tokens = tuple(t for d in deltas for t in d.token_ids)
        assert tokens == expected(on, question, IMAGE).token_ids


def test_leaving_agenerate_early_aborts_its_request(on: Engine) -> None:
    aborted = on.scheduler.counters.aborted

    async def leave() -> None:
        async for _ in agenerate("what is it", engine=on, max_tokens=900, ignore_eos=True):
            break

    asyncio.run(leave())
    on_loop(on, lambda: None)
    assert not on.scheduler.has_work
    assert on.scheduler.counters.aborted == aborted + 1


def test_error_of_one_prompt_of_a_list_is_raised_and_the_others_are_aborted(on: Engine) -> None:
    with pytest.raises(MediaError):
        generate(["a", "b"], [None, b"no picture"], engine=on, max_tokens=900, ignore_eos=True)
    on_loop(on, lambda: None)
    assert not on.scheduler.has_work


def test_error_is_raised_by_a_stream_too(on: Engine) -> None:
    with pytest.raises(MediaError):
        list(generate("a", b"no picture", engine=on, stream=True))


def test_stream_takes_one_prompt(on: Engine) -> None:
    with pytest.raises(RequestError, match="one prompt"):
        generate(["a", "b"], engine=on, stream=True)


def test_images_of_a_list_are_one_entry_for_each_prompt(on: Engine) -> None:
    with pytest.raises(RequestError, match="2 prompts came with 1 entries"):
        generate(["a", "b"], [IMAGE], engine=on)


def test_unknown_sampling_argument_is_refused() -> None:
    with pytest.raises(RequestError, match="unknown argument 'temprature'"):
        sampling_params({"temprature": 0.5})


def test_prompt_of_no_kind_is_refused_by_its_type(on: Engine) -> None:
    with pytest.raises(RequestError, match="not int"):
        generate(5, engine=on)  # type: ignore[call-overload]


def test_plain_question_becomes_one_user_turn_pictures_first() -> None:
    made = make_request("what", [IMAGE, IMAGE], sampling_params({}))
    assert made.messages == turn("<image>", "<image>", "what")
    assert made.images == (IMAGE, IMAGE)


def test_a_text_in_place_of_a_file_is_its_path_of_a_frame_too() -> None:
    array = np.zeros((2, 28, 28, 3), np.uint8)
    assert picture_sources(["a.png", b"b"]) == (Path("a.png"), b"b")
    sources = video_sources(["a.mp4", ["a.png", b"b"], array])
    assert sources[:2] == (Path("a.mp4"), [Path("a.png"), b"b"])
    assert sources[2] is array
