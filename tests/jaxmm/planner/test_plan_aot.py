"""A plan made with few layers is that of the whole model, as the TPU compiler sees it."""

import dataclasses
from importlib.util import find_spec

import jax.numpy as jnp
import pytest

from jaxmm.config import EngineConfig, load_config
from jaxmm.device.backend import Backend
from jaxmm.device.lowering import Lowering
from jaxmm.models.config import ModelConfig
from jaxmm.models.qwen2_vl.processor import ImageProcessor
from jaxmm.planner.chips import chip_of
from jaxmm.planner.compiler import chip_bytes, compile_step, describe_devices, mesh_of
from jaxmm.planner.plan import make_plan
from jaxmm.planner.question import Question
from tests.bench.step_cases import qwen2_5_vl_7b

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is for Linux on x86-64"),
]

TOPOLOGY, CHIPS, LAYERS = "v5e:2x2", 4, 5
TOLERANCE = 0.05
"""Of the compiler's own figure."""


def narrow() -> ModelConfig:
    """Five layers of each kind, of heads as wide as the published ones; the encoder's have windows
    alone, a kernel less to compile."""
    whole = qwen2_5_vl_7b(LAYERS, LAYERS)
    text = dataclasses.replace(
        whole.text, width=512, mlp_width=1024, num_heads=4, num_kv_heads=4, vocab_size=2048
    )
    vision = dataclasses.replace(
        whole.vision,
        width=320,
        num_heads=4,
        mlp_width=640,
        out_width=512,
        full_attention_layers=(),
    )
    return dataclasses.replace(whole, text=text, vision=vision)


def test_the_plan_is_what_the_compiler_says_of_the_whole_model() -> None:
    model, devices = narrow(), describe_devices(TOPOLOGY)
    settings = {
        "progress": False,
        "max_running": 32,
        "max_model_len": 2048,
        "pages.num_pages": 64,
        "arena.num_rows": 1024,
        "buckets.min_step_tokens": 32,
        "buckets.max_step_tokens": 32,  # as many as decode together: one compile less
        "buckets.max_patches_per_step": 1024,
    }
    question = Question(
        name="narrow",
        model=model,
        processor=ImageProcessor(max_pixels=448 * 448),
        topology=TOPOLOGY,
        chip=chip_of(TOPOLOGY),
        devices=devices,
        config=load_config(EngineConfig, None, settings),
        dtype=jnp.bfloat16,
    )
    plan = make_plan(question, lengths=(1024,))
    assert plan.layers == (2, 4, LAYERS)
    assert (plan.tensor_parallel, plan.fits) == (CHIPS, True)

    mesh = mesh_of(devices, {"model": CHIPS})
    whole = Lowering(model, question.settle(CHIPS), jnp.bfloat16, Backend("pallas", mesh))
    extend = compile_step(whole, mesh, ("language", 32))
    encode = compile_step(whole, mesh, ("encode", 1024))
    held = extend.argument_bytes + encode.argument_bytes - chip_bytes(whole.arena)
    beside = [step.peak_bytes - step.argument_bytes for step in (extend, encode)]
    assert plan.memory.used == pytest.approx(held + max(beside), rel=TOLERANCE)
    for step, compiled in zip(plan.steps[1:], (extend, encode), strict=True):
        assert step.collectives == dict(compiled.num_collectives)
        assert step.collective_bytes == compiled.collective_bytes
    # one sum for the embeddings, two a layer
    assert plan.steps[1].collectives == {"all-reduce": 1 + 2 * LAYERS}
    assert plan.steps[2].collectives == {"all-gather": 1}  # the rows of all chips
    assert [(r.length, r.pages, r.fit) for r in plan.requests] == [(1024, 8, 8)]
