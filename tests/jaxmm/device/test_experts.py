"""Expert MLPs against a loop over tokens, on numbers by hand, and one form against the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmm.device.backend import Backend
from jaxmm.device.experts import by_blocks, by_ragged_dot, expert_mlp, route

TOKENS, EXPERTS, WIDTH, INNER, CHOSEN = 40, 5, 8, 6, 2
TOLERANCE = 1e-5
"""Relative to the largest value: float32 sums of a few terms in other orders."""

_routed = jax.jit(
    lambda x, gate_up, down, logits: expert_mlp(x, gate_up, down, route(logits, 2), Backend())
)


def weights(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.standard_normal((TOKENS, WIDTH), np.float32)
    gate_up = random.standard_normal((EXPERTS, WIDTH, 2 * INNER), np.float32)
    return x, gate_up, random.standard_normal((EXPERTS, INNER, WIDTH), np.float32)


def plain(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Token by token, as the paper has it, in float64."""
    out = np.zeros(x.shape)
    for t, scores in enumerate(logits.astype(np.float64)):
        chance = np.exp(scores - scores.max())
        chance /= chance.sum()
        best = np.argsort(-chance, kind="stable")[:CHOSEN]
        for e in best:
            gate, up = np.split(x[t].astype(np.float64) @ gate_up[e], 2)
            out[t] += chance[e] / chance[best].sum() * (gate / (1 + np.exp(-gate)) * up) @ down[e]
    return out


def assert_close(ours: jax.Array, expected: np.ndarray) -> None:
    scale = np.abs(expected).max()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=TOLERANCE * max(scale, 1))


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1000),
    bias=st.lists(st.sampled_from([0.0, 30.0, -30.0]), min_size=5, max_size=5),
)
def test_each_token_is_the_weighted_sum_of_its_experts(seed: int, bias: list[float]) -> None:
    x, gate_up, down = weights(seed)
    # some experts get all tokens, some none
    logits = np.random.default_rng(seed).standard_normal((TOKENS, EXPERTS)) + np.array(bias)
    logits = logits.astype(np.float32)
    assert_close(_routed(x, gate_up, down, logits), plain(x, gate_up, down, logits))


def test_a_token_alone_fills_no_block() -> None:
    """As in a decode step of one request: two runs of one row."""
    x, gate_up, down = weights(4)
    logits = np.random.default_rng(4).standard_normal((1, EXPERTS)).astype(np.float32)
    assert_close(_routed(x[:1], gate_up, down, logits), plain(x[:1], gate_up, down, logits))


@pytest.mark.parametrize(
    "counts",
    [(0, 0, 40, 0, 0), (8, 8, 8, 8, 8), (16, 0, 1, 23, 0), (17, 15, 0, 0, 8), (0, 0, 0, 0, 40)],
)
def test_both_forms_multiply_each_run_by_its_own_expert(counts: tuple[int, ...]) -> None:
    x, gate_up, down = weights(3)
    arguments = (jnp.array(x), jnp.array(gate_up), jnp.array(down), jnp.array(counts, jnp.int32))
    assert_close(by_blocks(*arguments), np.asarray(by_ragged_dot(*arguments)))


def test_routing_by_hand() -> None:
    logits = jnp.log(jnp.array([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]]))
    routing = route(logits, 2)
    # token 0: experts 1 and 2 (pairs 0 and 1); token 1: experts 0 and 2 (pairs 2 and 3)
    assert routing.order_M.tolist() == [2, 0, 1, 3]
    assert routing.counts_Z.tolist() == [1, 1, 2]
    np.testing.assert_allclose(routing.weight_M, [5 / 8, 6 / 9, 3 / 9, 3 / 8], rtol=1e-6)
