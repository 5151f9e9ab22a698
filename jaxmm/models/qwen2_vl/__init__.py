"""Qwen2-VL. Host only."""

MODEL_TYPES = ("qwen2_vl",)
