"""Kernels for CPUs that numba compiles and XLA calls."""

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kernels_pallas import native
from kernels_pallas.kv_update import kv_update
from kernels_pallas.ragged_paged_attention import Ragged, ragged_paged_attention
from kernels_pallas.segment_attention.api import segment_attention, window_attention
from tests.engines import cache_dir
from tests.kernels_pallas.steps import held_alone

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no numba, or another jaxlib")

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
    np.testing.assert_allclose(few_rows(x_TD, weight_FD), expected_TF, rtol=0, atol=1e-4)


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


def step(lengths, counts, num_decodes, group, seed=0, page=PAGE):
    """A step whose sequences have so many keys, of which so many are the step's; filler behind."""
    rng = np.random.default_rng(seed)
    num_tokens, max_sequences, table = sum(counts) + 3, len(lengths) + 2, max(1, 128 // page)
    shape = num_tokens, KV_HEADS * group, CHANNELS
    q_THC = jnp.asarray(3 * rng.standard_normal(shape), jnp.float32)
    pages = rng.standard_normal((NUM_PAGES, 2 * KV_HEADS, page, CHANNELS))
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


def test_products_of_any_number_of_rows_and_columns():
    """One panel, parts of one, several; rows that fill no group of eight, or more than a piece."""
    from kernels_pallas.native import many_rows

    for num_rows, width, depth in [
        (1, 1, 16),
        (17, 47, 40),
        (8, 48, 16),
        (23, 100, 1),
        (513, 49, 7),
    ]:
        x_TD, weight_FD, expected_TF = product(num_rows, width, depth, seed=width)
        bias_F = jnp.arange(width, dtype=jnp.float32)
        y_TF = jax.jit(many_rows.many_rows)(x_TD, weight_FD, bias_F)
        np.testing.assert_allclose(y_TF, expected_TF + np.arange(width), rtol=0, atol=1e-4)
        bits_FD = jax.lax.bitcast_convert_type(weight_FD, jnp.uint16)
        np.testing.assert_allclose(many_rows.many_rows(x_TD, bits_FD), expected_TF, atol=1e-4)


@pytest.mark.parametrize(("num_rows", "width", "depth"), [(17, 50, 24), (520, 48, 5), (3, 7, 32)])
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_gated_products(num_rows, width, depth, scale):
    """Also where the gate is far below zero, or its exponential above every float32."""
    from kernels_pallas.native import many_rows

    x_TD, weight_XD, expected_TX = product(num_rows, 2 * width, depth)
    bias_2F = np.stack([np.full(width, -2.0), np.linspace(-1, 1, width)])
    gate_TF, up_TF = (scale * expected_TX).reshape(num_rows, 2, width).swapaxes(0, 1)
    gate_TF, up_TF = gate_TF + bias_2F[0], up_TF + bias_2F[1]
    expected_TF = gate_TF / (1 + np.exp(-np.maximum(gate_TF, -700))) * up_TF
    arrays = scale * x_TD, weight_XD.reshape(2, width, depth), jnp.asarray(bias_2F, jnp.float32)
    y_TF = jax.jit(many_rows.gated_rows)(*arrays)
    np.testing.assert_allclose(y_TF, expected_TF, rtol=1e-4, atol=1e-4 * scale * scale)


@pytest.mark.parametrize(("heads", "channels"), [(2, 64), (1, 72), (3, 16), (2, 80), (1, 4)])
def test_patches_see_their_segment_alone(heads, channels):
    """Segments of all lengths, some shorter than a block of queries, some longer than two of keys;
    padding between and within them."""
    rng = np.random.default_rng(channels)
    segment_N = np.repeat(np.arange(7), [3, 1, 64, 150, 20, 300, 18]).astype(np.int32)
    segment_N = np.append(segment_N, np.full(12, -1, np.int32))
    segment_N[rng.random(len(segment_N)) < 0.1] = -1
    q, k, v = (3 * rng.standard_normal((len(segment_N), heads, channels)) for _ in range(3))
    arrays = (*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(segment_N))
    got, expected = (
        segment_attention(*arrays, implementation=implementation)
        for implementation in ("native", "reference")
    )
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("block", [64, 16])
def test_patches_see_their_window_alone(block):
    """Patches of a window stand in any order within a block, and its number returns in others."""
    rng = np.random.default_rng(block)
    window_N = rng.integers(-1, 3, 256).astype(np.int32)
    q, k, v = (jnp.asarray(3 * rng.standard_normal((256, 2, 32)), jnp.float32) for _ in range(3))
    got, expected = (
        window_attention(q, k, v, jnp.asarray(window_N), implementation=i, block=block)
        for i in ("native", "reference")
    )
    is_real_N = window_N >= 0
    np.testing.assert_allclose(got[is_real_N], expected[is_real_N], rtol=0, atol=1e-4)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33, 70])
