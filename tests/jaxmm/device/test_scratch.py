"""Scratch memory that is kept: the second use of a large block faults no page."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from jaxmm.device.scratch import keep_scratch_memory

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(8 << 20, np.float32)  # 32 MiB, freed at once: 8192 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert keep_scratch_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc alone can be told")
def test_block_that_was_freed_is_used_again() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 100
