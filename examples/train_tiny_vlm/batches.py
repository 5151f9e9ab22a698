"""Turn samples into padded arrays: prompts with placeholders, M-RoPE positions, branch masks,
labels. Host only.

A batch has one layout of pictures. The conversations about a picture are branches: each sees the
pictures and itself, and stands at the positions it would have alone, so one encoding of the picture
teaches several first turns.
"""

import functools
import random
from collections import Counter
from dataclasses import dataclass

import draw
import facts
import kinds
import numpy as np
import scenes
from draw import BACKGROUNDS, SHAPES
from facts import CHARS, COLOUR_NAMES, NAME_FACTS, NUMBERS, ROW_FACTS
from samples import Sample, make_sample
from scenes import Layout
from skills import EXTRA, SKILLS, Talk, Turn

SKILL_NAMES = (*SKILLS, EXTRA)
SKILL_INDEX = {name: i for i, name in enumerate(SKILL_NAMES)}
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
# What the training-only classifiers say of each vision row: (name, classes, weight); class 0 is
# "nothing".
AUX = (
    ("char0", 37, 3.0),  # characters whose middle lies in the row's pixels
    ("char1", 37, 3.0),
    ("char2", 37, 1.0),
    ("order", 9, 2.0),  # which character of its line the first of them is
    ("length", 9, 1.0),  # characters of the line
    ("text_colour", 9, 0.5),
    ("shape", 7, 1.0),  # the object whose middle lies here
    ("colour", 9, 0.5),
    ("cover_shape", 7, 0.5),  # the object that covers the middle of the row; the rest is about it
    ("cover_colour", 9, 0.5),
    ("place", 10, 1.0),
    ("same_shape", 7, 1.0),  # objects of its shape in the picture
    ("same_colour", 7, 1.0),
    ("direction", 5, 1.0),
    ("objects", 8, 1.0),  # 1 + objects in the picture, on every row
    ("background", 8, 0.5),  # on every row
)
PLACED = (
    2  # and two numbers, where in the picture the object is: 1 + thousandths of width and height
)
COLUMN = {name: i for i, (name, _, _) in enumerate(AUX)}


@dataclass
class Batch:
    layout: Layout
    pictures: list[np.ndarray]  # per slot: uint8 [B, frames, H, W, 3]
    ids: np.ndarray  # int64 [B, T]
    positions: np.ndarray  # int64 [3, B, T]
    branch: np.ndarray  # int64 [B, T]: 0 what all share, k > 0 the k-th conversation, -1 padding
    rows_at: np.ndarray  # int64 [B*M]
    wanted: np.ndarray  # int64: flat index of the token before each label
    labels: np.ndarray  # int64
    answer: np.ndarray  # int64: which answer each label belongs to
    skills: np.ndarray  # int64 per answer
    kinds: np.ndarray  # int64 per answer
    row_facts_at: np.ndarray  # int64 [R]: flat index of each token that is told ROW_FACTS
    row_facts: np.ndarray  # int64 [R, len(ROW_FACTS)]
    name_facts_at: np.ndarray  # int64 [K]
    name_facts: np.ndarray  # int64 [K, len(NAME_FACTS) + NUMBERS]
    aux: np.ndarray  # int64 [B, M, len(AUX) + PLACED]


