"""The text weights once more in bfloat16, for steps that do little but read them. Host only.

Published checkpoints hold bfloat16. Where the engine computes in float32 (on CPUs) each weight has
16 bits that are zero, and a step of few tokens is bound by reading weights: a twin without those
bits is the same numbers in half the bytes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxmm.device.linear import MAX_WIDENED
from jaxmm.models.config import ModelConfig
from jaxmm.models.loading import open_params
from kernels_pallas.native import MAX_ROWS

_OF_IDS = ("embed_VD", "head_VD")
"""Matrices that few rows of any step meet."""


def text_is_bfloat16(directory: Path, model: ModelConfig) -> bool:
    """Whether the files hold all matrices of the decoder in bfloat16; reads headers alone.

    Raises:
        ModelError: As in `load_params`.
    """
    with open_params(directory, model, np.float32) as table:
        return all(
            stored.tensor_dtypes() == {"BF16"}
            for stored in table
            if stored.path[0] == "text" and len(stored.shape) > 1
        )


def twin_shapes(params: Mapping[Any, Any], *, native: bool = False) -> Any:
    """What `make_twin` gives for such parameters, as `jax.ShapeDtypeStruct`."""

    def shape(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, _narrow_type(path, x, native=native) or x.dtype)

    return jax.tree.map_with_path(shape, params)


def make_twin(params: Mapping[Any, Any], *, native: bool = False) -> Any:
    """The same numbers, in bfloat16 where that is quicker to read; the others are shared.

    Args:
        params: Float32 arrays, those of a decoder that `text_is_bfloat16`.
        native: As in `of_step`. Matrices that only those kernels read are uint16, the bits of
            bfloat16: by that `linear` knows them.
    """

    def narrow(path: Any, x: Any) -> Any:
        dtype = _narrow_type(path, x, native=native)
        return x if dtype is None else jax.device_put(_high_halves(np.asarray(x)).view(dtype))

    return jax.tree.map_with_path(narrow, params)


def of_step(params: Any, twin: Any, num_tokens: int, *, native: bool) -> Any:
    """What the step of a bucket takes of the decoder's weights, or of their shapes.

    Args:
        params: As they were loaded.
        twin: From `make_twin` or `twin_shapes`; None: there is none.
        num_tokens: Of the bucket.
        native: There are kernels for a few rows of float32 (`kernels_pallas.native`), and so for
            the rows that a larger step samples; without, only one row gains.
    """
    if twin is None or (num_tokens > 1 and not native):
        return params
    if num_tokens <= MAX_ROWS:
        return twin
    return {name: twin[name] if name in _OF_IDS else params[name] for name in params}


def _narrow_type(path: Any, x: Any, *, native: bool) -> Any:
    """What a parameter is in the twin; None: what it is."""
    if x.ndim < 2:
        return None
    if native and path[0].key not in _OF_IDS:
        return np.uint16
    return ml_dtypes.bfloat16 if x.shape[-1] <= MAX_WIDENED else None


def _high_halves(value: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Drop the low 16 bits of each number, which are zero."""
    halves = value.view("<u2").reshape(*value.shape, 2)
    assert not halves[..., 0].any(), "a weight is no bfloat16"
    return np.ascontiguousarray(halves[..., 1])
