"""Checkpoints in Orbax's form, restored by any number of hosts, each its part. Host only.

    OUT/config.json, tokenizer, processor …   as they were
    OUT/jaxmm.json                            what is in `weights`, written last
    OUT/weights/                              an Orbax PyTree: one flat dict, "text.layers.0.qkv_OD"

The parameters stand there as the steps take them, so that a layout that changes makes the directory
useless; the digest of the table in jaxmm.json tells.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Sharding
from orbax.checkpoint import type_handlers
from tqdm import tqdm

from jaxmm.errors import ModelError
from jaxmm.models import family_module, read_config
from jaxmm.models.config import ModelConfig
from jaxmm.models.json_files import read_json
from jaxmm.models.loading import insert, open_params, parameter_dtype
from jaxmm.models.stored import Block, Parameter, ParameterPath, Stored

logger = logging.getLogger(__name__)

DESCRIPTION = "jaxmm.json"
_WEIGHTS = "weights"
_FORMAT = 1
_CHUNK_BYTES = 8 << 20
"""Least that is read of a parameter; small beside what a host needs, large for a bucket."""
_WAVE_BYTES = 256 << 20
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pth")


def is_converted(directory: Path) -> bool:
    """Whether a directory was written by `convert`."""
    return (directory / DESCRIPTION).exists()


def converted_digest(directory: Path) -> str:
    """Digest of the weights that `convert` wrote."""
    return str(read_json(directory / DESCRIPTION).get("digest"))


def convert(source: Path, out: str | Path, dtype: str = "auto", *, progress: bool = True) -> None:
    """Write a Hugging Face checkpoint as one that is restored by parts.

    Host memory holds one parameter at a time.

    Args:
        source: Directory of the checkpoint.
        out: Directory to make, here or at a gs:// address; must be new or empty.
        dtype: Of the weights; auto: that of the files.
        progress: Show a bar.

    Raises:
        ModelError: The checkpoint cannot be loaded, or there is something at `out`.
    """
    target = epath.Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{str(out)!r} exists and is not empty; name a new directory")
    if is_converted(source):
        raise ModelError(f"{str(source)!r} is converted already")
    config = read_config(source)
    target.mkdir(parents=True, exist_ok=True)
    _copy_small_files(source, target, tied=config.text.tied)
    with open_params(source, config, np.float32) as table:
        wanted = np.dtype(_files_dtype(table) if dtype == "auto" else dtype)
        digest = _save(
            target / _WEIGHTS,
            [_cast(stored, parameter_dtype(stored.parameter, wanted)) for stored in table],
            progress,
        )
    description = {
        "format": _FORMAT,
        "weights": _WEIGHTS,
        "dtype": wanted.name,
        "table": table_digest(stored.parameter for stored in table),
        "digest": digest,
    }
    (target / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")


def restore_params(
    directory: Path,
    config: ModelConfig,
    dtype: npt.DTypeLike,
    sharding: Callable[[ParameterPath], Sharding | None],
    *,
    wave_bytes: int = _WAVE_BYTES,
    progress: bool = False,
) -> dict[str, Any]:
    """Restore what `convert` wrote, on the chips where it will be used.

    Args:
        directory: What `convert` wrote.
        config: What `read_config` gave for it.
        dtype: Of all parameters, whatever they were written in.
        sharding: Where the parameter at a path shall lie; None: on the one device.
        wave_bytes: What is restored together; host memory holds so much, or one parameter, beside
            what is kept.
        progress: Show a bar.

    Returns:
        `{"vision": …, "text": …}`, as `load_params` gives them.

    Raises:
        ModelError: The directory was written by a version with another layout, or cannot be read.
    """
    table = {parameter_name(p.path): p for p in _table(config)}
    stored = {parameter_name(p.path): p for p in _table(_as_written(config))}
    weights = _check(directory, list(stored.values()))
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = {name: sharding(p.path) or device for name, p in table.items()}
    wanted = {
        name: jax.ShapeDtypeStruct(
            p.shape,
            parameter_dtype(p, dtype),
            sharding=places[name] if p == table[name] else None,
        )
        for name, p in stored.items()
    }
    params: dict[str, Any] = {}
    total, off = len(table), not progress
    with (
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
        tqdm(desc="restore", total=total, unit="tensor", disable=off) as bar,
    ):
        for wave in _waves(wanted, wave_bytes):
            try:
                restored = checkpointer.restore(weights, args=_restore_args(wave))
            except (OSError, ValueError, KeyError) as e:
                raise ModelError(f"{weights!r} cannot be restored: {e}") from e
            for name, value in restored.items():
                if table[name] != stored[name]:
                    value = _made_anew(value, table[name], stored[name], places[name])
                insert(params, table[name].path, value)
            bar.update(len(wave))
    return params


def _table(config: ModelConfig) -> Sequence[Parameter]:
    table: Sequence[Parameter] = family_module(config.family, "params").parameters(config)
    return table


def _as_written(config: ModelConfig) -> ModelConfig:
    """Without copies of KV heads: what is written serves any number of chips."""
    text = config.text
    whole = dataclasses.replace(text, num_kv_heads=text.stored_kv_heads, kv_copies=1)
    return dataclasses.replace(config, text=whole)


def _made_anew(
    value: npt.NDArray[Any], wanted: Parameter, stored: Parameter, sharding: Sharding
) -> jax.Array:
    """A parameter whose rows stand in another order, some of them several times."""
    rows = wanted.rows_in(stored)

    def part(block: Block | None) -> npt.NDArray[Any]:
        first, *rest = block or (slice(None),) * value.ndim
        return value[rows[first]][(slice(None), *rest)]

    return jax.make_array_from_callback(wanted.shape, sharding, part)


def parameter_name(path: ParameterPath) -> str:
    """Name of a parameter in the Orbax tree."""
    return ".".join(map(str, path))


def table_digest(table: Iterable[Parameter]) -> str:
    """What must be equal for weights to be what the steps expect: names, shapes and their make."""
    made = [
        (parameter_name(p.path), p.shape, [t.name for t in p.tensors], p.groups, p.parts)
        for p in table
    ]
    return hashlib.sha256(json.dumps(made).encode()).hexdigest()


def _check(directory: Path, table: Sequence[Parameter]) -> str:
    """The address of the weights of a directory that fits the table."""
    description = read_json(directory / DESCRIPTION)
    if description.get("format") != _FORMAT or description.get("table") != table_digest(table):
        raise ModelError(
            f"{str(directory)!r} was converted by a version of jaxmm with another layout of "
            "parameters; convert the original again"
        )
    address = str(description.get("weights", _WEIGHTS))
    return address if "://" in address else str((directory / address).absolute())


def _restore_args(wave: Mapping[str, jax.ShapeDtypeStruct]) -> ocp.args.PyTreeRestore:
    """What is to be restored and how: arrays on their chips, the others in host memory."""
    restore_args = {
        name: ocp.RestoreArgs(restore_type=np.ndarray, dtype=shape.dtype)
        if shape.sharding is None
        else ocp.ArrayRestoreArgs(
            sharding=shape.sharding, global_shape=shape.shape, dtype=shape.dtype
        )
        for name, shape in wave.items()
    }
    return ocp.args.PyTreeRestore(wave, restore_args=restore_args, partial_restore=True)


def _waves(
    wanted: Mapping[str, jax.ShapeDtypeStruct], wave_bytes: int
) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    """Cut a tree into parts of at most so many bytes or one parameter, in order."""
    wave: dict[str, jax.ShapeDtypeStruct] = {}
    size = 0
    for name, shape in wanted.items():
        nbytes = int(np.prod(shape.shape)) * np.dtype(shape.dtype).itemsize
        if wave and size + nbytes > wave_bytes:
            yield wave
            wave, size = {}, 0
        wave[name] = shape
        size += nbytes
    yield wave


def _copy_small_files(source: Path, out: Any, *, tied: bool) -> None:
    """Copy all but weights; config.json says whether the head is the embedding, as files did."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in _WEIGHT_FILES):
            (out / path.name).write_bytes(path.read_bytes())
    raw = read_json(source / "config.json")
    raw["tie_word_embeddings"] = tied
    if isinstance(raw.get("text_config"), dict):
        raw["text_config"]["tie_word_embeddings"] = tied
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def _files_dtype(table: Sequence[Stored]) -> npt.DTypeLike:
    """Dtype of the largest parameter in the files."""
    largest = max(table, key=lambda stored: stored.size)
    name, path = largest.sources[largest.parameter.tensors[0].name]
    stored: str = largest.files[path].get_slice(name).get_dtype()
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float32"}
    return np.dtype(names[stored])


