"""From a request's pictures to items, and from ids and items to the expanded prompt. Host only."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxmm.config import MediaConfig
from jaxmm.errors import EngineStopped, MediaError, RequestError
from jaxmm.host.decode import Decoder, Processed, Processor
from jaxmm.host.identity import caller_identity, parse_caller_hashes, sentinels_for
from jaxmm.host.item import Item, Modality, Prompt
from jaxmm.host.media import Limits, read_source
from jaxmm.host.media_map import Known, MediaMap, media_key
from jaxmm.host.placeholders import build_prompt, check_slots

_Outcome = tuple[Known, npt.NDArray[np.uint8] | None]


class Preparer:
    """Makes items and prompts; thread-safe, and blocks while pictures are decoded."""

    def __init__(
        self,
        processor: Processor,
        decoder: Decoder,
        media_map: MediaMap,
        media_config: MediaConfig,
        placeholder_id: int,
    ) -> None:
        """Keep the parts; the caller owns and closes the decoder."""
        self._processor = processor
        self._decoder = decoder
        self._media_map = media_map
        self._limits = Limits(media_config.max_bytes, media_config.max_decode_pixels)
        self._max_items = media_config.max_items
        self._placeholder_id = placeholder_id
        self._lock = threading.RLock()  # an inline decoder calls back within submit
        self._on_their_way: dict[bytes, Future[Processed]] = {}
        self._held: weakref.WeakValueDictionary[bytes, npt.NDArray[np.uint8]] = (
            weakref.WeakValueDictionary()
        )

    def prepare_items(
        self,
        images: Sequence[Any],
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        mm_hashes: Sequence[str] | None = None,
        salt: str = "",
    ) -> tuple[Item, ...]:
        """Process a request's pictures in parallel.

        Args:
            images: Encoded bytes, paths, PIL images, or uint8[H, W, 3] arrays.
            min_pixels: Lower pixel limit of this request, within the server's.
            max_pixels: Upper pixel limit of this request, within the server's.
            mm_hashes: Caller's hex hashes, one for each picture.
            salt: The tenant.

        Returns:
            Items in the order of the pictures, without offsets. A file that the media map knows
            has features only while another item holds them. Requests that send one file together
            share one decode.

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
        knowns = self._process_all(images, pixels, salt)
        return tuple(
            _item(known, features, caller_hash, salt)
            for (known, features), caller_hash in zip(knowns, hashes, strict=True)
        )

    def load_features(
        self,
        source: Any,
        item: Item,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        salt: str = "",
    ) -> npt.NDArray[np.uint8]:
        """Process the picture of an item that has no features, because its file was known.

        Args:
            source: What the item was made from; limits and salt as then.
            item: Made by `prepare_items`.
            min_pixels: Lower pixel limit of the request.
            max_pixels: Upper pixel limit of the request.
            salt: The tenant.

        Returns:
            uint8[N, U] patches.

        Raises:
            MediaError: The picture cannot be used, or is not the item's: its file has changed.
        """
        pixels = self._processor.limits(min_pixels, max_pixels)
        data = read_source(source, self._limits)
        if isinstance(data, bytes):
            key = media_key(data, self._processor.fingerprint, pixels, salt)
            with self._lock:
                future = self._decode(key, data, pixels)
        else:
            future = self._decoder.submit(data, *pixels)
        known, features = _outcome(future)
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

    def _process_all(
        self, images: Sequence[Any], pixels: tuple[int, int], salt: str
    ) -> list[_Outcome]:
        """Start every picture before waiting for the first."""
        started: list[_Outcome | Future[Processed]] = []
        outcomes: list[_Outcome] = []
        for index, image in enumerate(images):
            with _naming(index, len(images)):
                started.append(self._start(image, pixels, salt))
        for index, begun in enumerate(started):
            with _naming(index, len(images)):
                outcomes.append(_outcome(begun) if isinstance(begun, Future) else begun)
        return outcomes

    def _start(
        self, image: Any, pixels: tuple[int, int], salt: str
    ) -> _Outcome | Future[Processed]:
        source = read_source(image, self._limits)
        if not isinstance(source, bytes):
            return self._decoder.submit(source, *pixels)
        key = media_key(source, self._processor.fingerprint, pixels, salt)
        with self._lock:
            known = self._media_map.get(key)
            if known is not None:
                return known, self._held.get(key)
            return self._decode(key, source, pixels)

    def _decode(self, key: bytes, source: bytes, pixels: tuple[int, int]) -> Future[Processed]:
        """Join a decode of the same file that is on its way, or start one; under the lock."""
        future = self._on_their_way.get(key)
        if future is None:
            future = self._on_their_way[key] = self._decoder.submit(source, *pixels)
            future.add_done_callback(functools.partial(self._arrived, key))
        return future

    def _arrived(self, key: bytes, future: Future[Processed]) -> None:
        with self._lock:
            del self._on_their_way[key]
            if not future.cancelled() and future.exception() is None:
                processed = future.result()
                self._media_map.put(key, _known(processed))
                self._held[key] = processed.features


@contextlib.contextmanager
def _naming(index: int, num_images: int) -> Iterator[None]:
    """Say in an error which of the request's pictures it is about, counted from 1."""
    try:
        yield
    except MediaError as error:
        raise type(error)(f"image {index + 1} of {num_images}: {error}") from None


def _known(processed: Processed) -> Known:
    return Known(processed.identity, processed.grid_thw, processed.num_rows)


def _outcome(future: Future[Processed]) -> _Outcome:
    try:
        processed = future.result()
    except CancelledError:
        raise EngineStopped("the engine was closed while pictures waited; make a new one") from None
    return _known(processed), processed.features


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
