"""Writes the checkpoint of the benchmarks: Qwen2.5-VL with random weights, the same every time.

    python -m tests.bench.make_checkpoint DIR [--size tiny] [--vocab-size 151936] [--seed 0]

108 M parameters, or 224 M with the published vocabulary; `--size tiny` is for trying a
benchmark out. All weights are bfloat16 numbers, so that every engine has the same ones in whatever
dtype it computes. `--vocab-size` adds embedding rows that no text uses: the head then costs what it
costs in the published models. These rows are zero and never win a greedy choice.
Needs torch.
"""

import argparse
import zlib
from pathlib import Path

import torch
import transformers

from tests.bench.workloads import ANSWERS, QUESTIONS, WORDS
from tests.checkpoints import (
    SPECIAL_TOKENS,
    byte_tokenizer,
    published_config,
    published_name,
    write_json,
    write_processor,
    write_tokenizer,
    write_weights,
)

TEXT = {
    "small": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    },
}
VISION = {
    "small": {
        "depth": 8,
        "hidden_size": 512,
        "num_heads": 8,
        "intermediate_size": 1368,
        "fullatt_block_indexes": [3, 7],
        "out_hidden_size": 768,
    },
    "tiny": {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 128,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 64,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=sorted(TEXT), default="small")
    parser.add_argument("--vocab-size", type=int, default=1024, metavar="ROWS")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    num_weights = write(chosen.directory, chosen.size, chosen.vocab_size, chosen.seed)
    print(f"{chosen.directory}: {num_weights / 1e6:.1f} M parameters")


def write(directory: Path, size: str, vocab_size: int, seed: int) -> int:
    """Write all files; give the number of parameters."""
    tokenizer = byte_tokenizer((" ".join(WORDS), *QUESTIONS, *ANSWERS) * 4, 900)
    num_ids = tokenizer.get_vocab_size()
    if vocab_size < num_ids:
        raise SystemExit(f"--vocab-size {vocab_size} is below the tokenizer's {num_ids} ids")
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    config = published_config("qwen2_5_vl", ids, tied=True)
    config |= TEXT[size] | {"vocab_size": vocab_size, "torch_dtype": "bfloat16"}
    config["vision_config"] |= VISION[size]
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    ends = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    write_json(directory / "generation_config.json", {"eos_token_id": ends, "do_sample": False})
    write_processor(directory, "qwen2_5_vl")
    write_tokenizer(directory, tokenizer)
    weights = _weights(directory, num_ids, seed)
    write_weights(directory, weights, shards=1)
    return sum(weight.numel() for weight in weights.values())


def _weights(directory: Path, num_ids: int, seed: int) -> dict[str, torch.Tensor]:
    """Every tensor by its published name; its values depend on name, shape and seed alone."""
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    weights = {}
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight":  # tied
            continue
        noise = torch.Generator().manual_seed(seed << 32 | zlib.crc32(name.encode()))
        weight = _scaled(name, torch.randn(parameter.shape, generator=noise))
        if "embed_tokens" in name:
            weight[num_ids:] = 0
        weights[published_name(name)] = weight.to(torch.bfloat16)
    return weights


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    """Give weights a size at which activations stay near one and greedy answers do not repeat."""
    if name.endswith("bias"):
        return 0.02 * noise
    if noise.dim() == 1:
        return 1 + 0.05 * noise
    if "embed_tokens" in name:
        return 0.15 * noise  # small beside what the layers add, or each token would echo itself
    scaled = noise * noise[0].numel() ** -0.5
    is_residual = name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight"))
    return 0.25 * scaled if is_residual else scaled


if __name__ == "__main__":
    main()
