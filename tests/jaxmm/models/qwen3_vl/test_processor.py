"""Token counts of pictures under Qwen3-VL's published limits, computed from the public rule."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxmm.errors import MediaTooLarge
from jaxmm.host.media import Limits, decode_image
from jaxmm.models.qwen3_vl.processor import ImageProcessor

MEDIA = Path(__file__).parents[3] / "data" / "media"
PUBLISHED = ImageProcessor(
    patch_size=16, min_pixels=65536, max_pixels=16777216, mean=(0.5,) * 3, std=(0.5,) * 3
)
TOKENS = {
    "size_332x27.png": 87,
    "size_26x28.png": 72,
    "size_27x27.png": 64,
    "size_28x28.png": 64,
    "size_1x1.png": 64,
    "size_798x519.png": 400,
    "size_70x70.png": 64,
    "size_112x84.png": 70,
    "size_22x3.png": 66,
    "size_3x22.png": 66,
    "size_1x200.png": 114,
    "size_200x1.png": 114,
    "size_384x384.png": 144,
    "bytes_150x30.png": 72,
    "bytes_30x150.png": 72,
    "big.png": 676,
}


@pytest.mark.parametrize("name", TOKENS)
def test_pictures_have_the_tokens_of_the_public_rule(name: str) -> None:
    image = decode_image(MEDIA / name, Limits(1 << 22, 1 << 22))
    patches, grid = PUBLISHED.patches(image)
    assert PUBLISHED.num_rows(grid) == TOKENS[name]
    assert patches.shape == (4 * TOKENS[name], 3 * 16 * 16)


@pytest.mark.parametrize("name", ["thin_4000x1.png", "thin_1x4000.png"])
def test_pictures_too_thin_for_the_rule_are_refused(name: str) -> None:
    with pytest.raises(MediaTooLarge, match="4000 times the other; the limit is 200"):
        PUBLISHED.patches(decode_image(MEDIA / name, Limits(1 << 22, 1 << 22)))


def test_patches_lie_four_to_a_row_by_channel_and_line() -> None:
    """Each 16 x 16 block of a 256 x 256 picture has a colour of its own."""
    colours = np.arange(16 * 16 * 3, dtype=np.uint16).reshape(16, 16, 3).astype(np.uint8)
    image = Image.fromarray(colours.repeat(16, axis=0).repeat(16, axis=1))
    patches, grid = PUBLISHED.patches(image)
    assert grid == (1, 16, 16)
    # row 0 of rows 0: block (0, 0), then (0, 1), (1, 0), (1, 1); the next token starts at (0, 2)
    for patch, (y, x) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1), (0, 2))):
        by_channel = patches[patch].reshape(3, 256)
        np.testing.assert_array_equal(by_channel, colours[y, x][:, None].repeat(256, axis=1))
