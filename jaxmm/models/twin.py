"""The text weights once more in bfloat16, for steps that do little but read them. Host only.

Published checkpoints hold bfloat16. Where the engine computes in float32 (on CPUs) each weight has
16 bits that are zero, and a step of one token is bound by reading weights: a twin without those
bits is the same numbers in half the bytes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxmm.device.linear import MAX_WIDENED
from jaxmm.models.config import ModelConfig
from jaxmm.models.loading import open_params


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


def twin_shapes(params: Mapping[Any, Any]) -> Any:
    """What `make_twin` gives for such parameters, as `jax.ShapeDtypeStruct`."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if _is_narrowed(x) else x.dtype),
        params,
    )


def make_twin(params: Mapping[Any, Any]) -> Any:
    """The same numbers, in bfloat16 where that is quicker to read; the others are shared.

    Args:
        params: Float32 arrays, those of a decoder that `text_is_bfloat16`.
    """
    return jax.tree.map(
        lambda x: jax.device_put(_high_halves(np.asarray(x))) if _is_narrowed(x) else x, params
    )


def _is_narrowed(x: Any) -> bool:
    return bool(x.ndim > 1 and x.shape[-1] <= MAX_WIDENED)


def _high_halves(value: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Drop the low 16 bits of each number, which are zero."""
    halves = value.view("<u2").reshape(*value.shape, 2)
    assert not halves[..., 0].any(), "a weight is no bfloat16"
    return np.ascontiguousarray(halves[..., 1]).view(ml_dtypes.bfloat16)
