"""Finished rows: which grids a model has."""

import numpy as np
import pytest

from jaxmm.errors import MediaError
from jaxmm.host.embedded import RowForm, read_embeddings
from jaxmm.request import Embeddings

WIDTH = 3


def read(form: RowForm, grid: tuple[int, int, int], num_rows: int) -> tuple[int, int, int]:
    given = Embeddings(rows=np.zeros((num_rows, WIDTH), np.float32), grid_thw=grid)
    return read_embeddings(given, form).known.grid_thw


def test_pictures_of_one_size_have_one_grid() -> None:
    form = RowForm(WIDTH, merge_size=4, picture_side=16)
    assert read(form, (1, 16, 16), 16) == (1, 16, 16)
    with pytest.raises(MediaError, match=r"every picture of this model has the grid \(1, 16, 16\)"):
        read(form, (1, 8, 16), 8)


def test_pictures_of_any_size_have_grids_of_whole_rows() -> None:
    form = RowForm(WIDTH, merge_size=2)
    assert read(form, (1, 4, 6), 6) == (1, 4, 6)
    with pytest.raises(MediaError, match="both multiples of 2"):
        read(form, (1, 4, 5), 5)
    with pytest.raises(MediaError, match="is no grid of a picture"):
        read(form, [[1], [4, 6]], 6)
