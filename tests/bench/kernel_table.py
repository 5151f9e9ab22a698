"""Prints the static cost of the kernels beside the least they could cost, for TPU generations.

    python -m tests.bench.kernel_table [--topology v5e:1x1 ...] [--only TEXT] [--markdown]

Needs libtpu and no TPU. The cases of a topology compile in one process, as the place of the
compiler's dump is chosen when libtpu loads. Branches that exclude each other are counted by their
share where they are large; small ones count as taken, so the figures err upwards.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from tests import aot
from tests.bench import kernel_cases, schedule
from tests.bench.kernel_cases import Case, cases

_PASSES = ".*(final_bundles|hlo-static-bundle-profile).*"
_MATMUL_CYCLES = {"v5e": 4.0, "v5p": 4.0, "v6e": 4.0, "tpu7x": 4.0}
"""Of 16 bfloat16 rows: 16 cycles on four units of 128 columns, 8 on two of 256."""
MIXED = "mixed 64 + 1984, 28/4, page 128"
"""A step of both kinds: what its calls take in one program, and what XLA puts between them."""
_HEADER = (
    "case",
    "chip",
    "floor us",
    "by",
    "compute us",
    "bundles",
    "VMEM KiB",
    "spills",
    "copies",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", action="append", help="default: one chip of each generation")
    parser.add_argument("--only", default="", help="part of the names of the cases")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return _worker(*args.worker)
    _print(_HEADER, markdown=args.markdown)
    if args.markdown:
        print("|" + "---|" * len(_HEADER))
    chosen = {case.name: case for case in cases() if args.only in case.name}
    names = [*chosen, *([MIXED] if args.only in MIXED else [])]
    unread: list[str] = []
    for topology in args.topology or aot.ONE_CHIP:
        chip = topology.partition(":")[0]
        for name, facts, folder in _compiled(names, topology):
            try:
                if name == MIXED:
                    print(_mixed_line(chip, facts, folder), flush=True)
                else:
                    _print(_cells(chosen[name], chip, facts, folder), markdown=args.markdown)
            except ValueError as error:
                unread.append(f"{name} on {chip}: {error}")
    if unread:
        sys.exit("\n".join(unread))


def _print(row: tuple[str, ...], *, markdown: bool) -> None:
    """Print a row at once: a table takes minutes."""
    if markdown:
        line = "".join(f"| {cell} " for cell in row) + "|"
    else:
        line = "  ".join([row[0].ljust(36), *(cell.rjust(10) for cell in row[1:])])
    print(line, flush=True)


def _worker(topology: str, *names: str) -> None:
    """Compile cases and print what each compiled module says, a line of JSON each.

    The parent has taken the dump of one away before it lets the next begin.
    """
    mesh = aot.mesh_of(topology)
    by_name = {case.name: case for case in cases()}
    for name in names:
        if name == MIXED:
            step, args, donate = kernel_cases.mixed_step, kernel_cases.mixed_args(), (2,)
        else:
            case = by_name[name]
            step, args, donate = case.function, case.args, case.donate
        hlo = aot.compile_for(mesh, step, args, donate=donate).as_text()
        between = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', hlo)))
        facts = {"copies": aot.copied_bytes(hlo), "between": between, **aot.chip_of(mesh)}
        print(json.dumps(facts), flush=True)
        jax.clear_caches()  # 12/2 heads are padded to the shapes of 16/2, and would leave no dump
        if not sys.stdin.readline():
            return


def _compiled(names: Sequence[str], topology: str) -> Iterator[tuple[str, dict[str, Any], Path]]:
    """Compile cases; with each name comes what the module says, and the folder of its schedules,
    which is emptied for the next."""
    with tempfile.TemporaryDirectory() as dump:
        flags = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
        flags += f" --xla_jf_dump_llo_pass_label_regex={_PASSES}"
        command = [sys.executable, "-m", "tests.bench.kernel_table", "--worker", topology, *names]
        with subprocess.Popen(
            command,
            env={**os.environ, "LIBTPU_INIT_ARGS": flags},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as worker:
            assert worker.stdin is not None and worker.stdout is not None
            for name in names:
                line = worker.stdout.readline()
                if not line:
                    sys.exit(f"{name} on {topology}: the compiler ended")
                yield name, json.loads(line), Path(dump)
                for path in Path(dump).rglob("*.*"):
                    path.unlink(missing_ok=True)
                worker.stdin.write("\n")
                worker.stdin.flush()


def _mixed_line(chip: str, facts: dict[str, Any], folder: Path) -> str:
    calls = {
        part.kernel: _schedule(part, chip, facts, folder)[1] * 1e6
        for part in kernel_cases.MIXED_PARTS
    }
    calls["XLA between them"] = facts["between"] / facts["clock"] * 1e6
    parts = ", ".join(f"{name} {us:.0f}" for name, us in calls.items())
    return f"{MIXED}, {chip}: {sum(calls.values()):.0f} us, of them {parts}"


def _schedule(case: Case, chip: str, facts: dict[str, Any], folder: Path) -> tuple[int, float]:
    """Bundles of a case's kernel, and seconds of its compute."""
    (program,) = folder.rglob(f"*-{case.kernel}*-final_bundles.txt")
    root = schedule.parse(program.read_text(), delay=6 if chip == "tpu7x" else 4)
    schedule.set_times(
        root,
        case.times,
        large=case.large,
        small_loop_times=case.small_loop_times,
        inner_loop_times=case.inner_loop_times,
        pattern=case.pattern,
    )
    return root.bundles, root.cycles(_MATMUL_CYCLES[chip]) / facts["clock"]


def _cells(case: Case, chip: str, facts: dict[str, Any], folder: Path) -> tuple[str, ...]:
    bundles, seconds = _schedule(case, chip, facts, folder)
    memory, matrix = case.hbm_bytes / facts["bandwidth"], case.flops / facts["flops"]
    vmem, spills = _profile(folder, case.kernel)
    return (
        case.name,
        chip,
        f"{max(memory, matrix) * 1e6:.0f}",
        "HBM" if memory >= matrix else "MXU",
        f"{seconds * 1e6:.0f}",
        str(bundles),
        str(vmem >> 10),
        str(spills),
        f"{facts['copies'] / 2**20:.0f} MiB",
    )


def _profile(folder: Path, kernel: str) -> tuple[int, int]:
    """VMEM bytes of a kernel and its vector spills."""
    vmem = spills = 0
    for path in folder.rglob("*hlo-static-bundle-profile.txt"):
        for block in path.read_text().split("HLO: ")[1:]:
            found = re.search(r"VMEM_SPILL_COUNT: \((\d+)/", block)
            if block.startswith(f"%{kernel}") and found:
                spills = int(found[1])
    for path in folder.rglob("*vmem_report.html"):
        page = path.read_text()
        start = page.find("{", page.find("const DATA"))
        data, _ = json.JSONDecoder().raw_decode(page[start:])
        for name, entry in data.get("hlo_breakdowns", {}).items():
            if name.startswith(kernel):
                vmem = int(entry.get("total_size", 0))
    return vmem, spills


if __name__ == "__main__":
    main()
