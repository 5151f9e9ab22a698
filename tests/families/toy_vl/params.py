"""Toy: which tensors of a checkpoint make up which parameter. Host only."""

from jaxmm.models.config import ModelConfig
from jaxmm.models.loading import Parameter, Tensor
from jaxmm.models.qwen2_vl.params import published_name, text_parameters

__all__ = ["parameters", "published_name"]


def parameters(config: ModelConfig) -> list[Parameter]:
    """The decoder's, and the two matrices of the encoder."""
    vision = config.vision
    patch = Tensor("visual.patch.weight", (vision.width, vision.patch_values))
    merge = Tensor("visual.merge.weight", (vision.out_width, 4 * vision.width))
    return [
        Parameter(("vision", "patch_EU"), (patch,)),
        Parameter(("vision", "merge_DX"), (merge,)),
        *text_parameters(config.text),
    ]
