"""Train the small model: `python train.py --state DIR`. Seeded, resumable, progress in DIR/log.txt.

Two processes of one thread each work on the same weights in shared memory, each at its own pace
with its own momentum and with no lock (Hogwild, arXiv 1106.5730): neither waits for the other where
the machine is shared. So two runs of one seed differ a little; one process (`--processes 1`) repeats
exactly. Matrices are moved by Muon (orthogonalised momentum), everything else by Adam; a classifier
of each vision row, used in training only, gives the encoder a dense signal from the first step.
"""

import argparse
import json
import os
import random
import re
import signal
import time
from collections import defaultdict
from pathlib import Path

import batches
import kinds
import model as model_file
import tokenizer as tokenizer_file
import torch
import torch.nn.functional as F
from batches import SKILL_INDEX
from classifiers import Classifiers
from muon import Muon

PHASES = {  # what is trained
    "pages": re.compile(r"visual\."),  # the encoder alone, on full pages
    "talks": re.compile(r"(?!visual\.)"),  # the language side alone
    "all": re.compile(""),
}
RECIPE = {
    "phase": "all",
    "steps": 16000,
    "warm_up": 60,
    "from": 0,
    "decay_from": 10000,
    "rate": 1.0,
    "see_rate": 1.0,  # of the encoder, as a share of `rate`
    "muon_rate": 0.02,
    "muon_decay": 0.1,
    "adam_rate": 0.002,
    "average": 0.99,
    "tokens": 4000,  # of work in a batch
    "parts": 2,  # batches in a step
    "kinds": [60, 34, 6],  # one picture, two, a clip
    "largest": 1_000_000,  # pixels
    "question_first": 0.15,  # before the pictures
    "text_share": 0.52,  # pictures with text
    "mixed": 0.3,  # pictures of several kinds of things on purpose
    "talks": 5,  # conversations about the pictures of a sample
    "words": 80,  # in them
    "text": 130,  # tokens that they take
    "easy": 0.05,  # weight of a question that is always answered; the share of wrong answers comes on top
    "extra": 0.3,  # weight of questions that no test asks
    "aux": 2.0,  # weights of what vision rows and hidden states are told
    "facts": 2.0,
    "placed": 120.0,
    "pages": 16,  # beside the questions of a batch
}


def net_logits(net, batch):
    """Logits of the positions before each label, the vision rows, and hidden states by layer."""
    t = torch.from_numpy
    branch = t(batch.branch)
    length = branch.shape[1]
    mask = (branch[:, None, :] == branch[:, :, None]) | (branch == 0)[:, None, :]
    mask &= torch.ones(length, length, dtype=torch.bool).tril()
    rows = net.see([t(p) for p in batch.pictures])
    logits, hidden = net(
        t(batch.ids), t(batch.positions), mask[:, None], rows, t(batch.rows_at), t(batch.wanted)
    )
    return logits, rows, hidden


def forward_loss(net, aux, batch, recipe, seeing: bool):
    """Loss of one batch, for each answer whether greedy decoding would give it exactly, and what classifiers get right."""
    t = torch.from_numpy
    logits, rows, hidden = net_logits(net, batch)
    labels, answer = t(batch.labels), t(batch.answer)
    each = F.cross_entropy(logits, labels, reduction="none")
    wrong = torch.zeros(len(batch.skills), dtype=torch.long).index_add_(
        0, answer, (logits.argmax(-1) != labels).long()
    )
    # half by token, half by answer, so that one-token answers (counts, sides) count as much as long ones
    sizes = torch.bincount(answer, minlength=len(batch.skills)).float()
    loss = 0.5 * each.mean() + 0.5 * (each / sizes[answer]).sum() / len(batch.skills)
    told, right = aux.told(hidden, batch, recipe["placed"])
    loss = loss + recipe["facts"] * told
    if seeing:
        extra, seen = aux.seen(rows, t(batch.aux))
        loss, right = loss + recipe["aux"] * extra, right | seen
    return loss, (wrong == 0).tolist(), right


def read_recipe(path: str) -> dict:
    return {**RECIPE, **json.loads(Path(path).read_text())}


