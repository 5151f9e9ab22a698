"""The queue of sequences that are not running, and who may overtake whom in it. Host only."""

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from jaxmm.host.sequence import Sequence

FAIRNESS_WINDOW = 16
"""Among this many of the oldest, the longest cached prefix goes first."""
MAX_OVERTAKEN = 8
"""Times that later sequences go first before nobody does any more."""

_by_order = attrgetter("order")


class WaitingQueue:
    """New sequences, retracted ones, and those parked until their features come.

    Every list is in the order of arrival.
    """

    def __init__(self) -> None:
        self.retracted: list[Sequence] = []
        """Ran already; they go before all new ones."""
        self._new: list[Sequence] = []
        self._parked: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.retracted) + len(self._new) + len(self._parked)

    def add(self, sequence: Sequence) -> None:
        insort(self._list_of(sequence), sequence, key=_by_order)

    def remove(self, sequence: Sequence) -> None:
        home = self._parked if sequence in self._parked else self._list_of(sequence)
        home.remove(sequence)

    def park(self, sequence: Sequence) -> None:
        """Set a sequence aside until `unpark`."""
        self._list_of(sequence).remove(sequence)
        self._parked.append(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """Put a sequence back in its old place; nothing happens if it is not set aside."""
        if sequence in self._parked:
            self._parked.remove(sequence)
            self.add(sequence)

    def window(self) -> list[Sequence]:
        """The new sequences among which the order may be changed."""
        return self._new[:FAIRNESS_WINDOW]

    def _list_of(self, sequence: Sequence) -> list[Sequence]:
        return self.retracted if sequence.num_admissions else self._new


def is_entitled(sequence: Sequence) -> bool:
    """Nobody may go before it: it ran already, or was overtaken often enough."""
    return sequence.num_admissions > 0 or sequence.overtaken >= MAX_OVERTAKEN


def overtake(sequence: Sequence, passed: Iterable[Sequence]) -> None:
    """Note that a sequence starts before the older ones of `passed`."""
    for other in passed:
        other.overtaken += other.order < sequence.order
