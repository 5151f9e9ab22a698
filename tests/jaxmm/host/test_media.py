"""Pictures of every kind against the colours and sizes that a person would see in them."""

import io
import json
import random
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxmm.errors import MediaError, MediaTooLarge
from jaxmm.host.media import Limits, decode_image, decode_rgb

DATA = Path(__file__).parents[2] / "data" / "media"
EXPECTED = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
GOOD = [name for name, row in EXPECTED.items() if row["accept"]]
BAD = [name for name, row in EXPECTED.items() if not row["accept"]]
LIMITS = Limits(max_bytes=1 << 20, max_decode_pixels=2_000_000)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # about damaged tags
LEAKS = re.compile(r"0x[0-9a-f]{6,}|object at|Traceback|/usr/|/home/|/tmp|site-packages|\.py")


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says how large it is and then holds almost nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    ends = chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + ends


@pytest.mark.parametrize("name", GOOD)
def test_picture_is_what_a_person_sees(name: str) -> None:
    row = EXPECTED[name]
    rgb = decode_rgb((DATA / name).read_bytes(), LIMITS)
    assert rgb.dtype == np.uint8
    assert rgb.shape == (row["size"][1], row["size"][0], 3)
    for x, y, colour, tolerance in row.get("probe", []):
        assert np.abs(rgb[y, x].astype(int) - colour).max() <= tolerance
    if "same_pixels_as" in row:
        twin = decode_rgb((DATA / row["same_pixels_as"]).read_bytes(), LIMITS)
        assert np.abs(rgb.astype(int) - twin).max() <= row["tol"]


@pytest.mark.parametrize("name", BAD)
def test_unusable_data_is_a_media_error_that_tells_nothing_else(name: str) -> None:
    for source in (DATA / name, (DATA / name).read_bytes()):
        with pytest.raises(MediaError) as caught:
            decode_image(source, LIMITS)
        assert not LEAKS.search(str(caught.value))
        assert name not in str(caught.value)


def test_path_and_bytes_give_the_same_picture() -> None:
    path = DATA / "exif_6.jpg"
    assert np.array_equal(decode_rgb(path, LIMITS), decode_rgb(path.read_bytes(), LIMITS))


def test_array_is_taken_as_it_is() -> None:
    rgb = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    assert np.array_equal(decode_rgb(rgb, LIMITS), rgb)
    assert np.array_equal(decode_rgb(rgb[:, ::-1], LIMITS), rgb[:, ::-1])


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 5), np.uint8),
        np.zeros((4, 5, 4), np.uint8),
        np.zeros((3, 4, 5), np.uint8),
        np.zeros((4, 5, 3), np.float32),
        np.zeros((0, 5, 3), np.uint8),
    ],
)
def test_array_of_another_form_is_refused(array: np.ndarray) -> None:
    with pytest.raises(MediaError):
        decode_image(array, LIMITS)


def test_pil_image_is_turned_upright_and_not_changed() -> None:
    with Image.open(DATA / "exif_6.jpg") as image:
        stored = image.size
        upright = decode_image(image, LIMITS)
        assert upright.size == (stored[1], stored[0]) == (96, 60)
        assert image.size == stored


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "YCbCr", "HSV"])
def test_pil_image_of_any_mode_becomes_rgb(mode: str) -> None:
    grey = Image.new("L", (6, 4), 255).convert("RGB").convert(mode if mode != "LA" else "L")
    image = grey.convert(mode)
    assert decode_rgb(image, LIMITS).tolist() == [[[255] * 3] * 6] * 4


def test_premultiplied_grey_is_laid_over_white() -> None:
    image = Image.merge("LA", (Image.new("L", (2, 2), 80), Image.new("L", (2, 2), 0)))
    assert decode_rgb(image.convert("La"), LIMITS).tolist() == [[[255] * 3] * 2] * 2


def test_transparent_colour_of_16_bit_grey_shows_white() -> None:
    grey = Image.fromarray(np.array([[0, 25600]], np.uint16))
    data = encoded(grey, transparency=0)
    with Image.open(io.BytesIO(data)) as opened:
        assert opened.mode == "I;16"
    assert decode_rgb(data, LIMITS).tolist() == [[[255] * 3, [100] * 3]]


