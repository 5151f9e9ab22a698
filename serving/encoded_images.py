"""Images that come encoded, as safetensors. Host only."""

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize

from jaxmm.errors import MediaError
from jaxmm.request import Embeddings

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
}


def read_encoded(data: bytes) -> Embeddings:
    """Read the two tensors of an encoded image.

    Args:
        data: A safetensors file with `rows`, float[M, D], and `grid_thw`, int[3].

    Raises:
        MediaError: It is no such file. What the engine does not take is refused there.
    """
    try:
        tensors = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError:
        raise MediaError("the data is no safetensors file") from None
    if set(tensors) != {"rows", "grid_thw"}:
        raise MediaError("an encoded image has the tensors rows and grid_thw and no other")
    arrays = {}
    for name, tensor in tensors.items():
        if tensor["dtype"] not in _DTYPES:
            raise MediaError(f"{name} has dtype {tensor['dtype']}; send {', '.join(_DTYPES)}")
        flat = np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]])
        arrays[name] = flat.reshape(tensor["shape"])
    grid = arrays["grid_thw"]
    if grid.shape != (3,) or grid.dtype.kind != "i":
        raise MediaError("grid_thw is not three whole numbers")
    time, height, width = grid.tolist()
    return Embeddings(rows=arrays["rows"], grid_thw=(time, height, width))
