"""Prints what whole steps of a model take on chips that are not there.

    python -m tests.bench.step_table [--topology v5e:2x2] [--chips 4] [STEP:SIZE ...]
    python -m tests.bench.step_table --model config.json --topology v5p:2x2x4 --chips 16 --layers 4
    python -m tests.bench.step_table --case gemma3_4b --layers 2 language:2048

Without a model, a case of `step_cases`, Qwen2.5-VL-7B if none is named, with 1024 pages. Needs
libtpu and no TPU. A language step of 28 layers compiles for minutes.
"""

import argparse
import time
from collections.abc import Callable

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxmm.config import EngineConfig
from jaxmm.device.backend import spread_kv_heads
from jaxmm.device.lowering import Lowering
from jaxmm.models.config import ModelConfig
from jaxmm.planner.compiler import chip_bytes, compile_step
from jaxmm.planner.depth import Depths, with_depths
from jaxmm.planner.question import read_question
from tests import aot
from tests.bench import step_cases

CASES: dict[str, Callable[[], ModelConfig]] = {
    make.__name__: make
    for make in (
        step_cases.qwen2_5_vl_7b,
        step_cases.qwen3_vl_8b,
        step_cases.gemma3_4b,
        step_cases.deepseek_vl2_tiny,
        step_cases.deepseek_vl2_small,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="qwen2_5_vl_7b", choices=CASES)
    parser.add_argument("--model", default="", help="config.json, or the directory it is in")
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--chips", type=int, default=4)
    parser.add_argument("--layers", type=int, default=0, help="of each kind; 0: all")
    parser.add_argument("--encoder-parallel", default="lanes", choices=("lanes", "model"))
    parser.add_argument("steps", nargs="*", default=["language:64", "language:2048", "encode:4096"])
    args = parser.parse_args()
    lowered_by, mesh = _lowering(args)
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


def _lowering(args: argparse.Namespace) -> tuple[Lowering, Mesh]:
    split, depths = args.encoder_parallel == "model", Depths(args.layers, args.layers)
    if not args.model:
        whole = CASES[args.case]()
        model = with_depths(whole, depths) if args.layers else whole
        return step_cases.lowering(model, args.topology, args.chips, split_encoder=split)
    config = EngineConfig(encoder_parallel=args.encoder_parallel)
    question = read_question(args.model, args.topology, config)
    model = spread_kv_heads(question.model, args.chips)
    if args.layers:
        model = with_depths(model, depths)
    backend = question.backend(args.chips)
    assert backend.mesh is not None, "it always has one"
    return Lowering(model, question.settle(args.chips), jnp.bfloat16, backend), backend.mesh


if __name__ == "__main__":
    main()
