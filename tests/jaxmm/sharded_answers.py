"""Serves the same requests unsharded and split over simulated chips; prints the answers as JSON.

A program of its own: the number of simulated devices is settled when JAX starts.
"""

import json
import sys

from jaxmm.config import EngineConfig, load_config
from jaxmm.engine import Engine
from jaxmm.request import Result
from tests.checkpoints import Family, checkpoint
from tests.engines import SMALL, ask, cache_dir, logprobs, picture, request, turn

SIZES = {
    "max_model_len": 512,
    "buckets.min_step_tokens": 32,
    "buckets.max_step_tokens": 64,
    "buckets.min_lane_patches": 512,
    "buckets.max_patches_per_step": 512,
}
"""Three buckets in all: prompts are cut, one of them inside its picture."""


def answers(family: Family, tensor_parallel: int) -> list[Result]:
    """Two pictures and a text, the second with a draw and a penalty; then the first again; then,
    of families that take videos, one that is pruned."""
    model = checkpoint(family, num_kv_heads=4)
    settings = {**SMALL, **SIZES, "model": str(model), "compile_cache_dir": cache_dir()}
    settings["tensor_parallel"] = tensor_parallel
    with Engine(load_config(EngineConfig, None, settings)) as engine:
        first = request(turn("describe", "<image>", "and the house"), [picture(224, 168)])
        results = ask(
            engine,
            first,
            request(
                turn("<image>", "what is it"),
                [picture(90, 210)],
                temperature=1.0,
                seed=3,
                frequency_penalty=0.5,
            ),
            request(turn("what is in the picture")),
        )
        again = request(turn("describe", "<image>", "and the house"), [picture(224, 168)])
        results += ask(engine, again)
        if family.startswith("qwen"):
            frames = [picture(112, 84, seed) for seed in range(6)]
            video = request(turn("<video>", "what"), videos=(frames,), video_pruning_rate=0.4)
            results += ask(engine, video)
        return results


def main() -> None:
    for name in sys.argv[2:]:
        results = answers(sys.argv[1], int(name))  # type: ignore[arg-type]
        line = [[list(r.token_ids), logprobs(r).tolist(), r.usage.cached_tokens] for r in results]
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
