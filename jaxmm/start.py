"""Builds an engine's parts: weights, executables, caches, device memory. Host only."""

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from jaxmm.device.lowering import step_layout
from jaxmm.device.runner import Runner
from jaxmm.errors import ConfigError, ModelError, RequestError, SamplingError
from jaxmm.host.arena import Arena
from jaxmm.host.chat import ChatTokenizer
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
from jaxmm.models.narrow import bfloat16_parts
from jaxmm.pod.followers import Followers
from jaxmm.pod.join import meet
from jaxmm.pod.lead import PodRunner
from jaxmm.rehearsal import Rehearsal
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that the engine's loop works with, for one replica.

    Those of an engine differ in pool, prefix cache, arena, scheduler, runner and padding; all else
    is the same object.
    """

    model: ModelConfig
    model_name: str
    sizes: Sizes
    tokenizer: ChatTokenizer
    grammars: Grammars
    eos_ids: tuple[int, ...]
    decoder: DecodePool
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
    rehearsal: Rehearsal

    @property
    def placeholder_ids(self) -> tuple[int, int]:
        """Tokens that mark the places of images and of videos."""
        return self.model.image_token_id, self.model.video_token_id

    def packed_patches(self, item: Item) -> int:
        """Patches that an item takes in an encode lane."""
        return lane_patches(item.grid_thw, self.model.vision)

    @property
    def markers(self) -> tuple[int, int] | None:
        """Tokens before and behind an item; None for a family that has none."""
        pair = self.model.vision_start_token_id, self.model.vision_end_token_id
        return pair if min(pair) >= 0 else None

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
                        f"{name} names token {token}, outside [0, {self.tokenizer.vocab_size})",
                        name,
                    )

    def close(self) -> None:
        """Free what does not go with the process; called for one replica of an engine, or for all
        of them."""
        self.decoder.close()
        self.runner.close()
        self.ledger.close()


def load_runners(config: EngineConfig, basis: Basis, ledger: CompileLedger) -> dict[int, Runner]:
    """Make the executables and load the weights of each replica that has chips here, both at once.

    The weights are read once, and the executables compiled once: the other replicas get copies.

    Returns:
        By the replica's number.

    Raises:
        ModelError: The message names the tensor or key.
    """
    runners: dict[int, Runner] = {}
    with _compiled_directory(config, basis) as directory, contextlib.ExitStack() as undo:
        for replica, backend in enumerate(basis.backends):
            if jax.process_index() not in backend.process_ids:
                continue
            runners[replica] = runner = Runner(
                basis.model,
                basis.sizes,
                basis.dtype,
                backend=backend,
                ledger=ledger,
                compile_cache_dir=directory,
                twin=_wants_twin(config, basis),
                bits=basis.bits,
            )
            undo.callback(runner.close)
        first, *others = runners.values()
        with ThreadPoolExecutor(1, thread_name_prefix="jaxmm-load") as threads:
            weights = threads.submit(_load_weights, config, basis, first)
            for runner in runners.values():
                runner.warm_up(progress=config.progress)
            params = weights.result()
        first.place(params)
        for runner in others:
            runner.place_copy(params)
        undo.pop_all()
    return runners


@contextlib.contextmanager
def _compiled_directory(config: EngineConfig, basis: Basis) -> Iterator[str]:
    """Where executables are kept; for the time of the start where replicas share them alone."""
    if config.compile_cache_dir or len(basis.backends) == 1:
        yield config.compile_cache_dir
        return
    with tempfile.TemporaryDirectory(prefix="jaxmm-compiled-") as directory:
        yield directory


def build_parts(config: EngineConfig) -> tuple[Parts, ...]:
    """Load a checkpoint and make everything ready to serve: the parts of each replica.

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
        replicas = _build(config, basis, undo)
        undo.pop_all()
    parts = replicas[0]
    logger.info(
        "ready model=%s native=%s replicas=%d executables=%d pages=%d page_size=%d rows=%d "
        "seconds=%.1f",
        parts.model_name,
        basis.backends[0].native,
        len(replicas),
        parts.runner.num_executables,
        parts.sizes.num_pages,
        parts.sizes.page_size,
        parts.sizes.num_rows,
        time.perf_counter() - start,
    )
    return replicas


def _build(config: EngineConfig, basis: Basis, undo: contextlib.ExitStack) -> tuple[Parts, ...]:
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
        here = load_runners(config, basis, ledger)
        for runner in here.values():
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
    shared = partial(
        Parts,
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
            RowForm(
                model.text.row_width,
                model.vision.merge_size,
                tile_form(model.vision),
                model.vision.picture_side,
            ),
            video=video,
            video_id=None if model.video_token_id < 0 else model.video_token_id,
            encode_plain=tokenizer.encode_plain,
        ),
        known_prunings=KnownPrunings(),
        ledger=ledger,
    )
    runners = _all_runners(basis, here, followers)
    return tuple(_parts_of_replica(config, basis, shared, runner) for runner in runners)


def _all_runners(
    basis: Basis, here: Mapping[int, Runner], followers: Followers | None
) -> list[Runner | PodRunner]:
    """A runner for each replica; one with chips of other processes tells those."""
    runners: list[Runner | PodRunner] = []
    for replica, backend in enumerate(basis.backends):
        if followers is None or backend.process_ids == (jax.process_index(),):
            runners.append(here[replica])
            continue
        runner = PodRunner(
            here.get(replica),
            followers,
            replica=replica,
            backend=backend,
            layout=partial(step_layout, basis.sizes, basis.model.text.vocab_size),
            num_executables=basis.sizes.buckets.num_executables,
        )
        runners.append(runner)
    return runners


def _parts_of_replica(
    config: EngineConfig, basis: Basis, shared: Callable[..., Parts], runner: Runner | PodRunner
) -> Parts:
    """What is shared, and empty caches beside it."""
    sizes = basis.sizes
    pool = PagePool(sizes.num_pages)
    prefix_cache = PrefixCache(pool, sizes.page_size, enabled=config.pages.prefix_cache)
    arena = Arena(sizes.num_rows, config.arena.page_rows)
    limits = sizes.scheduler(config, num_replicas=len(basis.backends))
    return shared(
        pool=pool,
        prefix_cache=prefix_cache,
        arena=arena,
        scheduler=Scheduler(limits, pool, prefix_cache, arena),
        runner=runner,
        padding=Padding(),
        rehearsal=Rehearsal(_rehearsed(config, runner), sizes, basis.model, pool),
    )


def _rehearsed(config: EngineConfig, runner: Runner | PodRunner) -> Runner | None:
    """The runner, where first runs are dear: measured on a CPU alone, and without a mesh."""
    if not config.buckets.rehearse or jax.default_backend() != "cpu":
        return None
    return runner if isinstance(runner, Runner) and runner.backend.mesh is None else None


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
    """Whether steps of one token shall read the decoder's weights in bfloat16, beside float32."""
    on_one_cpu = jax.default_backend() == "cpu" and basis.backends[0].mesh is None
    return (
        on_one_cpu
        and not basis.bits
        and basis.dtype == jnp.float32
        and has_room_for_twin(config, basis.model, basis.sizes, device_memory_bytes())
        and not is_converted(basis.directory)
        and "text" in bfloat16_parts(basis.directory, basis.model)
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
