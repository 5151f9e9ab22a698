"""Holds what lives on the device, and runs the steps on it. Host only, but for what it holds."""

import logging
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.typing import DTypeLike

from jaxmm.device import steps
from jaxmm.device.executables import Executables, Lower
from jaxmm.device.lane import Lane
from jaxmm.device.ledger import CompileLedger
from jaxmm.device.sampling import Sampled, init_state
from jaxmm.host.batch import StepBatch, StepLayout
from jaxmm.host.lanes import MERGED_PATCHES, EncodeBatch
from jaxmm.models import family_module
from jaxmm.models.config import ModelConfig
from jaxmm.models.loading import param_shapes
from jaxmm.request import MAX_LOGIT_BIAS
from jaxmm.sizes import Sizes

logger = logging.getLogger(__name__)

PRIME_IDS = 1024
"""Ids of a request's history that one prime step takes."""


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
        ledger: CompileLedger,
        compile_cache_dir: str,
    ) -> None:
        """Allocate the device's memory; nothing is compiled or loaded yet.

        Args:
            model: Dimensions.
            sizes: Settled sizes.
            dtype: Of KV pages and arena.
            ledger: Told of every executable.
            compile_cache_dir: Where executables are kept between starts.
        """
        self._sizes = sizes
        self._params: steps.Params = param_shapes(model, dtype)
        text, vision = (family_module(model.family, name) for name in ("text", "vision"))
        self._decoder = nnx.graphdef(nnx.eval_shape(lambda: text.TextDecoder(model.text, dtype)))
        self._encoder = nnx.graphdef(
            nnx.eval_shape(lambda: vision.VisionEncoder(model.vision, dtype=dtype))
        )
        self._vision = model.vision
        t = model.text
        page_shape = (sizes.num_pages, 2 * t.num_kv_heads, sizes.page_size, t.head_channels)
        self._kv_pages = tuple(jnp.zeros(page_shape, dtype) for _ in range(t.num_layers))
        self._arena = jnp.zeros((sizes.num_rows + 1, t.row_width), dtype)
        self._state = init_state(sizes.max_running, t.vocab_size)
        fingerprint = f"{model}|{sizes}|{np.dtype(dtype)}"
        self._executables = Executables(ledger, compile_cache_dir, fingerprint)

    def layout(self, num_tokens: int) -> StepLayout:
        """Layout of the smallest bucket with `num_tokens`."""
        sizes = self._sizes
        rung = sizes.buckets.step_tokens(num_tokens)
        return StepLayout(rung, sizes.max_running, sizes.num_table_pages)

    def place(self, params: steps.Params) -> None:
        """Take the weights, `{"vision": …, "text": …}` as `load_params` gives them."""
        self._params = params

    def warm_up(self, *, progress: bool) -> None:
        """Make the executable of every bucket; needs no weights."""
        lowers: dict[tuple[str, int], Lower] = {("prime", 0): self._lower_prime}
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
        patches = jax.device_put(lane.patches)
        # without video the second frames are never read: no second array crosses
        later = patches if lane.later is None else jax.device_put(lane.later)
        any_later = jax.device_put(np.bool_(lane.later is not None))
        placed = Lane(patches, later, any_later, *jax.device_put(rest))
        self._arena = run(self._params["vision"], self._arena, placed)

    def step(self, batch: StepBatch) -> Sampled:
        """Run a language step; the rows asked for come back in order, those after are filler."""
        run = self._executables["language", batch.layout.num_tokens]
        self._kv_pages, self._state, sampled = run(
            self._params["text"],
            self._kv_pages,
            self._state,
            self._arena,
            jax.device_put(batch.buffer),
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
            self._state = run(self._state, *jax.device_put(arguments))

    def fetch(self, sampled: Sampled, *, logprobs: bool) -> Sampled:
        """Wait for a step and read what it sampled; without logprobs, the tokens alone."""
        if logprobs:
            return jax.device_get(sampled)
        return sampled._replace(token_B=jax.device_get(sampled.token_B))

    def _lower_language(self, rung: int) -> jax.stages.Lowered:
        layout = self.layout(rung)
        return steps.language_step.lower(
            self._decoder,
            layout,
            _shapes(self._params["text"]),
            _shapes(self._kv_pages),
            _shapes(self._state),
            _shapes(self._arena),
            jax.ShapeDtypeStruct((layout.size,), jnp.int32),
        )

    def _lower_encode(self, rung: int) -> jax.stages.Lowered:
        vision = self._vision

        def shape(*dims: int, dtype: DTypeLike = jnp.int32) -> Any:
            return jax.ShapeDtypeStruct(dims, dtype)

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
            self._encoder, _shapes(self._params["vision"]), _shapes(self._arena), lane
        )

    def _lower_prime(self) -> jax.stages.Lowered:
        ids = jax.ShapeDtypeStruct((PRIME_IDS,), jnp.int32)
        return steps.prime_step.lower(
            _shapes(self._state),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.bool_),
            ids,
            ids,
            jax.ShapeDtypeStruct((MAX_LOGIT_BIAS,), jnp.int32),
            jax.ShapeDtypeStruct((MAX_LOGIT_BIAS,), jnp.float32),
        )


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _padded(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    padded = np.full(PRIME_IDS, -1, np.int32)
    padded[: len(ids)] = ids
    return padded
