"""DeepSeek-VL2. Host only."""

MODEL_TYPES = ("deepseek_vl_v2",)
