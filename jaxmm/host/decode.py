"""One picture from source to patches and identity, in the caller's thread. Host only."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from jaxmm.errors import RequestError
from jaxmm.host.identity import item_identity
from jaxmm.host.item import Item, Modality
from jaxmm.host.media import Limits, decode_image, too_much_memory

Grid = tuple[int, int, int]
Allocate = Callable[[int, int], npt.NDArray[np.uint8]]
"""(N, U) -> uint8[N, U] to fill."""


class Processor(Protocol):
    """What the host needs of a model family's image processor; picklable, of numpy and Pillow."""

    @property
    def fingerprint(self) -> bytes:
        """Settings and code that turn pixels into features."""

    @property
    def num_values(self) -> int:
        """U: values of one patch."""

    @property
    def max_patches(self) -> int:
        """Patches that no picture exceeds."""

    def limits(
        self, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> tuple[int, int]:
        """Pixel limits of one request; raises RequestError outside the server's."""

    def num_rows(self, grid: Grid) -> int:
        """Rows of an item."""

    def patches(
        self,
        image: Image.Image | npt.NDArray[np.uint8],
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        *,
        allocate: Allocate = ...,
    ) -> tuple[npt.NDArray[np.uint8], Grid]:
        """uint8[N, U] in encoder order, and the grid."""

    def positions(
        self, num_tokens: int, items: Sequence[Item]
    ) -> tuple[npt.NDArray[np.int32], int]:
        """Positions int32[3, T] of an expanded prompt, and the delta after it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Processed:
    """What a picture became."""

    features: npt.NDArray[np.uint8]
    """uint8[N, U], read-only."""
    grid_thw: Grid
    num_rows: int
    identity: bytes


class Decoder(Protocol):
    """Something that processes pictures: `InlineDecoder` or `DecodePool`."""

    def submit(
        self, source: Any, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> Future[Processed]:
        """Process a picture; the future raises RequestError for a picture that cannot be used."""

    def abandon(self, future: Future[Processed]) -> None:
        """Stop what computes a future that nobody waits for any more, where that saves work."""

    def close(self) -> None:
        """Give everything back."""


def process_image(
    source: Any,
    processor: Processor,
    limits: Limits,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    *,
    allocate: Allocate | None = None,
) -> Processed:
    """Decode, resize, cut and name one picture.

    Args:
        source: Encoded bytes, a path, a PIL image, or a uint8[H, W, 3] array.
        processor: The model family's.
        limits: Of bytes and pixels before resizing.
        min_pixels: Lower pixel limit of the request.
        max_pixels: Upper pixel limit of the request.
        allocate: Gives the array for the patches; a new one by default.

    Raises:
        RequestError: A picture or limits that cannot be used.
    """
    image = decode_image(source, limits)
    kwargs = {} if allocate is None else {"allocate": allocate}
    try:
        features, grid = processor.patches(image, min_pixels, max_pixels, **kwargs)
    except MemoryError:
        raise too_much_memory() from None
    features.flags.writeable = False
    return Processed(
        features=features,
        grid_thw=grid,
        num_rows=processor.num_rows(grid),
        identity=item_identity(Modality.IMAGE, processor.fingerprint, grid, features=features),
    )


class InlineDecoder:
    """Processes each picture in the thread that submits it: notebooks, tests, single users."""

    def __init__(self, processor: Processor, limits: Limits) -> None:
        self._processor = processor
        self._limits = limits

    def submit(
        self, source: Any, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> Future[Processed]:
        """Process a picture now; the future is done when it is returned."""
        future: Future[Processed] = Future()
        try:
            future.set_result(
                process_image(source, self._processor, self._limits, min_pixels, max_pixels)
            )
        except RequestError as error:
            future.set_exception(error)
        return future

    def abandon(self, future: Future[Processed]) -> None:
        """It is done already."""

    def close(self) -> None:
        """Nothing is held."""
