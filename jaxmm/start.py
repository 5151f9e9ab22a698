"""Builds an engine's parts: checkpoint, sizes, caches, device memory, executables. Host only."""

import dataclasses
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxmm.config import EngineConfig
from jaxmm.device.backend import Backend, check_sizes, settle_backends, spread_kv_heads
from jaxmm.device.executables import source_digest
from jaxmm.device.ledger import CompileLedger
from jaxmm.device.lowering import step_layout
from jaxmm.device.runner import Runner
from jaxmm.device.scratch import keep_scratch_memory
from jaxmm.errors import ConfigError, ModelError, RequestError, SamplingError
from jaxmm.host.arena import Arena
from jaxmm.host.chat import ChatTokenizer
from jaxmm.host.decode import Decoder
from jaxmm.host.decode_pool import DecodePool
from jaxmm.host.decodes import Decodes
from jaxmm.host.embedded import RowForm
from jaxmm.host.grammar import Grammars
from jaxmm.host.identity import check_vocabulary
from jaxmm.host.item import Item
from jaxmm.host.lanes import packed_patches
from jaxmm.host.media import Limits
from jaxmm.host.media_map import MediaMap
from jaxmm.host.page_pool import PagePool
from jaxmm.host.prefix_cache import PrefixCache
from jaxmm.host.prepare import Preparer
from jaxmm.host.scheduler import Scheduler
from jaxmm.models import family_module, has_module, read_config
from jaxmm.models.auto_processor import AutoImageProcessor
from jaxmm.models.config import ModelConfig
from jaxmm.models.converted import is_converted, restore_params
from jaxmm.models.loading import place_params
from jaxmm.models.remote import fetch_small_files, is_remote
from jaxmm.models.twin import text_is_bfloat16
from jaxmm.pod.followers import Followers
from jaxmm.pod.join import join, least, meet
from jaxmm.pod.lead import PodRunner
from jaxmm.request import SamplingParams
from jaxmm.sizes import (
    CPU_MAX_PIXELS,
    Sizes,
    describe,
    has_room_for_twin,
    host_memory_bytes,
    settle_sizes,
)

logger = logging.getLogger(__name__)

