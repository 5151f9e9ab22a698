"""Prove the lean forward equal to transformers' Qwen2.5-VL on random weights: `python check.py`."""

import random
import tempfile
from pathlib import Path

import batches
import export
import model as model_file
import samples
import scenes
import tokenizer as tokenizer_file
import torch
from losses import net_logits
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

TOLERANCE = 2e-4  # float32 against float32, another order of sums


def compare(folder: Path, net, seed: int = 0) -> float:
    """Largest difference of the logits of the label positions over several layouts, published model
    against lean one.
    """
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    encoder = batches.Encoder(tokenizer_file.load(folder))
    rng, worst = random.Random(seed), 0.0
    for kind, largest in (("one", 10**9), ("one", 10**9), ("two", 10**9), ("clip", 10**9)):
        layout = scenes.pick_layout(rng, kind, largest)
        if kind == "one":
            layout = scenes.Layout((rng.choice(((336, 224), (140, 168), (224, 56))),))
        sample = samples.make_sample(rng, layout)
        talk = max(sample.talks, key=len)
        prompt = batches.build(sample, layout, [talk], encoder, question_first=False)
        batch = batches.collate(layout, [sample], [prompt])
        worst = max(
            worst, (lean_logits(net, batch) - reference_logits(reference, batch)).abs().max().item()
        )
    return worst


@torch.no_grad()
def lean_logits(net, batch):
    return net_logits(net, batch)[0]


@torch.no_grad()
def reference_logits(reference, batch):
    layout, frames = batch.layout, max(1, batch.layout.frames // 2)
    values, grids = [], []
    for slot, (w, h) in zip(batch.pictures, layout.sizes, strict=True):
        values.append(export.patches(slot[0]))
        grids.append([frames, h // 14, w // 14])
    key = "video" if layout.frames else "image"
    n = int((batch.branch[0] >= 0).sum())
    inputs = {
        "pixel_values" + ("_videos" if layout.frames else ""): torch.cat(values),
        f"{key}_grid_thw": torch.tensor(grids),
    }
    ids = torch.from_numpy(batch.ids[:, :n])
    out = reference(
        input_ids=ids,
        position_ids=torch.from_numpy(batch.positions[:, :, :n]),
        use_cache=False,
        **inputs,
    )
    return out.logits[0][torch.from_numpy(batch.wanted)]


def main() -> None:
    torch.manual_seed(0)
    net = model_file.Model()
    for p in net.parameters():
        if p.ndim == 1:
            p.data += 0.1 * torch.randn_like(p)  # biases and norms that matter
    with tempfile.TemporaryDirectory() as folder:
        export.write(net, Path(folder), torch.float32)
        AutoTokenizer.from_pretrained(folder)
        worst = compare(Path(folder), net)
    print(f"largest difference of logits {worst:.2e}")
    if worst > TOLERANCE:
        raise SystemExit("the lean forward differs from transformers")


if __name__ == "__main__":
    main()
