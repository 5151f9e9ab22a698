"""Pictures as large as a chip has room to encode; what the compiler says is in docs/planner.md."""

import dataclasses
from typing import Any

import pytest
from jax.sharding import AbstractMesh

from jaxmm.basis import _remedy
from jaxmm.config import EngineConfig, load_config
from jaxmm.device.backend import Backend
from jaxmm.encoder_memory import fit_pictures, most_patches, patch_bytes
from jaxmm.errors import ConfigError
from jaxmm.models.qwen2_vl.processor import ImageProcessor
from jaxmm.sizes import Sizes, settle_sizes
from tests.bench.step_cases import qwen2_5_vl_7b

PUBLISHED = ImageProcessor(max_pixels=12845056)
MODEL = qwen2_5_vl_7b()
GIB = 2**30


def fitting(memory_bytes: int, chips: int = 1, **settings: Any) -> ImageProcessor:
    config = load_config(EngineConfig, None, settings)
    fitted: ImageProcessor = fit_pictures(
        config, MODEL, PUBLISHED, memory_bytes=memory_bytes, itemsize=2, encoder_chips=chips
    )
    return fitted


def settle(processor: ImageProcessor, memory_bytes: int, **settings: Any) -> Sizes:
    return settle_sizes(
        load_config(EngineConfig, None, {"max_model_len": 4096, **settings}),
        MODEL,
        processor.max_patches,
        platform="tpu",
        memory_bytes=memory_bytes,
        itemsize=2,
        kernels="pallas",
        num_chips=4,
    )


def test_the_largest_picture_takes_what_memory_fraction_leaves() -> None:
    memory = int(15.75 * GIB)
    assert fitting(memory) is PUBLISHED
    limited = fitting(memory, memory_fraction=0.95)
    assert limited.max_pixels < PUBLISHED.max_pixels
    lane = settle(limited, memory, memory_fraction=0.95).max_lane_patches
    assert 0.8 < lane * patch_bytes(MODEL, 2) / (memory * 0.05) < 1
    wider = fitting(memory, chips=4, memory_fraction=0.95)
    assert wider.max_pixels > 2 * limited.max_pixels


def test_a_memory_fraction_that_leaves_no_room_for_a_picture_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"memory_fraction=1.0 of 8192 MiB leaves no room"):
        fitting(8 * GIB, memory_fraction=1.0)


def test_a_split_of_the_encoder_is_advised_where_it_would_be_one() -> None:
    mesh: Any = AbstractMesh((4,), ("model",))
    advice = "lower memory_fraction, or set encoder_parallel to model"
    assert _remedy(Backend(mesh=mesh)) == advice
    assert _remedy(Backend(mesh=mesh, split_encoder=True)) == "lower memory_fraction"
    assert _remedy(Backend()) == "lower memory_fraction"


def test_a_lane_for_the_largest_picture_has_room_for_its_windows() -> None:
    assert most_patches(300, MODEL.vision) == 400
    whole = dataclasses.replace(MODEL.vision, window_patches=0)
    assert most_patches(300, whole) == 300


@pytest.mark.parametrize("setting", ["media.max_pixels", "buckets.max_patches_per_step"])
def test_a_limit_that_is_named_stays_and_is_refused_where_it_has_no_room(setting: str) -> None:
    named = {setting: 12845056 if "pixels" in setting else 87552}
    assert fitting(8 * GIB, **named, memory_fraction=0.9) is PUBLISHED
    with pytest.raises(ConfigError, match=r"media.max_pixels \d+ MiB"):
        settle(PUBLISHED, 8 * GIB, **named, memory_fraction=0.9)


@pytest.mark.parametrize(("chips", "gib"), [(1, 2.05), (4, 0.88)])
def test_temporaries_are_those_of_the_compiler(chips: int, gib: float) -> None:
    """Of a lane of 87552 patches on v5e, as docs/planner.md has them."""
    assert 87552 * patch_bytes(MODEL, 2, chips) / GIB == pytest.approx(gib, rel=0.1)