def rate_at(step: int, recipe: dict) -> float:
    warm = min(1.0, max(0, step - recipe["from"] + 1) / recipe["warm_up"])
    if step < recipe["decay_from"]:
        return recipe["rate"] * warm
    left = (recipe["steps"] - step) / max(1, recipe["steps"] - recipe["decay_from"])
    return recipe["rate"] * warm * max(0.0, left)


def run(rank: int, args, recipe: dict, net, aux, shared, errors) -> None:
    """One worker. `shared` holds the steps and samples done by all, and whether to stop; `errors` as in `train_batch`."""
    state = Path(args.state)
    torch.set_num_threads(args.threads)
    if args.processes > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    signal.signal(signal.SIGTERM, lambda *_: shared[2].fill_(1))
    encoder = batches.Encoder(tokenizer_file.load(state / "tokenizer"))
    trained = PHASES[recipe["phase"]]
    muon = Muon(net, trained)
    everything = [p for name, p in net.named_parameters() if trained.match(name)]
    everything += aux.parameters()
    for p in net.parameters():
        p.requires_grad_(any(p is q for q in everything))
    others = [p for p in everything if id(p) not in muon.ids]
    groups = [
        {"params": [p for p in others if (id(p) in muon.seen) == seen], "seen": seen}
        for seen in (False, True)
    ]
    groups = [group for group in groups if group["params"]]
    adam = torch.optim.Adam(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-10)
    average, spent = {k: v.clone() for k, v in net.state_dict().items()}, 0.0
    if (state / "state.pt").exists():
        saved = torch.load(state / "state.pt", weights_only=False)
        if saved["recipe"]["phase"] == recipe["phase"]:
            adam.load_state_dict(saved["adam"])
            for m, s in zip(muon.momentum, saved["muon"], strict=True):
                m.copy_(s)
        average, spent = saved["average"], saved["spent"]
        del saved
    if args.compile:
        torch._dynamo.config.cache_size_limit = 64
        for block in (*net.layers, *net.visual.blocks):
            block.compile(dynamic=True)
    tally, began, last_save, last_log, logged = (
        defaultdict(list),
        time.time() - spent,
        time.time(),
        time.time(),
        int(shared[0]),
    )
    samples = int(shared[1])

    def save():
        torch.save(
            {
                "net": net.state_dict(),
                "aux": aux.state_dict(),
                "adam": adam.state_dict(),
                "muon": muon.momentum,
                "average": average,
                "errors": errors,
                "step": int(shared[0]),
                "spent": time.time() - began,
                "recipe": recipe,
            },
            state / "state.tmp",
        )
        (state / "state.tmp").replace(state / "state.pt")

    while int(shared[0]) < recipe["steps"] and not shared[2]:
        step = int(shared[0])
        shared[0] += 1
        if args.recipe:  # may be edited while it runs
            recipe = read_recipe(args.recipe)
        for p in everything:
            p.grad = None
        rng = random.Random(f"train {args.seed} {step} {rank}")
        for _ in range(recipe["parts"]):
            with torch.autocast("cpu", torch.bfloat16, enabled=not args.full_precision):
                loss = (
                    page_loss(net, aux, rng, recipe, tally, shared)
                    if recipe["phase"] == "pages"
                    else talk_loss(net, aux, encoder, rng, recipe, tally, shared, errors)
                )
            (loss / recipe["parts"]).backward()
        torch.nn.utils.clip_grad_norm_([p for p in others if p.grad is not None], 1.0)
        rate = rate_at(step, recipe)
        muon.step(rate * recipe["muon_rate"], recipe["see_rate"], recipe["muon_decay"])
        for group in adam.param_groups:
            own_rate = rate * (recipe["see_rate"] if group["seen"] else 1.0)
            group["lr"] = own_rate * recipe["adam_rate"]
        adam.step()
        if rank:
            continue
        for k, v in net.state_dict().items():
            average[k].lerp_(v, 1 - min(recipe["average"], step / (step + 10)))
        if step >= logged + args.log_every:
            report(
                state,
                step,
                recipe,
                tally,
                time.time() - began,
                (int(shared[1]) - samples) / (time.time() - last_log),
                rate,
            )
            samples, last_log, logged = int(shared[1]), time.time(), step
        if time.time() - last_save > 150:
            save()
            last_save = time.time()
    if rank == 0:
        save()


