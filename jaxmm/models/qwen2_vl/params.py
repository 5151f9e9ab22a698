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
    layers = range(config.num_layers)
    return [*text_ends(config), *(p for layer in layers for p in _text_layer(config, layer))]


def text_ends(config: TextConfig, prefix: str = "") -> list[Parameter]:
    """What stands before and after a decoder's layers: embedding, last norm, head."""
    table = (config.vocab_size, config.width)
    ends = [
        Parameter(("text", "embed_VD"), (Tensor(f"{prefix}model.embed_tokens.weight", table),)),
        Parameter(("text", "norm_D"), (Tensor(f"{prefix}model.norm.weight", (config.width,)),)),
    ]
    head = Parameter(("text", "head_VD"), (Tensor(f"{prefix}lm_head.weight", table),))
    return ends if config.tied else [*ends, head]


def _text_layer(config: TextConfig, layer: int) -> list[Parameter]:
    width, mlp_width = config.width, config.mlp_width
    heads, copies = head_rows(config), head_copies(config)
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
            parts=2,
        ),
        Parameter((*at, "down_DF"), (Tensor(f"{prefix}mlp.down_proj.weight", (width, mlp_width)),)),
    ]


def head_rows(config: TextConfig) -> dict[str, int]:
    """Rows of the three projections of attention, as they stand in the files."""
    kv_rows = config.stored_kv_heads * config.head_channels
    return {
        "q_proj": config.num_heads * config.head_channels,
        "k_proj": kv_rows,
        "v_proj": kv_rows,
    }


def head_copies(config: TextConfig) -> dict[str, int]:
    """How often keys and values stand."""
    return {"k_proj": config.kv_copies, "v_proj": config.kv_copies}


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
    """The two projections of an attention layer, the first by queries, keys and values."""
    return [
        Parameter((*at, "qkv_3OE"), (Tensor(f"{source}.qkv.weight", (3 * width, width)),), parts=3),
        Parameter((*at, "qkv_3O"), (Tensor(f"{source}.qkv.bias", (3 * width,)),), parts=3),
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
