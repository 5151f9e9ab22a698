"""What an engine has done and holds, in numbers. Host only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxmm.start import Padding, Parts  # brings jax


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """One cache: hits and misses since the start, each in its own unit."""

    hits: int
    misses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """What one replica has done and holds; the engine's numbers of the same name are the sums."""

    running: int
    waiting: int
    prompt_tokens: int
    output_tokens: int
    prefix_cache: CacheStats
    arena: CacheStats
    arena_rows: CacheStats
    retracts: int
    finished: int
    aborted: int
    free_pages: int
    free_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot, read without stopping the loop: neighbouring numbers may be a step apart."""

    running: int
    waiting: int
    preparing: int
    prompt_tokens: int
    """Of admitted sequences."""
    output_tokens: int
    encoded_images: int
    encoded_patches: int
    prefix_cache: CacheStats
    """In prompt tokens."""
    arena: CacheStats
    """In items that were needed, images and steps of videos: rows found, or encoded."""
    arena_rows: CacheStats
    """The same in rows."""
    media_map: CacheStats
    """In files."""
    inline_decodes: int
    """Pictures and videos whose patches came by socket, since shared memory was refused."""
    padding_share: float
    """Share of all language steps' tokens that was filler, 0 to 1."""
    recompiles: int
    """Compiles since warm-up."""
    retracts: int
    finished: int
    aborted: int
    free_pages: int
    """Free or evictable."""
    total_pages: int
    free_rows: int
    """Of the arena, free or evictable."""
    total_rows: int
    replicas: tuple[ReplicaStats, ...]


def stats_of(replicas: Sequence["Parts"], *, preparing: int) -> EngineStats:
    """Read all counters."""
    parts, each = replicas[0], tuple(map(_of_replica, replicas))
    counters = [replica.scheduler.counters for replica in replicas]
    known = parts.media_map
    return EngineStats(
        running=sum(r.running for r in each),
        waiting=sum(r.waiting for r in each),
        preparing=preparing,
        prompt_tokens=sum(r.prompt_tokens for r in each),
        output_tokens=sum(r.output_tokens for r in each),
        encoded_images=sum(c.encoded_items for c in counters),
        encoded_patches=sum(c.encoded_patches for c in counters),
        prefix_cache=_sum([r.prefix_cache for r in each]),
        arena=_sum([r.arena for r in each]),
        arena_rows=_sum([r.arena_rows for r in each]),
        media_map=CacheStats(hits=known.num_hits, misses=known.num_misses),
        inline_decodes=parts.decoder.inline_count,
        padding_share=_padding_share([replica.padding for replica in replicas]),
        recompiles=parts.ledger.num_recompiles,
        retracts=sum(r.retracts for r in each),
        finished=sum(r.finished for r in each),
        aborted=sum(r.aborted for r in each),
        free_pages=sum(r.free_pages for r in each),
        total_pages=sum(replica.pool.num_pages for replica in replicas),
        free_rows=sum(r.free_rows for r in each),
        total_rows=sum(replica.arena.num_rows for replica in replicas),
        replicas=each,
    )


def _padding_share(paddings: Sequence["Padding"]) -> float:
    """Share of all tokens computed that were filler, 0 to 1."""
    padded = sum(padding.padded for padding in paddings)
    return 1 - sum(padding.used for padding in paddings) / padded if padded else 0.0


def _of_replica(parts: "Parts") -> ReplicaStats:
    scheduler, counters, arena = parts.scheduler, parts.scheduler.counters, parts.arena
    return ReplicaStats(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        prompt_tokens=counters.prompt_tokens,
        output_tokens=counters.output_tokens,
        prefix_cache=CacheStats(
            hits=counters.cached_tokens, misses=counters.prompt_tokens - counters.cached_tokens
        ),
        arena=CacheStats(hits=arena.hits, misses=arena.misses),
        arena_rows=CacheStats(hits=arena.hit_rows, misses=arena.miss_rows),
        retracts=counters.retracts,
        finished=counters.finished,
        aborted=counters.aborted,
        free_pages=parts.pool.num_free + parts.prefix_cache.num_evictable,
        free_rows=arena.num_free + arena.num_evictable,
    )


def _sum(caches: Sequence[CacheStats]) -> CacheStats:
    return CacheStats(hits=sum(c.hits for c in caches), misses=sum(c.misses for c in caches))
