"""Layouts of an engine, and what must be equal in all of them: requests served by other processes.

A layout such as `2x4e@4` is chips of a replica x replicas; with an e the encoder is split too, and
behind the @ stands over how many processes, if not all in one.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from tests.checkpoints import Family
from tests.engines import LOGPROB_ATOL

ROOT = Path(__file__).parents[1]
LEVEL = "--xla_backend_optimization_level=0"
"""All layouts are compiled alike, in less time."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the chips are used."""

    tensor_parallel: int
    data_parallel: int
    split_encoder: bool
    num_processes: int

    @classmethod
    def named(cls, name: str) -> "Layout":
        """From its name, as the first lines of the module have it."""
        match = re.fullmatch(r"(\d+)x(\d+)(e?)(?:@(\d+))?", name)
        assert match, f"{name!r} is no layout"
        return cls(int(match[1]), int(match[2]), bool(match[3]), int(match[4] or 1))

    @property
    def settings(self) -> dict[str, Any]:
        """Of the engine."""
        return {
            "tensor_parallel": self.tensor_parallel,
            "data_parallel": self.data_parallel,
            "encoder_parallel": "model" if self.split_encoder else "lanes",
        }


class Program:
    """Serves layouts one after the other: one start of JAX and of torch for all."""

    def __init__(self, errors: TextIO) -> None:
        self._errors = errors
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.jaxmm.sharded_answers"],
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {LEVEL}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def serve(self, family: Family, *layouts: str) -> list[dict[str, Any]]:
        """What each layout made of the same requests."""
        if self._process.poll() is not None:  # what failed before ended it
            self._process = self._start()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join((family, *layouts)) + "\n")
        self._process.stdin.flush()
        return [json.loads(self._process.stdout.readline() or self._fail()) for _ in layouts]

    def _fail(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        raise AssertionError(self._errors.read()[-3000:])

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def assert_served(found: dict[str, Any], whole: dict[str, Any], layout: Layout) -> None:
    """All requests were answered as on one chip, under load too, and nothing was left behind."""
    assert found["ids"] == whole["ids"]  # greedy and drawn
    for values, wanted in zip(found["logprobs"], whole["logprobs"], strict=True):
        np.testing.assert_allclose(values, wanted, atol=LOGPROB_ATOL)
    assert found["cached"] > 0  # the repeated request found the replica that had served it
    if whole["pruned"]:  # by a family that takes videos
        assert_pruned_equal(found["pruned"], whole["pruned"])
    assert found["retracts"] > 0
    assert found["aborted"] > 0
    assert found["left"] == {}, found["left"]
    num_replicas, talks = len(found["finished"]), found["talks"]
    assert num_replicas == layout.data_parallel
    assert min(found["finished"]) > 3  # every replica had its share
    # a conversation stays where it is kept; equals take turns
    assert talks["kept"] == [[2 // num_replicas] * num_replicas] * 2
    assert min(talks["cached"]) > 0
    assert talks["cost"][0] == talks["cost"][1] > 0
    assert talks["dropped"] == 0


def assert_pruned_equal(found: dict[str, Any], whole: dict[str, Any]) -> None:
    """So were those with pruned videos."""
    assert found["ids"] == whole["ids"]
    np.testing.assert_allclose(found["logprobs"], whole["logprobs"], atol=LOGPROB_ATOL)
    assert found["tokens"] == [4 * 12] * 3  # half of two videos of 4 steps of 12 rows
    assert found["encoded"] == 3 * 2 * 4  # on one replica each, that serves the request then
