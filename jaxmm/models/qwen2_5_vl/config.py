"""Qwen2.5-VL (arXiv:2502.13923): dimensions from config.json. Host only."""

from pathlib import Path

from jaxmm.errors import ModelError
from jaxmm.models.config import (
    ModelConfig,
    Raw,
    VisionConfig,
    integer,
    integers,
    read_model_config,
    read_normalisation,
    read_text_config,
    require,
)
from jaxmm.models.json_files import read_json, read_processor_table


def read_config(directory: Path) -> ModelConfig:
    """Read a Qwen2.5-VL directory.

    Raises:
        ModelError: A file is missing, or a setting is one that jaxmm does not have.
    """
    raw = read_json(directory / "config.json")
    vision = _read_vision(directory, raw.get("vision_config") or {})
    return read_model_config(directory, read_text_config(directory, raw), vision, raw)


def _read_vision(directory: Path, raw: Raw) -> VisionConfig:
    require(raw, "in_channels", (3,))
    require(raw, "in_chans", (3,))
    require(raw, "spatial_merge_size", (2,))
    require(raw, "temporal_patch_size", (2,))
    require(raw, "hidden_act", ("silu",))
    patch_size = integer(raw, "patch_size", 14)
    mean, std = read_normalisation(read_processor_table(directory))
    return VisionConfig(
        depth=integer(raw, "depth", 32),
        width=integer(raw, "hidden_size", 3584),
        num_heads=integer(raw, "num_heads", 16),
        mlp_width=integer(raw, "intermediate_size", 3420),
        patch_size=patch_size,
        temporal_patch_size=2,
        merge_size=2,
        in_channels=3,
        out_width=integer(raw, "out_hidden_size", 3584),
        window_patches=_window_side(raw, patch_size) ** 2,
        full_attention_layers=integers(raw, "fullatt_block_indexes", (7, 15, 23, 31)),
        image_mean=mean,
        image_std=std,
    )


def _window_side(raw: Raw, patch_size: int) -> int:
    """Patches by side of a full window."""
    pixels = integer(raw, "window_size", 112)
    if pixels % (2 * patch_size):
        raise ModelError(
            f"config.json: window_size={pixels} is no multiple of {2 * patch_size}, "
            "the pixels by side of one row"
        )
    return pixels // patch_size
