"""Executables kept between starts, and what happens to damaged ones."""

import ast
import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jaxmm.models
from jaxmm.device.executables import Executables, digested_files
from jaxmm.device.ledger import CompileLedger
from jaxmm.errors import ModelError

ROOT = Path(__file__).parents[3]
SHAPE = jax.ShapeDtypeStruct((4,), jnp.float32)


def lower(factor: float) -> jax.stages.Lowered:
    return jax.jit(lambda x: x * factor).lower(SHAPE)


def warmed(
    directory: str, ledger: CompileLedger, fingerprint: str = "model", factor: float = 2.0
) -> Executables:
    made = Executables(ledger, directory, fingerprint, jax.devices()[:1])
    made.warm_up({("language", 4): lambda: lower(factor)}, progress=False)
    made.settle()
    return made


def run(executables: Executables) -> list[float]:
    return np.array(executables["language", 4](np.ones(4, np.float32))).tolist()


@pytest.fixture
def ledger():
    ledger = CompileLedger("log")
    yield ledger
    ledger.close()


def test_second_start_restores_what_the_first_compiled(
    tmp_path: Path, ledger: CompileLedger
) -> None:
    assert run(warmed(str(tmp_path), ledger)) == [2.0] * 4
    restored = warmed(str(tmp_path), ledger, factor=5.0)  # would show if it were compiled again
    assert run(restored) == [2.0] * 4
    assert [record.restored for record in ledger.records] == [False, True]


def test_other_fingerprint_is_another_executable(tmp_path: Path, ledger: CompileLedger) -> None:
    warmed(str(tmp_path), ledger)
    assert run(warmed(str(tmp_path), ledger, "other model", factor=5.0)) == [5.0] * 4


@pytest.mark.parametrize(
    ("name", "value", "is_another"),
    [
        ("jax_default_matmul_precision", "highest", True),
        ("jax_enable_x64", True, True),
        ("jax_numpy_dtype_promotion", "strict", True),
        ("jax_optimization_level", "O1", True),
        ("jax_log_compiles", True, False),
        ("jax_traceback_filtering", "off", False),
    ],
)
def test_other_setting_of_jax_is_another_executable(
    tmp_path: Path, ledger: CompileLedger, name: str, value: object, is_another: bool
) -> None:
    """But those that change nothing that is compiled."""
    warmed(str(tmp_path), ledger)
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        other = run(warmed(str(tmp_path), ledger, factor=5.0))
    finally:
        jax.config.update(name, before)
    assert other == [5.0 if is_another else 2.0] * 4
    assert run(warmed(str(tmp_path), ledger, factor=7.0)) == [2.0] * 4


def modules_of(path: Path) -> Iterator[Path]:
    """Files of this repository that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    for name in names:
        place = ROOT.joinpath(*name.split("."))
        yield from filter(Path.is_file, (place / "__init__.py", place.with_suffix(".py")))


def test_digest_covers_all_that_traced_code_imports() -> None:
    sources = [p for name in ("jaxmm", "kernels_pallas") for p in (ROOT / name).rglob("*.py")]
    docstrings = {p: ast.get_docstring(ast.parse(p.read_text("utf-8"))) or "" for p in sources}
    todo = [path for path, text in docstrings.items() if "Traced." in text]
    todo.append(ROOT / "jaxmm/device/lowering.py")  # gives the steps their shapes
    reached: set[Path] = set()
    while todo:
        path = todo.pop()
        reached.add(path)
        todo += set(modules_of(path)) - reached
    digested = {path for _, path in digested_files(jaxmm.models.__path__)}
    assert sorted(reached - digested) == []


def test_after_a_failed_compile_no_other_one_begins(ledger: CompileLedger) -> None:
    begun: list[int] = []

    def compile_next(size: int) -> jax.stages.Lowered:
        begun.append(size)
        if size == 100:
            raise ModelError("a width of three and a half")
        time.sleep(0.1)
        return lower(2.0)

    lowers = {("language", size): partial(compile_next, size) for size in range(1, 101)}
    made = Executables(ledger, "", "model", jax.devices()[:1])
    with pytest.raises(ModelError):
        made.warm_up(lowers, progress=False)
    assert len(begun) < 20
    made.close()


def test_without_a_directory_nothing_is_kept(tmp_path: Path, ledger: CompileLedger) -> None:
    warmed("", ledger)
    warmed("", ledger)
    assert not any(record.restored for record in ledger.records)


def test_directory_that_cannot_be_made_costs_only_the_cache(
    tmp_path: Path, ledger: CompileLedger, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert run(warmed(str(tmp_path / "file" / "inside"), ledger)) == [2.0] * 4
    assert "compile cache not written" in caplog.text


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(place=st.floats(0, 1, exclude_max=True), bit=st.one_of(st.none(), st.integers(0, 7)))
def test_damaged_entry_is_ignored_and_made_again(
    tmp_path_factory: pytest.TempPathFactory, place: float, bit: int | None
) -> None:
    """Cut short (no bit), or one bit turned."""
    directory, ledger = tmp_path_factory.mktemp("cache"), CompileLedger("log")
    warmed(str(directory), ledger)
    [path] = directory.iterdir()
    entry = bytearray(path.read_bytes())
    at = int(place * len(entry))
    if bit is None:
        del entry[at:]
    else:
        entry[at] ^= 1 << bit
    path.write_bytes(entry)
    assert run(warmed(str(directory), ledger)) == [2.0] * 4
    assert not ledger.records[-1].restored
    warmed(str(directory), ledger)
    assert ledger.records[-1].restored
    ledger.close()
