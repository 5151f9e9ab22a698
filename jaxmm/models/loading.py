"""Fills a model's parameters from the safetensors files of a checkpoint. Host only.

A family's `params.parameters(config)` says which tensors make up which parameter; here the files
are checked against that table before anything is read, then read one parameter at a time: host
memory holds a single parameter, or the part of it that this host needs, beside what is kept.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from jaxmm.models.stored import Parameter, ParameterPath, Sources, Stored, Tensor
from jaxmm.models.tensor_files import open_tensors, tensor_files

__all__ = [
    "Parameter",
    "ParameterPath",
    "Tensor",
    "insert",
    "load_params",
    "open_params",
    "param_shapes",
    "parameter_dtype",
    "place_params",
]

Placed = TypeVar("Placed")

_IGNORED = re.compile(r"(^|\.)rotary(_pos)?_emb\.inv_freq$")
"""Buffers that old files hold and every implementation computes."""
_FLOATS = ("BF16", "F16", "F32", "F64")
_NAMES_SHOWN = 4


def load_params(
    directory: str | Path,
    config: ModelConfig,
    dtype: npt.DTypeLike,
    put: Callable[[ParameterPath, npt.NDArray[Any]], Placed],
    *,
    progress: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint, whole parameters at a time.

    Args:
        directory: Hugging Face directory.
        config: What `read_config` gave for it.
        dtype: Of all parameters.
        put: Places one parameter, given where it stands and its values; the array is its to keep.
        progress: Show a bar.

    Returns:
        `{"vision": …, "text": …}`, nested like the modules, list indices as int keys.

    Raises:
        ModelError: A tensor is missing, unknown, of another shape or no float; the text names it.
    """
    return place_params(
        directory, config, dtype, lambda stored: put(stored.path, stored.read()), progress=progress
    )


def place_params(
    directory: str | Path,
    config: ModelConfig,
    dtype: npt.DTypeLike,
    place: Callable[[Stored], Placed],
    *,
    progress: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint, each parameter by its own reader: `place` reads the blocks that it needs.

    Arguments, result and errors are those of `load_params`.
    """
    params: dict[str, Any] = {}
    with open_params(directory, config, dtype) as table:
        for stored in tqdm(table, desc="load", unit="tensor", disable=not progress):
            insert(params, stored.path, place(stored))
    return params


@contextmanager
def open_params(
    directory: str | Path, config: ModelConfig, dtype: npt.DTypeLike
) -> Iterator[list[Stored]]:
    """Check a checkpoint's files, and give its parameters, to be read while they are open.

    Raises:
        ModelError: As in `load_params`.
    """
    module = family_module(config.family, "params")
    table: Sequence[Parameter] = module.parameters(config)
    sources = _published_names(tensor_files(Path(directory)), module.published_name)
    _check_names(table, sources, directory)
    with ExitStack() as stack:
        paths = {path for _, path in sources.values()}
        files = {path: stack.enter_context(open_tensors(path)) for path in paths}
        _check_shapes(table, sources, files)
        yield [
            Stored(parameter, parameter_dtype(parameter, dtype), sources, files)
            for parameter in table
        ]


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
        insert(
            shapes,
            parameter.path,
            jax.ShapeDtypeStruct(
                parameter.shape, parameter_dtype(parameter, dtype), sharding=where
            ),
        )
    return shapes


def parameter_dtype(parameter: Parameter, dtype: npt.DTypeLike) -> np.dtype[Any]:
    """What a parameter is kept in where the weights are kept in `dtype`."""
    return np.dtype(np.float32) if parameter.wide else np.dtype(dtype)


def _published_names(files: Mapping[str, Path], rename: Callable[[str], str | None]) -> Sources:
    sources: dict[str, tuple[str, Path]] = {}
    for name, path in files.items():
        published = rename(name)
        if published is None:
            continue
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


def insert(params: dict[str, Any], path: ParameterPath, value: Any) -> None:
    """Put a value at its path of nested dicts."""
    node: dict[Any, Any] = params
    for key in path[:-1]:
        node = node.setdefault(key, {})
    node[path[-1]] = value
