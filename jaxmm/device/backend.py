"""What the steps are built for: the implementation of the ops, and the chips. Host only.

Chosen once, when the engine starts; models ask for neither. Methods that say so are traced.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxmm.device import sharding
from jaxmm.device.sharding import WHOLE
from jaxmm.errors import ConfigError
from jaxmm.models.config import ModelConfig
from jaxmm.models.stored import ParameterPath
from kernels_pallas import native
from kernels_pallas.ragged_paged_attention.kernel import MAX_TABLE_BYTES
from kernels_pallas.segment_attention.windows import WINDOW
from kernels_pallas.tiling import LANES, tile_rows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backend:
    """What the steps are built for: the implementation of the ops, and the chips."""

    kernels: Literal["portable", "pallas"] = "portable"
    mesh: Mesh | None = None
    """With an axis `model`; None: one device, and nothing is said about sharding."""
    split_encoder: bool = False
    """The encoder's heads and MLP are split over the chips, which encode the same lane; else it is
    whole on each, which encodes a lane of its own."""
    native: bool = False
    """With "portable": attention, and products with weights that are kept in bfloat16, go to
    kernels compiled for this CPU (`kernels_pallas.native`), once they are registered."""

    @property
    def attention(self) -> Literal["portable", "native", "pallas"]:
        """The implementation of attention."""
        return "native" if self.native else self.kernels

    @property
    def num_shards(self) -> int:
        """Chips that heads are split over."""
        return 1 if self.mesh is None else self.mesh.shape["model"]

    @property
    def num_lanes(self) -> int:
        """Lanes that are encoded together."""
        return 1 if self.split_encoder else self.num_shards

    @property
    def lane_spec(self) -> PartitionSpec:
        """How the patches of all lanes are split."""
        return WHOLE if self.split_encoder else sharding.LANES

    @property
    def encoder_axis(self) -> str | None:
        """Mesh axis that the encoder is split over (within `per_chip`)."""
        return "model" if self.split_encoder else None

    def param_spec(self, path: ParameterPath) -> PartitionSpec:
        """How the parameter at a path is split."""
        return sharding.param_spec(path, split_encoder=self.split_encoder)

    @property
    def devices(self) -> list[jax.Device]:
        """The chips, in the order of the mesh; without one the first."""
        return jax.local_devices()[:1] if self.mesh is None else list(self.mesh.devices.flat)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Processes that have chips of it, in ascending order."""
        return tuple(sorted({device.process_index for device in self.devices}))

    def lane_rows(self, shape: tuple[int, ...]) -> dict[int, list[slice]]:
        """Rows of the lanes' patches that the chips of each process take, by process id."""
        placed = self.sharding(self.lane_spec)
        assert placed is not None, "many processes have a mesh"
        rows: dict[int, list[slice]] = {}
        device: Any
        for device, block in placed.devices_indices_map(shape).items():
            part = slice(*block[0].indices(shape[0])[:2])
            own = rows.setdefault(device.process_index, [])
            if part not in own:  # chips that encode the same lane
                own.append(part)
        return rows

    def sharding(self, spec: PartitionSpec) -> NamedSharding | None:
        """The sharding of a spec; None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, spec)

    def whole(self, tree: Any) -> Any:
        """Ask for arrays that are whole on every chip (traced)."""
        return (
            tree
            if self.mesh is None
            else jax.lax.with_sharding_constraint(tree, self.sharding(WHOLE))
        )

    def gathered(self, rows_MX: jax.Array) -> jax.Array:
        """The rows of all lanes one below the other, on each chip (traced, in `per_chip`)."""
        if self.num_lanes == 1:
            return rows_MX
        gathered: jax.Array = jax.lax.all_gather(rows_MX, "model", tiled=True)
        return gathered

    def per_chip(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """A function that runs on each chip on its own part of the arrays (traced).

        Args:
            in_specs: For each argument a PartitionSpec; `spec_of` makes them from letters.
            out_specs: The same for the results.
        """
        if self.mesh is None:
            return function
        mapped: Callable[..., Any] = jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return mapped


def settle_backends(
    kernels: Literal["auto", "pallas", "portable"],
    tensor_parallel: int,
    data_parallel: int,
    model: ModelConfig,
    dtype: DTypeLike,
    encoder_parallel: Literal["lanes", "model"] = "lanes",
) -> tuple[Backend, ...]:
    """Choose the implementation, and the chips of each replica.

    Args:
        kernels: The setting; "auto" is Pallas on TPUs, for models that the kernels can take.
        tensor_parallel: Chips that the model is split over; 0: as many as there are and it can be.
        data_parallel: Replicas, each on so many chips; 0: as many as there are chips for.
        model: Its dimensions.
        dtype: Of weights, KV and arena.
        encoder_parallel: "model": the encoder is split over the chips of a replica too.

    Returns:
        One for each replica; they differ in their chips alone.

    Raises:
        ConfigError: What was asked for cannot run here; the text says why.
    """
    chosen = _settle_kernels(kernels, model, dtype)
    split = encoder_parallel == "model"
    num_chips, num_replicas = _settle_chips(tensor_parallel, data_parallel, model, split)
    if num_chips == num_replicas == 1:
        has_native = kernels == "auto" and chosen == "portable" and _has_native(dtype)
        return (Backend(chosen, native=has_native),)
    meshes = (_mesh(num_chips, replica) for replica in range(num_replicas))
    return tuple(Backend(chosen, mesh, split and num_chips > 1) for mesh in meshes)


def _settle_kernels(
    kernels: Literal["auto", "pallas", "portable"], model: ModelConfig, dtype: DTypeLike
) -> Literal["pallas", "portable"]:
    platform = jax.default_backend()
    if kernels == "pallas" and platform != "tpu":
        raise ConfigError(
            f"kernels='pallas' needs a TPU and this machine has a {platform}; use 'auto'"
        )
    if kernels == "portable" or platform != "tpu":
        return "portable"
    obstacles = "; ".join(model_obstacles(model, dtype))
    if not obstacles:
        return "pallas"
    if kernels == "pallas":
        raise ConfigError(f"kernels='pallas' cannot run this model: {obstacles}; use 'auto'")
    logger.warning("kernels=portable reason=%s", obstacles)
    return "portable"


def _has_native(dtype: DTypeLike) -> bool:
    """Whether there are kernels for this CPU, and for steps in such a type."""
    on_cpu = jax.default_backend() == "cpu" and np.dtype(dtype) == np.float32
    return on_cpu and native.is_available()


def model_obstacles(model: ModelConfig, dtype: DTypeLike) -> Iterator[str]:
    """What keeps the TPU kernels from running a model; nothing if they can."""
    if np.dtype(dtype).name not in ("float32", "bfloat16"):
        yield f"the kernels take float32 and bfloat16, not {np.dtype(dtype)}"
    if model.text.width % LANES:
        yield f"a text width of {model.text.width} is no multiple of {LANES}"
    channels = model.vision.head_channels
    if channels > LANES and channels % LANES:
        yield f"encoder heads of {channels} channels are over {LANES} and no multiple of it"
    if model.vision.window_patches not in (0, WINDOW):
        yield f"windows of {model.vision.window_patches} patches; the kernel has {WINDOW}"


def check_sizes(
    backend: Backend, page_size: int, max_running: int, num_table_pages: int, dtype: DTypeLike
) -> None:
    """Refuse sizes that the chosen kernels cannot take.

    Args:
        backend: Chosen by `settle_backends`.
        page_size: Tokens of a page.
        max_running: Rows of the page table.
        num_table_pages: Pages of the longest request.
        dtype: Of the pages.

    Raises:
        ConfigError: The text names the setting.
    """
    if backend.kernels != "pallas":
        return
    if page_size < tile_rows(dtype):
        raise ConfigError(
            f"pages.page_size={page_size} is below {tile_rows(dtype)}, the least that the TPU "
            f"kernels can move in {np.dtype(dtype)}; use 128"
        )
    table_bytes = 4 * max_running * num_table_pages
    if table_bytes > MAX_TABLE_BYTES:
        raise ConfigError(
            f"max_running={max_running} requests of {num_table_pages} pages need a page table of "
            f"{table_bytes} bytes; the TPU kernels have room for {MAX_TABLE_BYTES}. Raise "
            "pages.page_size, or lower max_running or max_model_len."
        )


def spread_kv_heads(model: ModelConfig, num_chips: int) -> ModelConfig:
    """Where there are more chips than KV heads, each head stands on several chips."""
    text = model.text
    if num_chips <= text.num_kv_heads:
        return model
    copies = num_chips // text.num_kv_heads
    spread = dataclasses.replace(text, num_kv_heads=num_chips, kv_copies=copies)
    return dataclasses.replace(model, text=spread)


def _settle_chips(
    tensor_parallel: int, data_parallel: int, model: ModelConfig, split_encoder: bool
) -> tuple[int, int]:
    """Chips of a replica, and replicas; what neither takes is told, or refused on a pod."""
    there = jax.device_count()
    num_chips = tensor_parallel or most_chips(
        model, there // (data_parallel or 1), split_encoder=split_encoder
    )
    num_replicas = data_parallel or max(1, there // num_chips)
    used = num_chips * num_replicas
    asked = f"tensor_parallel={num_chips}"
    if num_replicas > 1:
        asked = f"data_parallel={num_replicas} replicas of {asked}"
    if used > there:
        kind = jax.devices()[0].platform
        raise ConfigError(f"{asked} and this machine has {there} {kind} device(s)")
    for rest in rests(model, num_chips, split_encoder=split_encoder):
        raise ConfigError(f"tensor_parallel={num_chips} does not divide the model's {rest}")
    if jax.process_count() > 1 and used != there:
        raise ConfigError(
            f"{asked} and the {jax.process_count()} processes of the pod have {there} chips; a pod "
            "uses all of them"
        )
    here = jax.local_device_count()
    if num_replicas > 1 and here % num_chips and num_chips % here:
        raise ConfigError(
            f"{asked} and a process has {here} chips: a replica fills whole processes, or several "
            "fill one"
        )
    if used < there:
        logger.warning(
            "chips=%d used=%d idle=%d: set data_parallel or tensor_parallel to 0 to use more",
            there, used, there - used,
        )  # fmt: skip
    return num_chips, num_replicas


def most_chips(model: ModelConfig, num_devices: int, *, split_encoder: bool = False) -> int:
    """The most chips of those there are that a model can be split over."""
    counts = range(1, max(1, num_devices) + 1)
    return max(n for n in counts if not any(rests(model, n, split_encoder=split_encoder)))


def rests(model: ModelConfig, num_chips: int, *, split_encoder: bool = False) -> Iterator[str]:
    """What of a model cannot be split over so many chips."""
    text, vision = model.text, model.vision
    if text.num_kv_heads % num_chips and num_chips % text.num_kv_heads:
        yield f"{text.num_kv_heads} KV heads, nor they it"
    for value, name in (
        (text.num_heads, "query heads"),
        (text.mlp_width, "MLP channels"),
        (text.num_experts, "experts"),  # 0 without
        (text.vocab_size, "vocabulary entries"),
        (vision.num_heads if split_encoder else 0, "encoder heads"),
        (vision.mlp_width if split_encoder else 0, "encoder MLP channels"),
    ):
        if value % num_chips:
            yield f"{value} {name}"


def _mesh(num_chips: int, replica: int) -> Mesh:
    """A mesh over the chips of a replica, all of them along `model`.

    Chips that follow each other are neighbours, those of one host before those of the next.
    """
    start = replica * num_chips
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return jax.make_mesh(
        (num_chips,),
        ("model",),
        devices=devices[start : start + num_chips],
        axis_types=(jax.sharding.AxisType.Auto,),
    )
