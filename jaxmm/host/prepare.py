"""From a request's pictures to items, and from ids and items to the expanded prompt. Host only."""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxmm.config import MediaConfig
from jaxmm.errors import MediaError, RequestError
from jaxmm.host.decode import Processed, Processor
from jaxmm.host.decodes import Decodes, Found, Gone, wait
from jaxmm.host.identity import caller_identity, parse_caller_hashes, sentinels_for
from jaxmm.host.item import Item, Modality, Prompt
from jaxmm.host.media import Limits, read_content
from jaxmm.host.media_map import Known, media_key
from jaxmm.host.placeholders import build_prompt, check_slots


class Preparer:
    """Makes items and prompts; thread-safe, and blocks while pictures are decoded."""

    def __init__(
        self,
        processor: Processor,
        decodes: Decodes,
        media_config: MediaConfig,
        placeholder_id: int,
    ) -> None:
        """Keep the parts.

        Args:
            processor: The model family's.
            decodes: Through which every picture goes.
            media_config: Limits.
            placeholder_id: Token that marks an item's place.
        """
        self._processor = processor
        self._decodes = decodes
        self._limits = Limits(media_config.max_bytes, media_config.max_decode_pixels)
        self._max_items = media_config.max_items
        self._placeholder_id = placeholder_id

    def prepare_items(
        self,
        images: Sequence[Any],
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        mm_hashes: Sequence[str] | None = None,
        salt: str = "",
        gone: Gone | None = None,
    ) -> tuple[Item, ...]:
        """Process a request's pictures in parallel.

        Args:
            images: Encoded bytes, paths, PIL images, or uint8[H, W, 3] arrays.
            min_pixels: Lower pixel limit of this request, within the server's.
            max_pixels: Upper pixel limit of this request, within the server's.
            mm_hashes: Caller's hex hashes, one for each picture.
            salt: The tenant.
            gone: When done, the wait ends with EngineStopped.

        Returns:
            Items in the order of the pictures, without offsets. A picture that the media map knows
            has features only while another item holds them. Requests that send one picture
            together share one decode.

        Raises:
            RequestError: Too many pictures, wrong pixel limits, or, as MediaError naming which, a
                picture that cannot be used.
        """
        if len(images) > self._max_items:
            raise RequestError(
                f"the request has {len(images)} images; the limit is {self._max_items}. "
                "Send fewer or raise media.max_items."
            )
        pixels = self._processor.limits(min_pixels, max_pixels)
        hashes = parse_caller_hashes(mm_hashes, len(images))
        found = self._find_all(images, pixels, salt, gone)
        return tuple(
            _item(known, features, caller_hash, salt)
            for (known, features), caller_hash in zip(found, hashes, strict=True)
        )

    def load_features(
        self,
        source: Any,
        item: Item,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        salt: str = "",
        gone: Gone | None = None,
    ) -> npt.NDArray[np.uint8]:
        """Process the picture of an item that has no features, because it was known.

        Args:
            source: What the item was made from; limits and salt as then.
            item: Made by `prepare_items`.
            min_pixels: Lower pixel limit of the request.
            max_pixels: Upper pixel limit of the request.
            salt: The tenant.
            gone: When done, the wait ends with EngineStopped.

        Returns:
            uint8[N, U] patches.

        Raises:
            MediaError: The picture cannot be used, or is not the item's: it has changed.
        """
        pixels = self._processor.limits(min_pixels, max_pixels)
        content = read_content(source, self._limits)
        key = media_key(content, self._processor.fingerprint, pixels, salt)
        known, features = wait(self._decodes.decode(key, content, pixels, gone))
        if known != Known(item.identity, item.grid_thw, item.num_rows) or features is None:
            raise MediaError("the picture has changed since its request came; send it again")
        return features

    def prompt(
        self, ids: npt.NDArray[np.integer], slots: npt.ArrayLike, items: Sequence[Item]
    ) -> Prompt:
        """Expand a prompt with its items.

        Args:
            ids: int[T0], one placeholder id for each item and none elsewhere.
            slots: int[I]: index of each item's placeholder, ascending.
            items: In the order of their slots.

        Raises:
            PlaceholderError: Items and places do not match.
        """
        check_slots(ids, slots, self._placeholder_id)
        return build_prompt(ids, slots, items, self._processor.positions)

    def _find_all(
        self, images: Sequence[Any], pixels: tuple[int, int], salt: str, gone: Gone | None
    ) -> list[Found]:
        """Start every picture before waiting for the first."""
        started: list[Found | Future[Processed]] = []
        found: list[Found] = []
        for index, image in enumerate(images):
            with _naming(index, len(images)):
                content = read_content(image, self._limits)
                key = media_key(content, self._processor.fingerprint, pixels, salt)
                started.append(self._decodes.find(key, content, pixels, gone))
        for index, begun in enumerate(started):
            with _naming(index, len(images)):
                found.append(wait(begun) if isinstance(begun, Future) else begun)
        return found


@contextlib.contextmanager
def _naming(index: int, num_images: int) -> Iterator[None]:
    """Say in an error which of the request's pictures it is about, counted from 1."""
    try:
        yield
    except MediaError as error:
        raise type(error)(f"image {index + 1} of {num_images}: {error}") from None


def _item(
    known: Known, features: npt.NDArray[np.uint8] | None, caller_hash: bytes | None, salt: str
) -> Item:
    name = known.identity if caller_hash is None else caller_identity(caller_hash, salt)
    return Item(
        modality=Modality.IMAGE,
        features=features,
        embeddings=None,
        grid_thw=known.grid_thw,
        num_rows=known.num_rows,
        identity=known.identity,
        sentinels=sentinels_for(name),
    )
