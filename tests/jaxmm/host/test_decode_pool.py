"""The pool gives what the inline decoder gives, survives its workers, and leaves nothing."""

import gc
import io
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxmm.errors import EngineStopped, MediaError, MediaTooLarge, RequestError
from jaxmm.host.decode import InlineDecoder, Processed
from jaxmm.host.decode_pool import DecodeFault, DecodePool
from jaxmm.host.media import Limits
from jaxmm.models.qwen2_vl.processor import ImageProcessor

DATA = Path(__file__).parents[2] / "data" / "media"
PROCESSOR = ImageProcessor(min_pixels=3136, max_pixels=1003520)
LIMITS = Limits(max_bytes=1 << 20, max_decode_pixels=2_000_000)
INLINE = InlineDecoder(PROCESSOR, LIMITS)


@pytest.fixture(scope="module")
def pool() -> Iterator[DecodePool]:
    pool = DecodePool(PROCESSOR, LIMITS, workers=2)
    yield pool
    pool.close()


def children() -> set[int]:
    tasks = Path("/proc/self/task")
    return {int(p) for t in tasks.iterdir() for p in (t / "children").read_text().split()}


def assert_same(a: Processed, b: Processed) -> None:
    assert np.array_equal(a.features, b.features)
    assert a.features.dtype == b.features.dtype == np.uint8
    assert not a.features.flags.writeable
    assert (a.grid_thw, a.num_rows, a.identity) == (b.grid_thw, b.num_rows, b.identity)


@pytest.mark.parametrize("name", ["big.png", "exif_6.jpg", "rgba.png", "size_1x1.png", "q95.jpg"])
def test_worker_gives_what_the_inline_decoder_gives(pool: DecodePool, name: str) -> None:
    data = (DATA / name).read_bytes()
    expected = INLINE.submit(data).result()
    image = Image.open(io.BytesIO(data))
    for source in (data, bytearray(data), DATA / name, image):
        assert_same(pool.submit(source).result(), expected)
    assert pool.inline_count == 0


def test_pixel_limits_of_the_request_reach_the_worker(pool: DecodePool) -> None:
    data = (DATA / "big.png").read_bytes()
    small = pool.submit(data, max_pixels=50176).result()
    assert small.num_rows == 64
    assert_same(small, INLINE.submit(data, max_pixels=50176).result())


def test_results_do_not_share_memory(pool: DecodePool) -> None:
    """Each worker fills one segment over and over."""
    names = ["red.png", "green.png", "blue.png", "black.png"] * 3
    futures = [pool.submit(DATA / name) for name in names]
    for name, future in zip(names, futures, strict=True):
        assert_same(future.result(), INLINE.submit(DATA / name).result())


@pytest.mark.parametrize("name", ["cut.jpg", "cut.png", "empty.png", "page.png", "zip.png"])
def test_bad_picture_fails_alone(pool: DecodePool, name: str) -> None:
    good = pool.submit(DATA / "red.png")
    with pytest.raises(MediaError):
        pool.submit((DATA / name).read_bytes() or b"").result()
    assert good.result().num_rows == 16


def test_error_of_a_worker_has_its_class_and_text(pool: DecodePool) -> None:
    with pytest.raises(MediaTooLarge, match="4000 times the other"):
        pool.submit(DATA / "thin_4000x1.png").result()
    with pytest.raises(RequestError, match="max_pixels=5"):
        pool.submit(DATA / "red.png", max_pixels=5).result()


class _Stops(ImageProcessor):
    """Ends its process on 1 x 1 pixels, as a crash in a library would, and hangs on 28 x 28; at
    27 x 27 it has a fault of its own, 26 x 28 takes the process over and answers nonsense, and
    22 x 3 begins an answer and hangs."""

    def patches(self, image, *args, **kwargs):  # type: ignore[no-untyped-def]
        if image.size == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if image.size == (28, 28):
            signal.pause()
        if image.size == (27, 27):
            raise AttributeError("ours")
        if image.size == (26, 28):
            os.write(int(sys.argv[1]), b"\0\0\0\0\0\0\0\2{}")
        if image.size == (22, 3):
            os.write(int(sys.argv[1]), b"\0")
            signal.pause()
        return super().patches(image, *args, **kwargs)


@pytest.fixture
def stopping_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecodePool]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    pool = DecodePool(_Stops(max_pixels=1003520), LIMITS, workers=2, timeout_seconds=3)
    yield pool
    pool.close()


