"""Skills, questions and right answers for drawn pictures, and the layouts (picture sizes) that batches use. Host only.

A `Sample` holds pictures and conversations about them; each turn knows its skill. Training asks many conversations
about the same pictures; a test asks one. `content_cases` gives test cases by seed.
"""

import io
import random
from collections import Counter
from dataclasses import dataclass

import draw
import numpy as np
from draw import SHAPES, Scene, Thing

SKILLS = (
    "read",
    "shape_colour",
    "count",
    "where",
    "two_pictures",
    "follow_up",
    "describe",
    "motion",
)
EXTRA = "extra"  # asked in training only: easy questions that teach parts of a skill
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
WORDS = ["ABLE", "ACID", "AIR", "ALARM", "ANGLE", "APPLE", "APRIL", "ARROW", "ASK", "AUTUMN", "BAKERY", "BANK", "BASKET", "BEACH", "BED", "BIRD", "BLUE", "BOAT", "BOOK", "BOX", "BREAD", "BRIDGE", "BRIGHT", "BUS", "BUTTER", "CABLE", "CAFE", "CAMERA", "CANDLE", "CAR", "CASTLE", "CAT", "CHAIR", "CHECK", "CHEESE", "CITY", "CLEAN", "CLOCK", "CLOSED", "CLOUD", "COFFEE", "COLD", "CORNER", "COUNTRY", "CUP", "DANCE", "DANGER", "DAY", "DESK", "DINNER", "DOCTOR", "DOG", "DOOR", "DREAM", "DRIVE", "DUST", "EAGLE", "EARTH", "EAST", "EGG", "EIGHT", "ENGINE", "ENTER", "EXIT", "EYE", "FALL", "FARM", "FAST", "FERRY", "FIELD", "FIRE", "FISH", "FIVE", "FLAG", "FLIGHT", "FLOWER", "FOG", "FOOD", "FOREST", "FOUR", "FOX", "FREE", "FRESH", "FRIDAY", "FRUIT", "GARDEN", "GATE", "GIFT", "GLASS", "GOLD", "GRAPE", "GREEN", "GUIDE", "HALF", "HAND", "HAPPY", "HARBOUR", "HEART", "HELLO", "HELP", "HILL", "HOME", "HONEY", "HORSE", "HOTEL", "HOUSE", "ICE", "INK", "IRON", "ISLAND", "JACKET", "JAZZ", "JOB", "JUICE", "JULY", "JUMP", "JUNE", "KEY", "KING", "KITCHEN", "KITE", "KNIFE", "LAKE", "LAMP", "LEAF", "LEFT", "LEMON", "LIBRARY", "LIGHT", "LION", "LOCK", "LUNCH", "MAGIC", "MAP", "MARCH", "MARKET", "MAY", "MEDAL", "MELON", "MENU", "METAL", "MILK", "MIRROR", "MIX", "MONDAY", "MONEY", "MOON", "MOUNTAIN", "MUSEUM", "MUSIC", "NEW", "NIGHT", "NINE", "NORTH", "NOVEMBER", "NUMBER", "OCEAN", "OFFICE", "OLIVE", "ONE", "OPEN", "ORANGE", "OXYGEN", "PAINT", "PAPER", "PARK", "PARTY", "PEARL", "PENCIL", "PEPPER", "PHONE", "PIANO", "PILOT", "PIZZA", "PLANE", "PLANET", "PLATFORM", "POLICE", "POND", "POST", "PULL", "PURPLE", "PUSH", "QUEEN", "QUICK", "QUIET", "QUIZ", "RADIO", "RAIN", "RED", "RICE", "RING", "RIVER", "ROAD", "ROBOT", "ROCK", "ROOM", "ROSE", "SAFE", "SALT", "SAND", "SCHOOL", "SEA", "SEVEN", "SHIP", "SHOE", "SHOP", "SILVER", "SIX", "SKY", "SLOW", "SNOW", "SOAP", "SOFT", "SONG", "SOUTH", "SPRING", "SQUARE", "STAGE", "STAR", "STATION", "STONE", "STOP", "STREET", "SUGAR", "SUMMER", "SUN", "SUNDAY", "SWIM", "TABLE", "TAXI", "TEA", "TEN", "THEATRE", "THREE", "TICKET", "TIGER", "TIME", "TOWER", "TOWN", "TRAIN", "TREE", "TUNNEL", "TWO", "UNCLE", "VALLEY", "VIOLET", "VIOLIN", "VISIT", "VOICE", "WALK", "WALL", "WATCH", "WATER", "WAVE", "WEST", "WHEEL", "WHITE", "WIND", "WINDOW", "WINTER", "WOLF", "WOOD", "WORLD", "YACHT", "YARD", "YELLOW", "YES", "ZEBRA", "ZERO", "ZONE", "ZOO"]
LETTERS, DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"
CODE = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"  # where nothing else tells O from 0 and I from 1

