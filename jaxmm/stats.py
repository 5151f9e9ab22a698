"""What an engine has done and holds, in numbers. Host only."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxmm.start import Parts  # brings jax


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """One cache: hits and misses since the start, each in its own unit."""

    hits: int
    misses: int


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
    media_map: CacheStats
    """In files."""
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


def stats_of(parts: "Parts", *, preparing: int) -> EngineStats:
    """Read all counters."""
    scheduler, counters = parts.scheduler, parts.scheduler.counters
    pool, arena, known = parts.pool, parts.arena, parts.media_map
    return EngineStats(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        preparing=preparing,
        prompt_tokens=counters.prompt_tokens,
        output_tokens=counters.output_tokens,
        encoded_images=counters.encoded_items,
        encoded_patches=counters.encoded_patches,
        prefix_cache=CacheStats(
            hits=counters.cached_tokens, misses=counters.prompt_tokens - counters.cached_tokens
        ),
        arena=CacheStats(hits=arena.hits, misses=arena.misses),
        media_map=CacheStats(hits=known.num_hits, misses=known.num_misses),
        padding_share=parts.padding.share,
        recompiles=parts.ledger.num_recompiles,
        retracts=counters.retracts,
        finished=counters.finished,
        aborted=counters.aborted,
        free_pages=pool.num_free + parts.prefix_cache.num_evictable,
        total_pages=pool.num_pages,
        free_rows=arena.num_free + arena.num_evictable,
        total_rows=arena.num_rows,
    )
