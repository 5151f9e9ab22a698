"""Write the trained model in the files of a published Qwen2.5-VL checkpoint.

`python export.py --state DIR --out DIR`
"""

import argparse
from pathlib import Path

import model as model_file
import numpy as np
import tokenizer as tokenizer_file
import torch
from model import MEAN, STD
from safetensors.torch import save_file
from tokenizer import dump

MIN_PIXELS, MAX_PIXELS = 3136, 451584  # 56x56 to twice 672x336


def config_json(config: dict, ids: dict[str, int]) -> dict:
    text = {k: v for k, v in config.items() if k not in ("vision", "mrope_section")}
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "max_window_layers": config["num_hidden_layers"],
        "model_type": "qwen2_5_vl",
        "sliding_window": 4096,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.41.2",
        "use_cache": True,
        **text,
        "rope_scaling": {"type": "mrope", "mrope_section": config["mrope_section"]},
        "vision_config": {
            **config["vision"],
            "hidden_act": "silu",
            "in_chans": 3,
            "spatial_patch_size": 14,
            "model_type": "qwen2_5_vl",
        },
    }


def write(net, folder: Path, dtype=torch.bfloat16, weights: dict | None = None) -> None:
    """All files but the card. `weights` replaces the net's own (an average, say)."""
    folder.mkdir(parents=True, exist_ok=True)
    if weights is not None:
        net.load_state_dict(weights)
    if not (folder / "tokenizer.json").exists():
        tokenizer_file.write(folder)
    tokenizer = tokenizer_file.load(folder)
    ids = {s: tokenizer.token_to_id(s) for s in tokenizer_file.SPECIALS}
    dump(folder / "config.json", config_json(net.config, ids))
    dump(
        folder / "generation_config.json",
        {
            "bos_token_id": ids["<|endoftext|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "do_sample": False,
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "transformers_version": "4.41.2",
        },
    )
    dump(
        folder / "preprocessor_config.json",
        {
            "min_pixels": MIN_PIXELS,
            "max_pixels": MAX_PIXELS,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": list(MEAN),
            "image_std": list(STD),
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
        },
    )
    save_file(
        {k: v.to(dtype) for k, v in model_file.published(net).items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def patches(frames: np.ndarray) -> torch.Tensor:
    """Published feature layout of uint8 frames [F, H, W, 3] (one frame is doubled): float32
    [N, 1176].
    """
    if len(frames) == 1:
        frames = np.repeat(frames, 2, axis=0)
    x = (torch.from_numpy(frames).float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    f, h, w, _ = x.shape
    x = x.reshape(f // 2, 2, h // 28, 2, 14, w // 28, 2, 14, 3).permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return x.reshape(-1, 3 * 2 * 14 * 14)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    state, out = Path(args.state), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for name in tokenizer_file.FILES:
        (out / name).write_bytes((state / "tokenizer" / name).read_bytes())
    saved = torch.load(state / "state.pt", weights_only=False)
    write(model_file.Model(), out, weights=saved["average"])
    for path in out.iterdir():
        path.chmod(0o644)
    print(f"step {saved['step']}, {sum(p.stat().st_size for p in out.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
