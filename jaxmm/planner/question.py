"""What a plan is about: a model's config.json, the chips, and the settings. Host only."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmm.basis import load_processor
from jaxmm.config import EngineConfig
from jaxmm.device.backend import Backend, model_obstacles, spread_kv_heads
from jaxmm.encoder_memory import fit_pictures
from jaxmm.errors import ConfigError, ModelError
from jaxmm.models import family_module, has_module, read_config
from jaxmm.models.config import ModelConfig
from jaxmm.planner.chips import Chip, chip_of
from jaxmm.planner.compiler import describe_devices, mesh_of
from jaxmm.sizes import Sizes, settle_sizes

_PUBLISHED_ROWS = 16384
"""Largest picture of every published Qwen checkpoint, in rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model, the chips, and the settings: what all of a plan is about."""

    name: str
    model: ModelConfig
    processor: Any
    topology: str
    chip: Chip
    devices: Sequence[Any]
    config: EngineConfig
    dtype: Any

    @property
    def itemsize(self) -> int:
        size: int = np.dtype(self.dtype).itemsize
        return size

    @property
    def split_encoder(self) -> bool:
        """Whether the encoder is split like the decoder."""
        return self.config.encoder_parallel == "model"

    def backend(self, num_chips: int) -> Backend:
        """The TPU kernels on the first of the chips."""
        mesh = mesh_of(list(self.devices), {"model": num_chips})
        return Backend("pallas", mesh, self.split_encoder and num_chips > 1)

    def processor_on(self, num_chips: int) -> Any:
        """The processor, its pictures no larger than so many chips have room for."""
        return fit_pictures(
            self.config,
            self.model,
            self.processor,
            memory_bytes=self.chip.memory_bytes,
            itemsize=self.itemsize,
            encoder_chips=num_chips if self.split_encoder else 1,
        )

    def settle(self, num_chips: int) -> Sizes:
        """Sizes of an engine whose model is split over so many of the chips.

        Raises:
            ConfigError: The settings do not fit a chip's memory.
        """
        return settle_sizes(
            self.config,
            spread_kv_heads(self.model, num_chips),
            self.processor_on(num_chips).max_patches,
            platform="tpu",
            memory_bytes=self.chip.memory_bytes,
            itemsize=self.itemsize,
            kernels="pallas",
            num_chips=num_chips,
            split_encoder=self.split_encoder,
        )


def read_question(model: str | Path, topology: str, config: EngineConfig | None = None) -> Question:
    """Read what a plan is about; arguments and errors are those of `jaxmm.plan`."""
    config = config or EngineConfig()
    dtype = jnp.dtype("bfloat16" if config.dtype == "auto" else config.dtype)
    with _directory(Path(model).expanduser()) as directory:
        dimensions = read_config(directory)
        processor = _processor(config, dimensions, directory)
    obstacles = "; ".join(model_obstacles(dimensions, dtype))
    if obstacles:
        raise ConfigError(f"the TPU kernels cannot run this model: {obstacles}")
    devices = describe_devices(topology)  # after what is wrong without the compiler too
    path = Path(model).expanduser()
    return Question(
        name=path.parent.name if path.name == "config.json" else path.stem,
        model=dimensions,
        processor=processor,
        topology=topology,
        chip=chip_of(topology),
        devices=devices,
        config=config,
        dtype=dtype,
    )


@contextmanager
def _directory(path: Path) -> Iterator[Path]:
    """The directory that a config.json stands in, or a new one if it has another name."""
    if path.is_dir():
        yield path
    elif path.name == "config.json" and path.is_file():
        yield path.parent
    elif path.is_file():
        with tempfile.TemporaryDirectory() as directory:
            shutil.copy(path, Path(directory) / "config.json")
            yield Path(directory)
    else:
        raise ModelError(f"{str(path)!r} is neither a directory nor a config.json")


def _processor(config: EngineConfig, model: ModelConfig, directory: Path) -> Any:
    """The checkpoint's; without its file, one with the limits of the published checkpoints."""
    vision, media = model.vision, config.media
    names = ("preprocessor_config.json", "processor_config.json")
    named = any((directory / name).exists() for name in names)
    # of tiles, and of pictures of one size, config.json tells all
    tells_all = vision.tile_side or vision.picture_side
    if named or tells_all or not has_module(model.family, "processor"):
        return load_processor(config, model, directory)
    unit = vision.patch_size * vision.merge_size
    return family_module(model.family, "processor").ImageProcessor(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        min_pixels=media.min_pixels or 4 * unit**2,
        max_pixels=media.max_pixels or _PUBLISHED_ROWS * unit**2,
    )
