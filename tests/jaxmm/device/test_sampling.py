"""Sampling against the published rules, written here in plain numpy and float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmm.device.sampling import (
    Sampled,
    SampleParams,
    SamplerState,
    init_state,
    prime,
    remember,
    sample_rows,
)
from jaxmm.host.batch import MAX_BANNED
from jaxmm.request import MAX_LOGIT_BIAS, MAX_LOGPROBS

NUM_SLOTS, VOCAB, NUM_IDS = 4, 32, 30
"""Ids 30 and 31 are padding of the embedding."""
NEUTRAL = {
    "slot": 0,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition": 1.0,
    "presence": 0.0,
    "frequency": 0.0,
    "num_bias": 0,
    "draw": 0,
    "num_banned": 0,
}
_jit_sample = jax.jit(sample_rows, static_argnames="num_ids")
_jit_prime = jax.jit(prime)
_jit_remember = jax.jit(remember)


def params_of(rows: list[dict[str, Any]]) -> SampleParams:
    """One row of parameters for each dict; `banned`, `allowed` and `seed` may be in it too."""

    def column(name: str) -> jnp.ndarray:
        kind = np.float32 if isinstance(NEUTRAL[name], float) else np.int32
        return jnp.array([{**NEUTRAL, **row}[name] for row in rows], kind)

    banned = np.zeros((len(rows), MAX_BANNED), np.int32)
    for r, row in enumerate(rows):
        banned[r, : len(row.get("banned", ()))] = row.get("banned", ())
    allowed = [sum(1 << i for i in row.get("allowed", range(VOCAB))) for row in rows]
    return SampleParams(
        **{f"{name}_B": column(name) for name in NEUTRAL if name != "num_banned"},
        num_banned_B=jnp.array([len(row.get("banned", ())) for row in rows], jnp.int32),
        seed_B2=jnp.array([row.get("seed", (0, 0)) for row in rows], jnp.int32),
        banned_BX=jnp.array(banned),
        allowed_BO=jnp.array(allowed, jnp.uint32)[:, None],
    )


def sample(
    logits_BV: np.ndarray,
    rows: list[dict[str, Any]],
    state: SamplerState | None = None,
    *,
    num_ids: int = NUM_IDS,
) -> Sampled:
    """Sample rows whose logits are padded to VOCAB."""
    padding = VOCAB - logits_BV.shape[1]
    logits_BV = np.pad(logits_BV, ((0, 0), (0, padding)))
    return _jit_sample(
        jnp.array(logits_BV, jnp.float32),
        params_of(rows),
        init_state(NUM_SLOTS, VOCAB) if state is None else state,
        num_ids=num_ids,
        any_random=jnp.bool(any(row.get("temperature") for row in rows)),
        any_penalty=jnp.bool(True),
        any_masked=jnp.bool(any("allowed" in row for row in rows)),
        any_logprobs=jnp.bool(True),
    )


def primed(
    prompt: list[int], output: list[int], bias: dict[int, float] | None = None, slot: int = 0
) -> SamplerState:
    """Sampler state after a request with this history took a slot."""
    bias = bias or {}
    bias_ids, biases = np.zeros(MAX_LOGIT_BIAS, np.int32), np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias_ids[: len(bias)], biases[: len(bias)] = list(bias), list(bias.values())
    return _jit_prime(
        init_state(NUM_SLOTS, VOCAB),
        jnp.int32(slot),
        jnp.bool(True),
        jnp.array((prompt + [-1] * 64)[:64], jnp.int32),
        jnp.array((output + [-1] * 64)[:64], jnp.int32),
        jnp.array(bias_ids),
        jnp.array(biases),
    )


def random_logits(num_rows: int, seed: int = 0, size: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (num_rows, size)).astype(np.float32)


@functools.cache
def noise(seed: tuple[int, int], draw: int, size: int = VOCAB) -> np.ndarray:
    """The Gumbel noise of a draw, by the documented rule: fold the draw's number into the key."""
    key = jax.random.wrap_key_data(jnp.array(seed, jnp.int32).view(jnp.uint32))
    return np.array(jax.random.gumbel(jax.random.fold_in(key, draw), (size,)))


# The plain rules


