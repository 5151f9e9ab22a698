"""Scatter rows on numbers by hand, and against a loop."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.scatter_rows import scatter_rows

NUM_TOKENS, NUM_ROWS, WIDTH = 10, 6, 3
_scatter = jax.jit(scatter_rows)


def test_numbers_worked_out_by_hand() -> None:
    text = jnp.array([[1.0], [2.0], [3.0]])
    arena = jnp.array([[10.0], [20.0]])
    out = scatter_rows(text, arena, jnp.array([1, -1, 0], jnp.int32))
    assert out.ravel().tolist() == [20.0, 2.0, 10.0]


@settings(deadline=None)
@given(rows=st.lists(st.integers(-1, NUM_ROWS - 1), min_size=NUM_TOKENS, max_size=NUM_TOKENS))
def test_each_token_has_its_text_or_the_row_that_it_names(rows: list[int]) -> None:
    random = np.random.default_rng(len(set(rows)))
    text = random.standard_normal((NUM_TOKENS, WIDTH), np.float32)
    arena = random.standard_normal((NUM_ROWS, WIDTH), np.float32)
    expected = [text[t] if row < 0 else arena[row] for t, row in enumerate(rows)]
    out = _scatter(text, arena, jnp.array(rows, jnp.int32))
    np.testing.assert_array_equal(out, expected)


def test_rows_take_the_dtype_of_the_text() -> None:
    out = scatter_rows(
        jnp.zeros((1, 1), jnp.bfloat16), jnp.ones((1, 1), jnp.float32), jnp.array([0], jnp.int32)
    )
    assert out.dtype == jnp.bfloat16
    assert out.item() == 1.0


def test_rows_that_no_token_names_do_not_matter_whatever_they_hold() -> None:
    arena = jnp.array([[jnp.nan], [2.0]])
    out = scatter_rows(jnp.ones((2, 1)), arena, jnp.array([-1, 1], jnp.int32))
    assert out.ravel().tolist() == [1.0, 2.0]


def test_levels_are_put_or_added_by_hand() -> None:
    x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    arena = jnp.array([[10.0, 20.0, 30.0, 40.0], [50.0, 60.0, 70.0, 80.0]])  # two levels of two
    row = jnp.array([1, -1, 0], jnp.int32)
    assert scatter_rows(x, arena, row).tolist() == [[50.0, 60.0], [3.0, 4.0], [10.0, 20.0]]
    put = scatter_rows(x, arena, row, level=1)
    assert put.tolist() == [[70.0, 80.0], [3.0, 4.0], [30.0, 40.0]]
    added = scatter_rows(x, arena, row, level=1, add=True)
    assert added.tolist() == [[71.0, 82.0], [3.0, 4.0], [35.0, 46.0]]


def test_text_stays_what_it_is_when_rows_that_are_added_hold_anything() -> None:
    arena = jnp.array([[jnp.nan], [2.0]])
    out = scatter_rows(jnp.ones((2, 1)), arena, jnp.array([-1, 1], jnp.int32), add=True)
    assert out.ravel().tolist() == [1.0, 3.0]
