"""transformers as the judge: the same pictures and messages through its own processor and model.

Only what it needs of a processor is used: the image processor's pixel values and the chat
template. The ids are expanded here, by the published rule, independently of jaxmm.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image


@functools.cache
def _load(directory: Path) -> tuple[Any, Any, Any]:
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    processor = transformers.AutoImageProcessor.from_pretrained(directory, use_fast=False)
    return model, tokenizer, processor


def greedy(
    directory: Path,
    messages: Any,
    images: Sequence[Image.Image],
    num_tokens: int,
    *,
    max_pixels: int,
) -> tuple[list[int], np.ndarray]:
    """Greedy answer.

    Returns:
        Token ids, and float32[num_tokens, V]: log-probabilities of every step.
    """
    model, tokenizer, processor = _load(directory)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pad = tokenizer.convert_ids_to_tokens(model.config.image_token_id)
    inputs: dict[str, Any] = {}
    if images:
        size = {"shortest_edge": processor.size["shortest_edge"], "longest_edge": max_pixels}
        features = processor(images=list(images), return_tensors="np", size=size)
        grids = features["image_grid_thw"]
        inputs = {
            "pixel_values": torch.tensor(features["pixel_values"]),
            "image_grid_thw": torch.tensor(grids),
        }
        pieces = text.split(pad)
        counts = [int(np.prod(grid)) // 4 for grid in grids]
        assert len(pieces) == len(counts) + 1
        text = pieces[0] + "".join(
            pad * n + piece for n, piece in zip(counts, pieces[1:], strict=True)
        )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            suppress_tokens=list(range(len(tokenizer), model.config.text_config.vocab_size)),
            **inputs,
        )
    scores = torch.stack([torch.log_softmax(s[0], -1) for s in out.scores])
    return out.sequences[0, ids.shape[1] :].tolist(), scores.numpy()
