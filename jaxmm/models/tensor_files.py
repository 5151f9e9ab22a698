"""Which safetensors file of a checkpoint holds which tensor. Host only."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (makes numpy, and so safetensors, know bfloat16)
from safetensors import SafetensorError, safe_open

from jaxmm.errors import ModelError

_SAMPLES, _SAMPLE_BYTES = 16, 4096
"""Of each file, from its first byte to its last."""


def open_tensors(path: Path) -> Any:
    """Open a safetensors file, a context manager: tensors are mapped and copied one by one.

    Raises:
        ModelError: The file is missing, cut short or no safetensors file.
    """
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as e:
        raise ModelError(f"{str(path)!r} cannot be read as safetensors: {e}") from e


def tensor_files(directory: Path) -> dict[str, Path]:
    """Map each tensor name to its file; empty when the directory has no weights.

    The index file says which files belong to the checkpoint, their own headers say what is in them.

    Raises:
        ModelError: A file cannot be read, or two files hold one tensor.
    """
    files: dict[str, Path] = {}
    for path in _paths(directory):
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name in files:
                    raise ModelError(f"{name!r} is in both {files[name].name} and {path.name}")
                files[name] = path
    return files


def sample_digest(directory: Path) -> str:
    """Tells checkpoints of one architecture apart by a little of each file, read here and there.

    Raises:
        ModelError: A file that the index names cannot be read.
    """
    digest = hashlib.sha256()
    for path in _paths(directory):
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest.update(f"{path.name} {size} ".encode())
                for i in range(_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as e:
            raise ModelError(f"{str(path)!r} cannot be read: {e}") from e
    return digest.hexdigest()


def _paths(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return sorted(directory.glob("*.safetensors"))
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [directory / file for file in sorted(set(weight_map.values()))]
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        raise ModelError(f"{str(index)!r} has no valid weight_map: {e}") from e
