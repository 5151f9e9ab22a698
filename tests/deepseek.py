"""Three small random checkpoints of DeepSeek-VL2, and what the authors' own implementation gives.

`tests/data/deepseek_vl2/` has a folder for each form of the decoder: `mha` (plain attention, that
of the Tiny model), `mla` (compressed keys and values, softmax router: Small) and `noaux` (the same
with a sigmoid router and a correction bias). Tiles are 72 pixels wide in place of 384, by the same
rules. `cases.json` and `arrays.npz` hold conversations, their expanded ids, tiles, image rows,
logits and sixteen greedy tokens, computed in float32 on a CPU; transformers has no such model.
"""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.checkpoints import Family, checkpoint, write_json

Variant = Literal["mha", "mla", "noaux"]

VARIANTS: tuple[Variant, ...] = ("mha", "mla", "noaux")
FOLDER = Path(__file__).parent / "data" / "deepseek_vl2"
CASES = tuple(json.loads((FOLDER / "mha" / "cases.json").read_text(encoding="utf-8")))
PICTURES = FOLDER / "pictures"
_ROLES = {"<|User|>": "user", "<|Assistant|>": "assistant"}


@functools.cache
def eight_experts(family: Family) -> Path:
    """The checkpoint with two further experts, six being too few for four chips; its answers are
    its own."""
    directory = Path(tempfile.mkdtemp(prefix=f"{family}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    shutil.copytree(checkpoint(family), directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["language_config"]["n_routed_experts"] = 8
    write_json(directory / "config.json", config)
    weights = load_file(directory / "model.safetensors")
    for name, tensor in list(weights.items()):
        if name.endswith("mlp.gate.weight"):  # what the first two turn away from
            weights[name] = torch.cat([tensor, -tensor[:2]])
        for old, new in (("0", "6"), ("1", "7")):
            if f".experts.{old}." in name:
                weights[name.replace(f".experts.{old}.", f".experts.{new}.")] = -tensor
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


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
