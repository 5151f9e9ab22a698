"""A picture as it arrives -> the upright RGB picture that a person would see. Host only.

Size is checked before decoding: bytes first, then width times height from the header.
"""

import functools
import io
import os
import stat
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from jaxmm.errors import MediaError, MediaTooLarge

_ACCEPTED = "PNG, JPEG, GIF, WebP, BMP, TIFF or AVIF"
_FORMATS = ("PNG", "JPEG", "MPO", "GIF", "WEBP", "BMP", "TIFF", "AVIF")
"""Pillow can open many more; those read by few people are a risk and no gain."""

_DAMAGED = (
    *(OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, IndexError),
    *(KeyError, TypeError, AttributeError, OverflowError, NotImplementedError, RuntimeError),
)
"""What Pillow's readers let through on damaged data (fuzzed in the tests)."""

_UNREADABLE = f"the data is no picture that can be read; send {_ACCEPTED}"

_ORIENTATION_TAG = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation to the transposition that undoes it; 1 and anything else need none."""


class Limits(NamedTuple):
    """What one picture may cost before it is resized."""

    max_bytes: int
    """Encoded size."""
    max_decode_pixels: int
    """Width times height."""


def read_source(source: Any, limits: Limits) -> bytes | Image.Image | npt.NDArray[np.uint8]:
    """Read the path of a picture or video into bytes, and check the type of everything else.

    A `str` is refused: it would be a path to one caller and a URL to another.

    Raises:
        MediaError: Not a picture source, or a file that cannot be read.
        MediaTooLarge: More encoded bytes than the limit.
    """
    if isinstance(source, Path):
        return _read_file(source, limits.max_bytes)
    if isinstance(source, (bytes, bytearray, memoryview)):
        _check_bytes(memoryview(source).nbytes, limits.max_bytes)
        return bytes(source)
    if isinstance(source, (Image.Image, np.ndarray)):
        return source
    raise MediaError(
        f"a {type(source).__name__} is no picture or video source; pass bytes, a pathlib.Path, "
        "and of a picture also a PIL image or a uint8 array [height, width, 3]"
    )


def decode_image(source: Any, limits: Limits) -> Image.Image:
    """Decode a picture source to an upright PIL image of mode RGB.

    EXIF orientation is applied, transparency is laid over white, 16-bit grey is scaled to 8 bits,
    and of an animation or a document the first frame is taken. The source is not changed.

    Args:
        source: Encoded bytes, a path, a PIL image, or a uint8[H, W, 3] array in RGB order.
        limits: Checked before anything is decoded.

    Raises:
        MediaError: Not a picture, damaged, or in a form without one meaning.
        MediaTooLarge: Beyond a limit.
    """
    source = read_source(source, limits)
    if isinstance(source, np.ndarray):
        return _from_array(source, limits)
    if isinstance(source, Image.Image):
        return _decode(source, limits)
    try:
        opened = Image.open(io.BytesIO(source), formats=_formats())
    except Image.DecompressionBombError:
        raise _too_many_pixels(limits) from None
    except MemoryError:
        raise too_much_memory() from None
    except _DAMAGED:
        raise MediaError(_UNREADABLE) from None
    with opened:
        return _decode(opened, limits)


def decode_rgb(source: Any, limits: Limits) -> npt.NDArray[np.uint8]:
    """`decode_image` as uint8[H, W, 3]."""
    return np.asarray(decode_image(source, limits))


def read_content(source: Any, limits: Limits) -> bytes | npt.NDArray[np.uint8]:
    """What a source holds, apart from the form in which it came.

    Returns:
        A file's bytes; of a PIL image or an array its pixels, uint8[H, W, 3], upright and copied,
        so that the caller's may change meanwhile.

    Raises:
        MediaError, MediaTooLarge: As `decode_image`.
    """
    source = read_source(source, limits)
    return source if isinstance(source, bytes) else decode_rgb(source, limits)


def too_much_memory() -> MediaTooLarge:
    """For an allocation that failed, in a decoding process at its limit."""
    return MediaTooLarge(
        "decoding takes more memory than it may use; "
        "send a smaller file or raise media.worker_memory_bytes"
    )


def _read_file(path: Path, max_bytes: int) -> bytes:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise MediaError("the path names no regular file; pass that of a picture or video")
        _check_bytes(status.st_size, max_bytes)
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise MediaError(f"the file cannot be read: {error.strerror}") from None
    _check_bytes(len(data), max_bytes)
    return data


def _check_bytes(num_bytes: int, max_bytes: int) -> None:
    if num_bytes == 0:
        raise MediaError("the file has no bytes; send a picture or a video")
    if num_bytes > max_bytes:
        raise MediaTooLarge(
            f"the file has {num_bytes} bytes; the limit is {max_bytes}. "
            "Compress it or raise media.max_bytes."
        )


def check_pixels(width: int, height: int, limits: Limits) -> None:
    """Refuse a picture or a frame by its size, before it is decoded.

    Raises:
        MediaError: No pixels.
        MediaTooLarge: More than the limit.
    """
    if width < 1 or height < 1:
        raise MediaError(f"the picture is {width} x {height} pixels; it needs at least one")
    if width * height > limits.max_decode_pixels:
        raise MediaTooLarge(
            f"the picture is {width} x {height} = {width * height} pixels; the limit is "
            f"{limits.max_decode_pixels}. Shrink it or raise media.max_decode_pixels."
        )


def _too_many_pixels(limits: Limits) -> MediaTooLarge:
    """For a header that Pillow itself refuses, at twice `Image.MAX_IMAGE_PIXELS`."""
    limit = min(limits.max_decode_pixels, 2 * (Image.MAX_IMAGE_PIXELS or limits.max_decode_pixels))
    return MediaTooLarge(f"the picture has more pixels than the limit of {limit}; shrink it")


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def _from_array(array: npt.NDArray[Any], limits: Limits) -> Image.Image:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise MediaError(
            f"a picture array has dtype uint8 and shape [height, width, 3]; "
            f"this one has {array.dtype} and {list(array.shape)}"
        )
    check_pixels(array.shape[1], array.shape[0], limits)
    return Image.fromarray(np.ascontiguousarray(array))


def _decode(image: Image.Image, limits: Limits) -> Image.Image:
    check_pixels(*image.size, limits)
    try:
        image.load()
        rgb = _to_rgb(image)
    except Image.DecompressionBombError:
        raise _too_many_pixels(limits) from None
    except MediaError:
        raise
    except MemoryError:  # also absurd sizes inside a small file
        raise too_much_memory() from None
    except _DAMAGED:
        kind = f"{image.format} picture" if image.format else "picture"
        raise MediaError(f"the {kind} is damaged or cut short") from None
    turn = _UPRIGHT.get(_orientation(image))
    return rgb if turn is None else rgb.transpose(turn)


def _orientation(image: Image.Image) -> int:
    """EXIF orientation; an unreadable EXIF block says nothing, as in every viewer."""
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except _DAMAGED:
        return 1
    return value if isinstance(value, int) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = _from_grey16(image)
    if image.mode in ("I", "F"):
        raise MediaError(
            f"samples of 32 bits (mode {image.mode}) have no agreed white; "
            "convert the picture to 8 or 16 bits"
        )
    if image.has_transparency_data:
        return _over_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_grey16(image: Image.Image) -> Image.Image:
    """Scale 16-bit grey to 8 bits; Pillow's own conversion clips everything above 255 to white."""
    grey16 = np.asarray(image)
    grey = Image.fromarray((grey16 >> 8).astype(np.uint8))
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey.putalpha(Image.fromarray(np.where(grey16 == transparent, 0, 255).astype(np.uint8)))
    return grey


def _over_white(image: Image.Image) -> Image.Image:
    if image.mode == "La":  # premultiplied; Pillow knows no direct way to RGBA
        image = image.convert("LA")
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, rgba).convert("RGB")
