"""Three small random checkpoints of DeepSeek-VL2, and what the authors' own implementation gives.

`tests/data/deepseek_vl2/` has a folder for each form of the decoder: `mha` (plain attention, that
of the Tiny model), `mla` (compressed keys and values, softmax router: Small) and `noaux` (the same
with a sigmoid router and a correction bias). Tiles are 72 pixels wide in place of 384, by the same
rules. `cases.json` and `arrays.npz` hold conversations, their expanded ids, tiles, image rows,
logits and sixteen greedy tokens, computed in float32 on a CPU; transformers has no such model.
"""

import functools
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

Variant = Literal["mha", "mla", "noaux"]

VARIANTS: tuple[Variant, ...] = ("mha", "mla", "noaux")
FOLDER = Path(__file__).parent / "data" / "deepseek_vl2"
CASES = tuple(json.loads((FOLDER / "mha" / "cases.json").read_text(encoding="utf-8")))
PICTURES = FOLDER / "pictures"
_ROLES = {"<|User|>": "user", "<|Assistant|>": "assistant"}


@functools.cache
def cases(variant: Variant) -> dict[str, Any]:
    """By name: `messages`, `images`, `n_tokens` and `greedy`."""
    data: dict[str, Any] = json.loads((FOLDER / variant / "cases.json").read_text(encoding="utf-8"))
    return data


@functools.cache
def arrays(variant: Variant) -> dict[str, np.ndarray]:
    """By `case/what`; tiles are the same for all three and with `mha`."""
    with np.load(FOLDER / variant / "arrays.npz") as file:
        return dict(file)


def conversation(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages as jaxmm takes them, the open turn of the assistant left out."""
    turns = [m for m in case["messages"] if m["content"] or m["role"] != "<|Assistant|>"]
    return [{"role": _ROLES[turn["role"]], "content": parts_of(turn["content"])} for turn in turns]


def parts_of(content: str) -> list[dict[str, str]]:
    """A text in which `<image>` stands for a picture, as parts."""
    parts: list[dict[str, str]] = []
    for index, text in enumerate(content.split("<image>")):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def pictures(case: dict[str, Any]) -> list[Image.Image]:
    """Decoded, RGB."""
    return [Image.open(PICTURES / f"{name}.png").convert("RGB") for name in case["images"]]
