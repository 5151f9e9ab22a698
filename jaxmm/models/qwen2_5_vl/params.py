"""Qwen2.5-VL: which tensors of a checkpoint make up which parameter. Host only.

The decoder and the names' two generations are Qwen2-VL's; the encoder has RMS norms and a gated
MLP.
"""

from jaxmm.models.config import ModelConfig, VisionConfig
from jaxmm.models.loading import Parameter, ParameterPath, Tensor
from jaxmm.models.qwen2_vl.params import (
    attention,
    linear,
    merger_mlp,
    patch_embedding,
    published_name,
    stacked,
    text_parameters,
)

__all__ = ["parameters", "published_name"]


def parameters(config: ModelConfig) -> list[Parameter]:
    """The whole table of a Qwen2.5-VL checkpoint."""
    return [*_vision_parameters(config.vision), *text_parameters(config.text)]


def _vision_parameters(config: VisionConfig) -> list[Parameter]:
    table = [patch_embedding(config)]
    for layer in range(config.depth):
        table += _vision_layer(config, layer)
    norm = Tensor("visual.merger.ln_q.weight", (config.width,))
    return [*table, Parameter(("vision", "merger", "norm_E"), (norm,)), *merger_mlp(config)]


def _vision_layer(config: VisionConfig, layer: int) -> list[Parameter]:
    width, mlp_width = config.width, config.mlp_width
    gate_up = {"gate_proj": mlp_width, "up_proj": mlp_width}
    at: ParameterPath = ("vision", "layers", layer)
    block = f"visual.blocks.{layer}"
    return [
        Parameter((*at, "attn_norm_E"), (Tensor(f"{block}.norm1.weight", (width,)),)),
        *attention(at, f"{block}.attn", width),
        Parameter((*at, "mlp_norm_E"), (Tensor(f"{block}.norm2.weight", (width,)),)),
        Parameter(
            (*at, "gate_up_2FE"), stacked(f"{block}.mlp", "weight", gate_up, (width,)), parts=2
        ),
        Parameter((*at, "gate_up_2F"), stacked(f"{block}.mlp", "bias", gate_up), parts=2),
        *linear(at, "down_EF", "down_E", f"{block}.mlp.down_proj", (width, mlp_width)),
    ]
