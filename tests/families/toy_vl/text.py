"""Toy: the text decoder is Qwen2-VL's. Traced."""

from jaxmm.models.qwen2_vl.text import TextDecoder

__all__ = ["TextDecoder"]
