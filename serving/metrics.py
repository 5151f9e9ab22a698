"""GET /metrics: what Prometheus reads. Names are stable; docs/metrics.md lists them. Host only."""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxmm.request import Delta, Request
from jaxmm.stats import ReplicaStats
from serving.engine import ServedEngine
from serving.worker import Streams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """The engine's counters, and the times that its callers see."""

    def __init__(self, engine: ServedEngine) -> None:
        """Watch an engine; `TimedStreams` tells the times."""
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._first = Histogram(
            "jaxmm_time_to_first_token_seconds",
            "From the engine's taking a request to its first token.",
            buckets=_FIRST,
            registry=self._registry,
        )
        self._between = Histogram(
            "jaxmm_inter_token_seconds",
            "Between two tokens of one completion.",
            buckets=_BETWEEN,
            registry=self._registry,
        )
        self._whole = Histogram(
            "jaxmm_request_seconds",
            "From the engine's taking a request to its end.",
            buckets=_FIRST,
            registry=self._registry,
        )
        self._completions = Counter(
            "jaxmm_completions",
            "Completions by how they ended.",
            ("finish_reason",),
            registry=self._registry,
        )

        self._lag = Histogram(
            "jaxmm_event_loop_lag_seconds",
            "How late the server's event loop was, looked at every 10 ms.",
            buckets=_BETWEEN,
            registry=self._registry,
        )

    def observe_lag(self, seconds: float) -> None:
        """Count one look at the event loop."""
        self._lag.observe(seconds)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)

    def observe_delta(self, delta: Delta, start: float, last: dict[int, float]) -> None:
        """Count what a step added to a request.

        Args:
            delta: What it added.
            start: When the engine took the request.
            last: When each of its completions was last added to; updated.
        """
        now = time.perf_counter()
        if not last:
            self._first.observe(now - start)
        if delta.index in last:
            self._between.observe(now - last[delta.index])
        last[delta.index] = now
        if delta.finish_reason is not None:
            self._completions.labels(delta.finish_reason).inc()

    def observe_request(self, seconds: float) -> None:
        """Count a request that has ended."""
        self._whole.observe(seconds)


class TimedStreams:
    """The streams of an engine, which metrics hear of."""

    def __init__(self, engine: Streams, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    async def astream(self, request: Request) -> AsyncIterator[Delta]:
        """The engine's stream, timed."""
        start = time.perf_counter()
        last: dict[int, float] = {}
        stream = cast("AsyncGenerator[Delta]", self._engine.astream(request))
        try:
            async with aclosing(stream):
                async for delta in stream:
                    self._metrics.observe_delta(delta, start, last)
                    yield delta
        finally:
            self._metrics.observe_request(time.perf_counter() - start)


class _EngineCollector(Collector):
    """Reads the engine's own numbers when it is asked."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """All families, named `jaxmm_*`."""
        stats = self._engine.stats()
        for name, text, value in (
            ("running", "Sequences that hold KV pages.", stats.running),
            ("waiting", "Sequences in the queue.", stats.waiting),
            ("preparing", "Requests whose pictures, videos and prompts are made.", stats.preparing),
            ("padding_ratio", "Share of steps that was filler, 0 to 1.", stats.padding_share),
            ("kv_pages", "KV pages.", stats.total_pages),
            ("kv_pages_free", "KV pages that are free or evictable.", stats.free_pages),
            ("arena_rows", "Rows of the arena of encoded images and videos.", stats.total_rows),
            ("arena_rows_free", "Arena rows that are free or evictable.", stats.free_rows),
            ("healthy", "1 while the engine's loop runs.", int(self._engine.healthy)),
        ):
            yield GaugeMetricFamily(f"jaxmm_{name}", text, value)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of admitted sequences.", stats.prompt_tokens),
            ("output_tokens", "Tokens sampled.", stats.output_tokens),
            (
                "encoded_images",
                "Images and steps of videos encoded.",
                stats.encoded_images,
            ),
            ("encoded_patches", "Patches that the encoder took.", stats.encoded_patches),
            (
                "inline_decodes",
                "Pictures and videos that came by socket, since shared memory was refused.",
                stats.inline_decodes,
            ),
            ("recompiles", "Compiles after warm-up; each is a fault.", stats.recompiles),
            ("retracts", "Sequences that gave their pages back.", stats.retracts),
            ("finished", "Sequences that came to their end.", stats.finished),
            ("aborted", "Sequences that were aborted.", stats.aborted),
        ):
            yield CounterMetricFamily(f"jaxmm_{name}", text, value)
        caches = {
            "prefix": stats.prefix_cache,
            "rows": stats.arena_rows,
            "items": stats.arena,
            "media": stats.media_map,
        }
        hits = CounterMetricFamily(
            "jaxmm_cache_hits",
            "Found: prompt tokens (prefix), rows of encoded items, the items, or files (media).",
            labels=["cache"],
        )
        misses = CounterMetricFamily(
            "jaxmm_cache_misses", "Not found, in the same units.", labels=["cache"]
        )
        for name, cache in caches.items():
            hits.add_metric([name], cache.hits)
            misses.add_metric([name], cache.misses)
        yield hits
        yield misses
        yield from _by_replica(stats.replicas)


def _by_replica(replicas: Sequence[ReplicaStats]) -> Iterator[Metric]:
    """What tells the replicas of an engine apart, labelled by their numbers from 0 up."""
    for name, text, values in (
        ("running", "Sequences that hold KV pages.", [r.running for r in replicas]),
        ("waiting", "Sequences in the queue.", [r.waiting for r in replicas]),
        ("free_pages", "KV pages that are free or evictable.", [r.free_pages for r in replicas]),
    ):
        gauge = GaugeMetricFamily(f"jaxmm_replica_{name}", text, labels=["replica"])
        for index, value in enumerate(values):
            gauge.add_metric([str(index)], value)
        yield gauge
    for name, text, values in (
        ("prompt_tokens", "Prompt tokens admitted.", [r.prompt_tokens for r in replicas]),
        ("output_tokens", "Tokens sampled.", [r.output_tokens for r in replicas]),
        ("cached_tokens", "Prompt tokens cached.", [r.prefix_cache.hits for r in replicas]),
    ):
        counter = CounterMetricFamily(f"jaxmm_replica_{name}", text, labels=["replica"])
        for index, value in enumerate(values):
            counter.add_metric([str(index)], value)
        yield counter
