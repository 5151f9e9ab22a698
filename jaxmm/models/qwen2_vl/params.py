"""Qwen2-VL: which tensors of a checkpoint make up which parameter. Host only."""

from collections.abc import Mapping
from types import MappingProxyType

from jaxmm.models.config import ModelConfig, TextConfig, VisionConfig
from jaxmm.models.loading import Parameter, ParameterPath, Tensor


def published_name(name: str) -> str:
    """Name of a tensor in the published files, from either generation of names.

    transformers 4.52 to 4.57 re-saved `visual.*` as `model.visual.*` and `model.*` as
    `model.language_model.*`.
    """
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name


def parameters(config: ModelConfig) -> list[Parameter]:
    """The whole table of a Qwen2-VL checkpoint."""
    return [*_vision_parameters(config.vision), *text_parameters(config.text)]


def text_parameters(config: TextConfig) -> list[Parameter]:
    """A Qwen2 decoder."""
    table = [
        Parameter(
            ("text", "embed_VD"),
            (Tensor("model.embed_tokens.weight", (config.vocab_size, config.width)),),
        ),
        Parameter(("text", "norm_D"), (Tensor("model.norm.weight", (config.width,)),)),
    ]
    for layer in range(config.num_layers):
        table += _text_layer(config, layer)
    if not config.tied:
        head = Tensor("lm_head.weight", (config.vocab_size, config.width))
        table.append(Parameter(("text", "head_VD"), (head,)))
    return table


def _text_layer(config: TextConfig, layer: int) -> list[Parameter]:
    width, mlp_width = config.width, config.mlp_width
    heads = {
        "q_proj": config.num_heads * config.head_channels,
        "k_proj": config.stored_kv_heads * config.head_channels,
        "v_proj": config.stored_kv_heads * config.head_channels,
    }
    copies = {"k_proj": config.kv_copies, "v_proj": config.kv_copies}
    gate_up = {"gate_proj": mlp_width, "up_proj": mlp_width}
    at: ParameterPath = ("text", "layers", layer)
    prefix = f"model.layers.{layer}."
    return [
        Parameter((*at, "attn_norm_D"), (Tensor(f"{prefix}input_layernorm.weight", (width,)),)),
        Parameter(
            (*at, "qkv_OD"),
            stacked(f"{prefix}self_attn", "weight", heads, (width,), copies),
            groups=config.num_kv_heads,
        ),
        Parameter(
            (*at, "qkv_O"),
            stacked(f"{prefix}self_attn", "bias", heads, (), copies),
            groups=config.num_kv_heads,
        ),
        Parameter(
            (*at, "out_DO"), (Tensor(f"{prefix}self_attn.o_proj.weight", (width, heads["q_proj"])),)
        ),
        Parameter(
            (*at, "mlp_norm_D"), (Tensor(f"{prefix}post_attention_layernorm.weight", (width,)),)
        ),
        Parameter(
            (*at, "gate_up_2FD"),
            stacked(f"{prefix}mlp", "weight", gate_up, (width,)),
            new_axis=True,
        ),
        Parameter((*at, "down_DF"), (Tensor(f"{prefix}mlp.down_proj.weight", (width, mlp_width)),)),
    ]


def stacked(
    prefix: str,
    suffix: str,
    rows: dict[str, int],
    rest: tuple[int, ...] = (),
    copies: Mapping[str, int] = MappingProxyType({}),
) -> tuple[Tensor, ...]:
    """The tensors `prefix.<name>.suffix`, each of its number of rows, and as often as it stands."""
    return tuple(
        Tensor(f"{prefix}.{name}.{suffix}", (n, *rest), copies.get(name, 1))
        for name, n in rows.items()
    )


def linear(
    at: ParameterPath, weight: str, bias: str, source: str, shape: tuple[int, int]
) -> list[Parameter]:
    """Weight [out, in] and bias [out] of one linear layer."""
    return [
        Parameter((*at, weight), (Tensor(f"{source}.weight", shape),)),
        Parameter((*at, bias), (Tensor(f"{source}.bias", shape[:1]),)),
    ]


def layer_norm(at: ParameterPath, name: str, source: str, width: int) -> list[Parameter]:
    """Scale `<name>_norm_E` and shift `<name>_norm_bias_E` of one layer normalisation."""
    return [
        Parameter((*at, f"{name}norm_E"), (Tensor(f"{source}.weight", (width,)),)),
        Parameter((*at, f"{name}norm_bias_E"), (Tensor(f"{source}.bias", (width,)),)),
    ]


def patch_embedding(config: VisionConfig) -> Parameter:
    """The convolution over patches, as a matrix over channel, time, y, x."""
    size = config.patch_size
    shape = (config.width, config.in_channels, config.temporal_patch_size, size, size)
    return Parameter(("vision", "patch_EU"), (Tensor("visual.patch_embed.proj.weight", shape),))


def attention(at: ParameterPath, source: str, width: int) -> list[Parameter]:
    """The two projections of an attention layer."""
    return [
        *linear(at, "qkv_OE", "qkv_O", f"{source}.qkv", (3 * width, width)),
        *linear(at, "out_EO", "out_E", f"{source}.proj", (width, width)),
    ]


def merger_mlp(config: VisionConfig) -> list[Parameter]:
    """The two linear layers that turn merged patches into a row."""
    merged = config.width * config.merged_patches
    at: ParameterPath = ("vision", "merger")
    return [
        *linear(at, "hidden_XX", "hidden_X", "visual.merger.mlp.0", (merged, merged)),
        *linear(at, "out_DX", "out_D", "visual.merger.mlp.2", (config.out_width, merged)),
    ]


def _vision_parameters(config: VisionConfig) -> list[Parameter]:
    width, mlp_width = config.width, config.mlp_width
    table = [patch_embedding(config)]
    for layer in range(config.depth):
        at: ParameterPath = ("vision", "layers", layer)
        block = f"visual.blocks.{layer}"
        table += [
            *layer_norm(at, "attn_", f"{block}.norm1", width),
            *attention(at, f"{block}.attn", width),
            *layer_norm(at, "mlp_", f"{block}.norm2", width),
            *linear(at, "up_FE", "up_F", f"{block}.mlp.fc1", (mlp_width, width)),
            *linear(at, "down_EF", "down_E", f"{block}.mlp.fc2", (width, mlp_width)),
        ]
    merger = layer_norm(("vision", "merger"), "", "visual.merger.ln_q", width)
    return [*table, *merger, *merger_mlp(config)]
