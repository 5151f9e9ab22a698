"""Pictures of Qwen2.5-VL are processed as Qwen2-VL's, to the last bit. Host only."""

from jaxmm.models.qwen2_vl.processor import ImageProcessor

__all__ = ["ImageProcessor"]
