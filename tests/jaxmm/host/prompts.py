"""Prompts for tests of the host: text ids and pictures written as a list of parts."""

import dataclasses
import hashlib
from dataclasses import dataclass

import numpy as np

from jaxmm.host.item import Item, Modality, Prompt, Span

PLACEHOLDER = 7
BETWEEN = 8
"""Text between the spans of one picture."""
MERGE = 4
"""Patches of a row."""


@dataclass(frozen=True)
class Picture:
    """`name` is the content; equal `name` and `num_rows`, equal identity."""

    name: str
    num_rows: int
    has_features: bool = True
    forged: bool = False
    """The caller gave a hash of its own, the same for all forged pictures."""
    cuts: tuple[int, ...] = ()
    """Rows before which a text token stands: the picture has one span more for each."""

    def __len__(self) -> int:
        """Tokens, those between its spans counted."""
        return self.num_rows + len(self.cuts)


def identity_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def make_item(picture: Picture, offsets: tuple[Span, ...]) -> Item:
    identity = identity_of(f"{picture.name}:{picture.num_rows}")
    words = np.frombuffer(identity_of("forged") if picture.forged else identity, np.uint64)
    features = np.zeros((picture.num_rows * MERGE, 1), np.uint8) if picture.has_features else None
    return Item(
        modality=Modality.IMAGE,
        features=features,
        embeddings=None,
        grid_thw=(1, MERGE, picture.num_rows),
        num_rows=picture.num_rows,
        identity=identity,
        sentinels=tuple(1_000_000 + int(word >> np.uint64(2)) for word in words),
        offsets=offsets,
    )


def steps_of(names: str | list[str], num_rows: int) -> tuple[Item, ...]:
    """A video whose steps have these contents."""
    return tuple(
        dataclasses.replace(make_item(Picture(name, num_rows), ()), modality=Modality.VIDEO, step=i)
        for i, name in enumerate(names)
    )


def make_prompt(*parts: list[int] | Picture) -> Prompt:
    """Expand parts: ids as they are, pictures as runs of placeholders, `BETWEEN` their spans."""
    ids: list[int] = []
    cache_ids: list[int] = []
    item_index: list[int] = []
    row_index: list[int] = []
    items: list[Item] = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            cache_ids += part
            item_index += [-1] * len(part)
            row_index += [-1] * len(part)
            continue
        edges = [0, *part.cuts, part.num_rows]
        starts = [len(ids) + first + i for i, first in enumerate(edges[:-1])]
        counts = np.diff(edges).tolist()
        offsets = tuple(Span(start, start + n) for start, n in zip(starts, counts, strict=True))
        items.append(make_item(part, offsets))
        for span, first in zip(offsets, edges, strict=False):
            if first:
                ids.append(BETWEEN)
                cache_ids.append(BETWEEN)
                item_index.append(-1)
                row_index.append(-1)
            ids += [PLACEHOLDER] * len(span)
            cache_ids += [items[-1].sentinels[i % 4] for i in range(len(span))]
            item_index += [len(items) - 1] * len(span)
            row_index += range(first, first + len(span))
    length = np.arange(len(ids), dtype=np.int32)
    return Prompt(
        ids=np.array(ids, np.int64),
        cache_ids=np.array(cache_ids, np.int64),
        item_index=np.array(item_index, np.int32),
        row_index=np.array(row_index, np.int32),
        positions=np.stack([length, length, length]),
        delta=0,
        items=tuple(items),
    )