Turn = tuple[str, str, str]  # question, answer, skill
Talk = list[Turn]


@dataclass
class Layout:
    """Sizes of the pictures of a batch in pixels (width, height), multiples of 28; `frames` > 0 for a clip."""

    sizes: tuple[tuple[int, int], ...]
    frames: int = 0


@dataclass
class Sample:
    """Pixels as the model gets them, what they show, and the conversations about them."""

    pictures: list[np.ndarray]  # one per picture, or one per frame
    scenes: list[Scene]
    talks: list[Talk]


# ---------------------------------------------------------------- what a picture shows
SIZES = {  # (width, height): weight
    (56, 56): 5,
    (84, 56): 4,
    (112, 56): 6,
    (168, 56): 5,
    (224, 56): 4,
    (84, 84): 6,
    (112, 84): 7,
    (140, 84): 5,
    (84, 112): 4,
    (112, 112): 9,
    (168, 84): 5,
    (168, 112): 7,
    (140, 140): 6,
    (112, 168): 4,
    (224, 84): 4,
    (224, 112): 5,
    (168, 168): 4,
    (224, 168): 3,
    (168, 224): 2,
    (224, 224): 3,
    (280, 140): 2,
    (336, 112): 1.5,
    (336, 224): 1,
    (224, 336): 0.7,
    (448, 112): 0.6,
    (336, 336): 0.5,
    (448, 224): 0.4,
    (672, 336): 0.2,
    (336, 672): 0.15,
}


def pick_size(rng: random.Random, largest: int = 10**9) -> tuple[int, int]:
    sizes = [s for s in SIZES if s[0] * s[1] <= largest]
    return rng.choices(sizes, [SIZES[s] for s in sizes])[0]


def pick_layout(rng: random.Random, kind: str | None = None, largest: int = 10**9) -> Layout:
    kind = kind or rng.choices(("one", "two", "clip"), (70, 20, 10))[0]
    if kind == "clip":
        return Layout((pick_size(rng, min(largest, 168 * 112)),), rng.choice((4, 4, 6)))
    if kind == "two":
        first = pick_size(rng, min(largest, 224 * 168))
        return Layout(
            (first, first if rng.random() < 0.5 else pick_size(rng, min(largest, 224 * 168)))
        )
    return Layout((pick_size(rng, largest),))


def drawn_size(rng: random.Random, size: tuple[int, int]) -> tuple[int, int]:
    """Often the size itself, sometimes a near one that the processor resizes to it."""
    if rng.random() < 0.6:
        return size
    low = 0 if size == (56, 56) else 12
    return tuple(n + rng.randint(-low, 13) for n in size)


def pick_text(rng: random.Random, longest: int) -> str:
    kind = rng.random()
    if kind < 0.4:
        words = [w for w in (rng.choice(WORDS) for _ in range(6)) if len(w) <= longest]
        if words:
            return words[0]
    length = rng.randint(1, longest)
    pool = DIGITS if kind < 0.65 else LETTERS if kind < 0.85 else CODE
    return "".join(rng.choices(pool if length > 1 else CODE, k=length))


def text_scene(rng: random.Random, width: int, height: int) -> Scene:
    scene = Scene(width, height, draw.pick_background(rng))
    split = height >= 84 and rng.random() < 0.25
    room = rng.choice(((0.0, 0.5), (0.5, 1.0))) if split else (0.0, 1.0)
    longest = max(1, min(8, int((width - 6) / (draw.MIN_ADVANCE + 0.5))))
    while not draw.add_text(rng, scene, pick_text(rng, longest), room):
        longest = max(1, longest - 1)
    if split:
        add_thing(rng, scene, box=(0.0, 0.5 - room[0], 1.0, 1.0 - room[0]))
    return scene


