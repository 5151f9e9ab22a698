"""Everything a compiler needs to know of the steps: shapes, types, and where arrays lie. Host only.

Nothing here takes device memory, so steps can be compiled for chips that are not there.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxmm.device import steps
from jaxmm.device.backend import Backend
from jaxmm.device.executables import Key, Lower
from jaxmm.device.kv import KV_POOL, pool_shape
from jaxmm.device.lane import Lane
from jaxmm.device.sampling import init_state
from jaxmm.device.sharding import WHOLE
from jaxmm.host.batch import StepLayout
from jaxmm.host.grammar import mask_words
from jaxmm.models import family_module
from jaxmm.models.config import ModelConfig
from jaxmm.models.lane_forms import lane_rows
from jaxmm.models.loading import param_shapes
from jaxmm.models.narrow import bits_shapes, of_step, twin_shapes
from jaxmm.request import MAX_LOGIT_BIAS
from jaxmm.sizes import Sizes
from kernels_pallas.scatter_rows import row_shape

PRIME_IDS = 1024
"""Ids of a request's history that one prime step takes."""
UPLOAD_ROWS = 256
"""Rows that one upload step takes: a piece is 1 to 4 MB, and filler costs no more than that."""
SCORE_ROWS = 256
"""Pairs of rows that one score step compares."""


class Lowering:
    """The steps of one engine, and the shapes of what they take."""

    def __init__(
        self,
        model: ModelConfig,
        sizes: Sizes,
        dtype: DTypeLike,
        backend: Backend,
        *,
        twin: bool = False,
        bits: Sequence[str] = (),
    ) -> None:
        """Describe the arrays; each is a `jax.ShapeDtypeStruct`.

        Args:
            model: Dimensions.
            sizes: Settled sizes.
            dtype: Of weights, KV pages and arena.
            backend: Implementation of the ops, and the chips.
            twin: Steps of one token take the decoder's `twin` (`of_step`).
            bits: Parts of the model whose matrices are kept `as_bits`.
        """
        self._vision = model.vision
        self._row_width, self._vocab_size = model.text.row_width, model.text.vocab_size
        self._width = model.text.width
        self._sizes = sizes
        self._backend = backend
        self.params: steps.Params = param_shapes(
            model, dtype, lambda path: backend.sharding(backend.param_spec(path))
        )
        if bits:
            self.params = bits_shapes(self.params, bits)
        self._twin = twin_shapes(self.params["text"]) if twin else None
        pool = pool_shape(model.text, sizes.num_pages, sizes.page_size, backend)
        self.kv_pages = tuple(
            self._shape(*pool, dtype=dtype, spec=KV_POOL) for _ in range(model.text.num_layers)
        )
        row = row_shape(
            model.text.width,
            levels=1 + model.text.deepstack_levels,
            implementation=backend.kernels,
        )
        self.arena = self._shape(sizes.num_rows + 1, *row, dtype=dtype)
        self.state = jax.tree.map(
            lambda x: self._shape(*x.shape, dtype=x.dtype),
            jax.eval_shape(lambda: init_state(sizes.max_running, model.text.vocab_size)),
        )
        words = mask_words(model.text.vocab_size)
        self.masks = self._shape(sizes.max_running, words, dtype=jnp.uint32)
        text, vision = (family_module(model.family, name) for name in ("text", "vision"))
        self._decoder = nnx.graphdef(nnx.eval_shape(lambda: text.TextDecoder(model.text, dtype)))
        self._encoder = nnx.graphdef(
            nnx.eval_shape(
                lambda: vision.VisionEncoder(
                    model.vision,
                    implementation=backend.attention,
                    axis=backend.encoder_axis,
                    dtype=dtype,
                )
            )
        )

    def layout(self, num_tokens: int) -> StepLayout:
        """Layout of the smallest bucket with `num_tokens`."""
        return step_layout(self._sizes, self._vocab_size, num_tokens)

    def all_steps(self) -> dict[Key, Lower]:
        """For each step and bucket, the function that lowers it."""
        lowers: dict[Key, Lower] = {
            ("prime", 0): self.prime,
            ("upload", 0): self.upload,
            ("score", 0): self.score,
        }
        for rung in self._sizes.buckets.tokens:
            lowers["language", rung] = partial(self.language, rung)
        for rung in self._sizes.buckets.patches:
            lowers["encode", rung] = partial(self.encode, rung)
        return lowers

    def language(self, rung: int) -> jax.stages.Lowered:
        """Lower the language step of a bucket of tokens."""
        layout = self.layout(rung)
        params = of_step(self.params["text"], self._twin, rung)
        return steps.language_step.lower(
            self._decoder,
            self._backend,
            layout,
            params,
            self.kv_pages,
            self.state,
            self.arena,
            self._shape(layout.size),
            self.masks,
        )

    def encode(self, rung: int) -> jax.stages.Lowered:
        """Lower the encode step of a bucket of patches, so many in each lane."""
        vision, num_lanes = self._vision, self._backend.num_lanes
        shape = partial(self._shape, rung * num_lanes, spec=self._backend.lane_spec)
        patches = shape(vision.patch_values, dtype=jnp.uint8)
        lane = Lane(
            patches_NU=patches,
            later_NU=patches,
            any_later=self._shape(dtype=jnp.bool_),
            coords_N2=shape(2),
            segment_N=shape(),
            window_N=shape() if vision.window_patches else None,
            size_N2=shape(2) if vision.position_side else None,
            slot_M=self._shape(lane_rows(rung, vision) * num_lanes),
        )
        return steps.encode_step.lower(
            self._encoder, self._backend, self.params["vision"], self.arena, lane
        )

    def upload(self) -> jax.stages.Lowered:
        """Lower the upload step."""
        return steps.upload_step.lower(
            self._backend,
            self.arena,
            self._shape(UPLOAD_ROWS, self._row_width, dtype=jnp.float32),
            self._shape(UPLOAD_ROWS),
        )

    def score(self) -> jax.stages.Lowered:
        """Lower the score step."""
        rows = self._shape(SCORE_ROWS)
        return steps.score_step.lower(self._backend, self._width, self.arena, rows, rows)

    def prime(self) -> jax.stages.Lowered:
        """Lower the prime step."""
        shape, ids = self._shape, self._shape(PRIME_IDS)
        return steps.prime_step.lower(
            self._backend,
            self.state,
            shape(),
            shape(dtype=jnp.bool_),
            ids,
            ids,
            shape(MAX_LOGIT_BIAS),
            shape(MAX_LOGIT_BIAS, dtype=jnp.float32),
        )

    def _shape(self, *dims: int, dtype: DTypeLike = jnp.int32, spec: PartitionSpec = WHOLE) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=self._backend.sharding(spec))


def step_layout(sizes: Sizes, vocab_size: int, num_tokens: int) -> StepLayout:
    """Layout of the smallest bucket with `num_tokens`."""
    rung = sizes.buckets.step_tokens(num_tokens)
    words = mask_words(vocab_size)
    return StepLayout(
        rung, sizes.max_running, sizes.num_table_pages, words, both_ways=sizes.whole_items
    )