def test_slots_are_written_in_place_and_no_others(num_tokens):
    rng = np.random.default_rng(num_tokens)
    pages = rng.standard_normal((9, 4, PAGE, 16)).astype(np.float32)
    kv_TJC = jnp.asarray(rng.standard_normal((70, 4, 16)), jnp.float32)
    slot_T = jnp.asarray(rng.permutation(9 * PAGE)[:70], jnp.int32)
    expected = kv_update(
        jnp.asarray(pages), kv_TJC, slot_T, jnp.int32(num_tokens), implementation="reference"
    )
    write = jax.jit(partial(kv_update, implementation="native"), donate_argnums=0)
    arrays = jnp.asarray(pages), kv_TJC, slot_T, jnp.int32(num_tokens)
    memory = write.lower(*arrays).compile().memory_analysis()
    assert memory.alias_size_in_bytes == pages.nbytes and memory.temp_size_in_bytes < pages.nbytes
    np.testing.assert_array_equal(write(*arrays), expected)


STEPS = {
    "one": ([1], [1], 1),
    "page borders": ([7, 8, 9, 63, 64, 65], [1] * 6, 6),
    "long": ([128, 100, 127], [1] * 3, 3),
    "with extends": ([40, 3, 20, 33], [1, 1, 5, 9], 2),
    "extends alone": ([20, 33], [5, 9], 0),
    "chunks of many blocks": ([1, 128, 101, 64], [1, 100, 101, 2], 1),
}


@pytest.mark.parametrize(
    ("group", "window"), [(1, None), (3, None), (7, None), (3, 1), (3, 8), (3, 19), (7, 19)]
)
@pytest.mark.parametrize("case", STEPS)
def test_sequences_equal_the_reference(case, group, window):
    """Whatever others have left in the slots behind a sequence."""
    q_THC, pages, ragged = step(*STEPS[case], group)

    def attend(implementation, elsewhere):
        return jax.jit(
            lambda q, p, r: ragged_paged_attention(
                q, p, r, window=window, implementation=implementation
            )
        )(q_THC, held_alone(pages, ragged, elsewhere), ragged)

    _, counts, _ = STEPS[case]
    rows = sum(counts)  # what lies behind is filler
    got, expected = attend("native", np.nan), attend("reference", 0.0)
    np.testing.assert_allclose(got[:rows], expected[:rows], rtol=0, atol=1e-5)
    assert np.isfinite(got).all()


