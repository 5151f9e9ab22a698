"""jaxmm against other engines: one checkpoint, one machine, the same requests, taken in turn.

    python -m tests.bench.bench_peers --model DIR --transformers
    python -m tests.bench.bench_peers --model DIR \\
        --server "vllm=vllm serve DIR --dtype float32 --port {port}"

Greedy, the end token ignored, float32. Each repetition of each workload goes to every engine before
the next one begins, in an order that turns, so that a machine that slows down slows all alike; who
is not measured is stopped. A request that comes back empty or short ends the run. Where an engine's
tokens differ from jaxmm's, transformers in float64 says how much likelier ours was where they part:
the run fails at more than rounding explains. `DIR` may be made by
`python -m tests.bench.make_checkpoint DIR`.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.bench.peers import Peer, Reply, Server, Transformers
from tests.bench.workloads import NAMES, workload

WARM_UP = -1
"""The repetition that nobody measures; its pictures come in no other."""
NEAR_TIE = 1e-3
"""Two tokens whose log-probabilities differ by less may change places by float32 rounding, which
moves logits of this size by some 1e-5."""


class Run(NamedTuple):
    """One repetition of a workload on one engine."""

    wall_seconds: float
    replies: list[Reply]

    @property
    def first_seconds(self) -> float:
        return statistics.median(reply.first_seconds for reply in self.replies)

    @property
    def seconds_per_token(self) -> float:
        return statistics.median(reply.seconds_per_token for reply in self.replies)


def main() -> None:
    chosen = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with the benchmark
    _print_head(chosen.model)
    peers: list[Peer] = []
    try:
        for peer in _peers(chosen):
            peers.append(peer)
            peer.rest()
            _measure(peer, chosen.workloads[0], WARM_UP)
            peer.pause()
        runs = {}
        for name in chosen.workloads:
            runs[name] = _interleaved(peers, name, chosen.repeats)
            _report(name, runs[name])
    finally:
        for peer in peers:
            peer.close()
    _judge(chosen.model, runs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="checkpoint")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--workloads", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--transformers", action="store_true", help="measure it in this process")
    parser.add_argument(
        "--server", action="append", default=[], metavar="NAME=COMMAND",
        help="start this server; {port} in the command stands for a free port",
    )  # fmt: skip
    parser.add_argument(
        "--base-url", action="append", default=[], metavar="NAME=URL", help="a server that runs"
    )
    parser.add_argument(
        "--extra", type=json.loads, default={}, metavar="JSON",
        help="fields that requests to other servers need; jaxmm gets none of them",
    )  # fmt: skip
    parser.add_argument("--jaxmm", default="", metavar="FLAGS", help="flags of jaxmm serve")
    return parser.parse_args()


def _peers(chosen: argparse.Namespace) -> Iterator[Peer]:
    """Start the engines one after another, jaxmm first: the ratios are to it."""
    start = (
        f"{shlex.quote(sys.executable)} -c 'from serving.cli import main; raise SystemExit(main())'"
    )
    model = shlex.quote(str(chosen.model))
    flags = f"--dtype float32 --max-running 16 {chosen.jaxmm}"
    yield Server.start("jaxmm", f"{start} serve --model {model} --port {{port}} {flags}")
    for given in chosen.server:
        name, command = given.split("=", 1)
        yield Server.start(name, command, chosen.extra)
    for given in chosen.base_url:
        name, url = given.split("=", 1)
        server = Server(name, url, chosen.extra)
        server.connect()
        yield server
    if chosen.transformers:
        yield Transformers(chosen.model)


def _interleaved(peers: Sequence[Peer], name: str, repeats: int) -> dict[str, list[Run]]:
    """Runs of each engine; who begins changes with every repetition."""
    runs: dict[str, list[Run]] = {peer.name: [] for peer in peers}
    for repetition in range(repeats):
        turn = repetition % len(peers)
        for peer in (*peers[turn:], *peers[:turn]):
            peer.resume()
            runs[peer.name].append(_measure(peer, name, repetition))
            peer.pause()
    return runs


def _measure(peer: Peer, name: str, repetition: int) -> Run:
    """One repetition.

    Raises:
        SystemExit: An answer is empty or has not the tokens asked for.
    """
    work = workload(name, repetition)
    prepared = peer.prepare(work)
    start = time.perf_counter()
    replies = peer.run(prepared)
    wall_seconds = time.perf_counter() - start
    for ask, reply in zip(work.asks, replies, strict=True):
        if reply.num_tokens != ask.max_tokens or not reply.text:
            raise SystemExit(
                f"{peer.name}, {name}: asked for {ask.max_tokens} tokens, got {reply.num_tokens} "
                f"and {len(reply.text)} characters of text; such a run says nothing"
            )
    return Run(wall_seconds, replies)


def _report(name: str, runs: dict[str, list[Run]]) -> None:
    """Print medians, the slowest wall time, and each engine's times as multiples of jaxmm's."""
    print(f"\n{name:<13}{'wall s':>9}{'worst':>9}{'first ms':>10}{'ms/token':>10}", end="")
    print(f"{'wall':>9}{'first':>8}{'token':>8}{'same text':>12}")
    ours = next(iter(runs.values()))
    base = _medians(ours)
    for peer, theirs in runs.items():
        wall, first, token = _medians(theirs)
        worst = max(run.wall_seconds for run in theirs)
        print(f"  {peer:<11}{wall:9.3f}{worst:9.3f}{first * 1e3:10.1f}{token * 1e3:10.2f}", end="")
        for value, other in zip((wall, first, token), base, strict=True):
            print(f"{value / other:7.2f}x", end="")
        print(f"{_same_texts(ours, theirs):>13}", flush=True)


def _medians(runs: Sequence[Run]) -> tuple[float, float, float]:
    """Wall time, time to first token, time for each further one: seconds."""
    return (
        statistics.median(run.wall_seconds for run in runs),
        statistics.median(run.first_seconds for run in runs),
        statistics.median(run.seconds_per_token for run in runs),
    )


def _same_texts(ours: Sequence[Run], theirs: Sequence[Run]) -> str:
    pairs = [
        (a.text, b.text)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one.replies, other.replies, strict=True)
    ]
    return f"{sum(a == b for a, b in pairs)}/{len(pairs)}"


class Parting(NamedTuple):
    """Where an engine's answer leaves ours."""

    peer: str
    workload: str
    repetition: int
    request: int
    shared_ids: tuple[int, ...]
    """What both answered before."""
    our_id: int
    their_id: int


