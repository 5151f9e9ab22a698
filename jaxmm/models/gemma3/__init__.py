"""Gemma 3 (arXiv:2503.19786). Host only."""

MODEL_TYPES = ("gemma3",)
