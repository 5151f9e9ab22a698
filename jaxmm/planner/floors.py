"""The least time that a step can take: bytes, operations, talk between chips. Host only.

The roofline model (Williams, Waterman, Patterson, CACM 2009). Memory and matrix units work side by
side, so the longer of the two counts; what chips tell each other comes on top, since a layer waits
for it. Real steps take longer: attention is bound by vector work, small steps by latency.
"""

import dataclasses
from dataclasses import dataclass

from jaxmm.models.config import ModelConfig
from jaxmm.planner.chips import Chip
from jaxmm.sizes import attention_count, merger_count

HOP_SECONDS = 1e-6
"""From chip to chip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Seconds of one step by what bounds it."""

    memory: float
    """HBM."""
    matrix: float
    """Matrix units."""
    links: float
    """Collectives."""

    @property
    def seconds(self) -> float:
        return max(self.memory, self.matrix) + self.links

    @property
    def bound(self) -> str:
        """What the step waits for most."""
        parts = {"HBM": self.memory, "MXU": self.matrix, "ICI": self.links}
        return max(parts, key=lambda name: parts[name])


def sums_floor(chip: Chip, num_chips: int, num_sums: int, sum_bytes: float) -> float:
    """Seconds of all-reduces over chips: each byte goes out about twice, and waits for its hops."""
    if num_chips == 1:
        return 0.0
    sent = 2 * sum_bytes * (num_chips - 1) / num_chips / chip.link_bandwidth
    side: float = num_chips ** (1 / chip.dimensions)
    hops: float = 2 * chip.dimensions * max(1.0, side / 2)  # there and back along each axis
    return num_sums * max(sent, hops * HOP_SECONDS)


def residual_sums(model: ModelConfig, num_tokens: int, itemsize: int) -> tuple[int, int]:
    """Sums over chips that a language step needs, and bytes of each."""
    return 1 + 2 * model.text.num_layers, num_tokens * model.text.width * itemsize


def decode_floor(
    model: ModelConfig,
    chip: Chip,
    num_chips: int,
    *,
    num_requests: int,
    length: int,
    itemsize: int,
    links: float,
) -> Floor:
    """A decode step of `num_requests`, each with `length` tokens of KV.

    Args:
        model: With its KV heads spread over chips.
        links: Seconds of its collectives.
    """
    text = model.text
    kv = num_requests * length * text.kv_values * text.num_layers
    weights = _read_weights(model, num_requests)
    attended = 4 * text.num_layers * text.num_heads * text.head_channels * num_requests * length
    operations = 2 * num_requests * (_used_weights(model) + _head(model)) + attended
    return Floor(
        memory=(weights + kv) * itemsize / num_chips / chip.bandwidth,
        matrix=operations / num_chips / chip.flops,
        links=links,
    )


def extend_floor(
    model: ModelConfig,
    chip: Chip,
    num_chips: int,
    *,
    num_tokens: int,
    itemsize: int,
    links: float,
) -> Floor:
    """A step that extends one prompt of `num_tokens`, nothing of it cached."""
    text = model.text
    pairs = num_tokens * (num_tokens + 1) / 2
    attended = 4 * text.num_layers * text.num_heads * text.head_channels * pairs
    operations = 2 * num_tokens * _used_weights(model) + 2 * _head(model) + attended
    kv = num_tokens * text.kv_values * text.num_layers
    return Floor(
        memory=(_read_weights(model, num_tokens) + kv) * itemsize / num_chips / chip.bandwidth,
        matrix=operations / num_chips / chip.flops,
        links=links,
    )


def encode_floor(
    model: ModelConfig,
    chip: Chip,
    num_patches: int,
    itemsize: int,
    *,
    num_chips: int = 1,
    links: float = 0.0,
) -> Floor:
    """An encode of one picture of `num_patches`.

    Args:
        num_chips: Chips that it is split over; the others have pictures of their own.
        links: Seconds of its collectives.
    """
    vision = model.vision
    block = 4 * vision.width**2 + _vision_mlp(model)
    mergers = merger_count(model)
    weights = vision.depth * block + mergers
    num_full = len(vision.full_attention_layers) if vision.window_patches else vision.depth
    segment = vision.tile_side**2 or num_patches
    keys = num_full * segment + (vision.depth - num_full) * vision.window_patches
    operations = 2 * num_patches * (vision.depth * block + mergers / vision.merged_patches)
    operations += 4 * num_patches * keys * vision.width
    return Floor(
        memory=weights * itemsize / num_chips / chip.bandwidth,
        matrix=operations / num_chips / chip.flops,
        links=links,
    )


def _vision_mlp(model: ModelConfig) -> int:
    """Weights of one encoder layer's MLP: gated in the family that has windows."""
    vision = model.vision
    return (3 if vision.window_patches else 2) * vision.width * vision.mlp_width


def _head(model: ModelConfig) -> int:
    return model.text.width * model.text.vocab_size


def _used_weights(model: ModelConfig) -> int:
    """Weights of the layers that one token is multiplied by."""
    return _layer_weights(model, model.text.experts_per_token)


def _read_weights(model: ModelConfig, num_tokens: int) -> float:
    """Weights that a step reads, head included; of experts those that some token is expected to
    choose if all are equally likely."""
    text = model.text
    touched = 0.0
    if text.num_experts:
        untouched = (1 - text.experts_per_token / text.num_experts) ** num_tokens
        touched = text.num_experts * (1 - untouched)
    return _layer_weights(model, touched) + _head(model)


def _layer_weights(model: ModelConfig, num_experts: float) -> int:
    text = model.text
    whole = dataclasses.replace(text, num_kv_heads=text.stored_kv_heads, kv_copies=1)
    total = text.num_layers * float(attention_count(whole))
    for layer in range(text.num_layers):
        experts = num_experts * text.expert_width + text.shared_width
        total += 3 * text.width * (experts if text.has_experts(layer) else text.mlp_width)
    return round(total)