def page_scene(rng: random.Random, width: int, height: int) -> Scene:
    """A full page, band by band text or objects: what the encoder starts on."""
    scene = Scene(width, height, draw.pick_background(rng))
    top = 0
    while top < height - 30:
        high = min(rng.randint(34, 62), height - top)
        if height - top - high < 34:
            high = height - top
        room = (top / height, (top + high) / height)
        if rng.random() < 0.72:
            line = Scene(width, height, scene.background)
            longest = max(1, min(8, int((width - 6) / (draw.MIN_ADVANCE + 1))))
            while not draw.add_text(
                rng,
                line,
                pick_text(rng, longest)
                if rng.random() < 0.4
                else "".join(rng.choices(CODE, k=longest)),
                room,
            ):
                longest = max(1, longest - rng.randint(1, 2))
            scene.more.append(line)
        else:
            size = rng.uniform(draw.MIN_OBJECT, max(draw.MIN_OBJECT, min(60, high - 5)))
            for _ in range(rng.randint(1, max(1, int(width / (size + 8))))):
                at = draw.place(rng, scene, size, (0.0, room[0], 1.0, room[1]))
                at = (
                    at
                    if at and room[0] * height + size / 2 <= at[1] <= room[1] * height - size / 2
                    else None
                )
                if at:
                    scene.things.append(
                        Thing(
                            rng.choice(SHAPES), draw.pick_colour(rng, scene.background), *at, size
                        )
                    )
        top += high
    return scene


STEPS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


def moving_page(rng: random.Random, width: int, height: int) -> list[Scene]:
    """Two frames full of objects that each move their own way."""
    background = draw.pick_background(rng)
    swept = Scene(width, height, background)  # each object as large as what it sweeps
    frames = [Scene(width, height, background) for _ in range(2)]
    for _ in range(2 + width * height // 4000):
        size = rng.uniform(draw.MIN_OBJECT, max(draw.MIN_OBJECT, min(44, height * 0.4)))
        far = rng.uniform(3, max(4, min(24, min(width, height) - size - 6)))
        at = draw.place(rng, swept, size + far)
        if at is None:
            continue
        swept.things.append(Thing("", "", *at, size + far))
        direction = rng.choice(tuple(STEPS))
        shape, colour = rng.choice(SHAPES), draw.pick_colour(rng, background)
        for frame, along in zip(frames, (-far / 2, far / 2), strict=True):
            x, y = (c + s * along for c, s in zip(at, STEPS[direction], strict=True))
            frame.things.append(Thing(shape, colour, x, y, size, direction))
    return frames


def add_thing(rng, scene: Scene, box=None, shape=None, colour=None, size=None) -> bool:
    colour = colour or draw.pick_colour(rng, scene.background)
    side = min(scene.width, scene.height)
    size = size or rng.uniform(draw.MIN_OBJECT, max(draw.MIN_OBJECT, min(60, side * 0.5)))
    at = draw.place(rng, scene, size, box) or draw.place(rng, scene, draw.MIN_OBJECT, box)
    if at is None:
        return False
    scene.things.append(
        Thing(
            shape or rng.choice(SHAPES),
            colour,
            *at,
            size if at and draw_fits(scene, at, size) else draw.MIN_OBJECT,
        )
    )
    return True


def draw_fits(scene: Scene, at, size: float) -> bool:
    x, y = at
    half = size / 2 + 2
    inside = half <= x <= scene.width - half and half <= y <= scene.height - half
    apart = all(np.hypot(x - t.x, y - t.y) > (size + t.size) / 2 * 1.12 + 3 for t in scene.things)
    return bool(
        inside
        and apart
        and all(abs(y - cy) > size / 2 + scene.font[1] * 0.6 for _, _, cy in scene.chars)
    )


LOW, MIDDLE, HIGH = (0.0, 0.28), (0.43, 0.57), (0.72, 1.0)
PLACES = {
    (0, 0): "top left",
    (1, 0): "top",
    (2, 0): "top right",
    (0, 1): "left",
    (1, 1): "centre",
    (2, 1): "right",
    (0, 2): "bottom left",
    (1, 2): "bottom",
    (2, 2): "bottom right",
}


def zone(value: float) -> int | None:
    for index, (low, high) in enumerate((LOW, MIDDLE, HIGH)):
        if low <= value <= high:
            return index
    return None


def place_name(scene: Scene, thing: Thing) -> str | None:
    return PLACES.get((zone(thing.x / scene.width), zone(thing.y / scene.height)))


def things_scene(rng: random.Random, width: int, height: int) -> Scene:
    """One object at a named place, one kind several times, or a mixture."""
    scene = Scene(width, height, draw.pick_background(rng))
    kind = rng.random()
    if kind < 0.25:
        column, line = rng.choice(tuple(PLACES))
        box = [(LOW, MIDDLE, HIGH)[i] for i in (column, line)]
        small = draw.MIN_OBJECT if min(width, height) < 84 else None
        add_thing(rng, scene, (box[0][0], box[1][0], box[0][1], box[1][1]), size=small)
        return scene if scene.things else things_scene(rng, width, height)
    wanted = rng.randint(1, 6)
    side = (width * height / wanted) ** 0.5
    same = kind < 0.6
    shape, colour = rng.choice(SHAPES), draw.pick_colour(rng, scene.background)
    few = rng.sample(SHAPES, 2)
    if kind > 0.85:
        wanted = 2
    for _ in range(wanted):
        size = rng.uniform(
            draw.MIN_OBJECT, max(draw.MIN_OBJECT, min(60, side * 0.55, min(width, height) * 0.6))
        )
        if same:
            add_thing(rng, scene, None, shape, colour, size)
        else:
            add_thing(rng, scene, None, rng.choice(few if kind < 0.8 else SHAPES), None, size)
    return scene


def make_scene(rng: random.Random, size: tuple[int, int], text_share: float = 0.45) -> Scene:
    width, height = drawn_size(rng, size)
    return (text_scene if rng.random() < text_share else things_scene)(rng, width, height)


# ---------------------------------------------------------------- questions about one picture
def article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def ask(rng, skill: str, answer: str, *questions: str) -> Turn:
    return rng.choice(questions), answer, skill


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


def plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("s") else "s")


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
    talks += where_talks(rng, scene, shapes, pairs)
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


