"""The engine as the server sees it, and how it is loaded. Host only."""

import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from jaxmm.config import EngineConfig
from jaxmm.cost import Cost
from jaxmm.host.chat import ChatTokenizer
from jaxmm.pod.signs import is_pod
from jaxmm.request import Delta, Request
from jaxmm.stats import EngineStats


class ServedEngine(Protocol):
    """What the server needs of `jaxmm.Engine`."""

    @property
    def model_name(self) -> str: ...
    @property
    def config(self) -> EngineConfig: ...
    @property
    def tokenizer(self) -> ChatTokenizer: ...
    @property
    def pictures_are_alike(self) -> bool:
        """Every picture becomes the same size."""
        ...

    @property
    def healthy(self) -> bool: ...
    @property
    def failure(self) -> BaseException | None:
        """What ended the loop, if something did."""
        ...

    @property
    def turn_seconds(self) -> float:
        """How long the turn in progress takes already, a step or what is done between two; 0 while
        the engine waits for work."""
        ...

    def astream(self, request: Request) -> AsyncIterator[Delta]:
        """Answer one request; cancelling the iteration aborts it."""
        ...

    async def cost(self, request: Request) -> Cost:
        """What a request would cost now, without running it."""
        ...

    def stats(self) -> EngineStats:
        """What the engine has done and holds."""
        ...

    def flush_caches(self) -> None:
        """Forget what no running request uses; blocks until it is done."""
        ...

    def give_up(self, reason: str) -> None:
        """End every request with EngineStopped, for a loop that does not come back."""
        ...

    def close(self) -> None: ...


LoadEngine = Callable[[EngineConfig], ServedEngine]


def load_engine(config: EngineConfig) -> ServedEngine:
    """Build the engine.

    Raises:
        ConfigError: Settings that cannot work together.
        ModelError: The checkpoint cannot be loaded.
    """
    from jaxmm.engine import Engine  # takes seconds and may claim the devices

    return Engine(config)


def load_or_end(load: LoadEngine, config: EngineConfig) -> ServedEngine:
    """Build the engine; Ctrl-C meanwhile ends the process at once.

    An exception would first wait for the compiles that are running. Not for another thread than
    the main one, nor where whoever started this had Ctrl-C ignored.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return load(config)
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    try:
        return load(config)
    finally:
        signal.signal(signal.SIGINT, before)


def followed(config: EngineConfig) -> bool:
    """Do as process 0 of the pod does until it ends, if this is another process of one.

    Returns:
        False at once where this process is process 0, or alone.

    Raises:
        ConfigError: The other processes cannot be met, or were started otherwise.
        ModelError: The checkpoint cannot be loaded.
        PeerLost: Process 0 cannot be reached.
    """
    if not is_pod(config):
        return False
    from jaxmm.pod.join import join  # brings jax

    if join(config) == 0:
        return False
    from jaxmm.pod.follow import follow

    follow(config)
    return True


def describe_buckets(config: EngineConfig) -> str:
    """Describe what an engine of this config compiles, without building it."""
    from jaxmm import basis  # brings jax

    return basis.describe_buckets(config)


def describe_plan(
    config: EngineConfig,
    topology: str,
    lengths: Sequence[int] | None,
    *,
    tensor_parallel: int,
    suggest: bool,
    show: Callable[[str], None],
) -> None:
    """Show what an engine of this config would take on TPUs that are not here.

    Args:
        lengths: Tokens of requests to count room for; None: some common ones.
        tensor_parallel: Chips of a replica; 0: by the settings, or the best split.
        suggest: Show all splits of the slice too.
        show: Takes what is found, as it is found: the compiler works for a minute.

    Raises:
        ConfigError, ModelError: As `jaxmm.plan`.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")  # a TPU of this machine stays free for others
    from jaxmm.basis import default_model
    from jaxmm.planner.plan import DEFAULT_LENGTHS, check_lengths, make_plan
    from jaxmm.planner.question import read_question
    from jaxmm.planner.splits import suggest as rank

    lengths = sorted(lengths or DEFAULT_LENGTHS)
    check_lengths(lengths)
    question = read_question(config.model or default_model(), topology, config)
    if suggest:
        splits = rank(question, lengths[len(lengths) // 2])
        show(str(splits) + "\n")
        best, asked = splits[0].tensor_parallel, config.tensor_parallel
        if not tensor_parallel and asked not in (0, 1, best):
            show(
                f"The settings say tensor_parallel={asked}; planned is the best split, {best}. "
                f"--tensor-parallel {asked} plans the other.\n"
            )
        tensor_parallel = tensor_parallel or best
    show(str(make_plan(question, tensor_parallel=tensor_parallel, lengths=lengths)))


def convert_model(model: str, out: str, dtype: str, *, progress: bool) -> None:
    """Write a checkpoint in Orbax's form.

    Raises:
        ModelError: The checkpoint cannot be loaded, or there is something at `out`.
    """
    from jaxmm import basis  # brings jax
    from jaxmm.models.converted import convert

    convert(basis.model_directory(EngineConfig(model=model)), out, dtype, progress=progress)
