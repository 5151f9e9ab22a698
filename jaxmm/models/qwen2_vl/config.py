"""Qwen2-VL (arXiv:2409.12191): dimensions from config.json. Host only."""

from pathlib import Path

from jaxmm.models.config import (
    ModelConfig,
    Raw,
    VisionConfig,
    integer,
    number,
    read_model_config,
    read_normalisation,
    read_text_config,
    require,
)
from jaxmm.models.json_files import read_json, read_processor_table


def read_config(directory: Path) -> ModelConfig:
    """Read a Qwen2-VL directory.

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
    require(raw, "hidden_act", ("quick_gelu",))
    width = integer(raw, "embed_dim", 1280)
    mean, std = read_normalisation(read_processor_table(directory))
    return VisionConfig(
        depth=integer(raw, "depth", 32),
        width=width,
        num_heads=integer(raw, "num_heads", 16),
        mlp_width=int(width * number(raw, "mlp_ratio", 4.0)),
        patch_size=integer(raw, "patch_size", 14),
        temporal_patch_size=2,
        merge_size=2,
        in_channels=3,
        out_width=integer(raw, "hidden_size", 3584),
        window_patches=0,
        full_attention_layers=(),
        image_mean=mean,
        image_std=std,
    )
