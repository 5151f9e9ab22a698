"""Qwen3-VL, dense and with experts. Host only."""

MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe")
