"""CPU time of `Scheduler.plan`: `python -m tests.bench.bench_scheduler`. No device, no jax.

Thread time, not wall time, so that whatever else runs on the machine does not count.
"""

import platform
import time
from collections.abc import Callable

import numpy as np

from jaxmm.host.arena import Arena
from jaxmm.host.page_pool import PagePool
from jaxmm.host.plan import Plan
from jaxmm.host.prefix_cache import PrefixCache
from jaxmm.host.scheduler import Scheduler, SchedulerConfig
from jaxmm.host.sequence import Sequence, Status
from jaxmm.request import SamplingParams
from tests.bench.machine import describe_run
from tests.jaxmm.host.prompts import Picture, make_prompt

RUNNING = 64
STEPS = 2000
WARMUP = 100
CONFIG = SchedulerConfig(
    max_step_tokens=512,
    max_patches_per_step=16384,
    max_lane_patches=16384,
    max_running=RUNNING,
    max_waiting=4096,
    max_model_len=32768,
    page_size=16,
)
RNG = np.random.default_rng(0)


def make_scheduler() -> Scheduler:
    pool = PagePool(64 * 1024)
    return Scheduler(CONFIG, pool, PrefixCache(pool, CONFIG.page_size), Arena(65536, 16))


def make_sequence(name: int, length: int, max_tokens: int) -> Sequence:
    """A question about a picture of 256 rows: shared system text, then text of its own."""
    text = RNG.integers(0, 150_000, length).tolist()
    return Sequence(
        request_id=str(name),
        prompt=make_prompt([1] * 64, Picture(str(name % 32), 256), text),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


class Loop:
    """Delivers tokens one plan late; stops nothing before its length."""

    def __init__(self) -> None:
        self.scheduler = make_scheduler()
        self.sampled: list[Sequence] = []
        self.micros: list[float] = []

    def step(self) -> Plan | None:
        start = time.thread_time()
        plan = self.scheduler.plan()
        self.micros.append((time.thread_time() - start) * 1e6)
        self.deliver()
        if plan is not None:
            self.sampled = [row.sequence for row in plan.decodes]
            self.sampled += [chunk.sequence for chunk in plan.extends if chunk.samples]
        return plan

    def deliver(self) -> None:
        for sequence in self.sampled:
            if sequence.status is not Status.FINISHED:
                self.scheduler.append(sequence, 5)
                if sequence.is_full:
                    self.scheduler.finish(sequence, "length")


def decodes_only() -> list[float]:
    """64 running requests, none waiting."""
    loop = Loop()
    for i in range(RUNNING):
        loop.scheduler.add(make_sequence(i, 500, STEPS + 1000))
    while (plan := loop.step()) is None or len(plan.decodes) < RUNNING:
        pass
    loop.micros.clear()
    for _ in range(WARMUP + STEPS):
        loop.step()
    return loop.micros[WARMUP:]


def full_queue() -> list[float]:
    """64 running requests and a queue of thousands, none of which has room to start."""
    loop = Loop()
    for i in range(4000):
        loop.scheduler.add(make_sequence(i, 100, STEPS + 1000))
    for _ in range(WARMUP + STEPS):
        loop.step()
    return loop.micros[WARMUP:]


def churn() -> list[float]:
    """Requests end and start all the time: decodes, chunks, encodes, inserts, evictions."""
    loop = Loop()
    for i in range(WARMUP + STEPS):
        while loop.scheduler.num_waiting < 16:
            loop.scheduler.add(make_sequence(i, 200, int(RNG.integers(16, 200))))
        loop.step()
    return loop.micros[WARMUP:]


def long_prompts() -> list[float]:
    """Prompts of 30,000 tokens in chunks of 512, each shared by four requests."""
    loop = Loop()
    texts = [make_sequence(i, 30_000, 64).prompt for i in range(8)]
    for i in range(WARMUP + STEPS):
        while loop.scheduler.num_waiting < 16:
            prompt = texts[int(RNG.integers(8))]
            sampling = SamplingParams(max_tokens=64)
            loop.scheduler.add(Sequence(request_id=str(i), prompt=prompt, sampling=sampling))
        loop.step()
    return loop.micros[WARMUP:]


def report(workload: Callable[[], list[float]]) -> None:
    micros = np.array(workload())
    median, p99, worst = (float(np.percentile(micros, q)) for q in (50, 99, 100))
    print(
        f"{workload.__name__:14} median {median:7.1f} µs   p99 {p99:7.1f} µs   max {worst:7.1f} µs"
    )


def main() -> None:
    print(f"{describe_run()}\nPython    {platform.python_version()}")
    print(f"{RUNNING} running, {STEPS} steps after {WARMUP} of warm-up")
    for workload in (decodes_only, full_queue, churn, long_prompts):
        report(workload)


if __name__ == "__main__":
    main()
