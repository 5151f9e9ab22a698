"""Which replica of an engine serves a request: where its prompt is cached, against the load.
Host only.

Work is counted in tokens. A replica has some ahead, and a request adds what is not cached there:

    replica 0   ahead 3000   the request's 1000 tokens, 900 of them cached     3100
    replica 1   ahead 1500   nothing cached                                    2500   chosen

So the longest prefix decides as long as reading it saves more than waiting costs, and a prefix that
all requests begin with does not gather them on one replica.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Offer(NamedTuple):
    """What a replica has for a request."""

    saved: int
    """Tokens and image rows of the prompt that need not be computed there."""
    ahead: int
    """Tokens that what it has taken on is still to compute."""
    is_full: bool
    """The request would wait there for another one's end."""


class Router:
    """Chooses among replicas that are alike."""

    def __init__(self, num_replicas: int) -> None:
        self._by_turn = list(range(num_replicas))  # the one whose turn is the longest ago first

    def best(self, offers: Sequence[Offer]) -> int:
        """Index of the replica that would have a request done first; changes nothing.

        One that is full comes after all that are not. Of equals, the one that was given none for
        the longest time.

        Args:
            offers: One of each replica.
        """
        return min(
            self._by_turn,
            key=lambda r: (offers[r].is_full, offers[r].ahead - offers[r].saved),
        )

    def note(self, replica: int) -> None:
        """Take note that a request was given to a replica."""
        self._by_turn.remove(replica)
        self._by_turn.append(replica)
