"""KV update: the reference on numbers by hand, the portable form against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas.kv_update import kv_update

NUM_PAGES, HEADS, PAGE_SIZE, CHANNELS, NUM_TOKENS = 5, 4, 4, 2, 12

_portable = jax.jit(functools.partial(kv_update, implementation="portable"))
_reference = jax.jit(functools.partial(kv_update, implementation="reference"))


def test_reference_on_numbers_worked_out_by_hand() -> None:
    # pages of two slots: slot 3 is page 1, place 1; slot 0 page 0, place 0; the third token is
    # filler
    pages = jnp.zeros((2, 2, 2, 1))
    kv_TJC = jnp.array([[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]]).reshape(3, 2, 1)
    out = _reference(pages, kv_TJC, jnp.array([3, 0, 1], jnp.int32), jnp.int32(2))
    assert out[..., 0].tolist() == [[[3.0, 0.0], [4.0, 0.0]], [[0.0, 1.0], [0.0, 2.0]]]


@settings(deadline=None)
@given(
    slots=st.permutations(range(NUM_PAGES * PAGE_SIZE)),
    num_tokens=st.integers(0, NUM_TOKENS),
    seed=st.integers(0, 100),
)
def test_portable_equals_reference(slots: list[int], num_tokens: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    pages = random.standard_normal((NUM_PAGES, HEADS, PAGE_SIZE, CHANNELS), np.float32)
    kv_TJC = random.standard_normal((NUM_TOKENS, HEADS, CHANNELS), np.float32)
    slot_T = jnp.array(slots[:NUM_TOKENS], jnp.int32)
    arguments = jnp.array(pages), jnp.array(kv_TJC), slot_T, jnp.int32(num_tokens)
    np.testing.assert_array_equal(_portable(*arguments), _reference(*arguments))


def test_portable_writes_in_place_where_the_pages_are_donated() -> None:
    pages = jax.ShapeDtypeStruct((1024, 4, 16, 64), jnp.float32)
    kv_TJC = jax.ShapeDtypeStruct((8, 4, 64), jnp.float32)
    step = jax.jit(functools.partial(kv_update, implementation="portable"), donate_argnums=0)
    compiled = step.lower(
        pages, kv_TJC, jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    ).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 1024 * 4 * 16 * 64 * 4
    assert memory.temp_size_in_bytes < 1 << 20  # a copy would be 16 MiB
