"""Serves the same requests in several layouts over simulated chips; prints the answers as JSON.

A program of its own: the number of simulated devices is settled when JAX starts. `pod` behind its
name makes it process 0 of a pod, whose settings are in the environment.
"""

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxmm.config import EngineConfig, load_config
from jaxmm.device import steps
from jaxmm.engine import Engine
from jaxmm.request import Result
from tests.checkpoints import Family, checkpoint
from tests.deepseek import eight_experts
from tests.engines import SMALL, ask, cache_dir, logprobs, on_loop, picture, request, solo, turn
from tests.held import now_or_soon, quiet
from tests.layouts import Layout

SIZES = {
    "max_model_len": 512,
    "max_running": 16,
    "buckets.min_step_tokens": 64,
    "buckets.max_step_tokens": 64,
    "buckets.min_lane_patches": 512,
    "buckets.max_patches_per_step": 512,
}
"""Two buckets in all: prompts are cut, one of them inside its picture."""
PAGES_LEFT = 20
"""Of all replicas together, while `under_load`: half of what its requests need at once."""


def model(family: Family) -> Path:
    """A checkpoint that four chips can be given equal parts of."""
    if family in ("deepseek_vl2_mha", "deepseek_vl2_mla"):
        return eight_experts(family)
    return checkpoint(family, num_kv_heads=4)


def make(family: Family, layout: str) -> Engine:
    """An engine of a layout, in this process."""
    settings = {**SMALL, **SIZES, "compile_cache_dir": cache_dir(), "model": str(model(family))}
    return Engine(load_config(EngineConfig, None, settings | Layout.named(layout).settings))


def first_answers(on: Engine) -> list[Result]:
    """Two pictures and a text, the second with a draw and a penalty; then the first again."""
    described = [turn("describe", "<image>", "and the house"), [picture(224, 168)]]
    drawn = {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5}
    results = ask(
        on,
        request(*described),
        request(turn("<image>", "what is it"), [picture(90, 210)], **drawn),
        request(turn("what is in the picture")),
    )
    return results + ask(on, request(*described))


def under_load(on: Engine) -> list[Result]:
    """Requests that together want more pages than there are, beside some that are aborted."""
    aborted = [request(turn("gone", "<image>"), [picture(112, 84, i)]) for i in range(3)]
    on.submit(aborted[0], lambda _: on.abort(aborted[0].id))  # with its first token
    for gone in aborted[1:]:
        on.submit(gone, lambda _: None)
    wanted = [
        request(turn("<image>", "say", str(i)), [picture(112, 84, 9 + i % 3)], max_tokens=32)
        for i in range(6)
    ]
    wanted += [request(turn("tell", "two", "things"), n=2, temperature=1.0, seed=5)]
    for gone in aborted[1:]:
        on.abort(gone.id)
    return ask(on, *wanted)


@contextlib.contextmanager
def few_pages(on: Engine) -> Iterator[None]:
    """Leave an idle engine few pages, and let it plan as if no output needed any."""
    on.flush_caches()
    count = PAGES_LEFT // len(on.replicas)
    held = []
    for replica in on.replicas:
        pool, config = replica.pool, replica.scheduler.config
        held.append(on_loop(on, lambda pool=pool: pool.allocate(pool.num_free - count)))
        replica.scheduler.config = dataclasses.replace(config, reserve_tokens=0)
    yield
    for replica, pages in zip(on.replicas, held, strict=True):
        on_loop(on, lambda pool=replica.pool, pages=pages: pool.release(pages))


def conversations(on: Engine) -> dict[str, Any]:
    """Two side by side: on which replicas they are kept after each turn, and what the second turn
    and a request that goes on like the first one need not compute."""
    short: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
    with (
        on.session("You know all about houses.") as one,
        on.session("Painting is what you are good at.") as other,
    ):
        for seed, chat in enumerate((one, other)):  # a picture in common would draw them together
            chat.send("what is it", picture(112, 84, seed), **short)
        kept = [len(replica.scheduler.pins) for replica in on.replicas]
        cached = [chat.send("and now", **short).usage.cached_tokens for chat in (one, other)]
        still = [len(replica.scheduler.pins) for replica in on.replicas]
        same = request(other.messages, [picture(112, 84, 1)])
        expected = asyncio.run(on.cost(same)).cached_tokens
        [found] = ask(on, same)
    return {
        "kept": (kept, still),
        "cached": cached,
        "cost": (expected, found.usage.cached_tokens),
        "dropped": on_loop(on, lambda: sum(len(r.scheduler.pins) for r in on.replicas)),
    }


def pruned_answers(on: Engine) -> dict[str, Any]:
    """Three requests at once, each with two videos of four steps; and how many steps were encoded:
    as many as there are, if a request is served where its videos were scored."""
    before = on.stats().encoded_images
    asked = [
        request(
            turn("<video>", "and", "<video>"),
            videos=tuple([picture(112, 84, seed + i) for i in range(8)] for seed in seeds),
            video_pruning_rate=0.5,
        )
        for seeds in ((0, 100), (200, 300), (400, 500))
    ]
    results = ask(on, *asked)
    return {
        "ids": [result.token_ids for result in results],
        "logprobs": [logprobs(result).tolist() for result in results],
        "tokens": [result.usage.video_tokens for result in results],
        "encoded": on.stats().encoded_images - before,
    }


def report(on: Engine) -> dict[str, Any]:
    """What was answered, and how it was served."""
    for _ in on.replicas:  # they take turns; processes of one are connected when it first runs
        solo(on, turn("wake", "up"))
    threads = {"threads": None}  # they begin when they are first needed
    before = quiet(on) | threads
    first = first_answers(on)
    with few_pages(on):
        load = under_load(on)
    pruned = pruned_answers(on) if on._parts.model.video_token_id >= 0 else None
    after = now_or_soon(lambda: quiet(on) | threads, before)
    talks = conversations(on)
    stats = on.stats()
    return {
        "ids": [[list(c.token_ids) for c in r.completions] for r in first + load],
        "logprobs": [logprobs(result).tolist() for result in first],
        "cached": first[3].usage.cached_tokens,
        "finished": [replica.finished for replica in stats.replicas],
        "talks": talks,
        "pruned": pruned,
        "retracts": stats.retracts,
        "aborted": stats.aborted,
        "left": {k: after[k] for k in before if before[k] != after[k]},
    }


def lead() -> None:
    """Process 0 of a pod: one report, then all processes end."""
    with Engine(load_config(EngineConfig)) as on:
        found = report(on)
    sys.stdout.write(json.dumps(found) + "\n")


def main() -> None:
    """A report for each layout of each line of the input; before them stands a family."""
    steps.MAX_GATHERED_ROWS = 256  # four lanes of 128 rows: two pieces
    for line in sys.stdin:
        family, *layouts = line.split()
        for layout in layouts:
            with make(family, layout) as on:  # type: ignore[arg-type]
                sys.stdout.write(json.dumps(report(on)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    lead() if sys.argv[1:] == ["pod"] else main()
