"""Blocks of parameters: equal to the same block of the whole, and read without anything beside."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from jaxmm.models.stored import Block, Parameter, Stored, Tensor
from jaxmm.models.tensor_files import open_tensors


def tensors(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(Tensor(f"{shape}-{i}", shape) for i, shape in enumerate(shapes))


PARAMETERS = [
    Parameter(("norm_D",), tensors((12,))),
    Parameter(("embed_VD",), tensors((12, 6))),
    Parameter(("qkv_OD",), tensors((8, 6), (4, 6), (4, 6)), groups=4),
    Parameter(("qkv_O",), tensors((8,), (4,), (4,)), groups=2),
    Parameter(("gate_up_2FD",), tensors((8, 6), (8, 6)), parts=2),
    Parameter(("qkv_3OE",), tensors((12, 6)), parts=3),
    Parameter(("gate_up_2F",), tensors((8,), (8,)), parts=2),
    Parameter(
        ("copied_OD",),
        (*tensors((8, 6)), Tensor("k", (4, 6), copies=2), Tensor("v", (4, 6), copies=2)),
        groups=4,
    ),
    Parameter(("patch_EU",), tensors((8, 3, 2, 2))),
]


class Counted:
    """An open file that counts the values that are read from it."""

    def __init__(self, file: Any) -> None:
        self.file, self.values = file, 0

    def get_slice(self, name: str) -> "CountedSlice":
        return CountedSlice(self, self.file.get_slice(name))


class CountedSlice:
    def __init__(self, owner: Counted, view: Any) -> None:
        self.owner, self.view = owner, view

    def get_shape(self) -> list[int]:
        return self.view.get_shape()

    def __getitem__(self, key: Any) -> np.ndarray:
        part = self.view[key]
        self.owner.values += part.size
        return part


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    values = {
        t.name: rng.normal(size=t.shape).astype(np.float32) for p in PARAMETERS for t in p.tensors
    }
    directory = tmp_path_factory.mktemp("stored")
    save_file(values, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def file(directory: Path) -> Iterator[Counted]:
    with open_tensors(directory / "model.safetensors") as file:
        yield Counted(file)


def stored(parameter: Parameter, file: Any) -> Stored:
    sources = {t.name: (t.name, Path("file")) for t in parameter.tensors}
    return Stored(parameter, np.dtype(np.float32), sources, {Path("file"): file})


@st.composite
def blocks(draw: st.DrawFn, shape: tuple[int, ...]) -> Block:
    """A block with at least one value."""
    bounds = []
    for n in shape:
        start = draw(st.integers(0, n - 1))
        bounds.append(slice(start, draw(st.integers(start + 1, n))))
    return tuple(bounds)


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda p: p.path[0])
@settings(deadline=None)  # of a machine that others use too
@given(data=st.data())
def test_a_block_is_that_of_the_whole(parameter: Parameter, data: st.DataObject, file: Any) -> None:
    block = data.draw(blocks(parameter.shape))
    whole = stored(parameter, file.file)
    np.testing.assert_array_equal(whole.read(block), whole.read()[block])


def test_groups_put_the_parts_of_each_tensor_side_by_side(file: Counted) -> None:
    """Two groups of 4 + 2 + 2 rows: first halves, then second halves."""
    parameter = next(p for p in PARAMETERS if p.path == ("qkv_O",))
    q, k, v = (file.file.get_tensor(t.name) for t in parameter.tensors)
    halves = [q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]]
    np.testing.assert_array_equal(stored(parameter, file).read(), np.concatenate(halves))


def test_more_groups_than_kv_heads_repeat_each_of_them(file: Counted) -> None:
    """Two heads of two rows in four groups: groups 0 and 1 have the first head."""
    parameter = next(p for p in PARAMETERS if p.path == ("copied_OD",))
    q, k, v = (file.file.get_tensor(t.name) for t in parameter.tensors)
    groups = [
        (q[2 * g : 2 * g + 2], k[h : h + 2], v[h : h + 2]) for g, h in enumerate((0, 0, 2, 2))
    ]
    expected = np.concatenate([part for group in groups for part in group])
    assert parameter.shape == (24, 6)
    np.testing.assert_array_equal(stored(parameter, file).read(), expected)


def test_rows_are_found_in_a_parameter_made_otherwise(file: Counted) -> None:
    copied = next(p for p in PARAMETERS if p.path == ("copied_OD",))
    plain = Parameter(
        ("plain_OD",), tuple(Tensor(t.name, t.shape) for t in copied.tensors), groups=2
    )
    whole = stored(plain, file).read()
    np.testing.assert_array_equal(whole[copied.rows_in(plain)], stored(copied, file).read())


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda p: p.path[0])
def test_reading_a_block_reads_its_values_and_no_others(
    parameter: Parameter, file: Counted
) -> None:
    shape = parameter.shape
    first = 0 if parameter.parts else slice(0, shape[0] // 2)
    block = (slice(0, 1) if first == 0 else first, *(slice(0, n) for n in shape[1:]))
    file.values = 0
    value = stored(parameter, file).read(block)
    assert file.values == value.size


def test_columns_are_read_without_those_beside(file: Counted) -> None:
    parameter = next(p for p in PARAMETERS if p.path == ("embed_VD",))
    file.values = 0
    assert stored(parameter, file).read((slice(0, 12), slice(2, 4))).shape == (12, 2)
    assert file.values == 24


def test_none_in_a_block_is_the_end_of_the_axis(file: Counted) -> None:
    parameter = next(p for p in PARAMETERS if p.path == ("embed_VD",))
    reader = stored(parameter, file)
    block = (slice(None, 6), slice(None, None))
    np.testing.assert_array_equal(reader.read(block), reader.read()[:6])


def test_a_sharded_array_made_of_blocks_equals_the_whole(file: Counted) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    for parameter in PARAMETERS:
        reader = stored(parameter, file)
        sharding = NamedSharding(mesh, PartitionSpec("model"))
        array = jax.make_array_from_callback(reader.shape, sharding, reader.read)
        np.testing.assert_array_equal(np.asarray(array), reader.read())
