"""The least times of steps, against sums done by hand."""

import dataclasses

import pytest
from jax._src.pallas.mosaic import tpu_info

from jaxmm.models.config import ModelConfig
from jaxmm.planner.chips import CHIPS, Chip
from jaxmm.planner.floors import (
    HOP_SECONDS,
    Floor,
    decode_floor,
    encode_floor,
    extend_floor,
    residual_sums,
    sums_floor,
)
from tests.bench.step_cases import qwen2_5_vl_7b

CHIP = Chip(
    name="plain",
    memory_bytes=1,
    bandwidth=1e9,
    flops=1e12,
    link_bandwidth=1e9,
    dimensions=2,
)


def small(**text: object) -> ModelConfig:
    """Two layers of width 8: 4 heads and 2 KV heads of 2 channels, MLP 16, 100 words."""
    model = qwen2_5_vl_7b(2, 2)
    sizes = {
        "width": 8,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_channels": 2,
        "mlp_width": 16,
        "vocab_size": 100,
    }
    return dataclasses.replace(model, text=dataclasses.replace(model.text, **sizes, **text))


def test_decode_reads_the_weights_and_every_key() -> None:
    floor = decode_floor(small(), CHIP, 1, num_requests=3, length=10, itemsize=2, links=0.0)
    # a layer: q, out 2*8*8, k and v 2*8*4 = 192; MLP 3*8*16 = 384; two of them, and a head of 800
    weights = 2 * (192 + 384) + 800
    keys = 3 * 10 * 2 * 2 * 2 * 2  # requests, tokens, K and V, KV heads, channels, layers
    assert floor.memory == pytest.approx((weights + keys) * 2 / 1e9)
    # each request: two operations a weight; a score and a value for each head, channel and key
    attended = 2 * 2 * 2 * 4 * 2 * 3 * 10
    assert floor.matrix == pytest.approx((3 * 2 * weights + attended) / 1e12)


def test_an_encoder_over_several_chips_is_that_of_one_shared_out() -> None:
    alone = encode_floor(small(), CHIP, 256, 2)
    shared = encode_floor(small(), CHIP, 256, 2, num_chips=4, links=0.5)
    assert shared == Floor(memory=alone.memory / 4, matrix=alone.matrix / 4, links=0.5)


def test_extend_sees_half_of_the_square_and_makes_one_row_of_logits() -> None:
    floor = extend_floor(small(), CHIP, 1, num_tokens=4, itemsize=2, links=0.0)
    pairs = 4 + 3 + 2 + 1
    operations = 4 * 2 * 2 * (192 + 384) + 2 * 800 + 2 * 2 * 2 * 4 * 2 * pairs
    assert floor.matrix == pytest.approx(operations / 1e12)


def test_chips_share_bytes_and_operations() -> None:
    one, four = (
        decode_floor(small(), CHIP, n, num_requests=1, length=8, itemsize=2, links=0.0)
        for n in (1, 4)
    )
    assert four.memory == pytest.approx(one.memory / 4)
    assert four.matrix == pytest.approx(one.matrix / 4)


def test_experts_that_no_token_chose_are_not_read() -> None:
    experts = {"num_experts": 8, "experts_per_token": 2, "expert_width": 4}
    read = [
        decode_floor(
            small(**experts), CHIP, 1, num_requests=n, length=0, itemsize=1, links=0.0
        ).memory
        * 1e9
        for n in (1, 1000)
    ]
    beside = 2 * 192 + 800
    expert = 3 * 8 * 4
    assert read[0] == pytest.approx(beside + 2 * 2 * expert)  # two layers, two experts each
    assert read[1] == pytest.approx(beside + 2 * 8 * expert)


def test_windows_see_themselves_and_full_layers_the_picture() -> None:
    model = qwen2_5_vl_7b(2, 2)  # one layer of windows, one full
    floor = encode_floor(model, CHIP, 1024, 2)
    block = 4 * 1280**2 + 3 * 1280 * 3420
    merger = 5120 * (5120 + 3584)
    products = 2 * 1024 * 2 * block + 2 * 256 * merger
    attended = 4 * 1024 * (1024 + 64) * 1280
    assert floor.matrix == pytest.approx((products + attended) / 1e12)
    assert floor.memory == pytest.approx((2 * block + merger) * 2 / 1e9)


def test_sums_take_their_bytes_or_their_hops() -> None:
    assert sums_floor(CHIP, 1, 10, 1e6) == 0.0
    # of 1 MB in four parts each chip sends three twice; 2x2: a hop along each axis, there and back
    assert sums_floor(CHIP, 4, 10, 1e6) == pytest.approx(10 * 2 * 0.75e6 / 1e9)
    assert sums_floor(CHIP, 4, 10, 8) == pytest.approx(10 * 4 * HOP_SECONDS)
    assert residual_sums(small(), 5, 2) == (5, 5 * 8 * 2)


def test_what_a_step_waits_for() -> None:
    floor = Floor(memory=3.0, matrix=2.0, links=1.0)
    assert (floor.seconds, floor.bound) == (4.0, "HBM")
    assert dataclasses.replace(floor, matrix=5.0).bound == "MXU"


@pytest.mark.parametrize(
    ("kind", "name", "cores"),
    [("v5e", "TPU_V5E", 1), ("v5p", "TPU_V5P", 2), ("v6e", "TPU_V6E", 1), ("tpu7x", "TPU_7X", 1)],
)
def test_peaks_are_those_that_jax_has(kind: str, name: str, cores: int) -> None:
    core = tpu_info._get_tpu_info_impl(tpu_info.ChipVersion[name], 1)
    chip = CHIPS[kind]
    assert chip.flops == pytest.approx(cores * core.bf16_ops_per_second, rel=0.01)
    # of v5p JAX has 2460 GB/s, the documentation 2765
    assert chip.bandwidth == pytest.approx(cores * core.mem_bw_bytes_per_second, rel=0.13)
    assert chip.memory_bytes < cores * core.hbm_capacity_bytes
