"""Holds what lives on the device, and runs the steps on it. Host only, but for what it holds."""

import logging
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxmm.device import steps
from jaxmm.device.backend import Backend
from jaxmm.device.executables import Executables, Lower
from jaxmm.device.kv import KV_POOL, pool_shape
from jaxmm.device.lane import Lane
from jaxmm.device.ledger import CompileLedger
from jaxmm.device.sampling import Sampled, init_state
from jaxmm.device.sharding import WHOLE, param_spec
from jaxmm.host.batch import StepBatch, StepLayout
from jaxmm.host.lanes import MERGED_PATCHES, EncodeBatch
from jaxmm.models import family_module
from jaxmm.models.config import ModelConfig
from jaxmm.models.loading import param_shapes
from jaxmm.models.stored import Block, ParameterPath, Stored
from jaxmm.request import MAX_LOGIT_BIAS
from jaxmm.sizes import Sizes
from kernels_pallas.scatter_rows import row_shape

logger = logging.getLogger(__name__)

PRIME_IDS = 1024
"""Ids of a request's history that one prime step takes."""
UPLOAD_ROWS = 256
"""Rows that one upload step takes: a piece is 1 to 4 MB, and filler costs no more than that."""


class Runner:
    """Weights, KV pages, arena and sampler state of one engine; one thread calls it.

    Steps are dispatched and return at once; what they give back is read with `fetch`.
    """

    def __init__(
        self,
        model: ModelConfig,
        sizes: Sizes,
        dtype: DTypeLike,
        *,
        backend: Backend,
        ledger: CompileLedger,
        compile_cache_dir: str,
    ) -> None:
        """Allocate the device's memory; nothing is compiled or loaded yet.

        Args:
            model: Dimensions.
            sizes: Settled sizes.
            dtype: Of KV pages and arena.
            backend: Implementation of the ops, and the chips.
            ledger: Told of every executable.
            compile_cache_dir: Where executables are kept between starts.
        """
        self._sizes = sizes
        self._backend = backend
        self._params: steps.Params = param_shapes(model, dtype, self.param_sharding)
        text, vision = (family_module(model.family, name) for name in ("text", "vision"))
        self._decoder = nnx.graphdef(nnx.eval_shape(lambda: text.TextDecoder(model.text, dtype)))
        self._encoder = nnx.graphdef(
            nnx.eval_shape(
                lambda: vision.VisionEncoder(
                    model.vision, implementation=backend.kernels, dtype=dtype
                )
            )
        )
        self._vision = model.vision
        self._row_width = model.text.row_width
        t = model.text
        whole = backend.sharding(WHOLE)
        pool = pool_shape(t, sizes.num_pages, sizes.page_size, backend)
        pool_sharding = backend.sharding(KV_POOL)
        self._kv_pages = tuple(
            jnp.zeros(pool, dtype, device=pool_sharding) for _ in range(t.num_layers)
        )
        row = row_shape(t.width, levels=1 + t.deepstack_levels, implementation=backend.kernels)
        self._arena = jnp.zeros((sizes.num_rows + 1, *row), dtype, device=whole)
        self._state = jax.device_put(init_state(sizes.max_running, t.vocab_size), whole)
        fingerprint = f"{model}|{sizes}|{np.dtype(dtype)}|{backend}"
        self._executables = Executables(ledger, compile_cache_dir, fingerprint)

    def layout(self, num_tokens: int) -> StepLayout:
        """Layout of the smallest bucket with `num_tokens`."""
        sizes = self._sizes
        rung = sizes.buckets.step_tokens(num_tokens)
        return StepLayout(rung, sizes.max_running, sizes.num_table_pages)

    def place(self, params: steps.Params) -> None:
        """Take the weights, `{"vision": …, "text": …}` as `load_params` gives them."""
        self._params = params

    def place_param(self, stored: Stored) -> jax.Array:
        """Send one parameter to the device, each chip its part; only parts of chips here are read.

        A part that several chips hold is read once.
        """
        sharding = self.param_sharding(stored.path)
        if sharding is None:
            return jax.device_put(stored.read())
        parts: dict[str, npt.NDArray[Any]] = {}

        def part(block: Block | None) -> npt.NDArray[Any]:
            key = str(block)
            if key not in parts:
                parts[key] = stored.read(block)
            return parts[key]

        return jax.make_array_from_callback(stored.shape, sharding, part)

    def warm_up(self, *, progress: bool) -> None:
        """Make the executable of every bucket; needs no weights."""
        lowers: dict[tuple[str, int], Lower] = {
            ("prime", 0): self._lower_prime,
            ("upload", 0): self._lower_upload,
        }
        for rung in self._sizes.buckets.tokens:
            lowers["language", rung] = partial(self._lower_language, rung)
        for rung in self._sizes.buckets.patches:
            lowers["encode", rung] = partial(self._lower_encode, rung)
        self._executables.warm_up(lowers, progress=progress)

    def settle(self) -> None:
        """Wait for executables that are still being read from the cache."""
        self._executables.settle()

    def close(self) -> None:
        """Stop what runs in the background."""
        self._executables.close()

    @property
    def num_executables(self) -> int:
        return len(self._executables)

    def encode(self, lane: EncodeBatch) -> None:
        """Encode a lane into the arena."""
        run = self._executables["encode", lane.patches.shape[0]]
        rest = (lane.coords, lane.segment, lane.window, lane.sizes, lane.slots)
        patches, any_later = self._put((lane.patches, np.bool_(lane.later is not None)))
        # without video the second frames are never read: no second array crosses
        later = patches if lane.later is None else self._put(lane.later)
        placed = Lane(patches, later, any_later, *self._put(rest))
        self._arena = run(self._params["vision"], self._arena, placed)

    def upload(self, rows: npt.NDArray[np.float32], slots: npt.NDArray[np.int32]) -> None:
        """Put rows that a caller gave, float32[M, D], into the arena's slots, however many."""
        run = self._executables["upload", 0]
        for start in range(0, len(rows), UPLOAD_ROWS):
            here = slice(start, start + UPLOAD_ROWS)
            part = rows[here]
            padded = np.zeros((UPLOAD_ROWS, rows.shape[1]), np.float32)
            padded[: len(part)] = part
            where = np.full(UPLOAD_ROWS, self._sizes.num_rows, np.int32)  # filler: the last row
            where[: len(part)] = slots[here]
            self._arena = run(self._arena, *self._put((padded, where)))

    def step(self, batch: StepBatch) -> Sampled:
        """Run a language step; the rows asked for come back in order, those after are filler."""
        run = self._executables["language", batch.layout.num_tokens]
        self._kv_pages, self._state, sampled = run(
            self._params["text"],
            self._kv_pages,
            self._state,
            self._arena,
            self._put(batch.buffer),
        )
        return sampled

    def prime(
        self,
        slot: int,
        prompt_ids: npt.NDArray[np.int64],
        output_ids: npt.NDArray[np.int64],
        logit_bias: dict[int, float],
    ) -> None:
        """Give a state slot a request's history and bias, however long."""
        bias_ids = np.zeros(MAX_LOGIT_BIAS, np.int32)
        bias = np.zeros(MAX_LOGIT_BIAS, np.float32)
        bias_ids[: len(logit_bias)] = list(logit_bias)
        bias[: len(logit_bias)] = list(logit_bias.values())
        pieces = -(-max(len(prompt_ids), len(output_ids), 1) // PRIME_IDS)
        run = self._executables["prime", 0]
        for i in range(pieces):
            here = slice(i * PRIME_IDS, (i + 1) * PRIME_IDS)
            arguments = (
                np.int32(slot),
                np.bool_(i == 0),
                _padded(prompt_ids[here]),
                _padded(output_ids[here]),
                bias_ids,
                bias,
            )
            self._state = run(self._state, *self._put(arguments))

    def fetch(self, sampled: Sampled, *, logprobs: bool) -> Sampled:
        """Wait for a step and read what it sampled; without logprobs, the tokens alone."""
        if logprobs:
            return jax.device_get(sampled)
        return sampled._replace(token_B=jax.device_get(sampled.token_B))

    def _put(self, tree: Any, spec: PartitionSpec = WHOLE) -> Any:
        return jax.device_put(tree, self._backend.sharding(spec))

    def param_sharding(self, path: ParameterPath) -> NamedSharding | None:
        """Where the parameter at a path lies; None: on the one device."""
        return self._backend.sharding(param_spec(path))

    def _shape(self, *dims: int, dtype: DTypeLike = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=self._backend.sharding(WHOLE))

    def _shapes(self, tree: Any) -> Any:
        """What the compiler must know of arrays; where they lie only if there are many chips."""
        if self._backend.mesh is None:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
        )

    def _lower_language(self, rung: int) -> jax.stages.Lowered:
        layout = self.layout(rung)
        return steps.language_step.lower(
            self._decoder,
            self._backend,
            layout,
            self._shapes(self._params["text"]),
            self._shapes(self._kv_pages),
            self._shapes(self._state),
            self._shapes(self._arena),
            self._shape(layout.size),
        )

    def _lower_encode(self, rung: int) -> jax.stages.Lowered:
        vision, shape = self._vision, self._shape
        patches = shape(rung, vision.patch_values, dtype=jnp.uint8)
        lane = Lane(
            patches_NU=patches,
            later_NU=patches,
            any_later=shape(dtype=jnp.bool_),
            coords_N2=shape(rung, 2),
            segment_N=shape(rung),
            window_N=shape(rung) if vision.window_patches else None,
            size_N2=shape(rung, 2) if vision.position_side else None,
            slot_M=shape(rung // MERGED_PATCHES),
        )
        return steps.encode_step.lower(
            self._encoder,
            self._backend,
            self._shapes(self._params["vision"]),
            self._shapes(self._arena),
            lane,
        )

    def _lower_upload(self) -> jax.stages.Lowered:
        return steps.upload_step.lower(
            self._backend,
            self._shapes(self._arena),
            self._shape(UPLOAD_ROWS, self._row_width, dtype=jnp.float32),
            self._shape(UPLOAD_ROWS),
        )

    def _lower_prime(self) -> jax.stages.Lowered:
        shape, ids = self._shape, self._shape(PRIME_IDS)
        return steps.prime_step.lower(
            self._shapes(self._state),
            shape(),
            shape(dtype=jnp.bool_),
            ids,
            ids,
            shape(MAX_LOGIT_BIAS),
            shape(MAX_LOGIT_BIAS, dtype=jnp.float32),
        )


def _padded(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    padded = np.full(PRIME_IDS, -1, np.int32)
    padded[: len(ids)] = ids
    return padded
