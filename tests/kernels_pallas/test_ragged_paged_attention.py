"""Paged attention: the reference on numbers by hand, the portable form against the reference."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.ragged_paged_attention import Latent, Ragged, ragged_paged_attention
from tests.kernels_pallas.steps import held_alone

ABSOLUTE = 2e-5
"""Values below 4 in absolute terms, summed in another order."""

NUM_TOKENS, NUM_SEQUENCES, TABLE_PAGES, PAGE_SIZE, NUM_PAGES = 48, 6, 8, 4, 64

_portable = jax.jit(functools.partial(ragged_paged_attention, implementation="portable"))

_reference = jax.jit(functools.partial(ragged_paged_attention, implementation="reference"))


class Case(NamedTuple):
    """Sequences as (tokens in the step, keys before them), decodes first."""

    decodes: list[int]
    extends: list[tuple[int, int]]
    seed: int

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(count for count, _ in self.extends)


def ragged_of(case: Case, *, table_pages: int = TABLE_PAGES) -> Ragged:
    """Pages in random order, no two sequences sharing one; what is not read is garbage."""
    random = np.random.default_rng(case.seed)
    sequences = [(1, before) for before in case.decodes] + case.extends
    starts, counts, lengths = (np.full(NUM_SEQUENCES, 99, np.int32) for _ in range(3))
    tables = random.integers(0, NUM_PAGES, (NUM_SEQUENCES, table_pages)).astype(np.int32)
    free = random.permutation(NUM_PAGES)
    start = used = 0
    for b, (count, before) in enumerate(sequences):
        starts[b], counts[b], lengths[b] = start, count, before + count
        pages = -(-(before + count) // PAGE_SIZE)
        tables[b, :pages] = free[used : used + pages]
        start, used = start + count, used + pages
    return Ragged(
        num_decodes=jnp.int32(len(case.decodes)),
        num_sequences=jnp.int32(len(sequences)),
        starts_B=jnp.array(starts),
        counts_B=jnp.array(counts),
        lengths_B=jnp.array(lengths),
        tables_BQ=jnp.array(tables),
    )


def arrays(seed: int, *, num_heads: int = 4, num_kv: int = 2) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    q_THC = random.standard_normal((NUM_TOKENS, num_heads, 8), np.float32)
    pages = random.standard_normal((NUM_PAGES, 2 * num_kv, PAGE_SIZE, 8), np.float32)
    return q_THC, pages


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any mix that fits the step, single keys and full tables among them."""
    longest = TABLE_PAGES * PAGE_SIZE
    decodes = draw(st.lists(st.integers(0, longest - 1), max_size=NUM_SEQUENCES))
    room, extends = NUM_TOKENS - len(decodes), []
    for _ in range(draw(st.integers(0, NUM_SEQUENCES - len(decodes)))):
        if room == 0:
            break
        count = draw(st.integers(1, min(room, longest)))
        extends.append((count, draw(st.integers(0, longest - count))))
        room -= count
    return Case(decodes, extends, draw(st.integers(0, 100)))


def test_reference_on_numbers_worked_out_by_hand() -> None:
    # one head of one channel (scale 1), pages of two slots; a decode with keys 0, ln 3 and
    # query 1: weights 1 : 3, values 4, 8 -> 7. An extend of two tokens after one key:
    # keys 0, 0, 0 -> token 0 the mean of 3 and 5, token 1 the mean of 3, 5 and 10
    pages = np.zeros((4, 2, 2, 1), np.float32)
    pages[2, :, :, 0] = [[0.0, np.log(3.0)], [4.0, 8.0]]
    pages[1, 1, :, 0] = [3.0, 5.0]
    pages[3, 1, 0, 0] = 10.0
    ragged = Ragged(
        num_decodes=jnp.int32(1),
        num_sequences=jnp.int32(2),
        starts_B=jnp.array([0, 1], jnp.int32),
        counts_B=jnp.array([1, 2], jnp.int32),
        lengths_B=jnp.array([2, 3], jnp.int32),
        tables_BQ=jnp.array([[2, 0], [1, 3]], jnp.int32),
    )
    q_THC = jnp.array([1.0, 2.0, -1.0], jnp.float32).reshape(3, 1, 1)
    out = _reference(q_THC, jnp.array(pages), ragged)
    np.testing.assert_allclose(out.ravel(), [7.0, 4.0, 6.0], rtol=1e-6)


def test_reference_query_heads_read_their_own_kv_head() -> None:
    # four query heads on two KV heads: 0 and 1 read the first, 2 and 3 the second
    pages = np.zeros((1, 4, 1, 1), np.float32)
    pages[0, 2:, 0, 0] = [5.0, 9.0]
    ragged = Ragged(
        jnp.int32(1), jnp.int32(1), *(jnp.array([x], jnp.int32) for x in (0, 1, 1, [0]))
    )
    out = _reference(jnp.ones((1, 4, 1)), jnp.array(pages), ragged)
    assert out.ravel().tolist() == [5.0, 5.0, 9.0, 9.0]


