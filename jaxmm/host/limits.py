"""The sizes that a scheduler works within, and which sequences can never fit them. Host only."""

from dataclasses import dataclass

from jaxmm.errors import ConfigError, MediaTooLarge, PromptTooLong, RequestError
from jaxmm.host.arena import Arena
from jaxmm.host.page_pool import PagePool
from jaxmm.host.plan import encode_patches
from jaxmm.host.sequence import Sequence
from jaxmm.host.staging import peak_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Sizes as the engine settled them at start; no zeros that stand for something."""

    max_step_tokens: int
    """Tokens of one step, decodes and chunks together; at least `max_running`."""
    max_patches_per_step: int
    """Patches encoded in one step, except that one larger item may be encoded alone."""
    max_lane_patches: int
    """Patches of the largest item that can be encoded at all."""
    max_running: int
    """Sequences that hold pages and a state slot together."""
    max_waiting: int
    max_model_len: int
    """Tokens of prompt and output together."""
    page_size: int
    reserve_tokens: int = 64
    """Tokens that each running sequence is expected to add before others end. Their pages are
    kept free at admission: more make retracts rarer, fewer let more sequences run together."""
    max_pinned_pages: int = 0
    """Pages that open conversations keep from eviction together, as long as nobody needs them."""
    max_sessions: int = 64
    """Conversations that keep something."""
    max_kept_bytes: int = 1 << 30
    """Of the processed pictures and videos that they keep."""
    whole_items: bool = False
    """The model attends both ways inside an item: no chunk may end there."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_running <= self.max_step_tokens:
            raise ConfigError(
                f"max_running={self.max_running} is outside [1, max_step_tokens="
                f"{self.max_step_tokens}]: every running request decodes in every step"
            )

    @property
    def max_whole_tokens(self) -> int:
        """Tokens that the first chunk of a step has, however many sequences decode."""
        return self.max_step_tokens - self.max_running + 1


def check_fits(sequence: Sequence, config: SchedulerConfig, pool: PagePool, arena: Arena) -> None:
    """Refuse what could never run, even alone.

    Raises:
        RequestError: The prompt is empty.
        PromptTooLong: Prompt and one output token exceed the model's length or the pool, or the
            items the arena, or one step where items must stay whole.
        MediaTooLarge: One item has more patches than the largest encode lane.
    """
    if sequence.prompt.num_tokens == 0:
        raise RequestError("the prompt has no tokens; send at least one")
    _check_length(sequence, config.max_model_len, "raise max_model_len")
    _check_length(sequence, pool.num_pages * config.page_size, "raise pages.num_pages")
    rows = peak_rows(sequence, arena)
    if rows > arena.num_rows:
        raise PromptTooLong(
            f"the prompt needs {rows} rows for its images at once; the arena has "
            f"{arena.num_rows}. Send fewer or smaller images, or raise arena.num_rows."
        )
    _check_patches(sequence, config.max_lane_patches)
    if config.whole_items:
        _check_whole(sequence, config.max_whole_tokens)


def output_limit(sequence: Sequence, config: SchedulerConfig, pool: PagePool) -> int:
    """Output tokens that a sequence can have, at least 1 once it is known to fit."""
    room = min(config.max_model_len, pool.num_pages * config.page_size)
    return min(sequence.sampling.max_tokens, room - sequence.prompt.num_tokens)


def _check_length(sequence: Sequence, limit: int, remedy: str) -> None:
    num_tokens = sequence.prompt.num_tokens
    if num_tokens + 1 <= limit:
        return
    rows = sum(item.num_tokens for item in sequence.prompt.items)
    raise PromptTooLong(
        f"prompt has {num_tokens} tokens, {rows} of them from images and videos; the "
        f"limit is {limit - 1}, to leave room for output. Shorten it, send smaller images, or "
        f"{remedy}."
    )


def _check_patches(sequence: Sequence, limit: int) -> None:
    patches = max(map(encode_patches, sequence.prompt.items), default=0)
    if patches > limit:
        raise MediaTooLarge(
            f"an image has {patches} patches; the limit is {limit}. Send a smaller image, lower "
            "media.max_pixels, or raise buckets.max_patches_per_step."
        )


def _check_whole(sequence: Sequence, limit: int) -> None:
    tokens = max((len(span) for span, _ in sequence.item_spans), default=0)
    if tokens > limit:
        raise PromptTooLong(
            f"an image has {tokens} tokens, which this model needs in one step; the limit is "
            f"{limit}. Send a smaller image or raise buckets.max_step_tokens."
        )
