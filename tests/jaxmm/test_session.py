"""Conversations: each turn is answered as the whole would be, and pays for what is new alone."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmm.api import generate
from jaxmm.engine import Engine
from jaxmm.errors import JaxmmError, MediaError, RequestError
from jaxmm.session import Session
from tests.checkpoints import SERVED, Family
from tests.engines import MEDIA, ask, engine, on_loop, pages_left, picture, png, request, turn

WIDE, TALL = png(picture(200, 130, 1)), png(picture(90, 210, 2))
FIELDS = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def on() -> Engine:
    shared = engine("qwen2_vl")
    shared.flush_caches()
    return shared


@pytest.fixture
def chat(on: Engine) -> Iterator[Session]:
    with on.session() as session:
        yield session
    on.flush_caches()


def pinned(on: Engine) -> int:
    return on_loop(on, lambda: on._parts.prefix_cache.num_pinned)


def whole(on: Engine, chat: Session) -> str:
    """The last answer of a conversation, when all of it is sent at once with empty caches."""
    messages, last = list(chat.messages[:-1]), chat.messages[-1]
    on.flush_caches()
    answer = generate(messages, list(chat.images), engine=on, **FIELDS).text
    assert last["role"] == "assistant"
    return answer


@pytest.mark.parametrize("family", SERVED)
def test_every_turn_is_answered_as_the_whole_conversation(family: Family) -> None:
    on = engine(family)
    on.flush_caches()
    with on.session("you are a house") as chat:
        answers = []
        for text, images in (("what is this", WIDE), ("and the colour", None), ("both", [TALL])):
            answers.append(chat.send(text, images, **FIELDS).text)
        assert [m["role"] for m in chat.messages] == ["system", *["user", "assistant"] * 3]
        assert [m["content"] for m in chat.messages[2::2]] == answers
        assert whole(on, chat) == answers[-1]


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_videos_are_looked_at_as_the_session_says_and_processed_once(
    on: Engine, rate: float
) -> None:
    frames = [png(picture(112, 84, seed)) for seed in range(8)]
    clip = (MEDIA / "10f_10fps.mp4").read_bytes()
    looks: dict[str, Any] = {"fps": 4.0, "video_pruning_rate": rate}
    with on.session(**looks) as chat:
        first = chat.send("what happens", videos=[frames], **FIELDS)
        media, counters = on._parts.media_map, on.scheduler.counters
        before = media.num_hits, media.num_misses, counters.encoded_items
        second = chat.send("and then", **FIELDS)
        assert (media.num_hits, media.num_misses, counters.encoded_items) == before
        third = chat.send("and here", WIDE, clip, **FIELDS)
        assert first.usage.video_tokens == second.usage.video_tokens == 4 * 12 * (1 - rate)
        assert third.usage.video_tokens > second.usage.video_tokens
        assert second.usage.cached_tokens >= first.usage.prompt_tokens // 16 * 16
        messages, videos = list(chat.messages[:-1]), chat.videos
        assert videos == (frames, clip)
        with pytest.raises(MediaError, match="video 3 of 3"):
            chat.send("and this", videos=b"none", **FIELDS)
        assert chat.videos == videos
    on.flush_caches()
    alone = generate(messages, [WIDE], videos=list(videos), engine=on, **looks, **FIELDS)
    assert alone.text == third.text
    assert alone.usage.video_tokens == third.usage.video_tokens


def test_turn_pays_for_what_is_new_alone(on: Engine, chat: Session) -> None:
    first = chat.send("what is this", WIDE, **FIELDS)
    media, counters = on._parts.media_map, on.scheduler.counters
    before = media.num_hits, media.num_misses, counters.encoded_items
    second = chat.send("and its colour", **FIELDS)
    assert (media.num_hits, media.num_misses, counters.encoded_items) == before
    assert second.usage.cached_tokens >= first.usage.prompt_tokens // 16 * 16
    assert second.usage.prompt_tokens - second.usage.cached_tokens < 96
    assert second.usage.image_tokens == first.usage.image_tokens > 0


def crowd_out(on: Engine) -> None:
    """Fill the pages that are left with other prompts, twice over."""
    rng = np.random.default_rng(5)
    for _ in range(8):
        ids = rng.integers(0, 250, 120).tolist()
        ask(on, request(None, token_ids=ids, max_tokens=1))


def test_prefix_stays_while_others_crowd_the_cache(on: Engine, chat: Session) -> None:
    with pages_left(on, 24):
        first = chat.send("what is this", WIDE, **FIELDS)
        ask(on, request(None, token_ids=range(60)))
        crowd_out(on)
        second = chat.send("and its colour", **FIELDS)
        [again] = ask(on, request(None, token_ids=range(60)))
    assert second.usage.cached_tokens >= first.usage.prompt_tokens // 16 * 16
    assert again.usage.cached_tokens == 0  # what no conversation keeps is gone
    assert whole(on, chat) == second.text


def test_prefix_is_given_up_for_a_request_that_needs_the_room(on: Engine, chat: Session) -> None:
    [expected] = ask(on, request(turn("one red house " * 30), max_tokens=100))
    with pages_left(on, 20):
        chat.send("what is this", WIDE, **FIELDS)
        assert pinned(on) > 0
        retracts = on.scheduler.counters.retracts
        [result] = ask(on, request(turn("one red house " * 30), max_tokens=100))
        assert result.usage.prompt_tokens + 100 > 16 * 16  # more than lie beside the pins
        assert on.scheduler.counters.retracts == retracts
        assert pinned(on) == 0
        second = chat.send("and its colour", **FIELDS)
    assert result.token_ids == expected.token_ids
    assert whole(on, chat) == second.text


def test_conversations_together_keep_no_more_than_their_share(on: Engine) -> None:
    share = on.scheduler.config.max_pinned_pages
    assert share == 128  # a quarter of 512
    chats = [on.session() for _ in range(20)]
    for i, chat in enumerate(chats):
        chat.send(f"{i} " * 60 + "what", **FIELDS)
    assert 0 < pinned(on) <= share
    for chat in chats:
        chat.close()
    assert pinned(on) == 0


def test_stream_gives_what_the_whole_gives(on: Engine, chat: Session) -> None:
    expected = generate("what is this", WIDE, engine=on, **FIELDS).text
    deltas = list(chat.send("what is this", WIDE, stream=True, **FIELDS))
    assert "".join(d.text for d in deltas) == expected == chat.messages[-1]["content"]
    second = list(chat.send("and its colour", stream=True, **FIELDS))
    assert "".join(d.text for d in second) == whole(on, chat)


def test_asend_gives_what_send_gives(on: Engine, chat: Session) -> None:
    async def talk(session: Session) -> list[str]:
        answers = []
        for text, images in (("what is this", WIDE), ("and its colour", None)):
            parts = [d.text async for d in session.asend(text, images, **FIELDS)]
            answers.append("".join(parts))
        return answers

    async def both(*sessions: Session) -> list[list[str]]:
        return await asyncio.gather(*map(talk, sessions))

    with on.session() as other:
        answers, same = asyncio.run(both(chat, other))
    assert answers == same == [m["content"] for m in chat.messages[1::2]]
    assert whole(on, chat) == answers[-1]


def test_turn_that_is_left_or_fails_leaves_the_conversation_as_it_was(
    on: Engine, chat: Session
) -> None:
    chat.send("what is this", WIDE, **FIELDS)
    before = chat.messages, chat.images
    stream = chat.send("and", TALL, stream=True, max_tokens=500, ignore_eos=True)
    next(stream)
    with pytest.raises(RequestError, match="is answering"):
        chat.send("meanwhile", **FIELDS)
    stream.close()
    with pytest.raises(MediaError, match="image 2 of 2"):
        chat.send("and", b"no picture", **FIELDS)
    with pytest.raises(RequestError, match="n=2"):
        chat.send("and", n=2)
    with pytest.raises(RequestError, match="unknown argument"):
        chat.send("and", temprature=1)

    async def leave() -> None:
        async for _ in chat.asend("and", max_tokens=500, ignore_eos=True):
            break

    asyncio.run(leave())
    gc.collect()
    assert (chat.messages, chat.images) == before
    assert chat.send("and its colour", **FIELDS).text == whole(on, chat)


def test_closed_session_is_refused_and_keeps_nothing(on: Engine) -> None:
    chat = on.session()
    chat.send("what is this", WIDE, **FIELDS)
    assert pinned(on) > 0
    chat.close()
    chat.close()
    assert pinned(on) == 0
    assert [p.found for p in chat._keep.pictures] == [None]
    with pytest.raises(RequestError, match="closed"):
        chat.send("and", **FIELDS)


def test_session_closed_during_a_turn_keeps_nothing(on: Engine) -> None:
    chat = on.session()
    stream = chat.send("what is this", WIDE, stream=True, **FIELDS)
    next(stream)
    chat.close()
    assert len(list(stream)) == 11
    assert pinned(on) == 0
    assert [p.found for p in chat._keep.pictures] == [None]


def test_session_that_is_forgotten_gives_everything_back(on: Engine) -> None:
    chat = on.session()
    chat.send("what is this", WIDE, **FIELDS)
    assert pinned(on) > 0
    del chat
    gc.collect()
    assert pinned(on) == 0


def test_what_is_kept_expires_and_the_conversation_goes_on(on: Engine) -> None:
    with on.session(expire_seconds=0.3) as chat:
        chat.send("what is this", WIDE, **FIELDS)
        deadline = time.monotonic() + 20
        while len(on.scheduler.pins):  # of an idle engine, which nothing wakes
            assert time.monotonic() < deadline, "it did not expire"
            time.sleep(0.01)
        assert [p.found for p in chat._keep.pictures] == [None]
        second = chat.send("and its colour", **FIELDS)
        assert second.text == whole(on, chat)


def test_turn_that_is_left_keeps_nothing_of_a_conversation_that_expired(on: Engine) -> None:
    with on.session(expire_seconds=0.0) as chat:
        chat.send("what is this", WIDE, **FIELDS)
        deadline = time.monotonic() + 20
        while len(on.scheduler.pins):
            assert time.monotonic() < deadline, "it did not expire"
            time.sleep(0.01)
        next(iter(chat.send("and its colour", stream=True, **FIELDS)))
        assert [p.found for p in chat._keep.pictures] == [None]


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e10, -1.0, "60", True])
def test_time_that_nobody_can_wait_for_is_refused(on: Engine, seconds: Any) -> None:
    with pytest.raises(RequestError, match="expire_seconds"):
        on.session(expire_seconds=seconds)


def test_file_that_changes_between_turns_is_no_part_of_the_conversation(
    on: Engine, chat: Session, tmp_path: Path
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(WIDE)
    chat.send("what is this", str(path), **FIELDS)
    path.write_bytes(TALL)
    kept = chat.send("and its colour", **FIELDS)
    assert kept.usage.cached_tokens > 0  # the picture as it was
    on.flush_caches()
    with pytest.raises(MediaError, match="has changed"):
        chat.send("and its shape", **FIELDS)


def test_tenants_of_sessions_share_nothing(on: Engine) -> None:
    before = on.scheduler.counters.encoded_items
    for salt in ("a", "b"):
        with on.session(salt=salt) as chat:
            assert chat.send("what is this", WIDE, **FIELDS).usage.cached_tokens == 0
    assert on.scheduler.counters.encoded_items == before + 2


def test_many_conversations_at_once_leave_nothing_pinned(on: Engine) -> None:
    errors: list[JaxmmError] = []

    def talk(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            with on.session(expire_seconds=float(rng.choice([0.0, 0.05, 60.0]))) as chat:
                for _ in range(rng.integers(1, 5)):
                    images: Any = [WIDE, TALL][: rng.integers(0, 3)]
                    text = " ".join(rng.choice(["what", "is", "the", "house"], 12))
                    if rng.random() < 0.3:
                        next(iter(chat.send(text, images, stream=True, **FIELDS)))
                    else:
                        chat.send(text, images, max_tokens=5, ignore_eos=True)
        except JaxmmError as error:  # told by the test
            errors.append(error)

    with pages_left(on, 60):
        threads = [threading.Thread(target=talk, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        gc.collect()
        assert errors == []
        assert pinned(on) == len(on.scheduler.pins) == 0
        on.flush_caches()
        assert on_loop(on, lambda: on._parts.pool.num_free) == 60
