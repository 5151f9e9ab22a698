"""Host memory that loading a checkpoint takes beside the weights themselves, and its time.

    python -m tests.bench.make_checkpoint DIR --vocab-size 151936
    python -m tests.bench.bench_load_memory DIR

On the CPU the shards of all chips lie in host memory too: what is printed is the peak less those.
Each way of loading runs in a process of its own, on four simulated chips.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.bench.machine import describe_run

CHIPS = 4


def resident_bytes() -> int:
    """Memory of this process that is no mapped file: of those the system keeps what it likes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("no RssAnon in /proc/self/status; Linux only")


class Peak:
    """The most memory that this process has while the block runs, looked at every millisecond."""

    def __enter__(self) -> "Peak":
        self.start = self.bytes = resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, resident_bytes())


def load(directory: Path, out: Path, way: str) -> None:
    """Load one way in this process, and print a row."""
    import jax
    import numpy as np

    from jaxmm.device.backend import Backend
    from jaxmm.device.sharding import param_spec
    from jaxmm.models import read_config
    from jaxmm.models.converted import convert, restore_params
    from jaxmm.models.loading import place_params
    from jaxmm.models.stored import Stored

    mesh = jax.make_mesh((CHIPS,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    backend = Backend("portable", mesh)
    config = read_config(directory)

    def place(stored: Stored) -> jax.Array:
        sharding = backend.sharding(param_spec(stored.path))
        return jax.make_array_from_callback(stored.shape, sharding, stored.read)

    params, start = None, time.perf_counter()
    with Peak() as peak:
        if way == "convert":
            convert(directory, out, progress=False)
        elif way == "safetensors":
            params = jax.block_until_ready(place_params(directory, config, np.float32, place))
        else:
            sharding = lambda path: backend.sharding(param_spec(path))  # noqa: E731
            params = jax.block_until_ready(restore_params(out, config, np.float32, sharding))
    seconds = time.perf_counter() - start
    shards = [s.data for a in jax.tree.leaves(params) for s in a.addressable_shards]
    kept = sum({s.unsafe_buffer_pointer(): s.nbytes for s in shards}.values())
    beside = peak.bytes - peak.start - kept
    print(f"{way:<12} {seconds:6.1f} s   kept {kept >> 20:5} MiB   beside {beside >> 20:5} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--way", choices=("convert", "safetensors", "orbax"))
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args()
    if parsed.way:
        load(parsed.model, parsed.out, parsed.way)
        return
    print(describe_run())
    flags = f"--xla_force_host_platform_device_count={CHIPS}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with tempfile.TemporaryDirectory() as scratch:
        for way in ("convert", "safetensors", "orbax"):
            words = [str(parsed.model), "--way", way, "--out", f"{scratch}/out"]
            command = [sys.executable, "-m", "tests.bench.bench_load_memory", *words]
            subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()
