"""Qwen3-VL: which tensors of a checkpoint make up which parameter. Host only."""

from jaxmm.models.config import ModelConfig, TextConfig, VisionConfig
from jaxmm.models.loading import Parameter, ParameterPath, Tensor
from jaxmm.models.qwen2_vl.params import (
    attention,
    head_copies,
    head_rows,
    layer_norm,
    linear,
    patch_embedding,
    published_name,
    stacked,
    text_ends,
)

__all__ = ["parameters", "published_name"]


def parameters(config: ModelConfig) -> list[Parameter]:
    """The whole table of a Qwen3-VL or Qwen3-VL-MoE checkpoint."""
    layers = range(config.text.num_layers)
    text = [p for layer in layers for p in _text_layer(config.text, layer)]
    return [*_vision_parameters(config.vision), *text_ends(config.text), *text]


def _text_layer(config: TextConfig, layer: int) -> list[Parameter]:
    width, channels = config.width, config.head_channels
    heads = head_rows(config)
    at: ParameterPath = ("text", "layers", layer)
    prefix = f"model.layers.{layer}."
    attn = f"{prefix}self_attn"
    return [
        Parameter((*at, "attn_norm_D"), (Tensor(f"{prefix}input_layernorm.weight", (width,)),)),
        Parameter(
            (*at, "qkv_OD"),
            stacked(attn, "weight", heads, (width,), head_copies(config)),
            groups=config.num_kv_heads,
        ),
        Parameter((*at, "q_norm_C"), (Tensor(f"{attn}.q_norm.weight", (channels,)),)),
        Parameter((*at, "k_norm_C"), (Tensor(f"{attn}.k_norm.weight", (channels,)),)),
        Parameter((*at, "out_DO"), (Tensor(f"{attn}.o_proj.weight", (width, heads["q_proj"])),)),
        Parameter(
            (*at, "mlp_norm_D"), (Tensor(f"{prefix}post_attention_layernorm.weight", (width,)),)
        ),
        *(_experts if config.has_experts(layer) else _mlp)(config, (*at, "mlp"), f"{prefix}mlp"),
    ]


def _mlp(config: TextConfig, at: ParameterPath, source: str) -> list[Parameter]:
    gate_up = {"gate_proj": config.mlp_width, "up_proj": config.mlp_width}
    down = Tensor(f"{source}.down_proj.weight", (config.width, config.mlp_width))
    return [
        Parameter(
            (*at, "gate_up_2FD"),
            stacked(source, "weight", gate_up, (config.width,)),
            parts=2,
        ),
        Parameter((*at, "down_DF"), (down,)),
    ]


def _experts(config: TextConfig, at: ParameterPath, source: str) -> list[Parameter]:
    """Experts as published: inputs before outputs, the gate's half first.

    transformers 5 writes outputs before inputs when it saves a model again.
    """
    num, width, inner = config.num_experts, config.width, config.expert_width
    router = Tensor(f"{source}.gate.weight", (num, width))
    gate_up = Tensor(f"{source}.experts.gate_up_proj", (num, width, 2 * inner), swapped=True)
    down = Tensor(f"{source}.experts.down_proj", (num, inner, width), swapped=True)
    return [
        Parameter((*at, "router_XD"), (router,)),
        Parameter((*at, "gate_up_ZDO"), (gate_up,), flat=False),
        Parameter((*at, "down_ZFD"), (down,), flat=False),
    ]


def _vision_parameters(config: VisionConfig) -> list[Parameter]:
    width, mlp_width = config.width, config.mlp_width
    positions = Tensor("visual.pos_embed.weight", (config.position_side**2, width))
    patch_bias = Tensor("visual.patch_embed.proj.bias", (width,))
    table = [
        patch_embedding(config),
        Parameter(("vision", "patch_E"), (patch_bias,)),
        Parameter(("vision", "positions_XE"), (positions,)),
    ]
    for layer in range(config.depth):
        at: ParameterPath = ("vision", "layers", layer)
        block = f"visual.blocks.{layer}"
        table += [
            *layer_norm(at, "attn_", f"{block}.norm1", width),
            *attention(at, f"{block}.attn", width),
            *layer_norm(at, "mlp_", f"{block}.norm2", width),
            *linear(at, "up_FE", "up_F", f"{block}.mlp.linear_fc1", (mlp_width, width)),
            *linear(at, "down_EF", "down_E", f"{block}.mlp.linear_fc2", (width, mlp_width)),
        ]
    merged = width * config.merged_patches
    table += _merger(config, ("vision", "merger"), "visual.merger", width)
    for level in range(len(config.deepstack_layers)):
        source = f"visual.deepstack_merger_list.{level}"
        table += _merger(config, ("vision", "deepstack", level), source, merged)
    return table


def _merger(
    config: VisionConfig, at: ParameterPath, source: str, norm_width: int
) -> list[Parameter]:
    merged = config.width * config.merged_patches
    return [
        *layer_norm(at, "", f"{source}.norm", norm_width),
        *linear(at, "hidden_XX", "hidden_X", f"{source}.linear_fc1", (merged, merged)),
        *linear(at, "out_DX", "out_D", f"{source}.linear_fc2", (config.out_width, merged)),
    ]
