"""The paged attention kernels in the TPU interpreter, against the reference."""

import functools
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings

from kernels_pallas.ragged_paged_attention import kernel, kernel_reference, layout
from tests.kernels_pallas.interpreter import interpret
from tests.kernels_pallas.steps import Step, random_step

FLOAT32_TOLERANCE = 2e-5
"""Sums of up to 256 products in another order."""
BFLOAT16_TOLERANCE = 2e-2
"""Weights and outputs are rounded to 8 bits; outputs are below 4."""


@functools.partial(jax.jit, static_argnames=("channels", "max_decode", "has_extends", "options"))
def _run(
    q_TX: jax.Array,
    new_TY: jax.Array,
    pages_PKSJ: jax.Array,
    tables: tuple[jax.Array, ...],
    counts: tuple[jax.Array, jax.Array],
    *,
    channels: int,
    max_decode: int,
    has_extends: bool,
    options: tuple[tuple[str, Any], ...],
) -> tuple[jax.Array, jax.Array]:
    sizes = {"num_tokens": q_TX.shape[0], "page_size": pages_PKSJ.shape[2]}
    extends = kernel.plan_extends(*tables, *counts, **sizes) if has_extends else None
    return kernel.ragged_paged_attention(
        q_TX,
        new_TY,
        pages_PKSJ,
        *tables,
        counts[0],
        extends,
        channels=channels,
        max_decode=max_decode,
        **dict(options),
    )


def check(step: Step, *, max_decode: int, has_extends: bool = True, **options: Any) -> None:
    """Compare kernels and reference: outputs, the whole pool, zeros for padding."""
    tables = (step.start_B1, step.length_B, step.page_table_BQ)
    out_TX, pages = interpret(
        _run,
        step.q_TX,
        step.new_TKJ.reshape(step.new_TKJ.shape[0], -1),
        step.pages_PKSJ,
        tables,
        (jnp.int32(step.num_decode), jnp.int32(step.num_sequences)),
        channels=layout.query_lanes(step.q_THC.shape[2]),
        max_decode=max_decode,
        has_extends=has_extends,
        options=tuple(options.items()),
    )
    wanted, wanted_pages = kernel_reference.ragged_paged_attention(
        step.q_THC, step.new_TKJ, step.pages_PKSJ, *tables, step.num_sequences, **options
    )
    is_float32 = step.q_THC.dtype == jnp.float32
    tolerance = FLOAT32_TOLERANCE if is_float32 else BFLOAT16_TOLERANCE
    got = step.outputs_THC(out_TX)
    np.testing.assert_allclose(got, wanted, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(out_TX[step.num_real_tokens :], 0)
    np.testing.assert_array_equal(pages.astype(jnp.float32), wanted_pages.astype(jnp.float32))


@pytest.mark.slow
def test_decodes_alone_on_full_and_nearly_empty_last_pages():
    # Lengths 1, 64 (one full page), 65 (a last page of one token), 200; one padding row.
    step = random_step([0, 63, 64, 199], [], num_tokens=5, num_sequences=5)
    check(step, max_decode=5, has_extends=False)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"window": 70}, {"soft_cap": 2.0}])
def test_decodes_and_extends_share_a_step(options):
    step = random_step([129, 3], [(0, 10), (129, 1), (180, 30)], num_tokens=48)
    check(step, max_decode=4, **options)


@pytest.mark.slow
def test_a_step_without_decodes_and_one_without_tokens():
    check(random_step([], [(30, 20)], num_tokens=32, num_sequences=2), max_decode=0)
    check(random_step([], [], num_tokens=32, num_sequences=2), max_decode=2)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [64, 80, 128])
def test_bfloat16_and_narrow_heads(channels):
    step = random_step(
        [17],
        [(40, 12)],
        num_tokens=16,
        page_size=16,
        heads=(3, 1),
        channels=channels,
        dtype=jnp.bfloat16,
    )
    check(step, max_decode=1)


SEQUENCE = st.integers(0, 215)


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(
    decodes=st.lists(SEQUENCE, max_size=3),
    extends=st.lists(st.tuples(SEQUENCE, st.integers(0, 20)), max_size=3),
)
@example(decodes=[0], extends=[(0, 16), (5, 0), (63, 1)])
def test_any_mix_of_sequences(decodes, extends):
    check(random_step(decodes, extends, num_tokens=64, num_sequences=6), max_decode=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 80}, "query heads of 80"),
        ({"channels": 512}, "rows of 256 lanes"),
        ({"max_decode": 33}, "max_decode=33"),
    ],
)
def test_shapes_that_cannot_work_are_refused(change, message):
    step = random_step([3], [], num_tokens=32)
    with pytest.raises(ValueError, match=message):
        kernel.ragged_paged_attention(
            step.q_TX,
            step.new_TKJ.reshape(32, -1),
            step.pages_PKSJ,
            step.start_B1,
            step.length_B,
            step.page_table_BQ,
            jnp.int32(1),
            None,
            **{"channels": 128, "max_decode": 1} | change,
        )


def test_a_step_size_that_no_tile_divides_is_refused():
    with pytest.raises(ValueError, match="multiple of 16"):
        kernel.query_tile(24)
