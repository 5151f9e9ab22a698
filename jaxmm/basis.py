"""What is settled before anything is loaded: the files of a model, processors, sizes. Host only."""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmm.config import EngineConfig
from jaxmm.device.backend import Backend, check_sizes, settle_backends, spread_kv_heads
from jaxmm.device.executables import source_digest
from jaxmm.device.scratch import keep_scratch_memory, share_heap
from jaxmm.encoder_memory import fit_pictures
from jaxmm.errors import ModelError
from jaxmm.host.identity import check_vocabulary
from jaxmm.models import family_module, has_module, read_config
from jaxmm.models.auto_processor import AutoImageProcessor
from jaxmm.models.config import ModelConfig
from jaxmm.models.converted import converted_digest, is_converted
from jaxmm.models.lane_forms import lane_patches
from jaxmm.models.narrow import bfloat16_parts
from jaxmm.models.remote import fetch_small_files, is_remote
from jaxmm.models.tensor_files import sample_digest
from jaxmm.pod.join import join, least
from jaxmm.sizes import CPU_MAX_PIXELS, Sizes, describe, host_memory_bytes, settle_sizes

logger = logging.getLogger(__name__)

_CPU_VIDEO_PICTURES = 4
"""Pixels of a video on a CPU where none are set, in largest pictures."""
_COPIES = Path("~/.cache/jaxmm/models")
"""Small files of models at gs:// addresses."""


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
    bits: tuple[str, ...]
    """Parts of the model whose matrices are kept in bfloat16 where steps are in float32."""

    @property
    def fingerprint(self) -> str:
        """Equal where the same steps are run on the same weights."""
        tell = converted_digest if is_converted(self.directory) else sample_digest
        weights, dtype, source = tell(self.directory), np.dtype(self.dtype), source_digest()
        return f"{self.model}|{self.sizes}|{dtype}|{self.backends}|{source}|{weights}"


def settle_basis(config: EngineConfig) -> Basis:
    """Meet the other hosts, if there are any, and read what the checkpoint says of itself.

    Raises:
        ConfigError, ModelError: The message names the setting or key.
    """
    share_heap()  # before the first use of a device starts its threads
    join(config)
    if jax.default_backend() == "cpu" and not keep_scratch_memory():
        logger.info("the C library keeps no scratch memory: steps clear theirs anew")
    directory = model_directory(config)
    model = read_config(directory)
    check_vocabulary(model.text.vocab_size)
    dtype = _dtype(config)
    processor = _processor(config, model, directory)
    backends = _backends(config, model)
    processor = _fitting(config, model, processor, backends[0])
    model = spread_kv_heads(model, backends[0].num_shards)
    bits = _bits(directory, model, backends)
    return Basis(
        directory=directory,
        model=model,
        dtype=dtype,
        processor=processor,
        backends=backends,
        sizes=_sizes(config, model, processor, backends, bits),
        bits=bits,
    )


def describe_buckets(config: EngineConfig) -> str:
    """Ladders, executables and expected padding of an engine, without building it."""
    directory = model_directory(config)
    model = read_config(directory)
    processor = _processor(config, model, directory)

    def packed(width: int, height: int) -> int:
        return lane_patches(processor.grid(height, width), model.vision)

    backends = _backends(config, model)
    processor = _fitting(config, model, processor, backends[0])
    spread = spread_kv_heads(model, backends[0].num_shards)
    bits = _bits(directory, spread, backends)
    return describe(_sizes(config, spread, processor, backends, bits), packed)


def _backends(config: EngineConfig, model: ModelConfig) -> tuple[Backend, ...]:
    return settle_backends(
        config.kernels,
        config.tensor_parallel,
        config.data_parallel,
        model,
        _dtype(config),
        config.encoder_parallel,
    )


def _processor(config: EngineConfig, model: ModelConfig, directory: Path) -> Any:
    processor = load_processor(config, model, directory)
    # a family whose pictures all have one size has no limits to lower
    if config.media.max_pixels or jax.default_backend() != "cpu" or not processor.max_pixels:
        return processor
    max_pixels = min(processor.max_pixels, CPU_MAX_PIXELS)
    return dataclasses.replace(
        processor, max_pixels=max_pixels, min_pixels=min(processor.min_pixels, max_pixels)
    )


def _fitting(config: EngineConfig, model: ModelConfig, processor: Any, backend: Backend) -> Any:
    """The processor with pictures that a chip has room for; a CPU's limit is `_processor`'s."""
    if jax.default_backend() == "cpu":
        return processor
    fitting = fit_pictures(
        config,
        model,
        processor,
        memory_bytes=device_memory_bytes(),
        itemsize=np.dtype(_dtype(config)).itemsize,
        encoder_chips=backend.num_shards // backend.num_lanes,
    )
    if fitting != processor:
        logger.warning(
            "pictures above %d pixels are made smaller, the model's limit is %d: a chip has no "
            "room to encode larger ones; %s",
            fitting.max_pixels, processor.max_pixels, _remedy(backend),
        )  # fmt: skip
    return fitting


def _remedy(backend: Backend) -> str:
    """What makes room for larger pictures."""
    split = ", or set encoder_parallel to model" if backend.num_lanes > 1 else ""
    return f"lower memory_fraction{split}"


def load_processor(config: EngineConfig, model: ModelConfig, directory: Path) -> Any:
    """The family's own, or transformers' for a family that has none.

    Raises:
        ConfigError, ModelError: As its `from_checkpoint`; or its patches are not the encoder's.
    """
    processor = _load_processor(config, model, directory)
    patch_size, values = model.vision.patch_size, model.vision.patch_values
    if processor.num_values != values:
        raise ModelError(
            f"the processor's file has patches of {processor.num_values} values, and config.json "
            f"of {values} (patch_size={patch_size}); do they belong together?"
        )
    return processor


def _load_processor(config: EngineConfig, model: ModelConfig, directory: Path) -> Any:
    limits = {"min_pixels": config.media.min_pixels, "max_pixels": config.media.max_pixels}
    if has_module(model.family, "processor"):
        own = family_module(model.family, "processor").ImageProcessor
        return own.from_checkpoint(directory, **limits)
    vision = model.vision
    return AutoImageProcessor.from_checkpoint(
        directory, patch_size=vision.patch_size, merge_size=vision.merge_size, **limits
    )


def video_processor(config: EngineConfig, basis: Basis) -> Any:
    """The family's video processor; None for a family that takes no videos."""
    family, processor = basis.model.family, basis.processor
    if not has_module(family, "video"):
        return None
    video = family_module(family, "video").VideoProcessor.from_checkpoint(
        basis.directory,
        processor,
        max_frames=config.media.max_frames,
        max_pixels=config.media.max_video_pixels,
    )
    if config.media.max_video_pixels or jax.default_backend() != "cpu":
        return video
    return dataclasses.replace(
        video, max_pixels=min(video.max_pixels, _CPU_VIDEO_PICTURES * processor.max_pixels)
    )


def _bits(directory: Path, model: ModelConfig, backends: Sequence[Backend]) -> tuple[str, ...]:
    """Parts of the model that the kernels for CPUs can read as the files hold them."""
    if not backends[0].native or is_converted(directory):
        return ()
    return bfloat16_parts(directory, model)


def _sizes(
    config: EngineConfig,
    model: ModelConfig,
    processor: Any,
    backends: Sequence[Backend],
    bits: Sequence[str],
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
        weight_itemsize=2 if len(bits) == 2 else dtype.itemsize,
        kernels=backend.kernels,
        num_chips=backend.num_shards,
        split_encoder=backend.split_encoder,
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
