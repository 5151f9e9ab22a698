"""A long crowd against a whole server: right answers, no 5xx, flat memory.

    python -m tests.bench.bench_soak [--requests 10000] [--clients 256]

Prints hardware, commit, outcomes, requests a second, times of answers and the server's memory
every tenth of the way. Ends with status 1 when an answer is wrong, something is not given back, or
the memory of the second half grows by more than 5%. The workload is `tests/serving/soak.py`.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from tests.bench.machine import describe_run
from tests.serving.soak import Crowd, SoakServer

WARM_UP = 300
MAX_GROWTH = 0.05


def main() -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=256)
    parsed = parser.parse_args()
    print(describe_run())
    server = SoakServer(max_waiting=2 * parsed.clients, log_level="warning")
    try:
        faults = asyncio.run(soak(server, parsed.requests, parsed.clients))
        status = server.end()
        if status != 0:
            faults.append(f"the server ended with status {status}")
    finally:
        server.kill()
    faults += [line.strip() for line in server.errors if "ERROR" in line or "Traceback" in line]
    for fault in faults[:20]:
        print("fault:", fault)
    print(f"{len(faults)} faults")
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
        held = server.tell("held")
        sizes.append(server.tell("bytes")["bytes"])
        outcomes += made.outcomes
        times += made.seconds
        faults += made.wrong + [f"held {held}, not {before}"] * (held != before)
        rate = num_requests / 10 / seconds
        p50, p99 = np.percentile(made.seconds, [50, 99])
        took = f"answers p50 {p50:.2f} s, p99 {p99:.2f} s"
        print(f"{tenth}0%: {rate:.1f} requests/s, {took}, {sizes[-1] >> 20} MiB, {dict(outcomes)}")
    p50, p99 = np.percentile(times, [50, 99])
    print(f"{len(times)} answers: p50 {p50:.2f} s, p99 {p99:.2f} s, longest {max(times):.2f} s")
    growth = sizes[-1] / sizes[4] - 1
    print(f"memory of the second half: {growth:+.1%}")
    return faults + [f"memory grew by {growth:.1%}"] * (growth > MAX_GROWTH)


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
