"""The compile ledger: what was compiled, when, for which shape, and at whose cost. Host only."""

import logging
import threading
from dataclasses import dataclass
from typing import Literal

import jax

from jaxmm.errors import RecompileError

logger = logging.getLogger(__name__)

Phase = Literal["warmup", "serving"]

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRecord:
    """One executable made or restored."""

    phase: Phase
    step: str
    """encode, upload, score, language, prime; or "other" for a compile that no step asked for."""
    size: int
    """The bucket: patches or tokens; 0 where there is none."""
    seconds: float
    restored: bool
    """Read from the compile cache directory."""


class CompileLedger:
    """Counts compiles; after warm-up every further one is a fault.

    It hears of XLA compiles on the engine's own thread through JAX's monitoring, so an eager
    operation that compiles is noticed like a step.
    """

    def __init__(self, on_recompile: Literal["log", "raise"]) -> None:
        self.on_recompile = on_recompile
        self.phase: Phase = "warmup"
        self.records: list[CompileRecord] = []
        self._thread: int | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._unreported: CompileRecord | None = None
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def close(self) -> None:
        """Stop listening; may be called again."""
        if not self._closed:
            self._closed = True
            jax.monitoring.unregister_event_duration_listener(self._heard)

    def serve_from(self, thread: int) -> None:
        """Warm-up is over: from now on compiles on this thread (its ident) are faults."""
        self._thread = thread
        self.phase = "serving"

    def add(self, record: CompileRecord) -> int:
        """Note an executable, and give how many there are by now."""
        with self._lock:
            self.records.append(record)
            return len(self.records)

    @property
    def num_recompiles(self) -> int:
        """Compiles since warm-up."""
        return sum(record.phase == "serving" for record in self.records)

    def check(self, context: str) -> None:
        """Report a compile since the last check.

        Args:
            context: What was running, for the message.

        Raises:
            RecompileError: There was one and `on_recompile` is "raise".
        """
        record, self._unreported = self._unreported, None
        if record is None:
            return
        text = f"a compile of {record.seconds:.2f} s after warm-up, during {context}"
        if self.on_recompile == "raise":
            raise RecompileError(f"{text}; set on_recompile = 'log' to serve on")
        logger.warning("recompile seconds=%.2f during=%s", record.seconds, context)

    def _heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event != _COMPILE_EVENT or threading.get_ident() != self._thread:
            return
        record = CompileRecord(
            phase="serving", step="other", size=0, seconds=duration_secs, restored=False
        )
        self.add(record)
        self._unreported = record
