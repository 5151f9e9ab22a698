"""A family whose dependency is not installed. Host only."""

import a_package_that_nobody_has  # noqa: F401

MODEL_TYPES = ("broken_vl",)