LATENT = Latent(value_channels=5, scale=0.3)


def test_reference_of_rows_that_are_key_and_value_by_hand() -> None:
    # one page of two rows of two channels, the first of which is the value; scale 2, two heads
    # that read the same rows. Query (0, 1): scores 0 and ln 3, weights 1 : 3, values 4, 8 -> 7
    pages = jnp.array([[4.0, 0.0], [8.0, np.log(3.0) / 2]], jnp.float32).reshape(1, 1, 2, 2)
    ragged = Ragged(
        jnp.int32(1), jnp.int32(1), *(jnp.array([x], jnp.int32) for x in (0, 1, 2, [0]))
    )
    q_THC = jnp.array([[[0.0, 1.0], [0.0, 0.0]]])
    out = ragged_paged_attention(
        q_THC, pages, ragged, latent=Latent(1, 2.0), implementation="reference"
    )
    np.testing.assert_allclose(out, [[[7.0], [6.0]]], rtol=1e-6)


_latent = [
    jax.jit(functools.partial(ragged_paged_attention, latent=LATENT, implementation=name))
    for name in ("portable", "reference")
]


@settings(deadline=None, max_examples=40)
@given(case=cases())
def test_portable_equals_reference_for_rows_that_are_key_and_value(case: Case) -> None:
    q_THC, pages = arrays(case.seed)
    ragged = ragged_of(case)
    out, expected = (
        np.array(attend(q_THC, held_alone(pages[:, :1], ragged, elsewhere), ragged))
        for attend, elsewhere in zip(_latent, (np.nan, 0.0), strict=True)
    )
    assert out.shape == (NUM_TOKENS, 4, 5)
    real = slice(0, case.num_tokens)
    np.testing.assert_allclose(out[real], expected[real], rtol=0, atol=ABSOLUTE)


@settings(deadline=None, max_examples=80)
@given(case=cases())
def test_portable_equals_reference(case: Case) -> None:
    q_THC, pages = arrays(case.seed)
    ragged = ragged_of(case)
    out = np.array(_portable(q_THC, held_alone(pages, ragged, np.nan), ragged))
    expected = np.array(_reference(jnp.array(q_THC), jnp.array(pages), ragged))
    assert np.isfinite(out).all()
    n = case.num_tokens
    np.testing.assert_allclose(out[:n], expected[:n], atol=ABSOLUTE, rtol=0)


@pytest.mark.parametrize(
    "extends",
    [
        [(300, 0), (270, 700)],
        [(256, 250), (320, 0)],
        [(576, 448)],
        [(200, 300), (129, 77)],  # tiles of 192 queries, alone and with what they leave over
        [(420, 10), (150, 0)],  # the last one would reach past the step
    ],
)
@pytest.mark.parametrize("page_size", [64, 512])
def test_whole_and_wide_tiles_equal_reference(
    extends: list[tuple[int, int]], page_size: int
) -> None:
    # blocks of 512 keys, then of 256, then what is left
    random = np.random.default_rng(4)
    counts, lengths = np.array([(n, n + before) for n, before in extends], np.int32).T
    num_pages, table_pages = 40, 1024 // page_size
    tables = random.permutation(num_pages)[: len(extends) * table_pages].reshape(len(extends), -1)
    ragged = Ragged(
        jnp.int32(0),
        jnp.int32(len(extends)),
        *(jnp.asarray(x, jnp.int32) for x in (counts.cumsum() - counts, counts, lengths, tables)),
    )
    q_THC = random.standard_normal((576, 4, 8), np.float32)
    pages = random.standard_normal((num_pages, 4, page_size, 8), np.float32)
    out, expected = (np.array(f(q_THC, pages, ragged)) for f in (_portable, _reference))
    n = counts.sum()
    np.testing.assert_allclose(out[:n], expected[:n], atol=ABSOLUTE, rtol=0)


