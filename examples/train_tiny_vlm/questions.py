"""The conversations about one picture: questions with their right answers. Host only.

Each turn knows its skill. A scene gives all conversations that it can; training asks several of
them, a test one.
"""

from collections import Counter

from draw import Scene, Thing
from scenes import place_name
from skills import EXTRA, Talk, Turn, article, ask, plural

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")


def sentence(scene: Scene) -> str | None:
    """One plain sentence that says what the picture shows; None for what takes more than that."""
    on = f" on {article(scene.background)} background."
    if scene.text and not scene.things:
        return f"The text {scene.text} in {scene.text_colour}{on}"
    if scene.text:
        t = scene.things[0]
        side = "above" if t.y < scene.chars[0][2] else "below"
        return f"{article(t.colour).capitalize()} {t.shape} {side} the text {scene.text}{on}"
    kinds = Counter((t.colour, t.shape) for t in scene.things)
    if len(kinds) == 1:
        (colour, shape), n = next(iter(kinds.items()))
        if n == 1:
            return f"{article(colour).capitalize()} {shape}{on}"
        return f"{NUMBERS[n].capitalize()} {colour} {plural(shape)}{on}"
    if len(scene.things) == 2:
        a, b = sorted(scene.things, key=lambda t: t.x)
        if abs(a.x - b.x) >= 16:
            return (
                f"{article(a.colour).capitalize()} {a.shape} and {article(b.colour)} {b.shape}{on}"
            )
    return None


DESCRIBE = (
    "Describe the picture.",
    "Describe this picture in one sentence.",
    "What does the picture show?",
    "What is in this picture?",
    "Describe the image.",
    "What is in this image?",
    "What do you see?",
)
READ = (
    "What does the picture say?",
    "What does it say?",
    "Read the text.",
    "What is written here?",
    "What is the text in the picture?",
    "What text is in the image?",
    "Which word or number is shown?",
    "What does the image say?",
    "Read what is written.",
    "What does this say?",
)


def text_talks(rng, scene: Scene) -> list[Talk]:
    read = ask(rng, "read", scene.text, *READ)
    talks = [
        [read],
        [ask(rng, "read", scene.text, *READ)],
        [
            ask(
                rng,
                "shape_colour",
                scene.text_colour,
                "What colour is the text?",
                "What color is the text?",
                "Which colour are the letters?",
            )
        ],
    ]
    n = len(scene.text)
    k = rng.randrange(n)
    order = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")[k]
    talks.append([ask(rng, EXTRA, scene.text[k], f"What is the {order} character?")])
    talks.append(
        [ask(rng, EXTRA, str(n), "How many characters are there?", "How long is the text?")]
    )
    talks.append(
        [
            ask(rng, "read", scene.text, *READ),
            rng.choice(
                (
                    ask(
                        rng,
                        "follow_up",
                        scene.text_colour,
                        "And in which colour?",
                        "What colour is it?",
                        "What color is it?",
                    ),
                    ask(rng, "follow_up", scene.text[-1], "What is its last character?"),
                    ask(rng, "follow_up", scene.text[0], "What is its first character?"),
                    ask(
                        rng,
                        "follow_up",
                        scene.background,
                        "On which background?",
                        "What colour is the background?",
                    ),
                )
            ),
        ]
    )
    return talks


def thing_talks(rng, scene: Scene) -> list[Talk]:
    talks: list[Talk] = []
    things = scene.things
    shapes = Counter(t.shape for t in things)
    colours = Counter(t.colour for t in things)
    pairs = Counter((t.colour, t.shape) for t in things)
    for t in things[:1] if len(pairs) == 1 else things:
        if shapes[t.shape] == 1 or len(pairs) == 1:
            the = f"the {t.shape}" if shapes[t.shape] == 1 else f"the {plural(t.shape)}"
            is_ = "is" if shapes[t.shape] == 1 else "are"
            talks.append(
                [
                    ask(
                        rng,
                        "shape_colour",
                        t.colour,
                        f"What colour {is_} {the}?",
                        f"What color {is_} {the}?",
                        f"Which colour {is_} {the}?",
                        f"Name the colour of {the}.",
                    )
                ]
            )
        if colours[t.colour] == 1:
            talks.append(
                [
                    ask(
                        rng,
                        "shape_colour",
                        t.shape,
                        f"What shape is {t.colour}?",
                        f"Which shape is {t.colour}?",
                        f"What is the shape of the {t.colour} object?",
                        f"What is the {t.colour} object?",
                    )
                ]
            )
    if len(things) == 1:
        t = things[0]
        if not scene.text:
            talks.append(
                [
                    ask(
                        rng,
                        "shape_colour",
                        f"{t.colour} {t.shape}",
                        "What object is this?",
                        "Name the colour and shape.",
                        "Which shape is it, and in which colour?",
                    )
                ]
            )
        shape = ask(
            rng,
            "shape_colour",
            t.shape,
            "What shape is in the picture?",
            "Which shape do you see?",
            "What shape is this?",
            "What shape is in the image?",
        )
        talks.append([shape])
        talks.append(
            [
                shape,
                ask(
                    rng,
                    "follow_up",
                    t.colour,
                    "What colour is it?",
                    "And its colour?",
                    "What color is it?",
                ),
            ]
        )
    if not scene.text:
        talks += count_talks(rng, scene, shapes, colours, pairs)
    talks += where_talks(rng, scene)
    return talks


