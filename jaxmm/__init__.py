"""jaxmm: vision-language models served on JAX, for TPUs first.

    import jaxmm
    print(jaxmm.generate("What is in the picture?", images="cat.jpg").text)

Importing this package is cheap; jax is loaded with the first name that needs it. Host only.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmm.api import agenerate, generate
    from jaxmm.basis import default_model
    from jaxmm.config import EngineConfig, load_config
    from jaxmm.engine import Engine
    from jaxmm.errors import JaxmmError
    from jaxmm.host.grammar import json_grammar
    from jaxmm.planner.plan import plan
    from jaxmm.planner.result import Plan
    from jaxmm.request import Completion, Delta, Embeddings, Request, Result, SamplingParams, Usage
    from jaxmm.session import Session

__version__ = "0.1.0"

_HOMES = {
    "agenerate": "jaxmm.api",
    "generate": "jaxmm.api",
    "EngineConfig": "jaxmm.config",
    "load_config": "jaxmm.config",
    "Engine": "jaxmm.engine",
    "JaxmmError": "jaxmm.errors",
    "json_grammar": "jaxmm.host.grammar",
    "plan": "jaxmm.planner.plan",
    "Completion": "jaxmm.request",
    "Delta": "jaxmm.request",
    "Embeddings": "jaxmm.request",
    "Plan": "jaxmm.planner.result",
    "Request": "jaxmm.request",
    "Result": "jaxmm.request",
    "SamplingParams": "jaxmm.request",
    "Session": "jaxmm.session",
    "Usage": "jaxmm.request",
    "default_model": "jaxmm.basis",
}

__all__ = [
    "Completion",
    "Delta",
    "Embeddings",
    "Engine",
    "EngineConfig",
    "JaxmmError",
    "Plan",
    "Request",
    "Result",
    "SamplingParams",
    "Session",
    "Usage",
    "agenerate",
    "default_model",
    "generate",
    "json_grammar",
    "load_config",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxmm' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
