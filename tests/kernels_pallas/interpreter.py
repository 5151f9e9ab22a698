"""Runs a Pallas TPU kernel on the CPU in JAX's TPU interpreter, watching for races."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


@contextmanager
def _interpreting() -> Iterator[None]:
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    jax.config.update("jax_disable_most_optimizations", True)  # the programs run once or twice
    try:
        with pltpu.force_tpu_interpret_mode(params):
            yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()
        jax.config.update("jax_disable_most_optimizations", False)


def interpret(kernel: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a kernel in the interpreter: memory starts as NaN, DMAs run when waited for.

    Returns:
        What the kernel gives, as NumPy arrays.

    Raises:
        AssertionError: Two accesses to the same memory, at least one a write, were not ordered.
    """
    with _interpreting():
        result = jax.tree.map(np.asarray, kernel(*args, **options))
        races = interpret_pallas_call.races
        assert races is None or not races.races_found, "the kernel has a race"
    return result
