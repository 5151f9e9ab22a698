"""Qwen3-VL (arXiv:2511.21631): dimensions from config.json. Host only."""

from math import isqrt
from pathlib import Path
from typing import Any

from jaxmm.errors import ModelError
from jaxmm.models.config import (
    ModelConfig,
    Raw,
    TextConfig,
    VisionConfig,
    check_heads,
    integer,
    integers,
    is_tied,
    number,
    read_model_config,
    read_normalisation,
    read_rope,
    require,
)
from jaxmm.models.json_files import read_json, read_processor_table

_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def read_config(directory: Path) -> ModelConfig:
    """Read a Qwen3-VL or Qwen3-VL-MoE directory.

    Raises:
        ModelError: A file is missing, or a setting is one that jaxmm does not have.
    """
    raw = read_json(directory / "config.json")
    vision = _read_vision(directory, raw.get("vision_config") or {})
    text = _read_text(directory, raw, levels=len(vision.deepstack_layers))
    return read_model_config(directory, text, vision, raw, default_positions=128000)


def _read_vision(directory: Path, raw: Raw) -> VisionConfig:
    require(raw, "in_channels", (3,))
    require(raw, "spatial_merge_size", (2,))
    require(raw, "temporal_patch_size", (2,))
    require(raw, "hidden_act", ("gelu_pytorch_tanh",))
    positions = integer(raw, "num_position_embeddings", 2304)
    if isqrt(positions) ** 2 != positions:
        raise ModelError(f"config.json: num_position_embeddings={positions} is not a square")
    depth = integer(raw, "depth", 27)
    layers = integers(raw, "deepstack_visual_indexes", (8, 16, 24))
    if list(layers) != sorted(set(layers)) or any(not 0 <= i < depth for i in layers):
        raise ModelError(
            f"config.json: deepstack_visual_indexes={list(layers)} do not ascend below the "
            f"{depth} layers"
        )
    mean, std = read_normalisation(read_processor_table(directory), _HALF)
    return VisionConfig(
        depth=depth,
        width=integer(raw, "hidden_size", 1152),
        num_heads=integer(raw, "num_heads", 16),
        mlp_width=integer(raw, "intermediate_size", 4304),
        patch_size=integer(raw, "patch_size", 16),
        temporal_patch_size=2,
        merge_size=2,
        in_channels=3,
        out_width=integer(raw, "out_hidden_size", 3584),
        window_patches=0,
        full_attention_layers=(),
        position_side=isqrt(positions),
        deepstack_layers=layers,
        image_mean=mean,
        image_std=std,
    )


def _read_text(directory: Path, raw: Raw, levels: int) -> TextConfig:
    """A Qwen3 decoder; its class has other defaults with experts than without."""
    text = raw.get("text_config") or {}
    require(raw, "quantization_config", (None,))
    require(text, "hidden_act", ("silu",))
    require(text, "attention_bias", (False,))
    require(
        text.get("rope_parameters") or text.get("rope_scaling") or {}, "mrope_interleaved", (True,)
    )
    moe = raw["model_type"] == "qwen3_vl_moe"
    width = integer(text, "hidden_size", 2048 if moe else 4096)
    num_heads = integer(text, "num_attention_heads", 16 if moe else 32)
    # null in the file means as many as query heads; only a missing key has the class default
    default_kv = {"num_key_value_heads": 16 if moe else 32}
    num_kv_heads = integer({**default_kv, **text}, "num_key_value_heads", num_heads)
    check_heads(num_heads, num_kv_heads)
    head_channels = integer(text, "head_dim", width // num_heads if moe else 128)
    theta, section = read_rope(text, head_channels, default_theta=5e5, default_section=(24, 20, 20))
    num_layers = integer(text, "num_hidden_layers", 24 if moe else 32)
    if levels > num_layers:
        raise ModelError(f"config.json: {levels} deepstack levels for {num_layers} layers")
    return TextConfig(
        vocab_size=integer(text, "vocab_size", 151936),
        width=width,
        mlp_width=integer(text, "intermediate_size", 5632 if moe else 22016),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_channels=head_channels,
        rms_eps=number(text, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        mrope_section=section,
        tied=is_tied(directory, raw, text),
        deepstack_levels=levels,
        **(_read_experts(text, num_layers) if moe else {}),
    )


def _read_experts(text: Raw, num_layers: int) -> dict[str, Any]:
    require(text, "norm_topk_prob", (True,))
    num_experts = integer(text, "num_experts", integer(text, "num_local_experts", 60))
    per_token = integer(text, "num_experts_per_tok", 4)
    if per_token > num_experts:
        raise ModelError(f"config.json: {per_token} experts a token of only {num_experts}")
    dense = set(integers(text, "mlp_only_layers", ()))
    step = integer(text, "decoder_sparse_step", 1)
    dense |= {layer for layer in range(num_layers) if (layer + 1) % step}
    return {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "expert_width": integer(text, "moe_intermediate_size", 1408),
        "dense_layers": tuple(sorted(dense)),
    }
