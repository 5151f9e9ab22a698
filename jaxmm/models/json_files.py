"""The JSON files of a checkpoint. Host only."""

import json
from pathlib import Path
from typing import Any

from jaxmm.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelError: The file is missing or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{str(path)!r} does not exist; is it a checkpoint directory?") from None
    except ValueError as e:
        raise ModelError(f"{str(path)!r} is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise ModelError(f"{str(path)!r} holds a {type(value).__name__}, not an object")
    return value