def where_talks(rng, scene: Scene, shapes, pairs) -> list[Talk]:
    talks: list[Talk] = []
    things = scene.things
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
        f"Where is {a} from {b}?",
        f"On which side of {b} is {a}?",
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


# ---------------------------------------------------------------- two pictures, clips
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


def clip_scenes(rng, size: tuple[int, int], frames: int) -> tuple[list[Scene], str]:
    """An object that moves one way, at times with another that stays."""
    width, height = size
    base = Scene(width, height, draw.pick_background(rng))
    direction = rng.choice(("left", "right", "up", "down"))
    across = direction in ("left", "right")
    extent, other = (width, height) if across else (height, width)
    size_ = rng.uniform(draw.MIN_OBJECT, max(draw.MIN_OBJECT, min(48, min(width, height) * 0.4)))
    half = size_ / 2 + 2
    room = extent - 2 * half
    length = rng.uniform(0.7, 1.0) * room
    start = half + rng.uniform(0, room - length)
    side = rng.uniform(half, other - half)
    shape, colour = rng.choice(SHAPES), draw.pick_colour(rng, base.background)
    still = None
    if rng.random() < 0.4:
        still = draw.place(rng, base, draw.MIN_OBJECT)
        clear = (
            still
            and abs((still[1] if across else still[0]) - side) > half + draw.MIN_OBJECT / 2 + 3
        )
        still = still if clear else None
    other_shape = rng.choice([s for s in SHAPES if s != shape])
    other_colour = draw.pick_colour(rng, base.background)
    scenes = []
    for k in range(frames):
        along = start + length * k / (frames - 1)
        if direction in ("left", "up"):
            along = extent - along
        x, y = (along, side) if across else (side, along)
        scene = Scene(width, height, base.background, [Thing(shape, colour, x, y, size_, direction)])
        if still:
            scene.things.append(Thing(other_shape, other_colour, *still, draw.MIN_OBJECT))
        scenes.append(scene)
    return scenes, direction


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


# ---------------------------------------------------------------- samples
def make_sample(rng: random.Random, layout: Layout, text_share: float = 0.45) -> Sample:
    """Draw the pictures of one sample and list every conversation about them."""
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
        scenes = [make_scene(rng, size, text_share) for size in layout.sizes]
        talks = one_talks(rng, scenes[0]) if len(scenes) == 1 else two_talks(rng, scenes)
        if talks:
            break
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
        skill; png (bytes, at most `largest_bytes`: noise packs badly); turns, the last of which holds the question;
        scene, for questions on pairs of pictures.
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
                {"skill": skill, "png": data, "turns": turns(talk), "scene": sample.scenes[0]}
            )
    return cases


def pair_case(rng: random.Random, first: Scene, second: Scene) -> dict:
    """A test case on two pictures that are drawn already."""
    return {"skill": "two_pictures", "turns": turns(rng.choice(two_talks(rng, [first, second])))}


def clip_case(seed: int) -> dict:
    sample, _, talk = test_sample(seed, "motion")
    return {"skill": "motion", "frames": [png(p) for p in sample.pictures], "turns": turns(talk)}


def turns(talk: Talk) -> list[dict]:
    return [{"question": question, "answer": answer} for question, answer, _ in talk]


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    draw.Image.fromarray(pixels).save(out, "PNG", optimize=True)
    return out.getvalue()