class Encoder:
    """Cached text -> ids."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.image, self.video = (
            tokenizer.token_to_id("<|image_pad|>"),
            tokenizer.token_to_id("<|video_pad|>"),
        )
        self.encode = functools.lru_cache(maxsize=200_000)(
            lambda text: tuple(tokenizer.encode(text).ids)
        )
        self.words = facts.Words(self.encode)


def picture_parts(layout: Layout, encoder: Encoder) -> list:
    """The vision part of a user turn: ids and grids (t, h, w merged) in order."""
    start, end = encoder.encode("<|vision_start|>"), encoder.encode("<|vision_end|>")
    parts = []
    for w, h in layout.sizes:
        grid = (max(1, layout.frames // 2), h // 28, w // 28)
        parts += [start, grid, end]
    return parts


class Prompt:
    """Grows ids, positions, branches and labels of one sample."""

    def __init__(self, encoder: Encoder, layout: Layout, shown: list[draw.Scene]):
        self.encoder, self.layout = encoder, layout
        self.shown = [] if layout.frames else shown  # facts are about still pictures
        self.ids, self.at, self.branch = [], [], []
        self.labels, self.rows, self.skills, self.kinds = [], [], [], []
        self.names, self.facts, self.ends, self.read = [], [], [], []
        self.next, self.current = 0, 0

    def text(self, ids, label: int | None = None) -> None:
        for i in ids:
            if label is not None:
                self.labels.append((len(self.ids) - 1, i, label))
            self.ids.append(i)
            self.at.append((self.next,) * 3)
            self.branch.append(self.current)
            self.next += 1

    def vision(self, grid) -> None:
        t, h, w = grid
        step = 2 if self.layout.frames else 1
        pad = self.encoder.video if self.layout.frames else self.encoder.image
        for f in range(t):
            for y in range(h):
                for x in range(w):
                    self.rows.append(len(self.ids))
                    self.ids.append(pad)
                    self.at.append((self.next + f * step, self.next + y, self.next + x))
                    self.branch.append(self.current)
        self.next += max((t - 1) * step + 1, h, w)

    def parts(self, parts) -> None:
        for part in parts:
            self.vision(part) if len(part) == 3 else self.text(part)

    def question(self, question: str, told: bool) -> None:
        """A question; `told` where the pictures stand before it."""
        ids = self.encoder.encode(question)
        if told and self.shown:
            self.tell(facts.question_facts(ids, self.shown, self.encoder.words))
        self.text(ids)

    def tell(self, told) -> None:
        self.facts += [(len(self.ids) + i, vector) for i, vector in told]

    def turn(self, turn: Turn, opened: bool) -> None:
        if not opened:
            self.text(self.encoder.encode("<|im_start|>user\n"))
        self.question(turn[0], told=True)
        self.answer(turn)

    def answer(self, turn: Turn) -> None:
        e = self.encoder.encode
        self.text(e("<|im_end|>\n<|im_start|>assistant\n"))
        self.skills.append(SKILL_INDEX[turn[2]])
        self.kinds.append(kinds.INDEX[kinds.kind(turn)])
        if self.shown:
            sizes, words = self.layout.sizes, self.encoder.words
            told = list(facts.answer_facts(turn, e, self.shown, sizes, words))
            self.tell((i - 1, vector) for i, vector in told)
            read = [i - 1 for i, vector in told if vector[facts.NAME["slot"]]]
            self.read += [(len(self.ids) + at, 1 + k) for k, at in enumerate(read)]
            if len(self.names) == 1 and len(self.skills) == 1:  # asked before the pictures
                self.tell([(-1, facts.about(self.names[0], self.shown))])
        self.text((*e(turn[1]), *e("<|im_end|>")), len(self.skills) - 1)
        if any(turn[1] == scene.text for scene in self.shown):
            self.ends.append((len(self.ids) - 1, 1 + CHARS.index(turn[1][-1])))
        self.text(e("\n"))


def build(sample: Sample, layout: Layout, talks, encoder: Encoder, question_first: bool) -> Prompt:
    """Lay out one sample. With `question_first` there is one talk, and its question stands before
    the pictures.
    """
    prompt = Prompt(encoder, layout, sample.scenes)
    e = encoder.encode
    prompt.text(e(SYSTEM))
    prompt.text(e("<|im_start|>user\n"))
    pictures = picture_parts(layout, encoder)
    # one part list with the 1-token grids told apart by their length
    if question_first:
        prompt.question(talks[0][0][0], told=False)
        prompt.names = [name for _, name in encoder.words.names(e(talks[0][0][0]))]
        prompt.parts(pictures)
        prompt.answer(talks[0][0])
        for turn in talks[0][1:]:
            prompt.turn(turn, opened=False)
        return prompt
    prompt.parts(pictures)
    shared = prompt.next
    for k, talk in enumerate(talks):
        prompt.current, prompt.next = k + 1, shared
        for n, turn in enumerate(talk):
            prompt.turn(turn, opened=n == 0)
    return prompt


def pick_talks(rng: random.Random, sample: Sample, weight, most: int, longest: int) -> list[Talk]:
    """Some conversations, by the `weight` of their last turn, within a budget of words; at times
    one long one.
    """
    pool = [(talk, weight(talk[-1])) for talk in sample.talks]
    chosen, budget = [], longest
    while pool and len(chosen) < most:
        index = rng.choices(range(len(pool)), [w for _, w in pool])[0]
        talk, _ = pool.pop(index)
        if any(t[-1][1:] == talk[-1][1:] for t in chosen) and rng.random() < 0.7:
            continue
        chosen.append(talk)
        budget -= sum(9 + len(q.split()) + 1 + len(a.split()) for q, a, _ in talk)
        if budget < 0:
            break
    if len(chosen) >= 3 and rng.random() < 0.15:  # one conversation of many turns
        turns = [t for talk in chosen for t in talk][:4]
        # a follow-up question leans on the turn before it, so talks stay whole
        return [turns]
    return chosen


def vision_targets(sample: Sample, layout: Layout) -> np.ndarray:
    """What AUX and PLACED say of each vision row of a sample."""
    frames = sample.scenes[::2] if layout.frames else sample.scenes
    sizes = layout.sizes * len(frames) if layout.frames else layout.sizes
    tables = [scene_targets(f, w, h) for f, (w, h) in zip(frames, sizes, strict=True)]
    return np.concatenate([t.reshape(-1, t.shape[-1]) for t in tables])


def scene_targets(scene, width: int, height: int) -> np.ndarray:
    """int64 [rows, columns, len(AUX) + PLACED] of a scene that is resized to width x height."""
    table = np.zeros((height // 28, width // 28, len(AUX) + PLACED), np.int64)
    sx, sy = width / scene.width, height / scene.height

    def cell(x, y):
        return (
            min(max(int(y * sy // 28), 0), height // 28 - 1),
            min(max(int(x * sx // 28), 0), width // 28 - 1),
        )

    table[..., COLUMN["background"]] = 1 + tuple(BACKGROUNDS).index(scene.background)
    if len(scene.things) <= 6:
        table[..., COLUMN["objects"]] = 1 + len(scene.things)
    for line in (scene, *scene.more):
        for order, (char, x, y) in enumerate(line.chars):
            row = table[cell(x, y)]
            slot = int((row[:3] > 0).sum())
            if slot < 3:
                row[slot] = 1 + CHARS.index(char)
            if slot == 0:
                row[COLUMN["order"]], row[COLUMN["length"]] = order + 1, len(line.chars)
            row[COLUMN["text_colour"]] = 1 + COLOUR_NAMES.index(line.text_colour)
    shapes = Counter(t.shape for t in scene.things)
    colours = Counter(t.colour for t in scene.things)
    ys = (np.arange(height // 28) * 28 + 14) / sy
    xs = (np.arange(width // 28) * 28 + 14) / sx
    for thing in scene.things:
        shape, colour = 1 + SHAPES.index(thing.shape), 1 + COLOUR_NAMES.index(thing.colour)
        inside = (ys[:, None] - thing.y) ** 2 + (xs[None] - thing.x) ** 2 < (thing.size * 0.5) ** 2
        inside[cell(thing.x, thing.y)] = True
        name = scenes.place_name(scene, thing)
        table[inside, COLUMN["cover_shape"] :] = (
            shape,
            colour,
            1 + tuple(scenes.PLACES.values()).index(name) if name else 0,
            min(6, shapes[thing.shape]),
            min(6, colours[thing.colour]),
            1 + tuple(scenes.STEPS).index(thing.direction) if thing.direction else 0,
            *table[0, 0, COLUMN["objects"] : len(AUX)],
            1 + int(1000 * thing.x / scene.width),
            1 + int(1000 * thing.y / scene.height),
        )
        middle = table[cell(thing.x, thing.y)]
        middle[COLUMN["shape"]], middle[COLUMN["colour"]] = shape, colour
    return table


def told_rows(layout: Layout, targets: np.ndarray, names) -> np.ndarray:
    """ROW_FACTS of the vision rows of a sample, from what the encoder is told of them."""
    counts = [w * h // 784 for w, h in layout.sizes]
    columns = (targets[:, COLUMN[name]] for name in ("shape", "colour", "order"))
    return facts.row_facts(*columns, np.repeat(np.arange(len(counts)), counts), names)


def all_facts(layout: Layout, prompts: list[Prompt], aux: np.ndarray, length: int):
    """Flat indexes and targets of ROW_FACTS and of NAME_FACTS."""
    if layout.frames:
        empty = np.zeros(0, np.int64)
        shapes = len(ROW_FACTS), len(NAME_FACTS) + NUMBERS
        return empty, empty.reshape(0, shapes[0]), empty, empty.reshape(0, shapes[1])
    row_at, rows, name_at, names = [], [], [], []
    for i, p in enumerate(prompts):
        row_at += [i * length + r for r in p.rows]
        rows.append(told_rows(layout, aux[i], p.names))
        for name, told in (("last", p.ends), ("index", p.read)):
            some = np.zeros((len(told), len(ROW_FACTS)), np.int64)
            some[:, facts.ROW[name]] = [value for _, value in told]
            rows.append(some)
            row_at += [i * length + at for at, _ in told]
        name_at += [i * length + at for at, _ in p.facts]
        names += [vector for _, vector in p.facts]
    told = np.stack(names) if names else np.zeros((0, len(NAME_FACTS) + NUMBERS), np.int64)
    return np.array(row_at), np.concatenate(rows), np.array(name_at, np.int64), told


def collate(layout: Layout, samples: list[Sample], prompts: list[Prompt]) -> Batch:
    length = max(len(p.ids) for p in prompts)
    length = -(-length // 8) * 8
    b = len(prompts)
    ids, branch = np.zeros((b, length), np.int64), np.full((b, length), -1, np.int64)
    positions = np.zeros((3, b, length), np.int64)
    rows, wanted, labels, answer, skills, asked = [], [], [], [], [], []
    for i, p in enumerate(prompts):
        n = len(p.ids)
        ids[i, :n], branch[i, :n] = p.ids, p.branch
        positions[:, i, :n] = np.array(p.at).T
        rows += [i * length + r for r in p.rows]
        for at, label, k in p.labels:
            wanted.append(i * length + at)
            labels.append(label)
            answer.append(len(skills) + k)
        skills += p.skills
        asked += p.kinds
    if layout.frames:
        pictures = [np.stack([np.stack(s.pictures) for s in samples])]
    else:
        pictures = [
            np.stack([s.pictures[k][None] for s in samples]) for k in range(len(layout.sizes))
        ]
    aux = np.stack([vision_targets(s, layout) for s in samples])
    return Batch(
        layout,
        pictures,
        ids,
        positions,
        branch,
        np.array(rows),
        np.array(wanted),
        np.array(labels),
        np.array(answer),
        np.array(skills),
        np.array(asked),
        *all_facts(layout, prompts, aux, length),
        aux,
    )


def cost(layout: Layout, text: int = 100) -> float:
    """Rough work of one sample, in text tokens."""
    rows = sum(w * h for w, h in layout.sizes) / 784 * max(1, layout.frames // 2)
    return text + rows * (1 + 4 * 0.7) + rows * rows / 400


def page_batch(
    rng: random.Random, count: int, largest: int, asked: float = 0.5, clips: float = 0.1
) -> tuple[np.ndarray, np.ndarray]:
    """Pictures for the encoder alone: full pages, and some scenes as they are asked about, and
    pairs of frames.

    Returns:
        uint8 [B, frames, H, W, 3] and targets [B, rows, len(AUX) + PLACED]; about `count` times
        112x112 pixels.
    """
    width, height = scenes.pick_size(rng, largest)
    kind = rng.random()
    pages, targets = [], []
    for _ in range(max(4, int(count * 12544 / (width * height)))):
        size = scenes.drawn_size(rng, (width, height))
        if kind < clips:
            frames = scenes.moving_page(rng, *size)
        elif kind < clips + asked:
            frames = [scenes.make_scene(rng, size, 0.5)]
        else:
            frames = [scenes.page_scene(rng, *size)]
        seed = rng.getrandbits(32)
        images = [draw.render(f, random.Random(seed)) for f in frames]
        pages.append(np.stack([draw.to_size(i, width, height) for i in images]))
        targets.append(scene_targets(frames[0], width, height))
    targets = np.stack(targets)
    return np.stack(pages), targets.reshape(len(pages), -1, targets.shape[-1])


def train_batch(rng: random.Random, encoder: Encoder, recipe: dict, errors) -> Batch:
    """One fresh batch of about `recipe['tokens']` tokens of work.

    Args:
        errors: Share of wrong answers of late, by kind of question; the more, the more it is asked.
    """
    kind = rng.choices(("one", "two", "clip"), recipe["kinds"])[0]
    layout = scenes.pick_layout(rng, kind, recipe["largest"])
    question_first = rng.random() < recipe["question_first"]
    size = max(2, int(recipe["tokens"] / cost(layout, 50 if question_first else recipe["text"])))

    def weight(turn: Turn) -> float:
        share = recipe["extra"] if turn[2] == EXTRA else 1.0
        return share * float(recipe["easy"] + errors[kinds.INDEX[kinds.kind(turn)]])

    samples, prompts = [], []
    for _ in range(size):
        sample = make_sample(rng, layout, recipe["text_share"], recipe["mixed"], recipe["hard"])
        most = 1 if question_first else recipe["talks"]
        talks = pick_talks(rng, sample, weight, most, recipe["words"])
        samples.append(sample)
        prompts.append(build(sample, layout, talks, encoder, question_first))
    return collate(layout, samples, prompts)
