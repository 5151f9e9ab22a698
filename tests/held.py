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
            "descriptors": len(os.listdir("/proc/self/fd")),
            "shared maps": Path("/proc/self/maps").read_text().count("jaxmm-decode"),
        }

    return on_loop(on, count)


def quiet(on: Engine) -> dict[str, Any]:
    """What an idle engine with empty caches holds."""
    deadline = time.monotonic() + 60
    while (
        any(r.scheduler.has_work for r in on.replicas)
        or on._intake._preparing
        or on._parts.decodes.num_running
    ):
        assert time.monotonic() < deadline, "work is left"
        time.sleep(0.01)
    on.flush_caches()
    gc.collect()
    return held(on)