_CPU_VIDEO_PICTURES = 4
"""Pixels of a video on a CPU where none are set, in largest pictures."""
_COPIES = Path("~/.cache/jaxmm/models")
"""Small files of models at gs:// addresses."""


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
    decoder: Decoder
    media_map: MediaMap
    decodes: Decodes
    preparer: Preparer
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
        return packed_patches(item.grid_thw, self.model.vision.window_patches)

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
        """Free what does not go with the process; called for one replica of an engine, or for all
        of them."""
        self.decoder.close()
        self.runner.close()
        self.ledger.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What is settled before anything is loaded; the same on every host of a pod."""

    directory: Path
    model: ModelConfig
    dtype: Any
    processor: Any
    backends: tuple[Backend, ...]
    """One for each replica."""
    sizes: Sizes
    """Of a replica."""

    @property
    def fingerprint(self) -> str:
        """Equal where the same steps are run on the same weights."""
        files = sorted((p.name, p.stat().st_size) for p in self.directory.glob("*.safetensors"))
        dtype, source = np.dtype(self.dtype), source_digest()
        return f"{self.model}|{self.sizes}|{dtype}|{self.backends}|{source}|{files}"


def settle_basis(config: EngineConfig) -> Basis:
    """Meet the other hosts, if there are any, and read what the checkpoint says of itself.

    Raises:
        ConfigError, ModelError: The message names the setting or key.
    """
    join(config)
    if jax.default_backend() == "cpu" and not keep_scratch_memory():
        logger.info("the C library keeps no scratch memory: steps clear theirs anew")
    directory = model_directory(config)
    model = read_config(directory)
    check_vocabulary(model.text.vocab_size)
    dtype = _dtype(config)
    processor = _processor(config, model, directory)
    backends = settle_backends(
        config.kernels, config.tensor_parallel, config.data_parallel, model, dtype
    )
    model = spread_kv_heads(model, backends[0].num_shards)
    return Basis(
        directory=directory,
        model=model,
        dtype=dtype,
        processor=processor,
        backends=backends,
        sizes=_sizes(config, model, processor, backends),
    )


def load_runners(config: EngineConfig, basis: Basis, ledger: CompileLedger) -> dict[int, Runner]:
    """Make the executables and load the weights of each replica that has chips here, both at once.

    The weights are read once, and the executables compiled once: the other replicas get copies.

    Returns:
        By the replica's number.

    Raises:
        ModelError: The message names the tensor or key.
    """
    with _compiled_directory(config, basis) as directory:
        runners = {
            replica: Runner(
                basis.model,
                basis.sizes,
                basis.dtype,
                backend=backend,
                ledger=ledger,
                compile_cache_dir=directory,
                twin=_wants_twin(config, basis),
            )
            for replica, backend in enumerate(basis.backends)
            if jax.process_index() in backend.process_ids
        }
        first, *others = runners.values()
        with ThreadPoolExecutor(1, thread_name_prefix="jaxmm-load") as threads:
            weights = threads.submit(_load_weights, config, basis, first)
            for runner in runners.values():
                runner.warm_up(progress=config.progress)
            params = weights.result()
    first.place(params)
    for runner in others:
        runner.place_copy(params)
    return runners


@contextmanager
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
    directory, model, processor, sizes = (
        basis.directory,
        basis.model,
        basis.processor,
        basis.sizes,
    )
    video = _video(config, model, directory, processor)
    ledger = CompileLedger(config.on_recompile)
    followers = None
    if jax.process_count() > 1:
        followers = meet(config, basis.fingerprint).to_followers(config.pod)
    with ThreadPoolExecutor(1, thread_name_prefix="jaxmm-words") as threads:
        words = threads.submit(_load_tokenizer, model, directory)
        here = load_runners(config, basis, ledger)
        tokenizer, grammars = words.result()
    if followers is not None:
        followers.wait_ready()
    runners = _all_runners(basis, here, followers)
    decoder = DecodePool(
        processor,
        Limits(config.media.max_bytes, config.media.max_decode_pixels),
        config.media.workers,
        video=video,
        timeout_seconds=config.media.timeout_seconds,
        memory_bytes=config.media.worker_memory_bytes,
        quarantine_seconds=config.media.quarantine_seconds,
    )
    media_map = MediaMap(config.media.map_entries)
    decodes = Decodes(decoder, media_map)
    logger.info(
        "ready model=%s replicas=%d executables=%d pages=%d page_size=%d rows=%d seconds=%.1f",
        directory.name,
        len(runners),
        runners[0].num_executables,
        sizes.num_pages,
        sizes.page_size,
        sizes.num_rows,
        time.perf_counter() - start,
    )
    shared = partial(
        Parts,
        model=model,
        model_name=directory.name,
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
            RowForm(model.text.row_width, model.vision.merge_size),
            video=video,
            video_id=model.video_token_id,
            encode_plain=tokenizer.encode_plain,
        ),
        ledger=ledger,
    )
    return tuple(_parts_of_replica(config, sizes, shared, runner) for runner in runners)


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
    config: EngineConfig, sizes: Sizes, shared: Callable[..., Parts], runner: Runner | PodRunner
) -> Parts:
    """What is shared, and empty caches beside it."""
    pool = PagePool(sizes.num_pages)
    prefix_cache = PrefixCache(pool, sizes.page_size, enabled=config.pages.prefix_cache)
    arena = Arena(sizes.num_rows, config.arena.page_rows)
    return shared(
        pool=pool,
        prefix_cache=prefix_cache,
        arena=arena,
        scheduler=Scheduler(sizes.scheduler(config), pool, prefix_cache, arena),
        runner=runner,
        padding=Padding(),
    )


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
        and basis.backends[0].mesh is None
        and basis.dtype == jnp.float32
        and has_room_for_twin(config, basis.model, basis.sizes, device_memory_bytes())
        and not is_converted(basis.directory)
        and text_is_bfloat16(basis.directory, basis.model)
    )


def _load_tokenizer(model: ModelConfig, directory: Path) -> tuple[ChatTokenizer, Grammars]:
    """Both with their tables made now, not in the first request."""
    tokenizer = ChatTokenizer.from_checkpoint(directory)
    if tokenizer.vocab_size > model.text.vocab_size:
        raise ModelError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the embedding "
            f"{model.text.vocab_size} rows"
        )
    grammars = Grammars(
        tokenizer.token_bytes, tokenizer.special_ids, model.eos_token_ids, tokenizer.encode_plain
    )
    return tokenizer, grammars


def describe_buckets(config: EngineConfig) -> str:
    """Ladders, executables and expected padding of an engine, without building it."""
    directory = model_directory(config)
    model = read_config(directory)
    processor = _processor(config, model, directory)

    def packed(width: int, height: int) -> int:
        return packed_patches(processor.grid(height, width), model.vision.window_patches)

    backends = settle_backends(
        config.kernels, config.tensor_parallel, config.data_parallel, model, _dtype(config)
    )
    spread = spread_kv_heads(model, backends[0].num_shards)
    return describe(_sizes(config, spread, processor, backends), packed)


def _processor(config: EngineConfig, model: ModelConfig, directory: Path) -> Any:
    processor = _load_processor(config, model, directory)
    # a family whose pictures all have one size has no limits to lower
    if config.media.max_pixels or jax.default_backend() != "cpu" or not processor.max_pixels:
        return processor
    max_pixels = min(processor.max_pixels, CPU_MAX_PIXELS)
    return dataclasses.replace(
        processor, max_pixels=max_pixels, min_pixels=min(processor.min_pixels, max_pixels)
    )


def _load_processor(config: EngineConfig, model: ModelConfig, directory: Path) -> Any:
    """The family's own, or transformers' for a family that has none."""
    limits = {"min_pixels": config.media.min_pixels, "max_pixels": config.media.max_pixels}
    if has_module(model.family, "processor"):
        own = family_module(model.family, "processor").ImageProcessor
        return own.from_checkpoint(directory, **limits)
    vision = model.vision
    return AutoImageProcessor.from_checkpoint(
        directory, patch_size=vision.patch_size, merge_size=vision.merge_size, **limits
    )


def _video(config: EngineConfig, model: ModelConfig, directory: Path, processor: Any) -> Any:
    """The family's video processor; None for a family that takes no videos."""
    if not has_module(model.family, "video"):
        return None
    video = family_module(model.family, "video").VideoProcessor.from_checkpoint(
        directory,
        processor,
        max_frames=config.media.max_frames,
        max_pixels=config.media.max_video_pixels,
    )
    if config.media.max_video_pixels or jax.default_backend() != "cpu":
        return video
    return dataclasses.replace(
        video, max_pixels=min(video.max_pixels, _CPU_VIDEO_PICTURES * processor.max_pixels)
    )


