"""Draw the pictures and clips that the small model learns from. Host only.

A `Scene` says what is in a picture (that is what questions are made from); `render` gives its
pixels. Every choice comes from one `random.Random`, so that a seed names a picture.
"""

import functools
import math
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
COLOURS = {
    "red": (220, 30, 35),
    "green": (25, 150, 50),
    "blue": (35, 70, 215),
    "yellow": (250, 215, 20),
    "orange": (250, 130, 15),
    "purple": (135, 40, 165),
    "black": (15, 15, 18),
    "white": (250, 250, 250),
}
BACKGROUNDS = {
    "white": (248, 248, 248),
    "black": (18, 18, 20),
    "grey": (150, 150, 152),
    "light blue": (180, 212, 245),
    "light green": (190, 232, 188),
    "light yellow": (250, 243, 186),
    "pink": (248, 192, 208),
}
FONTS = (
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSerif-Bold.ttf",
    "LiberationSans-Bold.ttf",
)
FONT_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "~/.local/share/fonts")
MIN_CONTRAST = 180.0  # distance in RGB between anything drawn and the background
MIN_FONT, MAX_FONT = 24, 46  # pixels: an em; a capital is 0.73 of it
MIN_OBJECT = 22  # pixels: smallest object
MIN_ADVANCE = 16  # pixels: narrowest mean step from character to character


@dataclass
class Thing:
    """One object: `x`, `y` are its centre in pixels, `size` its diameter."""

    shape: str
    colour: str
    x: float
    y: float
    size: float
    direction: str = ""  # where it moves to from this frame to the next


@dataclass
class Scene:
    """What a picture shows. `chars` holds (character, x, y) of the written text, in pixels."""

    width: int
    height: int
    background: str
    things: list[Thing] = field(default_factory=list)
    text: str = ""
    text_colour: str = ""
    chars: list[tuple[str, float, float]] = field(default_factory=list)
    font: tuple = ()
    text_at: tuple = ()
    more: list["Scene"] = field(
        default_factory=list
    )  # further lines of text of a page (training of the encoder only)


@functools.cache
def font_path(name: str) -> str:
    """Find a font file by name; `apt install fonts-dejavu-extra fonts-liberation` brings all of
    them.
    """
    for folder in FONT_FOLDERS:
        for path in sorted(Path(folder).expanduser().rglob(name)):
            return str(path)
    raise FileNotFoundError(
        f"font {name} not found; install fonts-dejavu-core, fonts-dejavu-extra and fonts-liberation"
    )


@functools.lru_cache(maxsize=4096)
def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(font_path(name), size)


@functools.lru_cache(maxsize=65536)
def advance(name: str, size: int, char: str) -> float:
    return font(name, size).getlength(char)


@functools.cache
def noise_tile() -> np.ndarray:
    return np.random.default_rng(7).standard_normal((768, 768, 3)).astype(np.float32)


def distance(a, b) -> float:
    return math.dist(a, b)


def pick_background(rng: random.Random) -> str:
    return rng.choice(("white", "white", "white", "black", "grey", *BACKGROUNDS))


def pick_colour(rng: random.Random, background: str) -> str:
    while True:
        colour = rng.choice(tuple(COLOURS))
        if distance(COLOURS[colour], BACKGROUNDS[background]) >= MIN_CONTRAST:
            return colour


def place(rng: random.Random, scene: Scene, size: float, box=None) -> tuple[float, float] | None:
    """A free centre for an object of that size, or None after some tries; `box` limits it
    (fractions).
    """
    half = size / 2 + 2
    x0, y0, x1, y1 = box or (0.0, 0.0, 1.0, 1.0)
    left, right = max(half, x0 * scene.width), min(scene.width - half, x1 * scene.width)
    top, bottom = max(half, y0 * scene.height), min(scene.height - half, y1 * scene.height)
    if left > right or top > bottom:
        return None
    for _ in range(30):
        x, y = rng.uniform(left, right), rng.uniform(top, bottom)
        free = all(
            math.hypot(x - t.x, y - t.y) > (size + t.size) / 2 * 1.12 + 3 for t in scene.things
        )
        if free and all(abs(y - cy) > size / 2 + scene.font[1] * 0.6 for _, _, cy in scene.chars):
            return x, y
    return None


