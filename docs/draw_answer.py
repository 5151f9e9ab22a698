"""Draws docs/answer.png: a picture, and what the shipped model answers about it.

    python -m docs.draw_answer [MODEL]

The answers are the model's own, greedy. Host only.
"""

import math
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import jaxmm

QUESTIONS = (
    "How many objects are there?",
    "What colour is the star?",
    "What shape is blue?",
    "Where is the circle?",
    "Is the circle left or right of the square?",
)
HERE = Path(__file__).parent
SCALE = 2
PAPER, INK, PALE = (255, 255, 255), (30, 32, 38), (120, 124, 134)


def scene() -> Image.Image:
    """A red circle, a blue square and a yellow star on grey, as large as the model knows them."""
    picture = Image.new("RGB", (224, 224), (150, 150, 152))
    draw = ImageDraw.Draw(picture)
    draw.ellipse((27, 27, 77, 77), fill=(220, 30, 35))
    draw.rectangle((147, 31, 189, 73), fill=(35, 70, 215))
    angles = [math.radians(36 * k - 90) for k in range(10)]
    radii = [27, 11] * 5
    star = [
        (112 + r * math.cos(a), 160 + r * math.sin(a)) for r, a in zip(radii, angles, strict=True)
    ]
    draw.polygon(star, fill=(250, 215, 20))
    return picture


def card(picture: Image.Image, answers: list[tuple[str, str]]) -> Image.Image:
    """The picture on the left, questions and answers beside it."""
    side, margin, line = 224 * SCALE, 20 * SCALE, 23 * SCALE
    canvas = Image.new("RGB", (side + 380 * SCALE, side + 2 * margin), PAPER)
    canvas.paste(picture.resize((side, side), Image.Resampling.LANCZOS), (margin, margin))
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(13 * SCALE)
    left, top = side + 2 * margin, margin
    for question, answer in answers:
        draw.text((left, top), question, PALE, font)
        draw.text((left, top + line * 0.8), answer, INK, font)
        top += line * 2
    return canvas


def main() -> None:
    picture = scene()
    model = sys.argv[1] if len(sys.argv) > 1 else None
    results = jaxmm.generate(list(QUESTIONS), [picture] * len(QUESTIONS), model=model)
    answers = [(q, r.text) for q, r in zip(QUESTIONS, results, strict=True)]
    card(picture, answers).save(HERE / "answer.png", optimize=True)


if __name__ == "__main__":
    main()
