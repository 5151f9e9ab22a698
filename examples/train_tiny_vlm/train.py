"""Train the small model: `python train.py --state DIR --recipe FILE`.

Seeded, resumable, progress in DIR/log.txt.

Two processes of one thread each work on the same weights in shared memory, each at its own pace
with its own momentum and with no lock (Hogwild, arXiv 1106.5730): neither waits for the other where
the machine is shared. So two runs of one seed differ a little; one process (`--processes 1`)
repeats exactly. Matrices are moved by Muon (orthogonalised momentum), everything else by Adam; a
classifier of each vision row, used in training only, gives the encoder a dense signal from the
first step.
"""

import argparse
import fcntl
import os
import random
import re
import shutil
import signal
import time
from collections import defaultdict
from pathlib import Path

import batches
import kinds
import model as model_file
import tokenizer as tokenizer_file
import torch
from classifiers import Classifiers
from losses import page_loss, talk_loss
from muon import Muon
from recipe import rate_at, read_recipe
from safetensors.torch import load_file

PHASES = {  # what is trained
    "pages": re.compile(r"visual\."),  # the encoder alone, on full pages
    "talks": re.compile(r"(?!visual\.)"),  # the language side alone
    "all": re.compile(""),
    "heads": re.compile("(?!)"),  # nothing but the classifiers: they are not in an exported model
}


class Worker:
    """One of the processes that train the same weights; the first also averages, saves and
    reports.
    """

    def __init__(self, rank: int, args, recipe: dict, net, aux, shared, errors):
        """`shared` holds the steps and samples done by all, and whether to stop; `errors` as in
        `train_batch`.
        """
        self.rank, self.args, self.recipe = rank, args, recipe
        self.net, self.aux, self.shared, self.errors = net, aux, shared, errors
        self.state = Path(args.state)
        self.encoder = batches.Encoder(tokenizer_file.load(self.state / "tokenizer"))
        trained = PHASES[recipe["phase"]]
        self.muon = Muon(net, trained)
        own = [p for name, p in net.named_parameters() if trained.match(name)]
        for p in net.parameters():
            p.requires_grad_(any(p is q for q in own))
        self.trained = [*own, *aux.parameters()]
        self.others = [p for p in self.trained if id(p) not in self.muon.ids]
        groups = [
            {"params": [p for p in self.others if (id(p) in self.muon.seen) == seen], "seen": seen}
            for seen in (False, True)
        ]
        groups = [group for group in groups if group["params"]]
        self.adam = torch.optim.Adam(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-10)
        self.average = {k: v.clone() for k, v in net.state_dict().items()}
        self.began, self.tally = time.time(), defaultdict(list)
        self.load()

    def load(self) -> None:
        """Go on from the moments and the average of a saved state; moments of another phase are of
        other weights.
        """
        if not (self.state / "state.pt").exists():
            return
        saved = torch.load(self.state / "state.pt", weights_only=False)
        if saved["recipe"]["phase"] == self.recipe["phase"]:
            self.adam.load_state_dict(saved["adam"])
            for m, s in zip(self.muon.momentum, saved["muon"], strict=True):
                m.copy_(s)
        self.average = saved["average"]
        self.began -= saved["spent"]

    def save(self) -> None:
        torch.save(
            {
                "net": self.net.state_dict(),
                "aux": self.aux.state_dict(),
                "adam": self.adam.state_dict(),
                "muon": self.muon.momentum,
                "average": self.average,
                "errors": self.errors,
                "step": int(self.shared[0]),
                "spent": time.time() - self.began,
                "recipe": self.recipe,
            },
            self.state / "state.tmp",
        )
        (self.state / "state.tmp").replace(self.state / "state.pt")

    def run(self) -> None:
        """Steps until all are done or a signal says stop."""
        last_save = last_log = time.time()
        logged, samples = self.shared[:2].tolist()
        while int(self.shared[0]) < self.recipe["steps"] and not self.shared[2]:
            step = int(self.shared[0])
            self.shared[0] += 1
            self.recipe = read_recipe(self.args.recipe, self.args.scale)  # may have been edited
            self.step(step)
            if self.rank:
                continue
            for k, v in self.net.state_dict().items():
                self.average[k].lerp_(v, 1 - min(self.recipe["average"], step / (step + 10)))
            now = time.time()
            if step >= logged + self.args.log_every * self.args.scale:
                self.report(step, (int(self.shared[1]) - samples) / (now - last_log))
                logged, samples, last_log = step, int(self.shared[1]), now
            if now - last_save > 150:
                self.save()
                last_save = now
        if self.rank == 0:
            self.save()

    def step(self, step: int) -> None:
        """Gradients of a few batches, and one move of the weights."""
        recipe = self.recipe
        for p in self.trained:
            p.grad = None
        rng = random.Random(f"train {self.args.seed} {step} {self.rank}")
        for _ in range(recipe["parts"]):
            with torch.autocast("cpu", torch.bfloat16, enabled=not self.args.full_precision):
                loss = self.loss(rng)
            (loss / recipe["parts"]).backward()
        torch.nn.utils.clip_grad_norm_([p for p in self.others if p.grad is not None], 1.0)
        rate = rate_at(step, recipe)
        self.muon.step(rate * recipe["muon_rate"], recipe["see_rate"], recipe["muon_decay"])
        for group in self.adam.param_groups:
            own_rate = rate * (recipe["see_rate"] if group["seen"] else 1.0)
            group["lr"] = own_rate * recipe["adam_rate"]
        self.adam.step()

    def loss(self, rng: random.Random):
        """Loss of one batch; what it got right goes to the tally, and to the errors by kind."""
        if self.recipe["phase"] == "pages":
            loss, count = page_loss(self.net, self.aux, rng, self.recipe, self.tally)
            self.tally["loss"].append(loss.item())
        else:
            loss, count = talk_loss(
                self.net, self.aux, self.encoder, rng, self.recipe, self.tally, self.errors
            )
        self.shared[1] += count
        return loss

    def report(self, step: int, speed: float) -> None:
        """A line of the log: speed, loss, shares of right answers and facts since the last one."""
        spent, rate = time.time() - self.began, rate_at(step, self.recipe)
        line = (
            f"step={step}/{self.recipe['steps']} minutes={spent / 60:.1f} "
            f"samples_per_s={speed:.0f} rate={rate:.2f} {summary(self.tally)}"
        )
        self.tally.clear()
        with open(self.state / "log.txt", "a") as f:
            f.write(line + "\n")
        print(line, flush=True)


