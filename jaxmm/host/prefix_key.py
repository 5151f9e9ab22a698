"""What two prompts must have in common to share KV pages: ids, items and tenant. Host only.

`cache_ids` alone are not enough: sentinels may come from a hash that the caller gave, so the
32-byte identities of the items are compared as well, over the very tokens that they cover.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.host.item import Item

Ids = npt.NDArray[np.int64]


class Mark(NamedTuple):
    """Tokens `[start, stop)` of a prompt belong to the item of this mark (`Item.mark`)."""

    start: int
    stop: int
    identity: bytes


Marks = tuple[Mark, ...]
"""Ascending and disjoint."""

_start, _stop = attrgetter("start"), attrgetter("stop")


def marks_of(items: Sequence[Item]) -> Marks:
    """List every span of every item, in the order of the prompt."""
    return tuple(sorted(Mark(*span, item.mark) for item in items for span in item.offsets))


def clip(marks: Marks, start: int, stop: int) -> Marks:
    """Keep what lies in tokens `[start, stop)`."""
    inside = marks[bisect_right(marks, start, key=_stop) : bisect_left(marks, stop, key=_start)]
    if not inside or (inside[0].start >= start and inside[-1].stop <= stop):
        return inside
    return tuple(Mark(max(m.start, start), min(m.stop, stop), m.identity) for m in inside)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixKey:
    """A prompt, or its beginning, as the prefix cache compares it."""

    cache_ids: Ids
    """int64[T]"""
    marks: Marks
    """May reach beyond T."""
    salt: str

    @classmethod
    def of(cls, cache_ids: Ids, items: Sequence[Item], salt: str) -> "PrefixKey":
        return cls(cache_ids, marks_of(items), salt)


def num_equal(a_ids: Ids, a_marks: Marks, b_ids: Ids, b_marks: Marks, start: int) -> int:
    """Count the leading tokens that agree in id and in identity.

    Args:
        a_ids: int64[…], the first one is token `start`; so for `b_ids`.
        a_marks: In tokens of the whole prompt; so for `b_marks`.
        start: Token at which the comparison begins; everything before it is known to agree.
    """
    length = min(len(a_ids), len(b_ids))
    differs = a_ids[:length] != b_ids[:length]
    first = int(differs.argmax()) if length else 0
    equal = first if length and differs[first] else length
    if not (a_marks or b_marks):
        return equal
    stop = start + equal
    ours, theirs = clip(a_marks, start, stop), clip(b_marks, start, stop)
    return equal if ours == theirs else _first_difference(ours, theirs) - start


def _first_difference(a_marks: Marks, b_marks: Marks) -> int:
    """First token that two lists of marks do not give to the same item; the lists differ."""
    for a, b in zip_longest(a_marks, b_marks):
        if a == b:
            continue
        if a is None or b is None:
            return int((a or b).start)
        if a.start != b.start or a.identity != b.identity:
            return min(a.start, b.start)
        return min(a.stop, b.stop)
    raise AssertionError("the marks are equal")


def num_shared(a: PrefixKey, b: PrefixKey) -> int:
    """Count the leading tokens for which two prompts can use the same KV; 0 across tenants."""
    if a.salt != b.salt:
        return 0
    return num_equal(a.cache_ids, a.marks, b.cache_ids, b.marks, 0)