def test_worker_that_dies_fails_its_own_picture_alone(stopping_pool: DecodePool) -> None:
    names = ["red.png", "size_1x1.png", "green.png", "size_1x1.png", "blue.png", "big.png"]
    futures = [stopping_pool.submit(DATA / name) for name in names]
    for name, future in zip(names, futures, strict=True):
        if name == "size_1x1.png":
            with pytest.raises(MediaError, match="ended"):  # once it did, it is refused
                future.result()
        else:
            assert_same(future.result(), INLINE.submit(DATA / name).result())


def test_fault_of_ours_costs_no_worker_and_refuses_no_file(
    stopping_pool: DecodePool, caplog: pytest.LogCaptureFixture
) -> None:
    processes = children()
    for _ in range(2):
        with pytest.raises(DecodeFault, match="AttributeError"):
            stopping_pool.submit(DATA / "size_27x27.png").result()
    assert stopping_pool.submit(DATA / "green.png").result().num_rows == 16
    assert children() == processes
    assert 'raise AttributeError("ours")' in caplog.text  # where it is to be mended


def test_worker_that_answers_nonsense_is_replaced_before_the_next_picture(
    stopping_pool: DecodePool,
) -> None:
    """Its next answer would be that of the picture before."""
    for _ in range(3):
        with pytest.raises(KeyError):
            stopping_pool.submit(DATA / "size_26x28.png").result()
    for name in ("red.png", "green.png", "blue.png"):
        result = stopping_pool.submit(DATA / name).result()
        assert_same(result, INLINE.submit(DATA / name).result())


@pytest.mark.parametrize("size", ["28x28", "22x3"])
def test_worker_that_hangs_is_replaced(stopping_pool: DecodePool, size: str) -> None:
    assert stopping_pool.submit(DATA / "red.png").result().num_rows == 16
    with pytest.raises(MediaError, match="took too long"):
        stopping_pool.submit(DATA / f"size_{size}.png").result(10)
    assert stopping_pool.submit(DATA / "green.png").result().num_rows == 16


def test_picture_that_nobody_waits_for_holds_its_worker_a_second_at_most() -> None:
    pool = DecodePool(PROCESSOR, LIMITS, workers=1)
    try:
        assert pool.submit(DATA / "red.png").result().num_rows == 16
        (process,) = [w._process for w in list_idle(pool)]
        os.kill(process.pid, signal.SIGSTOP)  # as good as a picture that takes for ever
        running, waiting = pool.submit(DATA / "green.png"), pool.submit(DATA / "blue.png")
        while not running.running():
            time.sleep(0.001)
        pool.abandon(waiting)
        assert waiting.cancelled()
        start = time.monotonic()
        pool.abandon(running)
        with pytest.raises(MediaError, match="aborted"):
            running.result(30)
        assert 0.9 < time.monotonic() - start < 10
        assert process.poll() == -signal.SIGKILL
        assert pool.submit(DATA / "big.png").result().num_rows > 16
    finally:
        pool.close()


@pytest.mark.parametrize(("is_wanted", "reason"), [(True, "took too long"), (False, "aborted")])
def test_file_that_its_worker_does_not_read_is_waited_for_no_longer_than_another(
    is_wanted: bool, reason: str
) -> None:
    """It is larger than the buffers between the two."""
    pool = DecodePool(PROCESSOR, Limits(1 << 24, 1000), workers=1, timeout_seconds=2)
    (process,) = [w._process for w in list_idle(pool)]
    os.kill(process.pid, signal.SIGSTOP)
    try:
        future = pool.submit(bytes(1 << 22))
        while not future.running():
            time.sleep(0.001)
        if not is_wanted:
            pool.abandon(future)
        with pytest.raises(MediaError, match=reason):
            future.result(10)
        assert pool.submit(DATA / "size_1x1.png").result(10).num_rows == 4
    finally:
        process.kill()
        pool.close()


def test_picture_that_nobody_waits_for_may_end_within_the_second(pool: DecodePool) -> None:
    future = pool.submit(DATA / "big.png")
    pool.abandon(future)
    assert future.cancelled() or future.result().num_rows > 16
    pool.abandon(future)  # over already


def list_idle(pool: DecodePool) -> list[Any]:
    workers = [pool._idle.get(timeout=10) for _ in range(pool._count)]
    for worker in workers:
        pool._idle.put(worker)
    return workers


def test_file_that_ended_a_worker_is_refused_before_it_ends_another(
    stopping_pool: DecodePool,
) -> None:
    with pytest.raises(MediaError, match="ended unexpectedly"):
        stopping_pool.submit(DATA / "size_1x1.png").result()
    processes = children()
    for source in (DATA / "size_1x1.png", (DATA / "size_1x1.png").read_bytes()):
        for max_pixels in (None, 50_176):  # nothing that decoding depends on
            with pytest.raises(MediaError, match="refused for 600 more seconds"):
                stopping_pool.submit(source, max_pixels=max_pixels).result()
    assert children() == processes
    assert stopping_pool.submit(DATA / "red.png").result().num_rows == 16


