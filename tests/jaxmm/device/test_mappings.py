"""Mappings of memory are counted as the system does, and their end is an error that says so."""

import mmap
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmm.device import mappings
from jaxmm.device.executables import Executables, Key, Lower
from jaxmm.device.ledger import CompileLedger
from jaxmm.errors import ConfigError

pytestmark = pytest.mark.skipif(
    not Path("/proc/sys/vm/max_map_count").exists(), reason="Linux alone counts them"
)


def test_share_grows_by_what_is_mapped() -> None:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    before = mappings.share_of_mappings()
    # neighbours of different protection are not one mapping
    maps = [
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | (mmap.PROT_WRITE * (i % 2)))
        for i in range(1000)
    ]
    grown = (mappings.share_of_mappings() - before) * limit
    assert 900 < grown < 1200
    for each in maps:
        each.close()


def test_warm_up_ends_with_the_cause_when_few_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Seventeen executables, of which the first takes what there is."""
    (tmp_path / "limit").write_text("1000000000\n")
    monkeypatch.setattr(mappings, "_LIMIT", tmp_path / "limit")
    step = jax.jit(lambda x: x + 1)

    def lower(n: int) -> jax.stages.Lowered:
        if n == 17:
            (tmp_path / "limit").write_text("100\n")
        return step.lower(jax.numpy.zeros(n))

    assert warm_up_without_room({("step", n): partial(lower, n) for n in range(1, 18)}) >= 16


def test_nothing_is_compiled_where_few_are_left_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "limit").write_text("100\n")
    monkeypatch.setattr(mappings, "_LIMIT", tmp_path / "limit")
    lower = partial(jax.jit(lambda x: x + 1).lower, jax.ShapeDtypeStruct((1,), np.float32))
    assert warm_up_without_room({("step", 1): lower}) == 0


def warm_up_without_room(lowers: dict[Key, Lower]) -> int:
    """How many executables were made before the error."""
    ledger = CompileLedger("raise")
    executables = Executables(ledger, "", "test", jax.devices())
    try:
        with pytest.raises(ConfigError, match="memory mappings"):
            executables.warm_up(lowers, progress=False)
    finally:
        executables.close()
        ledger.close()
    return len(ledger.records)


def test_a_system_that_does_not_count_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mappings, "_LIMIT", Path("/does/not/exist"))
    assert mappings.share_of_mappings() == 0
    mappings.check_mappings()
