"""Turn samples into padded arrays: prompts with placeholders, M-RoPE positions, branch masks, labels. Host only.

A batch has one layout of pictures. The conversations about a picture are branches: each sees the pictures and itself,
and stands at the positions it would have alone, so one encoding of the picture teaches several first turns.
"""

import functools
import random
from dataclasses import dataclass

import numpy as np
import questions
from draw import COLOURS, SHAPES
from questions import EXTRA, SKILLS, Layout, Sample

CHARS = questions.LETTERS + questions.DIGITS
SKILL_INDEX = {name: i for i, name in enumerate((*SKILLS, EXTRA))}
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
# Auxiliary targets per vision row: heads of the training-only classifier, (name, classes); class 0 is "nothing".
AUX = (
    ("char0", 37),
    ("char1", 37),
    ("char2", 37),
    ("order", 9),
    ("shape0", 7),
    ("colour0", 9),
    ("shape1", 7),
    ("colour1", 9),
    ("place", 10),
    ("cover_shape", 7),
    ("cover_colour", 9),
    ("direction", 5),
    ("text_colour", 9),
)


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
    aux: np.ndarray  # int64 [B, M, len(AUX)]


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

    def __init__(self, encoder: Encoder, layout: Layout):
        self.encoder, self.layout = encoder, layout
        self.ids, self.at, self.branch = [], [], []
        self.labels, self.rows, self.skills = [], [], []
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

    def turn(self, question: str, answer: str, skill: str, opened: bool) -> None:
        e = self.encoder.encode
        if not opened:
            self.text(e("<|im_start|>user\n"))
        self.text(e(question))
        self.answer(answer, skill)

    def answer(self, answer: str, skill: str) -> None:
        e = self.encoder.encode
        self.text(e("<|im_end|>\n<|im_start|>assistant\n"))
        self.skills.append(SKILL_INDEX[skill])
        self.text((*e(answer), *e("<|im_end|>")), len(self.skills) - 1)
        self.text(e("\n"))


def build(sample: Sample, layout: Layout, talks, encoder: Encoder, question_first: bool) -> Prompt:
    """Lay out one sample. With `question_first` there is one talk, and its question stands before the pictures."""
    prompt = Prompt(encoder, layout)
    e = encoder.encode
    prompt.text(e(SYSTEM))
    prompt.text(e("<|im_start|>user\n"))
    pictures = picture_parts(layout, encoder)
    # one part list with the 1-token grids told apart by their length
    if question_first:
        question, answer, skill = talks[0][0]
        prompt.text(e(question))
        prompt.parts(pictures)
        prompt.answer(answer, skill)
        for turn in talks[0][1:]:
            prompt.turn(*turn, opened=False)
        return prompt
    prompt.parts(pictures)
    shared = prompt.next
    for k, talk in enumerate(talks):
        prompt.current, prompt.next = k + 1, shared
        for n, turn in enumerate(talk):
            prompt.turn(*turn, opened=n == 0)
    return prompt


def pick_talks(
    rng: random.Random, sample: Sample, weights: dict[str, float], most: int, longest: int
):
    """Some conversations, by the weight of their last turn's skill, within a budget of words; at times one long one."""
    pool = list(sample.talks)
    chosen, budget = [], longest
    while pool and len(chosen) < most:
        talk = rng.choices(pool, [weights.get(t[-1][2], 1.0) for t in pool])[0]
        pool.remove(talk)
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
    """Targets of AUX for each vision row: what stands in its 28x28 pixels, after the resize."""
    tables = []
    for scene, (w, h) in zip(
        sample.scenes[:1] if layout.frames else sample.scenes, layout.sizes, strict=True
    ):
        frames = sample.scenes[::2] if layout.frames else [scene]
        for frame in frames:
            tables.append(scene_targets(frame, w, h, sample.direction).reshape(-1, len(AUX)))
    return np.concatenate(tables)


