"""How much arena rows differ, against numpy and numbers by hand."""

import jax.numpy as jnp
import numpy as np

from jaxmm.device.backend import Backend
from jaxmm.device.image_rows import change_of_rows

WIDTH = 8


def change(arena: np.ndarray, before: list[int], after: list[int]) -> np.ndarray:
    rows = (jnp.array(x, jnp.int32) for x in (before, after))
    return np.asarray(change_of_rows(jnp.asarray(arena), *rows, WIDTH, Backend()))


def test_equal_opposite_and_orthogonal_rows_and_rows_of_nothing() -> None:
    arena = np.zeros((4, WIDTH), np.float32)
    arena[0, :2] = 3.0, 4.0
    arena[1] = -2 * arena[0]
    arena[2, 2] = 7.0
    pairs = [(0, 0), (0, 1), (0, 2), (0, 3), (0, -1), (-1, -1)]
    before, after = map(list, zip(*pairs, strict=True))
    np.testing.assert_allclose(change(arena, before, after), [0, 2, 1, 1, 1, 1], atol=1e-6)


def test_of_deepstack_rows_the_embedding_alone_is_compared() -> None:
    random = np.random.default_rng(0)
    arena = random.standard_normal((6, 3 * WIDTH)).astype(np.float32)
    a, b = arena[[0, 2, 4], :WIDTH], arena[[1, 3, 5], :WIDTH]
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    expected = 1 - (a * b).sum(axis=1) / norms
    np.testing.assert_allclose(change(arena, [0, 2, 4], [1, 3, 5]), expected, atol=1e-6)


def test_bfloat16_rows_are_compared_in_float32() -> None:
    arena = np.zeros((2, WIDTH), np.float32)
    arena[0], arena[1] = 1.0, 1.0
    arena[1, 0] = 1.0078125  # the next bfloat16 number
    rows = (jnp.array([x], jnp.int32) for x in (0, 1))
    found = change_of_rows(jnp.asarray(arena, jnp.bfloat16), *rows, WIDTH, Backend())
    assert found.dtype == jnp.float32
    a, b = arena.astype(np.float64)
    expected = 1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    np.testing.assert_allclose(found, [expected], atol=2e-7)
