"""What the rotation must equal (arXiv:2104.09864), GPT-NeoX's half-split form. Host only."""

import numpy as np
from jaxtyping import Float


def rotate(
    x_THC: Float[np.ndarray, "T H C"],
    cos_TC: Float[np.ndarray, "T C"],
    sin_TC: Float[np.ndarray, "T C"],
) -> Float[np.ndarray, "T H C"]:
    """Rotate channel i with channel i + C/2, in float32; the sine is negative in the first half."""
    x_THC = x_THC.astype(np.float32)
    turned_THC = np.roll(x_THC, x_THC.shape[-1] // 2, axis=-1)
    return x_THC * cos_TC[:, None] + turned_THC * sin_TC[:, None]
