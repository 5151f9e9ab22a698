"""A video as it arrives -> the few RGB frames of it that a model looks at. Host only.

The packets are listed without decoding them: that tells how many frames there are really, whatever
the header says, and when each is shown. Then only what leads to a wanted frame is decoded: from
the last key frame before it, unless decoding has come closer already.

    packets    K . . . . . K . . . . . K . . . .      K: key frame
    wanted         x           x x         x
    decoded    ──────          ──▶         (seek) ──▶ the second part of the stream is skipped
"""

import bisect
import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from jaxmm.errors import MediaError, MediaTooLarge
from jaxmm.host.media import Limits, check_pixels, decode_image, too_much_memory

ACCEPTED = "MP4, WebM or GIF"
_UNREADABLE = f"the data is no video that can be read; send {ACCEPTED}"
_DAMAGED = "the video is damaged or cut short"
DEFAULT_FPS = 24.0
"""Frames a second of a stream that does not say; what transformers assumes."""
_VP8_SHOWN = 1 << 4
"""Bit of a frame's first byte."""
_MAX_SECONDS = 1e6
"""Longest file, eleven days: M-RoPE counts up to four a second, and float32 up to 2^24 exactly."""


class Timeline(NamedTuple):
    """What is known of a video before a frame of it is decoded."""

    num_frames: int
    fps: float
    """Frames a second."""
    height: int
    width: int
    """As it is shown, turned if the file says so."""


Choose = Callable[[Timeline], Sequence[int]]
"""Indices of the frames wanted, ascending."""


class Clip(NamedTuple):
    """The frames that were chosen."""

    timeline: Timeline
    indices: tuple[int, ...]
    frames: Iterator[Image.Image]
    """Mode RGB, upright, one for each index, decoded as they are taken."""


@contextlib.contextmanager
def open_clip(source: Any, choose: Choose, limits: Limits, *, fps: float) -> Iterator[Clip]:
    """Open a video and choose frames of it.

    Args:
        source: An encoded file; or frames: a list of picture sources, or uint8[T, H, W, 3].
        choose: Gives the indices of the frames that are wanted.
        limits: Of bytes and pixels of each frame, checked before it is decoded.
        fps: Frames a second of a list of frames, which cannot say it itself.

    Raises:
        MediaError: Not a video, without frames, or damaged where it is needed.
        MediaTooLarge: Beyond a limit.
    """
    if isinstance(source, bytes):
        with _open_file(source) as container:
            yield _file_clip(container, choose, limits)
    else:
        yield _list_clip(source, choose, limits, fps)


def _list_clip(source: Sequence[Any], choose: Choose, limits: Limits, fps: float) -> Clip:
    if len(source) == 0:
        raise MediaError("the video has no frames; send at least one")
    first = decode_image(source[0], limits)
    timeline = Timeline(len(source), fps, first.height, first.width)
    indices = tuple(choose(timeline))

    def frames() -> Iterator[Image.Image]:
        for index in indices:
            frame = decode_image(source[index], limits)
            if frame.size != first.size:
                raise MediaError(
                    f"frame {index + 1} of the video is {frame.width} x {frame.height}, "
                    f"the first {first.width} x {first.height}; send frames of one size"
                )
            yield frame

    return Clip(timeline, indices, frames())


@contextlib.contextmanager
def _open_file(data: bytes) -> Iterator[Any]:
    """A PyAV container; the format comes from the first bytes, never from FFmpeg's guess, which
    would also try playlists and scripts that name other files."""
    import av  # half a second of imports, wanted only where there is video

    name = _format(data)
    try:
        with av.open(io.BytesIO(data), format=name, metadata_errors="ignore") as container:
            yield container
    except MemoryError:  # FFmpeg's own is one too
        raise too_much_memory() from None
    except av.error.FFmpegError:
        raise MediaError(_DAMAGED) from None


def _format(data: bytes) -> str:
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip"):
        return "mp4"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    raise MediaError(_UNREADABLE)


