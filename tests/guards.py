"""What must not happen on the engine's thread once it is warm."""

import contextlib
from collections.abc import Iterator

import jax

from jaxmm.engine import Engine
from tests.engines import on_loop


@contextlib.contextmanager
def guarded(on: Engine) -> Iterator[None]:
    """Forbid tracing and implicit transfers on the engine's thread; both hold for one thread."""
    guards = contextlib.ExitStack()

    def begin() -> None:
        guards.enter_context(jax.no_tracing())
        guards.enter_context(jax.transfer_guard("disallow"))

    on_loop(on, begin)
    try:
        yield
    finally:
        on_loop(on, guards.close)
