"""Toy: dimensions from config.json. Host only."""

from pathlib import Path

from jaxmm.models.config import (
    ModelConfig,
    VisionConfig,
    integer,
    read_model_config,
    read_text_config,
)
from jaxmm.models.json_files import read_json


def read_config(directory: Path) -> ModelConfig:
    """Read a toy directory: a Qwen2 decoder behind one linear layer over patches."""
    raw = read_json(directory / "config.json")
    vision = VisionConfig(
        depth=0,
        width=integer(raw["vision_config"], "width", 32),
        num_heads=1,
        mlp_width=0,
        patch_size=14,
        temporal_patch_size=2,
        merge_size=2,
        in_channels=3,
        out_width=integer(raw, "hidden_size", 64),
        window_patches=0,
        full_attention_layers=(),
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
    )
    return read_model_config(directory, read_text_config(directory, raw), vision, raw)
