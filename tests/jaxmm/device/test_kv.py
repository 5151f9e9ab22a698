"""One layer's attention by the TPU kernels, in the interpreter, beside the portable forms.

Two steps: a run with a picture; then its first decode, and a run of another sequence.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmm.device.backend import Backend
from jaxmm.device.kv import PagedAttention, pool_shape
from jaxmm.device.rope import Rope
from jaxmm.models.config import TextConfig
from kernels_pallas.ragged_paged_attention import Latent, Ragged
from kernels_pallas.rotate_heads import Norms
from tests.bench.step_cases import deepseek_vl2_small, gemma3_4b
from tests.kernels_pallas.interpreter import interpret

TOKENS, PAGE, TABLE = 32, 16, np.array([[3, 0, 5, 1], [4, 2, 6, 7]], np.int32)
FIRST = Ragged(0, 1, *np.array([[0, 20], [20, 0], [20, 0]]), TABLE)
"""Twenty tokens, of which the picture is 4 to 14."""
SECOND = Ragged(1, 2, *np.array([[0, 1], [1, 17], [21, 17]]), TABLE)
TOLERANCE = 1e-4
"""Of sums of 640 products in another order, through a softmax."""


def picture_in_the_first() -> list[np.ndarray]:
    first = np.where((np.arange(TOKENS) >= 4) & (np.arange(TOKENS) < 14), 13, np.arange(TOKENS))
    second = np.concatenate([[20], np.arange(TOKENS - 1)])
    return [first, second]


def slots(ragged: Ragged) -> np.ndarray:
    slot = np.zeros(TOKENS, np.int32)
    for start, count, length, table in zip(*ragged[2:6], strict=True):
        index = np.arange(length - count, length)
        slot[start : start + count] = table[index // PAGE] * PAGE + index % PAGE
    return slot


def windowed(attention: PagedAttention, rows: jax.Array, pages: jax.Array) -> Any:
    """A layer of Gemma's shape: norms, wide heads, a window shorter than the picture."""
    angle = jnp.arange(TOKENS)[:, None] * 0.1 ** jnp.linspace(0, 4, 128)
    norms = Norms(jnp.linspace(0.5, 1.5, 256), jnp.linspace(1.2, 0.8, 256))
    return attention(rows, Rope.of(angle), pages, channels=256, norms=norms, eps=1e-6, window=7)


def latent(attention: PagedAttention, rows: jax.Array, pages: jax.Array) -> Any:
    """Rows of 640 lanes, of which a KV head's queries are too many for one program."""
    how = Latent(value_channels=512, scale=192**-0.5)
    q_TX, new_TC = rows[:, 576:], rows[:, :576]
    return attention.latent(q_TX.reshape(TOKENS, -1, 576), new_TC, pages, how)


@functools.partial(jax.jit, static_argnames=("layer", "backend"))
def run(ragged, slot, rows, pages, *, layer, backend):
    num_tokens = ragged.counts_B.sum()
    attention = PagedAttention.of_step(ragged, slot, num_tokens, page_size=PAGE, backend=backend)
    return layer(attention, rows, pages)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "text", "lanes"),
    [(windowed, gemma3_4b().text, 16 * 256), (latent, deepseek_vl2_small().text, 9 * 576)],
)
def test_a_layer(layer: Any, text: TextConfig, lanes: int) -> None:
    random = np.random.default_rng(0)
    rows = 0.5 * random.normal(size=(2, TOKENS, lanes)).astype(np.float32)
    outs = {}
    for kernels in ("portable", "pallas"):
        backend = Backend(kernels)
        pages = np.zeros(pool_shape(text, 8, PAGE, backend), np.float32)
        outs[kernels] = []
        for step, seen, x in zip((FIRST, SECOND), picture_in_the_first(), rows, strict=True):
            ragged = Ragged(*(np.asarray(y, np.int32) for y in step[:6]))
            if text.both_ways:
                ragged = ragged._replace(seen_T=seen.astype(np.int32))
            call = functools.partial(run, layer=layer, backend=backend)
            run_it = functools.partial(interpret, call) if kernels == "pallas" else call
            out, pages = run_it(ragged, slots(step), x, pages)
            num_tokens = int(np.sum(step.counts_B))
            outs[kernels].append(np.asarray(out)[:num_tokens])
    for portable, pallas in zip(*outs.values(), strict=True):
        np.testing.assert_allclose(pallas, portable, atol=TOLERANCE)
