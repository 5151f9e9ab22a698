"""The whole engine against transformers: 16 greedy tokens and their log-probabilities."""

from typing import Any

import numpy as np
import pytest

from tests.checkpoints import FAMILIES, Family, checkpoint
from tests.engines import SMALL, ask, engine, logprobs, picture, request, turn
from tests.reference import greedy

RELATIVE = 1e-3
"""Of log-probabilities: both sides sum float32 in orders of their own."""

WIDE, TALL, SQUARE = picture(200, 130, 1), picture(90, 210, 2), picture(224, 224, 3)
LONG = "the answer is that there are two dogs and one red house " * 30

CASES: dict[str, tuple[Any, list[Any]]] = {
    "text only": (turn("what is in the picture"), []),
    "long text": (turn(LONG), []),
    "one image": (turn("<image>", "describe the picture"), [WIDE]),
    "two images of different size": (turn("<image>", "<image>", "and the house"), [WIDE, TALL]),
    "the same image twice": (turn("<image>", "and", "<image>", "one"), [SQUARE, SQUARE]),
    "image first": (turn("<image>", "describe the left part"), [SQUARE]),
    "image in the middle": (turn("describe", "<image>", "in one sentence"), [SQUARE]),
    "image last": (turn("describe the picture", "<image>"), [SQUARE]),
    "20:1 wide image": (turn("<image>", "what is it"), [picture(1120, 56, 4)]),
    "image of one window": (turn("<image>", "what is it"), [picture(112, 112, 5)]),
    "two turns": (
        [
            *turn("<image>", "what is it"),
            {"role": "assistant", "content": "two dogs"},
            *turn("and", "<image>"),
        ],
        [TALL, WIDE],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(family: Family, case: str) -> None:
    messages, images = CASES[case]
    expected, scores = greedy(
        checkpoint(family), messages, images, 16, max_pixels=SMALL["media.max_pixels"]
    )
    [result] = ask(engine(family), request(messages, images))
    assert list(result.token_ids) == expected
    chosen = scores[np.arange(16), expected]
    np.testing.assert_allclose(logprobs(result), chosen, rtol=RELATIVE, atol=RELATIVE)
    assert result.logprobs is not None
    for entry, row in zip(result.logprobs, scores, strict=True):
        for token, value in entry.top:
            assert abs(row[token] - value) < RELATIVE * max(1.0, abs(value))
