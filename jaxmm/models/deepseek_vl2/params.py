"""DeepSeek-VL2: which tensors of a checkpoint make up which parameter. Host only."""

from jaxmm.models.config import LatentAttention, ModelConfig, TextConfig, VisionConfig
from jaxmm.models.loading import Parameter, ParameterPath, Tensor
from jaxmm.models.qwen2_vl.params import (
    attention,
    head_copies,
    head_rows,
    layer_norm,
    linear,
    stacked,
    text_ends,
)

_UNUSED = "vision.attn_pool."
"""What the encoder pooled its patches with when it was trained; no row of ours is made of it."""


def published_name(name: str) -> str | None:
    """Every file has the published names; None: the tensor is known, and nothing needs it."""
    return None if name.startswith(_UNUSED) else name


def parameters(config: ModelConfig) -> list[Parameter]:
    """The whole table of a DeepSeek-VL2 checkpoint."""
    layers = range(config.text.num_layers)
    text = [p for layer in layers for p in _text_layer(config.text, layer)]
    return [*_vision(config.vision), *text_ends(config.text, "language."), *text]


def _text_layer(config: TextConfig, layer: int) -> list[Parameter]:
    at: ParameterPath = ("text", "layers", layer)
    source = f"language.model.layers.{layer}"
    attend = f"{source}.self_attn"
    norms = {"attn_norm_D": "input_layernorm", "mlp_norm_D": "post_attention_layernorm"}
    latent = config.latent
    return [
        *(
            Parameter((*at, name), (Tensor(f"{source}.{norm}.weight", (config.width,)),))
            for name, norm in norms.items()
        ),
        *(
            _heads(config, (*at, "attention"), attend)
            if latent is None
            else _latent(config, latent, (*at, "attention"), attend)
        ),
        *(_experts if config.has_experts(layer) else _dense)(config, (*at, "mlp"), f"{source}.mlp"),
    ]


def _heads(config: TextConfig, at: ParameterPath, source: str) -> list[Parameter]:
    """Attention with keys and values of their own."""
    heads = head_rows(config)
    out = Tensor(f"{source}.o_proj.weight", (config.width, heads["q_proj"]))
    return [
        Parameter(
            (*at, "qkv_OD"),
            stacked(source, "weight", heads, (config.width,), head_copies(config)),
            groups=config.num_kv_heads,
        ),
        Parameter((*at, "out_DO"), (out,)),
    ]


def _latent(
    config: TextConfig, latent: LatentAttention, at: ParameterPath, source: str
) -> list[Parameter]:
    """Attention with keys and values made of one row a token."""
    heads, width = config.num_heads, config.width
    made = heads * (latent.nope_channels + latent.value_channels)
    tensors = {
        "query_OD": Tensor(f"{source}.q_proj.weight", (heads * latent.query_channels, width)),
        "row_CD": Tensor(f"{source}.kv_a_proj_with_mqa.weight", (latent.row_channels, width)),
        "row_norm_C": Tensor(f"{source}.kv_a_layernorm.weight", (latent.rank,)),
        "key_value_OC": Tensor(f"{source}.kv_b_proj.weight", (made, latent.rank)),
        "out_DO": Tensor(f"{source}.o_proj.weight", (width, heads * latent.value_channels)),
    }
    return [Parameter((*at, name), (tensor,)) for name, tensor in tensors.items()]


def _dense(config: TextConfig, at: ParameterPath, source: str) -> list[Parameter]:
    return _mlp(config.width, config.mlp_width, at, source)


def _mlp(width: int, inner: int, at: ParameterPath, source: str) -> list[Parameter]:
    gate_up = stacked(source, "weight", {"gate_proj": inner, "up_proj": inner}, (width,))
    down = Tensor(f"{source}.down_proj.weight", (width, inner))
    return [
        Parameter((*at, "gate_up_2FD"), gate_up, parts=2),
        Parameter((*at, "down_DF"), (down,)),
    ]


def _experts(config: TextConfig, at: ParameterPath, source: str) -> list[Parameter]:
    """Experts, each with matrices of its own in the files, and what all tokens take beside."""
    num, width, inner = config.num_experts, config.width, config.expert_width
    gate_up = tuple(
        Tensor(f"{source}.experts.{expert}.{name}.weight", (inner, width))
        for expert in range(num)
        for name in ("gate_proj", "up_proj")
    )
    down = tuple(
        Tensor(f"{source}.experts.{expert}.down_proj.weight", (width, inner))
        for expert in range(num)
    )
    bias = Tensor(f"{source}.gate.e_score_correction_bias", (num,))
    shared = f"{source}.shared_experts"
    return [
        Parameter((*at, "router_XD"), (Tensor(f"{source}.gate.weight", (num, width)),), wide=True),
        *([Parameter((*at, "bias_X"), (bias,), wide=True)] if config.expert_bias else []),
        Parameter((*at, "gate_up_ZDO"), gate_up, abreast=2),
        Parameter((*at, "down_ZFD"), down, abreast=1),
        *(_mlp(width, config.shared_width, (*at, "shared"), shared) if config.shared_width else []),
    ]


def _vision(config: VisionConfig) -> list[Parameter]:
    width, size = config.width, config.patch_size
    patch = Tensor("vision.patch_embed.proj.weight", (width, config.in_channels, size, size))
    positions = Tensor("vision.pos_embed", (1, config.tile_side**2, width))
    table = [
        Parameter(("vision", "patch_EU"), (patch,)),
        Parameter(("vision", "patch_E"), (Tensor("vision.patch_embed.proj.bias", (width,)),)),
        Parameter(("vision", "positions_1XE"), (positions,), flat=False),
        *layer_norm(("vision",), "", "vision.norm", width),
    ]
    for layer in range(config.depth):
        at: ParameterPath = ("vision", "layers", layer)
        block = f"vision.blocks.{layer}"
        table += [
            *layer_norm(at, "attn_", f"{block}.norm1", width),
            *attention(at, f"{block}.attn", width),
            *layer_norm(at, "mlp_", f"{block}.norm2", width),
            *linear(at, "up_FE", "up_F", f"{block}.mlp.fc1", (config.mlp_width, width)),
            *linear(at, "down_EF", "down_E", f"{block}.mlp.fc2", (width, config.mlp_width)),
        ]
    return [*table, *_projector(config)]


def _projector(config: VisionConfig) -> list[Parameter]:
    merged, width = config.width * config.merged_patches, config.out_width
    marks = {"line_end_D": "image_newline", "separator_D": "view_seperator"}  # their spelling
    at: ParameterPath = ("vision",)
    return [
        *linear(at, "hidden_DX", "hidden_D", "projector.layers.0", (width, merged)),
        *linear(at, "out_DD", "out_D", "projector.layers.2", (width, width)),
        *(Parameter((*at, name), (Tensor(source, (width,)),)) for name, source in marks.items()),
    ]
