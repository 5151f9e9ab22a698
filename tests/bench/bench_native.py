"""The kernels for CPUs, each beside what XLA does in its place, on the same numbers.

    python -m tests.bench.bench_native [--repeats 15]

Median and p99 of milliseconds, and GFLOP a second, all in turn in one process; the speed of a large
product first. Shapes are those of the benchmark's checkpoint (`tests.bench.make_checkpoint`).
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxmm.device.linear import gated_linear, linear
from jaxmm.device.scratch import keep_scratch_memory, share_heap
from kernels_pallas import native
from kernels_pallas.ragged_paged_attention import Ragged, ragged_paged_attention
from kernels_pallas.segment_attention.api import segment_attention, window_attention
from tests.bench.bench_steps import gemm_speed
from tests.bench.machine import describe_run
from tests.engines import cache_dir

HEADS, KV_HEADS, CHANNELS, PAGE, NUM_PAGES = 12, 4, 64, 64, 400
PATCHES, ENCODER_HEADS, WINDOW = 5632, 8, 64

Case = tuple[float, Callable[[], jax.Array], Callable[[], jax.Array]]
"""GFLOP, the kernel and the other."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    share_heap()
    keep_scratch_memory()
    native.register(cache_dir())
    print(describe_run())
    print(f"products  {gemm_speed() / 1e9:.0f} GFLOP/s")
    print(f"{'':<32}{'kernel ms':>10}{'p99':>8}{'XLA ms':>9}{'p99':>8}   kernel and XLA, GFLOP/s")
    random = np.random.default_rng(0)
    for name, (flop, *calls) in _cases(random).items():
        times: list[list[float]] = [[], []]
        for _ in range(1 + repeats):
            for call, taken in zip(calls, times, strict=True):
                start = time.perf_counter()
                call().block_until_ready()
                taken.append((time.perf_counter() - start) * 1e3)
        (kernel, kernel99), (xla, xla99) = (np.percentile(t[1:], [50, 99]) for t in times)
        figures = f"{kernel:10.2f}{kernel99:8.2f}{xla:9.2f}{xla99:8.2f}"
        print(f"{name:<32}{figures}{flop / kernel * 1e3:8.0f}{flop / xla * 1e3:8.0f}", flush=True)


def _cases(random: np.random.Generator) -> dict[str, Case]:
    return {
        "8 rows, 768 to 4096": _product(random, 8, 768, 4096),
        "64 rows, 768 to 1280": _product(random, 64, 768, 1280),
        "512 rows, 768 to 1280": _product(random, 512, 768, 1280),
        "512 rows, 768 to 2048, gated": _product(random, 512, 768, 2048, gated=True),
        "512 rows, 2048 to 768": _product(random, 512, 2048, 768),
        "5632 rows, 512 to 1536": _product(random, 5632, 512, 1536),
        "5632 rows, 512 to 1368, gated": _product(random, 5632, 512, 1368, gated=True),
        "5632 rows, 1368 to 512": _product(random, 5632, 1368, 512),
        "8 decodes of 300 keys": _pages(random, [1] * 8, [300] * 8, num_decodes=8),
        "a chunk of 512 of 512": _pages(random, [512], [512]),
        "a chunk of 512 of 4608": _pages(random, [512], [4608]),
        "16 chunks of 20 of 320": _pages(random, [20] * 16, [320] * 16),
        "5632 patches of one picture": _patches(random, np.zeros(PATCHES, np.int32)),
        "5632 patches of 22 pictures": _patches(random, np.arange(PATCHES, dtype=np.int32) // 256),
        "5632 patches, windows of 64": _windows(random),
    }


def _product(
    random: np.random.Generator, rows: int, depth: int, width: int, *, gated: bool = False
) -> Case:
    shape = (2, width, depth) if gated else (width, depth)
    x_TD = jnp.asarray(random.standard_normal((rows, depth)), jnp.float32)
    weights = jnp.asarray(0.03 * random.standard_normal(shape), jnp.bfloat16)
    bits = jax.lax.bitcast_convert_type(weights, jnp.uint16)
    run = jax.jit(gated_linear if gated else linear)
    flop = 2e-9 * rows * weights.size
    return flop, partial(run, x_TD, bits), partial(run, x_TD, weights.astype(jnp.float32))


def _pages(
    random: np.random.Generator,
    counts: Sequence[int],
    lengths: Sequence[int],
    num_decodes: int = 0,
) -> Case:
    pages = random.standard_normal((NUM_PAGES, 2 * KV_HEADS, PAGE, CHANNELS))
    q_THC = random.standard_normal((sum(counts), HEADS, CHANNELS))
    tables = np.stack([random.permutation(NUM_PAGES)[:80] for _ in counts])
    numbers = [np.cumsum([0, *counts[:-1]]), counts, lengths, tables]
    ragged = Ragged(
        jnp.int32(num_decodes),
        jnp.int32(len(counts)),
        *(jnp.asarray(x, jnp.int32) for x in numbers),
    )
    arrays = jnp.asarray(q_THC, jnp.float32), jnp.asarray(pages, jnp.float32), ragged
    seen = sum(sum(range(n - c + 1, n + 1)) for c, n in zip(counts, lengths, strict=True))
    attend = jax.jit(ragged_paged_attention, static_argnames="implementation")
    flop = 4e-9 * HEADS * CHANNELS * seen
    native_, portable = (partial(attend, *arrays, implementation=i) for i in ("native", "portable"))
    return flop, native_, portable


def _patches(random: np.random.Generator, segment_N: np.ndarray) -> Case:
    arrays = (*_heads(random), jnp.asarray(segment_N))
    attend = jax.jit(segment_attention, static_argnames="implementation")
    seen = float(np.square(np.bincount(segment_N).astype(float)).sum())
    return _both(attend, arrays, seen)


def _windows(random: np.random.Generator) -> Case:
    arrays = (*_heads(random), jnp.arange(PATCHES, dtype=jnp.int32) // WINDOW)
    attend = jax.jit(partial(window_attention, block=WINDOW), static_argnames="implementation")
    return _both(attend, arrays, PATCHES * WINDOW)


def _heads(random: np.random.Generator) -> list[jax.Array]:
    shape = PATCHES, ENCODER_HEADS, CHANNELS
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for _ in range(3)]


def _both(attend: Callable[..., jax.Array], arrays: Sequence[jax.Array], seen: float) -> Case:
    native_, portable = (partial(attend, *arrays, implementation=i) for i in ("native", "portable"))
    return 4e-9 * ENCODER_HEADS * CHANNELS * seen, native_, portable


if __name__ == "__main__":
    main()
