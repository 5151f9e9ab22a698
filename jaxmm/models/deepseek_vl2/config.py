"""DeepSeek-VL2 (arXiv:2412.10302): dimensions from config.json. Host only."""

from pathlib import Path
from typing import Any

from jaxmm.errors import ModelError
from jaxmm.models.config import (
    LatentAttention,
    ModelConfig,
    Raw,
    TextConfig,
    VisionConfig,
    check_heads,
    integer,
    number,
    read_normalisation,
    require,
)
from jaxmm.models.deepseek_vl2.tokens import image_token_id
from jaxmm.models.json_files import read_json
from jaxmm.models.tensor_files import tensor_files

_NO_TOKEN = -1
_TOWERS: dict[str, dict[str, Any]] = {
    "siglip_so400m_patch14_384": {
        "image_size": 384,
        "patch_size": 14,
        "width": 1152,
        "layers": 27,
        "heads": 16,
        "mlp_ratio": 3.7362,
    },
    "siglip_large_patch16_384": {
        "image_size": 384,
        "patch_size": 16,
        "width": 1024,
        "layers": 24,
        "heads": 16,
        "mlp_ratio": 4,
    },
}
"""Dimensions that a file may leave to the encoder's name."""


def read_config(directory: Path) -> ModelConfig:
    """Read a DeepSeek-VL2 directory, of any of the three sizes.

    Raises:
        ModelError: A file is missing, or a setting is one that jaxmm does not have.
    """
    raw = read_json(directory / "config.json")
    require(raw, "quantization_config", (None,))
    require(raw, "tile_tag", ("2D",))
    require(raw, "global_view_pos", ("head", "tail"))
    language = raw.get("language_config") or {}
    text = _read_text(directory, raw, language)
    vision = _read_vision(directory, raw, text.width)
    return ModelConfig(
        family=str(raw["model_type"]),
        text=text,
        vision=vision,
        image_token_id=image_token_id(directory),
        video_token_id=_NO_TOKEN,
        vision_start_token_id=_NO_TOKEN,
        vision_end_token_id=_NO_TOKEN,
        eos_token_ids=_eos_token_ids(directory, language),
        max_position=integer(language, "max_position_embeddings", 2048),
    )


def _read_vision(directory: Path, raw: Raw, text_width: int) -> VisionConfig:
    given, projector = raw.get("vision_config") or {}, raw.get("projector_config") or {}
    vision = {**_TOWERS.get(str(given.get("model_name")), {}), **given}
    require(projector, "projector_type", ("downsample_mlp_gelu",))
    require(projector, "downsample_ratio", (2,))
    require(projector, "mlp_ratio", (1,))
    require(projector, "depth", (2,))
    width, num_heads = integer(vision, "width", 1152), integer(vision, "heads", 16)
    if width % num_heads:
        raise ModelError(f"config.json: vision width {width} is no multiple of {num_heads} heads")
    for key, value, wanted in (
        ("input_dim", integer(projector, "input_dim", width), width),
        ("n_embed", integer(projector, "n_embed", text_width), text_width),
    ):
        if value != wanted:
            raise ModelError(f"config.json: projector_config.{key}={value} and {wanted} beside it")
    patch_size = integer(vision, "patch_size", 14)
    half = (0.5, 0.5, 0.5)
    path = directory / "processor_config.json"  # the whole processor is the pictures'
    mean, std = read_normalisation(read_json(path) if path.exists() else None, (half, half))
    return VisionConfig(
        depth=integer(vision, "layers", 27),
        width=width,
        num_heads=num_heads,
        mlp_width=int(width * number(vision, "mlp_ratio", 3.7362)),
        patch_size=patch_size,
        temporal_patch_size=1,
        merge_size=2,
        in_channels=3,
        out_width=text_width,
        window_patches=0,
        full_attention_layers=(),
        image_mean=mean,
        image_std=std,
        tile_side=integer(vision, "image_size", 384) // patch_size,
        overview_first=raw.get("global_view_pos", "head") == "head",
    )


def _read_text(directory: Path, raw: Raw, text: Raw) -> TextConfig:
    """A DeepSeek-V2 decoder; its class has these defaults."""
    require(text, "hidden_act", ("silu",))
    require(text, "attention_bias", (False,))
    require(text, "rope_scaling", (None,))
    require(text, "q_lora_rank", (None,))
    require(text, "lm_head", (True,))
    num_heads = integer(text, "num_attention_heads", 32)
    latent = _read_latent(text) if text.get("use_mla", True) else None
    width, num_layers = integer(text, "hidden_size", 4096), integer(text, "num_hidden_layers", 30)
    # keys and values of a compressed row are those of one head that all query heads read
    num_kv_heads = 1 if latent else integer(text, "num_key_value_heads", num_heads)
    check_heads(num_heads, num_kv_heads)
    if latent is None and width % num_heads:
        raise ModelError(f"config.json: hidden_size={width} is no multiple of {num_heads} heads")
    channels = latent.row_channels if latent else width // num_heads
    turned = latent.rope_channels if latent else channels
    return TextConfig(
        vocab_size=integer(text, "vocab_size", 102400),
        width=width,
        mlp_width=integer(text, "intermediate_size", 11008),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_channels=channels,
        rms_eps=number(text, "rms_norm_eps", 1e-6),
        rope_theta=number(text, "rope_theta", 10000.0),
        mrope_section=(turned // 2, 0, 0),  # text and pictures are numbered alike, by time alone
        tied=_is_tied(directory, raw, text),
        latent=latent,
        **_read_experts(text, num_layers),
    )


def _read_latent(text: Raw) -> LatentAttention:
    return LatentAttention(
        rank=integer(text, "kv_lora_rank", 512),
        nope_channels=integer(text, "qk_nope_head_dim", 128),
        rope_channels=integer(text, "qk_rope_head_dim", 64),
        value_channels=integer(text, "v_head_dim", 128),
    )


def _read_experts(text: Raw, num_layers: int) -> dict[str, Any]:
    require(text, "n_group", (None, 1))
    require(text, "topk_group", (None, 1))
    require(text, "scoring_func", ("softmax", "sigmoid"))
    require(text, "topk_method", ("greedy", "noaux_tc"))
    num_experts = integer(text, "n_routed_experts", 0)
    if not num_experts:
        return {}
    per_token = integer(text, "num_experts_per_tok", 0)
    if not 0 < per_token <= num_experts:
        raise ModelError(f"config.json: {per_token} experts a token of {num_experts}")
    first, step = (
        integer(text, "first_k_dense_replace", 0, least=0),
        integer(text, "moe_layer_freq", 1),
    )
    width = integer(text, "moe_intermediate_size", 1407)
    return {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "expert_width": width,
        "shared_width": width * integer(text, "n_shared_experts", 0, least=0),
        "dense_layers": tuple(i for i in range(num_layers) if i < first or i % step),
        "expert_scores": text.get("scoring_func", "softmax"),
        "expert_bias": text.get("topk_method") == "noaux_tc",
        "expert_shares": bool(text.get("norm_topk_prob", False)) and per_token > 1,
        "expert_scale": number(text, "routed_scaling_factor", 1.0),
    }


def _is_tied(directory: Path, raw: Raw, text: Raw) -> bool:
    """Whether the head is the embedding; the files decide."""
    names = tensor_files(directory)
    if names:
        return "language.lm_head.weight" not in names
    return bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def _eos_token_ids(directory: Path, text: Raw) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    value = generation.get("eos_token_id")
    if value is None:
        value = integer(text, "eos_token_id", 100001, least=0)
    return (value,) if isinstance(value, int) else tuple(value)