@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_16_bit_tiff_is_scaled_in_either_byte_order(order: str) -> None:
    """A hand-made TIFF: 2 x 1 pixels of 0x4000 and 0xff00, so 64 and 255."""
    mark, pack = (b"II", "<") if order == "<u2" else (b"MM", ">")
    tags = [(256, 2), (257, 1), (258, 16), (259, 1), (262, 1), (273, 8), (277, 1), (279, 4)]
    pixels = np.array([0x4000, 0xFF00], order).tobytes()
    data = mark + struct.pack(pack + "HI", 42, 12) + pixels + struct.pack(pack + "H", len(tags))
    for tag, value in tags:
        data += struct.pack(pack + "HHII", tag, 4, 1, value)
    data += struct.pack(pack + "I", 0)
    assert decode_rgb(data, LIMITS).tolist() == [[[64] * 3, [255] * 3]]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_samples_without_an_agreed_white_are_refused(mode: str) -> None:
    with pytest.raises(MediaError, match="32 bits"):
        decode_image(Image.new(mode, (2, 2)), LIMITS)


def test_multi_picture_jpeg_gives_its_first() -> None:
    red, blue = Image.new("RGB", (16, 16), (200, 0, 0)), Image.new("RGB", (16, 16), (0, 0, 200))
    data = encoded(red, "MPO", save_all=True, append_images=[blue])
    with Image.open(io.BytesIO(data)) as opened:
        assert opened.format == "MPO"
    r, g, b = decode_rgb(data, LIMITS)[8, 8].tolist()
    assert r > 180 and g < 20 and b < 20


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF"])
def test_every_format_that_this_pillow_writes_is_read(form: str) -> None:
    Image.init()
    source = Image.new("RGB", (32, 24), (200, 30, 60))
    data = encoded(source, form) if form in Image.SAVE else encoded(source)
    assert np.abs(decode_rgb(data, LIMITS).astype(int) - (200, 30, 60)).max() < 12


@pytest.mark.parametrize("form", ["PPM", "ICO", "TGA", "PCX", "SGI", "EPS", "PDF"])
def test_formats_outside_the_list_are_refused(form: str) -> None:
    with pytest.raises(MediaError, match="send PNG, JPEG"):
        decode_image(encoded(Image.new("RGB", (32, 24)), form), LIMITS)


def test_broken_exif_block_does_not_spoil_the_picture() -> None:
    data = encoded(Image.new("RGB", (8, 8), (9, 9, 9)), "JPEG", exif=b"Exif\0\0II\x2a\0\xff\xff")
    assert decode_rgb(data, LIMITS).shape == (8, 8, 3)


def test_size_is_refused_from_the_header() -> None:
    with pytest.raises(MediaTooLarge, match="2001 x 1000 = 2001000 pixels; the limit is 2000000"):
        decode_image(png_header(2001, 1000), LIMITS)


def test_bomb_is_refused_where_pillow_refuses_it_first() -> None:
    with pytest.raises(MediaTooLarge, match="the limit of 2000000"):
        decode_image(png_header(40_000, 40_000), LIMITS)


def test_bytes_are_counted_before_anything_else(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(b"x" * 101)
    for source in (path, path.read_bytes()):
        with pytest.raises(MediaTooLarge, match="101 bytes; the limit is 100"):
            decode_image(source, Limits(max_bytes=100, max_decode_pixels=1))


def test_path_that_is_no_readable_file_is_refused_without_naming_it(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.png", tmp_path, Path("/dev/zero")):
        with pytest.raises(MediaError) as caught:
            decode_image(path, LIMITS)
        assert str(path) not in str(caught.value)


@pytest.mark.parametrize("source", ["cat.jpg", None, 7, [b"x"]])
def test_other_types_are_refused_by_name(source: object) -> None:
    with pytest.raises(MediaError, match=type(source).__name__):
        decode_image(source, LIMITS)


@pytest.mark.parametrize("name", [n for n in GOOD if EXPECTED[n]["size"] != [840, 840]])
def test_damaged_bytes_give_a_picture_or_a_media_error(name: str) -> None:
    chance = random.Random(name)
    data = (DATA / name).read_bytes()
    for _ in range(30):
        broken = bytearray(data[: chance.randint(1, len(data))])
        for _ in range(chance.randint(0, 6)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        try:
            decode_image(bytes(broken), LIMITS)
        except MediaError as error:
            assert not LEAKS.search(str(error))
