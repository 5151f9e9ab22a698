"""Model families: one folder each, found by scanning this one. Host only.

A family's `__init__` has `MODEL_TYPES`, the values of `model_type` that it serves; its modules are
`config` (`read_config`), `params` (`parameters`, `published_name`), `vision` (`VisionEncoder`),
`text` (`TextDecoder`) and, unless transformers' own image processor is to be used, `processor`
(`ImageProcessor`). docs/adding_a_family.md says what each must give. Nothing of a family but its
`__init__` is imported until it is asked for.
"""

import functools
import importlib
import importlib.util
import logging
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from jaxmm.errors import ModelError

if TYPE_CHECKING:
    from jaxmm.models.config import ModelConfig

__all__ = ["Families", "families", "family_module", "has_module", "read_config"]

logger = logging.getLogger(__name__)


class Families(NamedTuple):
    """What a scan found."""

    folders: Mapping[str, str]
    """`model_type` to the folder that serves it."""
    skipped: Mapping[str, str]
    """Folder that could not be imported, to the reason."""


@functools.cache
def families() -> Families:
    """Find the families in the folders of this package's `__path__`, once.

    A folder that cannot be imported is skipped, with a warning: it costs nobody but its own users.

    Raises:
        ModelError: Two folders serve one `model_type`.
    """
    folders: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg):
        try:
            model_types = importlib.import_module(f"{__name__}.{name}").MODEL_TYPES
        except Exception as error:  # noqa: BLE001  # whatever a family's own imports raise
            skipped[name] = _reason(error)
            logger.warning("model family skipped folder=%s error=%s", name, skipped[name])
            continue
        for model_type in model_types:
            if model_type in folders:
                raise ModelError(f"{folders[model_type]} and {name} both serve {model_type!r}")
            folders[model_type] = name
    return Families(folders, skipped)


def family_module(family: str, name: str) -> ModuleType:
    """Import one module of a family, such as `family_module("qwen2_vl", "vision")`.

    Raises:
        ModelError: There is no such family, and the text lists those there are; or it cannot be
            imported, and the text says why.
    """
    path = f"{__name__}.{_folder(family)}.{name}"
    try:
        return importlib.import_module(path)
    except Exception as error:  # whatever a family's own imports raise
        raise ModelError(f"model_type {family!r} cannot be served: {_reason(error)}") from error


def has_module(family: str, name: str) -> bool:
    """Whether a family has a module of that name; nothing is imported.

    Raises:
        ModelError: There is no such family.
    """
    return importlib.util.find_spec(f"{__name__}.{_folder(family)}.{name}") is not None


def read_config(directory: str | Path) -> "ModelConfig":
    """Read the model's dimensions and token ids from a Hugging Face directory.

    Raises:
        ModelError: No config.json, an unknown `model_type`, or a setting that jaxmm does not have.
    """
    from jaxmm.models.json_files import read_json

    raw = read_json(Path(directory) / "config.json")
    module = family_module(str(raw.get("model_type")), "config")
    config: ModelConfig = module.read_config(Path(directory))
    return config


def _folder(family: str) -> str:
    found = families()
    folder = found.folders.get(family)
    if folder is not None:
        return folder
    skipped = "".join(f"; {name} was skipped: {why}" for name, why in found.skipped.items())
    raise ModelError(
        f"model_type {family!r} is not one of the families jaxmm has: "
        f"{', '.join(found.folders)}{skipped}"
    )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
