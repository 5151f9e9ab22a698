"""Fills a model's parameters from the safetensors files of a checkpoint. Host only.

A family's `params.parameters(config)` says which tensors make up which parameter; here the files
are checked against that table before anything is read, then read one parameter at a time: host
memory holds a single parameter beside what `put` keeps.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding
from tqdm import tqdm

from jaxmm.errors import ModelError
from jaxmm.models import family_module
from jaxmm.models.config import ModelConfig
from jaxmm.models.tensor_files import open_tensors, tensor_files

ParameterPath = tuple[str | int, ...]
"""Where a parameter stands in the nested dict, such as `("text", "layers", 0, "qkv_OD")`."""

Placed = TypeVar("Placed")

_IGNORED = re.compile(r"(^|\.)rotary(_pos)?_emb\.inv_freq$")
"""Buffers that old files hold and every implementation computes."""
_FLOATS = ("BF16", "F16", "F32", "F64")
_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the files: its published name and its shape."""

    name: str
    shape: tuple[int, ...]
    swapped: bool = False
    """Some files hold it with its last two axes swapped; told by the shape, and as published where
    both axes are equal."""

    def shows(self, stored: tuple[int, ...]) -> bool:
        """Whether a tensor of that shape can be this one."""
        return stored == self.shape or (self.swapped and stored == _swap(self.shape))


def _swap(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter made of tensors laid one below the other (along axis 0)."""

    path: ParameterPath
    tensors: tuple[Tensor, ...]
    groups: int = 1
    """Each tensor is cut into so many equal parts; all first parts come first, then all second."""
    new_axis: bool = False
    """The tensors, all of one shape, lie along an axis of their own."""
    flat: bool = True
    """What has more than two axes (a convolution over patches) is flattened to two."""

    @property
    def shape(self) -> tuple[int, ...]:
        rest = self.tensors[0].shape[1:]
        width = (int(np.prod(rest)),) if rest and self.flat else rest
        if self.new_axis:
            return (len(self.tensors), self.tensors[0].shape[0], *width)
        return (sum(t.shape[0] for t in self.tensors), *width)


def load_params(
    directory: str | Path,
    config: ModelConfig,
    dtype: npt.DTypeLike,
    put: Callable[[ParameterPath, npt.NDArray[Any]], Placed],
    *,
    progress: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint.

    Args:
        directory: Hugging Face directory.
        config: What `read_config` gave for it.
        dtype: Of all parameters.
        put: Places one parameter on the device, given where it stands and its values; the array is
            its to keep.
        progress: Show a bar.

    Returns:
        `{"vision": …, "text": …}`, nested like the modules, list indices as int keys.

    Raises:
        ModelError: A tensor is missing, unknown, of another shape or no float; the text names it.
    """
    module = family_module(config.family, "params")
    table: Sequence[Parameter] = module.parameters(config)
    sources = _published_names(tensor_files(Path(directory)), module.published_name)
    _check_names(table, sources, directory)
    params: dict[str, Any] = {}
    with ExitStack() as stack:
        paths = {path for _, path in sources.values()}
        files = {path: stack.enter_context(open_tensors(path)) for path in paths}
        _check_shapes(table, sources, files)
        for parameter in tqdm(table, desc="load", unit="tensor", disable=not progress):
            value = _read(parameter, sources, files, np.dtype(dtype))
            _insert(params, parameter.path, put(parameter.path, value))
    return params


def param_shapes(
    config: ModelConfig,
    dtype: npt.DTypeLike,
    sharding: Callable[[ParameterPath], Sharding | None] = lambda _: None,
) -> dict[str, Any]:
    """What `load_params` will give, as `jax.ShapeDtypeStruct`; reads no file.

    Args:
        config: Dimensions.
        dtype: Of all parameters.
        sharding: Where the parameter at a path will lie; None: on the one device.
    """
    table: Sequence[Parameter] = family_module(config.family, "params").parameters(config)
    shapes: dict[str, Any] = {}
    for parameter in table:
        where = sharding(parameter.path)
        _insert(
            shapes,
            parameter.path,
            jax.ShapeDtypeStruct(parameter.shape, dtype, sharding=where),
        )
    return shapes


Sources = Mapping[str, tuple[str, Path]]
"""Published name to the name and file in this checkpoint."""


def _published_names(files: Mapping[str, Path], rename: Callable[[str], str]) -> Sources:
    sources: dict[str, tuple[str, Path]] = {}
    for name, path in files.items():
        published = rename(name)
        if published in sources:
            raise ModelError(f"{sources[published][0]!r} and {name!r} are the same tensor")
        if not _IGNORED.search(name):
            sources[published] = (name, path)
    return sources


def _check_names(table: Sequence[Parameter], sources: Sources, directory: str | Path) -> None:
    wanted = {tensor.name for parameter in table for tensor in parameter.tensors}
    missing = sorted(wanted - sources.keys())
    if missing:
        raise ModelError(f"{str(directory)!r} lacks {_listing(missing)} that config.json asks for")
    extra = sorted(sources[name][0] for name in sources.keys() - wanted)
    if extra:
        raise ModelError(
            f"{str(directory)!r} holds {_listing(extra)} that no parameter is made of; "
            "do config.json and the weights belong together?"
        )


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    noun = "tensor" if len(names) == 1 else "tensors"
    return f"{noun} {', '.join(map(repr, names[:_NAMES_SHOWN]))}{more}"


def _check_shapes(table: Sequence[Parameter], sources: Sources, files: Mapping[Path, Any]) -> None:
    for tensor in (tensor for parameter in table for tensor in parameter.tensors):
        name, path = sources[tensor.name]
        stored = files[path].get_slice(name)
        shape = tuple(stored.get_shape())
        if not tensor.shows(shape):
            raise ModelError(
                f"tensor {name!r} has shape {shape}; config.json asks for {tensor.shape}"
            )
        if stored.get_dtype() not in _FLOATS:
            raise ModelError(
                f"tensor {name!r} is {stored.get_dtype()}; only {', '.join(_FLOATS)} can be loaded"
            )


def _read(
    parameter: Parameter, sources: Sources, files: Mapping[Path, Any], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Read and cast the tensors of one parameter into one new array."""
    if len(parameter.tensors) == 1:
        part = parameter.tensors[0]
        name, path = sources[part.name]
        tensor: npt.NDArray[Any] = files[path].get_tensor(name)
        if tensor.shape != part.shape:
            tensor = np.ascontiguousarray(tensor.swapaxes(-1, -2))
        return tensor.astype(dtype, copy=False).reshape(parameter.shape)
    value = np.empty(parameter.shape, dtype)
    width = () if len(parameter.tensors[0].shape) == 1 else value.shape[-1:]
    groups = value.reshape(parameter.groups, -1, *width)  # a view: to write there fills the value
    start = 0
    for part in parameter.tensors:
        name, path = sources[part.name]
        stop = start + part.shape[0] // parameter.groups
        shape = (parameter.groups, stop - start, *width)
        groups[:, start:stop] = files[path].get_tensor(name).reshape(shape)
        start = stop
    return value


def _insert(params: dict[str, Any], path: ParameterPath, value: Any) -> None:
    node: dict[Any, Any] = params
    for key in path[:-1]:
        node = node.setdefault(key, {})
    node[path[-1]] = value
