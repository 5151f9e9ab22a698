"""transformers' models with rows of a video dropped by hand: the judge of pruning.

The mask is chosen here by the paper's rule in torch, the positions are transformers' own of the
whole prompt, and what is dropped is dropped from all of them alike. Nothing is cached: each token
is computed from the whole prompt again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.reference import load, with_videos

MIN_GAP = 1e-4
"""Between the scores of the last row that is kept and the first that is not: no rounding may
decide."""


def pruned_greedy(
    directory: Path,
    messages: Any,
    frames: Sequence[Image.Image],
    rate: float,
    num_tokens: int,
    *,
    max_pixels: int,
    fps: float = 2.0,
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Greedy answer to a prompt with one video.

    Returns:
        Token ids, float32[num_tokens, V] log-probabilities, and bool[T, M]: rows that were kept.
    """
    model, tokenizer, processor = load(directory)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    text, clip = with_videos(model, tokenizer, processor, text, [frames], fps, max_pixels)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    is_video = ids[0] == model.config.video_token_id
    with torch.no_grad():
        features = model.model.get_video_features(
            clip["pixel_values_videos"], clip["video_grid_thw"]
        )
        rows = features.pooler_output[0]
        kept = choose(rows.reshape(len(frames) // 2, -1, rows.shape[-1]), rate)
        stays = torch.ones(len(is_video), dtype=torch.bool)
        stays[is_video] = kept.reshape(-1)
        positions, _ = model.model.get_rope_index(
            input_ids=ids,
            mm_token_type_ids=(2 * is_video[None]).int(),
            video_grid_thw=clip["video_grid_thw"],
            **{k: torch.tensor(v) for k, v in clip.items() if k == "second_per_grid_ts"},
        )
        hidden = model.get_input_embeddings()(ids)
        hidden[0, is_video] = rows
        extras: dict[str, Any] = {}
        if getattr(features, "deepstack_features", None):
            extras["visual_pos_masks"] = is_video[stays][None]
            extras["deepstack_visual_embeds"] = [
                level[0][kept.reshape(-1)] for level in features.deepstack_features
            ]
        following = int(positions.max()) + 1
        return (
            *_answer(
                model,
                hidden[:, stays],
                positions[:, :, stays],
                following,
                num_tokens,
                len(tokenizer),
                extras,
            ),
            kept.numpy(),
        )


def choose(rows: torch.Tensor, rate: float) -> torch.Tensor:
    """bool[T, M] of rows [T, M, D], the paper's rule."""
    num_steps, step_rows, _ = rows.shape
    change = 1 - torch.nn.functional.cosine_similarity(rows[1:], rows[:-1], dim=-1)
    scores = torch.cat([torch.full((1, step_rows), 255.0), change]).reshape(-1)
    count = max(step_rows, int(num_steps * step_rows * (1 - rate)))
    order = torch.argsort(scores, descending=True, stable=True)
    if count < len(order):
        assert scores[order[count - 1]] - scores[order[count]] > MIN_GAP
    kept = torch.zeros(len(scores), dtype=torch.bool)
    kept[order[:count]] = True
    return kept.reshape(num_steps, step_rows)


def _answer(
    model: Any,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    following: int,
    num_tokens: int,
    vocabulary: int,
    extras: dict[str, Any],
) -> tuple[list[int], np.ndarray]:
    answer: list[int] = []
    scores = []
    for step in range(num_tokens):
        out = model.model.language_model(
            inputs_embeds=hidden, position_ids=positions, use_cache=False, **extras
        )
        logits = model.lm_head(out.last_hidden_state[:, -1])[0]
        logits[vocabulary:] = -torch.inf
        scores.append(torch.log_softmax(logits, -1).numpy())
        answer.append(int(scores[-1].argmax()))
        token = torch.tensor([[answer[-1]]])
        hidden = torch.cat([hidden, model.get_input_embeddings()(token)], dim=1)
        after = torch.full((3, 1, 1), following + step)
        positions = torch.cat([positions, after], dim=2)
        if "visual_pos_masks" in extras:
            text = torch.zeros(1, 1, dtype=torch.bool)
            extras["visual_pos_masks"] = torch.cat([extras["visual_pos_masks"], text], dim=1)
    return answer, np.stack(scores)
