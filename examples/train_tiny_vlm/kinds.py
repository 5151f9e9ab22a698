"""What a question asks, finer than its skill: training asks more of what is answered badly, a test
shows it. Host only.
"""

import functools
import re

from draw import COLOURS
from skills import Turn

KINDS = {  # of a skill's patterns the first that is found in "question | answer" names the kind
    "read": {"short": r"\| .{1,3}$", "middle": r"\| .{4,5}$", "long": ""},
    "shape_colour": {
        "text": "text|letters",
        "both": r"\| \w+ \w+$",
        "colour": f"\\| ({'|'.join(COLOURS)})$",
        "shape": "",
    },
    "count": {
        "many": r"\| [56]$",
        "colour": f"many ({'|'.join(COLOURS)}) |objects are ({'|'.join(COLOURS)})",
        "all": "objects|shapes|things",
        "shape": "",
    },
    "where": {
        "left right": "left or right",
        "above below": "above or below",
        "corner": r"\| \w+ \w+$",
        "side": "",
    },
    "two_pictures": {
        "more objects": "more objects|more shapes",
        "more": "more",
        "text": "shows text|word or number",
        "has": r"\| (first|second)$",
        "read": "say|text|written",
        "colour": "colou?r",
        "count": "How many",
        "shape": "",
    },
    "follow_up": {
        "last": "last",
        "first": "first",
        "background": "background",
        "where": "[Ww]here",
        "colour": "colou?r",
        "shape": "shape",
        "count": "",
    },
    "describe": {
        "text and object": "(above|below) the text",
        "text": r"\| The text",
        "two": " and ",
        "one": r"\| An? ",
        "several": "",
    },
    "motion": {"motion": ""},
    "extra": {"character": "character\\?", "length": "How ", "easy": ""},
}


@functools.lru_cache(maxsize=100_000)
def kind(turn: Turn) -> str:
    """`skill: kind` of a question."""
    question, answer, skill = turn
    text = f"{question} | {answer}"
    name = next(k for k, pattern in KINDS[skill].items() if re.search(pattern, text))
    return f"{skill}: {name}"


NAMES = tuple(f"{skill}: {name}" for skill, names in KINDS.items() for name in names)
INDEX = {name: i for i, name in enumerate(NAMES)}
