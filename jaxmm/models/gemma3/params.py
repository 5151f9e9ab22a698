"""Gemma 3: which tensors of a checkpoint make up which parameter. Host only."""

from jaxmm.models.config import ModelConfig, TextConfig, VisionConfig
from jaxmm.models.loading import Parameter, ParameterPath, Tensor
from jaxmm.models.qwen2_vl.params import (
    head_copies,
    head_rows,
    layer_norm,
    linear,
    stacked,
    text_ends,
)

_TEXT, _VISION = "language_model.", "vision_tower.vision_model."
_UNUSED = f"{_VISION}head."
"""What the encoder pooled its patches with when it was trained; no row of ours is made of it."""


def published_name(name: str) -> str | None:
    """Name of a tensor in the published files, from either generation of names.

    transformers from 4.52 on has `model.` before everything, and fewer words between.
    """
    name = name.replace("model.language_model.", f"{_TEXT}model.", 1)
    name = f"{_TEXT}{name}" if name == "lm_head.weight" else name
    for part in ("vision_tower.", "multi_modal_projector."):
        name = name.replace(f"model.{part}", part, 1)
    if name.startswith("vision_tower.") and not name.startswith(_VISION):
        name = name.replace("vision_tower.", _VISION, 1)
    return None if name.startswith(_UNUSED) else name


def parameters(config: ModelConfig) -> list[Parameter]:
    """The whole table of a Gemma 3 checkpoint."""
    layers = range(config.text.num_layers)
    text = [p for layer in layers for p in _text_layer(config.text, layer)]
    return [*_vision(config.vision), *text_ends(config.text, _TEXT), *text]


def _text_layer(config: TextConfig, layer: int) -> list[Parameter]:
    width, inner, channels = config.width, config.mlp_width, config.head_channels
    heads = head_rows(config)
    at: ParameterPath = ("text", "layers", layer)
    source = f"{_TEXT}model.layers.{layer}"
    attend = f"{source}.self_attn"
    vectors = {
        "attn_norm_D": ("input_layernorm", width),
        "attn_out_norm_D": ("post_attention_layernorm", width),
        "mlp_norm_D": ("pre_feedforward_layernorm", width),
        "mlp_out_norm_D": ("post_feedforward_layernorm", width),
        "q_norm_C": ("self_attn.q_norm", channels),
        "k_norm_C": ("self_attn.k_norm", channels),
    }
    gate_up = {"gate_proj": inner, "up_proj": inner}
    return [
        *(
            Parameter((*at, name), (Tensor(f"{source}.{norm}.weight", (size,)),))
            for name, (norm, size) in vectors.items()
        ),
        Parameter(
            (*at, "qkv_OD"),
            stacked(attend, "weight", heads, (width,), head_copies(config)),
            groups=config.num_kv_heads,
        ),
        Parameter((*at, "out_DO"), (Tensor(f"{attend}.o_proj.weight", (width, heads["q_proj"])),)),
        Parameter(
            (*at, "gate_up_2FD"),
            stacked(f"{source}.mlp", "weight", gate_up, (width,)),
            parts=2,
        ),
        Parameter((*at, "down_DF"), (Tensor(f"{source}.mlp.down_proj.weight", (width, inner)),)),
    ]


def _vision(config: VisionConfig) -> list[Parameter]:
    width, size = config.width, config.patch_size
    embed = f"{_VISION}embeddings"
    patch = Tensor(f"{embed}.patch_embedding.weight", (width, config.in_channels, size, size))
    positions = Tensor(f"{embed}.position_embedding.weight", (config.picture_side**2, width))
    table = [
        Parameter(("vision", "patch_EU"), (patch,)),
        Parameter(("vision", "patch_E"), (Tensor(f"{embed}.patch_embedding.bias", (width,)),)),
        Parameter(("vision", "positions_XE"), (positions,)),
        *layer_norm(("vision",), "", f"{_VISION}post_layernorm", width),
        *_projector(config),
    ]
    for layer in range(config.depth):
        at: ParameterPath = ("vision", "layers", layer)
        block = f"{_VISION}encoder.layers.{layer}"
        heads = dict.fromkeys(("q_proj", "k_proj", "v_proj"), width)
        table += [
            *layer_norm(at, "attn_", f"{block}.layer_norm1", width),
            Parameter(
                (*at, "qkv_3OE"),
                stacked(f"{block}.self_attn", "weight", heads, (width,)),
                parts=3,
            ),
            Parameter((*at, "qkv_3O"), stacked(f"{block}.self_attn", "bias", heads), parts=3),
            *linear(at, "out_EO", "out_E", f"{block}.self_attn.out_proj", (width, width)),
            *layer_norm(at, "mlp_", f"{block}.layer_norm2", width),
            *linear(at, "up_FE", "up_F", f"{block}.mlp.fc1", (config.mlp_width, width)),
            *linear(at, "down_EF", "down_E", f"{block}.mlp.fc2", (width, config.mlp_width)),
        ]
    return table


def _projector(config: VisionConfig) -> list[Parameter]:
    source = "multi_modal_projector"
    norm = Tensor(f"{source}.mm_soft_emb_norm.weight", (config.width,))
    matrix = Tensor(f"{source}.mm_input_projection_weight", (config.width, config.out_width))
    return [
        Parameter(("vision", "row_norm_E"), (norm,)),
        Parameter(("vision", "row_ED"), (matrix,)),
    ]
