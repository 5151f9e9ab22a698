"""What hidden states of the language side are told in training, beside the answers. Host only.

An answer is a thin signal: "left" does not say whether the objects or their places were mistaken.
So linear classifiers, dropped on export, ask two layers for the steps in between. A vision row says
which picture it is of and the how-manieth of its kind; the last word of "the yellow triangle" says
where that is and how many there are; a character that is about to be read says where it stands.
"""

import functools
import re
from collections.abc import Iterator

import numpy as np
from draw import COLOURS, SHAPES, Scene, Thing
from skills import Turn, plural

CHARS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
COLOUR_NAMES = tuple(COLOURS)
# (name, classes, weight); class 0 is "not said here"
ROW_FACTS = (
    ("picture", 3, 1.0),  # first or second of a pair
    ("nth_shape", 7, 3.0),  # objects of its shape up to this one, in the order of the rows
    ("nth_colour", 7, 2.0),
    ("nth", 7, 2.0),
    ("order", 9, 1.0),  # which character of its line the first one here is
    (
        "named",
        4,
        2.0,
    ),  # question before the picture: names nothing here, its first name, its second
    ("last", 37, 0.5),  # the end of an answer that reads: its last character
    ("index", 9, 1.0),  # a token before a character that is read: which one that is
)
NAME_FACTS = (
    ("count0", 8, 6.0),  # 1 + objects of that name in the first picture
    ("count1", 8, 4.0),
    ("colour0", 9, 1.0),  # if they share one
    ("colour1", 9, 1.0),
    ("shape0", 7, 1.0),
    ("shape1", 7, 1.0),
    ("length0", 9, 1.0),  # of the text that is to be read
    ("length1", 9, 1.0),
    ("slot", 4, 2.0),  # which character of its vision row is read next
)
NUMBERS = 4  # x and y in the first picture, in the second: 1 + thousandths of width and height
ROW = {name: i for i, (name, _, _) in enumerate(ROW_FACTS)}
NAME = {name: i for i, (name, _, _) in enumerate(NAME_FACTS)}
Name = tuple[str | None, str | None]  # colour, shape; None is any
Fact = tuple[int, np.ndarray]  # index of a token, what it is told


class Words:
    """Finds names of objects in token ids."""

    def __init__(self, encode):
        def single(word: str) -> int:
            (token,) = encode(" " + word)
            return token

        self.colours = {single(c): c for c in COLOURS}
        self.shapes = {single(w): s for s in SHAPES for w in (s, plural(s))}
        self.any = {single(w) for w in ("object", "objects", "shapes", "things")}
        self.names = functools.lru_cache(maxsize=50_000)(self._names)

    def _names(self, ids: tuple[int, ...]) -> list[tuple[int, Name]]:
        """Index of each name's last token, and the name. "objects are black" is one name, "black
        star" is one.
        """
        found = []
        for i, token in enumerate(ids):
            before = self.colours.get(ids[i - 1]) if i else None
            if token in self.shapes:
                found.append((i, (before, self.shapes[token])))
            elif token in self.any:
                found.append((i, (before, None)))
            elif token in self.colours and not self._goes_on(ids[i + 1 : i + 2]):
                found = [f for f in found if f[1] != (None, None)]
                found.append((i, (self.colours[token], None)))
        return found

    def _goes_on(self, following: tuple[int, ...]) -> bool:
        return any(t in self.shapes or t in self.any for t in following)


def fits(name: Name, colour: str, shape: str) -> bool:
    return name[0] in (None, colour) and name[1] in (None, shape)


def nothing(kinds=NAME_FACTS, numbers: int = NUMBERS) -> np.ndarray:
    return np.zeros(len(kinds) + numbers, np.int64)


def about(name: Name, scenes: list[Scene]) -> np.ndarray:
    """What a name is told: how many each picture shows, what they share, where an only one is."""
    told = nothing()
    for slot, scene in enumerate(scenes):
        found = [t for t in scene.things if fits(name, t.colour, t.shape)]
        told[NAME[f"count{slot}"]] = 1 + min(6, len(found))
        if len({t.colour for t in found}) == 1:
            told[NAME[f"colour{slot}"]] = 1 + COLOUR_NAMES.index(found[0].colour)
        if len({t.shape for t in found}) == 1:
            told[NAME[f"shape{slot}"]] = 1 + SHAPES.index(found[0].shape)
        if len(found) == 1:
            look(told, slot, scene, found[0].x, found[0].y)
    return told


