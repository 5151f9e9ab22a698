"""What an engine and its process hold: equal before and after any workload."""

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

from jaxmm.engine import Engine
from tests.engines import on_loop


def held(on: Engine) -> dict[str, Any]:
    """Everything that a request can hold on to, counted on the engine's thread."""
    parts, scheduler = on._parts, on.scheduler

    def count() -> dict[str, Any]:
        return {
            "free pages": parts.pool.num_free,
            "cached pages": parts.prefix_cache.num_pages,
            "pinned pages": parts.prefix_cache.num_pinned,
            "conversations": len(scheduler.pins),
            "free rows": parts.arena.num_free,
            "slots": scheduler._residency.num_slots,
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "has work": scheduler.has_work,
            "answers": len(on._loop._answers),
            "preparing": len(on._intake._preparing),
            "steps": len(on._loop._pending),
            "inbox": on._loop._inbox.qsize(),
            "known files": len(parts.media_map),
            "decodes": parts.decodes.num_running,
            "features": parts.decodes.num_held,
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "shared maps": Path("/proc/self/maps").read_text().count("jaxmm-decode"),
        }

    return on_loop(on, count)


def quiet(on: Engine) -> dict[str, Any]:
    """What an idle engine with empty caches holds."""
    deadline = time.monotonic() + 60
    while on.scheduler.has_work or on._intake._preparing or on._parts.decodes.num_running:
        assert time.monotonic() < deadline, "work is left"
        time.sleep(0.01)
    on.flush_caches()
    gc.collect()
    return held(on)
