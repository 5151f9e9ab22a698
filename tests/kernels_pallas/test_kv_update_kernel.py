"""`kv_update` in the TPU interpreter, against one indexed write a token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.kv_update import kernel, kernel_reference
from tests.kernels_pallas.interpreter import interpret
from tests.kernels_pallas.steps import Step, random_step

plan_updates = jax.jit(
    kernel.plan_updates, static_argnames=("num_tokens", "page_size", "block_rows")
)


def check(step: Step, first: int, end: int, block_rows: int = kernel.BLOCK_ROWS) -> None:
    """Compare the whole pool after the write."""
    updates = plan_updates(
        *step.tables,
        np.int32(first),
        np.int32(end),
        num_tokens=len(step.q_THC),
        page_size=step.pages_PKSJ.shape[2],
        block_rows=block_rows,
    )
    write = jax.jit(functools.partial(kernel.kv_update, block_rows=block_rows))
    got = interpret(write, step.new_TY, step.pages_PKSJ, updates)
    wanted = kernel_reference.kv_update(step.new_TY, step.pages_PKSJ, *step.tables, first, end)
    np.testing.assert_array_equal(got.astype(np.float32), wanted.astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_runs_cross_pages_and_leave_other_slots_alone(dtype):
    # Runs: a page and a bit from slot 7; one token; a whole page exactly; none; padding behind.
    extends = [(7, 26), (15, 1), (16, 16), (9, 0)]
    step = random_step([4], extends, num_tokens=50, page_size=16, dtype=dtype)
    check(step, 1, 5)


def test_single_tokens_move_one_tile_each():
    step = random_step([0, 15, 16, 40], [(3, 2)], num_tokens=6, page_size=32)
    check(step, 0, 4, block_rows=8)


def test_a_step_without_new_tokens_changes_nothing():
    check(random_step([], [(9, 0)], num_tokens=16, page_size=16), 0, 1)


def test_the_reference_writes_each_token_once():
    # Two tokens behind three old ones on pages of four slots: slot 3 of page 0, slot 0 of page 1.
    step = random_step([], [(3, 2)], num_tokens=2, page_size=4)
    pages = kernel_reference.kv_update(step.new_TY, step.pages_PKSJ, *step.tables, 0, 1)
    first, second = step.page_table_BQ[0, :2]
    np.testing.assert_array_equal(pages[first, :, 3], step.new_TKJ[0])
    np.testing.assert_array_equal(pages[second, :, 0], step.new_TKJ[1])