def _cast(stored: Stored, dtype: np.dtype[Any]) -> Stored:
    return Stored(stored.parameter, dtype, stored.sources, stored.files)


class _StoredHandler(type_handlers.NumpyHandler):
    """Reads a parameter when its turn to be written comes, and lets go of it after."""

    def __init__(self, progress: Any) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._progress = progress
        self.digests: dict[str, str] = {}
        """Of the values of each parameter written."""

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[Any],
        args: Sequence[Any] | None = None,
    ) -> Sequence[Any]:
        for value, info, arg in zip(values, infos, args or [], strict=True):
            for written in await super().serialize([self._read(value)], [info], [arg]):
                written.result()
            self._progress.update()
        return []

    def _read(self, value: Stored) -> npt.NDArray[Any]:
        array = value.read()
        digest = hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self.digests[parameter_name(value.path)] = digest.hexdigest()
        return array


def _save(weights: Any, table: Sequence[Stored], progress: bool) -> str:
    """Write parameters one by one, and give the digest of all."""
    tree = {parameter_name(stored.path): stored for stored in table}
    save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in tree}
    with tqdm(desc="convert", total=len(tree), unit="tensor", disable=not progress) as bar:
        writer = _StoredHandler(bar)
        registry = type_handlers.create_type_handler_registry(
            (Stored, writer), (jax.Array, type_handlers.ArrayHandler())
        )
        handler = ocp.PyTreeCheckpointHandler(
            type_handler_registry=registry,
            use_compression=False,  # weights are noise: it would cost time alone
        )
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(
                weights.resolve(), args=ocp.args.PyTreeSave(tree, save_args=save_args)
            )
    return hashlib.sha256(json.dumps(sorted(writer.digests.items())).encode()).hexdigest()