def run(rank: int, args, recipe: dict, net, aux, shared, errors) -> None:
    """One worker, on a core of its own where there are several."""
    torch.set_num_threads(args.threads)
    if args.processes > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    stop_on_signals(shared)
    worker = Worker(rank, args, recipe, net, aux, shared, errors)
    if args.compile:
        torch._dynamo.config.cache_size_limit = 64
        for block in (*net.layers, *net.visual.blocks):
            block.compile(dynamic=True)
    worker.run()


def stop_on_signals(shared) -> None:
    """Let SIGTERM and Ctrl-C end a run after its step, with its state saved."""
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: shared[2].fill_(1))


def summary(tally) -> str:
    """Mean loss, and percent right by skill, by classifier and by kind of question."""

    def shares(prefix: str) -> str:
        names = [key for key in sorted(tally) if key.startswith(prefix)]
        return " ".join(f"{n.removeprefix(prefix)}={100 * mean(tally[n]):.0f}" for n in names)

    parts = (f"loss={mean(tally['loss']):.3f}", *map(shares, ("skill ", "aux ", "kind ")))
    return " | ".join(parts)


def mean(values: list) -> float:
    return sum(values) / max(1, len(values))


def write_tokenizer(folder: Path, exported: str | None) -> None:
    """The tokenizer of a state: that of the model it starts from, else a new one."""
    if folder.exists():
        return
    unfinished = folder.with_name("tokenizer.tmp")  # an interruption leaves no half of it
    unfinished.mkdir(exist_ok=True)
    if exported is None:
        tokenizer_file.write(unfinished)
    else:
        for name in tokenizer_file.FILES:
            shutil.copy(Path(exported) / name, unfinished)
    unfinished.rename(folder)


def hold(lock) -> None:
    """Lock an open file for as long as it is open: two runs would overwrite each other's
    weights.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"another run holds {lock.name}; end it first") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", required=True, help="folder of checkpoint, log and tokenizer")
    parser.add_argument(
        "--from",
        dest="weights",
        metavar="DIR",
        help="folder of export.py whose weights a new state starts from; train the heads first",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--log-every", type=int, default=50, help="steps")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="of all step counts; 0.005 proves the road in minutes",
    )
    parser.add_argument(
        "--full-precision", action="store_true", help="float32 matrix products instead of bfloat16"
    )
    parser.add_argument(
        "--compile", action="store_true", help="compile the layers: minutes at the start, then 1.2x"
    )
    parser.add_argument(
        "--recipe",
        required=True,
        help="JSON file whose values replace those of RECIPE; may be edited while it runs",
    )
    args = parser.parse_args()
    recipe = read_recipe(args.recipe, args.scale)
    os.makedirs(args.state, exist_ok=True)
    with open(Path(args.state) / "lock", "w") as lock:
        hold(lock)
        start(args, recipe)


def start(args, recipe: dict) -> None:
    """Go on from the state, or begin one, until the stage is done."""
    write_tokenizer(Path(args.state) / "tokenizer", args.weights)
    torch.manual_seed(args.seed)
    net = model_file.Model()
    if args.weights:
        net = model_file.from_published(load_file(Path(args.weights) / "model.safetensors"))
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
    train(args, recipe, net, aux, shared, errors)
    if shared[2]:
        raise SystemExit(f"stopped at step {int(shared[0])}; the same command goes on from there")


def train(args, recipe: dict, net, aux, shared, errors) -> None:
    """Run the workers to their end."""
    if args.processes == 1:
        run(0, args, recipe, net, aux, shared, errors)
        return
    for part in (net, aux, shared, errors):
        (part.share_memory_ if isinstance(part, torch.Tensor) else part.share_memory)()
    stop_on_signals(shared)
    torch.multiprocessing.spawn(
        run, (args, recipe, net, aux, shared, errors), nprocs=args.processes
    )


if __name__ == "__main__":
    main()
