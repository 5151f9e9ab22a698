"""Settings of the HTTP server; the engine's are one field. Host only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxmm.config import EngineConfig, load_config
from jaxmm.errors import ConfigError

ENGINE_PREFIX = "engine."


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """Pictures that the server gets from URLs. `engine.media` limits what they may be."""

    schemes: tuple[str, ...] = ("http", "https")
    """URL schemes that are fetched; none: data URIs alone. Redirects are held to them too."""
    allowed_hosts: tuple[str, ...] = ("*",)
    """Hosts that may be asked: `name`, `name:port`, `.domain` for all below it, `*` for all.
    Private, loopback and link-local addresses are refused unless `name` or `name:port` is here."""
    timeout_seconds: float = 20.0
    """Time for one picture, redirects included."""
    max_redirects: int = 5
    """Redirects followed for one picture; each target is checked like the first."""
    max_concurrent: int = 64
    """Pictures that are fetched at once; the others wait within their time."""
    max_concurrent_per_host: int = 16
    """The same for one host and port."""
    file_folder: str = ""
    """Folder below which `file://` URLs are read; empty: none is. Where a link leads, and not where
    it stands, must be below it."""

    def __post_init__(self) -> None:
        if self.timeout_seconds <= 0:
            raise ConfigError(
                f"fetch.timeout_seconds={self.timeout_seconds} is not above 0; use 20"
            )
        if self.max_redirects < 0:
            raise ConfigError(f"fetch.max_redirects={self.max_redirects} is negative; use 0")
        for name in ("max_concurrent", "max_concurrent_per_host"):
            if getattr(self, name) < 1:
                raise ConfigError(f"fetch.{name}={getattr(self, name)} is below 1")
        if self.file_folder and not Path(self.file_folder).is_dir():
            raise ConfigError(f"fetch.file_folder={self.file_folder!r} is not a folder")
        for scheme in self.schemes:
            if scheme not in ("http", "https"):
                raise ConfigError(f"fetch.schemes has {scheme!r}; only http and https are fetched")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything that the server can be told."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0: every interface."""
    port: int = 8000
    """0: any free port."""
    model_name: str = ""
    """Name that requests call the model by; empty: the engine's."""
    max_request_bytes: int = 64 << 20
    """Largest request body, and the most that one request may have fetched in all."""
    max_requests: int = 2048
    """Requests in progress, those that wait included; one more is refused with 429."""
    max_held_bytes: int = 4 << 30
    """Bodies and pictures of all requests in progress together; more is refused with 429."""
    receive_seconds: float = 60.0
    """Time for a request's body to arrive."""
    keep_alive_seconds: float = 620.0
    """Time that a connection is kept for another request: longer than what stands before the server
    keeps it (Google's load balancers: 600 s), or requests are sent as it is being closed."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys, one of which a request must carry as `Authorization: Bearer KEY`: `key` or
    `tenant:key`; none: everybody is answered. Tenants never share a cache entry; an unnamed key is
    a tenant of its own. Flags are seen by all users of a machine: prefer the variable or the
    file."""
    api_key_file: str = ""
    """File with such keys, one a line."""
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys, of the same form, that may also empty the caches (`/flush_cache`), which all tenants
    share; with `api_keys` and none of these, nobody may. Without either, everybody may."""
    default_max_tokens: int = 2048
    """Length of an answer when the request gives none; the context ends it earlier."""
    deadline_seconds: float = 600.0
    """Time that the engine may spend on one request, queueing included."""
    drain_seconds: float = 30.0
    """Time that running requests have to end after SIGTERM."""
    drain_delay_seconds: float = 0.0
    """Time after SIGTERM in which new requests are still taken, while `/ready` says 503: what a
    load balancer needs to notice."""
    step_timeout_seconds: float = 300.0
    """A step of the engine that takes longer ends the process; 0: none does. Compiling counts."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What the process logs."""
    log_format: Literal["text", "json"] = "text"
    """Log lines for people, or one JSON object each; prompts and pictures are in neither."""
    trace_endpoint: str = ""
    """Where OpenTelemetry traces are sent by OTLP over HTTP, `http://collector:4318/v1/traces`;
    empty: none are made. Needs the extra `trace`
    (`pip install -e ".[trace]"`)."""
    fetch: FetchConfig = field(default_factory=FetchConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} is outside [0, 65535]")
        positive = ("max_request_bytes", "max_requests", "max_held_bytes", "receive_seconds")
        others = ("keep_alive_seconds", "default_max_tokens", "deadline_seconds")
        for name in (*positive, *others):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} is not above 0")
        for name in ("drain_seconds", "drain_delay_seconds", "step_timeout_seconds"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative; use 0")


def load_server_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> ServerConfig:
    """Build the settings, later wins: defaults, a TOML file, `JAXMM_*` variables, overrides.

    Variables name the engine's fields without `ENGINE_`, as for an engine alone: `JAXMM_MODEL`.

    Args:
        path: TOML file with the server's fields and the tables `[fetch]`, `[engine]`, …
        overrides: Dotted name to value, `"engine.pages.page_size": 16`.

    Raises:
        ConfigError: An unknown key or a value that cannot work.
    """
    return load_config(ServerConfig, path, overrides, ENGINE_PREFIX)
