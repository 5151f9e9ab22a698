"""One lane of packed images and video frames, as the encoders see it. Traced."""

from typing import NamedTuple

from jax import Array
from jaxtyping import Bool, Int32, UInt8


class Lane(NamedTuple):
    """Device form of `jaxmm.host.lanes.EncodeBatch`."""

    patches_NU: UInt8[Array, "N U"]
    """Pixels of one frame by channel, y, x; four consecutive patches to a row."""
    later_NU: UInt8[Array, "N U"]
    """The same of the second frame of a time step; read only with `any_later`."""
    any_later: Bool[Array, ""]
    """Some patches have a second frame that is not the first again: there is video."""
    coords_N2: Int32[Array, "N 2"]
    """Row and column of each patch in its frame."""
    segment_N: Int32[Array, " N"]
    """Which frame of which item, never falling; -1 for padding."""
    window_N: Int32[Array, " N"] | None
    """Which window; none crosses a multiple of `window_patches`; -1 for padding. None for a
    family without windows."""
    size_N2: Int32[Array, "N 2"] | None
    """Height and width in patches of each patch's frame; None for a family without learned
    positions."""
    slot_M: Int32[Array, " M"]
    """Arena row that each row goes to."""
