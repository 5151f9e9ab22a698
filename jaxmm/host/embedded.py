"""Pictures that come as finished rows: checked, copied and named. Host only."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxmm.errors import MediaError
from jaxmm.host.decodes import Found
from jaxmm.host.identity import item_identity
from jaxmm.host.item import Modality
from jaxmm.host.media_map import Known
from jaxmm.host.tiles import TileForm
from jaxmm.request import Embeddings

MAX_VALUE = 1e16
"""Of a row, either sign: the decoder sums the squares of a row's values in float32."""
_FINGERPRINT = b"rows"
"""Rows are what they are, whichever encoder of the checkpoint's made them."""


class RowForm(NamedTuple):
    """What the rows of a model look like."""

    width: int
    """D: values of one row."""
    merge_size: int
    """Patches by side of what becomes one row."""
    tiles: TileForm | None = None
    """Of a family that cuts pictures into tiles."""
    picture_side: int = 0
    """Patches by side of every picture; 0: pictures have sizes of their own."""


def read_embeddings(given: Embeddings, form: RowForm) -> Found:
    """Take a picture's rows as they are.

    Returns:
        The rows as float32[M, D], the caller's may change meanwhile; they have an identity of
        their own, never that of the picture that they were made of.

    Raises:
        MediaError: Not floats, not of the model's width, not as many as the grid has, not finite,
            or beyond `MAX_VALUE`.
    """
    grid, num_rows = _read_grid(given.grid_thw, form)
    rows = _read_rows(given.rows)
    if rows.ndim != 2 or rows.shape[1] != form.width:
        raise MediaError(
            f"embeddings have shape {list(rows.shape)}; this model takes [rows, {form.width}]"
        )
    if len(rows) != num_rows:
        raise MediaError(
            f"embeddings have {len(rows)} rows; the grid {list(grid)} makes {num_rows}"
        )
    if not np.isfinite(rows).all():
        raise MediaError("embeddings hold NaN or infinity (as float32); send finite rows")
    if np.abs(rows).max(initial=0) > MAX_VALUE:
        raise MediaError(
            f"embeddings hold values beyond {MAX_VALUE:g}, which overflow in the model"
        )
    rows.flags.writeable = False
    identity = item_identity(Modality.IMAGE, _FINGERPRINT, grid, embeddings=rows)
    return Found(Known(identity, grid, num_rows), None, rows)


def _read_grid(given: Any, form: RowForm) -> tuple[tuple[int, int, int], int]:
    """The grid and its number of rows."""
    try:
        sides = np.asarray(given)
    except (ValueError, TypeError):  # lists of unequal lengths
        sides = np.zeros(0)
    ok = sides.shape == (3,) and sides.dtype.kind in "iu"
    time, height, width = sides.tolist() if ok else (0, 0, 0)
    side = form.merge_size if form.tiles is None else form.tiles.side
    if time != 1 or min(height, width) < 1 or height % side or width % side:
        raise MediaError(
            f"grid_thw={given!r} is no grid of a picture: (1, height, width) in patches, "
            f"both multiples of {side}"
        )
    if form.picture_side and (height, width) != (form.picture_side, form.picture_side):
        raise MediaError(
            f"grid_thw={given!r}: every picture of this model has the grid "
            f"(1, {form.picture_side}, {form.picture_side})"
        )
    grid = (time, height, width)
    return grid, height * width // side**2 if form.tiles is None else form.tiles.num_rows(grid)


def _read_rows(given: Any) -> npt.NDArray[np.float32]:
    try:
        rows = np.asarray(given)
    except (ValueError, TypeError):
        raise MediaError("embeddings are no array; send float[rows, width]") from None
    if rows.dtype.kind != "f" and rows.dtype.name != "bfloat16":
        raise MediaError(f"embeddings have dtype {rows.dtype}; send float32, float16 or bfloat16")
    with np.errstate(over="ignore"):  # told as not finite
        return rows.astype(np.float32, order="C", copy=True)
