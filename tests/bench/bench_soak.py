"""A long crowd against a whole server: right answers, no 5xx, flat memory.

    python -m tests.bench.bench_soak [--requests 10000] [--clients 256]

Prints hardware, commit, outcomes, requests a second, times of answers and the server's memory
every tenth of the way, and at the end one verdict with the number of faults by kind. Ends with
status 1 when there are any: an answer is wrong, a status is not the expected one, a connection
ends early, something is not given back, the server logs an error, or its memory grows by more than
5% in the second half. The workload is `tests/serving/soak.py`.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from tests.bench.machine import describe_run
from tests.held import now_or_soon
from tests.serving.soak import FAULTS, Crowd, SoakServer

WARM_UP = 300
MAX_GROWTH = 0.05
ERRORS = ("ERROR", "CRITICAL", "Traceback")
KINDS = (*FAULTS, "held", "memory", "server")


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=256)
    parsed = parser.parse_args()
    print(describe_run(), flush=True)
    server = SoakServer(max_waiting=2 * parsed.clients, log_level="warning")
    try:
        faults = asyncio.run(soak(server, parsed.requests, parsed.clients))
        if (status := server.end()) != 0:
            faults.append(f"server: it ended with status {status}")
    finally:
        server.kill()
    logged = (line.strip() for line in server.errors if any(word in line for word in ERRORS))
    faults += [f"server: {line}" for line in logged]
    for fault in faults[:20]:
        print("fault:", fault)
    counts = {kind: sum(f.startswith(f"{kind}: ") for f in faults) for kind in KINDS}
    print("verdict:", "FAILED" if faults else "passed", counts)
    return 1 if faults else 0


async def soak(server: SoakServer, num_requests: int, num_clients: int) -> list[str]:
    """Ten parts of the crowd, memory and what is held looked at between them; the faults."""
    outcomes, sizes, faults, times = Counter[str](), [], [], []
    await part(server.url, 0, WARM_UP, num_clients)
    before = server.tell("held")
    for tenth in range(1, 11):
        start = time.monotonic()
        made = await part(server.url, tenth, num_requests // 10, num_clients)
        seconds = time.monotonic() - start
        held = now_or_soon(lambda: server.tell("held"), before)
        memory = server.tell("bytes")
        sizes.append(memory["bytes"])
        outcomes += made.outcomes
        times += made.seconds
        faults += made.wrong + [f"held: {held}, not {before}"] * (held != before)
        print(
            f"{tenth * num_requests // 10} requests: {num_requests / 10 / seconds:.1f} a second, "
            f"answers {shown(made.seconds)}, server {sizes[-1] >> 20} MiB, "
            f"decoding {memory['decoding'] >> 20} MiB, {dict(outcomes)}, {len(faults)} faults",
            flush=True,
        )
    print(f"{len(times)} answers: {shown(times)}, longest {max(times):.2f} s")
    growth = sizes[-1] / sizes[4] - 1
    print(f"memory of the second half: {growth:+.1%}; MiB {[size >> 20 for size in sizes]}")
    return faults + [f"memory: it grew by {growth:.1%}"] * (growth > MAX_GROWTH)


def shown(seconds: list[float]) -> str:
    """Median and p99."""
    p50, p99 = np.percentile(seconds, [50, 99])
    return f"p50 {p50:.2f} s, p99 {p99:.2f} s"


async def part(url: str, seed: int, num_requests: int, num_clients: int) -> Any:
    """One crowd, its connections closed."""
    crowd = Crowd(url, seed)
    try:
        await crowd.run(num_requests, num_clients)
    finally:
        await crowd.aclose()
    return crowd


if __name__ == "__main__":
    sys.exit(main())
