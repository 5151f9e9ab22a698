"""A follower: makes the calls that process 0 tells, until the pod ends. Host only."""

import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
import numpy as np

from jaxmm.basis import settle_basis
from jaxmm.config import EngineConfig
from jaxmm.device.backend import Backend
from jaxmm.device.ledger import CompileLedger
from jaxmm.device.runner import Runner
from jaxmm.device.sampling import Sampled
from jaxmm.errors import PeerLost
from jaxmm.host.batch import StepBatch
from jaxmm.host.lanes import EncodeBatch
from jaxmm.pod.channel import Channel
from jaxmm.pod.followers import LOADING_SECONDS
from jaxmm.pod.join import meet, part
from jaxmm.pod.lead import chained
from jaxmm.pod.messages import Kind, pack_arrays, unpack_arrays, unpack_step
from jaxmm.pod.track import DONE, REPLICA
from jaxmm.start import load_runners

logger = logging.getLogger(__name__)

_NAMING_SECONDS = 8.0
"""After an error of the chips, the time in which process 0 says whose fault it was."""

Message = tuple[Kind, bytes]


def follow(config: EngineConfig) -> None:
    """Load the model, and do as process 0 does until it ends the pod.

    A pod that ends by a fault ends this process too, with status 1 and a line that says why.
    SIGTERM is passed on to process 0, which lets running requests end; this process ends after it.

    Raises:
        ConfigError, ModelError: The message names the setting, key or tensor.
        PeerLost: Process 0 cannot be reached.
    """
    basis = settle_basis(config)
    channel = meet(config, basis.fingerprint).to_leader()
    channel.set_timeout(LOADING_SECONDS)
    mine = {i: b for i, b in enumerate(basis.backends) if jax.process_index() in b.process_ids}
    follower = _Follower(channel, config.pod.silence_seconds, mine)
    ledger = CompileLedger(config.on_recompile)
    runners = load_runners(config, basis, ledger)
    for runner in runners.values():
        runner.settle()
    channel.send(Kind.READY)
    logger.info(
        "following process=%d of=%d replicas=%s",
        jax.process_index(), jax.process_count(), sorted(mine),
    )  # fmt: skip
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, follower.leave)
        signal.signal(signal.SIGINT, follower.leave)
    try:
        follower.run(runners)
        part()
    finally:
        for runner in runners.values():
            runner.close()
        ledger.close()
        channel.close()


