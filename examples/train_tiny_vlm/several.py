"""Questions about two pictures, and about a clip, with their right answers. Host only."""

from collections import Counter

from draw import SHAPES, Scene
from skills import EXTRA, Talk, article, ask, plural


def two_talks(rng, scenes: list[Scene]) -> list[Talk]:
    talks: list[Talk] = []
    for scene, order in zip(scenes, ("first", "second"), strict=True):
        if scene.text:
            talks.append(
                [
                    ask(
                        rng,
                        "two_pictures",
                        scene.text,
                        f"What does the {order} picture say?",
                        f"Read the text in the {order} picture.",
                        f"What is written in the {order} picture?",
                        f"What does the {order} image say?",
                    )
                ]
            )
        shapes = Counter(t.shape for t in scene.things)
        for t in scene.things[:2]:
            if shapes[t.shape] == 1:
                talks.append(
                    [
                        ask(
                            rng,
                            "two_pictures",
                            t.colour,
                            f"What colour is the {t.shape} in the {order} picture?",
                            f"What color is the {t.shape} in the {order} image?",
                        )
                    ]
                )
        if not scene.text:
            talks.append(
                [
                    ask(
                        rng,
                        "two_pictures",
                        str(len(scene.things)),
                        f"How many objects are in the {order} picture?",
                        f"How many shapes are in the {order} image?",
                    )
                ]
            )
            if len(shapes) == 1:
                talks.append(
                    [
                        ask(
                            rng,
                            "two_pictures",
                            scene.things[0].shape,
                            f"What shape is in the {order} picture?",
                            f"Which shape does the {order} picture show?",
                        )
                    ]
                )
    counts = [Counter(t.shape for t in s.things) for s in scenes]
    for shape in rng.sample(SHAPES, len(SHAPES)):
        a, b = counts[0][shape], counts[1][shape]
        if a == b:
            continue
        more = "first" if a > b else "second"
        name = plural(shape)
        if min(a, b) == 0 and rng.random() < 0.5:
            talks.append(
                [
                    ask(
                        rng,
                        "two_pictures",
                        more,
                        f"Which picture has {name}?",
                        f"Which image shows {article(shape)}?",
                        f"In which picture is there {article(shape)}?",
                    )
                ]
            )
        else:
            talks.append(
                [
                    ask(
                        rng,
                        "two_pictures",
                        more,
                        f"Which picture has more {name}?",
                        f"Which image has more {name}?",
                        f"Where are more {name}, in the first or the second picture?",
                    )
                ]
            )
    sums = [len(s.things) for s in scenes]
    if sums[0] != sums[1] and not any(s.text for s in scenes):
        more = "first" if sums[0] > sums[1] else "second"
        talks.append(
            [
                ask(
                    rng,
                    "two_pictures",
                    more,
                    "Which picture has more objects?",
                    "Which image has more shapes?",
                )
            ]
        )
    if bool(scenes[0].text) != bool(scenes[1].text):
        talks.append(
            [
                ask(
                    rng,
                    "two_pictures",
                    "first" if scenes[0].text else "second",
                    "Which picture shows text?",
                    "Which picture has a word or number?",
                )
            ]
        )
    return talks


def clip_talks(rng, scene: Scene, direction: str) -> list[Talk]:
    t = scene.things[0]
    names = (
        f"the {t.shape}",
        f"the {t.colour} {t.shape}",
        *(("it", "the object") if len(scene.things) == 1 else ()),
    )
    talks = []
    for _ in range(2):
        the = rng.choice(names)
        talks.append(
            [
                ask(
                    rng,
                    "motion",
                    direction,
                    f"Which way does {the} move?",
                    f"In which direction does {the} move?",
                    f"Which way is {the} moving?",
                    f"Where does {the} move?",
                )
            ]
        )
    talks.append([ask(rng, EXTRA, t.colour, f"What colour is the {t.shape}?")])
    if len(scene.things) == 1:
        talks.append([ask(rng, EXTRA, t.shape, "What shape is moving?", "Which shape moves?")])
    return talks
