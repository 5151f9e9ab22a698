"""After warm-up nothing compiles, whatever sizes people send."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoints import SERVED, Family
from tests.engines import ask, engine, pages_left, picture, request, scheduling, turn
from tests.guards import guarded

NUM_PICTURES = 200
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": None},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 3},
    {"repetition_penalty": 1.1, "logit_bias": {5: -2.0}, "min_tokens": 2, "ignore_eos": False},
    {"n": 2, "temperature": 1.0, "min_p": 0.05},
)


def test_guards_raise_on_what_they_forbid() -> None:
    compiled = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()
    with jax.no_tracing(), pytest.raises(RuntimeError, match="no_tracing"):
        jnp.ones(7) + 1
    with jax.transfer_guard("disallow"), pytest.raises(RuntimeError, match="Disallowed"):
        compiled(np.ones(3, np.float32))


def random_request(rng: np.random.Generator, index: int) -> Any:
    """A picture of a size of its own, or two, or text alone."""
    sampling = {"max_tokens": int(rng.integers(1, 5)), **SAMPLINGS[index % len(SAMPLINGS)]}
    sampling["max_tokens"] = max(sampling["max_tokens"], sampling.get("min_tokens", 1))
    width, height = np.exp(rng.uniform(np.log(20), np.log(600), 2)).astype(int)
    width, height = min(width, 20 * height), min(height, 20 * width)
    images = [picture(int(width), int(height), index)]
    messages = turn("<image>", "what is it " * int(rng.integers(1, 9)))
    return request(messages, images, **sampling)


@pytest.mark.parametrize("family", SERVED)
def test_random_sizes_mixed_with_text_compile_and_trace_nothing(family: Family) -> None:
    on, rng = engine(family), np.random.default_rng(7)
    sizes = set()
    with guarded(on):
        for start in range(0, NUM_PICTURES, 10):
            requests = [random_request(rng, start + i) for i in range(10)]
            sizes |= {r.images[0].size for r in requests}
            texts = [request(turn("one red house " * int(n)), max_tokens=3) for n in (1, 9, 40)]
            assert all(result.token_ids for result in ask(on, *requests, *texts))
    assert len(sizes) > 0.95 * NUM_PICTURES
    assert on.ledger.num_recompiles == 0
    assert on.healthy


@pytest.mark.parametrize("family", SERVED)
def test_retracts_cached_prefixes_and_flushes_compile_nothing(family: Family) -> None:
    on = engine(family)
    with guarded(on), pages_left(on, 16), scheduling(on, reserve_tokens=0, max_step_tokens=23):
        before = on.scheduler.counters.retracts
        for _ in range(2):
            ask(on, *(request(turn(f"{i} red house " * 12), max_tokens=64) for i in range(3)))
        assert on.scheduler.counters.retracts > before
    assert on.ledger.num_recompiles == 0


@pytest.mark.parametrize("family", SERVED)
def test_executables_are_one_for_each_rung_and_are_counted(family: Family) -> None:
    on = engine(family)
    on._parts.runner.settle()
    made = [record for record in on.ledger.records if record.phase == "warmup"]
    buckets = on.sizes.buckets
    assert len(made) == buckets.num_executables == on._parts.runner.num_executables
    assert {r.size for r in made if r.step == "language"} == set(buckets.tokens)
    assert {r.size for r in made if r.step == "encode"} == set(buckets.patches)
