"""From logits to tokens: bias, penalties, bans, truncation, draw, log-probabilities. Traced.

Truncation needs no sort: the k-th largest logit and the nucleus threshold are found by bisection
over the ordered bit patterns of float32, exact after 32 counts of the vocabulary.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int32, UInt32

from jaxmm.request import MAX_LOGIT_BIAS, MAX_LOGPROBS

_BANNED = -1e30
_PROMPT_BIT = 1 << 30
_COUNT_MASK = _PROMPT_BIT - 1


class SamplerState(NamedTuple):
    """What sampling remembers of each state slot between steps."""

    last_B: Int32[Array, " B"]
    """The last sampled token; a decode's input."""
    seen_BV: Int32[Array, "B V"]
    """How often each token is in the output; bit 30: it is in the prompt. Kept for requests with
    penalties only."""
    bias_id_BX: Int32[Array, "B X"]
    bias_BX: Float[Array, "B X"]


class SampleParams(NamedTuple):
    """Sampling parameters of some rows; see `jaxmm.request.SamplingParams`."""

    slot_B: Int32[Array, " B"]
    temperature_B: Float[Array, " B"]
    top_k_B: Int32[Array, " B"]
    top_p_B: Float[Array, " B"]
    min_p_B: Float[Array, " B"]
    repetition_B: Float[Array, " B"]
    presence_B: Float[Array, " B"]
    frequency_B: Float[Array, " B"]
    num_bias_B: Int32[Array, " B"]
    seed_B2: Int32[Array, "B 2"]
    draw_B: Int32[Array, " B"]
    num_banned_B: Int32[Array, " B"]
    banned_BX: Int32[Array, "B X"]
    allowed_BO: UInt32[Array, "B O"]
    """Token masks: bit i % 32 of word i // 32 is token i's."""


class Sampled(NamedTuple):
    """What a step gives back for each sampled row."""

    token_B: Int32[Array, " B"]
    """-1: the row's hidden state is not finite (a step says so; `sample_rows` does not look)."""
    logprob_B: Float[Array, " B"]
    """Log-probability under the model, before bias, penalties and temperature."""
    top_id_BX: Int32[Array, "B X"]
    top_logprob_BX: Float[Array, "B X"]


def init_state(num_slots: int, vocab_size: int) -> SamplerState:
    """State of an engine that has sampled nothing."""
    return SamplerState(
        last_B=jnp.zeros(num_slots, jnp.int32),
        seen_BV=jnp.zeros((num_slots, vocab_size), jnp.int32),
        bias_id_BX=jnp.zeros((num_slots, MAX_LOGIT_BIAS), jnp.int32),
        bias_BX=jnp.zeros((num_slots, MAX_LOGIT_BIAS), jnp.float32),
    )


def sample_rows(
    logits_BV: Float[Array, "B V"],
    params: SampleParams,
    state: SamplerState,
    *,
    num_ids: Int32[Array, ""],
    any_random: Bool[Array, ""],
    any_penalty: Bool[Array, ""],
    any_masked: Bool[Array, ""],
    any_logprobs: Bool[Array, ""],
) -> Sampled:
    """Choose one token for each row.

    Args:
        logits_BV: Float32 logits.
        params: The rows' parameters.
        state: Slots named by `params.slot_B` are read.
        num_ids: Ids of the tokenizer; logits from there on are padding and never chosen.
        any_random, any_penalty, any_masked, any_logprobs: Whether a row needs that path; else it
            is skipped.
    """
    logits_BV = jnp.where(jnp.arange(logits_BV.shape[1]) < num_ids, logits_BV, _BANNED)

    def choose(logits_BV: Array) -> Array:
        logits_BV = lax.cond(
            any_penalty,
            lambda x: _ban(_penalise(_bias(x, params, state), params, state), params),
            lambda x: x,
            logits_BV,
        )
        logits_BV = lax.cond(any_masked, lambda x: _mask(x, params), lambda x: x, logits_BV)
        return lax.cond(any_random, lambda x: _draw(x, params), _argmax, logits_BV)

    # Steps that are greedy throughout pass all of it at once: on a CPU each branch that changes
    # nothing copies the logits.
    token_B = lax.cond(any_penalty | any_masked | any_random, choose, _argmax, logits_BV)
    logprob_B, top_id_BX, top_logprob_BX = lax.cond(
        any_logprobs, _logprobs, _no_logprobs, logits_BV, token_B
    )
    return Sampled(token_B, logprob_B, top_id_BX, top_logprob_BX)


def _argmax(logits_BV: Float[Array, "B V"]) -> Int32[Array, " B"]:
    """First index of the maximum; `jnp.argmax` of whole rows is twenty times slower on a CPU."""
    token_B: Array = lax.platform_dependent(
        logits_BV, cpu=_argmax_by_runs, default=_argmax_by_columns
    )
    return token_B


