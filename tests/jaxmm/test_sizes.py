"""The sizes of an engine: what is settled, what is refused, and what `jaxmm buckets` prints."""

import math
from functools import partial
from typing import Any

import pytest

from jaxmm.config import EngineConfig, load_config
from jaxmm.device.backend import Backend
from jaxmm.device.kv import pool_shape
from jaxmm.errors import ConfigError
from jaxmm.host.buckets import Buckets
from jaxmm.models import read_config
from jaxmm.models.config import ModelConfig
from jaxmm.sizes import Kernels, Sizes, describe, page_bytes, settle_sizes, weight_count
from tests.bench import step_cases
from tests.checkpoints import checkpoint


def settle(max_patches: int = 4096, **settings: Any) -> Sizes:
    """Sizes on a CPU of 1 GiB; the model has 2 layers, 32768 positions and a window encoder."""
    return settle_sizes(
        load_config(EngineConfig, None, settings),
        read_config(checkpoint("qwen2_5_vl")),
        max_patches,
        platform="cpu",
        memory_bytes=1 << 30,
        itemsize=4,
    )


def test_length_that_was_not_asked_for_follows_the_pages() -> None:
    sizes = settle(**{"pages.num_pages": 4, "pages.page_size": 16})
    assert (sizes.max_model_len, sizes.num_table_pages) == (64, 4)


def test_pages_and_rows_follow_from_the_memory() -> None:
    model = read_config(checkpoint("qwen2_5_vl"))
    sizes, text = settle(), model.text
    assert sizes.num_rows == 16384  # above four of the largest images
    # keys and values of 64 tokens, all layers, float32
    page = text.num_layers * 2 * text.num_kv_heads * 64 * text.head_channels * 4
    taken = 4 * (weight_count(model) + 16384 * text.width)
    assert sizes.num_pages == min(131072 // 64, (int(0.6 * (1 << 30)) - taken) // page)
    assert settle(memory_fraction=0.05).num_pages == (int(0.05 * (1 << 30)) - taken) // page


@pytest.mark.parametrize("kernels", ["portable", "pallas"])
@pytest.mark.parametrize(
    "model",
    [
        read_config(checkpoint("qwen2_5_vl")),
        step_cases.gemma3_4b(),
        step_cases.deepseek_vl2_small(),
    ],
    ids=["narrow heads", "wide heads", "rows that are both"],
)
def test_a_page_is_counted_with_its_padding(model: ModelConfig, kernels: Kernels) -> None:
    pool = math.prod(pool_shape(model.text, 1, 64, Backend(kernels)))
    assert page_bytes(model, 64, 2, kernels) == model.text.num_layers * pool * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 40_000}, "max_model_len=40000 is above the checkpoint's limit of 32768"),
        (
            {"max_model_len": 65, "pages.num_pages": 4, "pages.page_size": 16},
            "max_model_len=65 does not fit 4 pages of 16 tokens, which hold 64; .*pages.num_pages",
        ),
        ({"pages.num_pages": 1 << 24}, r"1024 MiB .*pages.num_pages \d+ MiB.*; lower pages.num"),
        ({"arena.num_rows": 1 << 24}, "lower arena.num_rows"),
        ({"buckets.min_step_tokens": 1024}, "min_step_tokens=1024 is above .* 512"),
        ({"buckets.min_lane_patches": 8192}, "min_lane_patches=8192 is above .* 5461"),
        ({"max_patches": 1 << 20}, "the largest image has 1398101 patches; .*media.max_pixels"),
    ],
)
def test_sizes_that_cannot_be_are_refused_with_the_setting(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settle(**settings)


def test_pictures_above_the_largest_bucket_are_described_as_refused() -> None:
    sizes = Sizes(
        page_size=16,
        num_pages=40,
        num_rows=128,
        max_running=16,
        max_model_len=512,
        max_step_tokens=128,
        max_lane_patches=1280,
        buckets=Buckets(tokens=(16, 128), patches=(256, 1280)),
    )
    lines = describe(sizes, lambda width, height: width * height // 196).splitlines()
    # 448 * 448 / 196 = 1024 patches, a fifth of 1280 is filler; 640 * 480 / 196 = 1567
    assert "448x448        1024    1280    20.0%" in lines
    assert "640x480        1567 refused: above the largest bucket" in lines


def test_what_conversations_may_keep_is_shared_out_among_replicas() -> None:
    settings = load_config(
        EngineConfig, None, {"sessions.max_kept": 10, "sessions.max_bytes": 1000}
    )
    alone, one_of_four = (settle().scheduler(settings, num_replicas=n) for n in (1, 4))
    assert (alone.max_sessions, alone.max_kept_bytes) == (10, 1000)
    assert (one_of_four.max_sessions, one_of_four.max_kept_bytes) == (3, 250)


def test_weights_count_as_they_are_kept() -> None:
    """Room for three bytes a weight beside the arena: enough for bfloat16, not for float32."""
    model, rows = read_config(checkpoint("qwen2_5_vl")), 16
    arena = rows * model.text.row_width * 4
    given = {"memory_fraction": "0.5", "arena.num_rows": str(rows), "pages.page_size": "4"}
    settle = partial(
        settle_sizes,
        load_config(EngineConfig, None, {**given, "max_running": "16"}),
        model,
        16,
        platform="cpu",
        memory_bytes=2 * (3 * weight_count(model) + arena),
        itemsize=4,
    )
    with pytest.raises(ConfigError, match="no room for KV pages"):
        settle(weight_itemsize=4)
    assert settle(weight_itemsize=2).num_pages >= 2
