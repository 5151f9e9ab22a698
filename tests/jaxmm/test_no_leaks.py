"""After any workload everything is given back: pages, rows, slots, features, worker memory."""

import contextlib
import threading
import time
from typing import Any

import numpy as np
import pytest

from jaxmm.engine import Engine
from jaxmm.errors import JaxmmError, MediaError
from jaxmm.request import Delta
from jaxmm.session import Session
from tests.engines import (
    ask,
    engine,
    make_engine,
    pages_left,
    picture,
    png,
    request,
    scheduling,
    turn,
)
from tests.held import now_or_soon, quiet

NUM_REQUESTS = 1000
PICTURES = [png(picture(28 * (2 + i % 4), 28 * (2 + i % 3), i)) for i in range(10)]
BROKEN = PICTURES[0][:60]
WORDS = ("what", "is", "in", "the", "picture", "and", "how", "many", "cats", "house")


def random_request(rng: np.random.Generator) -> Any:
    text = " ".join(rng.choice(WORDS, rng.integers(1, 20)))
    images = [PICTURES[i] for i in rng.integers(0, len(PICTURES), rng.integers(0, 3))]
    images += [BROKEN] * (rng.random() < 0.02)
    sampling = [
        {},
        {"temperature": 1.0, "n": int(rng.integers(1, 3))},
        {"repetition_penalty": 1.2},
        {"stop": ("e", "a"), "ignore_eos": False},
    ][rng.integers(4)]
    return request(
        turn(*["<image>"] * len(images), text),
        images,
        **{
            "max_tokens": int(rng.integers(1, 7)),
            "salt": str(rng.integers(3)),
            "logprobs": None,
            **sampling,
        },
    )


class Caller:
    """Hears one request to its end, or aborts it at a delta."""

    def __init__(self, on: Engine, asked: Any, abort_at: int | None, ended: Any) -> None:
        self._on, self._asked, self._abort_at, self._ended = on, asked, abort_at, ended
        self._num_deltas, self._num_open = 0, asked.sampling.n
        self._aborted = False
        on.submit(asked, self._hear)
        if abort_at == 0:
            self._abort()

    def _abort(self) -> None:
        self._aborted = True
        self._on.abort(self._asked.id)
        self._ended("abort")

    def _hear(self, event: Delta | JaxmmError) -> None:
        if self._aborted:
            return  # those of the step in which it was aborted
        if isinstance(event, JaxmmError):
            self._ended("error")
            return
        self._num_deltas += 1
        self._num_open -= event.finish_reason is not None
        if self._num_open == 0:
            self._ended("finish")
        elif self._num_deltas == self._abort_at:
            self._abort()


def talk(on: Engine, chats: list[Session], rng: np.random.Generator) -> None:
    """A turn of one of the conversations, left early, bad, or to its end."""
    index = int(rng.integers(len(chats)))
    if len(chats[index].messages) > 5:
        chats[index].close()
        chats[index] = on.session(expire_seconds=float(rng.choice([0.0, 0.1, 60.0])))
    pictures = [PICTURES[int(rng.integers(len(PICTURES)))]]
    images = ([], pictures, [BROKEN])[int(rng.choice(3, p=(0.5, 0.4, 0.1)))]
    stream = chats[index].send("what is it", images, stream=True, max_tokens=5)
    with contextlib.suppress(MediaError):
        for _ in zip(range(int(rng.integers(1, 9))), stream, strict=False):
            pass
    stream.close()


@pytest.mark.slow
def test_thousand_random_requests_with_random_aborts_leave_nothing_behind() -> None:
    on, rng = engine("qwen2_vl"), np.random.default_rng(3)
    list(on._intake._threads.map(time.sleep, [0.1] * 4))  # pools start their threads when needed
    ask(on, request(turn("<image>"), [PICTURES[0]]))
    on.flush_caches()
    before = quiet(on)
    counters = on.scheduler.counters
    retracts, aborted = counters.retracts, counters.aborted
    outcomes: list[str] = []
    room = threading.Semaphore(40)  # so many are on their way together

    def ended(how: str) -> None:
        outcomes.append(how)
        room.release()

    with pages_left(on, 12), scheduling(on, reserve_tokens=0):
        chats = [on.session() for _ in range(3)]
        for i in range(NUM_REQUESTS):
            if i % 20 == 0:
                talk(on, chats, rng)
            room.acquire(timeout=60)
            abort_at = int(rng.integers(0, 6)) if rng.random() < 0.4 else None
            Caller(on, random_request(rng), abort_at, ended)
        deadline = time.monotonic() + 60
        while len(outcomes) < NUM_REQUESTS and time.monotonic() < deadline:
            time.sleep(0.01)
        for chat in chats:
            chat.close()
        quiet(on)
    assert len(outcomes) == NUM_REQUESTS
    assert min(outcomes.count(how) for how in ("abort", "error", "finish")) > 5
    assert counters.retracts > retracts
    assert counters.aborted > aborted
    assert now_or_soon(lambda: quiet(on), before) == before
    assert all(worker.is_alive for worker in _workers(on))


def _workers(on: Engine) -> list[Any]:
    """The idle decoding workers; all of them, when nothing is being decoded."""
    idle = on._parts.decoder._idle
    workers = [idle.get(timeout=10) for _ in range(on._parts.decoder._count)]
    for worker in workers:
        idle.put(worker)
    return workers


def test_closing_an_engine_gives_back_its_thread_and_processes() -> None:
    engine("qwen2_vl")  # what the process makes once, it has made
    threads = {t.ident for t in threading.enumerate()}
    mine = make_engine("qwen2_vl")
    [worker] = _workers(mine)
    mine.close()
    assert worker._process.poll() is not None
    left = [t.name for t in threading.enumerate() if t.ident not in threads]
    assert not [name for name in left if name.startswith("jaxmm")]
