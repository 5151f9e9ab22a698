"""Small random directories of every Qwen family in the files that published ones have.

`checkpoint("qwen2_vl")` writes one on first use and keeps it until the process ends. The weights
are made by transformers' own classes, so their names and shapes are those of the real thing; the
vocabulary is a byte-level BPE, so any text can be encoded. Needs torch.
"""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import Regex as TokenizerRegex
from tokenizers.trainers import BpeTrainer

Family = Literal[
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "deepseek_vl2_mha",
    "deepseek_vl2_mla",
    "deepseek_vl2_noaux",
    "gemma3",
]
Prefixes = Literal["published", "module"]
"""Generation of tensor names: `visual.*` and `model.*`, or `model.visual.*` and
`model.language_model.*`."""

ARCHITECTURES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
FAMILIES: tuple[Family, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Those that transformers has, and that are made here."""
SERVED: tuple[Family, ...] = (*FAMILIES, "deepseek_vl2_mla")
"""With the one that lies in `tests/data`, see `tests/deepseek.py`."""
_STORED: dict[str, Path] = {
    f"deepseek_vl2_{variant}": Path(__file__).parent / "data" / "deepseek_vl2" / variant
    for variant in ("mha", "mla", "noaux")
}
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCAB_SIZE = 512
"""Embedding rows; the tokenizer knows fewer, as in the published files."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_WIDE_ROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}

_CORPUS = (
    "what is in the picture and how many cats are there in the image",
    "describe the left part of the photograph in one short sentence please",
    "the answer is that there are two dogs and one red house",
)
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def checkpoint(
    family: Family,
    *,
    tied: bool = False,
    prefixes: Prefixes = "published",
    shards: int = 1,
    dtype: str = "float32",
    seed: int = 0,
    wide: bool = False,
    num_kv_heads: int = 2,
) -> Path:
    """Give the directory of a tiny checkpoint; equal arguments give the same directory.

    The files must not be changed: copy the directory, or call `write_checkpoint`. Of a family that
    is stored, and of Gemma 3, the other arguments are not read.
    """
    if family in _STORED:
        return _STORED[family]
    directory = Path(tempfile.mkdtemp(prefix=f"{family}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    if family == "gemma3":
        from tests.gemma import write_gemma  # which needs this module

        write_gemma(directory)
        return directory
    write_checkpoint(
        directory,
        family,
        tied=tied,
        prefixes=prefixes,
        shards=shards,
        dtype=dtype,
        seed=seed,
        wide=wide,
        num_kv_heads=num_kv_heads,
    )
    return directory


def write_checkpoint(
    directory: Path,
    family: Family,
    *,
    tied: bool = False,
    prefixes: Prefixes = "published",
    shards: int = 1,
    dtype: str = "float32",
    seed: int = 0,
    wide: bool = False,
    num_kv_heads: int = 2,
) -> None:
    """Write config, weights, tokenizer and processor files into an existing directory.

    Args:
        wide: The decoder's heads have 128 channels, those of the published models, and the
            encoder's together fill 128 lanes; of the Qwen2 families.
        num_kv_heads: Of 4 query heads.
    """
    tokenizer = byte_tokenizer()
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    config = published_config(family, ids, tied=tied)
    config.get("text_config", config)["num_key_value_heads"] = num_kv_heads
    if wide:
        config |= {"hidden_size": 512, "rope_scaling": _WIDE_ROPE}
        sizes = ("hidden_size", "out_hidden_size")
        inner, outer = sizes if family == "qwen2_5_vl" else ("embed_dim", "hidden_size")
        config["vision_config"] |= {inner: 128, outer: 512}
    write_json(directory / "config.json", config)
    write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
        },
    )
    write_processor(directory, family)
    write_tokenizer(directory, tokenizer)
    weights = _random_weights(directory, tied=tied, prefixes=prefixes, dtype=dtype, seed=seed)
    write_weights(directory, weights, shards)


def published_config(family: Family, ids: dict[str, int], *, tied: bool) -> dict[str, Any]:
    """config.json in the form of the published files."""
    if family.startswith("qwen3"):
        return _nested_config(family, ids, tied=tied)
    vision = {
        "qwen2_vl": {"depth": 2, "embed_dim": 64, "hidden_size": 64, "mlp_ratio": 4},
        "qwen2_5_vl": {
            "depth": 3,
            "hidden_size": 64,
            "out_hidden_size": 64,
            "intermediate_size": 96,
            "fullatt_block_indexes": [1],
            "window_size": 112,
            "tokens_per_second": 2,
        },
    }[family]
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        **_vision_ids(ids),
        "torch_dtype": "float32",
        "vision_config": {"num_heads": 4, "in_chans": 3, "spatial_patch_size": 14, **vision},
    }


