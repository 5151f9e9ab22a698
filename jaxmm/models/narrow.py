"""Weights in bfloat16 for steps that compute in float32: half the bytes to read. Host only.

Published checkpoints hold bfloat16. Where the engine computes in float32 (on CPUs) each weight has
16 bits that are zero. With kernels that widen while they multiply (`kernels_pallas.native`) all
matrices are kept as the files have them, the bits as uint16: by that `linear` knows them, and XLA
cannot widen them by accident. Without, XLA widens for a step of one token alone, so the decoder
has a twin for that step beside its float32.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxmm.device.linear import MAX_WIDENED
from jaxmm.models.config import ModelConfig
from jaxmm.models.loading import open_params
from jaxmm.models.stored import ParameterPath

_OF_IDS = ("embed_VD", "head_VD")
"""Matrices that are read by row too, or by few rows alone: bfloat16 by name."""
_OF_DECODER = "qkv_OD", "out_DO", "gate_up_2FD", "down_DF"
_OF_ENCODER = "qkv_3OE", "out_EO", "gate_up_2FE", "up_FE", "down_EF", "hidden_XX", "out_DX"
_OF_LINEAR = frozenset((*_OF_DECODER, *_OF_ENCODER))
"""Matrices that nothing but `linear` reads."""


def bfloat16_parts(directory: Path, model: ModelConfig) -> tuple[str, ...]:
    """Which of encoder ("vision") and decoder ("text") have all their matrices in bfloat16; reads
    headers alone.

    Raises:
        ModelError: As in `load_params`.
    """
    with open_params(directory, model, np.float32) as table:
        others = {
            stored.path[0]
            for stored in table
            if len(stored.shape) > 1 and stored.tensor_dtypes() != {"BF16"}
        }
    return tuple(part for part in ("vision", "text") if part not in others)


def bits_shapes(params: Mapping[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """What parameters are once `as_bits` has taken those of some parts, as
    `jax.ShapeDtypeStruct`."""

    def shape(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        dtype = _bits_type(path[-1].key) if path[0].key in parts else None
        return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)

    made: dict[str, Any] = jax.tree.map_with_path(shape, params)
    return made


def as_bits(path: ParameterPath, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A parameter of float32 as the kernels read it: half as large, or as it is."""
    dtype = _bits_type(path[-1])
    return value if dtype is None else _high_halves(value).view(dtype)


def twin_shapes(params: Mapping[Any, Any]) -> Any:
    """What `make_twin` gives for such parameters, as `jax.ShapeDtypeStruct`."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, ml_dtypes.bfloat16 if _is_widened(x) else x.dtype)

    return jax.tree.map(shape, params)


def make_twin(params: Mapping[Any, Any]) -> Any:
    """The same numbers, in bfloat16 where that is quicker to read; the others are shared.

    Args:
        params: Float32 arrays of a decoder that is one of `bfloat16_parts`.
    """

    def narrow(x: Any) -> Any:
        if not _is_widened(x):
            return x
        return jax.device_put(_high_halves(np.asarray(x)).view(ml_dtypes.bfloat16))

    return jax.tree.map(narrow, params)


def of_step(params: Any, twin: Any, num_tokens: int) -> Any:
    """What the step of a bucket takes of the decoder's weights, or of their shapes.

    Args:
        params: As they were loaded.
        twin: From `make_twin` or `twin_shapes`; None: there is none.
        num_tokens: Of the bucket; XLA gains from narrow weights for one row alone.
    """
    return params if twin is None or num_tokens > 1 else twin


def _bits_type(name: str | int) -> Any:
    """What a parameter is for the kernels; None: what it is."""
    if name in _OF_IDS:
        return ml_dtypes.bfloat16
    return np.uint16 if name in _OF_LINEAR else None


def _is_widened(x: Any) -> bool:
    return x.ndim > 1 and x.shape[-1] <= MAX_WIDENED


def _high_halves(value: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Drop the low 16 bits of each number, which are zero."""
    halves = value.view("<u2").reshape(*value.shape, 2)
    assert not halves[..., 0].any(), "a weight is no bfloat16"
    return np.ascontiguousarray(halves[..., 1])
