"""Kernels for CPUs that numba compiles and XLA calls."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas import native
from kernels_pallas.ragged_paged_attention import Ragged, ragged_paged_attention
from tests.engines import cache_dir

pytestmark = pytest.mark.skipif(not native.there(), reason="no numba, or another jaxlib")

KV_HEADS, PAGE, CHANNELS, NUM_PAGES = 2, 8, 32, 64


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    native.register(cache_dir())


def product(num_rows: int, width: int, depth: int, seed: int = 0):
    """Rows, weights in bfloat16, and their product in float64."""
    rng = np.random.default_rng(seed)
    x_TD = rng.standard_normal((num_rows, depth), np.float32)
    weight_FD = rng.standard_normal((width, depth), np.float32).astype(ml_dtypes.bfloat16)
    expected_TF = x_TD.astype(np.float64) @ weight_FD.astype(np.float64).T
    return jnp.asarray(x_TD), jnp.asarray(weight_FD), expected_TF


def few_rows(x_TD, weight_FD):
    from kernels_pallas.native import few_rows

    return jax.jit(few_rows.few_rows)(x_TD, weight_FD)


@pytest.mark.parametrize("num_rows", range(1, native.MAX_ROWS + 1))
def test_every_number_of_rows(num_rows):
    x_TD, weight_FD, expected_TF = product(num_rows, width=193, depth=48)
    np.testing.assert_allclose(few_rows(x_TD, weight_FD), expected_TF, rtol=0, atol=2e-5)


@pytest.mark.parametrize("width", [1, 7, 191, 192, 384, 1000])
@pytest.mark.parametrize("depth", [16, 1024])
def test_widths_and_depths(width, depth):
    x_TD, weight_FD, expected_TF = product(5, width, depth)
    np.testing.assert_allclose(few_rows(x_TD, weight_FD), expected_TF, rtol=0, atol=2e-4)


def test_bits_are_the_same_weights():
    x_TD, weight_FD, _ = product(3, 64, 32)
    bits_FD = jax.lax.bitcast_convert_type(weight_FD, jnp.uint16)
    np.testing.assert_array_equal(few_rows(x_TD, bits_FD), few_rows(x_TD, weight_FD))


def test_weights_that_widen_to_the_ends_of_the_range():
    # by hand: 1.5, -0.00390625 (2 to the -8), the largest bfloat16, one of the smallest (XLA
    # takes what is below the normal ones for zeros), a negative zero
    weight_FD = np.zeros((5, 16), ml_dtypes.bfloat16)
    weight_FD[:, 3] = [1.5, -(2.0**-8), float.fromhex("0x1.fep+127"), 2.0**-125, -0.0]
    x_TD = np.zeros((2, 16), np.float32)
    x_TD[:, 3] = [2.0, 0.5]
    y_TF = few_rows(jnp.asarray(x_TD), jnp.asarray(weight_FD))
    expected = [[3.0, -(2.0**-7), np.inf, 2.0**-124, 0.0]]
    expected += [[0.75, -(2.0**-9), float.fromhex("0x1.fep+126"), 2.0**-126, 0.0]]
    np.testing.assert_array_equal(y_TF, np.array(expected, np.float32))


def test_calls_at_once_and_one_after_the_other_keep_to_themselves():
    """Threads more than cores, calls more than slots: pieces of one call never do another's."""
    cases = [product(2 + i % 7, 200 + 64 * i, 64, seed=i) for i in range(8)]

    def ask_often(i: int) -> float:
        x_TD, weight_FD, expected_TF = cases[i]
        errors = [np.abs(few_rows(x_TD, weight_FD) - expected_TF).max() for _ in range(100)]
        return float(max(errors))

    with ThreadPoolExecutor(len(cases)) as threads:
        assert max(threads.map(ask_often, range(len(cases)), timeout=120)) < 1e-4


def step(lengths, counts, num_decodes, group, seed=0):
    """A step whose sequences have so many keys, of which so many are the step's; filler behind."""
    rng = np.random.default_rng(seed)
    num_tokens, max_sequences, table = sum(counts) + 3, len(lengths) + 2, 16
    shape = num_tokens, KV_HEADS * group, CHANNELS
    q_THC = jnp.asarray(3 * rng.standard_normal(shape), jnp.float32)
    pages = rng.standard_normal((NUM_PAGES, 2 * KV_HEADS, PAGE, CHANNELS))
    tables = np.stack([rng.permutation(NUM_PAGES)[:table] for _ in range(max_sequences)])
    padded = np.zeros((3, max_sequences), np.int32)
    padded[:, : len(lengths)] = np.cumsum([0, *counts[:-1]]), counts, lengths
    ragged = Ragged(
        num_decodes=jnp.int32(num_decodes),
        num_sequences=jnp.int32(len(lengths)),
        starts_B=jnp.asarray(padded[0]),
        counts_B=jnp.asarray(padded[1]),
        lengths_B=jnp.asarray(padded[2]),
        tables_BQ=jnp.asarray(tables, jnp.int32),
        seen_T=None,
    )
    return q_THC, jnp.asarray(pages, jnp.float32), ragged


STEPS = {
    "one": ([1], [1], 1),
    "page borders": ([7, 8, 9, 63, 64, 65], [1] * 6, 6),
    "long": ([128, 100, 127], [1] * 3, 3),
    "with extends": ([40, 3, 20, 33], [1, 1, 5, 9], 2),
    "extends alone": ([20, 33], [5, 9], 0),
}


@pytest.mark.parametrize(
    ("group", "window"), [(1, None), (3, None), (3, 1), (3, 8), (3, 19), (7, 19)]
)
@pytest.mark.parametrize("case", STEPS)
def test_decodes_equal_the_reference(case, group, window):
    q_THC, pages, ragged = step(*STEPS[case], group)

    def attend(implementation):
        return jax.jit(
            lambda q, p, r: ragged_paged_attention(
                q, p, r, window=window, implementation=implementation
            )
        )(q_THC, pages, ragged)

    _, counts, _ = STEPS[case]
    rows = sum(counts)  # what lies behind is filler
    got, expected = attend("native"), attend("reference")
    np.testing.assert_allclose(got[:rows], expected[:rows], rtol=0, atol=1e-5)
    assert np.isfinite(got).all()


def test_scores_of_any_size():
    """Weights of keys that are far apart: the largest wins, and nothing is lost to overflow."""
    q_THC, pages, ragged = step([50], [1], 1, group=3)
    got, expected = (
        ragged_paged_attention(1e4 * q_THC, pages, ragged, implementation=implementation)
        for implementation in ("native", "reference")
    )
    np.testing.assert_allclose(got[:1], expected[:1], rtol=0, atol=1e-5)


def test_without_numba_or_with_another_jaxlib_they_are_not_there(monkeypatch, caplog):
    monkeypatch.setattr(native, "_interface_version", lambda: (0, 4))
    assert not native.there()
    assert "not (0, 3)" in caplog.text
    monkeypatch.undo()

    def refuse(name):
        raise ImportError("numba needs another numpy")

    monkeypatch.setattr(native.importlib, "import_module", refuse)
    assert not native.there()
