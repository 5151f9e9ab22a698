"""From a request's pictures and videos to items, and from ids and items to the expanded prompt.
Host only."""

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.config import MediaConfig
from jaxmm.errors import MediaError, RequestError
from jaxmm.host.clip import check_frame_count
from jaxmm.host.decode import ClipTask, Frames, Processor
from jaxmm.host.decodes import Decodes, Done, Found, Gone, wait
from jaxmm.host.embedded import RowForm, read_embeddings
from jaxmm.host.identity import caller_identity, parse_caller_hashes, sentinels_for
from jaxmm.host.item import Item, Modality, Prompt, mark_of
from jaxmm.host.kept import KeptMedium
from jaxmm.host.media import Limits, read_content, read_source
from jaxmm.host.media_map import Known, KnownClip, clip_key, media_key
from jaxmm.host.placeholders import build_prompt, check_slots, unfold
from jaxmm.host.video import Surroundings, VideoProcessor, sampling_of
from jaxmm.request import Embeddings


class PreparedClip(NamedTuple):
    """A video as items, one for each time step, without offsets."""

    items: tuple[Item, ...]
    surroundings: tuple[Surroundings, ...]
    """What stands around each step in the prompt."""


class Preparer:
    """Makes items and prompts; thread-safe, and blocks while pictures are decoded."""

    def __init__(
        self,
        processor: Processor,
        decodes: Decodes,
        media_config: MediaConfig,
        image_id: int,
        row_form: RowForm,
        *,
        video: VideoProcessor | None = None,
        video_id: int | None = None,
        encode_plain: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        """Keep the parts.

        Args:
            processor: The model family's.
            decodes: Through which every picture goes.
            media_config: Limits.
            image_id: Token that marks a picture's place.
            row_form: Of the model's rows.
            video: The model family's, if it takes videos.
            video_id: Token that marks a video's place.
            encode_plain: Tokens of a text in the middle of a prompt, for a family that writes
                one before each step of a video.
        """
        self._processor = processor
        self._decodes = decodes
        self._limits = Limits(media_config.max_bytes, media_config.max_decode_pixels)
        self._media_config = media_config
        self._placeholder_ids = (image_id,) if video_id is None else (image_id, video_id)
        self._row_form = row_form
        self._video = video
        self._encode_plain = encode_plain

    @property
    def takes_videos(self) -> bool:
        """Whether the model family takes videos at all."""
        return self._video is not None

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
            images: Encoded bytes, paths, PIL images, uint8[H, W, 3] arrays, `Embeddings`, or a
                `KeptMedium` of any of these.
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
        self.check_count(len(images), "images")
        pixels = self._processor.limits(min_pixels, max_pixels, num_images=len(images))
        hashes = parse_caller_hashes(mm_hashes, len(images))
        found = self._find_all(images, pixels, salt, gone)
        return tuple(
            _item(one, caller_hash, salt, self._row_form)
            for one, caller_hash in zip(found, hashes, strict=True)
        )

    def check_count(self, num_items: int, noun: str) -> None:
        """Refuse more pictures and videos than a request may have.

        Raises:
            RequestError: There are too many.
        """
        limit = self._media_config.max_items
        if num_items > limit:
            raise RequestError(
                f"the request has {num_items} {noun}; the limit is {limit}. "
                "Send fewer or raise media.max_items."
            )

    def prepare_clips(
        self,
        videos: Sequence[Any],
        *,
        fps: float | None = None,
        num_frames: int | None = None,
        max_pixels: int | None = None,
        mm_hashes: Sequence[str] | None = None,
        salt: str = "",
        gone: Gone | None = None,
    ) -> tuple[PreparedClip, ...]:
        """Process a request's videos in parallel.

        Args:
            videos: Encoded bytes, paths, or frames: lists of picture sources, or arrays
                uint8[T, H, W, 3]; or a `KeptMedium` of any of these.
            fps: Frames of each second to look at, None for the server's; of a list of frames, how
                many a second they are.
            num_frames: Frames to look at in all, instead of `fps`.
            max_pixels: Upper pixel limit of a frame, within the server's.
            mm_hashes: Caller's hex hashes, one for each video.
            salt: The tenant.
            gone: When done, the wait ends with EngineStopped.

        Raises:
            RequestError: A wish that cannot be met, or, as MediaError naming which, a video that
                cannot be used.
        """
        if not videos:
            return ()
        video, task = self._wish(fps, num_frames, max_pixels)
        hashes = parse_caller_hashes(mm_hashes, len(videos))
        started: list[Found | Future[Done]] = []
        clips: list[PreparedClip] = []
        for index, source in enumerate(videos):
            with _naming("video", index, len(videos)):
                started.append(self._start_clip(source, video, task, salt, gone))
        for index, (begun, caller_hash) in enumerate(zip(started, hashes, strict=True)):
            with _naming("video", index, len(videos)):
                found = wait(begun) if isinstance(begun, Future) else begun
                _keep(videos[index], found, task)
            clips.append(_clip(found, video, caller_hash, salt))
        return tuple(clips)

    def load_steps(
        self,
        source: Any,
        items: Sequence[Item],
        *,
        fps: float | None = None,
        num_frames: int | None = None,
        max_pixels: int | None = None,
        salt: str = "",
        gone: Gone | None = None,
    ) -> list[npt.NDArray[np.uint8]]:
        """Process the video of items that have no features, because it was known.

        Args:
            source: What the items were made from; the rest as then.
            items: All steps of the video.

        Returns:
            For each step uint8[N, 2 * U].

        Raises:
            MediaError: The video cannot be used, or is not the items': it has changed.
        """
        video, task = self._wish(fps, num_frames, max_pixels)
        content, key = self._read_clip(_sent(source), video, task, salt)
        found = wait(self._decodes.decode(key, content, task, gone))
        known, features, _ = found
        same = isinstance(known, KnownClip) and known.identities == tuple(i.identity for i in items)
        if not same or features is None:
            raise MediaError("the video has changed since its request came; send it again")
        _keep(source, found, task)
        return list(features.reshape(len(items), -1, features.shape[1]))

    def load_features(
        self,
        source: Any,
        item: Item,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        num_images: int = 1,
        salt: str = "",
        gone: Gone | None = None,
    ) -> npt.NDArray[np.uint8]:
        """Process the picture of an item that has no features, because it was known.

        Args:
            source: What the item was made from; limits and salt as then.
            item: Made by `prepare_items`.
            min_pixels: Lower pixel limit of the request.
            max_pixels: Upper pixel limit of the request.
            num_images: Pictures of the request.
            salt: The tenant.
            gone: When done, the wait ends with EngineStopped.

        Returns:
            uint8[N, U] patches.

        Raises:
            MediaError: The picture cannot be used, or is not the item's: it has changed.
        """
        pixels = self._processor.limits(min_pixels, max_pixels, num_images=num_images)
        content = read_content(_sent(source), self._limits)
        key = media_key(content, self._processor.fingerprint, pixels, salt)
        found = wait(self._decodes.decode(key, content, pixels, gone))
        known, features, _ = found
        if known != Known(item.identity, item.grid_thw, item.num_rows) or features is None:
            raise MediaError("the picture has changed since its request came; send it again")
        _keep(source, found, pixels)
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
        check_slots(ids, slots, *self._placeholder_ids)
        return build_prompt(ids, slots, items, self._processor.positions)

    def prompt_of(
        self,
        ids: npt.NDArray[np.integer],
        slots: npt.ArrayLike,
        media: Sequence[Item | PreparedClip],
    ) -> Prompt:
        """`prompt` with videos among the items, each of them at one placeholder."""
        items = [i for m in media for i in ((m,) if isinstance(m, Item) else m.items)]
        check_slots(ids, slots, *self._placeholder_ids)
        around = [None if isinstance(m, Item) else self._around(m.surroundings) for m in media]
        return self.prompt(*unfold(ids, slots, around), items)

    def _around(
        self, surroundings: Sequence[Surroundings]
    ) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        return [(self._ids(s.before), self._ids(s.after)) for s in surroundings]

    def _ids(self, parts: Sequence[str | int]) -> npt.NDArray[np.int64]:
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                assert self._encode_plain is not None, "text around steps needs a tokenizer"
                ids += self._encode_plain(part)
        return np.array(ids, np.int64)

    def _wish(
        self, fps: float | None, num_frames: int | None, max_pixels: int | None
    ) -> tuple[VideoProcessor, ClipTask]:
        video = self._video
        assert video is not None, "requests with videos are refused where none are taken"
        sampling = sampling_of(
            fps, num_frames, default_fps=self._media_config.video_fps, max_frames=video.max_frames
        )
        return video, ClipTask(sampling, self._processor.limits(None, max_pixels)[1])

    def _read_clip(
        self, source: Any, video: VideoProcessor, task: ClipTask, salt: str
    ) -> tuple[bytes | Frames, bytes]:
        """A video's file or frames, and its key."""
        if isinstance(source, list | tuple) or (
            isinstance(source, np.ndarray) and source.ndim == 4
        ):
            check_frame_count(len(source), video.max_frames)
            frames: Frames = tuple(read_content(frame, self._limits) for frame in source)
            return frames, clip_key(frames, True, video.fingerprint, task, salt)
        data = read_source(source, self._limits)
        if not isinstance(data, bytes):
            raise MediaError(
                f"{type(source).__name__} is no video source; pass bytes, a pathlib.Path, a list "
                "of frames, or a uint8 array [frames, height, width, 3]"
            )
        return data, clip_key((data,), False, video.fingerprint, task, salt)

    def _find_all(
        self, images: Sequence[Any], pixels: tuple[int, int], salt: str, gone: Gone | None
    ) -> list[Found]:
        """Start every picture before waiting for the first."""
        started: list[Found | Future[Done]] = []
        found: list[Found] = []
        for index, image in enumerate(images):
            with _naming("image", index, len(images)):
                started.append(self._start(image, pixels, salt, gone))
        for index, begun in enumerate(started):
            with _naming("image", index, len(images)):
                one = wait(begun) if isinstance(begun, Future) else begun
                _keep(images[index], one, pixels)
                found.append(one)
        return found

    def _start(
        self, image: Any, pixels: tuple[int, int], salt: str, gone: Gone | None
    ) -> Found | Future[Done]:
        if isinstance(image, KeptMedium):
            return image.kept(pixels) or self._start(image.source, pixels, salt, gone)
        if isinstance(image, Embeddings):
            return read_embeddings(image, self._row_form)
        content = read_content(image, self._limits)
        key = media_key(content, self._processor.fingerprint, pixels, salt)
        return self._decodes.find(key, content, pixels, gone)

    def _start_clip(
        self, source: Any, video: VideoProcessor, task: ClipTask, salt: str, gone: Gone | None
    ) -> Found | Future[Done]:
        if isinstance(source, KeptMedium) and (found := source.kept(task)):
            return found
        content, key = self._read_clip(_sent(source), video, task, salt)
        return self._decodes.find(key, content, task, gone)


def _sent(source: Any) -> Any:
    """A picture or video as its caller sent it."""
    return source.source if isinstance(source, KeptMedium) else source


def _keep(source: Any, found: Found, limits: tuple[int, int] | ClipTask) -> None:
    """Keep what was found, if it is a conversation's."""
    if isinstance(source, KeptMedium):
        source.take(found, limits)


@contextlib.contextmanager
def _naming(noun: str, index: int, count: int) -> Iterator[None]:
    """Say in an error which of the request's pictures or videos it is about, counted from 1."""
    try:
        yield
    except MediaError as error:
        raise type(error)(f"{noun} {index + 1} of {count}: {error}") from None


def _item(found: Found, caller_hash: bytes | None, salt: str, form: RowForm) -> Item:
    known = found.known
    assert isinstance(known, Known), "a picture's key gave a video"
    name = known.identity if caller_hash is None else caller_identity(caller_hash, salt)
    return Item(
        modality=Modality.IMAGE,
        features=found.features,
        embeddings=found.embeddings,
        grid_thw=known.grid_thw,
        num_rows=known.num_rows,
        identity=known.identity,
        sentinels=sentinels_for(name),
        overview_patches=0 if form.tiles is None else form.tiles.patches,
    )


def _clip(
    found: Found, video: VideoProcessor, caller_hash: bytes | None, salt: str
) -> PreparedClip:
    """One item for each step; steps of equal content have equal identities in any video."""
    known, features, _ = found
    assert isinstance(known, KnownClip), "a video's key gave a picture"
    count = len(known.identities)
    times = video.times(known.timing) or (None,) * count
    parts = [None] * count if features is None else features.reshape(count, -1, features.shape[1])
    items = tuple(
        Item(
            modality=Modality.VIDEO,
            features=part,
            embeddings=None,
            grid_thw=(1, *known.grid_thw[1:]),
            num_rows=known.num_rows,
            identity=identity,
            sentinels=sentinels_for(
                mark_of(
                    identity
                    if caller_hash is None
                    else caller_identity(caller_hash + struct.pack("<q", step), salt),
                    step,
                    time,
                )
            ),
            step=step,
            time=time,
        )
        for step, (identity, part, time) in enumerate(
            zip(known.identities, parts, times, strict=True)
        )
    )
    return PreparedClip(items, tuple(video.surroundings(known.timing)))