def _file_clip(container: Any, choose: Choose, limits: Limits) -> Clip:
    streams = container.streams.video
    if not streams:
        raise MediaError(f"the file has no video in it; send {ACCEPTED}")
    stream = streams[0]
    if stream.codec_context is None:
        raise MediaError("the video is coded in a way that is not known here; send H.264 or VP9")
    # one thread: threads would take memory that a decoding process does not have
    stream.codec_context.thread_count = 1
    height, width = stream.codec_context.height, stream.codec_context.width
    shown, keys = _list_packets(container, stream)
    if not shown:
        raise MediaError("the video has no frames; send at least one")
    check_pixels(width, height, limits)
    if _is_on_its_side(container, stream, shown[0]):
        height, width = width, height
    timeline = Timeline(len(shown), _fps(stream, shown), height, width)
    seconds = timeline.num_frames / timeline.fps
    if seconds > _MAX_SECONDS:
        raise MediaTooLarge(
            f"the file says that the video is {seconds:.0f} s long; the limit is "
            f"{_MAX_SECONDS:.0f}. Send its frames as a list with an fps."
        )
    indices = tuple(choose(timeline))
    wanted = [shown[index] for index in indices]
    return Clip(timeline, indices, _decode(container, stream, wanted, keys, limits))


def _list_packets(container: Any, stream: Any) -> tuple[list[int], list[int]]:
    """When each frame is shown, and when each key frame is, both ascending."""
    is_vp8 = stream.codec_context.name == "vp8"
    shown, keys = [], []
    for packet in container.demux(stream):
        if packet.size == 0:
            continue
        if packet.pts is None:
            raise MediaError("the video does not say when its frames are shown")
        # never shown: what an edit list cuts off, as phones do that trim a video, and frames of VP8
        # that others are predicted from (RFC 6386, section 9.1)
        if not packet.is_discard and not (is_vp8 and not memoryview(packet)[0] & _VP8_SHOWN):
            shown.append(packet.pts)
        if packet.is_keyframe:
            keys.append(packet.pts)
    return sorted(set(shown)), sorted(keys)


def _is_on_its_side(container: Any, stream: Any, first: int) -> bool:
    """Whether frames are shown a quarter turn from how they are stored; the first one tells."""
    container.seek(first, stream=stream, backward=True)
    frame = next(container.decode(stream), None)
    return frame is not None and round(frame.rotation / 90) % 2 == 1


def _fps(stream: Any, shown: list[int]) -> float:
    rate = float(stream.average_rate or 0)
    if rate > 0:
        return rate
    seconds = float((shown[-1] - shown[0]) * stream.time_base)
    return (len(shown) - 1) / seconds if seconds > 0 else DEFAULT_FPS


def _decode(
    container: Any, stream: Any, wanted: list[int], keys: list[int], limits: Limits
) -> Iterator[Image.Image]:
    """Decode the frames shown at the times wanted, ascending."""
    reached: int | None = None
    decoder: Iterator[Any] = iter(())
    for time in wanted:
        key = keys[max(bisect.bisect_right(keys, time) - 1, 0)] if keys else 0
        if reached is None or key > reached:
            container.seek(key, stream=stream, backward=True)
            decoder = container.decode(stream)
        for frame in decoder:
            reached = frame.pts
            if reached is not None and reached >= time:
                break
        else:
            raise MediaError(_DAMAGED)
        yield _upright(frame, limits)


def _upright(frame: Any, limits: Limits) -> Image.Image:
    """RGB, turned as the file says that it is to be shown."""
    check_pixels(frame.width, frame.height, limits)
    image: Image.Image = frame.to_image()
    turns = round(frame.rotation / 90) % 4
    return image if turns == 0 else image.transpose(_TURNS[turns])


_TURNS = {
    1: Image.Transpose.ROTATE_90,
    2: Image.Transpose.ROTATE_180,
    3: Image.Transpose.ROTATE_270,
}
"""Quarter turns counter-clockwise, as FFmpeg counts them."""


def sample_frames(
    timeline: Timeline,
    *,
    fps: float,
    num_frames: int | None,
    min_frames: int,
    max_frames: int,
    even: bool,
) -> list[int]:
    """Indices evenly spread from the first frame to the last, the rule of qwen-vl-utils.

    Args:
        timeline: Of the video.
        fps: Frames wanted of each second.
        num_frames: Frames wanted in all, instead of `fps`.
        min_frames: Fewer only of a video that has fewer.
        max_frames: Never more.
        even: Round down to an even number; one frame stays one.
    """
    total = timeline.num_frames
    wanted = int(total / timeline.fps * fps) if num_frames is None else num_frames
    count = min(max(wanted, min_frames if num_frames is None else 1), max_frames, total)
    if even:
        count = max(count // 2 * 2, 1)
    return [int(index) for index in np.linspace(0, total - 1, count).round()]


def check_frame_count(num_frames: int, max_frames: int) -> None:
    """Refuse a list of more frames than are looked at.

    Raises:
        MediaTooLarge: It is too long.
    """
    if num_frames > max_frames:
        raise MediaTooLarge(
            f"the video is a list of {num_frames} frames; the limit is {max_frames}. "
            "Send fewer or raise media.max_frames."
        )
