"""Pictures of Qwen3-VL are processed as Qwen2-VL's, with settings of their own. Host only."""

from jaxmm.models.qwen2_vl.processor import ImageProcessor

__all__ = ["ImageProcessor"]
