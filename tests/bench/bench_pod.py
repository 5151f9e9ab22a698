"""What a step of a pod costs beside the step: telling the followers, and their answers.

    python -m tests.bench.bench_pod [--requests 64] [--followers 3]

Followers are processes on this machine, over loopback: they unpack each step, write it into a
batch, and answer as after a step. Printed are the microseconds that process 0's engine thread
spends on a step, and those until the last follower has the batch and has said so.
"""

import argparse
import multiprocessing
import socket
import statistics
import time

import numpy as np

from jaxmm.host.batch import StepBatch, StepLayout
from jaxmm.pod.channel import Channel
from jaxmm.pod.messages import Kind, pack_step, unpack_step
from tests.bench.machine import describe_run

KEY = bytes(32)
WARM_UP, STEPS = 200, 2000
MAX_RUNNING, TABLE_PAGES, PAGE_SIZE, MASK_WORDS = 128, 256, 128, 4752


def follow(address: tuple[str, int]) -> None:
    """Take steps until the end."""
    channel = Channel(socket.create_connection(address), KEY, "process 0")
    while True:
        kind, payload = channel.receive()
        if kind is Kind.END:
            return
        num_tokens, buffer, _ = unpack_step(payload)
        batch = StepBatch(StepLayout(num_tokens, MAX_RUNNING, TABLE_PAGES, MASK_WORDS))
        batch.buffer[:] = buffer
        channel.send(Kind.DONE, [bytes(24)])


def decode_batch(num_requests: int) -> StepBatch:
    """A decode step of requests with 2,000 tokens each, sampled at random."""
    rng = np.random.default_rng(0)
    batch = StepBatch(StepLayout(max(16, num_requests), MAX_RUNNING, TABLE_PAGES, MASK_WORDS))
    n = num_requests
    for name, value in (("num_tokens", n), ("num_decodes", n), ("num_sequences", n)):
        batch[name][...] = value
    pages = 2000 // PAGE_SIZE + 1
    batch["feed_T"][:n] = np.arange(n)
    batch["row_T"][:] = -1
    batch["positions_AT"][:, :n] = rng.integers(0, 2000, (3, n))
    batch["kv_slot_T"][:n] = rng.integers(0, 1 << 20, n)
    batch["tables_BQ"][:n, :pages] = rng.integers(0, 8192, (n, pages))
    for name in ("starts_B", "counts_B", "lengths_B", "sample_token_B", "sample_slot_B", "top_k_B"):
        batch[name][:n] = rng.integers(1, 2000, n)
    for name in ("temperature_B", "top_p_B"):
        batch[name][:n] = 0.7
    batch["seed_B2"][:n] = rng.integers(0, 1 << 31, (n, 2))
    return batch


def measure(channels: list[Channel], batch: StepBatch) -> tuple[float, float, int]:
    """Seconds to tell, seconds to the last answer, and bytes of one message."""
    start = time.perf_counter()
    message = pack_step(batch.layout.num_tokens, batch.buffer)
    for channel in channels:
        channel.send(Kind.STEP, message)
    told = time.perf_counter()
    for channel in channels:
        channel.receive()
    return told - start, time.perf_counter() - start, sum(map(len, message))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--followers", type=int, default=3)
    parsed = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        processes = [
            spawn.Process(target=follow, args=(listener.getsockname(),), daemon=True)
            for _ in range(parsed.followers)
        ]
        for process in processes:
            process.start()
        channels = [Channel(listener.accept()[0], KEY, "follower") for _ in processes]
    batch = decode_batch(parsed.requests)
    rows = [measure(channels, batch) for _ in range(WARM_UP + STEPS)][WARM_UP:]
    for channel in channels:
        channel.send(Kind.END)
    print(describe_run())
    print(f"{parsed.requests} requests, {parsed.followers} followers, {STEPS} steps")
    print(f"message {rows[0][2]} bytes of {batch.buffer.nbytes}")
    for name, column in (("told", 0), ("answered", 1)):
        times = sorted(row[column] * 1e6 for row in rows)
        p99 = times[len(times) * 99 // 100]
        print(f"{name:<10} median {statistics.median(times):7.0f} us   p99 {p99:7.0f} us")


if __name__ == "__main__":
    main()
