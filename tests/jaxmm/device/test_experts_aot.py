"""Experts over chips: every chip keeps its own, and the sum over tokens is all that is sent."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jaxmm.device.backend import Backend
from jaxmm.device.experts import expert_mlp, route
from jaxmm.device.sharding import spec_of
from tests import aot

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is for Linux on x86-64"),
]

EXPERTS, PER_TOKEN, WIDTH, INNER, TOKENS = 128, 8, 4096, 1536, 256
"""Of Qwen3-VL-235B-A22B."""


def test_one_sum_and_no_weight_moves() -> None:
    mesh = aot.mesh_of("v5p:2x2x4", {"model": 16})

    def layer(x_TD, router_XD, gate_up_ZDO, down_ZFD):
        routing = route(jnp.dot(x_TD, router_XD.T), PER_TOKEN)
        return expert_mlp(x_TD, gate_up_ZDO, down_ZFD, routing, Backend("pallas", mesh))

    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in (
            (TOKENS, WIDTH),
            (EXPERTS, WIDTH),
            (EXPERTS, WIDTH, 2 * INNER),
            (EXPERTS, INNER, WIDTH),
        )
    ]
    specs = [PartitionSpec(), PartitionSpec(), spec_of("ZDO"), spec_of("ZFD")]
    compiled = aot.compile_for(mesh, layer, args, specs=specs)
    assert aot.collectives(compiled.as_text()) == {"all-reduce": 1}
    own = (TOKENS + EXPERTS) * WIDTH * 2 + EXPERTS // 16 * 3 * WIDTH * INNER * 2
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == own  # no lane of padding
    # each pair of token and expert has a row as wide as the token, in float32, a few times over
    assert memory.temp_size_in_bytes < 6 * TOKENS * PER_TOKEN * WIDTH * 4
    # each row through one expert, not through all eight of the chip
    rows = 2 * TOKENS * PER_TOKEN * 3 * WIDTH * INNER
    assert rows <= compiled.cost_analysis()["flops"] < 1.1 * rows
