"""Holds what lives on the device, and runs the steps on it. Host only, but for what it holds."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxmm.device import steps
from jaxmm.device.backend import Backend
from jaxmm.device.executables import Executables
from jaxmm.device.lane import Lane
from jaxmm.device.ledger import CompileLedger
from jaxmm.device.lowering import PRIME_IDS, SCORE_ROWS, UPLOAD_ROWS, Lowering
from jaxmm.device.sampling import Sampled
from jaxmm.device.sharding import WHOLE
from jaxmm.host.batch import StepBatch, StepLayout
from jaxmm.host.lanes import EncodeBatch
from jaxmm.models.config import ModelConfig
from jaxmm.models.narrow import as_bits, make_twin, of_step
from jaxmm.models.stored import Block, ParameterPath, Stored
from jaxmm.request import MAX_LOGIT_BIAS
from jaxmm.sizes import Sizes
from kernels_pallas import native


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
        twin: bool = False,
        bits: Sequence[str] = (),
    ) -> None:
        """Allocate the device's memory; nothing is compiled or loaded yet.

        Args:
            model: Dimensions.
            sizes: Settled sizes.
            dtype: Of KV pages and arena.
            backend: Implementation of the ops, and the chips.
            ledger: Told of every executable.
            compile_cache_dir: Where executables are kept between starts.
            twin: Keep the decoder's weights in bfloat16 too, for steps of one token.
            bits: Parts of the model whose matrices are kept in bfloat16 alone (`models.narrow`).
        """
        self._lowering = Lowering(model, sizes, dtype, backend, twin=twin, bits=bits)
        self._bits = bits
        self._has_twin = twin
        self._sizes = sizes
        self.backend = backend
        self._params: steps.Params = {}
        self._text: dict[int, Any] = {}  # the text weights for the step of each bucket
        self._kv_pages = jax.tree.map(_zeros, self._lowering.kv_pages)
        self._arena = _zeros(self._lowering.arena)
        self._state = jax.tree.map(_zeros, self._lowering.state)  # `init_state` is all zeros
        self._no_masks = _zeros(self._lowering.masks)
        fingerprint = (
            f"{model}|{sizes}|{np.dtype(dtype)}|{backend}|{twin}|{bits}|{_wiring(backend)}"
        )
        prepare = partial(native.register, compile_cache_dir) if backend.native else None
        self._executables = Executables(
            ledger, compile_cache_dir, fingerprint, backend.devices, prepare
        )

    def layout(self, num_tokens: int) -> StepLayout:
        """Layout of the smallest bucket with `num_tokens`."""
        return self._lowering.layout(num_tokens)

    def place(self, params: steps.Params) -> None:
        """Take the weights, `{"vision": …, "text": …}` as `load_params` gives them."""
        self._params = params
        twin = make_twin(params["text"]) if self._has_twin else None
        self._text = {
            rung: of_step(params["text"], twin, rung) for rung in self._sizes.buckets.tokens
        }

    def place_copy(self, params: steps.Params) -> None:
        """Take a copy of the weights that another replica has, straight from its chips."""
        where = jax.tree.map(lambda shape: shape.sharding, self._lowering.params)
        self.place(jax.device_put(params, where))

    def place_param(self, stored: Stored) -> jax.Array:
        """Send one parameter to the device, each chip its part; only parts of chips here are read.

        A part that several chips hold is read once.
        """
        sharding = self.param_sharding(stored.path)
        if sharding is None:
            value = stored.read()
            has_bits = stored.path[0] in self._bits
            return jax.device_put(as_bits(stored.path, value) if has_bits else value)
        parts: dict[str, npt.NDArray[Any]] = {}

        def part(block: Block | None) -> npt.NDArray[Any]:
            key = str(block)
            if key not in parts:
                parts[key] = stored.read(block)
            return parts[key]

        return jax.make_array_from_callback(stored.shape, sharding, part)

    def warm_up(self, *, progress: bool) -> None:
        """Make the executable of every bucket; needs no weights."""
        self._executables.warm_up(self._lowering.all_steps(), progress=progress)

    def settle(self) -> None:
        """Wait for executables that are still being read from the cache."""
        self._executables.settle()

    def close(self) -> None:
        """Stop what runs in the background."""
        self._executables.close()

    @property
    def num_executables(self) -> int:
        return len(self._executables)

    def was_run(self, step: str, size: int) -> bool:
        """Whether the executable of a bucket was ever run; `step` is "language", "encode", or
        "score", whose one size counts as 0."""
        return self._executables.was_used((step, size))

    def is_ready(self, step: str, size: int) -> bool:
        """Whether the executable of a bucket is there, not still being read from the cache."""
        return self._executables.is_ready((step, size))

    def encode(self, lanes: EncodeBatch) -> None:
        """Encode all lanes into the arena."""
        spec = self.backend.lane_spec
        run = self._executables["encode", len(lanes.patches) // self.backend.num_lanes]
        patches = self._put(lanes.patches, spec)
        # without video the second frames are never read: no second array crosses
        later = patches if lanes.later is None else self._put(lanes.later, spec)
        coords, segment, window, sizes = self._put(
            (lanes.coords, lanes.segment, lanes.window, lanes.sizes), spec
        )
        any_later, slots = self._put((np.bool_(lanes.later is not None), lanes.slots))
        placed = Lane(patches, later, any_later, coords, segment, window, sizes, slots)
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

    def score(self, before: npt.NDArray[np.int32], after: npt.NDArray[np.int32]) -> list[jax.Array]:
        """Compare arena rows pair by pair, however many; `read_scores` reads the result."""
        run = self._executables["score", 0]
        scores: list[jax.Array] = []
        for start in range(0, len(before), SCORE_ROWS):
            pair = np.full((2, SCORE_ROWS), -1, np.int32)
            stop = min(start + SCORE_ROWS, len(before))
            pair[:, : stop - start] = before[start:stop], after[start:stop]
            scores.append(run(self._arena, *self._put((pair[0], pair[1]))))
        return scores

    def read_scores(self, scores: list[jax.Array]) -> npt.NDArray[np.float32]:
        """Wait for what `score` gave: float32, one for each pair, and filler."""
        return np.concatenate(jax.device_get(scores))

    def step(self, batch: StepBatch) -> Sampled:
        """Run a language step; the rows asked for come back in order, those after are filler."""
        num_tokens = batch.layout.num_tokens
        run = self._executables["language", num_tokens]
        self._kv_pages, self._state, sampled = run(
            self._text[num_tokens],
            self._kv_pages,
            self._state,
            self._arena,
            self._put(batch.buffer),
            self._no_masks if batch.allowed_BO is None else self._put(batch.allowed_BO),
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
        """Send arrays to the chips; those of other processes get theirs from there."""
        sharding = self.backend.sharding(spec)
        if sharding is None or sharding.is_fully_addressable:
            return jax.device_put(tree, sharding)
        return jax.tree.map(partial(_own_parts, sharding=sharding), tree)

    def param_sharding(self, path: ParameterPath) -> NamedSharding | None:
        """Where the parameter at a path lies; None: on the one device."""
        return self.backend.sharding(self.backend.param_spec(path))


def _wiring(backend: Backend) -> list[int]:
    """Chips whose links a compiler may have built on: only theirs is the executable then."""
    linked = backend.num_shards > 1 and jax.default_backend() == "tpu"
    return [device.id for device in backend.devices] if linked else []


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)


def _own_parts(array: Any, sharding: NamedSharding) -> jax.Array:
    """An array of all processes, each of which has the parts of its own chips."""
    value = np.asarray(array)
    places = sharding.addressable_devices_indices_map(value.shape)
    parts = [jax.device_put(value[block], device) for device, block in places.items()]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)


def _padded(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    padded = np.full(PRIME_IDS, -1, np.int32)
    padded[: len(ids)] = ids
    return padded
