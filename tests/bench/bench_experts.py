"""Expert MLPs on this machine: blocks of rows against the ragged dot of the compiler.

    python -m tests.bench.bench_experts

Sizes in proportion to Qwen3-VL-30B-A3B's layers, an eighth as wide. Prints hardware, commit, and
the median of nine runs in milliseconds, each form in turn.
"""

import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from jaxmm.device.experts import by_blocks, by_ragged_dot, route
from tests.bench.machine import describe_run

EXPERTS, CHOSEN, WIDTH, INNER = 128, 8, 256, 96
TOKENS = (1, 8, 32, 128, 512)
RUNS = 9


def milliseconds(run: Callable[[], jax.Array]) -> float:
    """One run, waited for."""
    start = time.perf_counter()
    run().block_until_ready()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    """Print a table."""
    print(f"{describe_run()}\ndevices   {jax.devices()}")
    print(f"{EXPERTS} experts, {CHOSEN} a token, {WIDTH} x {INNER}, float32")
    random = np.random.default_rng(0)
    gate_up = jax.device_put(random.standard_normal((EXPERTS, WIDTH, 2 * INNER), np.float32))
    down = jax.device_put(random.standard_normal((EXPERTS, INNER, WIDTH), np.float32))
    print(f"{'tokens':>6} {'blocks':>9} {'ragged':>9}")
    for tokens in TOKENS:
        x = random.standard_normal((tokens, WIDTH), np.float32)
        routing = route(jax.device_put(random.standard_normal((tokens, EXPERTS))), CHOSEN)
        rows = jax.device_put(x[np.asarray(routing.order_M) // CHOSEN])
        arguments = (rows, gate_up, down, routing.counts_Z)
        forms = [jax.jit(form) for form in (by_blocks, by_ragged_dot)]
        for form in forms:
            form(*arguments).block_until_ready()
        times = [[milliseconds(lambda f=f, a=arguments: f(*a)) for f in forms] for _ in range(RUNS)]
        blocks, ragged = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{tokens:>6} {blocks:>9.2f} {ragged:>9.2f}")


if __name__ == "__main__":
    main()
