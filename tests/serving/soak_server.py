"""A whole server in a process that tells what it holds: python -m tests.serving.soak_server FLAGS.

It serves as `jaxmm serve` does. Each line on standard input is answered with one line of JSON:
`held` is counted when nothing is in progress, `kill` ends a decoding process by SIGKILL.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from jaxmm.config import EngineConfig
from jaxmm.engine import Engine
from serving.cli import main
from tests.held import quiet

_POOLED = ("jaxmm-", "asyncio_", "ThreadPoolExecutor")
"""Threads of pools, which are started when they are needed, up to a number."""


def resident_bytes(process: int | str = "self") -> int:
    """Memory of a process that is not shared."""
    pages = Path(f"/proc/{process}/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def _held(engine: Engine) -> dict[str, Any]:
    counts = quiet(engine)
    names = [t.name for t in threading.enumerate() if not t.name.startswith(_POOLED)]
    return {**counts, "threads": len(names), "processes": len(_children())}


def _kill(_: Engine) -> dict[str, Any]:
    pid = _children()[0]
    os.kill(pid, signal.SIGKILL)
    return {"killed": pid}


def _bytes(_: Engine) -> dict[str, Any]:
    """Of the server and its decoding processes."""
    return {"bytes": resident_bytes(), "decoding": sum(map(resident_bytes, _children()))}


def _children() -> list[int]:
    tasks = Path("/proc/self/task")
    return [int(p) for t in tasks.iterdir() for p in (t / "children").read_text().split()]


def _obey(engine: Engine) -> None:
    commands = {"held": _held, "kill": _kill, "bytes": _bytes}
    for line in sys.stdin:
        sys.stdout.write(json.dumps(commands[line.strip()](engine)) + "\n")
        sys.stdout.flush()


def _load(config: EngineConfig) -> Engine:
    engine = Engine(config)
    threading.Thread(target=_obey, args=(engine,), daemon=True, name="obey").start()
    return engine


if __name__ == "__main__":
    sys.exit(main(["serve", "--port", "0", *sys.argv[1:]], _load))
