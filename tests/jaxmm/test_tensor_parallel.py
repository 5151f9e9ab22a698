"""A model split over simulated chips, in one replica or several, gives the answers of the whole
one."""

import dataclasses
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxmm.config import EngineConfig, load_config
from jaxmm.device.backend import (
    Backend,
    check_sizes,
    model_obstacles,
    rests,
    settle_backends,
)
from jaxmm.device.sharding import param_spec, spec_of
from jaxmm.errors import ConfigError
from jaxmm.models import read_config
from kernels_pallas import native
from tests.checkpoints import Family, checkpoint
from tests.layouts import Layout, Program, assert_served


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    with tempfile.TemporaryFile("w+") as errors:
        program = Program(errors)
        yield program
        program.close()


LAYOUTS: dict[Family, tuple[str, ...]] = {
    "qwen2_5_vl": ("2x1e", "4x1", "1x2", "2x2"),
    "qwen3_vl_moe": ("4x1e", "2x2"),
    "qwen2_vl": ("2x2e",),  # the decoder of qwen2_5_vl
    "qwen3_vl": ("2x2e",),  # that of qwen3_vl_moe, which has a layer without experts too
    "deepseek_vl2_mha": ("4x1",),
    "deepseek_vl2_noaux": ("2x2",),  # every chip keeps the compressed rows
    "gemma3": ("4x1e",),  # each of two KV heads on two chips
}
"""Names as in `tests.layouts`; `python -m tests.bench.layout_table` serves each family in all."""


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYOUTS)
def test_greedy_and_drawn_answers_equal_the_unsharded_ones(
    program: Program, family: Family
) -> None:
    layouts = LAYOUTS[family]
    whole, *split = program.serve(family, "1x1", *layouts)
    for found, name in zip([whole, *split], ["1x1", *layouts], strict=True):
        assert_served(found, whole, Layout.named(name))


def test_names_say_how_arrays_are_split() -> None:
    assert spec_of("PK") == PartitionSpec(None, "model")
    assert param_spec(("text", "layers", 0, "qkv_OD")) == PartitionSpec("model", None)
    assert param_spec(("text", "layers", 0, "out_DO")) == PartitionSpec(None, "model")
    gate_up = param_spec(("text", "layers", 0, "gate_up_2FD"))
    assert gate_up == PartitionSpec(None, "model", None)
    assert param_spec(("text", "norm_D")) == PartitionSpec(None)
    qkv = ("vision", "layers", 0, "qkv_3OE")
    assert param_spec(qkv) == PartitionSpec()
    assert param_spec(qkv, split_encoder=True) == PartitionSpec(None, "model", None)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"kernels": "pallas"}, "needs a TPU and this machine has a cpu"),
        ({"tensor_parallel": 64}, "tensor_parallel=64 and this machine has"),
        ({"data_parallel": 64}, "data_parallel=64 replicas of tensor_parallel=1 and this machine"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused_at_start(setting: dict, words: str) -> None:
    config = load_config(EngineConfig, None, setting)
    model = read_config(checkpoint("qwen2_5_vl"))
    with pytest.raises(ConfigError, match=words):
        settle_backends(
            config.kernels, config.tensor_parallel, config.data_parallel, model, np.float32
        )


def test_auto_is_portable_on_a_cpu() -> None:
    model = read_config(checkpoint("qwen2_5_vl"))
    [chosen] = settle_backends("auto", 1, 1, model, np.float32)
    assert chosen == Backend("portable", None, native=native.is_available())
    [plain] = settle_backends("portable", 1, 1, model, np.float32)
    assert plain == Backend("portable", None)


def test_kernels_of_a_cpu_are_for_float32() -> None:
    """Of any model: what they cannot take goes as without them."""
    model = read_config(checkpoint("qwen2_5_vl"))
    experts = dataclasses.replace(model, text=dataclasses.replace(model.text, num_experts=4))
    assert not settle_backends("auto", 1, 1, model, np.float16)[0].native
    assert settle_backends("auto", 1, 1, experts, np.float32)[0].native is native.is_available()


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


def test_an_encoder_that_is_split_must_divide_too() -> None:
    model = read_config(checkpoint("qwen2_5_vl"))
    vision = dataclasses.replace(model.vision, num_heads=1, mlp_width=95)
    odd = dataclasses.replace(model, vision=vision)
    assert not list(rests(odd, 2))
    assert list(rests(odd, 2, split_encoder=True)) == ["1 encoder heads", "95 encoder MLP channels"]