def _nested_config(family: Family, ids: dict[str, int], *, tied: bool) -> dict[str, Any]:
    """Qwen3-VL: heads wider than the width's share, three deepstack levels, three layers."""
    text = {
        "model_type": f"{family}_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_theta": 5000000.0,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": [6, 3, 3],
        },
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "dtype": "float32",
    }
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "tie_word_embeddings": tied,
    }
    return {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "tie_word_embeddings": tied,
        **_vision_ids(ids),
        "text_config": text | (experts if family == "qwen3_vl_moe" else {}),
        "vision_config": {
            "model_type": family,
            "depth": 4,
            "hidden_size": 64,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 96,
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1, 3],
        },
    }


def _vision_ids(ids: dict[str, int]) -> dict[str, int]:
    return {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }


def _random_weights(
    directory: Path, *, tied: bool, prefixes: Prefixes, dtype: str, seed: int
) -> dict[str, torch.Tensor]:
    """Every tensor by its name in the file; of a size that keeps activations near one."""
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    return {
        name
        if prefixes == "module" or config.model_type.startswith("qwen3")
        else published_name(name): _published_tensor(
            name, _random_tensor(name, tuple(parameter.shape), generator)
        ).to(getattr(torch, dtype))
        for name, parameter in model.named_parameters()
        if not (tied and name == "lm_head.weight")
    }


def _published_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Experts are published with inputs before outputs, and held the other way round."""
    return tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return 0.1 * noise
    if len(shape) == 1:
        return 1.0 + 0.1 * noise
    if "embed_tokens" in name or "pos_embed" in name:
        return noise
    if ".experts." in name:
        return noise * shape[2] ** -0.5
    return noise * torch.Size(shape[1:]).numel() ** -0.5


def published_name(name: str) -> str:
    """Name in the published files of a parameter of transformers' class."""
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "model.", 1)


def write_weights(directory: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    """Write one file, or several with their index."""
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    write_json(directory / "model.safetensors.index.json", index)


def write_processor(directory: Path, family: Family) -> None:
    """Write preprocessor_config.json with the published values."""
    if family.startswith("qwen3"):
        _write_half_processor(directory)
        return
    write_json(
        directory / "preprocessor_config.json",
        {
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": {
                "qwen2_vl": "Qwen2VLProcessor",
                "qwen2_5_vl": "Qwen2_5_VLProcessor",
            }[family],
        },
    )


def _write_half_processor(directory: Path) -> None:
    """Qwen3-VL's; its lower limit of 65536 pixels would make every test picture 64 tokens."""
    write_json(
        directory / "preprocessor_config.json",
        {
            "size": {"longest_edge": 16777216, "shortest_edge": 4096},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
        },
    )


@functools.cache
def byte_tokenizer(corpus: tuple[str, ...] = _CORPUS, vocab_size: int = 320) -> Tokenizer:
    """Byte-level BPE of at most so many entries; the special tokens follow the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(TokenizerRegex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """Write the tokenizer, old and new files, with the chat template."""
    tokenizer.save(str(directory / "tokenizer.json"))
    model = json.loads(tokenizer.to_str())["model"]
    write_json(directory / "vocab.json", model["vocab"])
    merges = "".join(" ".join(merge) + "\n" for merge in model["merges"])
    (directory / "merges.txt").write_text("#version: 0.2\n" + merges, encoding="utf-8")
    write_json(directory / "chat_template.json", {"chat_template": CHAT_TEMPLATE})
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_prefix_space": False,
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "model_max_length": 32768,
            "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_json(path: Path, value: Any) -> None:
    """Write a value as people read it."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
