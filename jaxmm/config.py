"""All settings of the engine, their defaults, and where they are read from. Host only.

`load_config` merges, later wins: defaults, a TOML file, `JAXMM_*` variables, keyword overrides.
A zero in a size means: derived when the engine starts, from the device's memory and the model.
"""

import dataclasses
import difflib
import logging
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxmm.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_EXPIRE_SECONDS = 1e7
"""Of what a conversation keeps; a system's wait has a bound too."""
_VARIABLES = "JAXMM_"


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _check(config: Any, prefix: str, **ranges: tuple[float, float]) -> None:
    """Refuse values of a wrong type, and numbers that cannot be meant.

    Args:
        config: A config dataclass, as made.
        prefix: Of its settings' names.
        **ranges: Lowest and highest value of every number in it; 0 is allowed besides where it is
            the default.
    """
    for f in dataclasses.fields(config):
        name, value, kind = prefix + f.name, getattr(config, f.name), typing.cast(Any, f.type)
        if typing.get_origin(kind) is Literal:
            choices = typing.get_args(kind)
            _require(value in choices, f"{name}={value!r} is not one of {', '.join(choices)}")
        elif kind not in (int, float):
            _require(isinstance(value, kind), f"{name}={value!r} is not of type {kind.__name__}")
        else:
            _check_number(name, value, kind, f.default, *ranges[f.name])


