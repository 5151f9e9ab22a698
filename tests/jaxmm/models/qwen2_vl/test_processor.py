"""The Qwen2-VL image processor against the Hugging Face one (Pillow backend), bit for bit."""

import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from jaxmm.errors import ConfigError, MediaTooLarge, ModelError, RequestError
from jaxmm.host.media import Limits, decode_image
from jaxmm.models.qwen2_5_vl.processor import ImageProcessor as ImageProcessor25
from jaxmm.models.qwen2_vl.processor import ImageProcessor

DATA = Path(__file__).parents[3] / "data" / "media"
EXPECTED = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
COUNTED = [name for name, row in EXPECTED.items() if isinstance(row.get("tokens"), int)]
LIMITS = Limits(max_bytes=1 << 20, max_decode_pixels=2_000_000)
PUBLISHED = ImageProcessor(min_pixels=3136, max_pixels=12845056)
SMALL = ImageProcessor(min_pixels=3136, max_pixels=50176)

SIZES = [
    *[(1, 1), (1, 200), (200, 1), (3, 22), (22, 3), (19, 19), (27, 27), (28, 28), (26, 28)],
    *[(28, 560), (560, 28), (30, 1000), (332, 27), (57, 83), (112, 84), (300, 211), (798, 519)],
]


def pixel_values(processor: ImageProcessor, patches_NU: np.ndarray) -> np.ndarray:
    """Normalise and repeat in time, in the reference's arithmetic, by one table a channel."""
    levels = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean, std = np.float32(processor.mean), np.float32(processor.std)
    table = (levels[None] - mean[:, None]) / std[:, None]
    p, t = processor.patch_size, processor.temporal_patch_size
    planes = patches_NU.reshape(-1, 3, 1, p, p)
    values = np.stack([table[c][planes[:, c]] for c in range(3)], axis=1)
    return np.repeat(values, t, axis=2).reshape(len(patches_NU), -1)


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 7919 + width).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )


def write(directory: Path, table: dict, name: str = "preprocessor_config.json") -> Path:
    (directory / name).write_text(json.dumps(table), encoding="utf-8")
    return directory


