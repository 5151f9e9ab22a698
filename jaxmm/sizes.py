"""Settles every size that the settings left open, from the model and the device. Host only."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxmm.config import EngineConfig
from jaxmm.encoder_memory import most_patches, patch_bytes
from jaxmm.errors import ConfigError
from jaxmm.host.buckets import Buckets, patch_rungs, round_up, tile_rungs, token_rungs
from jaxmm.host.limits import SchedulerConfig
from jaxmm.models.config import ModelConfig, TextConfig
from kernels_pallas.ragged_paged_attention import layout

Kernels = Literal["portable", "pallas"]

CPU_MAX_PIXELS = 1605632
"""Upper pixel limit on a CPU where none is set: 8192 patches of 14 x 14."""
_MAX_MODEL_LEN = 32768
_CPU_KV_BYTES = 2 << 30
_CPU_KV_TOKENS = 131072
_MAX_LANE_PATCHES = 1 << 20
_COUNT_BYTES = 4  # of each token id in a running request's output, for penalties
_PALLAS_TOKENS = 32  # steps are multiples of it; what a smaller one would save is nothing
_PALLAS_PATCHES = 256  # queries of a tile of the encoder's attention
_ROW_GROUP = 16  # sampled rows go through the head in groups (`steps._sample_group`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """All static sizes of an engine."""

    page_size: int
    num_pages: int
    num_rows: int
    """Rows of the arena; the device array has one more, for padding."""
    max_running: int
    max_model_len: int
    max_step_tokens: int
    max_lane_patches: int
    buckets: Buckets
    whole_items: bool = False
    """No step ends inside an item."""
    num_lanes: int = 1
    """Lanes that are encoded together, each on a chip of its own."""

    @property
    def num_table_pages(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_model_len // self.page_size)

    def scheduler(self, config: EngineConfig, *, num_replicas: int = 1) -> SchedulerConfig:
        """The scheduler's view; what conversations may keep is shared out among the replicas."""
        return SchedulerConfig(
            max_step_tokens=self.max_step_tokens,
            max_patches_per_step=self.max_lane_patches * self.num_lanes,
            max_lane_patches=self.max_lane_patches,
            max_running=self.max_running,
            max_waiting=config.max_waiting,
            max_model_len=self.max_model_len,
            page_size=self.page_size,
            max_pinned_pages=int(self.num_pages * config.sessions.page_share),
            max_sessions=-(-config.sessions.max_kept // num_replicas),
            whole_items=self.whole_items,
            max_kept_bytes=config.sessions.max_bytes // num_replicas,
        )


def settle_sizes(
    config: EngineConfig,
    model: ModelConfig,
    max_patches: int,
    *,
    platform: str,
    memory_bytes: int,
    itemsize: int,
    weight_itemsize: int = 0,
    kernels: Kernels = "portable",
    num_chips: int = 1,
    split_encoder: bool = False,
) -> Sizes:
    """Fill in the sizes left at 0.

    Args:
        config: The settings.
        model: The checkpoint's dimensions.
        max_patches: Patches of the largest image that the processor makes.
        platform: JAX's name of the device kind.
        memory_bytes: Memory of one device.
        itemsize: Bytes of one KV value, and of an arena row's.
        weight_itemsize: Bytes of one weight; 0: as many.
        kernels: The implementation of the ops; "pallas" has sizes of its own.
        num_chips: Chips that the text model and its pages are split over. Those of a CPU are
            simulated, and share its memory.
        split_encoder: The encoder is split over them too; else each of them encodes a lane.

    Raises:
        ConfigError: Settings that exceed the memory or the model, or contradict each other.
    """
    on_cpu = platform == "cpu"
    weight_itemsize = weight_itemsize or itemsize
    num_lanes = 1 if split_encoder else num_chips
    page_size = config.pages.page_size or (64 if on_cpu else 128)
    max_running = round_up(config.max_running or (32 if on_cpu else 128), _ROW_GROUP)
    wanted_tokens = max(config.buckets.max_step_tokens or (512 if on_cpu else 2048), max_running)
    pallas = kernels == "pallas"
    wanted_patches = _lane_patches(config, model, max_patches)
    _check_lowest("min_step_tokens", config.buckets.min_step_tokens, wanted_tokens)
    _check_lowest("min_lane_patches", config.buckets.min_lane_patches, wanted_patches)
    low = max(config.buckets.min_step_tokens, _PALLAS_TOKENS if pallas else 1)
    tokens = token_rungs(low, wanted_tokens, dense=on_cpu)
    align = _PALLAS_PATCHES if pallas else 64
    low_patches = config.buckets.min_lane_patches or 256
    if model.vision.tile_side:
        tile = model.vision.tile_side**2
        patches = tile_rungs(tile, low_patches, wanted_patches, dense=on_cpu, align=align)
    elif model.vision.picture_side:
        picture = model.vision.picture_side**2
        patches = tile_rungs(picture, picture, wanted_patches, dense=False, align=align, least=1)
    else:
        patches = patch_rungs(low_patches, wanted_patches, dense=on_cpu, align=align)
    _check_model_len(config, model)
    max_model_len = config.max_model_len or min(model.max_position, _MAX_MODEL_LEN)
    num_rows = config.arena.num_rows or max(16384, patches[-1])
    num_rows = round_up(num_rows, config.arena.page_rows)
    memory_bytes = memory_bytes // num_chips if on_cpu else memory_bytes
    num_pages = config.pages.num_pages or _pages_that_fit(
        config,
        model,
        page_size,
        num_rows,
        on_cpu,
        memory_bytes,
        itemsize,
        weight_itemsize,
        num_chips,
        num_lanes,
        kernels,
    )
    if max_model_len > num_pages * page_size:
        _require_pages(config, num_pages, page_size)
        max_model_len = num_pages * page_size
    sizes = Sizes(
        page_size=page_size,
        num_pages=num_pages,
        num_rows=num_rows,
        max_running=max_running,
        max_model_len=max_model_len,
        max_step_tokens=tokens[-1],
        max_lane_patches=patches[-1],
        buckets=Buckets(tokens=tokens, patches=patches),
        whole_items=model.text.both_ways,
        num_lanes=num_lanes,
    )
    parts = _memory_parts(sizes, model, itemsize, weight_itemsize, num_chips, kernels)
    if not on_cpu:  # where there is no limit to what a process may take
        lane_bytes = patch_bytes(model, itemsize, num_chips // num_lanes) * patches[-1]
        parts["media.max_pixels"] = lane_bytes
    _check_memory(parts, memory_bytes)
    return sizes


def host_memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def page_bytes(model: ModelConfig, page_size: int, itemsize: int, kernels: Kernels) -> int:
    """Bytes of one page, all layers; the TPU kernels' rows are padded to whole lanes."""
    text, values = model.text, model.text.kv_values
    if kernels == "pallas":
        lanes = layout.query_lanes if text.latent else layout.row_lanes
        values = text.num_kv_heads * lanes(text.head_channels)
    return text.num_layers * page_size * values * itemsize


def weight_count(model: ModelConfig, num_chips: int = 1, encoder_chips: int = 1) -> int:
    """Parameters that each chip holds, norms and biases left out (below a thousandth).

    Args:
        model: Dimensions.
        num_chips: Chips that the text model is split over.
        encoder_chips: Chips that the encoder's layers are split over.
    """
    t, v = model.text, model.vision
    mlps = sum(
        3 * t.width * (t.expert_width * t.num_experts + t.shared_width)
        if t.has_experts(layer)
        else 3 * t.width * t.mlp_width
        for layer in range(t.num_layers)
    )
    block = 4 * v.width**2 + 3 * v.width * v.mlp_width
    vocab = t.vocab_size * t.width * (1 if t.tied else 2)
    text = t.num_layers * attention_count(t) + mlps + vocab
    return text // num_chips + v.depth * block // encoder_chips + merger_count(model)


def merger_count(model: ModelConfig) -> int:
    """Parameters between an encoder's last layer and the rows, of all levels."""
    v = model.vision
    if v.pooled:
        return v.width * v.out_width
    merged = v.width * v.merged_patches
    return (1 + model.text.deepstack_levels) * merged * (merged + v.out_width)


def attention_count(text: TextConfig) -> int:
    """Parameters of one layer's attention."""
    if text.latent is None:
        heads = text.num_heads + text.num_kv_heads
        return 2 * text.width * heads * text.head_channels
    latent = text.latent
    rows = latent.query_channels + latent.value_channels  # of the projections to and from heads
    made = latent.nope_channels + latent.value_channels
    return text.num_heads * (text.width * rows + made * latent.rank) + (
        text.width * latent.row_channels
    )


def _lane_patches(config: EngineConfig, model: ModelConfig, max_patches: int) -> int:
    if config.buckets.max_patches_per_step:
        return config.buckets.max_patches_per_step
    patches = most_patches(max_patches, model.vision)
    if patches > _MAX_LANE_PATCHES:
        raise ConfigError(
            f"the largest image has {patches} patches; the limit is {_MAX_LANE_PATCHES}. Lower "
            "media.max_pixels, or set buckets.max_patches_per_step to refuse larger images."
        )
    return patches


def _check_lowest(name: str, lowest: int, highest: int) -> None:
    if lowest > highest:
        raise ConfigError(f"buckets.{name}={lowest} is above the highest rung, {highest}; lower it")


def _check_model_len(config: EngineConfig, model: ModelConfig) -> None:
    if config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is above the checkpoint's limit of "
            f"{model.max_position}; lower it, or use 0"
        )


def _require_pages(config: EngineConfig, num_pages: int, page_size: int) -> None:
    """Refuse a length that was asked for and has no room; one that was derived is lowered."""
    if config.max_model_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len} does not fit {num_pages} pages of {page_size} "
            f"tokens, which hold {num_pages * page_size}; lower it, or raise "
            f"{'pages.num_pages' if config.pages.num_pages else 'memory_fraction'}"
        )


