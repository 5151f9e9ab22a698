"""What an engine and its process hold: equal before and after any workload."""

import contextlib
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jaxmm.engine import Engine
from tests.engines import on_loop

_T = TypeVar("_T")


def _descriptors() -> dict[str, int]:
    """How many are open, by what they are: a difference says whose they were."""
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since: that of the listing itself
            kinds[os.readlink(f"/proc/self/fd/{name}").split(":[")[0]] += 1
    return dict(kinds)


def held(on: Engine) -> dict[str, Any]:
    """Everything that a request can hold on to, counted on the engine's thread."""
    parts, replicas = on._parts, on.replicas

    def count() -> dict[str, Any]:
        return {
            "free pages": sum(r.pool.num_free for r in replicas),
            "cached pages": sum(r.prefix_cache.num_pages for r in replicas),
            "pinned pages": sum(r.prefix_cache.num_pinned for r in replicas),
            "conversations": sum(len(r.scheduler.pins) for r in replicas),
            "free rows": sum(r.arena.num_free for r in replicas),
            "slots": sum(r.scheduler._residency.num_slots for r in replicas),
            "running": sum(r.scheduler.num_running for r in replicas),
            "waiting": sum(r.scheduler.num_waiting for r in replicas),
            "has work": any(r.scheduler.has_work for r in replicas),
            "answers": len(on._loop._answers),
            "homes": len(on._loop._homes),
            "preparing": len(on._intake._preparing),
            "steps": sum(replica.num_flying for replica in on._loop._replicas),
            "inbox": on._loop._inbox.qsize(),
            "known files": len(parts.media_map),
            "decodes": parts.decodes.num_running,
            "features": parts.decodes.num_held,
            "threads": threading.active_count(),
            "descriptors": _descriptors(),
            "shared maps": Path("/proc/self/maps").read_text().count("jaxmm-decode"),
        }

    return on_loop(on, count)


def quiet(on: Engine) -> dict[str, Any]:
    """What an idle engine with empty caches holds, all executables read and all workers there."""
    on._parts.runner.settle()
    decoder = on._parts.decoder
    deadline = time.monotonic() + 60
    while (
        any(r.scheduler.has_work for r in on.replicas)
        or on._intake._preparing
        or on._parts.decodes.num_running
        or decoder._idle.qsize() < decoder._count
    ):
        assert time.monotonic() < deadline, "work is left"
        time.sleep(0.01)
    on.flush_caches()
    gc.collect()
    return held(on)


def now_or_soon(read: Callable[[], _T], expected: _T) -> _T:
    """The first reading that is as expected, or the last of ten seconds: what has leaked stays,
    what passes may take its time."""
    deadline = time.monotonic() + 10
    while (found := read()) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
