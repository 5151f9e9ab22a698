"""Full attention of a vision lane: jaxmm's portable form against torch, image by image.

    python -m tests.bench.bench_segment_attention [--patches 8192] [--heads 16] [--channels 80]

Prints wall time (median, p99) and CPU seconds; the two alternate in one run, float32, after one
warm-up each. On a machine with other work, CPU seconds are the figure to compare.
"""

import argparse
import time
from collections.abc import Callable

import jax
import numpy as np
import torch

from kernels_pallas.segment_attention.api import segment_attention
from tests.bench.machine import describe_run

Spans = list[tuple[int, int]]


def lanes(num: int) -> dict[str, Spans]:
    """Images of a lane as spans of patches."""
    half, quarter = num // 2, num // 4
    return {
        "one image": [(0, num)],
        "three images": [(0, half), (half, half + quarter + 36), (half + quarter + 36, num)],
        "images of 256": [(i, i + 256) for i in range(0, num, 256)],
        "half empty": [(0, half)],
    }


def torch_attention(arrays: list[np.ndarray], spans: Spans) -> np.ndarray:
    outputs = []
    for start, stop in spans:
        q, k, v = (torch.from_numpy(x[start:stop]).transpose(0, 1)[None] for x in arrays)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs).numpy()


def measure(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, np.ndarray]:
    """float[repeats, 2] of each call: wall and CPU seconds."""
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            figures[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: np.array(values) for name, values in figures.items()}


def compare(arrays: list[np.ndarray], spans: Spans, repeats: int) -> dict[str, np.ndarray]:
    segment = np.full(len(arrays[0]), -1, np.int32)
    for index, (start, stop) in enumerate(spans):
        segment[start:stop] = index
    attend = jax.jit(segment_attention, static_argnames="implementation")

    def jaxmm() -> np.ndarray:
        return np.asarray(attend(*arrays, segment, implementation="portable"))

    expected = torch_attention(arrays, spans)
    np.testing.assert_allclose(jaxmm()[: len(expected)], expected, atol=1e-4)
    calls = {"torch": lambda: torch_attention(arrays, spans), "jaxmm": jaxmm}
    return measure(calls, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patches", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--channels", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    threads = torch.get_num_threads()
    print(f"{describe_run()}\nthreads   {threads}")
    random = np.random.default_rng(0)
    shape = (args.patches, args.heads, args.channels)
    arrays = [random.standard_normal(shape, np.float32) for _ in range(3)]
    for lane, spans in lanes(args.patches).items():
        figures = compare(arrays, spans, args.repeats)
        for name, values in figures.items():
            median, p99 = np.percentile(values[:, 0], [50, 99]) * 1e3
            cpu = np.median(values[:, 1]) * 1e3
            print(f"{lane:14} {name:6} {median:8.0f} ms {p99:8.0f} ms p99 {cpu:8.0f} ms cpu")


if __name__ == "__main__":
    main()
