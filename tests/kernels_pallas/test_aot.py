"""The kernels compile for every TPU generation, in place and without copies, alone and sharded."""

import dataclasses
from importlib.util import find_spec
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from kernels_pallas.ragged_paged_attention import kernel as mixed
from tests import aot
from tests.bench import kernel_cases
from tests.bench.kernel_cases import Case, Heads

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is for Linux on x86-64"),
]

SERVED = [
    kernel_cases.decode_case(64, kernel_cases.QWEN_7B, 128),
    kernel_cases.decode_case(256, Heads(16, 8), 16),
    kernel_cases.extend_case(2048, kernel_cases.QWEN_7B, 128),
    kernel_cases.decode_case(64, kernel_cases.LATENT, 128),
    kernel_cases.extend_case(1024, kernel_cases.GEMMA_4B, 128, both_ways=True),
    kernel_cases.extend_case(96, kernel_cases.GEMMA_4B, 16, both_ways=True),  # tiles of 32
    kernel_cases.extend_case(1024, dataclasses.replace(kernel_cases.LATENT, queries=4), 128),
    kernel_cases.kv_case(2048, 4, 128),
    kernel_cases.scatter_case(2048, 3584),
    kernel_cases.scatter_case(2048, 1536, levels=4),
    kernel_cases.segment_case(4096, 1, 16, 80),
    kernel_cases.segment_case(768, 3, 16, 72),
    kernel_cases.window_case(4096, 16, 80),
    kernel_cases.grouped_case(2048, 28, 4),
    kernel_cases.packed_case(4096, 16, 80, keys_by_head=False),
    kernel_cases.packed_case(1024, 16, 72, keys_by_head=True),
]
TABLES = 5
"""Arguments of a step that every chip holds whole: starts, lengths, page table, two counts."""


@pytest.mark.parametrize("topology", aot.ONE_CHIP)
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_a_kernel_compiles_in_place_and_without_copies(case: Case, topology: str):
    mesh = aot.mesh_of(topology)
    compiled = aot.compile_for(mesh, case.function, case.args, donate=case.donate)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= case.donated_bytes
    # on v5p the extend of 2048 tokens has 1.75 MiB beside its arguments; its queries have 14
    assert memory.temp_size_in_bytes < 2 << 20
    assert aot.copied_bytes(compiled.as_text()) == 0


def step(
    q_TX: Any, new_TY: Any, pages_PKSJ: Any, start: Any, length: Any, table: Any, *counts: Any
) -> tuple[Any, Any]:
    """A mixed step of up to 64 decodes, with its plan."""
    page_size = pages_PKSJ.shape[2]
    plan = mixed.plan_extends(
        start, length, table, *counts, num_tokens=q_TX.shape[0], page_size=page_size
    )
    return mixed.ragged_paged_attention(
        q_TX,
        new_TY,
        pages_PKSJ,
        start,
        length,
        table,
        counts[0],
        plan,
        channels=kernel_cases.C,
        max_decode=64,
    )


@pytest.mark.parametrize(
    ("topology", "axes"),
    [("v5e:2x2", {"data": 1, "model": 4}), ("v6e:4x4", {"data": 4, "model": 4})],
)
def test_a_mixed_step_splits_over_kv_heads_without_talking(topology: str, axes: dict[str, int]):
    mesh = aot.mesh_of(topology, axes)
    lanes, heads = P(None, "model"), P(None, "model", None, None)
    specs = (lanes, lanes, heads, *[P()] * TABLES)
    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(lanes, heads), check_vma=False
    )
    args = kernel_cases.step_args(2048, 28, 4, num=96, page=128)
    compiled = aot.compile_for(
        mesh, sharded, args, specs=specs, out_specs=(lanes, heads), donate=(2,)
    )
    pool_bytes = args[2].size * args[2].dtype.itemsize // axes["model"]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // 2  # outputs of two calls, no second pool
    assert aot.collectives(compiled.as_text()) == {}


def test_a_pool_that_does_not_fit_the_chip_is_an_error():
    case = kernel_cases.kv_case(2048, 4, 128)
    pool = kernel_cases.bf16(40_000, 4, 128, 512)
    args = (kernel_cases.bf16(2048, 4 * 512), pool, case.args[2])
    mesh = aot.mesh_of("v5e:1x1")
    with pytest.raises(jax.errors.JaxRuntimeError, match="Ran out of memory"):
        aot.compile_for(mesh, case.function, args, donate=(1,))
