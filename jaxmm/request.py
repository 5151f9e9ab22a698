"""What a caller asks for and what it gets: sampling parameters, requests, results. Host only."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from jaxmm.errors import SamplingError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 16


def _check(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise SamplingError(f"{name}={value!r} is not a number", name.split()[0])
    above = value > low if open_low else value >= low
    if not (above and value <= high):  # false for NaN
        bracket = "(" if open_low else "["
        message = f"{name}={value} is outside {bracket}{low}, {high}]"
        raise SamplingError(message, name.split()[0])


def _check_whole(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise SamplingError(f"{name}={value!r} is not a whole number", name.split()[0])
    _check(name, value, low, high)


def _check_list(name: str, value: Sequence[Any]) -> None:
    if not isinstance(value, (list, tuple)):
        raise SamplingError(f"{name}={value!r} is not a list or a tuple", name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. The defaults are greedy."""

    max_tokens: int = 128
    min_tokens: int = 0
    """End-of-text and stop ids cannot be sampled before this many tokens."""
    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens seen so far (arXiv:1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time it is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    """Fixes the draw: same seed, same prompt, same tokens, whatever else is served."""
    logprobs: int | None = None
    """None: no logprobs; n: the chosen token's and the n most likely ones, 0 to 20."""
    stop: tuple[str, ...] = ()
    """Strings that end the output and are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    grammar: str | None = None
    """The output must match this grammar (llguidance's Lark dialect or JSON form); for a JSON
    schema give `jaxmm.json_grammar(schema)`. It ends where nothing can follow."""
    ignore_eos: bool = False
    n: int = 1
    """Completions to make of the prompt."""

    def __post_init__(self) -> None:
        _check_whole("max_tokens", self.max_tokens, 1, 1 << 30)
        _check_whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check("temperature", self.temperature, 0.0, 100.0)
        _check_whole("top_k", self.top_k, 0, 1 << 30)
        _check("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_whole("n", self.n, 1, 128)
        if self.seed is not None:
            _check_whole("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.logit_bias, Mapping):
            message = f"logit_bias={self.logit_bias!r} does not map ids to numbers"
            raise SamplingError(message, "logit_bias")
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise SamplingError(
                f"logit_bias has {len(self.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}",
                "logit_bias",
            )
        for token, bias in self.logit_bias.items():
            _check_whole("logit_bias token", token, 0, 1 << 30)
            _check(f"logit_bias[{token}]", bias, -100.0, 100.0)
        # lists are taken too; the engine's own must not change under it
        _check_list("stop", self.stop)
        _check_list("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise SamplingError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries; "
                f"the limit is {MAX_STOP_TOKEN_IDS}",
                "stop_token_ids",
            )
        for token in self.stop_token_ids:
            _check_whole("stop_token_ids entry", token, 0, 1 << 30)
        if self.grammar is not None and not isinstance(self.grammar, str):
            message = "grammar is not a string; give json_grammar(schema) for a schema"
            raise SamplingError(message, "grammar")
        if not all(isinstance(s, str) for s in self.stop):
            raise SamplingError(f"stop={self.stop!r} is not a tuple of strings", "stop")
        if any(not s for s in self.stop):
            raise SamplingError("stop contains an empty string", "stop")

    @property
    def changes_logits(self) -> bool:
        """Penalties or a bias are set: the request's history matters to its logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one generated token, and of the most likely ones in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    image_tokens: int
    video_tokens: int = 0
    cached_tokens: int
    """Prompt tokens read from the prefix cache."""
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished answer (one of `n`)."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What `generate` returns for one prompt. The first completion's fields are at hand here."""

    id: str
    completions: tuple[Completion, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.completions[0].logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one step adds to one completion; `text` may be empty while a character is unfinished."""

    id: str
    index: int
    """Which of the request's `n` completions."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    """Usage so far of the whole request; always set on the delta that ends a completion."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embeddings:
    """A picture that was encoded already, by the encoder of the same checkpoint."""

    rows: Any
    """float[M, D]: one row for each of the picture's tokens, in their order; D is the width of the
    text embeddings, times one more than the levels of models with deepstack. Any float type; taken
    as float32."""
    grid_thw: tuple[int, int, int]
    """Patches by (time, height, width), before merging, as the image processor gives it."""


ImageSource = bytes | Path | Embeddings | Any
"""Encoded bytes, a path, a PIL image, a uint8[H, W, 3] array, or finished rows."""


VideoSource = bytes | Path | Sequence[ImageSource] | Any
"""An encoded file (MP4, WebM, GIF), a path, a list of frames, or a uint8[T, H, W, 3] array."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One request as a caller states it; exactly one of `messages`, `text`, `token_ids` is set."""

    id: str
    messages: Sequence[Mapping[str, Any]] | None = None
    """Chat turns: `{"role": str, "content": str | [part, …]}`; a part is
    `{"type": "text", "text": str}`, `{"type": "image"}` or `{"type": "video"}`; the k-th image
    part is `images[k]`, the k-th video part `videos[k]`. An assistant's turn may have
    `tool_calls`, and a turn of role `tool` answers one."""
    tools: Sequence[Mapping[str, Any]] = ()
    """What the messages say that the model may call, `{"type": "function", "function": {"name":
    str, "description": str, "parameters": JSON schema}}`; `jaxmm.host.tools.tool_grammar` holds
    the answer to it."""
    text: str | None = None
    """Raw prompt, no template and no images."""
    token_ids: Sequence[int] | None = None
    """Raw prompt ids; with images and videos, one placeholder id for each, or as many as it has
    tokens, as the Qwen models' own processors write them."""
    images: tuple[ImageSource, ...] = ()
    videos: tuple[VideoSource, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    salt: str = ""
    """Tenant: caches are shared only between requests of equal salt."""
    mm_hashes: tuple[str, ...] | None = None
    """Hex hashes that the caller gives its images and videos, one each in the order of their parts;
    a hint for routing and caching."""
    min_pixels: int | None = None
    max_pixels: int | None = None
    """Pixel limits of this request's images, within the server's own; of a frame of its videos the
    upper one."""
    fps: float | None = None
    """Frames of a second of video that are looked at; of a list of frames, how many a second they
    are. None: the server's `media.video_fps`."""
    num_frames: int | None = None
    """Frames of each video that are looked at, evenly spread, instead of `fps`."""
    video_pruning_rate: float | None = None
    """Share of each video's tokens that is dropped, those that change least from one time step to
    the next, 0 to below 1. None: the server's `media.video_pruning_rate`."""
    keep: Any = None
    """The conversation that it is a turn of; set by `Session`."""