def test_picture_beyond_the_memory_limit_is_too_large_and_its_worker_goes_on() -> None:
    file = io.BytesIO()
    Image.new("RGBA", (5000, 4000), (9, 8, 7, 6)).save(file, "PNG", compress_level=1)
    before = children()
    pool = DecodePool(PROCESSOR, Limits(1 << 20, 20_000_000), workers=1, memory_bytes=64 << 20)
    processes = children() - before
    with pytest.raises(MediaTooLarge, match=r"media\.worker_memory_bytes"):
        pool.submit(file.getvalue()).result()
    assert pool.submit(DATA / "red.png").result().num_rows == 16
    assert children() - before == processes
    pool.close()


def test_default_memory_limit_holds_the_largest_picture_of_the_most_expensive_mode() -> None:
    """Transparency needs most: the picture, white, their mixture, and that as RGB."""
    file = io.BytesIO()
    Image.new("RGBA", (5000, 4000), (9, 8, 7, 6)).save(file, "PNG", compress_level=1)
    pool = DecodePool(PROCESSOR, Limits(1 << 20, 20_000_000), workers=1)
    assert pool.submit(file.getvalue()).result().num_rows > 1000
    pool.close()


def test_worker_killed_while_idle_costs_no_request() -> None:
    before = children()
    pool = DecodePool(PROCESSOR, LIMITS, workers=1)
    (worker,) = children() - before
    assert pool.submit(DATA / "red.png").result().num_rows == 16
    os.kill(worker, signal.SIGKILL)
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    assert pool.submit(DATA / "red.png").result().num_rows == 16
    pool.close()


def test_close_leaves_no_process_and_no_descriptor() -> None:
    gc.collect()
    before, descriptors = children(), os.listdir("/proc/self/fd")
    pool = DecodePool(PROCESSOR, LIMITS, workers=2)
    assert len(children() - before) == 2
    kept = [pool.submit(DATA / "big.png").result() for _ in range(3)]
    with pytest.raises(MediaError):
        pool.submit(DATA / "cut.png").result()
    pool.close()
    pool.close()
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert kept[0].features.any()
    with pytest.raises(EngineStopped):
        pool.submit(DATA / "red.png")


def test_start_that_fails_leaves_no_process_and_no_descriptor() -> None:
    """At whatever step: with more and more descriptors to be had it is one after the other."""
    gc.collect()
    before, descriptors = children(), os.listdir("/proc/self/fd")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [number for number in range(1000) if str(number) not in descriptors]
    has_failed = []
    for stop in free[:12]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (stop, limit[1]))
        try:
            DecodePool(PROCESSOR, LIMITS, workers=2).close()
            has_failed.append(False)
        except OSError:
            has_failed.append(True)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        assert children() == before
        assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    assert has_failed[0] and not has_failed[-1]


def test_close_cancels_what_waits() -> None:
    pool = DecodePool(PROCESSOR, LIMITS, workers=1)
    futures = [pool.submit(DATA / "big.png") for _ in range(20)]
    pool.close()
    assert all(future.done() for future in futures)
    with pytest.raises(CancelledError):
        futures[-1].result()


def test_refused_shared_memory_is_warned_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))
    try:
        pool = DecodePool(PROCESSOR, LIMITS, workers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    futures = [pool.submit(DATA / "big.png") for _ in range(3)]
    for future in futures:
        assert_same(future.result(), INLINE.submit(DATA / "big.png").result())
    assert pool.inline_count == 3
    assert sum("shared memory refused" in record.message for record in caplog.records) == 1
    pool.close()


def test_worker_imports_nothing_heavy() -> None:
    """A worker starts in a fraction of a second and never touches an accelerator."""
    code = (
        "import sys, jaxmm.host.decode_worker;"
        "import jaxmm.models.qwen2_5_vl.processor, jaxmm.models.qwen3_vl.video;"
        "print({'jax', 'flax', 'torch', 'transformers'} & set(sys.modules))"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=True)
    assert done.stdout.strip() == b"set()"


def test_zero_workers_means_one_for_two_cores() -> None:
    before = children()
    pool = DecodePool(PROCESSOR, LIMITS)
    assert len(children() - before) == max(1, (os.cpu_count() or 1) // 2)
    pool.close()