def kept_by_rule(scaled_V: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Ids that top-k, then top-p, then min-p leave; equal logits stay or go together."""
    keep_V = np.ones(len(scaled_V), bool)
    if top_k:
        keep_V &= scaled_V >= np.sort(scaled_V)[::-1][min(top_k, len(scaled_V)) - 1]
    weight_V = np.where(keep_V, np.exp(scaled_V - scaled_V.max()), 0.0)
    share_V = weight_V / weight_V.sum()
    if top_p < 1.0:
        likelier_V = np.array([share_V[scaled_V > x].sum() for x in scaled_V])
        keep_V &= likelier_V < top_p
    keep_V &= weight_V >= min_p
    return np.flatnonzero(keep_V)


def penalised_by_rule(
    logits_V: np.ndarray,
    prompt: list[int],
    output: list[int],
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> np.ndarray:
    out_V = logits_V.astype(np.float64)
    for token in set(prompt) | set(output):
        out_V[token] = out_V[token] / repetition if out_V[token] > 0 else out_V[token] * repetition
    for token in set(output):
        out_V[token] -= frequency * output.count(token) + presence
    return out_V


# Greedy


def test_greedy_takes_the_first_of_the_largest_logits() -> None:
    logits_BV = random_logits(3)
    logits_BV[2, [5, 9]] = logits_BV[2].max() + 1
    out = sample(logits_BV, [{}] * 3)
    assert out.token_B.tolist() == logits_BV[:, :NUM_IDS].argmax(1).tolist()
    assert out.token_B[2] == 5


def test_padding_of_the_vocabulary_is_never_chosen() -> None:
    logits_BV = random_logits(2)
    logits_BV[:, NUM_IDS:] = 100.0
    out = sample(logits_BV, [{}, {"temperature": 5.0}])
    assert (np.array(out.token_B) < NUM_IDS).all()
    assert (np.array(out.top_id_BX) < NUM_IDS).all()


def test_greedy_and_random_rows_do_not_disturb_each_other() -> None:
    logits_BV = random_logits(2)
    rows: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": (3, 4)}]
    together = sample(logits_BV, rows).token_B.tolist()
    alone = [sample(logits_BV[r : r + 1], [rows[r]]).token_B.tolist()[0] for r in range(2)]
    assert together == alone


# Draws


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draw_is_the_largest_of_scaled_logits_plus_gumbel_noise(temperature: float) -> None:
    logits_BV = random_logits(16)
    rows = [{"temperature": temperature, "seed": (r, -r), "draw": 3 * r} for r in range(16)]
    out = sample(logits_BV, rows)
    expected = [
        int(np.argmax(logits_V[:NUM_IDS] / temperature + noise((r, -r), 3 * r)[:NUM_IDS]))
        for r, logits_V in enumerate(logits_BV)
    ]
    assert out.token_B.tolist() == expected


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
def test_frequencies_of_many_draws_are_the_softmax(temperature: float) -> None:
    num_draws, size = 4096, 8
    logits_V = random_logits(1, seed=5, size=size)[0] / 2
    rows = [{"temperature": temperature, "seed": (7, 11), "draw": d} for d in range(num_draws)]
    out = sample(np.tile(logits_V, (num_draws, 1)), rows, num_ids=size)
    seen = np.bincount(np.array(out.token_B), minlength=size)
    scaled = np.exp(logits_V.astype(np.float64) / temperature)
    expected = num_draws * scaled / scaled.sum()
    # chi-square with 7 degrees of freedom exceeds 24.3 once in a thousand; the seed is fixed
    assert ((seen - expected) ** 2 / expected).sum() < 24.3


def test_seeds_and_draws_give_other_tokens() -> None:
    logits_V = np.zeros(VOCAB, np.float32)
    by_seed = sample(
        np.tile(logits_V, (64, 1)), [{"temperature": 1.0, "seed": (s, 0)} for s in range(64)]
    )
    by_draw = sample(
        np.tile(logits_V, (64, 1)), [{"temperature": 1.0, "draw": d} for d in range(64)]
    )
    # 64 draws of 30 equally likely ids: fewer than 18 different ones have a chance below 1e-6
    assert len(set(by_seed.token_B.tolist())) >= 18
    assert len(set(by_draw.token_B.tolist())) >= 18


@pytest.mark.parametrize("temperature", [2e-38, 1e-30, 1e-6])
def test_smallest_temperatures_take_the_maximum(temperature: float) -> None:
    logits_BV = random_logits(8)
    rows = [{"temperature": temperature, "min_p": 0.1, "seed": (r, 1)} for r in range(8)]
    out = sample(logits_BV, rows)
    assert out.token_B.tolist() == logits_BV[:, :NUM_IDS].argmax(1).tolist()


# Truncation


def drawn_set(logits_V: np.ndarray, row: dict[str, Any], num_draws: int = 4096) -> set[int]:
    """Ids that come up at a temperature at which every kept one must in so many draws."""
    rows = [{**row, "seed": (1, 2), "draw": d} for d in range(num_draws)]
    out = sample(np.tile(logits_V, (num_draws, 1)), rows, num_ids=len(logits_V))
    return set(out.token_B.tolist())


LADDER = np.log(np.array([0.4, 0.25, 0.15, 0.1, 0.05, 0.05], np.float32))
"""Six ids with these probabilities; the last two are equal."""


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ({}, {0, 1, 2, 3, 4, 5}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 5}, {0, 1, 2, 3, 4, 5}),  # the fifth and the sixth are equal
        ({"top_k": 60}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 0.3}, {0}),  # 0.4 reaches it
        ({"top_p": 0.5}, {0, 1}),  # 0.4 does not, 0.65 does
        ({"top_p": 0.79}, {0, 1, 2}),  # 0.8
        ({"top_p": 0.92}, {0, 1, 2, 3, 4, 5}),  # 0.9 does not; the two equal ones come together
        ({"top_p": 1e-6}, {0}),
        ({"min_p": 0.2}, {0, 1, 2, 3}),  # at least 0.08
        ({"min_p": 0.5}, {0, 1}),  # at least 0.2
        ({"min_p": 1.0}, {0}),
        ({"top_k": 2, "top_p": 0.7}, {0, 1}),  # of 0.65, the first alone has 0.615
        ({"top_k": 2, "top_p": 0.6}, {0}),
        ({"top_p": 0.79, "min_p": 0.5}, {0, 1}),
        ({"top_k": 4, "top_p": 0.95, "min_p": 0.3}, {0, 1, 2}),  # 0.12
    ],
)
def test_truncation_on_numbers_worked_out_by_hand(row: dict[str, Any], kept: set[int]) -> None:
    assert drawn_set(LADDER, {"temperature": 1.0, **row}) == kept


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.integers(0, VOCAB),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 1.0),
    ties=st.integers(0, 12),
)
def test_draw_is_the_largest_among_those_that_the_rule_keeps(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, ties: int
) -> None:
    logits_BV = random_logits(8, seed)
    logits_BV[:, :ties] = logits_BV[:, :1]
    row = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    out = sample(logits_BV, [{**row, "seed": (seed, r)} for r in range(8)])
    for r, logits_V in enumerate(logits_BV):
        scaled_V = logits_V[:NUM_IDS].astype(np.float64) / temperature
        noisy_V = scaled_V + noise((seed, r), 0)[:NUM_IDS]
        token = int(out.token_B[r])
        # a threshold within float32 rounding of a token's share may fall on either side of it
        for slack in (0.0, 1e-5, -1e-5):
            kept = kept_by_rule(scaled_V, top_k, top_p + slack, min_p * (1 + slack))
            if len(kept) and token == kept[np.argmax(noisy_V[kept])]:
                break
        else:
            pytest.fail(f"row {r}: token {token} is not the one that the rule draws")


def test_truncation_equals_that_of_transformers() -> None:
    logits_BV = random_logits(6, seed=9)
    theirs = torch.tensor(logits_BV[:, :NUM_IDS])
    for warper in (
        transformers.TemperatureLogitsWarper(0.8),
        transformers.TopKLogitsWarper(12),
        transformers.TopPLogitsWarper(0.9),
        transformers.MinPLogitsWarper(0.02),
    ):
        theirs = warper(None, theirs)
    row = {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02}
    for logits_V, kept_V in zip(logits_BV, theirs, strict=True):
        kept = set(torch.isfinite(kept_V).nonzero().ravel().tolist())
        assert drawn_set(logits_V[:NUM_IDS], {**row}, 512) <= kept
        likely = {t for t in kept if torch.softmax(kept_V, 0)[t] > 0.05}
        assert likely <= drawn_set(logits_V[:NUM_IDS], {**row}, 512)


# Penalties, bias, bans

HISTORIES = [([], []), ([1, 2, 2, 3], []), ([4], [5, 5, 5, 6]), ([7, 8], [8, 9, 9])]


@pytest.mark.parametrize(("prompt", "output"), HISTORIES)
@pytest.mark.parametrize(
    "penalty",
    [
        {"repetition": 1.3},
        {"repetition": 0.6},
        {"presence": 1.5},
        {"presence": -1.5},
        {"frequency": 0.7},
        {"repetition": 1.2, "presence": 0.4, "frequency": -0.5},
    ],
    ids=str,
)
def test_penalised_draw_follows_the_rule(
    prompt: list[int], output: list[int], penalty: dict[str, float]
) -> None:
    logits_BV = random_logits(12, seed=len(output))
    rows = [{"temperature": 1.0, "seed": (r, 5), **penalty} for r in range(12)]
    out = sample(logits_BV, rows, primed(prompt, output))
    every = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0, **penalty}
    for r, logits_V in enumerate(logits_BV):
        changed_V = penalised_by_rule(logits_V, prompt, output, **every)
        assert out.token_B[r] == np.argmax((changed_V + noise((r, 5), 0))[:NUM_IDS])


def test_repetition_penalty_equals_that_of_transformers() -> None:
    logits_BV = random_logits(8, seed=2)
    history = [3, 3, 4, 10, 11]
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    expected = processor(torch.tensor([history] * 8), torch.tensor(logits_BV[:, :NUM_IDS])).argmax(
        1
    )
    out = sample(logits_BV, [{"repetition": 1.7}] * 8, primed(history[:3], history[3:]))
    assert out.token_B.tolist() == expected.tolist()


def test_sampled_tokens_count_towards_later_penalties() -> None:
    state = primed([1], [2])
    for token in (2, 4):
        state = _jit_remember(
            state,
            jnp.zeros(4, jnp.int32),
            jnp.full(4, token, jnp.int32),
            jnp.int32(1),
            jnp.bool(True),
        )
    # counts are 2: 2, 4: 1; the prompt's 1 is not in the output
    logits_BV = np.full((1, VOCAB), -50.0, np.float32)
    logits_BV[0, [1, 2, 4]] = [0.0, 1.5, 0.9]
    assert sample(logits_BV, [{"frequency": 0.9}], state).token_B[0] == 1  # 0, -0.3, 0 -> first
    assert sample(logits_BV, [{"frequency": 0.8}], state).token_B[0] == 4  # 0, -0.1, 0.1
    assert sample(logits_BV, [{"presence": 1.0}], state).token_B[0] == 2  # 0, 0.5, -0.1
    assert int(state.last_B[0]) == 4


def test_remembering_leaves_other_slots_and_rows_beyond_the_count_alone() -> None:
    state = init_state(NUM_SLOTS, VOCAB)
    state = _jit_remember(
        state,
        jnp.array([2, 0, 3, 1], jnp.int32),
        jnp.array([7, 8, 9, 10], jnp.int32),
        jnp.int32(2),
        jnp.bool(True),
    )
    assert state.last_B.tolist() == [8, 0, 7, 0]
    assert np.argwhere(np.array(state.seen_BV)).tolist() == [[0, 8], [2, 7]]


def test_a_new_request_in_a_slot_forgets_the_old_one() -> None:
    state = primed([1, 2], [3], {4: 5.0})
    empty = jnp.full(64, -1, jnp.int32)
    zeros = jnp.zeros(MAX_LOGIT_BIAS)
    state = _jit_prime(
        state, jnp.int32(0), jnp.bool(True), empty, empty, zeros.astype(jnp.int32), zeros
    )
    assert not np.array(state.seen_BV).any()
    assert not np.array(state.bias_BX).any()


def test_history_in_several_pieces_adds_up() -> None:
    state, ids = primed([1], [2, 2]), np.full(64, -1, np.int32)
    ids[:2] = [2, 3]
    zeros = jnp.zeros(MAX_LOGIT_BIAS)
    state = _jit_prime(
        state, jnp.int32(0), jnp.bool(False), jnp.full(64, -1, jnp.int32), jnp.array(ids),
        zeros.astype(jnp.int32), zeros,
    )  # fmt: skip
    counts = np.array(state.seen_BV[0]) & ((1 << 30) - 1)
    assert {t: int(c) for t, c in enumerate(counts) if c} == {2: 3, 3: 1}
    assert np.flatnonzero(np.array(state.seen_BV[0]) >> 30).tolist() == [1]


def test_bias_is_added_to_its_tokens_alone() -> None:
    logits_BV = random_logits(6, seed=4)
    bias = {0: 2.5, 3: -4.0, 17: 6.0}
    changed_BV = logits_BV.copy()
    for token, value in bias.items():
        changed_BV[:, token] += value
    rows = [{"num_bias": 3}] * 6
    out = sample(logits_BV, rows, primed([], [], bias))
    assert out.token_B.tolist() == changed_BV[:, :NUM_IDS].argmax(1).tolist()


def test_bias_of_another_request_in_the_slot_is_not_read() -> None:
    logits_BV = random_logits(4, seed=4)
    out = sample(logits_BV, [{"num_bias": 0}] * 4, primed([], [], {3: 50.0}))
    assert out.token_B.tolist() == logits_BV[:, :NUM_IDS].argmax(1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 4.0])
def test_banned_ids_are_never_chosen(temperature: float) -> None:
    logits_BV = random_logits(64, seed=6)
    banned = np.argsort(-logits_BV[0, :NUM_IDS])[:5].tolist()
    rows = [{"temperature": temperature, "seed": (r, 0), "banned": banned} for r in range(64)]
    assert not set(sample(logits_BV, rows).token_B.tolist()) & set(banned)


def test_a_bias_cannot_lift_a_ban() -> None:
    logits_BV = random_logits(1)
    out = sample(logits_BV, [{"num_bias": 1, "banned": [3]}], primed([], [], {3: 100.0}))
    assert out.token_B[0] != 3


# Log-probabilities


def test_logprobs_are_the_models_own_before_anything_is_changed() -> None:
    logits_BV = random_logits(4, seed=8)
    row = {"temperature": 2.0, "top_k": 3, "presence": 1.0, "num_bias": 1, "banned": [1]}
    out = sample(logits_BV, [{**row, "seed": (r, 0)} for r in range(4)], primed([2], [5], {7: 9.0}))
    expected = torch.log_softmax(torch.tensor(logits_BV[:, :NUM_IDS]), -1).numpy()
    tokens = np.array(out.token_B)
    np.testing.assert_allclose(out.logprob_B, expected[np.arange(4), tokens], atol=1e-5)
    for r in range(4):
        order = np.argsort(-expected[r], kind="stable")[:MAX_LOGPROBS]
        assert out.top_id_BX[r].tolist() == order.tolist()
        np.testing.assert_allclose(out.top_logprob_BX[r], expected[r, order], atol=1e-5)


@given(
    allowed=st.lists(st.sets(st.integers(0, NUM_IDS - 1), min_size=1), min_size=1, max_size=3),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=30, deadline=None)
def test_no_token_outside_its_rows_mask_is_chosen(allowed, temperature, seed):
    logits = np.random.default_rng(seed).normal(size=(len(allowed), NUM_IDS)) * 5
    rows = [
        {"allowed": ids, "temperature": temperature, "slot": r, "seed": (seed, r)}
        for r, ids in enumerate(allowed)
    ]
    tokens = np.asarray(sample(logits, rows).token_B)
    for row, ids, token in zip(logits, allowed, tokens.tolist(), strict=True):
        assert token in ids
        if temperature == 0:
            assert token == max(ids, key=lambda i: row[i])


def test_a_mask_leaves_logprobs_and_other_rows_as_they_are():
    logits = np.random.default_rng(3).normal(size=(2, NUM_IDS))
    best = logits.argmax(axis=1)
    free = sample(logits, [{}, {"slot": 1}])
    masked = sample(logits, [{"allowed": {int(best[0])}}, {"slot": 1}])
    for one, other in zip(free, masked, strict=True):
        np.testing.assert_array_equal(one, other)
