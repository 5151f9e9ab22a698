"""What a model is: dimensions and token ids, and how they are read from config.json. Host only.

config.json comes in generations: text keys at the top level or under `text_config`, rope settings
as `rope_scaling` next to `rope_theta` or together in `rope_parameters`; a key that equals the
default of its transformers class may be missing, so each family passes those defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxmm.errors import ModelError
from jaxmm.models.json_files import read_json
from jaxmm.models.tensor_files import tensor_files

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Keys and values of all heads are made of one narrow row a token (arXiv:2405.04434, §2.1)."""

    rank: int
    """Channels that keys and values are made of."""
    nope_channels: int
    """Channels of a key that are not rotated."""
    rope_channels: int
    """Channels that are, the same for all heads."""
    value_channels: int

    @property
    def row_channels(self) -> int:
        """What is kept of a token in the place of keys and values."""
        return self.rank + self.rope_channels

    @property
    def query_channels(self) -> int:
        """Channels of a head's query, before it is led through the keys' projection."""
        return self.nope_channels + self.rope_channels


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """Layers that see only the last tokens, and turn their positions by a base of their own."""

    tokens: int
    """Keys up to its own that a token sees."""
    whole_layers: tuple[int, ...]
    """Layers that see all."""
    rope_theta: float

    def of_layer(self, layer: int) -> int | None:
        """Tokens that a layer sees at most; None: all."""
        return None if layer in self.whole_layers else self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """Dimensions of a text decoder."""

    vocab_size: int
    """Rows of the embedding; more than the tokenizer has ids."""
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_channels: int
    rms_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    """Frequencies turned by time, height, width; their sum is half the head channels."""
    tied: bool
    """The output head is the embedding."""
    kv_copies: int = 1
    """How often each KV head of the checkpoint stands; `num_kv_heads` counts all of them."""
    deepstack_levels: int = 0
    """Layers, from the first, after which image tokens get another level of their rows added."""
    num_experts: int = 0
    """0: every layer has one MLP."""
    experts_per_token: int = 0
    expert_width: int = 0
    dense_layers: tuple[int, ...] = ()
    """Layers with one MLP of `mlp_width` in a model that has experts."""
    shared_width: int = 0
    """Width of an MLP that every token takes beside its experts; 0: there is none."""
    expert_scores: Literal["softmax", "sigmoid"] = "softmax"
    """What the router makes of its logits."""
    expert_bias: bool = False
    """Experts are chosen by score plus a bias, and weighted by the score alone."""
    expert_shares: bool = True
    """The scores of a token's experts are divided by their sum."""
    expert_scale: float = 1.0
    """What the experts' output is multiplied by."""
    latent: LatentAttention | None = None
    """The KV cache holds one row of `head_channels` a token, as if of one KV head, and no values:
    they are the row's first channels. None: keys and values."""

    both_ways: bool = False
    """Tokens of an item see each other, later ones too: an item is never cut, and read from the
    prefix cache whole or not at all."""
    sliding: SlidingWindow | None = None
    """None: every layer sees all."""
    rope_factor: float = 1.0
    """What positions are divided by, in layers that see all."""
    score_divisor: float = 0.0
    """Scores are divided by its root; 0: by that of the head channels."""

    @property
    def kv_values(self) -> int:
        """Values that a layer keeps of one token."""
        return self.num_kv_heads * self.head_channels * (1 if self.latent else 2)

    @property
    def stored_kv_heads(self) -> int:
        """KV heads of the checkpoint."""
        return self.num_kv_heads // self.kv_copies

    @property
    def row_width(self) -> int:
        """Values of an arena row: one embedding, and one more for each deepstack level."""
        return self.width * (1 + self.deepstack_levels)

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer is a choice among experts."""
        return self.num_experts > 0 and layer not in self.dense_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Dimensions of a vision encoder and the normalisation of its pixels."""

    depth: int
    width: int
    num_heads: int
    mlp_width: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    """Patches by side of the square that becomes one row."""
    in_channels: int
    out_width: int
    """Width of a row, that of the text decoder."""
    window_patches: int
    """Patches of a full attention window, a square number; 0: no windows."""
    full_attention_layers: tuple[int, ...]
    """Layers that attend over the whole image; the others attend over windows."""
    image_mean: tuple[float, ...]
    """Per channel, for pixels scaled to [0, 1]."""
    image_std: tuple[float, ...]
    position_side: int = 0
    """Side of the square table of learned positions; 0: the family has none."""
    deepstack_layers: tuple[int, ...] = ()
    """Layers whose output becomes one more level of the rows."""
    tile_side: int = 0
    """Patches by side of the square tiles that pictures are cut into; 0: they are taken whole."""
    overview_first: bool = True
    """With tiles: the rows of the whole picture stand before those of its tiles."""
    picture_side: int = 0
    """Patches by side of every picture; 0: pictures have sizes of their own."""
    pooled: bool = False
    """The patches of a row are averaged, not laid side by side."""

    @property
    def head_channels(self) -> int:
        return self.width // self.num_heads

    @property
    def patch_values(self) -> int:
        """Values U of one patch of one frame."""
        return self.in_channels * self.patch_size**2

    @property
    def merged_patches(self) -> int:
        """Patches that become one row."""
        return self.merge_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything about a checkpoint that the engine has to know before its weights."""

    family: str
    text: TextConfig
    vision: VisionConfig
    image_token_id: int
    video_token_id: int
    """-1 for a family that takes no videos; so with the two ids that follow."""
    vision_start_token_id: int
    vision_end_token_id: int
    eos_token_ids: tuple[int, ...]
    max_position: int
    """Positions that the decoder was trained for."""


def integer(raw: Raw, key: str, default: int, *, least: int = 1) -> int:
    """An integer of config.json, from `least` up; a missing key or null gives the default."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ModelError(f"config.json: {key}={value!r} is not an integer from {least} up")
    return value


