"""Parts of the steps that no whole step shows on small sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmm.config import EngineConfig, load_config
from jaxmm.device import steps
from jaxmm.device.backend import Backend
from jaxmm.device.kv import PagedAttention
from jaxmm.device.lowering import Lowering
from jaxmm.models import read_config
from jaxmm.sizes import settle_sizes
from tests.checkpoints import checkpoint


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


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_the_last_layer_goes_on_with_sampled_tokens_alone(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sixteen sequences; where there are no more tokens than that, all go on."""
    kept, rows = PagedAttention.kept, []

    def spy(attention: PagedAttention, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        left = kept(attention, *arrays)
        rows.append({len(x) for x in left})
        return left

    monkeypatch.setattr(PagedAttention, "kept", spy)
    jax.clear_caches()  # what was traced before would not be traced again
    model = read_config(checkpoint(family))
    config = load_config(EngineConfig, None, {"max_running": "16", "buckets.max_step_tokens": "64"})
    sizes = settle_sizes(config, model, 256, platform="cpu", memory_bytes=1 << 30, itemsize=4)
    lowering = Lowering(model, sizes, jnp.float32, Backend())
    lowering.language(64)
    assert rows[-1] == {16} and rows[:-1] == [{64}] * (len(rows) - 1)
    rows.clear()
    lowering.language(16)
    assert rows == [{16}] * len(rows)
