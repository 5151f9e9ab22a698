"""Prints what whole steps of a model take on chips that are not there.

    python -m tests.bench.step_table [--topology v5e:2x2] [--chips 4] [STEP:SIZE ...]
    python -m tests.bench.step_table --model config.json --topology v5p:2x2x4 --chips 16 --layers 4

Without a model, Qwen2.5-VL-7B with 1024 pages. Needs libtpu and no TPU. A language step of 28
layers compiles for minutes.
"""

import argparse
import time

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxmm.config import EngineConfig
from jaxmm.device.backend import spread_kv_heads
from jaxmm.device.lowering import Lowering
from jaxmm.planner.compiler import chip_bytes, compile_step
from jaxmm.planner.depth import Depths, with_depths
from jaxmm.planner.question import read_question
from tests import aot
from tests.bench import step_cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="config.json, or the directory it is in")
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--chips", type=int, default=4)
    parser.add_argument("--layers", type=int, default=0, help="of each kind; 0: all")
    parser.add_argument("--encoder-parallel", default="lanes", choices=("lanes", "model"))
    parser.add_argument("steps", nargs="*", default=["language:64", "language:2048", "encode:4096"])
    args = parser.parse_args()
    split = args.encoder_parallel == "model"
    lowered_by, mesh = _lowering(args.model, args.topology, args.chips, args.layers, split)
    pools = chip_bytes(lowered_by.kv_pages) / 2**30
    print(f"{args.chips} chips of {args.topology}; KV pools of {pools:.2f} GiB a chip", flush=True)
    for name in args.steps:
        step, _, size = name.partition(":")
        start = time.perf_counter()
        compiled = compile_step(lowered_by, mesh, (step, int(size)))
        gib = [
            n / 2**30
            for n in (compiled.argument_bytes, compiled.temporary_bytes, compiled.peak_bytes)
        ]
        print(
            f"{name:<14} arguments {gib[0]:.2f} temporaries {gib[1]:.3f} peak {gib[2]:.2f} GiB, "
            f"copies {aot.copied_bytes(compiled.hlo) / 2**20:.0f} MiB, "
            f"{dict(compiled.num_collectives) or 'no collective'} of "
            f"{compiled.collective_bytes / 2**20:.0f} MiB, {time.perf_counter() - start:.0f} s",
            flush=True,
        )


def _lowering(
    path: str, topology: str, chips: int, layers: int, split: bool
) -> tuple[Lowering, Mesh]:
    if not path:
        whole = step_cases.qwen2_5_vl_7b()
        model = with_depths(whole, Depths(layers, layers)) if layers else whole
        return step_cases.lowering(model, topology, chips, split_encoder=split)
    config = EngineConfig(encoder_parallel="model" if split else "lanes")
    question = read_question(path, topology, config)
    model = spread_kv_heads(question.model, chips)
    if layers:
        model = with_depths(model, Depths(layers, layers))
    backend = question.backend(chips)
    assert backend.mesh is not None, "it always has one"
    return Lowering(model, question.settle(chips), jnp.bfloat16, backend), backend.mesh


if __name__ == "__main__":
    main()