def number(raw: Raw, key: str, default: float) -> float:
    """A number of config.json; a missing key or null gives the default."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"config.json: {key}={value!r} is not a number")
    return float(value)


def integers(raw: Raw, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """A list of integers of config.json; a missing key or null gives the default."""
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, list) or not all(type(v) is int for v in value):
        raise ModelError(f"config.json: {key}={value!r} is not a list of integers")
    return tuple(value)


def require(raw: Raw, key: str, allowed: tuple[Any, ...]) -> None:
    """Refuse a setting that changes the model's arithmetic in a way that jaxmm does not have."""
    if key in raw and raw[key] not in allowed:
        choices = " or ".join(repr(value) for value in allowed)
        raise ModelError(f"config.json: {key}={raw[key]!r} is not supported; only {choices} is")


def read_text_config(directory: Path, raw: Raw) -> TextConfig:
    """Read a Qwen2 decoder from either generation of config.json."""
    text = raw.get("text_config") or raw
    require(raw, "quantization_config", (None,))
    require(text, "hidden_act", ("silu",))
    require(text, "use_sliding_window", (False, None))
    width = integer(text, "hidden_size", 8192)
    num_heads = integer(text, "num_attention_heads", 64)
    # null in the file means as many as query heads; only a missing key has the class default
    num_kv_heads = integer({"num_key_value_heads": 8, **text}, "num_key_value_heads", num_heads)
    if width % num_heads:
        raise ModelError(f"config.json: hidden_size={width} is no multiple of {num_heads} heads")
    check_heads(num_heads, num_kv_heads)
    theta, section = read_rope(text, head_channels=width // num_heads)
    return TextConfig(
        vocab_size=integer(text, "vocab_size", 152064),
        width=width,
        mlp_width=integer(text, "intermediate_size", 29568),
        num_layers=integer(text, "num_hidden_layers", 80),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_channels=width // num_heads,
        rms_eps=number(text, "rms_norm_eps", 1e-5),
        rope_theta=theta,
        mrope_section=section,
        tied=is_tied(directory, raw, text),
    )


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Refuse query heads that cannot share key and value heads evenly."""
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: {num_heads} query heads are no multiple of {num_kv_heads} "
            "key and value heads"
        )


def read_rope(
    text: Raw,
    head_channels: int,
    *,
    default_theta: float = 1e6,
    default_section: tuple[int, int, int] = (16, 24, 24),
) -> tuple[float, tuple[int, int, int]]:
    """Theta and sections, from `rope_parameters` or from `rope_scaling` and `rope_theta`."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    for key in ("type", "rope_type"):
        require(rope, key, ("mrope", "default"))
    theta = number(rope, "rope_theta", number(text, "rope_theta", default_theta))
    section = integers(rope, "mrope_section", default_section)
    if len(section) != 3 or 2 * sum(section) != head_channels:
        raise ModelError(
            f"config.json: mrope_section={list(section)} is not three numbers whose sum is "
            f"{head_channels // 2}, half of the {head_channels} channels of a head"
        )
    return theta, (section[0], section[1], section[2])


def is_tied(directory: Path, raw: Raw, text: Raw) -> bool:
    """Whether the head is the embedding. The files decide: the flag is wrong in some re-uploads."""
    names = tensor_files(directory)
    if names:
        return "lm_head.weight" not in names
    return bool(raw.get("tie_word_embeddings") or text.get("tie_word_embeddings"))


def read_eos_token_ids(directory: Path, raw: Raw) -> tuple[int, ...]:
    """Ids that end an answer: generation_config.json's, else config.json's."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    for source in (generation, raw, raw.get("text_config") or {}):
        value = source.get("eos_token_id")
        if value is not None:
            return (value,) if isinstance(value, int) else tuple(value)
    return (151645,)


def read_model_config(
    directory: Path,
    text: TextConfig,
    vision: VisionConfig,
    raw: Raw,
    *,
    default_positions: int = 32768,
) -> ModelConfig:
    """A whole model, from its two parts and the keys that all families have alike."""
    if vision.width % vision.num_heads:
        raise ModelError(
            f"config.json: vision width {vision.width} is no multiple of {vision.num_heads} heads"
        )
    if vision.out_width != text.width:
        raise ModelError(
            f"config.json: the vision encoder gives rows of {vision.out_width} values, "
            f"the decoder takes {text.width}"
        )
    return ModelConfig(
        family=str(raw["model_type"]),
        text=text,
        vision=vision,
        image_token_id=integer(raw, "image_token_id", 151655, least=0),
        video_token_id=integer(raw, "video_token_id", 151656, least=0),
        vision_start_token_id=integer(raw, "vision_start_token_id", 151652, least=0),
        vision_end_token_id=integer(raw, "vision_end_token_id", 151653, least=0),
        eos_token_ids=read_eos_token_ids(directory, raw),
        max_position=integer(
            raw.get("text_config") or raw, "max_position_embeddings", default_positions
        ),
    )


CLIP_NORMALISATION = (
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
)
"""Mean and standard deviation by channel (arXiv:2103.00020)."""


def read_normalisation(
    table: Raw | None,
    default: tuple[tuple[float, ...], tuple[float, ...]] = CLIP_NORMALISATION,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`image_mean` and `image_std` of a processor's settings; the default if they do not say."""
    raw, (mean, std) = table or {}, default
    return tuple(raw.get("image_mean") or mean), tuple(raw.get("image_std") or std)