def scene_targets(scene, width: int, height: int, direction: str) -> np.ndarray:
    table = np.zeros((height // 28, width // 28, len(AUX)), np.int64)
    sx, sy = width / scene.width, height / scene.height

    def cell(x, y):
        return (
            min(max(int(y * sy // 28), 0), height // 28 - 1),
            min(max(int(x * sx // 28), 0), width // 28 - 1),
        )

    for part, order, (char, x, y) in (
        (p, *c) for p in (scene, *scene.more) for c in enumerate(p.chars)
    ):
        row = table[cell(x, y)]
        slot = int((row[:3] > 0).sum())
        if slot < 3:
            row[slot] = 1 + CHARS.index(char)
        if slot == 0:
            row[3] = order + 1
        row[12] = 1 + tuple(COLOURS).index(part.text_colour)
    for thing in scene.things:
        shape, colour = 1 + SHAPES.index(thing.shape), 1 + tuple(COLOURS).index(thing.colour)
        row = table[cell(thing.x, thing.y)]
        slot = 4 if row[4] == 0 else 6
        row[slot], row[slot + 1] = shape, colour
        name = questions.place_name(scene, thing)
        row[8] = 1 + tuple(questions.PLACES.values()).index(name) if name else 0
        if direction and thing is scene.things[0]:
            row[11] = 1 + ("left", "right", "up", "down").index(direction)
        ys = (np.arange(height // 28) * 28 + 14) / sy
        xs = (np.arange(width // 28) * 28 + 14) / sx
        inside = (ys[:, None] - thing.y) ** 2 + (xs[None] - thing.x) ** 2 < (thing.size * 0.5) ** 2
        table[inside, 9], table[inside, 10] = shape, colour
    return table


def collate(layout: Layout, samples: list[Sample], prompts: list[Prompt]) -> Batch:
    length = max(len(p.ids) for p in prompts)
    length = -(-length // 8) * 8
    b = len(prompts)
    ids, branch = np.zeros((b, length), np.int64), np.full((b, length), -1, np.int64)
    positions = np.zeros((3, b, length), np.int64)
    rows, wanted, labels, answer, skills = [], [], [], [], []
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
        aux,
    )


def cost(layout: Layout, text: int = 100) -> float:
    """Rough work of one sample, in text tokens."""
    rows = sum(w * h for w, h in layout.sizes) / 784 * max(1, layout.frames // 2)
    return text + rows * (1 + 4 * 0.7) + rows * rows / 400


def page_batch(rng: random.Random, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Full pages for the encoder alone: uint8 [B, 1, H, W, 3] and targets [B, M, len(AUX)]."""
    width, height = rng.choice(
        (
            (112, 112),
            (168, 84),
            (140, 112),
            (112, 84),
            (84, 112),
            (168, 112),
            (112, 168),
            (224, 56),
            (140, 140),
            (112, 56),
        )
    )
    count = max(4, int(count * 12544 / (width * height)))
    pages, targets = [], []
    for _ in range(count):
        scene = questions.page_scene(rng, *questions.drawn_size(rng, (width, height)))
        image = questions.draw.to_size(questions.draw.render(scene, rng), width, height)
        pages.append(np.asarray(image)[None])
        targets.append(scene_targets(scene, width, height, "").reshape(-1, len(AUX)))
    return np.stack(pages), np.stack(targets)


def train_batch(rng: random.Random, encoder: Encoder, recipe: dict) -> Batch:
    """One fresh batch of about `recipe['tokens']` tokens of work."""
    kind = rng.choices(("one", "two", "clip"), recipe["kinds"])[0]
    layout = questions.pick_layout(rng, kind, recipe["largest"])
    question_first = rng.random() < recipe["question_first"]
    size = max(2, int(recipe["tokens"] / cost(layout, 50 if question_first else 110)))
    samples, prompts = [], []
    for _ in range(size):
        sample = questions.make_sample(rng, layout, recipe["text_share"])
        most = 1 if question_first else recipe["talks"]
        talks = pick_talks(rng, sample, recipe["weights"], most, recipe["words"])
        samples.append(sample)
        prompts.append(build(sample, layout, talks, encoder, question_first))
    return collate(layout, samples, prompts)
