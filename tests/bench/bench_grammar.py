"""What a grammar costs: its mask on the host, and obeying it in the sampler.

    python -m tests.bench.bench_grammar

Workload: a made-up vocabulary of the size of Qwen's (151,643 byte strings), random walks of 200
tokens through two grammars; and sampling 16 rows of 151,936 float32 logits, jitted, 20 runs after 3
of warm-up. Prints medians and 99th percentiles.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxmm.device.sampling import SampleParams, init_state, sample_rows
from jaxmm.host.batch import MAX_BANNED
from jaxmm.host.grammar import Grammars, Matcher, json_grammar, mask_words
from jaxmm.host.tools import read_tools, tool_grammar
from tests.bench.machine import describe_run

NUM_TOKENS, VOCAB, ROWS = 151_643, 151_936, 16
OBJECT = {
    "type": "object",
    "properties": {f"field_{i}": {"type": "string"} for i in range(30)},
    "required": [f"field_{i}" for i in range(30)],
}


def main() -> None:
    print(describe_run())
    tokens = vocabulary()
    start = time.perf_counter()
    grammars = Grammars(tokens, frozenset({NUM_TOKENS - 1}), [NUM_TOKENS - 1], _never)
    print(f"tables for {NUM_TOKENS} tokens: {time.perf_counter() - start:.2f} s, once a start")
    tools = read_tools([{"type": "function", "function": {"name": "f", "parameters": OBJECT}}])
    for name, grammar in (
        ("object of 30 strings", json_grammar(OBJECT)),
        ("text or a call", tool_grammar(tools, required=False)),
    ):
        report(
            f"compile: {name}", [timed(lambda g=grammar: grammars.compile(g)) for _ in range(20)]
        )
        report(f"next mask: {name}", walk(grammars.compile(grammar).start()))
    sample()


def vocabulary() -> list[bytes]:
    """All single bytes, then words and punctuation; the last is the end of text."""
    rng = np.random.default_rng(0)
    words = {bytes([b]): None for b in range(256)}
    letters, marks = list(b"abcdefghijklmnopqrstuvwxyz"), list(b'{}":,[] \n0123456789\\')
    while len(words) < NUM_TOKENS - 1:
        kind = marks if rng.random() < 0.05 else letters
        word = bytes(rng.choice(kind, size=rng.integers(2, 9)).tolist())
        words[b" " + word if rng.random() < 0.5 else word] = None
    return [*words, b"<|end|>"]


def walk(matcher: Matcher) -> list[float]:
    """Seconds of each step of a random walk."""
    rng, seconds = np.random.default_rng(1), []
    for _ in range(200):
        bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
        token = int(rng.choice(np.flatnonzero(bits)))
        if token == NUM_TOKENS - 1 or matcher.is_complete:
            break
        seconds.append(timed(lambda t=token: matcher.take(t)))
    return seconds


def sample() -> None:
    """Time the sampler without masks and with them."""
    logits_BV = jax.random.normal(jax.random.key(0), (ROWS, VOCAB))
    zero, one = jnp.zeros(ROWS, jnp.int32), jnp.ones(ROWS, jnp.float32)
    params = SampleParams(
        slot_B=zero, temperature_B=0 * one, top_k_B=zero, top_p_B=one, min_p_B=0 * one,
        repetition_B=one, presence_B=0 * one, frequency_B=0 * one, num_bias_B=zero,
        seed_B2=jnp.zeros((ROWS, 2), jnp.int32), draw_B=zero, num_banned_B=zero,
        banned_BX=jnp.zeros((ROWS, MAX_BANNED), jnp.int32),
        allowed_BO=jnp.full((ROWS, mask_words(VOCAB)), 0x0F0F0F0F, jnp.uint32),
    )  # fmt: skip
    state, no = init_state(ROWS, VOCAB), jnp.bool(False)
    run = jax.jit(sample_rows)
    for name, masked in (("without masks", no), ("with masks", jnp.bool(True))):
        seconds = [
            timed(
                lambda m=masked: jax.block_until_ready(
                    run(
                        logits_BV,
                        params,
                        state,
                        num_ids=jnp.int32(VOCAB),
                        any_random=no,
                        any_penalty=no,
                        any_masked=m,
                        any_logprobs=no,
                    )
                )
            )
            for _ in range(23)
        ]
        report(f"sample {ROWS} rows {name}", seconds[3:])


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(name: str, seconds: list[float]) -> None:
    median, high = np.percentile(np.array(seconds) * 1e6, [50, 99])
    print(f"{name:<40} median {median:9.1f} us   p99 {high:9.1f} us")


def _never(text: str) -> list[int]:
    return list(text.encode())


if __name__ == "__main__":
    main()
