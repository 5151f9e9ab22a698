"""A parameter in the files of a checkpoint: any block of it, and no byte beside. Host only."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ParameterPath = tuple[str | int, ...]
"""Where a parameter stands in the nested dict, such as `("text", "layers", 0, "qkv_OD")`."""

Sources = Mapping[str, tuple[str, Path]]
"""Published name to the name and file in a checkpoint."""

Block = tuple[slice, ...]
"""Part of an array: a slice without a step for each axis, as JAX tells a shard's place."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the files: its published name and its shape."""

    name: str
    shape: tuple[int, ...]
    copies: int = 1
    """Each of its parts stands so many times, in so many groups that follow each other."""
    swapped: bool = False
    """Some files hold it with its last two axes swapped; told by the shape, and as published where
    both axes are equal."""

    def shows(self, stored: tuple[int, ...]) -> bool:
        """Whether a tensor of that shape can be this one."""
        swapped = (*self.shape[:-2], *self.shape[:-3:-1])
        return stored == self.shape or (self.swapped and stored == swapped)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter made of tensors laid one below the other (along axis 0)."""

    path: ParameterPath
    tensors: tuple[Tensor, ...]
    groups: int = 1
    """Each tensor is cut into so many equal parts; all first parts come first, then all second."""
    parts: int = 0
    """The rows of all tensors are cut into so many equal parts, which lie along an axis of their
    own; 0: there is no such axis."""
    flat: bool = True
    """What has more than two axes (a convolution over patches) is flattened to two."""
    abreast: int = 0
    """So many matrices at a time, turned (rows to columns), stand side by side in an entry of an
    axis of their own: experts whose files hold each alone."""
    wide: bool = False
    """Kept in float32 whatever the others are."""

    @property
    def shape(self) -> tuple[int, ...]:
        if self.abreast:
            rows, columns = self.tensors[0].shape
            return len(self.tensors) // self.abreast, columns, self.abreast * rows
        rest = self.tensors[0].shape[1:]
        width = (int(np.prod(rest)),) if rest and self.flat else rest
        rows = sum(t.shape[0] * t.copies for t in self.tensors)
        return (self.parts, rows // self.parts, *width) if self.parts else (rows, *width)

    def runs(self, start: int, stop: int) -> Iterator[tuple[Tensor, int, int]]:
        """Rows [start, stop) in order, those of all parts one below the other.

        Yields:
            A tensor, and the first and last + 1 of its rows that follow each other there.
        """
        row = 0
        for group in range(self.groups):
            for tensor in self.tensors:
                count = tensor.shape[0] * tensor.copies // self.groups
                first = group // tensor.copies * count
                low, high = max(start - row, 0), min(stop - row, count)
                if low < high:
                    yield tensor, first + low, first + high
                row += count

    def rows_in(self, other: "Parameter") -> npt.NDArray[np.int64]:
        """For each row, where a parameter made of the same tensors in another way has it."""
        places = {t.name: np.zeros(t.shape[0], np.int64) for t in other.tensors}
        row = 0
        for tensor, start, stop in other.runs(0, other.shape[0]):
            places[tensor.name][start:stop] = np.arange(row, row + stop - start)
            row += stop - start
        return np.concatenate([places[t.name][a:b] for t, a, b in self.runs(0, self.shape[0])])


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter and the open files that hold it."""

    parameter: Parameter
    dtype: np.dtype[Any]
    sources: Sources = field(repr=False)
    files: Mapping[Path, Any] = field(repr=False)

    @property
    def path(self) -> ParameterPath:
        return self.parameter.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parameter.shape

    @property
    def size(self) -> int:
        """Values in it."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def tensor_dtypes(self) -> set[str]:
        """Names of the types that its tensors have in the files, such as "BF16"."""
        sources = (self.sources[tensor.name] for tensor in self.parameter.tensors)
        return {str(self.files[path].get_slice(name).get_dtype()) for name, path in sources}

    def read(self, block: Block | None = None) -> npt.NDArray[Any]:
        """Read and cast a block into one new array; None: all of it."""
        bounds = [(0, n) for n in self.shape]
        if block is not None:
            bounds = [s.indices(n)[:2] for s, n in zip(block, self.shape, strict=True)]
        if self.parameter.abreast:
            return self._abreast(*bounds)
        if self.parameter.parts:
            parts, (low, high), *columns = bounds
            starts = (part * self.shape[1] for part in range(*parts))
            runs = [run for n in starts for run in self.parameter.runs(n + low, n + high)]
            value = self._rows(runs, columns)
            return value.reshape(parts[1] - parts[0], high - low, *value.shape[1:])
        return self._rows(list(self.parameter.runs(*bounds[0])), bounds[1:])

    def _abreast(
        self, entries: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
    ) -> npt.NDArray[Any]:
        """A block of turned matrices that stand side by side."""
        count, height = self.parameter.abreast, self.parameter.tensors[0].shape[0]
        shape = (b - a for a, b in (entries, rows, columns))
        value: npt.NDArray[Any] = np.empty(tuple(shape), self.dtype)
        for entry in range(*entries):
            for place in range(count):
                low = max(columns[0], place * height)
                high = min(columns[1], (place + 1) * height)
                if low >= high:
                    continue
                tensor = self.parameter.tensors[entry * count + place]
                part = self._run(tensor, low - place * height, high - place * height, [rows])
                value[entry - entries[0], :, low - columns[0] : high - columns[0]] = part.T
        return value

    def _rows(
        self, runs: list[tuple[Tensor, int, int]], columns: list[tuple[int, int]]
    ) -> npt.NDArray[Any]:
        """Runs of rows one below the other, of each the columns between the bounds."""
        if len(runs) == 1:
            return self._run(*runs[0], columns).astype(self.dtype, copy=False)
        count = sum(stop - start for _, start, stop in runs)
        value = np.empty((count, *(high - low for low, high in columns)), self.dtype)
        row = 0
        for tensor, start, stop in runs:
            value[row : row + stop - start] = self._run(tensor, start, stop, columns)
            row += stop - start
        return value

    def _run(
        self, tensor: Tensor, start: int, stop: int, columns: list[tuple[int, int]]
    ) -> npt.NDArray[Any]:
        name, path = self.sources[tensor.name]
        view = self.files[path].get_slice(name)
        part: npt.NDArray[Any]
        if len(tensor.shape) <= 2 or not self.parameter.flat:
            block = [slice(start, stop), *(slice(*c) for c in columns)]
            if tuple(view.get_shape()) == tensor.shape:
                part = view[tuple(block)]
                return part
            part = view[(*block[:-2], block[-1], block[-2])]
            return np.ascontiguousarray(part.swapaxes(-1, -2))
        part = view[start:stop].reshape(stop - start, -1)  # a convolution: flattened here
        return part[:, slice(*columns[0])]
