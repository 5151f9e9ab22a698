"""Whole steps of published models, lowered for chips that are not there."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxmm.device.backend import Backend, spread_kv_heads
from jaxmm.device.lowering import Lowering
from jaxmm.host.buckets import Buckets
from jaxmm.models.config import (
    LatentAttention,
    ModelConfig,
    SlidingWindow,
    TextConfig,
    VisionConfig,
)
from jaxmm.planner.compiler import describe_devices, mesh_of
from jaxmm.sizes import Sizes


def qwen2_5_vl_7b(text_layers: int = 28, vision_layers: int = 32) -> ModelConfig:
    """Dimensions of Qwen2.5-VL-7B, with as many layers as asked for."""
    text = TextConfig(
        vocab_size=152064,
        width=3584,
        mlp_width=18944,
        num_layers=text_layers,
        num_heads=28,
        num_kv_heads=4,
        head_channels=128,
        rms_eps=1e-6,
        rope_theta=1e6,
        mrope_section=(16, 24, 24),
        tied=False,
    )
    vision = VisionConfig(
        depth=vision_layers,
        width=1280,
        num_heads=16,
        mlp_width=3420,
        patch_size=14,
        temporal_patch_size=2,
        merge_size=2,
        in_channels=3,
        out_width=3584,
        window_patches=64,
        full_attention_layers=(7, 15, 23, 31) if vision_layers == 32 else (1,),
        image_mean=(0.48145466, 0.4578275, 0.40821073),
        image_std=(0.26862954, 0.26130258, 0.27577711),
    )
    return ModelConfig(
        family="qwen2_5_vl",
        text=text,
        vision=vision,
        image_token_id=151655,
        video_token_id=151656,
        vision_start_token_id=151652,
        vision_end_token_id=151653,
        eos_token_ids=(151645, 151643),
        max_position=128000,
    )


def qwen3_vl_8b(text_layers: int = 36, vision_layers: int = 27) -> ModelConfig:
    """Dimensions of Qwen3-VL-8B, with as many layers as asked for, and levels as they allow."""
    deepstack = (8, 16, 24) if vision_layers > 24 else tuple(range(min(3, vision_layers)))
    text = TextConfig(
        vocab_size=151936,
        width=4096,
        mlp_width=12288,
        num_layers=text_layers,
        num_heads=32,
        num_kv_heads=8,
        head_channels=128,
        rms_eps=1e-6,
        rope_theta=5e6,
        mrope_section=(24, 20, 20),
        tied=False,
        deepstack_levels=len(deepstack),
    )
    vision = VisionConfig(
        depth=vision_layers,
        width=1152,
        num_heads=16,
        mlp_width=4304,
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        in_channels=3,
        out_width=4096,
        window_patches=0,
        full_attention_layers=(),
        position_side=48,
        deepstack_layers=deepstack,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
    )
    return dataclasses.replace(qwen2_5_vl_7b(), family="qwen3_vl", text=text, vision=vision)


def siglip(depth: int, text: TextConfig, **form: Any) -> VisionConfig:
    """SigLIP so400m/14, with rows for a decoder and the family's form of pictures."""
    return VisionConfig(
        depth=depth,
        width=1152,
        num_heads=16,
        mlp_width=4304,
        patch_size=14,
        temporal_patch_size=1,
        in_channels=3,
        out_width=text.width,
        window_patches=0,
        full_attention_layers=(),
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
        **form,
    )


def gemma3_4b(text_layers: int = 34, vision_layers: int = 27) -> ModelConfig:
    """Dimensions of Gemma 3 4B, with as many layers as asked for; the second sees all tokens if
    there are fewer than six."""
    whole = tuple(range(5, text_layers, 6)) or (1,)
    text = TextConfig(
        vocab_size=262208,
        width=2560,
        mlp_width=10240,
        num_layers=text_layers,
        num_heads=8,
        num_kv_heads=4,
        head_channels=256,
        rms_eps=1e-6,
        rope_theta=1e6,
        rope_factor=8.0,
        mrope_section=(128, 0, 0),
        tied=True,
        both_ways=True,
        sliding=SlidingWindow(tokens=1024, whole_layers=whole, rope_theta=1e4),
        score_divisor=256.0,
    )
    vision = siglip(vision_layers, text, merge_size=4, picture_side=64, pooled=True)
    return dataclasses.replace(qwen2_5_vl_7b(), family="gemma3", text=text, vision=vision)


def deepseek_vl2_tiny(text_layers: int = 12, vision_layers: int = 27) -> ModelConfig:
    """Dimensions of DeepSeek-VL2 Tiny, with as many layers as asked for."""
    text = TextConfig(
        vocab_size=129280,
        width=1280,
        mlp_width=6848,
        num_layers=text_layers,
        num_heads=10,
        num_kv_heads=10,
        head_channels=128,
        rms_eps=1e-6,
        rope_theta=1e4,
        mrope_section=(64, 0, 0),
        tied=False,
        num_experts=64,
        experts_per_token=6,
        expert_width=896,
        dense_layers=(0,),
        shared_width=2 * 896,
        expert_shares=False,
    )
    return _deepseek_vl2(text, vision_layers)


def deepseek_vl2_small(text_layers: int = 27, vision_layers: int = 27) -> ModelConfig:
    """Dimensions of DeepSeek-VL2 Small, which keeps rows that are key and value at once."""
    latent = LatentAttention(rank=512, nope_channels=128, rope_channels=64, value_channels=128)
    text = dataclasses.replace(
        deepseek_vl2_tiny().text,
        vocab_size=102400,
        width=2048,
        mlp_width=10944,
        num_layers=text_layers,
        num_heads=16,
        num_kv_heads=1,
        head_channels=latent.row_channels,
        mrope_section=(32, 0, 0),
        expert_width=1408,
        shared_width=2 * 1408,
        latent=latent,
    )
    return _deepseek_vl2(text, vision_layers)


def _deepseek_vl2(text: TextConfig, vision_layers: int) -> ModelConfig:
    vision = siglip(vision_layers, text, merge_size=2, tile_side=27)
    return dataclasses.replace(qwen2_5_vl_7b(), family="deepseek_vl_v2", text=text, vision=vision)


SERVING = Sizes(
    page_size=128,
    num_pages=1024,
    num_rows=16384,
    max_running=64,
    max_model_len=32768,
    max_step_tokens=2048,
    max_lane_patches=16384,
    buckets=Buckets(tokens=(64, 2048), patches=(4096, 16384)),
)
"""131072 tokens of KV; steps of 64 decodes or of 2048 tokens, lanes of 4096 or 16384 patches."""


def lowering(
    model: ModelConfig,
    topology: str,
    chips: int,
    sizes: Sizes = SERVING,
    *,
    split_encoder: bool = False,
) -> tuple[Lowering, Mesh]:
    """The steps of a model in bfloat16 with the TPU kernels, split over so many chips."""
    mesh = mesh_of(describe_devices(topology), {"model": chips})
    model = spread_kv_heads(model, chips)
    sizes = dataclasses.replace(sizes, whole_items=model.text.both_ways)
    backend = Backend("pallas", mesh, split_encoder)
    return Lowering(model, sizes, jnp.bfloat16, backend), mesh
