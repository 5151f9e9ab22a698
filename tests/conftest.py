"""What the test files that run in one process leave to each other."""

import gc
from collections.abc import Iterator

import jax
import pytest

from jaxmm.device.mappings import share_of_mappings
from tests.engines import close_shared

_SHARE = 0.4
"""Of the process's memory mappings: an engine of the tests takes a tenth."""


@pytest.fixture(autouse=True, scope="module")
def mappings() -> Iterator[None]:
    """Give executables back before the process has no mapping left and dies."""
    yield
    if share_of_mappings() > _SHARE:
        close_shared()
        jax.clear_caches()
        gc.collect()