def add_text(rng: random.Random, scene: Scene, text: str, room=(0.0, 1.0)) -> bool:
    """Write `text` somewhere between the given fractions of the height; False if it does not
    fit.
    """
    name = rng.choice(FONTS)
    spread = rng.choice((0, 0, 0, 1, 2, 3))
    top, bottom = room[0] * scene.height, room[1] * scene.height
    largest = min(
        (bottom - top - 6) / 0.80, MAX_FONT
    )  # capitals are about 0.73 of the font size high
    unit = [advance(name, 40, c) / 40 for c in text]
    largest = min(largest, (scene.width - 6 - spread * (len(text) - 1)) / sum(unit))
    smallest = max(MIN_FONT, (MIN_ADVANCE - spread) / (sum(unit) / len(unit)))
    if largest < smallest:
        return False
    size = int(
        min(
            largest,
            rng.triangular(
                smallest, max(smallest, largest), smallest + 0.45 * (largest - smallest)
            ),
        )
    )
    steps = [advance(name, size, c) + spread for c in text]
    total, capital = sum(steps) - spread, 0.73 * size
    x = rng.uniform(3, max(3.01, scene.width - 3 - total))
    y = rng.uniform(top + 3 + capital / 2, max(top + 3.01 + capital / 2, bottom - 3 - capital / 2))
    if rng.random() < 0.3:
        x = (scene.width - total) / 2
    scene.text, scene.font, scene.text_at = text, (name, size, spread), (x, y)
    scene.text_colour = pick_colour(rng, scene.background)
    for char, step in zip(text, steps, strict=True):
        scene.chars.append((char, x + (step - spread) / 2, y))
        x += step
    return True


def outline(thing: Thing, scale: float, angle: float) -> list[tuple[float, float]]:
    r = thing.size / 2 * scale
    cx, cy = thing.x * scale, thing.y * scale
    if thing.shape == "square":
        points = [(r * 0.88, 45 + 90 * k) for k in range(4)]
        points = [(1.13 * q, a) for q, a in points]
    elif thing.shape == "diamond":
        return [(cx, cy - r * 1.1), (cx + r * 0.75, cy), (cx, cy + r * 1.1), (cx - r * 0.75, cy)]
    elif thing.shape == "triangle":
        points = [(r * 1.1, -90 + 120 * k) for k in range(3)]
        cy += r * 0.15
    elif thing.shape == "star":
        points = [(r * (1.1 if k % 2 == 0 else 0.45), -90 + 36 * k) for k in range(10)]
    else:
        a = r * 0.34
        return [
            (cx + dx, cy + dy)
            for dx, dy in (
                (-a, -r),
                (a, -r),
                (a, -a),
                (r, -a),
                (r, a),
                (a, a),
                (a, r),
                (-a, r),
                (-a, a),
                (-r, a),
                (-r, -a),
                (-a, -a),
            )
        ]
    return [
        (cx + q * math.cos(math.radians(t + angle)), cy + q * math.sin(math.radians(t + angle)))
        for q, t in points
    ]


def jitter(rng: random.Random, rgb, amount: int) -> tuple[int, int, int]:
    return tuple(min(255, max(0, c + rng.randint(-amount, amount))) for c in rgb)


def render(scene: Scene, rng: random.Random) -> Image.Image:
    """Pixels of a scene: objects drawn at double size and halved, with a soft slope of light and a
    little noise.
    """
    scale = 2 if scene.things else 1
    image = Image.new(
        "RGB",
        (scene.width * scale, scene.height * scale),
        jitter(rng, BACKGROUNDS[scene.background], 7),
    )
    pen = ImageDraw.Draw(image)
    for thing in scene.things:
        colour = jitter(rng, COLOURS[thing.colour], 12)
        if thing.shape == "circle":
            r = thing.size / 2 * scale
            x, y = thing.x * scale, thing.y * scale
            pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        else:
            pen.polygon(outline(thing, scale, rng.uniform(-6, 6)), fill=colour)
    for part in (scene, *scene.more):
        if part.text:
            write(image, part, jitter(rng, COLOURS[part.text_colour], 12), scale)
    image = image.reduce(scale) if scale > 1 else image
    light = rng.choice((0, 0, 1)) * rng.uniform(-16, 16)
    noise = rng.choice((0, 1, 1)) * rng.uniform(0, 7)
    if not light and not noise:
        return image
    pixels = np.asarray(image, dtype=np.float32)
    if noise:
        y, x = (
            rng.randrange(768 - min(scene.height, 767)),
            rng.randrange(768 - min(scene.width, 767)),
        )
        pixels = pixels + noise * noise_tile()[y : y + scene.height, x : x + scene.width]
    if light:
        pixels = pixels + np.linspace(-light, light, scene.width, dtype=np.float32)[None, :, None]
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


@functools.lru_cache(maxsize=16384)
def glyph(name: str, size: int, char: str) -> tuple[Image.Image, int, int]:
    """Coverage of a character, and where its left top corner lies from the middle of its base
    line.
    """
    face = font(name, size)
    left, top, right, bottom = face.getbbox(char, anchor="ms")
    mask = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(mask).text((-left, -top), char, font=face, fill=255, anchor="ms")
    return mask, left, top


def write(image: Image.Image, scene: Scene, colour, scale: int) -> None:
    name, size, _ = scene.font
    # the base line: half of a capital under the centre
    y = round(scene.text_at[1] * scale + 0.365 * size * scale)
    for char, cx, _ in scene.chars:
        mask, left, top = glyph(name, size * scale, char)
        image.paste(colour, (round(cx * scale) + left, y + top), mask)


def to_size(image: Image.Image, width: int, height: int) -> Image.Image:
    """The resize that the published processor does."""
    return (
        image
        if image.size == (width, height)
        else image.resize((width, height), Image.Resampling.BICUBIC)
    )
