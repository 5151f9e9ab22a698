"""Serves every family in every layout, and compares each answer with that of one chip.

    python -m tests.bench.layout_table [--layouts 2x1 4x1@4 ...] [FAMILY ...]

A layout is chips of a replica x replicas; with an e the encoder is split too; @4 is over four
processes, else all chips are in one. The chips are simulated on the CPU. A cell is equal when all
tokens are those of one chip, greedy and drawn, with pictures and pruned videos, while requests are
retracted and others aborted; when conversations are found again; when nothing is left behind; and
when all processes of a pod end in order. Prints hardware, commit, a line for each cell, and all of
them as a table. Ends with status 1 where a cell is not equal. The requests are those of
`tests/jaxmm/sharded_answers.py`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
import typing
from typing import Any

from jaxmm.device.backend import rests
from jaxmm.models import read_config
from tests.bench.machine import describe_run
from tests.checkpoints import Family
from tests.jaxmm.sharded_answers import SIZES, model
from tests.layouts import LEVEL, Layout, Program, assert_served
from tests.pods import pod

LAYOUTS = ("2x1", "4x1", "1x2", "2x2", "2x2e", "2x1@2", "1x2@2", "4x1@4", "2x2@4")
POD_SECONDS = 900
END_SECONDS = 60


def main() -> int:
    """Serve them; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all without")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, metavar="LAYOUT")
    parsed = parser.parse_args()
    print(describe_run(), flush=True)
    families = parsed.families or typing.get_args(Family)
    rows = {family: cells(family, parsed.layouts) for family in families}
    print("\n| |", " | ".join(f"`{layout}`" for layout in parsed.layouts), "|")
    print("|---" * (1 + len(parsed.layouts)) + "|")
    for family, row in rows.items():
        print(f"| {family} |", " | ".join(row), "|")
    faults = sum(cell == "NOT equal" for row in rows.values() for cell in row)
    print("verdict:", f"{faults} cells are not equal" if faults else "all are equal")
    return 1 if faults else 0


def cells(family: Family, layouts: list[str]) -> list[str]:
    """One family in each layout; its process is not that of the next, for memory mappings."""
    with tempfile.TemporaryFile("w+") as errors:
        program = Program(errors)
        try:
            [whole] = program.serve(family, "1x1")
            return [cell(program, family, layout, whole) for layout in layouts]
        finally:
            program.close()


def cell(program: Program, family: Family, name: str, whole: dict[str, Any]) -> str:
    """What the table says of a family in a layout; all of it is printed at once."""
    layout, start = Layout.named(name), time.monotonic()
    dimensions = read_config(model(family))
    for rest in rests(dimensions, layout.tensor_parallel, split_encoder=layout.split_encoder):
        print(f"{family} {name} cannot be: {rest} are not to be divided", flush=True)
        return f"no: {rest}"
    try:
        if layout.num_processes == 1:
            [found] = program.serve(family, name)
        else:
            found = serve_on_pod(family, layout)
        assert_served(found, whole, layout)
    except AssertionError:
        print(f"{family} {name} NOT equal\n{traceback.format_exc()}", flush=True)
        return "NOT equal"
    num_tokens = sum(len(ids) for result in found["ids"] for ids in result)
    print(
        f"{family} {name} equal: {num_tokens} tokens, {found['retracts']} retracts, "
        f"{found['aborted']} aborted, {time.monotonic() - start:.0f} s",
        flush=True,
    )
    return f"equal, {found['retracts']}, {found['aborted']}"


def serve_on_pod(family: Family, layout: Layout) -> dict[str, Any]:
    """The same requests to process 0 of a pod, which ends in order then."""
    num_chips = layout.tensor_parallel * layout.data_parallel // layout.num_processes
    words = {
        "JAXMM_POD_SILENCE_SECONDS": 90,  # on a machine whose cores others want too
        "JAXMM_POD_STEP_SECONDS": 300,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_chips} {LEVEL}",
        "JAXMM_ENCODER_PARALLEL": layout.settings["encoder_parallel"],
    }
    with pod(
        model(family),
        ("-m", "tests.jaxmm.sharded_answers", "pod"),
        layout.num_processes,
        replicas=layout.data_parallel,
        chips=num_chips,
        sizes=SIZES,
        **words,
    ) as processes:
        out = ended(processes[0], POD_SECONDS)
        for process in processes[1:]:
            ended(process, END_SECONDS)
    [report] = (line for line in out.splitlines() if line.startswith('{"ids"'))
    found: dict[str, Any] = json.loads(report)
    return found


def ended(process: subprocess.Popen[str], seconds: float) -> str:
    """What a process wrote that ends in order within such a time."""
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as e:
        raise AssertionError(f"{process.args} runs after {seconds} s") from e
    assert process.returncode == 0, f"{process.args}: {out[-3000:]}"
    return out


if __name__ == "__main__":
    sys.exit(main())
