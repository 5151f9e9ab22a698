"""What a conversation keeps between its turns: its pictures as processed, and for how long.
Host only."""

from dataclasses import dataclass, field
from typing import Any

from jaxmm.errors import MediaError
from jaxmm.host.decodes import Found
from jaxmm.host.media_map import Known, KnownClip

Pixels = tuple[int, int]
"""Lower and upper limit."""


class KeptPicture:
    """A picture of a conversation: processed at its first turn, and not again while it is kept.

    Its limits may change from turn to turn: some models see pictures more coarsely where there are
    many. It is then processed anew.
    """

    __slots__ = ("_known", "_pixels", "found", "source")

    def __init__(self, source: Any) -> None:
        """Take the picture as the caller sent it."""
        self.source = source
        self.found: Found | None = None
        """What it is, while that is kept."""
        self._pixels: Pixels | None = None  # within which it was processed to `found`
        self._known: dict[Pixels, Known | KnownClip] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        if (found := self.found) is None:
            return 0
        arrays = (found.features, found.embeddings)
        return sum(array.nbytes for array in arrays if array is not None)

    def kept(self, pixels: Pixels) -> Found | None:
        """What it is within these limits, if that is kept."""
        return self.found if self._pixels == pixels else None

    def take(self, found: Found, pixels: Pixels) -> None:
        """Keep what the picture was processed to within some limits.

        Raises:
            MediaError: It is another one than at an earlier turn.
        """
        if self._known.setdefault(pixels, found.known) != found.known:
            raise MediaError(
                "a picture of this conversation has changed since its turn; begin another session"
            )
        self.found, self._pixels = found, pixels


@dataclass(slots=True, eq=False)
class Keep:
    """A conversation, as the engine sees it. The pinned prefix is with `Pins`."""

    seconds: float
    """Time from the end of a turn after which everything is given back."""
    pictures: list[KeptPicture] = field(default_factory=list)
    closed: bool = False

    @property
    def num_bytes(self) -> int:
        """Memory of the processed pictures, those of other conversations that share it counted."""
        return sum(picture.num_bytes for picture in self.pictures)

    def release(self) -> None:
        """Give the processed pictures back; a later turn processes them again."""
        for picture in self.pictures:
            picture.found = None
