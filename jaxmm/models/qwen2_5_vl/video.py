"""Videos of Qwen2.5-VL are processed as Qwen2-VL's, with times in seconds. Host only."""

from jaxmm.models.qwen2_vl.video import VideoProcessor

__all__ = ["VideoProcessor"]
