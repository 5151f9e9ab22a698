"""A family of the least that a family can be: docs/adding_a_family.md builds on it. Host only."""

MODEL_TYPES = ("toy_vl",)
