"""What pictures and clips show, drawn by chance: layouts (picture sizes), texts, objects and their
places. Host only.
"""

import random
from dataclasses import dataclass

import draw
import numpy as np
from draw import SHAPES, Scene, Thing

WORDS = """
ABLE ACID AIR ALARM ANGLE APPLE APRIL ARROW ASK AUTUMN BAKERY BANK BASKET BEACH BED BIRD BLUE
BOAT BOOK BOX BREAD BRIDGE BRIGHT BUS BUTTER CABLE CAFE CAMERA CANDLE CAR CASTLE CAT CHAIR CHECK
CHEESE CITY CLEAN CLOCK CLOSED CLOUD COFFEE COLD CORNER COUNTRY CUP DANCE DANGER DAY DESK DINNER
DOCTOR DOG DOOR DREAM DRIVE DUST EAGLE EARTH EAST EGG EIGHT ENGINE ENTER EXIT EYE FALL FARM FAST
FERRY FIELD FIRE FISH FIVE FLAG FLIGHT FLOWER FOG FOOD FOREST FOUR FOX FREE FRESH FRIDAY FRUIT
GARDEN GATE GIFT GLASS GOLD GRAPE GREEN GUIDE HALF HAND HAPPY HARBOUR HEART HELLO HELP HILL HOME
HONEY HORSE HOTEL HOUSE ICE INK IRON ISLAND JACKET JAZZ JOB JUICE JULY JUMP JUNE KEY KING KITCHEN
KITE KNIFE LAKE LAMP LEAF LEFT LEMON LIBRARY LIGHT LION LOCK LUNCH MAGIC MAP MARCH MARKET MAY
MEDAL MELON MENU METAL MILK MIRROR MIX MONDAY MONEY MOON MOUNTAIN MUSEUM MUSIC NEW NIGHT NINE
NORTH NOVEMBER NUMBER OCEAN OFFICE OLIVE ONE OPEN ORANGE OXYGEN PAINT PAPER PARK PARTY PEARL
PENCIL PEPPER PHONE PIANO PILOT PIZZA PLANE PLANET PLATFORM POLICE POND POST PULL PURPLE PUSH
QUEEN QUICK QUIET QUIZ RADIO RAIN RED RICE RING RIVER ROAD ROBOT ROCK ROOM ROSE SAFE SALT SAND
SCHOOL SEA SEVEN SHIP SHOE SHOP SILVER SIX SKY SLOW SNOW SOAP SOFT SONG SOUTH SPRING SQUARE STAGE
STAR STATION STONE STOP STREET SUGAR SUMMER SUN SUNDAY SWIM TABLE TAXI TEA TEN THEATRE THREE
TICKET TIGER TIME TOWER TOWN TRAIN TREE TUNNEL TWO UNCLE VALLEY VIOLET VIOLIN VISIT VOICE WALK
WALL WATCH WATER WAVE WEST WHEEL WHITE WIND WINDOW WINTER WOLF WOOD WORLD YACHT YARD YELLOW YES
ZEBRA ZERO ZONE ZOO
""".split()  # noqa: SIM905, a literal would take 270 lines
LETTERS, DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"
CODE = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"  # where nothing else tells O from 0 and I from 1


@dataclass
class Layout:
    """Sizes of the pictures of a batch in pixels (width, height), multiples of 28; `frames` > 0 for
    a clip.
    """

    sizes: tuple[tuple[int, int], ...]
    frames: int = 0


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
    if kind < 0.5:
        words = [w for w in (rng.choice(WORDS) for _ in range(6)) if len(w) <= longest]
        if words:
            return words[0]
    length = rng.randint(1, longest)
    pool = DIGITS if kind < 0.85 else CODE
    return "".join(rng.choices(pool if length > 1 else CODE, k=length))


def hard_text(rng: random.Random, longest: int) -> str:
    """As many characters as fit, often the same ones again."""
    return "".join(rng.choices(rng.sample(CODE, rng.randint(2, 12)), k=longest))


def text_scene(
    rng: random.Random, width: int, height: int, shared: float = 0.25, pick=pick_text
) -> Scene:
    """A line of text; where the picture is high enough, for a share of them with an object above or
    below.

    Args:
        pick: Gives a text from the generator and the number of characters that fit.
    """
    scene = Scene(width, height, draw.pick_background(rng))
    split = height >= 84 and rng.random() < shared
    room = rng.choice(((0.0, 0.5), (0.5, 1.0))) if split else (0.0, 1.0)
    longest = max(1, min(8, int((width - 6) / (draw.MIN_ADVANCE + 0.5))))
    while not draw.add_text(rng, scene, pick(rng, longest), room):
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


def things_scene(rng: random.Random, width: int, height: int, many: bool = False) -> Scene:
    """One object at a named place, one kind several times, or a mixture; with `many` five or six,
    as far as they fit.
    """
    scene = Scene(width, height, draw.pick_background(rng))
    kind = rng.random()
    if kind < 0.25 and not many:
        column, line = rng.choice(tuple(PLACES))
        box = [(LOW, MIDDLE, HIGH)[i] for i in (column, line)]
        small = draw.MIN_OBJECT if min(width, height) < 84 else None
        add_thing(rng, scene, (box[0][0], box[1][0], box[0][1], box[1][1]), size=small)
        return scene if scene.things else things_scene(rng, width, height)
    wanted = rng.randint(5 if many else 1, 6)
    side = (width * height / wanted) ** 0.5
    same = kind < 0.6
    shape, colour = rng.choice(SHAPES), draw.pick_colour(rng, scene.background)
    few = rng.sample(SHAPES, 2)
    if kind > 0.85 and not many:
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


def mixed_scene(rng: random.Random, width: int, height: int) -> Scene:
    """Two to five objects, most of them of different kinds."""
    scene = Scene(width, height, draw.pick_background(rng))
    wanted = rng.choices((2, 3, 4, 5), (5, 4, 2, 1))[0]
    shapes = rng.sample(SHAPES, 5) if rng.random() < 0.6 else rng.choices(SHAPES, k=5)
    side = min(60, (width * height / wanted) ** 0.5 * 0.55, min(width, height) * 0.6)
    for shape in shapes[:wanted]:
        size = rng.uniform(draw.MIN_OBJECT, max(draw.MIN_OBJECT, side))
        add_thing(rng, scene, None, shape, None, size)
    return scene


def make_scene(
    rng: random.Random,
    size: tuple[int, int],
    text_share: float = 0.45,
    mixed: float = 0.0,
    hard: float = 0.0,
) -> Scene:
    """A picture with text for `text_share` of them, else of objects; the rest as in
    `samples.make_sample`.
    """
    width, height = drawn_size(rng, size)
    with_text = rng.random() < text_share
    if mixed and rng.random() < mixed:
        return text_scene(rng, width, height, 1.0) if with_text else mixed_scene(rng, width, height)
    if hard and rng.random() < hard:
        if with_text:
            return text_scene(rng, width, height, pick=hard_text)
        return things_scene(rng, width, height, many=True)
    return (text_scene if with_text else things_scene)(rng, width, height)


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
        scene = Scene(
            width, height, base.background, [Thing(shape, colour, x, y, size_, direction)]
        )
        if still:
            scene.things.append(Thing(other_shape, other_colour, *still, draw.MIN_OBJECT))
        scenes.append(scene)
    return scenes, direction