def test_what_the_sequences_do_not_own_is_never_read() -> None:
    case = Case([5, 0], [(7, 3), (9, 0)], 1)
    q_THC, pages = arrays(1)
    ragged = ragged_of(case)
    clean = np.array(_portable(q_THC, pages, ragged))
    owned = np.zeros(pages.shape, bool)
    for b in range(4):
        for key in range(int(ragged.lengths_B[b])):
            page = int(ragged.tables_BQ[b, key // PAGE_SIZE])
            owned[page, :, key % PAGE_SIZE] = True
    dirty = np.array(_portable(q_THC, np.where(owned, pages, 1e3), ragged))
    np.testing.assert_array_equal(clean[: case.num_tokens], dirty[: case.num_tokens])


def test_large_scores_stay_finite() -> None:
    case = Case([20, 31], [(20, 5)], 2)
    q_THC, pages = arrays(2)
    assert np.isfinite(np.array(_portable(100 * q_THC, 100 * pages, ragged_of(case)))).all()


def test_bfloat16_in_gives_bfloat16_out_with_float32_sums() -> None:
    case = Case([30], [(20, 10)], 3)
    q_THC, pages = (jnp.asarray(x, jnp.bfloat16) for x in arrays(3))
    ragged = ragged_of(case)
    out = _portable(q_THC, pages, ragged)
    assert out.dtype == jnp.bfloat16
    expected = _reference(q_THC.astype(jnp.float32), pages.astype(jnp.float32), ragged)
    # roundings to 8 bits of scaled queries, weights and result, at values below 4
    np.testing.assert_allclose(
        np.array(out.astype(jnp.float32))[:21], np.array(expected)[:21], atol=2**-5
    )


def test_temporary_memory_does_not_grow_with_the_longest_request() -> None:
    def temporary_bytes(table_pages: int) -> int:
        def shape(*dims: int, dtype=jnp.int32):
            return jax.ShapeDtypeStruct(dims, dtype)

        ragged = Ragged(
            shape(), shape(), shape(4), shape(4), shape(4), shape(4, table_pages)
        )  # fmt: skip
        q_THC = shape(256, 2, 8, dtype=jnp.float32)
        pages = shape(table_pages, 4, 16, 8, dtype=jnp.float32)
        compiled = _portable.lower(q_THC, pages, ragged).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporary_bytes(64), temporary_bytes(2048)  # 1024 and 32768 tokens
    assert long < 1.5 * short


# Tokens that see later ones, and windows


def test_reference_of_later_keys_and_of_a_window_by_hand() -> None:
    # one head of one channel, all keys 0: the mean of the values seen. Three new tokens after one
    # old, values 1, 2, 4, 8. The first two of them are a picture and see each other: each of them
    # 1, 2, 4, the last all. With a window of 2 each sees itself and one before: 1, 2, 4 (1 before
    # 2, and 4 behind it), then 2, 4, then 4, 8
    pages = jnp.zeros((2, 2, 2, 1)).at[:, 1, :, 0].set(jnp.array([[1.0, 2.0], [4.0, 8.0]]))
    ragged = Ragged(
        jnp.int32(0),
        jnp.int32(1),
        *(jnp.array([x], jnp.int32) for x in (0, 3, 4, [0, 1])),
        seen_T=jnp.array([2, 2, 3], jnp.int32),
    )
    q_THC = jnp.ones((3, 1, 1))
    for window, expected in ((None, [7 / 3, 7 / 3, 15 / 4]), (2, [7 / 3, 3.0, 6.0])):
        out = ragged_paged_attention(
            q_THC, pages, ragged, window=window, implementation="reference"
        )
        np.testing.assert_allclose(out.ravel(), expected, rtol=1e-6)


@functools.cache
def _windowed(window: int | None, name: str):
    return jax.jit(functools.partial(ragged_paged_attention, window=window, implementation=name))


@settings(deadline=None, max_examples=60)
@given(case=cases(), window=st.sampled_from([None, 1, 3, 9]), seed=st.integers(0, 99))
def test_portable_equals_reference_for_later_keys_and_windows(
    case: Case, window: int | None, seed: int
) -> None:
    q_THC, pages = arrays(case.seed)
    ragged = ragged_of(case)
    random = np.random.default_rng(seed)
    seen = random.integers(0, 999, NUM_TOKENS).astype(np.int32)  # of no sequence: anything
    for b in range(len(case.decodes) + len(case.extends)):
        start, count, length = (
            int(x[b]) for x in (ragged.starts_B, ragged.counts_B, ragged.lengths_B)
        )
        own = np.arange(length - count, length)
        cut, stop = np.sort(random.integers(0, count + 1, 2))
        own[cut:stop] = length - count + stop - 1  # one picture somewhere in the chunk
        seen[start : start + count] = own
    ragged = ragged._replace(seen_T=jnp.array(seen))
    out, expected = (
        np.array(_windowed(window, name)(jnp.array(q_THC), jnp.array(pages), ragged))
        for name in ("portable", "reference")
    )
    n = case.num_tokens
    np.testing.assert_allclose(out[:n], expected[:n], atol=ABSOLUTE, rtol=0)


def test_whole_tiles_with_a_window_equal_reference() -> None:
    random = np.random.default_rng(6)
    tables = random.permutation(40)[:16].reshape(1, -1)
    ragged = Ragged(
        jnp.int32(0),
        jnp.int32(1),
        *(jnp.asarray(x, jnp.int32) for x in ([0], [576], [1000], tables)),
        seen_T=jnp.asarray(np.where(np.arange(424, 1000) < 800, 799, np.arange(424, 1000))),
    )
    q_THC = random.standard_normal((576, 4, 8), np.float32)
    pages = random.standard_normal((40, 4, 64, 8), np.float32)
    for window in (None, 100, 600):
        out, expected = (
            np.array(_windowed(window, name)(q_THC, pages, ragged))
            for name in ("portable", "reference")
        )
        np.testing.assert_allclose(out, expected, atol=ABSOLUTE, rtol=0)
