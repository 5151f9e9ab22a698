"""How large a picture a chip has room to encode, beside what it always holds. Host only."""

import dataclasses
from typing import Any

from jaxmm.config import EngineConfig
from jaxmm.errors import ConfigError
from jaxmm.host.buckets import round_up
from jaxmm.models.config import ModelConfig, VisionConfig

_REGISTER_LANES = 128
_SHARE = 0.9
"""Of what `memory_fraction` leaves; the rest is for the state of sampling and filling of tiles."""


def most_patches(num_patches: int, vision: VisionConfig) -> int:
    """Patches of a lane that a picture of so many takes at most.

    Windows of a picture's edge leave at most a quarter of their 64-patch blocks empty.
    """
    return num_patches * 4 // 3 if vision.window_patches else num_patches


def patch_bytes(model: ModelConfig, itemsize: int, num_chips: int = 1) -> int:
    """Temporaries of an encode step for each patch of its lane, to a tenth the TPU compiler's for
    the lanes of docs/planner.md.

    Args:
        model: Dimensions.
        itemsize: Bytes of one activation.
        num_chips: Chips that the encoder's heads and MLP are split over.
    """
    vision = model.vision
    heads = vision.num_heads * round_up(vision.head_channels, _REGISTER_LANES)
    attention = 3 * vision.width + 3 * heads
    mlp = 3 * round_up(vision.mlp_width, _REGISTER_LANES)
    levels = model.text.deepstack_levels * vision.out_width // vision.merged_patches
    return itemsize * (2 * vision.width + levels + max(attention, mlp) // num_chips)


def fit_pictures(
    config: EngineConfig,
    model: ModelConfig,
    processor: Any,
    *,
    memory_bytes: int,
    itemsize: int,
    encoder_chips: int,
) -> Any:
    """Lower the limit of pictures' pixels to what a chip has room for, where no setting names one.

    Args:
        config: Settings.
        model: Dimensions.
        processor: The checkpoint's, with its limits.
        memory_bytes: Of a chip.
        itemsize: Bytes of one activation.
        encoder_chips: Chips that a picture is split over.

    Returns:
        A processor that makes larger pictures smaller; the same if there is room for its largest,
        or if its pictures have a size of their own.

    Raises:
        ConfigError: There is no room for the smallest picture.
    """
    vision = model.vision
    named = config.media.max_pixels or config.buckets.max_patches_per_step
    if named or vision.tile_side or not processor.max_pixels:
        return processor
    room = int(memory_bytes * (1 - config.memory_fraction) * _SHARE)
    patches = room // patch_bytes(model, itemsize, encoder_chips)
    patches = patches * 3 // 4 if vision.window_patches else patches
    if patches < vision.merged_patches:
        raise ConfigError(
            f"memory_fraction={config.memory_fraction} of {memory_bytes >> 20} MiB leaves no room "
            "to encode a picture; lower it"
        )
    pixels = patches * vision.patch_size**2
    if pixels >= processor.max_pixels:
        return processor
    return dataclasses.replace(
        processor, max_pixels=pixels, min_pixels=min(processor.min_pixels, pixels)
    )
