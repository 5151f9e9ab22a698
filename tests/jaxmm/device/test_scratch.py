"""Scratch memory that is kept: a step's second run faults no page, on whatever thread."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import jax
import jax.numpy as jnp
from jaxmm.config import EngineConfig
from jaxmm.start import settle_basis

settle_basis(EngineConfig())

@jax.jit
def step(x):  # a temporary array of 128 MiB, which a product reads, on a thread of XLA's
    return jnp.outer(x, x) @ jnp.ones((len(x), 8), jnp.float32)

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

x = jnp.zeros(4096 + 1696, jnp.float32)
print(*(faults() for _ in range(12)))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc alone can be told")
def test_step_of_a_started_engine_uses_the_same_memory_again() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    first, *later = map(int, run.stdout.split())
    assert first > 30_000, "the step must need fresh memory once for this to say anything"
    assert min(later) < 1000, "small blocks may lie in the way in the first few runs"
