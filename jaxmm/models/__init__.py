"""Model families: one folder each, found by a checkpoint's `model_type`. Host only.

A family has the modules `config` (`read_config`), `params` (`parameters`, which tensors fill which
parameters) and `vision` (`VisionEncoder`); this file imports none of them until they are asked for.
"""

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from jaxmm.errors import ModelError

if TYPE_CHECKING:
    from jaxmm.models.config import ModelConfig

__all__ = ["FAMILIES", "family_module", "read_config"]

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
"""Values of `model_type` in config.json; each is also the name of its folder here."""


def family_module(family: str, name: str) -> ModuleType:
    """Import one module of a family, such as `family_module("qwen2_vl", "vision")`.

    Raises:
        ModelError: There is no such family; the text lists those there are.
    """
    if family not in FAMILIES:
        raise ModelError(
            f"model_type {family!r} is not one of the families jaxmm has: {', '.join(FAMILIES)}"
        )
    return importlib.import_module(f"jaxmm.models.{family}.{name}")


def read_config(directory: str | Path) -> "ModelConfig":
    """Read the model's dimensions and token ids from a Hugging Face directory.

    Raises:
        ModelError: No config.json, an unknown `model_type`, or a setting that jaxmm does not have.
    """
    from jaxmm.models.config import read_json

    raw = read_json(Path(directory) / "config.json")
    module = family_module(str(raw.get("model_type")), "config")
    config: ModelConfig = module.read_config(Path(directory))
    return config