def _check_number(name: str, value: Any, kind: type, default: Any, low: float, high: float) -> None:
    accepted = (int,) if kind is int else (int, float)
    ok = isinstance(value, accepted) and not isinstance(value, bool)
    _require(ok, f"{name}={value!r} is not of type {kind.__name__}")
    if low <= value <= high or value == default == 0:  # false for NaN
        return
    remedy = "0 derives it" if default == 0 else f"the default is {default}"
    raise ConfigError(f"{name}={value} is outside [{low}, {high}]; {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageConfig:
    """Paged KV cache."""

    page_size: int = 0
    """Tokens per page, a power of two from 4 up; 0: 64 on CPU, 128 elsewhere."""
    num_pages: int = 0
    """Pages in the pool; 0: what `memory_fraction` leaves after weights and arena, on a CPU at most
    2 GiB and 131072 tokens."""
    prefix_cache: bool = True
    """Keep finished prefixes for later requests."""

    def __post_init__(self) -> None:
        _check(self, "pages.", page_size=(4, 1024), num_pages=(2, 1 << 24))
        _require(
            self.page_size == 0 or _power_of_two(self.page_size),
            f"pages.page_size={self.page_size} is not a power of two; use 64",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaConfig:
    """Encoded image rows kept on the device."""

    num_rows: int = 0
    """Rows in the arena; 0: room for four of the largest items, at least 16384."""
    page_rows: int = 16
    """Rows taken or freed together, a power of two."""

    def __post_init__(self) -> None:
        _check(self, "arena.", num_rows=(1, 1 << 24), page_rows=(1, 4096))
        _require(
            _power_of_two(self.page_rows),
            f"arena.page_rows={self.page_rows} is not a power of two; use 16",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig:
    """Static sizes. Limits are rounded up to a rung; everything is compiled at start."""

    max_step_tokens: int = 0
    """Tokens of one step, decodes and chunks together; 0: 512 on CPU, 2048 on TPU."""
    max_patches_per_step: int = 0
    """Patches that a chip encodes in one step at most; 0: the largest image's."""
    min_step_tokens: int = 1
    """Lowest rung of step tokens."""
    min_lane_patches: int = 0
    """Lowest rung of encode patches; 0: 256."""
    rehearse: bool = True
    """On a CPU: run each small step once while there is nothing else to do. XLA prepares its
    products at a step's first run, for which the first request of that size would wait up to
    0.3 s; hardly at all where kernels that numba compiles take their place, for weights in
    bfloat16."""

    def __post_init__(self) -> None:
        _check(
            self,
            "buckets.",
            max_step_tokens=(1, 1 << 16),
            max_patches_per_step=(1, 1 << 20),
            min_step_tokens=(1, 1 << 16),
            min_lane_patches=(1, 1 << 20),
        )
        for low, high in (
            ("min_step_tokens", "max_step_tokens"),
            ("min_lane_patches", "max_patches_per_step"),
        ):
            least, most = getattr(self, low), getattr(self, high)
            _require(
                least <= most or most == 0,
                f"buckets.{low}={least} is above buckets.{high}={most}; lower it",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Limits and processing of pictures and videos."""

    max_bytes: int = 32 << 20
    """Encoded size of one picture or video, bytes."""
    max_decode_pixels: int = 100_000_000
    """Width times height before resizing, checked before decoding."""
    min_pixels: int = 0
    """Overrides the processor's lower pixel limit; 0: the checkpoint's."""
    max_pixels: int = 0
    """Overrides the processor's upper pixel limit; 0: the checkpoint's, at most 1605632 on CPU, and
    elsewhere what `memory_fraction` leaves a chip room to encode."""
    max_items: int = 32
    """Images and videos of one request."""
    video_fps: float = 2.0
    """Frames of a second of video that are looked at, where the request does not say."""
    max_frames: int = 768
    """Frames of one video that are looked at."""
    max_video_pixels: int = 0
    """Pixels of all frames of a video together, after resizing; 0: the checkpoint's, at most four
    times the largest picture's on CPU."""
    video_pruning_rate: float = 0.0
    """Share of a video's tokens that is dropped, those that change least from one time step to the
    next, where the request does not say; 0: none (EVS, arXiv:2510.14624)."""
    workers: int = 0
    """Decoding processes; 0: one for each two cores, at least one."""
    timeout_seconds: float = 30.0
    """Time for decoding one picture or video; its process is then replaced."""
    worker_memory_bytes: int = 0
    """Memory that a decoding process may take for one picture; 0: 16 bytes for each pixel of
    `max_decode_pixels`, and some for the rest."""
    quarantine_seconds: float = 600.0
    """Time for which a file is refused that ended its decoding process; 0: not at all."""
    map_entries: int = 4096
    """Files whose size and identity are remembered, so that a repeat is not decoded."""

    def __post_init__(self) -> None:
        _check(
            self,
            "media.",
            max_bytes=(1, 1 << 32),
            max_decode_pixels=(1, 1 << 32),
            min_pixels=(1, 1 << 32),
            max_pixels=(1, 1 << 32),
            max_items=(1, 10_000),
            video_fps=(0.01, 60.0),
            max_frames=(1, 10_000),
            max_video_pixels=(1, 1 << 32),
            video_pruning_rate=(0.0, 0.99),
            workers=(1, 256),
            timeout_seconds=(0.1, 3600.0),
            worker_memory_bytes=(64 << 20, 1 << 44),
            quarantine_seconds=(0.0, 1e6),
            map_entries=(0, 1 << 24),
        )
        _require(
            self.min_pixels <= self.max_pixels or self.max_pixels == 0,
            f"media.min_pixels={self.min_pixels} is above media.max_pixels={self.max_pixels}; "
            "lower it",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PodConfig:
    """Several hosts that serve one model together."""

    silence_seconds: float = 8.0
    """After so long without a word a host counts as lost, and the pod ends."""
    step_seconds: float = 60.0
    """Time that a host may take for a step; one that takes longer ends the pod."""

    def __post_init__(self) -> None:
        _check(self, "pod.", silence_seconds=(1.0, 3600.0), step_seconds=(1.0, 3600.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """What conversations (`Engine.session`) keep between their turns."""

    max_kept: int = 64
    """Conversations that keep something; beyond it the one unused longest keeps nothing more."""
    page_share: float = 0.25
    """Share of the pages that all of them keep together, as long as no request needs the room."""
    max_bytes: int = 1 << 30
    """Host memory for the processed pictures and videos of all of them together."""
    expire_seconds: float = 600.0
    """Time from the end of a turn until it gives everything back, where it names none."""

    def __post_init__(self) -> None:
        _check(
            self,
            "sessions.",
            max_kept=(1, 1 << 16),
            page_share=(0.0, 1.0),
            max_bytes=(0, 1 << 44),
            expire_seconds=(0.0, MAX_EXPIRE_SECONDS),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that the engine can be told."""

    model: str = ""
    """Directory of a Hugging Face checkpoint, or what `jaxmm convert` wrote there or at a gs://
    address; empty: the small model that jaxmm ships."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights and KV; auto: float32 on CPU, bfloat16 elsewhere."""
    kernels: Literal["auto", "pallas", "portable"] = "auto"
    """Implementation of attention and row moves; auto: Pallas on TPUs, portable elsewhere, with
    kernels that numba compiles on a CPU."""
    tensor_parallel: int = 1
    """Chips that the language model is split over; its heads, MLP and vocabulary must divide by it.
    0: as many as there are and do."""
    data_parallel: int = 1
    """Replicas of the model, each on `tensor_parallel` chips, with pages and caches of its own. A
    request goes where most of its prompt is cached, weighed against the load. 0: as many as there
    are chips for."""
    encoder_parallel: Literal["lanes", "model"] = "lanes"
    """How the chips of a replica share pictures; lanes: each encodes whole ones, with the whole
    encoder; model: all encode the same, each with its heads and MLP columns, which takes less
    memory, and less time for a picture that comes alone."""
    coordinator: str = ""
    """`host:port` of process 0, port free; empty: what Cloud TPU or GKE say, if they do."""
    num_processes: int = 0
    """Processes of the pod, with `coordinator`; 1: never look for others."""
    process_id: int = 0
    """Which of them this is, from 0 up, with `coordinator`."""
    max_model_len: int = 0
    """Tokens of prompt and output together; 0: the checkpoint's limit, at most 32768."""
    max_running: int = 0
    """Requests that decode together; 0: 32 on CPU, 128 elsewhere."""
    max_waiting: int = 1024
    """Requests queued; one more is refused with Overloaded."""
    memory_fraction: float = 0.6
    """Share of the device's memory for weights, KV pages and arena; pictures are encoded in the
    rest."""
    on_recompile: Literal["log", "raise"] = "log"
    """What a compile after warm-up does."""
    compile_cache_dir: str = "~/.cache/jaxmm/compiled"
    """Where compiled steps are kept between starts; empty: nowhere."""
    progress: bool = True
    """Progress bars for loading, warm-up and batches."""
    pages: PageConfig = field(default_factory=PageConfig)
    arena: ArenaConfig = field(default_factory=ArenaConfig)
    buckets: BucketConfig = field(default_factory=BucketConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    pod: PodConfig = field(default_factory=PodConfig)
    sessions: SessionConfig = field(default_factory=SessionConfig)

    def __post_init__(self) -> None:
        _check(
            self,
            "",
            tensor_parallel=(0, 1024),
            data_parallel=(0, 1024),
            max_model_len=(2, 1 << 24),
            max_running=(1, 4096),
            max_waiting=(1, 1 << 20),
            memory_fraction=(0.01, 1.0),
            num_processes=(0, 4096),
            process_id=(0, 4095),
        )
        self._check_pod()

    def _check_pod(self) -> None:
        if not self.coordinator:
            _require(
                self.num_processes in (0, 1) and self.process_id == 0,
                f"num_processes={self.num_processes} and process_id={self.process_id} need a "
                "coordinator; give host:port of process 0",
            )
            return
        host, _, port = self.coordinator.rpartition(":")
        _require(
            bool(host) and port.isdigit(),
            f"coordinator={self.coordinator!r} is not of the form host:port",
        )
        _require(
            0 <= self.process_id < self.num_processes,
            f"process_id={self.process_id} is outside [0, num_processes={self.num_processes})",
        )


_Config = typing.TypeVar("_Config")


def load_config(
    cls: type[_Config],
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    implied: str = "",
) -> _Config:
    """Build a config dataclass from a TOML file, `JAXMM_*` variables and overrides.

    Args:
        cls: A config dataclass; nested ones are tables (`[pages]`) and dotted keys.
        path: TOML file, or None.
        overrides: Dotted name to value (`"pages.page_size": 16`); strings are converted.
        implied: Beginning of dotted names that variables leave out.

    Raises:
        ConfigError: An unknown key (one like it is named) or a value of a wrong type.
    """
    values = _flatten(_read_toml(path)) if path is not None else {}
    values |= environment(cls, implied)
    values |= dict(overrides or {})
    return _build(cls, values, "")


def field_names(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name of every setting of a config dataclass, mapped to its type."""
    names: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        kind = hints[f.name]
        if dataclasses.is_dataclass(kind):
            names |= field_names(typing.cast(type, kind), f"{prefix}{f.name}.")
        else:
            names[prefix + f.name] = kind
    return names


def _read_toml(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {str(path)!r} does not exist") from None
    except OSError as e:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"config file {str(path)!r} is not valid TOML: {e}") from e


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def environment(cls: type, implied: str = "") -> dict[str, str]:
    """Settings of a config dataclass found in `JAXMM_*` variables, by dotted name.

    Warns of variables that are none of them, and names the nearest. They are no error: Kubernetes
    makes such variables of its own for a service that is called jaxmm, as `JAXMM_SERVICE_HOST`.
    """
    names = {_variable(name.removeprefix(implied)): name for name in field_names(cls)}
    given = {key: value for key, value in os.environ.items() if key.startswith(_VARIABLES)}
    for key in sorted(given.keys() - names.keys()):
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)[0]
        logger.warning(
            "variable ignored, no setting of %s name=%s nearest=%s", cls.__name__, key, near
        )
    return {names[key]: value for key, value in given.items() if key in names}


def _variable(name: str) -> str:
    return _VARIABLES + name.replace(".", "_").upper()


def _build(cls: type[_Config], values: Mapping[str, Any], prefix: str) -> _Config:
    known = field_names(cls)
    for name in values:
        if name not in known:
            within = [setting for setting in known if setting.endswith(f".{name}")]
            near = within or difflib.get_close_matches(name, known, n=1)
            hint = f"the nearest is {near[0]}" if near else f"{cls.__name__} has none like it"
            raise ConfigError(f"unknown setting {prefix}{name!s}; {hint}")
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for f in dataclasses.fields(typing.cast(Any, cls)):
        kind = hints[f.name]
        if dataclasses.is_dataclass(kind):
            start = f"{f.name}."
            inner = {k.removeprefix(start): v for k, v in values.items() if k.startswith(start)}
            if inner:
                arguments[f.name] = _build(typing.cast(type, kind), inner, prefix + start)
        elif f.name in values:
            arguments[f.name] = _convert(prefix + f.name, values[f.name], kind)
    return cls(**arguments)


def _convert(name: str, value: Any, kind: Any) -> Any:
    """Turn a TOML value or a string into the type of a setting."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        _require(value in choices, f"{name}={value!r} is not one of {', '.join(choices)}")
        return value
    if typing.get_origin(kind) is tuple:
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(_convert(name, p, typing.get_args(kind)[0]) for p in parts)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if kind is bool and isinstance(value, str):
        lowered = value.lower()
        truth = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        _require(lowered in truth, f"{name}={value!r} is not true or false")
        return truth[lowered]
    if kind in (int, float) and isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            raise ConfigError(f"{name}={value!r} is not a number") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{name}={value!r} is not of type {kind.__name__}")
    return value
