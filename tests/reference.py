"""transformers as the judge: the same pictures and messages through its own processor and model.

Only what it needs of a processor is used: the image processor's pixel values and the chat
template. The ids are expanded here, by the published rule, independently of jaxmm. A video is given
as the frames that the model sees; its pixel values are put together from those of its frames as
pictures, because transformers' video processors need torchvision.
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
def load(directory: Path) -> tuple[Any, Any, Any]:
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    processor = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
    return model, tokenizer, processor


def greedy(
    directory: Path,
    messages: Any,
    images: Sequence[Image.Image],
    num_tokens: int,
    *,
    max_pixels: int,
    videos: Sequence[Sequence[Image.Image]] = (),
    fps: float = 2.0,
) -> tuple[list[int], np.ndarray]:
    """Greedy answer.

    Args:
        videos: An even number of frames each.
        fps: Frames a second of the videos.

    Returns:
        Token ids, and float32[num_tokens, V]: log-probabilities of every step.
    """
    model, tokenizer, _ = load(directory)
    ids, inputs = expanded(
        directory, messages, images, max_pixels=max_pixels, videos=videos, fps=fps
    )
    return generate(model, tokenizer, ids, inputs, num_tokens)


def generate(
    model: Any, tokenizer: Any, ids: torch.Tensor, inputs: dict[str, Any], num_tokens: int
) -> tuple[list[int], np.ndarray]:
    """Greedy answer to ids [1, T], as `greedy`."""
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


def expanded(
    directory: Path,
    messages: Any,
    images: Sequence[Image.Image],
    *,
    max_pixels: int,
    videos: Sequence[Sequence[Image.Image]] = (),
    fps: float = 2.0,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Ids [1, T] with a token for each row, and the model's other arguments; as `greedy`."""
    model, tokenizer, processor = load(directory)
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
    if videos:
        text, clips = with_videos(model, tokenizer, processor, text, videos, fps, max_pixels)
        inputs |= clips
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    kinds = (ids == model.config.image_token_id) + 2 * (ids == model.config.video_token_id)
    inputs["mm_token_type_ids"] = kinds.int()
    return ids, inputs


def with_videos(
    model: Any,
    tokenizer: Any,
    processor: Any,
    text: str,
    videos: Sequence[Sequence[Image.Image]],
    fps: float,
    max_pixels: int,
) -> tuple[str, dict[str, Any]]:
    """The text with every video's tokens, and the model's arguments for the videos."""
    pad = tokenizer.convert_ids_to_tokens(model.config.video_token_id)
    pieces = text.split(pad)
    assert len(pieces) == len(videos) + 1
    values, grids, text = [], [], pieces[0]
    for frames, piece in zip(videos, pieces[1:], strict=True):
        pixels, (_, height, width) = _video_pixels(processor, frames, max_pixels)
        values.append(pixels)
        grids.append((len(frames) // 2, height, width))
        run = pad * (height * width // 4)
        if model.config.model_type.startswith("qwen3"):
            for i in range(0, len(frames), 2):
                seconds = (i / fps + (i + 1) / fps) / 2
                text += f"<{seconds:.1f} seconds><|vision_start|>{run}<|vision_end|>"
        else:
            text += run * (len(frames) // 2)
        text += piece
    arguments: dict[str, Any] = {
        "pixel_values_videos": torch.tensor(np.concatenate(values)),
        "video_grid_thw": torch.tensor(grids),
    }
    if model.config.model_type == "qwen2_5_vl":
        arguments["second_per_grid_ts"] = [2 / fps] * len(videos)
    return text, arguments


def _video_pixels(
    processor: Any, frames: Sequence[Image.Image], max_pixels: int
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Patches of each pair of frames, columns channel, time, y, x."""
    size = {"shortest_edge": processor.size["shortest_edge"], "longest_edge": max_pixels}
    out = processor(images=list(frames), return_tensors="np", size=size)
    side = processor.patch_size**2
    # a picture is the same frame twice: of the first frame its first half, of the second its second
    halves = out["pixel_values"].reshape(len(frames), -1, 3, 2, side)
    pairs = np.stack([halves[::2, :, :, 0], halves[1::2, :, :, 1]], axis=3)
    return pairs.reshape(-1, 3 * 2 * side), tuple(map(int, out["image_grid_thw"][0]))