@pytest.mark.parametrize("processor", [PUBLISHED, SMALL], ids=["published", "small"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_patches_equal_the_hugging_face_processor(
    processor: ImageProcessor, size: tuple[int, int]
) -> None:
    rgb = picture(*size)
    reference = Qwen2VLImageProcessorPil(
        min_pixels=processor.min_pixels, max_pixels=processor.max_pixels
    )(images=[Image.fromarray(rgb)], return_tensors="np")
    patches_NU, grid = processor.patches(rgb)
    assert patches_NU.dtype == np.uint8
    assert list(grid) == reference["image_grid_thw"][0].tolist()
    assert np.array_equal(pixel_values(processor, patches_NU), reference["pixel_values"])
    assert processor.num_rows(grid) * 4 == len(patches_NU)
    assert grid == processor.grid(*size)


def test_other_patch_and_merge_sizes_equal_the_hugging_face_processor() -> None:
    processor = ImageProcessor(
        patch_size=4,
        temporal_patch_size=3,
        merge_size=3,
        min_pixels=1,
        max_pixels=9000,
        mean=(0.1, 0.2, 0.3),
        std=(0.5, 0.6, 0.7),
    )
    reference = Qwen2VLImageProcessorPil(
        patch_size=4,
        temporal_patch_size=3,
        merge_size=3,
        min_pixels=1,
        max_pixels=9000,
        image_mean=[0.1, 0.2, 0.3],
        image_std=[0.5, 0.6, 0.7],
    )(images=[Image.fromarray(picture(100, 131))], return_tensors="np")
    patches_NU, grid = processor.patches(picture(100, 131))
    assert list(grid) == reference["image_grid_thw"][0].tolist()
    assert np.array_equal(pixel_values(processor, patches_NU), reference["pixel_values"])


def test_picture_of_the_right_size_is_cut_by_hand_worked_order() -> None:
    """56 x 56: four tokens, patch (row, column) at row 4*token + 2*(row%2) + column%2."""
    rgb = picture(56, 56)
    patches_NU, grid = PUBLISHED.patches(rgb)
    assert grid == (1, 4, 4)
    row, column = 2, 3  # token (1, 1) = third in raster order of 2 x 2, upper right patch
    patch = rgb[28:42, 42:56].transpose(2, 0, 1).reshape(-1)
    assert np.array_equal(patches_NU[4 * 3 + 2 * (row % 2) + column % 2], patch)


def test_pil_image_and_array_give_the_same_patches() -> None:
    rgb = picture(70, 90)
    a, b = PUBLISHED.patches(rgb)[0], PUBLISHED.patches(Image.fromarray(rgb))[0]
    assert np.array_equal(a, b)


@given(
    height=st.integers(1, 6000),
    width=st.integers(1, 6000),
    low=st.integers(1, 10**6),
    high=st.integers(784, 10**7),
)
def test_sizes_equal_the_reference_rule(height: int, width: int, low: int, high: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    processor = ImageProcessor(min_pixels=min(low, high), max_pixels=high)
    reference = smart_resize(height, width, 28, min(low, high), high)
    assert processor.resized(height, width) == reference
    assert reference[0] * reference[1] // 196 <= processor.max_patches


@given(max_pixels=st.sampled_from([784, 1000, 3136, 50176, 156800, 1605632]), data=st.data())
def test_no_shape_exceeds_max_patches(max_pixels: int, data: st.DataObject) -> None:
    low = data.draw(st.integers(1, max_pixels))
    processor = ImageProcessor(min_pixels=low, max_pixels=max_pixels)
    short = data.draw(st.integers(1, 3000))
    long = data.draw(st.integers(short, 200 * short))
    new_height, new_width = smart_resize(short, long, 28, low, max_pixels)
    assert new_height * new_width // 196 <= processor.max_patches


def test_published_limits_bound_patches_by_max_pixels_alone() -> None:
    assert PUBLISHED.max_patches == 12845056 // 196


@pytest.mark.parametrize("name", COUNTED)
def test_files_have_the_published_rules_token_count(name: str) -> None:
    image = decode_image((DATA / name).read_bytes(), LIMITS)
    assert PUBLISHED.num_rows(PUBLISHED.grid(image.height, image.width)) == EXPECTED[name]["tokens"]


@pytest.mark.parametrize(
    ("size", "limits", "resized"),
    [
        ((519, 798), {}, (532, 784)),  # halves round to even
        ((70, 70), {}, (56, 56)),
        ((19, 19), {}, (84, 84)),  # double precision noise under the ceiling
        ((18, 18), {}, (56, 56)),
        ((20, 20), {}, (56, 56)),
        ((1000, 30), {"max_pixels": 6272}, (448, 28)),  # a side is floored to one unit
        ((34, 900), {"max_pixels": 9408}, (28, 476)),
        ((480, 640), {"max_pixels": 200704}, (364, 504)),
        ((224, 224), {"min_pixels": 401408}, (644, 644)),
        ((840, 840), {"max_pixels": 50176}, (224, 224)),
        ((840, 840), {"max_pixels": 200704}, (448, 448)),
    ],
)
def test_known_sizes(size: tuple[int, int], limits: dict, resized: tuple[int, int]) -> None:
    assert PUBLISHED.resized(*size, **limits) == resized


@pytest.mark.parametrize("size", [(1, 201), (4000, 1), (201, 1)])
def test_too_thin_is_refused_with_the_ratio(size: tuple[int, int]) -> None:
    with pytest.raises(MediaTooLarge, match=f"{max(size)} times the other; the limit is 200"):
        PUBLISHED.resized(*size)


def test_request_limits_stay_within_the_servers() -> None:
    assert SMALL.limits() == (3136, 50176)
    assert SMALL.limits(max_pixels=1000) == (1000, 1000)  # min_pixels follows it down
    assert SMALL.limits(min_pixels=50176) == (50176, 50176)
    for wrong in ({"max_pixels": 50177}, {"max_pixels": 783}, {"min_pixels": 50177}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            SMALL.limits(**wrong)
    with pytest.raises(RequestError, match="min_pixels=0"):
        SMALL.limits(min_pixels=0)
    with pytest.raises(RequestError, match="min_pixels=2000"):
        SMALL.limits(min_pixels=2000, max_pixels=1000)


def test_request_cannot_enlarge_a_picture_past_max_patches() -> None:
    with pytest.raises(MediaTooLarge, match=f"the limit is {SMALL.max_patches}"):
        SMALL.resized(1, 200, min_pixels=50176)


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"min_pixels": 4000, "max_pixels": 90000},
        {"size": {"shortest_edge": 4000, "longest_edge": 90000}},
        {"size": {"min_pixels": 1, "max_pixels": 2}, "min_pixels": 4000, "max_pixels": 90000},
        {
            "size": {"shortest_edge": 5000, "longest_edge": 80000},
            "min_pixels": 4000,
            "max_pixels": 90000,
        },
        {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    ],
)
def test_checkpoint_settings_are_read_as_hugging_face_reads_them(
    table: dict, tmp_path: Path
) -> None:
    reference = Qwen2VLImageProcessorPil(**table)
    processor = ImageProcessor.from_checkpoint(write(tmp_path, table))
    assert processor.min_pixels == reference.size["shortest_edge"]
    assert processor.max_pixels == reference.size["longest_edge"]
    assert processor.patch_size == reference.patch_size
    assert list(processor.mean) == list(reference.image_mean)
    assert list(processor.std) == list(reference.image_std)


def test_file_saved_by_hugging_face_is_read(tmp_path: Path) -> None:
    Qwen2VLImageProcessorPil(min_pixels=4000, max_pixels=90000).save_pretrained(tmp_path)
    processor = ImageProcessor.from_checkpoint(tmp_path)
    assert (processor.min_pixels, processor.max_pixels) == (4000, 90000)


def test_pixel_limits_under_size_are_read(tmp_path: Path) -> None:
    table = {"size": {"min_pixels": 4000, "max_pixels": 90000}}
    processor = ImageProcessor.from_checkpoint(write(tmp_path, table))
    assert (processor.min_pixels, processor.max_pixels) == (4000, 90000)


def test_whole_processors_file_is_read(tmp_path: Path) -> None:
    table = {"image_processor": {"min_pixels": 4000, "max_pixels": 90000}, "other": 1}
    processor = ImageProcessor.from_checkpoint(write(tmp_path, table, "processor_config.json"))
    assert (processor.min_pixels, processor.max_pixels) == (4000, 90000)


def test_overrides_replace_the_checkpoints_limits(tmp_path: Path) -> None:
    write(tmp_path, {"min_pixels": 4000, "max_pixels": 90000})
    processor = ImageProcessor.from_checkpoint(tmp_path, min_pixels=5000, max_pixels=80000)
    assert (processor.min_pixels, processor.max_pixels) == (5000, 80000)
    with pytest.raises(ConfigError, match="min_pixels=4000"):
        ImageProcessor.from_checkpoint(tmp_path, max_pixels=3000)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"do_normalize": False}, "do_normalize"),
        ({"resample": 2}, "resample"),
        ({"rescale_factor": 0.5}, "rescale_factor"),
        ({"image_mean": [0.5]}, "image_mean"),
    ],
)
def test_settings_not_followed_are_refused_by_name(table: dict, key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=key):
        ImageProcessor.from_checkpoint(write(tmp_path, table))


