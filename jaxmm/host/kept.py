"""What a conversation keeps between its turns: its pictures as processed, and for how long.
Host only."""

from dataclasses import dataclass, field
from typing import Any

from jaxmm.errors import MediaError
from jaxmm.host.decodes import Found
from jaxmm.host.media_map import Known, KnownClip


class KeptPicture:
    """A picture of a conversation: processed at its first turn, and not again while it is kept."""

    __slots__ = ("_known", "found", "source")

    def __init__(self, source: Any) -> None:
        """Take the picture as the caller sent it."""
        self.source = source
        self.found: Found | None = None
        """What it is, while that is kept."""
        self._known: Known | KnownClip | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        if (found := self.found) is None:
            return 0
        arrays = (found.features, found.embeddings)
        return sum(array.nbytes for array in arrays if array is not None)

    def take(self, found: Found) -> None:
        """Keep what the picture was processed to.

        Raises:
            MediaError: It is another one than at an earlier turn.
        """
        if self._known not in (None, found.known):
            raise MediaError(
                "a picture of this conversation has changed since its turn; begin another session"
            )
        self.found, self._known = found, found.known


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