def _sizes(
    config: EngineConfig, model: ModelConfig, processor: Any, backends: Sequence[Backend]
) -> Sizes:
    """Of one replica; those on a CPU share its memory."""
    dtype, backend = np.dtype(_dtype(config)), backends[0]
    sharers = len(backends) if jax.default_backend() == "cpu" else 1
    sizes = settle_sizes(
        config,
        model,
        processor.max_patches,
        platform=jax.default_backend(),
        memory_bytes=device_memory_bytes() // sharers,
        itemsize=dtype.itemsize,
        kernels=backend.kernels,
        num_chips=backend.num_shards,
    )
    check_sizes(backend, sizes.page_size, sizes.max_running, sizes.num_table_pages, dtype)
    return sizes


def default_model() -> Path:
    """Directory of the small model that jaxmm ships, which is served when none is named."""
    return Path(__file__).parent / "assets" / "tiny_vlm"


def model_directory(config: EngineConfig) -> Path:
    """Directory of the model to serve.

    Raises:
        ModelError: There is none at the path given.
    """
    if not config.model:
        logger.info("no model named, serving the small one that jaxmm ships")
        return default_model()
    if is_remote(config.model):
        return fetch_small_files(config.model, _COPIES.expanduser())
    directory = Path(config.model).expanduser()
    if not directory.is_dir():
        raise ModelError(
            f"model {config.model!r} is not a directory; give the path of a Hugging Face "
            "checkpoint, or a gs:// address that jaxmm convert has written to"
        )
    return directory


def device_memory_bytes() -> int:
    """Memory of one device, on a CPU that of the machine; in a pod the least of all hosts."""
    stats: dict[str, Any] | None = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return least(int(stats["bytes_limit"]))
    return least(host_memory_bytes())


def _dtype(config: EngineConfig) -> Any:
    if config.dtype == "auto":
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(config.dtype)
