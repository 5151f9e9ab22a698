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


def read_processor_table(directory: Path, modality: str = "image") -> dict[str, Any] | None:
    """Settings of a checkpoint's image or video processor, wherever they are; None: nowhere.

    In a file of their own, or in the one that transformers 5 writes for a whole processor.

    Raises:
        ModelError: A file holds no JSON object.
    """
    own = {"image": "preprocessor_config.json", "video": "video_preprocessor_config.json"}
    for name, key in ((own[modality], ""), ("processor_config.json", f"{modality}_processor")):
        if (directory / name).is_file():
            table = read_json(directory / name)
            found = table.get(key) if key else table
            if isinstance(found, dict):
                return found
    return None
