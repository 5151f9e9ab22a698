"""What a stage of the training is made of, and its rate by step. Host only."""

import json
from pathlib import Path

RECIPE = {
    "phase": "all",
    "steps": 16000,
    "warm_up": 60,  # steps after `from` over which the rate rises
    "from": 0,
    "decay_from": 10000,
    "rate": 1.0,
    "see_rate": 1.0,  # of the encoder, as a share of `rate`
    "muon_rate": 0.02,
    "muon_decay": 0.1,
    "adam_rate": 0.002,
    "average": 0.99,
    "tokens": 4000,  # of work in a batch
    "parts": 2,  # batches in a step
    "kinds": [60, 34, 6],  # one picture, two, a clip
    "largest": 1_000_000,  # pixels
    "question_first": 0.15,  # before the pictures
    "text_share": 0.52,  # pictures with text
    "mixed": 0.3,  # pictures of several kinds of things on purpose
    "hard": 0.0,  # pictures of five or six objects, or of a text as long as fits, on purpose
    "talks": 5,  # conversations about the pictures of a sample
    "words": 80,  # in them
    "text": 130,  # tokens that they take
    "easy": 0.05,  # weight of a question that is always answered; its share of errors comes on top
    "extra": 0.3,  # weight of questions that no test asks
    "aux": 2.0,  # weights of what vision rows and hidden states are told
    "facts": 2.0,
    "placed": 120.0,
    "pages": 16,  # beside the questions of a batch
}
COUNTED_IN_STEPS = ("steps", "warm_up", "from", "decay_from")


def read_recipe(path: str, scale: float = 1.0) -> dict:
    """RECIPE with the values of a file; `scale` multiplies what is counted in steps."""
    recipe = {**RECIPE, **json.loads(Path(path).read_text())}
    return recipe | {name: round(scale * recipe[name]) for name in COUNTED_IN_STEPS}


def rate_at(step: int, recipe: dict) -> float:
    warm = min(1.0, max(0, step - recipe["from"] + 1) / max(1, recipe["warm_up"]))
    if step < recipe["decay_from"]:
        return recipe["rate"] * warm
    left = (recipe["steps"] - step) / max(1, recipe["steps"] - recipe["decay_from"])
    return recipe["rate"] * warm * max(0.0, left)
