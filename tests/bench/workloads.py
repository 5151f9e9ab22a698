"""What people ask a vision-language server, as seven fixed workloads. Host only.

Repetition r uses other pictures and words than repetition r - 1, so that a cache helps within a
repetition alone, as it would for real users.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

WORDS = """
    bright corner figure follow garden harbour image kernel ladder market middle narrow orange
    paper picture quiet river server shadow signal silver simple square station stone street
    summer table token tower train under valley village visible wall water window winter yellow
""".split()  # noqa: SIM905
QUESTIONS = (
    "What is in the picture?",
    "Which colour covers most of it?",
    "Describe the left half.",
    "What stands in the middle?",
    "Is the lower edge bright or dark?",
    "How many shapes can you see?",
    "What would you call this scene?",
    "Name two colours of the upper right corner.",
)
ANSWERS = (
    "It shows soft patches of colour that run into one another.",
    "Most of it is covered by a warm yellow.",
    "The left half is darker, with a blue corner above.",
    "A bright patch, a little to the right of the middle.",
    "The lower edge is dark on the left and bright on the right.",
)
_MIXED_SIZES = (
    (448, 448), (224, 224), (640, 480), (1024, 1024), (336, 336), (800, 600), (448, 672),
    (512, 512), (224, 448), (768, 768), (448, 448), (640, 480), (1024, 768), (280, 280),
    (336, 672), (512, 384),
)  # fmt: skip
_ALONE_TOKENS, _TOGETHER_TOKENS = 64, 32


@dataclass(frozen=True)
class Picture:
    """A picture to draw: the same pixels for the same seed and size, on every machine."""

    seed: int
    width: int
    height: int

    def png(self) -> bytes:
        """Draw smooth colours with a little grain; PNG, so that all decode the same pixels."""
        rng = np.random.default_rng([self.seed, self.width, self.height])
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
        smooth = coarse.resize((self.width, self.height), Image.Resampling.BICUBIC)
        grain = rng.integers(0, 4, (self.height, self.width, 1), np.uint8)
        data = io.BytesIO()
        Image.fromarray(np.asarray(smooth) // 4 * 4 + grain).save(data, "PNG")
        return data.getvalue()


@dataclass(frozen=True)
class Turn:
    """One message: pictures and texts in order."""

    role: str
    parts: tuple[Picture | str, ...]


@dataclass(frozen=True)
class Ask:
    """One request: a conversation, and how many tokens to make."""

    turns: tuple[Turn, ...]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests, and how many of them are under way at a time."""

    asks: tuple[Ask, ...]
    concurrency: int


NAMES = ("img448", "img1024", "mixed16", "shared16", "turns6", "text1", "text16")


def workload(name: str, repetition: int) -> Workload:
    """Make one repetition of a workload.

    - `img448`, `img1024`: one question about one square picture.
    - `mixed16`: sixteen pictures of many sizes, a question for each, eight at a time.
    - `shared16`: sixteen questions about two pictures, eight at a time.
    - `turns6`: a conversation of six questions about two pictures, one after another.
    - `text1`: one text of 400 words; `text16`: sixteen of 60 to 200, eight at a time.
    """
    seed = 1000 * (repetition + 1)
    match name:
        case "img448" | "img1024":
            side = int(name.removeprefix("img"))
            question = QUESTIONS[repetition % len(QUESTIONS)]
            return Workload((_ask(_ALONE_TOKENS, Picture(seed, side, side), question),), 1)
        case "mixed16":
            return _together([Picture(seed + i, w, h) for i, (w, h) in enumerate(_MIXED_SIZES)])
        case "shared16":
            return _together([Picture(seed, 672, 672), Picture(seed + 1, 560, 840)] * 8)
        case "turns6":
            return Workload(_conversation(Picture(seed, 672, 672), Picture(seed + 1, 448, 448)), 1)
        case "text1":
            return Workload((_ask(_ALONE_TOKENS, _text(400, seed)),), 1)
        case "text16":
            texts = [_text(60 + 20 * (i % 8), seed + 1 + i) for i in range(16)]
            return Workload(tuple(_ask(_TOGETHER_TOKENS, text) for text in texts), 8)
    raise ValueError(f"no workload {name!r}; there are {', '.join(NAMES)}")


def _ask(max_tokens: int, *parts: Picture | str) -> Ask:
    return Ask((Turn("user", parts),), max_tokens)


def _together(pictures: Sequence[Picture]) -> Workload:
    """One question for each picture, eight under way; a picture's questions all differ."""
    asks = [
        _ask(_TOGETHER_TOKENS, picture, QUESTIONS[i // 2 % len(QUESTIONS)])
        for i, picture in enumerate(pictures)
    ]
    return Workload(tuple(asks), 8)


def _conversation(*pictures: Picture) -> tuple[Ask, ...]:
    """Ask again and again, with all that was said before; the answers are given."""
    turns = [Turn("user", (*pictures, QUESTIONS[0]))]
    asks = [Ask(tuple(turns), _TOGETHER_TOKENS)]
    for answer, question in zip(ANSWERS, QUESTIONS[1:], strict=False):
        turns += [Turn("assistant", (answer,)), Turn("user", (question,))]
        asks.append(Ask(tuple(turns), _TOGETHER_TOKENS))
    return tuple(asks)


def _text(num_words: int, seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, num_words).tolist())
