"""What the ledger hears of, and what it does about it."""

import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmm.device.ledger import CompileLedger, CompileRecord
from jaxmm.errors import RecompileError


def compile_something() -> None:
    jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()


@pytest.fixture
def raising():
    ledger = CompileLedger("raise")
    yield ledger
    ledger.close()


def test_compile_on_the_serving_thread_raises_at_the_next_check(raising: CompileLedger) -> None:
    raising.serve_from(threading.get_ident())
    compile_something()
    with pytest.raises(RecompileError, match="during a step of 5 tokens"):
        raising.check("a step of 5 tokens")
    assert raising.num_recompiles == 1
    raising.check("the next step")  # told once


def test_eager_operation_that_compiles_is_noticed(raising: CompileLedger) -> None:
    array = jnp.asarray(np.arange(37.0))
    raising.serve_from(threading.get_ident())
    (array * 3.25).block_until_ready()  # a shape that nothing else here uses
    assert raising.num_recompiles >= 1


def test_compiles_of_other_threads_and_of_warm_up_are_no_fault(raising: CompileLedger) -> None:
    compile_something()
    raising.serve_from(threading.get_ident())
    other = threading.Thread(target=compile_something)
    other.start()
    other.join()
    raising.check("a step")
    assert raising.num_recompiles == 0


def test_log_serves_on_and_says_what_happened(caplog: pytest.LogCaptureFixture) -> None:
    ledger = CompileLedger("log")
    ledger.serve_from(threading.get_ident())
    compile_something()
    with caplog.at_level(logging.WARNING):
        ledger.check("a step of 7 tokens")
    ledger.close()
    assert "during=a step of 7 tokens" in caplog.text


def test_closed_ledger_hears_nothing(raising: CompileLedger) -> None:
    ledger = CompileLedger("raise")
    ledger.serve_from(threading.get_ident())
    ledger.close()
    compile_something()
    assert ledger.num_recompiles == 0


def test_records_of_warm_up_are_not_recompiles(raising: CompileLedger) -> None:
    raising.add(CompileRecord(phase="warmup", step="encode", size=256, seconds=1.0, restored=False))
    assert raising.num_recompiles == 0
    assert len(raising.records) == 1