def test_missing_or_broken_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no preprocessor_config\.json"):
        ImageProcessor.from_checkpoint(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="not valid JSON"):
        ImageProcessor.from_checkpoint(tmp_path)


def test_fingerprint_covers_settings_and_survives_pickling() -> None:
    assert PUBLISHED.fingerprint == SMALL.fingerprint  # limits show in the grid and the pixels
    assert ImageProcessor(patch_size=16).fingerprint != PUBLISHED.fingerprint
    assert ImageProcessor(std=(0.5, 0.5, 0.5)).fingerprint != PUBLISHED.fingerprint
    assert pickle.loads(pickle.dumps(PUBLISHED)) == PUBLISHED
    assert pickle.loads(pickle.dumps(PUBLISHED)).fingerprint == PUBLISHED.fingerprint


def test_qwen2_5_vl_uses_the_same_processor() -> None:
    assert ImageProcessor25 is ImageProcessor


def test_jpeg_is_cut_as_the_hugging_face_processor_cuts_it() -> None:
    buffer = io.BytesIO()
    Image.fromarray(picture(121, 203)).save(buffer, "JPEG")
    image = decode_image(buffer.getvalue(), LIMITS)
    with Image.open(io.BytesIO(buffer.getvalue())) as opened:
        reference = Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=12845056)(
            images=[opened], return_tensors="np"
        )
    values = pixel_values(PUBLISHED, PUBLISHED.patches(image)[0])
    assert np.array_equal(values, reference["pixel_values"])