def count_talks(rng, scene: Scene, shapes, colours, pairs) -> list[Talk]:
    things = scene.things
    total = ask(
        rng,
        "count",
        str(len(things)),
        "How many objects are there?",
        "How many shapes are in the picture?",
        "Count the objects.",
        "How many objects do you see?",
        "How many things are in the image?",
    )
    talks = [[total]]
    shape = rng.choice(tuple(shapes))
    one = ask(
        rng,
        "count",
        str(shapes[shape]),
        f"How many {plural(shape)} are there?",
        f"How many {plural(shape)} are in the picture?",
        f"Count the {plural(shape)}.",
        f"How many {plural(shape)} do you see?",
        f"How many {plural(shape)} are in the image?",
    )
    talks.append([one])
    if len(things) > 1 and rng.random() < 0.5:
        colour = rng.choice(tuple(colours))
        talks.append(
            [
                ask(
                    rng,
                    "count",
                    str(colours[colour]),
                    f"How many {colour} objects are there?",
                    f"How many objects are {colour}?",
                )
            ]
        )
    if len(shapes) > 1:
        other = rng.choice([s for s in shapes if s != shape])
        talks.append(
            [
                one,
                ask(
                    rng,
                    "follow_up",
                    str(shapes[other]),
                    f"And {plural(other)}?",
                    f"And how many {plural(other)}?",
                ),
            ]
        )
    elif len(colours) == 1 and len(things) > 1:
        t = things[0]
        talks.append(
            [
                total,
                rng.choice(
                    (
                        ask(
                            rng,
                            "follow_up",
                            t.colour,
                            "What colour are they?",
                            "What color are they?",
                            "And their colour?",
                        ),
                        ask(rng, "follow_up", t.shape, "What shape are they?", "And their shape?"),
                    )
                ),
            ]
        )
    return talks


def where_talks(rng, scene: Scene) -> list[Talk]:
    talks: list[Talk] = []
    things = scene.things
    shapes = Counter(t.shape for t in things)
    pairs = Counter((t.colour, t.shape) for t in things)
    for t in rng.sample(things, len(things)):
        name = place_name(scene, t)
        if name is None or pairs[(t.colour, t.shape)] > 1:
            continue
        the = (
            f"the {t.shape}"
            if shapes[t.shape] == 1 and rng.random() < 0.7
            else f"the {t.colour} {t.shape}"
        )
        where = ask(
            rng,
            "where",
            name,
            f"Where is {the}?",
            f"In which part of the picture is {the}?",
            *(
                [f"Which corner is {the} in?", f"In which corner is {the}?"] * 2
                if " " in name
                else ()
            ),
        )
        talks.append([where])
        if len(things) == 1 and not scene.text:
            shape = ask(
                rng, "shape_colour", t.shape, "What shape is in the picture?", "What shape is this?"
            )
            talks.append([shape, ask(rng, "follow_up", name, "Where is it?", "And where is it?")])
        break
    unique = [t for t in things if pairs[(t.colour, t.shape)] == 1]
    if len(unique) >= 2:
        for _ in range(2):
            a, b = rng.sample(unique, 2)
            side = relation(a, b)
            if side:
                names = [
                    f"the {t.shape}" if shapes[t.shape] == 1 else f"the {t.colour} {t.shape}"
                    for t in (a, b)
                ]
                talks.append([side_question(rng, side, *names)])
    return talks


def relation(a: Thing, b: Thing) -> str | None:
    dx, dy = a.x - b.x, a.y - b.y
    if abs(dx) >= 24 and abs(dx) >= 2 * abs(dy):
        return "left" if dx < 0 else "right"
    if abs(dy) >= 24 and abs(dy) >= 2 * abs(dx):
        return "above" if dy < 0 else "below"
    return None


def side_question(rng, side: str, a: str, b: str) -> Turn:
    pair = "left or right of" if side in ("left", "right") else "above or below"
    return ask(
        rng,
        "where",
        side,
        f"Is {a} {pair} {b}?",
    )


def one_talks(rng, scene: Scene) -> list[Talk]:
    talks = text_talks(rng, scene) if scene.text else []
    if scene.things:
        talks += thing_talks(rng, scene)
    if sentence(scene):
        talks.append([ask(rng, "describe", sentence(scene), *DESCRIBE)])
    if rng.random() < 0.3:
        talks.append(
            [
                ask(
                    rng,
                    EXTRA,
                    scene.background,
                    "What colour is the background?",
                    "Which colour is the background?",
                )
            ]
        )
    return talks