class _Follower:
    """Hears on a thread of its own, so that a step that never ends does not hide the pod's end."""

    def __init__(
        self, channel: Channel, silence_seconds: float, backends: Mapping[int, Backend]
    ) -> None:
        self._channel = channel
        self._silence_seconds = silence_seconds
        self._leaving = False
        self._hands = {i: _Hand(channel, i, backend) for i, backend in backends.items()}
        threading.Thread(target=self._hear, name="jaxmm-hear", daemon=True).start()

    def leave(self, *_: object) -> None:
        """Ask process 0 for the end; told with the next sign of life."""
        self._leaving = True

    def run(self, runners: Mapping[int, Runner]) -> None:
        """Do what comes, until the pod ends as it should; each replica on a thread of its own."""
        threads = [
            threading.Thread(target=hand.run, args=(runners[i],), name=f"jaxmm-replica-{i}")
            for i, hand in self._hands.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _hear(self) -> None:
        while True:
            try:
                kind, payload = self._channel.receive()
                if kind is Kind.BEAT:
                    self._channel.send(Kind.ALIVE, [b"\x01" if self._leaving else b"\x00"])
                    continue
                if kind is Kind.READY:
                    self._channel.set_timeout(self._silence_seconds)
                    continue
            except PeerLost as error:
                _end(str(error))
            if kind is Kind.END:
                if payload:
                    _end(payload.decode())
                for hand in self._hands.values():
                    hand.inbox.put((kind, payload))
                return
            (replica,) = REPLICA.unpack_from(payload)
            self._hands[replica].inbox.put((kind, payload[REPLICA.size :]))


class _Hand:
    """Makes the calls of one replica on this process's chips."""

    def __init__(self, channel: Channel, replica: int, backend: Backend) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._channel = channel
        self._replica = replica
        # where process 0 has no chip of it, the first that has some tells what it reads
        self._tells_results = backend.process_ids[0] == jax.process_index()
        self._flying: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_read = 0
        self._digest = b""

    def run(self, runner: Runner) -> None:
        """Do what comes, until the pod ends as it should."""
        reader = threading.Thread(target=self._read_all, name="jaxmm-read")
        reader.start()
        while (message := self.inbox.get())[0] is not Kind.END:
            self._guarded(partial(self._do, runner, *message))
        self._flying.put(None)
        reader.join()

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (PeerLost, jax.errors.JaxRuntimeError, ValueError) as error:
            # most likely another host is gone: process 0 says which, and that is the end
            logger.error("step failed: %s", error)
            threading.Event().wait(_NAMING_SECONDS)
            _end(f"a step failed here: {error}")

    def _do(self, runner: Runner, kind: Kind, payload: bytes) -> None:
        if kind is Kind.STEP:
            batch = _batch(runner, payload)
            logprobs = bool(batch["any_logprobs"])
            self._flying.put(partial(self._read, runner, runner.step(batch), logprobs))
        elif kind is Kind.ENCODE:
            runner.encode(_lane(runner, payload))
        elif kind is Kind.UPLOAD:
            rows, slots = unpack_arrays(payload)
            assert rows is not None and slots is not None
            runner.upload(rows, slots)
        elif kind is Kind.SCORE:
            before, after = unpack_arrays(payload)
            assert before is not None and after is not None
            self._flying.put(partial(self._read_scores, runner, runner.score(before, after)))
        elif kind is Kind.PRIME:
            slot, prompt_ids, output_ids, bias_ids, bias = unpack_arrays(payload)
            assert slot is not None and prompt_ids is not None and output_ids is not None
            assert bias_ids is not None and bias is not None
            logit_bias = dict(zip(bias_ids.tolist(), bias.tolist(), strict=True))
            runner.prime(int(slot[0]), prompt_ids, output_ids, logit_bias)

    def _read_all(self) -> None:
        """Wait for one result after the other, beside the thread that starts them."""
        while (read := self._flying.get()) is not None:
            self._guarded(read)

    def _tell(self, arrays: Sequence[Any]) -> None:
        head = REPLICA.pack(self._replica)
        values = [np.asarray(array) for array in arrays]
        self._channel.send(Kind.RESULT, [head, *pack_arrays(values)])

    def _read_scores(self, runner: Runner, scores: list[jax.Array]) -> None:
        if self._tells_results:
            self._tell([runner.read_scores(scores)])

    def _read(self, runner: Runner, sampled: Sampled, logprobs: bool) -> None:
        """Wait for a step, and tell process 0 what it gave."""
        logprobs = logprobs and self._tells_results
        fetched = runner.fetch(sampled, logprobs=logprobs)
        if self._tells_results:
            self._tell(fetched if logprobs else (fetched.token_B,))
        self._digest = chained(self._digest, fetched.token_B)
        done = DONE.pack(self._replica, self._num_read, self._digest)
        self._channel.send(Kind.DONE, [done])
        self._num_read += 1


def _batch(runner: Runner, payload: bytes) -> StepBatch:
    """A step's batch; rows of masks beyond those sent are of no consequence."""
    num_tokens, buffer, masks = unpack_step(payload)
    layout = runner.layout(num_tokens)
    batch = StepBatch(layout)
    batch.buffer[:] = buffer
    if len(masks):
        batch.allowed_BO = np.zeros((layout.num_sequences, layout.num_mask_words), np.uint32)
        rows = masks.reshape(-1, layout.num_mask_words)
        batch.allowed_BO[: len(rows)] = rows
    return batch


def _lane(runner: Runner, payload: bytes) -> EncodeBatch:
    """A lane whose patches are there as far as chips of this host need them."""
    size = int(np.frombuffer(payload, np.int64, 1)[0])
    head, *parts = unpack_arrays(payload[8 : 8 + size])
    coords, segment, window, sizes, slots = unpack_arrays(payload[8 + size :])
    assert head is not None and coords is not None and segment is not None and slots is not None
    num_rows, num_values, num_patches, num_frames = head.tolist()
    mine = runner.backend.lane_rows((num_rows, num_values))[jax.process_index()]
    frames = [np.empty((num_rows, num_values), np.uint8) for _ in range(num_frames)]
    places = [frame[rows] for frame in frames for rows in mine]
    for place, values in zip(places, parts, strict=True):
        place[:] = values
    patches, later = frames if num_frames == 2 else (frames[0], None)
    return EncodeBatch(
        patches=patches,
        later=later,
        coords=coords,
        segment=segment,
        window=window,
        sizes=sizes,
        slots=slots,
        num_patches=num_patches,
    )


def _end(reason: str) -> NoReturn:
    """End this process: its other threads may wait for chips that never answer."""
    logger.critical("the pod ends: %s", reason)
    logging.shutdown()
    os._exit(1)
