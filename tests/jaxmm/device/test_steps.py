"""Parts of the steps that no whole step shows on small sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmm.device import steps
from jaxmm.device.backend import Backend


def test_rows_that_are_written_in_pieces_lie_as_if_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """150 rows by 64: the last piece begins at 86."""
    monkeypatch.setattr(steps, "MAX_GATHERED_ROWS", 64)
    rows = np.random.default_rng(0).normal(size=(150, 8)).astype(np.float32)
    slots = np.random.default_rng(1).permutation(200)[:150].astype(np.int32)
    arena = jnp.full((200, 8), 7.0)
    written = jax.jit(steps._write_gathered, static_argnums=0)(Backend(), arena, rows, slots)
    expected = np.full((200, 8), 7.0, np.float32)
    expected[slots] = rows
    np.testing.assert_array_equal(written, expected)
