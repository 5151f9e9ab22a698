"""Samples: pictures with the conversations about them, for training and for tests. Host only.

Training asks many conversations about the same pictures; a test asks one. `content_cases` gives
test cases by seed.
"""

import io
import random
from dataclasses import dataclass

import draw
import numpy as np
from draw import Scene
from questions import one_talks, where_talks
from scenes import Layout, clip_scenes, drawn_size, make_scene, pick_layout
from several import clip_talks, two_talks
from skills import SKILLS, Talk


@dataclass
class Sample:
    """Pixels as the model gets them, what they show, and the conversations about them."""

    pictures: list[np.ndarray]  # one per picture, or one per frame
    scenes: list[Scene]
    talks: list[Talk]


def make_sample(
    rng: random.Random,
    layout: Layout,
    text_share: float = 0.45,
    mixed: float = 0.0,
    hard: float = 0.0,
) -> Sample:
    """Draw the pictures of one sample and list every conversation about them.

    Args:
        text_share: Pictures with text in them.
        mixed: Pictures that show several kinds of things on purpose (training only).
        hard: Of the others, pictures that show five or six objects or a long text on purpose
            (training only).
    """
    seed = rng.getrandbits(32)
    if layout.frames:
        size = drawn_size(rng, layout.sizes[0])
        scenes, direction = clip_scenes(rng, size, layout.frames)
        images = [draw.render(s, random.Random(seed)) for s in scenes]
        pixels = [np.asarray(draw.to_size(i, *layout.sizes[0])) for i in images]
        return Sample(pixels, scenes, clip_talks(rng, scenes[0], direction))
    if len(layout.sizes) == 2 and rng.random() < 0.4:
        text_share = rng.choice((0.0, 0.0, 1.0))
    while True:
        scenes = [make_scene(rng, size, text_share, mixed, hard) for size in layout.sizes]
        talks = one_talks(rng, scenes[0]) if len(scenes) == 1 else two_talks(rng, scenes)
        if talks:
            break
    if mixed and len(scenes) == 1:
        for _ in range(2):
            talks += where_talks(rng, scenes[0])
    images = [draw.render(s, random.Random(seed + i)) for i, s in enumerate(scenes)]
    pixels = [
        np.asarray(draw.to_size(i, *size)) for i, size in zip(images, layout.sizes, strict=True)
    ]
    return Sample(pixels, scenes, talks)


def test_sample(seed: int, skill: str) -> tuple[Sample, Layout, Talk]:
    """One test case of a skill: pictures, and one conversation whose last turn is the question."""
    rng = random.Random(f"test {seed} {skill}")
    kind = {"two_pictures": "two", "motion": "clip"}.get(skill, "one")
    while True:
        layout = pick_layout(rng, kind)
        sample = make_sample(rng, layout)
        talks = [t for t in sample.talks if t[-1][2] == skill]
        if talks:
            return sample, layout, rng.choice(talks)


def content_cases(count: int, seed: int = 1, largest_bytes: int = 24_000) -> list[dict]:
    """Test cases about one picture each, the same for the same seed.

    Returns:
        skill; png (bytes, at most `largest_bytes`: noise packs badly); turns, the last of which
        holds the question; scene, for questions on pairs of pictures.
    """
    skills = [s for s in SKILLS if s not in ("two_pictures", "motion")]
    cases, attempt = [], seed * 1_000_003
    while len(cases) < count:
        skill = skills[len(cases) % len(skills)]
        sample, _, talk = test_sample(attempt, skill)
        attempt += 1
        data = png(sample.pictures[0])
        if len(data) <= largest_bytes:
            cases.append(
                {"skill": skill, "png": data, "turns": as_turns(talk), "scene": sample.scenes[0]}
            )
    return cases


def pair_case(rng: random.Random, first: Scene, second: Scene) -> dict:
    """A test case on two pictures that are drawn already."""
    return {"skill": "two_pictures", "turns": as_turns(rng.choice(two_talks(rng, [first, second])))}


def clip_case(seed: int) -> dict:
    sample, _, talk = test_sample(seed, "motion")
    return {"skill": "motion", "frames": [png(p) for p in sample.pictures], "turns": as_turns(talk)}


def as_turns(talk: Talk) -> list[dict]:
    return [{"question": question, "answer": answer} for question, answer, _ in talk]


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    draw.Image.fromarray(pixels).save(out, "PNG", optimize=True)
    return out.getvalue()