def has_room_for_twin(
    config: EngineConfig, model: ModelConfig, sizes: Sizes, memory_bytes: int
) -> bool:
    """Whether `memory_fraction` holds float32 weights, and half as much once more."""
    needed = sum(_memory_parts(sizes, model, 4, 4).values()) + 2 * weight_count(model)
    return needed <= int(memory_bytes * config.memory_fraction)


def _memory_parts(
    sizes: Sizes,
    model: ModelConfig,
    itemsize: int,
    weight_itemsize: int,
    num_chips: int = 1,
    kernels: Kernels = "portable",
) -> dict[str, int]:
    """Bytes of one chip by the setting that decides about them."""
    pages = sizes.num_pages * page_bytes(model, sizes.page_size, itemsize, kernels)
    return {
        "weights": weight_count(model, num_chips, num_chips // sizes.num_lanes) * weight_itemsize,
        "pages.num_pages": pages // num_chips,
        "arena.num_rows": sizes.num_rows * model.text.row_width * itemsize,
        "max_running": sizes.max_running * model.text.vocab_size * _COUNT_BYTES,
    }


def _check_memory(parts: dict[str, int], memory_bytes: int) -> None:
    """Refuse sizes that a device cannot hold, before anything is allocated."""
    if sum(parts.values()) > memory_bytes:
        listed = ", ".join(f"{name} {size >> 20} MiB" for name, size in parts.items())
        largest = max(parts, key=lambda name: parts[name])
        remedy = "use a smaller model" if largest == "weights" else f"lower {largest}"
        raise ConfigError(
            f"a device has {memory_bytes >> 20} MiB and the settings ask for more: {listed}; "
            f"{remedy}"
        )


def _pages_that_fit(
    config: EngineConfig,
    model: ModelConfig,
    page_size: int,
    num_rows: int,
    on_cpu: bool,
    memory_bytes: int,
    itemsize: int,
    weight_itemsize: int,
    num_chips: int,
    num_lanes: int,
    kernels: Kernels,
) -> int:
    weights = weight_count(model, num_chips, num_chips // num_lanes)
    taken = weights * weight_itemsize + num_rows * model.text.row_width * itemsize
    budget = int(memory_bytes * config.memory_fraction) - taken
    if on_cpu:
        budget = min(budget, _CPU_KV_BYTES)
    pages = budget * num_chips // page_bytes(model, page_size, itemsize, kernels)
    if pages < 2:
        raise ConfigError(
            f"memory_fraction={config.memory_fraction} of {memory_bytes >> 20} MiB leaves no room "
            f"for KV pages beside {taken >> 20} MiB of weights and arena; raise it, lower "
            "arena.num_rows, or use a smaller model"
        )
    return min(pages, max(2, _CPU_KV_TOKENS // page_size)) if on_cpu else pages


_SAMPLE_IMAGES = ((224, 224), (448, 448), (640, 480), (1024, 768), (1280, 720), (1920, 1080))
"""Width and height of common pictures, for the padding that a ladder costs them."""


def describe(sizes: Sizes, packed: Callable[[int, int], int]) -> str:
    """Ladders, number of executables, and the padding of common pictures.

    Args:
        sizes: Of an engine.
        packed: (width, height) of a picture to the patches that it takes in a lane.
    """
    buckets = sizes.buckets
    lines = [
        f"step tokens   {' '.join(map(str, buckets.tokens))}",
        f"lane patches  {' '.join(map(str, buckets.patches))}",
        f"executables   {buckets.num_executables} (one a rung, for penalties, given rows, pruning)",
        f"pages         {sizes.num_pages} of {sizes.page_size} tokens",
        f"arena         {sizes.num_rows} rows",
        "",
        "picture     patches  bucket  padding",
    ]
    for width, height in _SAMPLE_IMAGES:
        used = packed(width, height)
        name = f"{width}x{height}"
        if used > buckets.patches[-1]:
            lines.append(f"{name:<11} {used:>7} refused: above the largest bucket")
            continue
        rung = buckets.lane_patches(used)
        lines.append(f"{name:<11} {used:>7} {rung:>7} {1 - used / rung:>8.1%}")
    return "\n".join(lines)