@pytest.mark.parametrize("implementation", ["native", "portable"])
@pytest.mark.parametrize("count", [1, 40])
def test_what_is_no_number_is_not_hidden(count, implementation):
    """Of a query, its own row; of a key or a value, the heads of all rows that see it."""
    group, length = 3, 50
    q_THC, pages, ragged = step([length], [count], int(count == 1), group)
    q_THC, pages = np.array(q_THC), np.array(pages)
    first = length - count

    def rows_without_number():
        out = ragged_paged_attention(
            jnp.array(q_THC), jnp.array(pages), ragged, implementation=implementation
        )
        return np.isnan(out[:count]).any(2)

    row = count // 2
    kept, q_THC[row, 4, 7] = q_THC[row, 4, 7], np.nan
    found_TH = rows_without_number()
    assert found_TH[row, 4] and found_TH.sum() == 1
    q_THC[row, 4, 7] = kept
    key = first + row
    for is_value in (0, 1):
        place = int(ragged.tables_BQ[0, key // PAGE]), KV_HEADS * is_value + 1, key % PAGE, 3
        kept, pages[place] = pages[place], np.nan
        found_TH = rows_without_number()
        assert found_TH[row:, group:].all() and not found_TH[:, :group].any()
        pages[place] = kept


@pytest.mark.parametrize("page", [4, 16, 256])
def test_pages_of_any_size(page):
    """Of one step of keys; and of more than a tile of them."""
    lengths = [9, 200, 256] if page == 256 else [9, 100, 128]
    q_THC, pages, ragged = step(lengths, [1, 70, 33], 1, group=3, page=page)
    got, expected = (
        ragged_paged_attention(q_THC, pages, ragged, implementation=implementation)
        for implementation in ("native", "reference")
    )
    np.testing.assert_allclose(got[:104], expected[:104], rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
def test_tokens_may_see_behind_themselves(window):
    """As those of an image that is seen both ways; those of the decode before it do not."""
    q_THC, pages, ragged = step([9, 70], [1, 60], 1, group=3)
    position_T = np.concatenate([[8], np.arange(10, 70), np.zeros(3, int)])
    seen_T = np.where((position_T >= 20) & (position_T < 55), 54, position_T)
    ragged = ragged._replace(seen_T=jnp.asarray(seen_T, jnp.int32))
    got, expected = (
        ragged_paged_attention(q_THC, pages, ragged, window=window, implementation=implementation)
        for implementation in ("native", "reference")
    )
    np.testing.assert_allclose(got[:61], expected[:61], rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [1, 40])
def test_scores_of_any_size(count):
    """Weights of keys that are far apart: the largest wins, and nothing is lost to overflow."""
    q_THC, pages, ragged = step([50], [count], int(count == 1), group=3)
    got, expected = (
        ragged_paged_attention(1e4 * q_THC, pages, ragged, implementation=implementation)
        for implementation in ("native", "reference")
    )
    np.testing.assert_allclose(got[:count], expected[:count], rtol=0, atol=1e-5)


def test_a_call_that_finds_no_memory_fails():
    """And what it was to write is nobody's answer."""
    script = (
        "import resource, sys, jax, jax.numpy as jnp\n"
        "from kernels_pallas import native\n"
        "native.register(sys.argv[1])\n"
        "from kernels_pallas.native import many_rows\n"
        "x, weights = jnp.ones((20, 1 << 19)), jnp.ones((48, 1 << 19), jnp.bfloat16)\n"
        "run = jax.jit(many_rows.many_rows)\n"
        "assert run(x, weights)[3, 4] == 1 << 19\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "limit = pages * resource.getpagesize() + (20 << 20)\n"
        "before = resource.getrlimit(resource.RLIMIT_AS)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))\n"
        "try:\n"
        "    run(x, weights).block_until_ready()\n"
        "except Exception as e:\n"
        "    print(e)\n"
        "resource.setrlimit(resource.RLIMIT_AS, before)\n"
        "assert run(x, weights)[3, 4] == 1 << 19\n"
    )
    command = [sys.executable, "-c", script, cache_dir()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "RESOURCE_EXHAUSTED" in ran.stdout and "found no memory" in ran.stdout


def test_machine_code_is_kept_for_the_next_process():
    """It runs there too, where everything lies at other addresses."""
    script = (
        "import sys, jax.numpy as jnp, numpy as np\n"
        "from kernels_pallas import native\n"
        "native.register(sys.argv[1])\n"
        "from kernels_pallas.native import many_rows\n"
        "y = many_rows.many_rows(jnp.full((20, 16), 0.5), jnp.full((3, 16), 2, jnp.bfloat16))\n"
        "np.testing.assert_array_equal(y, np.full((20, 3), 16.0))\n"
    )
    files = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script, cache_dir()], check=True, timeout=300)
        kept = sorted(Path(cache_dir()).glob("native-*/**/*.nbc"))
        files.append([(path, path.stat().st_mtime_ns) for path in kept])
    assert files[0] and files[0] == files[1]


def test_narrow_registers_give_the_same():
    """A processor without AVX-512 has other tiles."""
    features = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+sse4.2"
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": features}
    tests = "number_of_rows or segment_alone or pages_of_any_size"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", tests]
    ran = subprocess.run(
        [*command, __file__], env=environment, capture_output=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout.decode()


def test_where_machine_code_cannot_be_kept_it_is_compiled(tmp_path, monkeypatch, caplog):
    from kernels_pallas.native import ffi

    (tmp_path / "file").write_text("no directory")
    assert ffi._own_directory(str(tmp_path / "file")) is None
    asked = []

    def compile_(_, directory):
        asked.append(directory)
        if directory:
            raise pickle.UnpicklingError("truncated")
        return [SimpleNamespace(address=1)] * 3

    monkeypatch.setattr(ffi, "_compile", compile_)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: None)
    monkeypatch.setattr(ffi.llvmlite.binding, "add_symbol", lambda *_: None)
    ffi.register({}, str(tmp_path / "kept"))
    assert len(asked) == 2 and asked[0].parent == tmp_path / "kept" and asked[1] is None
    assert "truncated" in caplog.text


def test_where_numba_may_not_compile_they_are_not_there(monkeypatch, caplog):
    import numba

    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    assert not native.is_available()
    assert "NUMBA_DISABLE_JIT" in caplog.text


def test_without_numba_or_with_another_jaxlib_they_are_not_there(monkeypatch, caplog):
    monkeypatch.setattr(native, "_interface_version", lambda: (0, 4))
    assert not native.is_available()
    assert "not (0, 3)" in caplog.text
    monkeypatch.undo()

    def refuse(name):
        raise ImportError("numba needs another numpy")

    monkeypatch.setattr(native.importlib, "import_module", refuse)
    assert not native.is_available()
