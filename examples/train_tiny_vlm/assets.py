"""Write what ships beside the weights: card, sample pictures, fixed test pictures.

After export.py and evaluate.py --json FILE:
`python assets.py --model DIR --samples DIR --content DIR --results FILE`
"""

import argparse
import json
import random
from pathlib import Path

import batches
import numpy as np
import tokenizer as tokenizer_file
import torch
from evaluate import table
from export import patches
from PIL import Image
from samples import Sample, as_turns, clip_case, content_cases, pair_case, png, test_sample
from scenes import WORDS, Layout
from several import two_talks
from tokenizer import dump

PICTURES, PAIRS, CLIPS, SEED = 100, 12, 6, 20
SAMPLE_SKILLS = ("read", "count", "where", "describe", "shape_colour", "follow_up")
CARD = """# tiny_vlm

A small vision-language model with the architecture of Qwen2.5-VL ({parameters} parameters,
bfloat16), trained from nothing on drawn pictures by `examples/train_tiny_vlm`. It ships inside
jaxmm so that everything answers before any checkpoint is downloaded, and answers from the pixels.
It knows nothing of photographs.
{note}
What it is trained to do: read a word or number of up to 8 characters (A-Z, 0-9), name shapes
(circle, square, triangle, star, cross, diamond) and colours (red, green, blue, yellow, orange,
purple, black, white), count up to 6 objects, say where something is, compare two pictures, answer a
follow-up, describe a picture in one sentence, and say which way something moves in a short clip.
Pictures from 56x56 to 672x336 pixels, letters at least 17 pixels high, objects 22 to 60 pixels
across. Words come from a list of {words}; numbers and codes are free.

Exact answers on held-out pictures (drawn from other seeds than the training pictures), greedy
decoding, float32 arithmetic:

{table}

Licence: the same as jaxmm's. The pictures were drawn by program; fonts DejaVu and Liberation were
used for drawing and are not included.
"""


def ask(reference, tokenizer, encoder, pictures, turns, frames: int = 0) -> str:
    """Greedy answer of transformers' model, with the positions of the published model (text after a
    clip included).
    """
    h, w = pictures[0].shape[:2]
    layout = Layout(
        tuple((p.shape[1], p.shape[0]) for p in (pictures[:1] if frames else pictures)), frames
    )
    talk = [(t["question"], t["answer"], "extra") for t in turns]
    prompt = batches.build(Sample(pictures, [], []), layout, [talk], encoder, question_first=False)
    start = 1 + next(at for at, _, turn in prompt.labels if turn == len(talk) - 1)
    ids, at = list(prompt.ids[:start]), [list(p) for p in prompt.at[:start]]
    t = max(1, frames // 2)
    if frames:
        seen = {
            "pixel_values_videos": patches(np.stack(pictures)),
            "video_grid_thw": torch.tensor([[t, h // 14, w // 14]]),
        }
    else:
        seen = {
            "pixel_values": torch.cat([patches(p[None]) for p in pictures]),
            "image_grid_thw": torch.tensor(
                [[1, p.shape[0] // 14, p.shape[1] // 14] for p in pictures]
            ),
        }
    end, answer = tokenizer.token_to_id("<|im_end|>"), []
    while len(answer) < 40:
        with torch.no_grad():
            out = reference(
                input_ids=torch.tensor([ids]),
                position_ids=torch.tensor(at).T[:, None],
                use_cache=False,
                **seen,
            )
        token = int(out.logits[0, -1].argmax())
        if token == end:
            break
        answer.append(token)
        ids.append(token)
        at.append([max(at[-1]) + 1] * 3)
    return tokenizer.decode(answer)


def main() -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "samples", "content", "results"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument(
        "--note", default="", help="a sentence on the state of the training, for the card"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        args.model, dtype=torch.float32
    ).eval()
    tokenizer = tokenizer_file.load(args.model)
    encoder = batches.Encoder(tokenizer)

    def answer(pictures, turns, frames=0):
        return ask(reference, tokenizer, encoder, pictures, turns, frames)

    write_card(args, sum(p.numel() for p in reference.model.parameters()))
    write_content(args.content, answer)
    write_samples(args.samples, answer)


def write_card(args, parameters: int) -> None:
    results = json.loads(args.results.read_text())
    (args.model / "README.md").write_text(
        CARD.format(
            parameters=f"{parameters / 1e6:.1f} M",
            words=len(WORDS),
            table=table(results),
            note=f"\n{args.note}\n" if args.note else "",
        )
    )


def fresh(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    return folder


def write_content(folder: Path, answer) -> None:
    """cases.json and its pictures: right answers, what the model answers, and its share of exact
    ones.
    """
    fresh(folder)
    rng = random.Random(SEED)
    drawn = content_cases(PICTURES, SEED)
    pixels = [decode(case["png"]) for case in drawn]
    cases = []

    def add(pictures, names, case, frames=0):
        expected = answer(pictures, case["turns"], frames)
        cases.append(
            {
                "skill": case["skill"],
                "clip" if frames else "pictures": names,
                "turns": case["turns"],
                "expected": expected,
                "right": expected == case["turns"][-1]["answer"],
            }
        )

    for n, case in enumerate(drawn):
        name = f"{n:03d}.png"
        (folder / name).write_bytes(case["png"])
        add([pixels[n]], [name], case)
    while len(cases) < PICTURES + PAIRS:
        a, b = rng.sample(range(PICTURES), 2)
        if two_talks(random.Random(0), [drawn[a]["scene"], drawn[b]["scene"]]):
            case = pair_case(rng, drawn[a]["scene"], drawn[b]["scene"])
            add([pixels[a], pixels[b]], [f"{a:03d}.png", f"{b:03d}.png"], case)
    for n in range(CLIPS):
        case = clip_case(SEED * 1000 + n)
        names = [f"clip{n}_{k}.png" for k in range(len(case["frames"]))]
        for name, data in zip(names, case["frames"], strict=True):
            (folder / name).write_bytes(data)
        add([decode(data) for data in case["frames"]], names, case, len(names))
    share = sum(c["right"] for c in cases) / len(cases)
    dump(
        folder / "cases.json",
        {
            "note": "answer of the last turn is the right one; "
            "expected is the model's own greedy answer in float32",
            "accuracy": round(share, 4),
            "cases": cases,
        },
    )
    size = sum(p.stat().st_size for p in folder.iterdir()) / 1e6
    print(f"content: {share:.1%} of {len(cases)} right, {size:.2f} MB")


def write_samples(folder: Path, answer) -> None:
    """A few pictures that the model answers rightly, for the README and the first request."""
    fresh(folder)
    samples = []
    for skill in SAMPLE_SKILLS:
        for seed in range(500, 600):
            sample, layout, talk = test_sample(seed, skill)
            w, h = layout.sizes[0]
            data, turns = png(sample.pictures[0]), as_turns(talk)
            if (
                112 * 84 <= w * h <= 224 * 168
                and len(data) < 24_000
                and answer(sample.pictures, turns) == talk[-1][1]
            ):
                (folder / f"{skill}.png").write_bytes(data)
                samples.append({"file": f"{skill}.png", "skill": skill, "turns": turns})
                break
    dump(folder / "samples.json", samples)
    print("samples:", [s["file"] for s in samples])


def decode(data: bytes) -> np.ndarray:
    import io

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


if __name__ == "__main__":
    main()
