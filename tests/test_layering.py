"""Imports go serving -> jaxmm -> kernels_pallas, and the host's part never needs jax."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("serving", "jaxmm", "kernels_pallas")
"""From the top down; each may import those after it."""
HOST_MODULES = sorted(p for p in (ROOT / "jaxmm" / "host").rglob("*.py"))
ALL_MODULES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            yield node.module


def modules_after(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(out.stdout.split())


@pytest.mark.parametrize("path", ALL_MODULES, ids=dotted)
def test_module_imports_nothing_above_it(path: Path) -> None:
    package = dotted(path).split(".")[0]
    above = PACKAGES[: PACKAGES.index(package)]
    assert not [name for name in imported(path) if name.split(".")[0] in (*above, "tests")]


def test_kernels_know_nothing_of_the_engine() -> None:
    python = {"collections", "enum", "functools", "math", "typing"}
    native = {"ctypes", "hashlib", "importlib", "logging", "pathlib", "pickle", "platform"}
    native |= {"re", "tempfile", "threading"}
    for path in ALL_MODULES:
        if dotted(path).startswith("kernels_pallas"):
            known = {"kernels_pallas", "jax", "jaxtyping", "numpy", *python}
            if dotted(path).startswith("kernels_pallas.native"):
                known |= {"llvmlite", "numba", *native}
            assert {name.split(".")[0] for name in imported(path)} <= known, path


def test_no_host_module_loads_jax_even_by_way_of_another() -> None:
    statement = "\n".join(f"import {dotted(path)}" for path in HOST_MODULES)
    loaded = modules_after(statement)
    assert not loaded & {"jax", "jaxlib", "flax", "torch", "transformers"}


@pytest.mark.parametrize("package", ["jaxmm", "jaxmm.config", "jaxmm.request", "jaxmm.errors"])
def test_package_is_cheap_to_import(package: str) -> None:
    assert not modules_after(f"import {package}") & {"jax", "numpy", "transformers", "torch"}


def test_command_line_starts_without_jax() -> None:
    assert not modules_after("import serving.cli") & {"jax", "torch", "transformers"}


def test_server_process_never_needs_torch() -> None:
    names = {name.split(".")[0] for path in ALL_MODULES for name in imported(path)}
    assert "torch" not in names


def test_only_the_steps_file_has_jit_boundaries() -> None:
    with_jit = {
        dotted(path)
        for path in ALL_MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in ("jit", "pmap")
        and isinstance(node.value, ast.Name)
        and node.value.id in ("jax", "nnx")
    }
    assert with_jit == {"jaxmm.device.steps"}


@pytest.mark.parametrize("path", [p for p in ALL_MODULES if p.name == "__init__.py"], ids=dotted)
def test_public_names_exist(path: Path) -> None:
    module = importlib.import_module(dotted(path))
    names = list(getattr(module, "__all__", ()))
    assert names == sorted(names, key=lambda n: (not n.isupper(), n[0].islower(), n))
    for name in names:
        assert getattr(module, name) is not None


def test_unknown_public_name_is_an_attribute_error() -> None:
    import jaxmm

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jaxmm.nothing  # noqa: B018


@pytest.mark.parametrize("path", ALL_MODULES, ids=dotted)
def test_module_says_what_it_is_for_and_where_it_runs(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if path.read_text(encoding="utf-8").strip() == "":
        assert path.name == "__init__.py"
        return
    assert text, f"{path} has no docstring"
    if path.name != "__init__.py":
        assert any(word in text for word in ("Host only", "Traced")), "says neither"
