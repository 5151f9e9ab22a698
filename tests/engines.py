"""Engines on the small random checkpoints, one for each setting, and requests on them."""

import atexit
import contextlib
import dataclasses
import fcntl
import functools
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from jaxmm.asking import new_request_id
from jaxmm.config import EngineConfig, load_config
from jaxmm.engine import Engine
from jaxmm.gather import gather
from jaxmm.host.arena import RowKey
from jaxmm.request import Request, Result, SamplingParams
from tests.checkpoints import Family, checkpoint

MEDIA = Path(__file__).parent / "data" / "media"
LOGPROB_ATOL = 1e-4
"""Of the same request served in two ways: float32 sums in other orders."""

_T = TypeVar("_T")
_shared: list[Engine] = []

SMALL = {
    "max_model_len": 1024,
    "max_running": 8,
    "buckets.max_step_tokens": 128,
    "buckets.rehearse": False,
    "pages.page_size": 16,
    "pages.num_pages": 512,
    "arena.num_rows": 1024,
    "media.max_pixels": 100352,
    "media.workers": 1,
    "on_recompile": "raise",
    "progress": False,
}
"""Little memory, few buckets, and a fault for every compile after warm-up."""
_LOWEST_RUNG = {"qwen3_vl": 8, "qwen3_vl_moe": 8, "deepseek_vl2_mla": 8, "gemma3": 32}
"""Of step tokens, where it is not 1: compiling is most of a cold start, and what small steps do
otherwise than large ones is no decoder's own."""


def cache_dir() -> str:
    """Where test engines keep executables: shared by all tests of a run, and by later runs."""
    return os.environ.get("JAXMM_TEST_CACHE", str(Path(tempfile.gettempdir()) / "jaxmm-tests"))


@contextlib.contextmanager
def alone_with(family: Family) -> Iterator[None]:
    """Have processes that start engines of one family do so one after the other: all but the first
    read what it compiled, where they would all compile the same."""
    folder = Path(cache_dir())
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{family}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed
        yield


def make_engine(family: Family, **settings: Any) -> Engine:
    """A new engine; the caller closes it."""
    values = {**SMALL, "model": str(checkpoint(family)), "compile_cache_dir": cache_dir()}
    values["buckets.min_step_tokens"] = _LOWEST_RUNG.get(family, 1)
    config = load_config(EngineConfig, None, {**values, **settings})
    with alone_with(family):
        return Engine(config)


@functools.cache
def engine(family: Family) -> Engine:
    """The engine with the small settings, shared by the tests of a file; its caches may be warm."""
    _shared.append(make_engine(family))
    return _shared[-1]


@atexit.register
def close_shared() -> None:
    """Close the shared engines; who asks for one after that gets a new one."""
    engine.cache_clear()
    while _shared:
        _shared.pop().close()


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth random colours, so that resizing keeps them."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def turn(*parts: str) -> list[dict[str, Any]]:
    """One user turn; the parts "<image>" and "<video>" are a picture and a video."""
    content = [
        {"type": p[1:-1]} if p in ("<image>", "<video>") else {"type": "text", "text": p}
        for p in parts
    ]
    return [{"role": "user", "content": content}]


def request(messages: Any, images: Sequence[Any] = (), **fields: Any) -> Request:
    """A greedy request of 16 tokens with logprobs; sampling fields by name override that."""
    own = {k: fields.pop(k) for k in list(fields) if k not in SamplingParams.__dataclass_fields__}
    sampling = {"max_tokens": 16, "ignore_eos": True, "logprobs": 3, **fields}
    return Request(
        id=new_request_id("test"),
        messages=messages,
        images=tuple(images),
        sampling=SamplingParams(**sampling),
        **own,
    )


def ask(on: Engine, *requests: Request) -> list[Result]:
    """Serve requests together."""
    return gather(on, list(requests))


def logprobs(result: Result) -> np.ndarray:
    """float64[tokens]: of the chosen tokens."""
    assert result.logprobs is not None
    return np.array([entry.logprob for entry in result.logprobs])


def top(result: Result) -> np.ndarray:
    """float64[tokens, likeliest]: their log-probabilities, those asked for, in order."""
    assert result.logprobs is not None
    return np.array([[value for _, value in entry.top] for entry in result.logprobs])


def in_parallel(work: Any, count: int) -> list[Any]:
    """Run `work(i)` for i below count on as many threads."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def solo(on: Engine, *given: Any, **fields: Any) -> Result:
    """The answer to a request alone, with nothing in any cache."""
    on.flush_caches()
    [result] = ask(on, request(*given, **fields))
    return result


def assert_same(result: Result, expected: Result, atol: float = LOGPROB_ATOL) -> None:
    """Token ids are equal, and log-probabilities within `atol`, of the likeliest too."""
    assert result.token_ids == expected.token_ids
    np.testing.assert_allclose(logprobs(result), logprobs(expected), rtol=0, atol=atol)
    np.testing.assert_allclose(top(result), top(expected), rtol=0, atol=atol)


def png(image: Image.Image) -> bytes:
    """Encoded: only files are known to the media map."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def on_loop(on: Engine, work: Callable[[], _T]) -> _T:
    """Run `work` on the engine's thread between two steps; every answer told before is over."""
    done: Future[_T] = Future()
    on._loop.post(lambda: done.set_result(work()))
    return done.result(120)


@contextlib.contextmanager
def scheduling(on: Engine, **changes: int) -> Iterator[None]:
    """Change sizes of a running scheduler: `max_step_tokens` cuts prompts into such chunks."""
    config = on.scheduler.config
    changed = dataclasses.replace(config, **changes)
    on_loop(on, lambda: setattr(on.scheduler, "config", changed))
    try:
        yield
    finally:
        on_loop(on, lambda: setattr(on.scheduler, "config", config))


@contextlib.contextmanager
def pages_left(on: Engine, num_pages: int) -> Iterator[None]:
    """Leave an idle engine so few pages, by holding the others; enough for any one request."""
    pool = on._parts.pool
    on.flush_caches()
    held = on_loop(on, lambda: pool.allocate(pool.num_free - num_pages))
    try:
        yield
    finally:
        on_loop(on, lambda: pool.release(held))


@contextlib.contextmanager
def rows_left(on: Engine, num_rows: int) -> Iterator[None]:
    """Leave an idle engine so few rows, by leasing the others; enough for any one request."""
    arena = on._parts.arena
    on.flush_caches()
    key = RowKey("held", b"", (1, 1, 1), arena.num_rows - num_rows)
    held = on_loop(on, lambda: arena.reserve(key))
    try:
        yield
    finally:
        on_loop(on, lambda: arena.release(held))