def _partings(name: str, runs: dict[str, list[Run]]) -> Iterator[Parting]:
    """Each answer of a workload that differs from ours, of engines that give token ids."""
    (_, ours), *others = runs.items()
    for peer, theirs in others:
        for repetition, pair in enumerate(zip(ours, theirs, strict=True)):
            answers = zip(pair[0].replies, pair[1].replies, strict=True)
            for request, (a, b) in enumerate(answers):
                ids = zip(a.token_ids, b.token_ids, strict=False)
                i = next((i for i, (x, y) in enumerate(ids) if x != y), None)
                if i is not None:
                    shared, x, y = a.token_ids[:i], a.token_ids[i], b.token_ids[i]
                    yield Parting(peer, name, repetition, request, shared, x, y)


def _judge(model: Path, runs: dict[str, dict[str, list[Run]]]) -> None:
    """Print how near to a tie the tokens were where answers part from ours.

    Raises:
        SystemExit: One was not near.
    """
    partings = [parting for name in runs for parting in _partings(name, runs[name])]
    if not partings:
        return
    judge = Transformers(model, "float64")
    print(f"\n{'differs':<13}{'workload':<10}{'repetition':>10}{'request':>9}{'token':>7}", end="")
    print("   log-probability of ours less theirs, transformers in float64")
    worst = 0.0
    for peer, name, repetition, request, shared, our_id, their_id in partings:
        ask = workload(name, repetition).asks[request]
        scores = judge.logprobs(ask, shared)
        gap = scores[our_id] - scores[their_id]
        worst = max(worst, abs(gap))
        print(f"  {peer:<11}{name:<10}{repetition:10}{request:9}{len(shared):7}   {gap:+.1e}")
    if worst > NEAR_TIE:
        raise SystemExit(f"an answer differs where tokens are {worst:.1e} apart: no rounding")


def _print_head(model: Path) -> None:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    print(f"hardware  {_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"commit    {commit.stdout.strip()}")
    print(f"command   python -m tests.bench.bench_peers {shlex.join(sys.argv[1:])}")
    print(f"model     {model.name}, {_weight_bytes(model) / 1e6:.0f} MB of weights, float32")
    print("warm-up   rest after start, the first workload once on each; then medians, in turn")


def _weight_bytes(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