def talk_loss(net, aux, encoder, rng, recipe, tally, shared, errors):
    """Loss of one batch of conversations, and of some pages that keep reading dense."""
    batch = batches.train_batch(rng, encoder, recipe, errors)
    seeing = recipe["phase"] == "all"
    loss, exact, right = forward_loss(net, aux, batch, recipe, seeing)
    shared[1] += len(batch.ids)
    tally["loss"].append(loss.item())
    for skill, kind, ok in zip(batch.skills, batch.kinds, exact, strict=True):
        tally[int(skill)].append(ok)
        tally["kind " + kinds.NAMES[kind]].append(ok)
        errors[kind] += 0.02 * (float(not ok) - errors[kind])
    for name, value in right.items():
        tally["aux " + name].append(value)
    if seeing and recipe["pages"]:
        loss = loss + recipe["aux"] * page_loss(net, aux, rng, recipe, tally, shared)
    return loss


def page_loss(net, aux, rng, recipe, tally, shared):
    pixels, targets = map(
        torch.from_numpy,
        batches.page_batch(rng, recipe["pages"], min(recipe["largest"], 224 * 224)),
    )
    loss, right = aux.seen(net.visual(pixels), targets)
    for name, value in right.items():
        if name.startswith("char") or recipe["phase"] == "pages":
            tally["aux page_" + name].append(value)
    if recipe["phase"] == "pages":
        tally["loss"].append(loss.item())
        shared[1] += len(pixels)
    return loss


def report(
    state: Path, step: int, recipe: dict, tally, spent: float, speed: float, rate: float
) -> None:
    def mean(v):
        return sum(v) / max(1, len(v))

    names = {v: k for k, v in SKILL_INDEX.items()}
    skills = " ".join(
        f"{names[k]}={100 * mean(v):.0f}"
        for k, v in sorted((k, v) for k, v in tally.items() if isinstance(k, int))
    )
    aux = " ".join(
        f"{k[4:]}={100 * mean(v):.0f}" for k, v in tally.items() if str(k).startswith("aux")
    )
    line = (
        f"step={step}/{recipe['steps']} minutes={spent / 60:.1f} samples_per_s={speed:.0f} rate={rate:.2f} "
        f"loss={mean(tally['loss']):.3f} | {skills} | {aux}"
    )
    asked = " ".join(
        f"{k[5:].replace(': ', '/').replace(' ', '_')}={100 * mean(v):.0f}"
        for k, v in sorted((k, v) for k, v in tally.items() if str(k).startswith("kind"))
    )
    line += f" | {asked}"
    tally.clear()
    with open(state / "log.txt", "a") as f:
        f.write(line + "\n")
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", required=True, help="folder of checkpoint, log and tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument(
        "--full-precision", action="store_true", help="float32 matrix products instead of bfloat16"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the layers: minutes at the start, then 1.2x"
    )
    parser.add_argument(
        "--recipe",
        help="JSON file whose values replace those of RECIPE; may be edited while it runs",
    )
    args = parser.parse_args()
    recipe = read_recipe(args.recipe) if args.recipe else RECIPE
    os.makedirs(args.state, exist_ok=True)
    if not (Path(args.state) / "tokenizer" / "tokenizer.json").exists():
        tokenizer_file.write(Path(args.state) / "tokenizer")
    torch.manual_seed(args.seed)
    net = model_file.Model()
    aux = Classifiers(net.config["hidden_size"])
    errors = torch.full((len(kinds.NAMES),), 0.5)
    shared = torch.zeros(3, dtype=torch.long)
    if (Path(args.state) / "state.pt").exists():
        saved = torch.load(Path(args.state) / "state.pt", weights_only=False)
        if saved["step"] >= recipe["steps"]:
            return  # this stage is done
        same = saved["recipe"]["phase"] == recipe["phase"]
        net.load_state_dict(saved["net" if same else "average"])
        aux.load_state_dict(saved["aux"])
        shared[0], errors = saved["step"], saved["errors"]
        del saved
    if args.processes == 1:
        run(0, args, recipe, net, aux, shared, errors)
        return
    for part in (net, aux, shared, errors):
        (part.share_memory_ if isinstance(part, torch.Tensor) else part.share_memory)()
    signal.signal(signal.SIGTERM, lambda *_: shared[2].fill_(1))
    torch.multiprocessing.spawn(
        run, (args, recipe, net, aux, shared, errors), nprocs=args.processes
    )


if __name__ == "__main__":
    main()
