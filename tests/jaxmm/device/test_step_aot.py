"""Whole steps of a 7B model compile for four v5e chips: they fit, in place, and talk little.

A layer of each kind stands for all: a layer more adds its weights and its pool, no temporary.
"""

import dataclasses
from importlib.util import find_spec

import pytest
from jax.sharding import Mesh

from jaxmm.device.lowering import Lowering
from jaxmm.planner.compiler import CompiledStep, chip_bytes, compile_step
from tests.bench import step_cases

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is for Linux on x86-64"),
]

TOPOLOGY, CHIPS = "v5e:2x2", 4
CHIP_BYTES = 15.75 * 2**30
"""What a v5e's 16 GiB leave to programs."""
LAYERS = 2
"""The last one goes on with the tokens that are sampled alone."""
ENCODER_LAYERS = 2
"""One attends over windows, one over the whole picture."""


@pytest.fixture(scope="module")
def lowered_by() -> tuple[Lowering, Mesh]:
    model = step_cases.qwen2_5_vl_7b(LAYERS, ENCODER_LAYERS)
    # a pool that no temporary reaches
    sizes = dataclasses.replace(step_cases.SERVING, num_pages=2048)
    return step_cases.lowering(model, TOPOLOGY, CHIPS, sizes)


def whole_model_bytes(compiled: CompiledStep) -> int:
    """Weights, pools, arena and state of all layers on one chip, and the step's temporaries."""
    whole, _ = step_cases.lowering(step_cases.qwen2_5_vl_7b(), TOPOLOGY, CHIPS)
    held = (whole.params, whole.kv_pages, whole.arena, whole.state)
    return chip_bytes(held) + compiled.temporary_bytes


def test_language_step(lowered_by: tuple[Lowering, Mesh]) -> None:
    steps, mesh = lowered_by
    compiled = compile_step(steps, mesh, ("language", 2048))
    pools, state = chip_bytes(steps.kv_pages), chip_bytes(steps.state)
    assert compiled.aliased_bytes >= pools + state
    assert compiled.temporary_bytes < pools  # a pool of 128 MiB: no copy of it
    assert whole_model_bytes(compiled) < CHIP_BYTES
    # one sum for the embeddings, two a layer, of bfloat16 residuals; in the last of those that are
    # sampled
    residual, few = 2048 * 3584 * 2, step_cases.SERVING.max_running * 3584 * 2
    sums = [residual] * (1 + 2 * (LAYERS - 1)) + [few] * 2
    assert compiled.collectives() == [("all-reduce", size) for size in sums]


def test_encoder_split_over_the_chips() -> None:
    """Deepstack and heads of 72 channels."""
    model = step_cases.qwen3_vl_8b(1, 1)
    steps, mesh = step_cases.lowering(model, TOPOLOGY, CHIPS, split_encoder=True)
    compiled = compile_step(steps, mesh, ("encode", 4096))
    assert compiled.aliased_bytes >= chip_bytes(steps.arena)
    # all encode the same 4096 patches: two sums in the layer, of bfloat16 residuals
    assert compiled.collectives() == [("all-reduce", 4096 * 1152 * 2)] * 2


def test_encode_step_of_sixteen_chips_with_deepstack_and_heads_of_72() -> None:
    model = step_cases.qwen3_vl_8b(1, 1)
    steps, mesh = step_cases.lowering(model, "v6e:4x4", 16)
    compiled = compile_step(steps, mesh, ("encode", 4096))
    assert compiled.aliased_bytes >= chip_bytes(steps.arena)
    # every chip encodes 4096 patches of its own, and has the rows of all, of two levels
    assert set(compiled.num_collectives) == {"all-gather"}
    assert compiled.collective_bytes == 16 * 1024 * 2 * 4096 * 2


def test_encode_step(lowered_by: tuple[Lowering, Mesh]) -> None:
    steps, mesh = lowered_by
    compiled = compile_step(steps, mesh, ("encode", 4096))
    assert compiled.aliased_bytes >= chip_bytes(steps.arena)
    assert whole_model_bytes(compiled) < CHIP_BYTES
    # every chip encodes 4096 patches of its own, and has the rows of all
    rows = CHIPS * 1024 * 3584 * 2
    assert compiled.collectives() == [("all-gather", rows)]
