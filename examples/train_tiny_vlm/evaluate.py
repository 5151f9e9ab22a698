"""Share of exactly right answers per skill on held-out pictures.

`python evaluate.py --model DIR --count 200`

Greedy decoding gives the right answer exactly when each of its tokens is the likeliest one after
the right tokens before it, so one forward pass per case is enough. `--generate N` also asks
transformers' own model and `generate`.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import batches
import export
import model as model_file
import samples
import tokenizer as tokenizer_file
import torch
from batches import SKILL_INDEX
from losses import net_logits
from safetensors.torch import load_file
from skills import SKILLS

GROUP = 16  # cases of one layout that run together


def cases(count: int, seed: int):
    """Test samples of every skill: (skill, index, sample, layout, talk)."""
    for skill in SKILLS:
        for index in range(count):
            yield skill, index, *samples.test_sample(seed * 1_000_003 + index, skill)


@torch.no_grad()
def exact(net, encoder, group) -> list[bool]:
    """Whether the last answer of each case comes out exactly, the answers before it being given."""
    layout = group[0][3]
    prompts = [
        batches.build(
            s, layout, [talk], encoder, question_first=(index % 4 == 3 and len(talk) == 1)
        )
        for _, index, s, _, talk in group
    ]
    batch = batches.collate(layout, [g[2] for g in group], prompts)
    logits = net_logits(net, batch)[0]
    wrong = torch.zeros(len(batch.skills), dtype=torch.long)
    wrong.index_add_(
        0,
        torch.from_numpy(batch.answer),
        (logits.argmax(-1) != torch.from_numpy(batch.labels)).long(),
    )
    last = torch.tensor([len(p.skills) for p in prompts]).cumsum(0) - 1
    assert all(
        batch.skills[i] == SKILL_INDEX[g[0]] for i, g in zip(last.tolist(), group, strict=True)
    )
    return (wrong[last] == 0).tolist()


def evaluate(net, encoder, count: int, seed: int, show: int = 0):
    groups, results = defaultdict(list), defaultdict(list)
    for case in cases(count, seed):
        groups[(case[3].sizes, case[3].frames)].append(case)
    failed = []
    for group in groups.values():
        for at in range(0, len(group), GROUP):
            part = group[at : at + GROUP]
            for case, ok in zip(part, exact(net, encoder, part), strict=True):
                results[case[0]].append(ok)
                if not ok:
                    failed.append((case[0], case[3].sizes, case[4]))
    for line in failed[:show]:
        print("wrong:", line)
    return {skill: (sum(results[skill]), len(results[skill])) for skill in SKILLS}, failed


def table(results) -> str:
    lines = ["| skill | right | test pictures | share |", "|---|---|---|---|"]
    for skill, (right, total) in results.items():
        lines.append(
            f"| {skill.replace('_', ' ')} | {right} | {total} | {100 * right / total:.1f}% |"
        )
    right, total = (sum(v[i] for v in results.values()) for i in (0, 1))
    return "\n".join([*lines, f"| all | {right} | {total} | {100 * right / total:.1f}% |"])


@torch.no_grad()
def generate(folder: Path, encoder, count: int, seed: int) -> None:
    """Ask transformers' model with its own positions and its own greedy decoding."""
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right, total = 0, 0
    for _, _, sample, layout, talk in cases(count, seed):
        if layout.frames:
            # transformers 5.3 and later place text after a clip elsewhere than the published model
            continue
        content = [{"type": "image"} for _ in layout.sizes]
        messages = []
        for n, (q, a, _) in enumerate(talk):
            messages.append(
                {
                    "role": "user",
                    "content": [*(content if n == 0 else ()), {"type": "text", "text": q}],
                }
            )
            if n < len(talk) - 1:
                messages.append({"role": "assistant", "content": a})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for w, h in layout.sizes:
            text = text.replace("<|image_pad|>", "<|seen|>" * (w * h // 784), 1)
        ids = torch.tensor([tokenizer.encode(text.replace("<|seen|>", "<|image_pad|>"))])
        out = reference.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            mm_token_type_ids=(ids == encoder.image).long(),
            pixel_values=torch.cat([export.patches(p[None]) for p in sample.pictures]),
            image_grid_thw=torch.tensor([[1, h // 14, w // 14] for w, h in layout.sizes]),
        )
        answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        right, total = right + (answer == talk[-1][1]), total + 1
    print(f"transformers generate: {right} of {total} right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder written by export.py")
    parser.add_argument("--count", type=int, default=100, help="test cases of each skill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=0, help="print that many wrong cases")
    parser.add_argument(
        "--generate", type=int, default=0, metavar="N", help="also N cases a skill by transformers"
    )
    parser.add_argument("--json", help="write the counts there")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = Path(args.model)
    encoder = batches.Encoder(tokenizer_file.load(folder))
    net = model_file.from_published(load_file(folder / "model.safetensors"))
    results, _ = evaluate(net, encoder, args.count, args.seed, args.show)
    print(table(results))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    if args.generate:
        generate(folder, encoder, args.generate, args.seed + 1)


if __name__ == "__main__":
    main()