def look(told: np.ndarray, slot: int, scene: Scene, x: float, y: float) -> None:
    """Write a place into `told`."""
    at = len(NAME_FACTS) + 2 * slot
    told[at : at + 2] = 1 + int(1000 * x / scene.width), 1 + int(1000 * y / scene.height)


def question_facts(ids: tuple[int, ...], scenes: list[Scene], words: Words) -> list[Fact]:
    """What the names of a question are told that follows its pictures."""
    return [(i, about(name, scenes)) for i, name in words.names(ids)]


def answer_facts(turn: Turn, encode, scenes: list[Scene], sizes, words: Words) -> Iterator[Fact]:
    """Where to look for each token of an answer; the fact of index i belongs to the token before
    it.

    Args:
        sizes: (width, height) of each picture as the model sees it.
    """
    question, answer, skill = turn
    slot = int("second" in question and len(scenes) == 2)
    scene, ids = scenes[slot], encode(answer)
    if skill == "describe":
        yield from described(ids, scene, words)
    start = find(encode(scene.text), ids) if scene.text else None
    slots = row_slots(scene, sizes[slot])
    for k, (_, x, y) in enumerate(
        scene.chars if start is not None and skill != "follow_up" else ()
    ):
        told = nothing()
        look(told, slot, scene, x, y)
        if k == 0:
            told[NAME[f"length{slot}"]] = min(8, len(scene.text))
        told[NAME["slot"]] = 1 + slots[k]
        yield start + k, told
    asked = re.search(r"the (\w+) character\?", question)
    if asked and skill == "extra":
        told = nothing()
        k = ORDINALS.index(asked[1])
        look(told, slot, scene, *scene.chars[k][1:])
        yield 0, told


def row_slots(scene: Scene, size: tuple[int, int]) -> list[int]:
    """Of each character, how many before it have their middle in the same vision row."""
    scale_x, scale_y = size[0] / scene.width / 28, size[1] / scene.height / 28
    cells = [(int(x * scale_x), int(y * scale_y)) for _, x, y in scene.chars]
    return [min(2, cells[:i].count(cell)) for i, cell in enumerate(cells)]


ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def described(ids: tuple[int, ...], scene: Scene, words: Words) -> Iterator[Fact]:
    """Where the objects of a sentence are, on all tokens that name them."""
    start = 0
    for end, name in words.names(ids):
        found: list[Thing] = [t for t in scene.things if fits(name, t.colour, t.shape)]
        if name[1] and len(found) == 1:
            for i in range(start, end + 1):
                told = nothing()
                look(told, 0, scene, found[0].x, found[0].y)
                yield i, told
        if name[1]:
            start = end + 1


def find(part: tuple[int, ...], ids: tuple[int, ...]) -> int | None:
    starts = range(len(ids) - len(part) + 1)
    return next((i for i in starts if ids[i : i + len(part)] == part), None)


def row_facts(
    shapes: np.ndarray,
    colours: np.ndarray,
    order: np.ndarray,
    picture: np.ndarray,
    names: list[Name],
) -> np.ndarray:
    """What vision rows are told.

    Args:
        shapes, colours: int64 [M]: 1 + index of the object whose middle lies in the row, 0 none.
        order: int64 [M]: which character of its line the row's first one is, 0 none.
        picture: int64 [M]: which picture the row is of, from 0.
        names: What a question before the pictures names; empty where it follows them.
    Returns:
        int64 [M, len(ROW_FACTS)].
    """
    told = np.zeros((len(shapes), len(ROW_FACTS)), np.int64)
    told[:, ROW["order"]] = order
    if picture.max() > 0:
        told[:, ROW["picture"]] = 1 + picture
    for p in range(picture.max() + 1):
        rows = np.flatnonzero((picture == p) & (shapes > 0))
        for i, row in enumerate(rows):
            so_far = rows[: i + 1]
            told[row, ROW["nth"]] = i + 1
            told[row, ROW["nth_shape"]] = (shapes[so_far] == shapes[row]).sum()
            told[row, ROW["nth_colour"]] = (colours[so_far] == colours[row]).sum()
            if names:
                own = COLOUR_NAMES[colours[row] - 1], SHAPES[shapes[row] - 1]
                hits = [k for k, name in enumerate(names[:2]) if fits(name, *own)]
                told[row, ROW["named"]] = 2 + hits[0] if hits else 1
    told[:, ROW["nth_shape"] : ROW["nth"] + 1].clip(
        max=6, out=told[:, ROW["nth_shape"] : ROW["nth"] + 1]
    )
    return told
