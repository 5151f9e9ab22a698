"""What a conversation keeps between its turns: pictures and videos as processed, and how long.
Host only."""

from dataclasses import dataclass, field
from typing import Any

from jaxmm.errors import MediaError
from jaxmm.host.decode import ClipTask
from jaxmm.host.decodes import Found
from jaxmm.host.media_map import Known, KnownClip

Limits = tuple[int, int] | ClipTask
"""Lower and upper limit of a picture's pixels; or how a video is looked at."""


class KeptMedium:
    """A picture or video of a conversation: processed at its first turn, and not again while it is
    kept.

    Its limits may change from turn to turn: some models see pictures more coarsely where there are
    many. It is then processed anew.
    """

    __slots__ = ("_known", "_limits", "found", "source")

    def __init__(self, source: Any) -> None:
        """Take it as the caller sent it."""
        self.source = source
        self.found: Found | None = None
        """What it is, while that is kept."""
        self._limits: Limits | None = None  # within which it was processed to `found`
        self._known: dict[Limits, Known | KnownClip] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        if (found := self.found) is None:
            return 0
        arrays = (found.features, found.embeddings)
        return sum(array.nbytes for array in arrays if array is not None)

    def kept(self, limits: Limits) -> Found | None:
        """What it is within these limits, if that is kept."""
        return self.found if self._limits == limits else None

    def take(self, found: Found, limits: Limits) -> None:
        """Keep what it was processed to within some limits.

        Raises:
            MediaError: It is another one than at an earlier turn.
        """
        if self._known.setdefault(limits, found.known) != found.known:
            raise MediaError(
                "a picture or video of this conversation has changed since its turn; begin another "
                "session"
            )
        self.found, self._limits = found, limits


@dataclass(slots=True, eq=False)
class Keep:
    """A conversation, as the engine sees it. The pinned prefix is with `Pins`."""

    seconds: float
    """Time from the end of a turn after which everything is given back."""
    pictures: list[KeptMedium] = field(default_factory=list)
    videos: list[KeptMedium] = field(default_factory=list)
    closed: bool = False

    @property
    def num_bytes(self) -> int:
        """Memory of what is processed, also where other conversations share it."""
        return sum(medium.num_bytes for medium in (*self.pictures, *self.videos))

    def release(self) -> None:
        """Give what is processed back; a later turn processes it again."""
        for medium in (*self.pictures, *self.videos):
            medium.found = None
