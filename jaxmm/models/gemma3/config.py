"""Gemma 3 (arXiv:2503.19786): dimensions from config.json. Host only."""

from math import isqrt
from pathlib import Path

from jaxmm.errors import ModelError
from jaxmm.models.config import (
    ModelConfig,
    Raw,
    SlidingWindow,
    TextConfig,
    VisionConfig,
    check_heads,
    integer,
    number,
    read_eos_token_ids,
    read_normalisation,
    require,
)
from jaxmm.models.json_files import read_json, read_processor_table
from jaxmm.models.tensor_files import tensor_files

_HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def read_config(directory: Path) -> ModelConfig:
    """Read a Gemma 3 directory.

    Raises:
        ModelError: A file is missing, or a setting is one that jaxmm does not have.
    """
    raw = read_json(directory / "config.json")
    require(raw, "quantization_config", (None,))
    text = _read_text(directory, raw, raw.get("text_config") or {})
    vision = _read_vision(directory, raw, text.width)
    return ModelConfig(
        family="gemma3",
        text=text,
        vision=vision,
        image_token_id=integer(raw, "image_token_index", 262144, least=0),
        video_token_id=-1,
        vision_start_token_id=-1,
        vision_end_token_id=-1,
        eos_token_ids=read_eos_token_ids(directory, {"eos_token_id": [1, 106], **raw}),
        max_position=integer(raw.get("text_config") or {}, "max_position_embeddings", 131072),
    )


def _read_text(directory: Path, raw: Raw, text: Raw) -> TextConfig:
    require(text, "hidden_activation", ("gelu_pytorch_tanh",))
    require(text, "attention_bias", (False,))
    require(text, "attn_logit_softcapping", (None,))
    require(text, "final_logit_softcapping", (None,))
    require(text, "use_bidirectional_attention", (False, None))
    num_heads = integer(text, "num_attention_heads", 8)
    num_kv_heads = integer(text, "num_key_value_heads", 4)
    check_heads(num_heads, num_kv_heads)
    channels = integer(text, "head_dim", 256)
    num_layers = integer(text, "num_hidden_layers", 26)
    theta, factor, local_theta = _read_rope(text)
    return TextConfig(
        vocab_size=integer(text, "vocab_size", 262208),
        width=integer(text, "hidden_size", 2304),
        mlp_width=integer(text, "intermediate_size", 9216),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_channels=channels,
        rms_eps=number(text, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_factor=factor,
        mrope_section=(channels // 2, 0, 0),
        tied=_is_tied(directory, raw, text),
        both_ways=True,
        sliding=SlidingWindow(
            tokens=integer(text, "sliding_window", 4096),
            whole_layers=_whole_layers(text, num_layers),
            rope_theta=local_theta,
        ),
        score_divisor=number(text, "query_pre_attn_scalar", 256.0),
    )


def _is_tied(directory: Path, raw: Raw, text: Raw) -> bool:
    """Whether the head is the embedding: the files decide, and where there are none, the flag."""
    names = tensor_files(directory)
    if names:
        return not any(name.endswith("lm_head.weight") for name in names)
    return bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", True)))


def _whole_layers(text: Raw, num_layers: int) -> tuple[int, ...]:
    """Layers that see all tokens, listed one by one or as every so manieth."""
    kinds = text.get("layer_types")
    if kinds is None:
        every = integer(text, "sliding_window_pattern", 6)
        return tuple(layer for layer in range(num_layers) if (layer + 1) % every == 0)
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"config.json: layer_types={kinds} does not say for each of the {num_layers} layers "
            "full_attention or sliding_attention"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")


def _read_rope(text: Raw) -> tuple[float, float, float]:
    """Base and factor of layers that see all, and the base of the others, in either spelling."""
    tables = text.get("rope_parameters") or {}
    whole = tables.get("full_attention") or text.get("rope_scaling") or {}
    local = tables.get("sliding_attention") or {}
    for key in ("rope_type", "type"):
        require(whole, key, ("default", "linear"))
        require(local, key, ("default",))
    return (
        number(whole, "rope_theta", number(text, "rope_theta", 1e6)),
        number(whole, "factor", 1.0),
        number(local, "rope_theta", number(text, "rope_local_base_freq", 1e4)),
    )


def _read_vision(directory: Path, raw: Raw, text_width: int) -> VisionConfig:
    vision = raw.get("vision_config") or {}
    require(vision, "hidden_act", ("gelu_pytorch_tanh",))
    require(vision, "num_channels", (3,))
    require(vision, "layer_norm_eps", (1e-6,))
    patch_size = integer(vision, "patch_size", 16)
    side = integer(vision, "image_size", 224) // patch_size
    rows = isqrt(tokens := integer(raw, "mm_tokens_per_image", 256))
    if rows**2 != tokens or side % rows:
        raise ModelError(
            f"config.json: mm_tokens_per_image={tokens} is no square that divides pictures of "
            f"{side} x {side} patches evenly"
        )
    width, num_heads = (
        integer(vision, "hidden_size", 768),
        integer(vision, "num_attention_heads", 12),
    )
    if width % num_heads:
        raise ModelError(f"config.json: vision width {width} is no multiple of {num_heads} heads")
    mean, std = read_normalisation(read_processor_table(directory), _HALF)
    return VisionConfig(
        depth=integer(vision, "num_hidden_layers", 12),
        width=width,
        num_heads=num_heads,
        mlp_width=integer(vision, "intermediate_size", 3072),
        patch_size=patch_size,
        temporal_patch_size=1,
        merge_size=side // rows,
        in_channels=3,
        out_width=text_width,
        window_patches=0,
        full_attention_layers=(),
        image_mean=mean,
        image_std=std,
        picture_side=side,
        pooled=True,
    )