def _argmax_by_runs(logits_BV: Float[Array, "B V"]) -> Int32[Array, " B"]:
    """The first run of 64 that holds the maximum, then the place in it: one plain reduction."""
    num_rows, vocab_size = logits_BV.shape
    run = math.gcd(vocab_size, 64)
    logits_BXY = logits_BV.reshape(num_rows, vocab_size // run, run)
    best_B = jnp.argmax(logits_BXY.max(axis=2), axis=1)
    run_BY = jnp.take_along_axis(logits_BXY, best_B[:, None, None], axis=1)[:, 0]
    return (best_B * run + jnp.argmax(run_BY, axis=1)).astype(jnp.int32)


def _argmax_by_columns(logits_BV: Float[Array, "B V"]) -> Int32[Array, " B"]:
    """Two plain reductions, no gather: that would move the logits where chips share them."""
    num_rows, vocab_size = logits_BV.shape
    lanes = math.gcd(vocab_size, 64)
    logits_BXY = logits_BV.reshape(num_rows, vocab_size // lanes, lanes)
    best_B11 = logits_BXY.max(axis=1, keepdims=True).max(axis=2, keepdims=True)
    index_XY = jnp.arange(vocab_size, dtype=jnp.int32).reshape(-1, lanes)
    found_BXY = jnp.where(logits_BXY == best_B11, index_XY, vocab_size - 1)
    return found_BXY.min(axis=1).min(axis=1)


def _bias(
    logits_BV: Float[Array, "B V"], params: SampleParams, state: SamplerState
) -> Float[Array, "B V"]:
    live_BX = jnp.arange(MAX_LOGIT_BIAS) < params.num_bias_B[:, None]
    bias_BX = jnp.where(live_BX, state.bias_BX[params.slot_B], 0.0)
    id_BX = jnp.where(live_BX, state.bias_id_BX[params.slot_B], 0)
    return logits_BV.at[jnp.arange(logits_BV.shape[0])[:, None], id_BX].add(bias_BX)


def _penalise(
    logits_BV: Float[Array, "B V"], params: SampleParams, state: SamplerState
) -> Float[Array, "B V"]:
    seen_BV = state.seen_BV[params.slot_B]
    count_BV = seen_BV & _COUNT_MASK
    factor_B1 = params.repetition_B[:, None]
    repeated_BV = jnp.where(logits_BV > 0, logits_BV / factor_B1, logits_BV * factor_B1)
    logits_BV = jnp.where(seen_BV != 0, repeated_BV, logits_BV)
    logits_BV -= params.frequency_B[:, None] * count_BV
    return logits_BV - params.presence_B[:, None] * (count_BV > 0)


def _ban(logits_BV: Float[Array, "B V"], params: SampleParams) -> Float[Array, "B V"]:
    live_BX = jnp.arange(params.banned_BX.shape[1]) < params.num_banned_B[:, None]
    id_BX = jnp.where(live_BX, params.banned_BX, logits_BV.shape[1])
    row_B1 = jnp.arange(logits_BV.shape[0])[:, None]
    return logits_BV.at[row_B1, id_BX].set(_BANNED, mode="drop")


def _mask(logits_BV: Float[Array, "B V"], params: SampleParams) -> Float[Array, "B V"]:
    bit_BOX = (params.allowed_BO[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    bit_BV = bit_BOX.reshape(logits_BV.shape[0], -1)[:, : logits_BV.shape[1]]
    return jnp.where(bit_BV > 0, logits_BV, _BANNED)


def _draw(logits_BV: Float[Array, "B V"], params: SampleParams) -> Int32[Array, " B"]:
    """Draw by the Gumbel-max trick; a row of temperature 0 takes its maximum.

    The noise depends on the row's seed and its number of earlier draws alone, so a request draws
    the same tokens whatever else is in the batch.
    """
    random_B1 = params.temperature_B[:, None] > 0
    # From the maximum down, so that the smallest temperature makes no infinity of it.
    below_BV = logits_BV - logits_BV.max(axis=1, keepdims=True)
    scaled_BV = below_BV / jnp.where(random_B1, params.temperature_B[:, None], 1.0)
    kept_BV = jnp.where(random_B1, _truncate(scaled_BV, params), scaled_BV)
    noise_BV = jax.vmap(lambda s, n: _gumbel(s, n, logits_BV.shape[1]))(
        params.seed_B2, params.draw_B
    )
    return _argmax(kept_BV + jnp.where(random_B1, noise_BV, 0.0))


def _gumbel(seed_2: Int32[Array, " 2"], draw: Int32[Array, ""], size: int) -> Float[Array, " V"]:
    key = jax.random.wrap_key_data(lax.bitcast_convert_type(seed_2, jnp.uint32))
    return jax.random.gumbel(jax.random.fold_in(key, draw), (size,), jnp.float32)


def _truncate(logits_BV: Float[Array, "B V"], params: SampleParams) -> Float[Array, "B V"]:
    """Apply top-k, then top-p, then min-p, each to what the one before left."""
    bits_BV = _ordered_bits(logits_BV)
    wanted_B = jnp.where(params.top_k_B > 0, params.top_k_B, logits_BV.shape[1])
    kth_B = _largest(lambda t_B: (bits_BV >= t_B[:, None]).sum(1) >= wanted_B, wanted_B.shape[0])
    kept_BV = jnp.where(bits_BV >= kth_B[:, None], logits_BV, _BANNED)

    weight_BV = jnp.exp(kept_BV - kept_BV.max(axis=1, keepdims=True))
    mass_B = params.top_p_B * weight_BV.sum(axis=1)
    # Keep a token when those strictly more likely do not reach the mass yet.
    nucleus_B = _largest(
        lambda t_B: jnp.where(bits_BV >= t_B[:, None], weight_BV, 0.0).sum(1) >= mass_B,
        mass_B.shape[0],
    )
    nucleus_B = jnp.where(params.top_p_B < 1.0, nucleus_B, 0)
    kept_BV = jnp.where(bits_BV >= nucleus_B[:, None], kept_BV, _BANNED)
    return jnp.where(weight_BV >= params.min_p_B[:, None], kept_BV, _BANNED)


def _ordered_bits(x_BV: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Bit patterns that compare as unsigned integers the way the floats compare."""
    bits_BV = lax.bitcast_convert_type(x_BV, jnp.uint32)
    return jnp.where(bits_BV >> 31 == 1, ~bits_BV, bits_BV | jnp.uint32(1 << 31))


def _largest(holds: Callable[[Array], Array], num_rows: int) -> UInt32[Array, " B"]:
    """Largest threshold of each row at which `holds`, which is true at 0 and then turns false."""

    def set_bit(i: Int32[Array, ""], low_B: Array) -> Array:
        tried_B = low_B | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(holds(tried_B), tried_B, low_B)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros(num_rows, jnp.uint32))


def _logprobs(
    logits_BV: Float[Array, "B V"], token_B: Int32[Array, " B"]
) -> tuple[Array, Array, Array]:
    norm_B1 = jax.nn.logsumexp(logits_BV, axis=1, keepdims=True)
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0]
    top_BX, top_id_BX = lax.top_k(logits_BV, MAX_LOGPROBS)
    return chosen_B - norm_B1[:, 0], top_id_BX, top_BX - norm_B1


def _no_logprobs(
    logits_BV: Float[Array, "B V"], token_B: Int32[Array, " B"]
) -> tuple[Array, Array, Array]:
    shape = (logits_BV.shape[0], MAX_LOGPROBS)
    return jnp.zeros(token_B.shape), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)


def remember(
    state: SamplerState,
    slot_B: Int32[Array, " B"],
    token_B: Int32[Array, " B"],
    num_rows: Int32[Array, ""],
    any_penalty: Bool[Array, ""],
) -> SamplerState:
    """Note the first `num_rows` sampled tokens; one element a turn, so that no state is copied."""

    def note_last(r: Int32[Array, ""], last_B: Array) -> Array:
        return last_B.at[slot_B[r]].set(token_B[r])

    def note_seen(r: Int32[Array, ""], seen_BV: Array) -> Array:
        return seen_BV.at[slot_B[r], token_B[r]].add(1)

    return state._replace(
        last_B=lax.fori_loop(0, num_rows, note_last, state.last_B),
        seen_BV=lax.fori_loop(0, jnp.where(any_penalty, num_rows, 0), note_seen, state.seen_BV),
    )


def prime(
    state: SamplerState,
    slot: Int32[Array, ""],
    fresh: Bool[Array, ""],
    prompt_X: Int32[Array, " X"],
    output_X: Int32[Array, " X"],
    bias_id_X: Int32[Array, " X"],
    bias_X: Float[Array, " X"],
) -> SamplerState:
    """Give a slot the history and bias of the request that takes it.

    Args:
        state: Changed in one slot.
        slot: The slot.
        fresh: Forget what the slot knew; False adds to it, for histories in several pieces.
        prompt_X, output_X: Ids, -1 for padding; repeats count in the output only.
        bias_id_X, bias_X: The logit bias, MAX_LOGIT_BIAS entries.
    """
    vocab_size = state.seen_BV.shape[1]
    seen_V = jnp.where(fresh, 0, state.seen_BV[slot])
    prompt_X = jnp.where(prompt_X < 0, vocab_size, prompt_X)
    output_X = jnp.where(output_X < 0, vocab_size, output_X)
    in_prompt_V = jnp.zeros(vocab_size, jnp.int32).at[prompt_X].set(_PROMPT_BIT, mode="drop")
    seen_V = (seen_V | in_prompt_V).at[output_X].add(1, mode="drop")
    return state._replace(
        seen_BV=state.seen_BV.at[slot].set(seen_V),
        bias_id_BX=state.bias_id_BX.at[slot].set(bias_id_X),
        bias_BX=state.bias_BX.at[slot].set(bias_X),
    )
