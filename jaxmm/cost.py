"""What a request would cost if it ran now and alone. Host only."""

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxmm.host.arena import RowKey
from jaxmm.host.item import Item
from jaxmm.host.limits import check_fits, output_limit
from jaxmm.host.sequence import Sequence
from jaxmm.host.sharing import num_usable

if TYPE_CHECKING:
    from jaxmm.start import Parts  # brings jax


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCost:
    """One image of a request, or one time step of a video."""

    tokens: int
    """Tokens of the prompt: rows of the arena, but those that were pruned."""
    grid_thw: tuple[int, int, int]
    """Patches by (time, height, width)."""
    lane_patches: int
    """Bucket of the encode, alone in its lane; 0: it is not encoded."""
    padding: float
    """Share of that bucket that is filler, 0 to 1."""
    cached: str
    """`prefix`: all its tokens are read from the prefix cache; `rows`: it has been encoded;
    `no`: it will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One request, by what the caches hold at this moment."""

    prompt_tokens: int
    images: tuple[ImageCost, ...]
    cached_tokens: int
    """Prompt tokens that the prefix cache has."""
    step_tokens: tuple[int, ...]
    """Buckets of the steps that extend the others."""
    step_padding: float
    """Share of those steps that is filler, 0 to 1."""
    max_output_tokens: int
    """Of one completion: `max_tokens`, less where the context ends it."""
    completions: int
    prompt_pages: int
    """KV pages of the prompt and the first token of output."""
    total_pages: int
    """KV pages of one completion at its longest."""
    free_pages: int
    """Pages that are free or could be, now."""


def estimate(sequence: Sequence, parts: "Parts", scored: Set[int] = frozenset()) -> Cost:
    """Work out a request's cost; nothing is taken or changed. On the loop's thread.

    Args:
        sequence: One of the request's completions, as the intake made it.
        parts: Of the replica that would serve it.
        scored: Items that are encoded, tokens or none, before it is known which rows are kept.

    Raises:
        PromptTooLong, MediaTooLarge: It can never run.
    """
    config, size = parts.scheduler.config, parts.sizes.page_size
    check_fits(sequence, config, parts.pool, parts.arena)
    cached = num_usable(sequence, parts.prefix_cache, whole_items=config.whole_items)
    num_tokens = sequence.prompt.num_tokens
    rest, buckets, start = num_tokens - cached, [], cached
    while start < num_tokens:
        stop = min(start + config.max_step_tokens, num_tokens)
        stop = sequence.item_start(stop) if config.whole_items else stop
        buckets.append(parts.sizes.buckets.step_tokens(stop - start))
        start = stop
    max_output = output_limit(sequence, config, parts.pool)
    needed = sequence.items_after(cached) | scored
    return Cost(
        prompt_tokens=num_tokens,
        images=tuple(
            _image_cost(item, sequence, parts, needed=index in needed)
            for index, item in enumerate(sequence.prompt.items)
        ),
        cached_tokens=cached,
        step_tokens=tuple(buckets),
        step_padding=1 - rest / sum(buckets),
        max_output_tokens=max_output,
        completions=sequence.sampling.n,
        prompt_pages=num_tokens // size + 1,
        total_pages=-(-(num_tokens + max_output) // size),
        free_pages=parts.pool.num_free + parts.prefix_cache.num_evictable,
    )


def _image_cost(item: Item, sequence: Sequence, parts: "Parts", *, needed: bool) -> ImageCost:
    in_arena = RowKey.of(item, sequence.salt) in parts.arena
    encodes = needed and not in_arena and item.embeddings is None
    packed = parts.packed_patches(item)
    bucket = parts.sizes.buckets.lane_patches(packed) if encodes else 0
    return ImageCost(
        tokens=item.num_tokens,
        grid_thw=item.grid_thw,
        lane_patches=bucket,
        padding=1 - packed / bucket if bucket else 0.0,
        cached="rows" if needed and in_arena else "no" if needed else "prefix",
    )
