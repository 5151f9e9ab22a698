"""Qwen2.5-VL. Host only."""

MODEL_TYPES = ("qwen2_5_vl",)
