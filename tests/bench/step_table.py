"""Prints what whole steps of Qwen2.5-VL-7B take on chips that are not there.

    python -m tests.bench.step_table [--topology v5e:2x2] [--chips 4] [STEP:SIZE ...]

Needs libtpu and no TPU. A language step of 28 layers compiles for minutes.
"""

import argparse
import time

from jaxmm.planner.compiler import chip_bytes, compile_step
from tests import aot
from tests.bench import step_cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--chips", type=int, default=4)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("steps", nargs="*", default=["language:64", "language:2048", "encode:4096"])
    args = parser.parse_args()
    model = step_cases.qwen2_5_vl_7b(args.layers, 32 if args.layers == 28 else 4)
    lowered_by, mesh = step_cases.lowering(model, args.topology, args.chips)
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
            f"{dict(compiled.num_collectives) or 'no collective'}, "
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
