"""What every benchmark says of itself first."""

import os
import platform
import subprocess
import sys
from pathlib import Path


def describe_run() -> str:
    """Hardware, commit and command, a line each."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return "\n".join(
        [
            f"hardware  {_processor()}, {len(os.sched_getaffinity(0))} cores",
            f"commit    {commit}",
            f"command   {' '.join(sys.argv)}",
        ]
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
