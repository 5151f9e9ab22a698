"""Whole steps of published models, lowered for chips that are not there."""

import dataclasses

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxmm.device.backend import Backend
from jaxmm.device.lowering import Lowering
from jaxmm.host.buckets import Buckets
from jaxmm.models.config import ModelConfig, TextConfig, VisionConfig
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
    backend = Backend("pallas", mesh, split_encoder)
    return Lowering(model, sizes, jnp.bfloat16, backend), mesh
