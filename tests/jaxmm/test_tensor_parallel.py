"""A model split over simulated chips gives the answers of the whole one."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxmm.config import EngineConfig, load_config
from jaxmm.device.backend import (
    Backend,
    check_sizes,
    model_obstacles,
    rests,
    settle_backend,
)
from jaxmm.device.sharding import param_spec, spec_of
from jaxmm.errors import ConfigError
from jaxmm.models import read_config
from tests.checkpoints import Family, checkpoint
from tests.engines import LOGPROB_ATOL

ROOT = Path(__file__).parents[2]


def sharded_answers(family: Family, *tensor_parallel: int) -> list[list]:
    """Answers for each number of chips, from a process with four simulated ones."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.jaxmm.sharded_answers", family, *map(str, tensor_parallel)],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe"])
def test_greedy_and_drawn_answers_equal_the_unsharded_ones(family: Family) -> None:
    whole, *split = sharded_answers(family, 1, 2, 4, 2, 1)  # the last two from the compile cache
    for answers in [whole, *split]:
        assert answers[3][2] > 0  # the repeated request was served from the prefix cache
        for (ids, values, _), (wanted, wanted_values, _) in zip(answers, whole, strict=True):
            assert ids == wanted
            np.testing.assert_allclose(values, wanted_values, atol=LOGPROB_ATOL)


@pytest.mark.slow
def test_answers_from_compressed_rows_equal_the_unsharded_ones() -> None:
    """Every chip keeps the rows, and its own heads and experts read them."""
    whole, split = sharded_answers("deepseek_vl2_noaux", 1, 4)
    assert split[3][2] > 0
    for (ids, values, _), (wanted, wanted_values, _) in zip(split, whole, strict=True):
        assert ids == wanted
        np.testing.assert_allclose(values, wanted_values, atol=LOGPROB_ATOL)


def test_names_say_how_arrays_are_split() -> None:
    assert spec_of("PK") == PartitionSpec(None, "model")
    assert param_spec(("text", "layers", 0, "qkv_OD")) == PartitionSpec("model", None)
    assert param_spec(("text", "layers", 0, "out_DO")) == PartitionSpec(None, "model")
    gate_up = param_spec(("text", "layers", 0, "gate_up_2FD"))
    assert gate_up == PartitionSpec(None, "model", None)
    assert param_spec(("text", "norm_D")) == PartitionSpec(None)
    assert param_spec(("vision", "layers", 0, "qkv_OE")) == PartitionSpec()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"kernels": "pallas"}, "needs a TPU and this machine has a cpu"),
        ({"tensor_parallel": 64}, "tensor_parallel=64 and this machine has"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused_at_start(setting: dict, words: str) -> None:
    config = load_config(EngineConfig, None, setting)
    model = read_config(checkpoint("qwen2_5_vl"))
    with pytest.raises(ConfigError, match=words):
        settle_backend(config.kernels, config.tensor_parallel, model, np.float32)


def test_auto_is_portable_on_a_cpu() -> None:
    model = read_config(checkpoint("qwen2_5_vl"))
    assert settle_backend("auto", 1, model, np.float32) == Backend("portable", None)


def test_what_the_kernels_cannot_take_is_named() -> None:
    narrow = read_config(checkpoint("qwen2_5_vl"))  # a decoder of 64 channels
    assert "a text width of 64 is no multiple of 128" in list(model_obstacles(narrow, np.float32))
    wide = read_config(checkpoint("qwen2_5_vl", wide=True))
    assert list(model_obstacles(wide, np.float32)) == []
    assert "not float16" in next(model_obstacles(wide, np.float16))


def test_sizes_that_the_kernels_cannot_take_name_their_setting() -> None:
    pallas = Backend("pallas")
    with pytest.raises(ConfigError, match=r"pages\.page_size=4 is below 8"):
        check_sizes(pallas, 4, 16, 8, np.float32)
    with pytest.raises(ConfigError, match="page table of 2097152 bytes"):
        check_sizes(pallas, 16, 256, 2048, np.float32)
    check_sizes(Backend(), 4, 256, 2048, np.float32)


def test_experts_are_split_whole() -> None:
    model = read_config(checkpoint("qwen3_vl_moe"))
    text = dataclasses.replace(model.text, num_experts=model.text.num_experts + 1)
    odd = dataclasses.replace(model, text=text)
    assert not list(rests(model, 2))
    assert list(rests(odd, 2)) == [f"{text.num_experts} experts"]
