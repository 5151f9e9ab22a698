"""A small random Gemma 3 checkpoint in the published form, and transformers' answer on it.

Pictures have 16 rows, sliding layers see 12 tokens: fewer than a picture has. Needs torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from tests import reference
from tests.checkpoints import byte_tokenizer, write_json, write_weights

TOKENS_PER_PICTURE = 16
WINDOW = 12
_SPECIAL = (
    "<bos>",
    "<eos>",
    "<pad>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
)
_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
{%- if message.content is string -%}
{{- message.content | trim -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<start_of_image>' -}}
{%- elif 'text' in part -%}
{{- part.text | trim -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""


def write_gemma(directory: Path, *, module_names: bool = False, seed: int = 0) -> None:
    """Write config, weights, tokenizer and processor files into an existing directory.

    Args:
        module_names: Tensors are named as transformers 5 holds them, not as published.
    """
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    ids = {token: tokenizer.token_to_id(token) for token in _SPECIAL}
    write_json(directory / "config.json", _config(ids))
    write_json(
        directory / "generation_config.json",
        {"eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]], "pad_token_id": ids["<pad>"]},
    )
    write_json(
        directory / "preprocessor_config.json",
        {
            "do_pan_and_scan": None,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_processor_type": "Gemma3ImageProcessor",
            "resample": 2,
            "size": {"height": 112, "width": 112},
        },
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "chat_template": _TEMPLATE,
        },
    )
    write_weights(directory, _weights(directory, module_names, seed), 1)


def _config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
        "eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]],
        "mm_tokens_per_image": TOKENS_PER_PICTURE,
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "max_position_embeddings": 32768,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 64,
            "image_size": 112,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "patch_size": 7,
            "vision_use_head": False,
        },
        "torch_dtype": "float32",
    }


def _weights(directory: Path, module_names: bool, seed: int) -> dict[str, torch.Tensor]:
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    return {
        name if module_names else _published_name(name): _random(
            name, tuple(parameter.shape), generator
        )
        for name, parameter in model.named_parameters()
        if name != "lm_head.weight"
    }


def _published_name(name: str) -> str:
    name = name.replace("model.language_model.", "language_model.model.")
    name = name.replace("model.vision_tower.", "vision_tower.vision_model.")
    return name.replace("model.multi_modal_projector.", "multi_modal_projector.")


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("bias") or (len(shape) == 1 and "vision_tower" not in name):
        return 0.1 * noise  # Gemma's norms multiply by 1 plus their weight
    if len(shape) == 1:
        return 1.0 + 0.1 * noise
    if "embed_tokens" in name or "position_embedding" in name:
        return noise
    fan_in = shape[0] if "mm_input_projection" in name else torch.Size(shape[1:]).numel()
    return noise * fan_in**-0.5


def gemma_greedy(
    directory: Path, messages: Any, images: Sequence[Image.Image], num_tokens: int
) -> tuple[list[int], np.ndarray]:
    """transformers' greedy answer: ids, and float32[num_tokens, V] log-probabilities."""
    model, tokenizer, processor = reference.load(directory)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    soft = "<image_soft_token>" * TOKENS_PER_PICTURE
    text = text.replace("<start_of_image>", f"\n\n<start_of_image>{soft}<end_of_image>\n\n")
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    is_picture = ids == model.config.image_token_id
    inputs: dict[str, Any] = {"token_type_ids": is_picture.int()}
    if images:
        pixels = processor(images=list(images), return_tensors="np")["pixel_values"]
        inputs["pixel_values"] = torch.tensor(np.asarray(pixels))
    return reference.generate(model, tokenizer, ids, inputs, num_tokens)
