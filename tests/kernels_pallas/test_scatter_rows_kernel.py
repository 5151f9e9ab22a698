"""`scatter_rows` in the TPU interpreter, against its reference, and that against itself by hand."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.scatter_rows import (
    kernel,
    kernel_reference,
    layout,
    row_shape,
    write_rows,
)
from tests.kernels_pallas.interpreter import interpret

T = 96
TEXT = [-1] * T
MIXED = [-1, 5, 6, 7, *range(16, 32), 2, *range(40, 55), -1, 3, 3, *TEXT[39:64], *range(20, 52)]
"""A run that starts off a multiple of 8, one on it, a row twice, a tile full of rows."""


def case(row_T: list[int], width: int, levels: int, dtype: type) -> tuple:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(len(row_T), width)).astype(dtype)
    rows = rng.normal(size=(56 * levels, width)).astype(dtype)
    arena = np.asarray(layout.pack_rows(rows)).reshape(56, levels, layout.SUBLANES, -1)
    return x, arena, np.array(row_T, np.int32)


def check(row_T: list[int], *, width: int = 512, levels: int = 1, dtype=jnp.float32, **options):
    x, arena, row = case(row_T, width, levels, dtype)
    merge = jax.jit(functools.partial(kernel.scatter_rows, **options))
    got = interpret(merge, x, arena, jax.jit(kernel.plan_rows)(row))
    wanted = kernel_reference.scatter_rows(x, arena, row, **options)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_runs_single_rows_and_text_mix(dtype):
    check(MIXED, dtype=dtype)


@pytest.mark.slow
def test_deepstack_adds_its_level_to_the_vision_tokens():
    check(MIXED, width=384, levels=3, dtype=jnp.bfloat16, level=2, add=True)


@pytest.mark.slow
def test_a_step_of_text_moves_nothing():
    check(TEXT)


@pytest.mark.slow
def test_a_step_of_vision_rows_takes_them_all():
    check(list(range(24, 56)), width=640)


def test_the_reference_takes_the_row_that_the_token_names():
    # Two tokens, the second names row 1 of two: [1, 1, …] stays, [2, 2, …] becomes [20, 20, …].
    x = np.array([[1.0], [2.0]]) * np.ones((2, 128))
    arena = np.asarray(layout.pack_rows(np.array([[10.0], [20.0]]) * np.ones((2, 128))))[:, None]
    row = np.array([-1, 1], np.int32)
    put = kernel_reference.scatter_rows(x, arena, row)
    added = kernel_reference.scatter_rows(x, arena, row, add=True)
    np.testing.assert_array_equal(put[:, 5], [1.0, 20.0])
    np.testing.assert_array_equal(added[:, 5], [1.0, 22.0])


def test_shapes_that_cannot_work_are_refused():
    x, arena, row = case(TEXT, 512, 1, jnp.float32)
    with pytest.raises(ValueError, match="level 1"):
        kernel.scatter_rows(x, arena, kernel.plan_rows(row), level=1)
    with pytest.raises(ValueError, match="multiple of 32"):
        kernel.plan_rows(row[:40])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_new_rows_go_to_their_slots_and_nowhere_else(dtype: Any) -> None:
    arena = jnp.full((6, *row_shape(128, implementation="pallas", levels=2)), 7, dtype)
    rows_MX = jnp.arange(3 * 256, dtype=jnp.float32).reshape(3, 256)
    slots = jnp.array([4, 0, 3], jnp.int32)
    got = interpret(write_rows, arena, rows_MX, slots, implementation="pallas")
    wanted = np.full((6, 256), 7, np.float32)
    wanted[[4, 0, 3]] = rows_MX.astype(dtype).astype(jnp.float32)
    levels = got.reshape(6, 2, -1)[:, :, :128]  # behind them, zeros up to whole lanes
    np.testing.assert_array_equal(levels.reshape(6, 256).astype(jnp.float32), wanted)
