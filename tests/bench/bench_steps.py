"""Steps of one engine alone: no server, no scheduler, no pictures to decode.

    python -m tests.bench.bench_steps --model DIR [--extend 448@448 512@1024] [--decode 8@300]
        [--encode 1024 5632] [--repeats 9] [--set max_running=16 ...]

Milliseconds of the first run of each step, and least, median and p99 of those that follow, all
steps in turn; and what the products with weights alone would take at the speed of the one that is
measured first. Only the buckets that are asked for are compiled, if the compile cache lacks them.
`DIR` may be made by `python -m tests.bench.make_checkpoint DIR --vocab-size 151936`.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmm.basis import Basis, settle_basis
from jaxmm.config import EngineConfig, load_config
from jaxmm.device.ledger import CompileLedger
from jaxmm.device.runner import Runner
from jaxmm.host.batch import StepBatch
from jaxmm.host.lanes import EncodeBatch, join_lanes
from jaxmm.models.config import ModelConfig
from jaxmm.models.lane_forms import pack_items
from jaxmm.sizes import Sizes
from jaxmm.start import load_runners
from tests.bench.machine import describe_run

GEMM_SIDE = 2048
"""Rows, columns and depth of the product that tells what the machine can do."""


def main() -> None:
    chosen = _arguments()
    settings = dict(setting.split("=", 1) for setting in chosen.set)
    settings |= {"model": str(chosen.model), "dtype": "float32"}
    config = load_config(EngineConfig, None, settings)
    basis = _with_few_buckets(settle_basis(config), chosen)
    runner = load_runners(config, basis, CompileLedger("log"))[0]
    runner.settle()
    print(describe_run())
    speed = gemm_speed()
    print(f"products  {speed / 1e9:.0f} GFLOP/s")
    print(f"{'step':<18}{'first':>8}{'least':>8}{'median':>8}{'p99':>8}{'products':>10}   ms")
    steps = _steps(chosen, basis, runner)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 + chosen.repeats):
        for name, (run, _) in steps.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    for name, (first, *later) in times.items():
        median, p99 = np.percentile(later, [50, 99])
        bound = steps[name][1] / speed * 1e3
        print(f"{name:<18}{first:8.1f}{min(later):8.1f}{median:8.1f}{p99:8.1f}{bound:10.1f}")
    runner.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="checkpoint")
    parser.add_argument("--extend", nargs="*", default=["320@320", "448@448", "512@1024"],
                        metavar="TOKENS@KEYS", help="one chunk, and its keys with it")  # fmt: skip
    parser.add_argument("--decode", nargs="*", default=["1@500", "8@300"],
                        metavar="ROWS@KEYS", help="sequences of so many keys each")  # fmt: skip
    parser.add_argument("--encode", nargs="*", type=int, default=[1024, 5632], metavar="PATCHES")
    parser.add_argument("--repeats", type=int, default=9, metavar="N")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings")
    return parser.parse_args()


def _with_few_buckets(basis: Basis, chosen: argparse.Namespace) -> Basis:
    """The steps that are asked for have executables, and no others."""
    ladder = basis.sizes.buckets
    tokens = [int(given.split("@")[0]) for given in (*chosen.extend, *chosen.decode)]
    rungs = sorted({ladder.step_tokens(n) for n in tokens} | {ladder.tokens[-1]})
    patches = sorted({ladder.lane_patches(n) for n in chosen.encode} | {ladder.patches[-1]})
    buckets = dataclasses.replace(ladder, tokens=tuple(rungs), patches=tuple(patches))
    return dataclasses.replace(basis, sizes=dataclasses.replace(basis.sizes, buckets=buckets))


def _steps(
    chosen: argparse.Namespace, basis: Basis, runner: Runner
) -> dict[str, tuple[Callable[[], object], float]]:
    """Each step by name, with the FLOP of its products with weights, but for the head's."""
    text, vision = basis.model.text, basis.model.vision
    qkv = (text.num_heads + 2 * text.num_kv_heads) * text.head_channels
    layer = qkv + text.num_heads * text.head_channels + 3 * text.mlp_width
    token_flop = 2.0 * text.num_layers * text.width * layer
    patch_flop = 2.0 * vision.depth * vision.width * (4 * vision.width + 3 * vision.mlp_width)
    steps: dict[str, tuple[Callable[[], object], float]] = {}
    for given in chosen.extend:
        tokens, keys = map(int, given.split("@"))
        batch = _batch(runner, basis.sizes, basis.model, [tokens], keys, num_decodes=0)
        steps[f"extend {given}"] = partial(_step, runner, batch), token_flop * tokens
    for given in chosen.decode:
        rows, keys = map(int, given.split("@"))
        batch = _batch(runner, basis.sizes, basis.model, [1] * rows, keys, num_decodes=rows)
        steps[f"decode {given}"] = partial(_step, runner, batch), token_flop * rows
    for patches in chosen.encode:
        lane = join_lanes([_lane(basis, patches)])
        steps[f"encode {patches}"] = partial(_encode, runner, lane), patch_flop * patches
    return steps


def _step(runner: Runner, batch: StepBatch) -> None:
    runner.fetch(runner.step(batch), logprobs=False)


def _encode(runner: Runner, lane: EncodeBatch) -> None:
    runner.encode(lane)
    filler = np.zeros(1, np.int32)
    runner.read_scores(runner.score(filler, filler))  # reads the arena: waits for the lane


def _batch(
    runner: Runner,
    sizes: Sizes,
    model: ModelConfig,
    counts: list[int],
    keys: int,
    *,
    num_decodes: int,
) -> StepBatch:
    """Sequences of `keys` tokens, the last `counts` of which are the step's; each is sampled."""
    num_tokens, pages = sum(counts), -(-keys // sizes.page_size)
    batch = StepBatch(runner.layout(num_tokens))
    batch["num_tokens"][...] = num_tokens
    batch["num_decodes"][...] = num_decodes
    batch["num_samples"][...] = batch["num_sequences"][...] = len(counts)
    batch["num_ids"][...] = model.text.vocab_size
    batch["feed_T"][:] = batch["row_T"][:] = -1
    start = 0
    for i, count in enumerate(counts):
        here, positions = slice(start, start + count), np.arange(keys - count, keys)
        batch["tables_BQ"][i, :pages] = np.arange(i * pages, (i + 1) * pages)
        batch["kv_slot_T"][here] = i * pages * sizes.page_size + positions
        batch["positions_AT"][:, here] = positions
        batch["starts_B"][i], batch["counts_B"][i], batch["lengths_B"][i] = start, count, keys
        batch["sample_token_B"][i] = start + count - 1
        start += count
    return batch


def _lane(basis: Basis, patches: int) -> EncodeBatch:
    """A lane full of black patches of one picture, in whole windows."""
    vision = basis.model.vision
    lane = pack_items([], [], [], vision, lane_patches=patches, drop_slot=basis.sizes.num_rows)
    lane.segment[:] = 0
    if lane.window is not None:
        lane.window[:] = np.arange(patches) // vision.window_patches
    return lane


def gemm_speed() -> float:
    """FLOP a second of a large float32 product, the best of some."""
    x = jnp.ones((GEMM_SIDE, GEMM_SIDE), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    best = float("inf")
    for _ in range(7):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2.0 * GEMM_SIDE**3 / best


if __name__ == "__main__":
    main()
