"""Builds an engine's parts: weights, executables, caches, device memory. Host only."""

import contextlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxmm.basis import Basis, device_memory_bytes, settle_basis, video_processor
from jaxmm.config import EngineConfig
from jaxmm.device.ledger import CompileLedger
from jaxmm.device.runner import Runner
from jaxmm.errors import ConfigError, ModelError, RequestError, SamplingError
from jaxmm.host.arena import Arena
from jaxmm.host.chat import ChatTokenizer
from jaxmm.host.decode import Decoder
from jaxmm.host.decode_pool import DecodePool
from jaxmm.host.decodes import Decodes
from jaxmm.host.embedded import RowForm
from jaxmm.host.grammar import Grammars
from jaxmm.host.item import Item
from jaxmm.host.media import Limits
from jaxmm.host.media_map import MediaMap
from jaxmm.host.page_pool import PagePool
from jaxmm.host.prefix_cache import PrefixCache
from jaxmm.host.prepare import Preparer
from jaxmm.host.pruning import KnownPrunings
from jaxmm.host.scheduler import Scheduler
from jaxmm.models import family_module, has_module
from jaxmm.models.config import ModelConfig
from jaxmm.models.converted import is_converted, restore_params
from jaxmm.models.lane_forms import lane_patches, tile_form
from jaxmm.models.loading import place_params
from jaxmm.models.twin import text_is_bfloat16
from jaxmm.pod.followers import Followers
from jaxmm.pod.join import meet
from jaxmm.pod.lead import PodRunner
from jaxmm.request import SamplingParams
from jaxmm.sizes import Sizes, has_room_for_twin

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Padding:
    """How much of what the device computed was filler."""

    used: int = 0
    padded: int = 0
    """Tokens of all buckets run, filler included."""

    def add(self, used: int, bucket: int) -> None:
        self.used += used
        self.padded += bucket

    @property
    def share(self) -> float:
        """Share of tokens that were filler, 0 to 1."""
        return 1 - self.used / self.padded if self.padded else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that the engine's loop works with."""

    model: ModelConfig
    model_name: str
    sizes: Sizes
    tokenizer: ChatTokenizer
    grammars: Grammars
    eos_ids: tuple[int, ...]
    decoder: Decoder
    media_map: MediaMap
    decodes: Decodes
    preparer: Preparer
    known_prunings: KnownPrunings
    pool: PagePool
    prefix_cache: PrefixCache
    arena: Arena
    scheduler: Scheduler
    runner: Runner | PodRunner
    ledger: CompileLedger
    padding: Padding

    @property
    def placeholder_ids(self) -> tuple[int, int]:
        """Tokens that mark the places of images and of videos."""
        return self.model.image_token_id, self.model.video_token_id

    def packed_patches(self, item: Item) -> int:
        """Patches that an item takes in an encode lane."""
        return lane_patches(item.grid_thw, self.model.vision)

    def check_ids(self, token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Prompt ids given by a caller, int64[T0].

        Raises:
            RequestError: Not a list of whole numbers, or one is outside the vocabulary.
        """
        given = np.asarray(token_ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise RequestError("token_ids must be a list of whole numbers below 2^63")
        ids = given.astype(np.int64)
        wrong = ids[(ids < 0) | (ids >= self.model.text.vocab_size)]
        if len(wrong):
            raise RequestError(
                f"token id {int(wrong[0])} is outside [0, {self.model.text.vocab_size})"
            )
        return ids

    def check_sampling(self, params: SamplingParams) -> None:
        """Refuse ids that the tokenizer does not have.

        Raises:
            SamplingError: In `logit_bias` or `stop_token_ids`.
        """
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            for token in ids:
                if not 0 <= token < self.tokenizer.vocab_size:
                    raise SamplingError(
                        f"{name} names token {token}, outside [0, {self.tokenizer.vocab_size})"
                    )

    def close(self) -> None:
        """Free what does not go with the process."""
        self.decoder.close()
        self.runner.close()
        self.ledger.close()


def load_runner(config: EngineConfig, basis: Basis, ledger: CompileLedger) -> Runner:
    """Make the executables and load the weights, both at once.

    Raises:
        ModelError: The message names the tensor or key.
    """
    runner = Runner(
        basis.model,
        basis.sizes,
        basis.dtype,
        backend=basis.backend,
        ledger=ledger,
        compile_cache_dir=config.compile_cache_dir,
        twin=_wants_twin(config, basis),
    )
    with ThreadPoolExecutor(1, thread_name_prefix="jaxmm-load") as threads:
        weights = threads.submit(_load_weights, config, basis, runner)
        runner.warm_up(progress=config.progress)
        runner.place(weights.result())
    return runner


def build_parts(config: EngineConfig) -> Parts:
    """Load a checkpoint and make everything ready to serve.

    Raises:
        ConfigError, ModelError: The message names the setting, key or tensor.
        PeerLost: Another host of the pod did not come, or went.
    """
    start = time.perf_counter()
    basis = settle_basis(config)
    if jax.process_index():
        raise ConfigError(
            f"this is process {jax.process_index()} of a pod, and process 0 has the engine; run "
            "jaxmm serve, or jaxmm.pod.follow.follow(config), here"
        )
    with contextlib.ExitStack() as undo:
        parts = _build(config, basis, undo)
        undo.pop_all()
    logger.info(
        "ready model=%s executables=%d pages=%d page_size=%d rows=%d seconds=%.1f",
        parts.model_name,
        parts.runner.num_executables,
        parts.sizes.num_pages,
        parts.sizes.page_size,
        parts.sizes.num_rows,
        time.perf_counter() - start,
    )
    return parts


def _build(config: EngineConfig, basis: Basis, undo: contextlib.ExitStack) -> Parts:
    """Everything from its basis; `undo` gives back what there is when something fails."""
    model, processor, sizes = basis.model, basis.processor, basis.sizes
    ledger = CompileLedger(config.on_recompile)
    undo.callback(ledger.close)
    followers = None
    if jax.process_count() > 1:
        followers = meet(config, basis.fingerprint).to_followers(config.pod)
        undo.push(partial(_end_pod, followers))
    video = video_processor(config, basis)
    with ThreadPoolExecutor(1, thread_name_prefix="jaxmm-words") as threads:
        words = threads.submit(_load_tokenizer, model, basis.directory)
        runner = load_runner(config, basis, ledger)
        undo.callback(runner.close)
        tokenizer, grammars = words.result()
    if followers is not None:
        followers.wait_ready()
    decoder = DecodePool(
        processor,
        Limits(config.media.max_bytes, config.media.max_decode_pixels),
        config.media.workers,
        video=video,
        timeout_seconds=config.media.timeout_seconds,
        memory_bytes=config.media.worker_memory_bytes,
        quarantine_seconds=config.media.quarantine_seconds,
    )
    undo.callback(decoder.close)
    media_map = MediaMap(config.media.map_entries)
    decodes = Decodes(decoder, media_map)
    pool = PagePool(sizes.num_pages)
    prefix_cache = PrefixCache(pool, sizes.page_size, enabled=config.pages.prefix_cache)
    arena = Arena(sizes.num_rows, config.arena.page_rows)
    return Parts(
        model=model,
        model_name=basis.directory.name,
        sizes=sizes,
        tokenizer=tokenizer,
        grammars=grammars,
        eos_ids=model.eos_token_ids,
        decoder=decoder,
        media_map=media_map,
        decodes=decodes,
        preparer=Preparer(
            processor,
            decodes,
            config.media,
            model.image_token_id,
            RowForm(model.text.row_width, model.vision.merge_size, tile_form(model.vision)),
            video=video,
            video_id=None if model.video_token_id < 0 else model.video_token_id,
            encode_plain=tokenizer.encode_plain,
        ),
        known_prunings=KnownPrunings(),
        pool=pool,
        prefix_cache=prefix_cache,
        arena=arena,
        scheduler=Scheduler(sizes.scheduler(config), pool, prefix_cache, arena),
        runner=runner if followers is None else PodRunner(runner, followers),
        ledger=ledger,
        padding=Padding(),
    )


def _end_pod(followers: Followers, _: object, error: BaseException | None, __: object) -> None:
    """Let no follower wait for a process 0 that cannot start."""
    followers.end(f"process 0 could not start: {error}")
    followers.close()


def _load_weights(config: EngineConfig, basis: Basis, runner: Runner) -> Any:
    directory, model, dtype = basis.directory, basis.model, basis.dtype
    if is_converted(directory):
        return restore_params(
            directory, model, dtype, runner.param_sharding, progress=config.progress
        )
    return place_params(directory, model, dtype, runner.place_param, progress=config.progress)


def _wants_twin(config: EngineConfig, basis: Basis) -> bool:
    """Whether steps of one token shall read the decoder's weights in bfloat16."""
    return (
        jax.default_backend() == "cpu"
        and basis.backend.mesh is None
        and basis.dtype == jnp.float32
        and has_room_for_twin(config, basis.model, basis.sizes, device_memory_bytes())
        and not is_converted(basis.directory)
        and text_is_bfloat16(basis.directory, basis.model)
    )


def _load_tokenizer(model: ModelConfig, directory: Path) -> tuple[ChatTokenizer, Grammars]:
    """Both with their tables made now, not in the first request."""
    tokenizer = _chat_tokenizer(model.family, directory)
    if tokenizer.vocab_size > model.text.vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the embedding "
            f"{model.text.vocab_size} rows"
        )
    grammars = Grammars(
        tokenizer.token_bytes, tokenizer.special_ids, model.eos_token_ids, tokenizer.encode_plain
    )
    return tokenizer, grammars


def _chat_tokenizer(family: str, directory: Path) -> ChatTokenizer:
    """The family's own, or what its files say for themselves."""
    if not has_module(family, "chat"):
        return ChatTokenizer.from_checkpoint(directory)
    tokenizer: ChatTokenizer = family_module(family, "chat").load_tokenizer(directory)
    return tokenizer
