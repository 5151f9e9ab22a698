"""A follower: makes the calls that process 0 tells, until the pod ends. Host only."""

import logging
import os
import queue
import signal
import threading
from collections import deque
from typing import NoReturn

import jax
import numpy as np

from jaxmm.basis import settle_basis
from jaxmm.config import EngineConfig
from jaxmm.device.ledger import CompileLedger
from jaxmm.device.runner import Runner
from jaxmm.device.sampling import Sampled
from jaxmm.errors import PeerLost
from jaxmm.host.batch import StepBatch
from jaxmm.host.lanes import EncodeBatch
from jaxmm.pod.channel import Channel
from jaxmm.pod.followers import DONE, LOADING_SECONDS
from jaxmm.pod.join import meet, part
from jaxmm.pod.lead import chained
from jaxmm.pod.messages import Kind, unpack_arrays, unpack_step
from jaxmm.start import load_runner

logger = logging.getLogger(__name__)

_AHEAD = 1  # steps dispatched beyond the one whose tokens are read
_IDLE_SECONDS = 0.02  # without a new step for so long, the last one is read

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
    follower = _Follower(channel, config.pod.silence_seconds)
    ledger = CompileLedger(config.on_recompile)
    runner = load_runner(config, basis, ledger)
    runner.settle()
    channel.send(Kind.READY)
    logger.info("following process=%d of=%d", jax.process_index(), jax.process_count())
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, follower.leave)
        signal.signal(signal.SIGINT, follower.leave)
    try:
        follower.run(runner)
        part()
    finally:
        runner.close()
        ledger.close()
        channel.close()


class _Follower:
    """Hears on a thread of its own, so that a step that never ends does not hide the pod's end."""

    def __init__(self, channel: Channel, silence_seconds: float) -> None:
        self._channel = channel
        self._silence_seconds = silence_seconds
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._leaving = False
        self._pending: deque[Sampled] = deque()
        self._num_read = 0
        self._digest = b""
        threading.Thread(target=self._hear, name="jaxmm-hear", daemon=True).start()

    def leave(self, *_: object) -> None:
        """Ask process 0 for the end; told with the next sign of life."""
        self._leaving = True

    def run(self, runner: Runner) -> None:
        """Do what comes, until the pod ends as it should."""
        while True:
            try:
                kind, payload = self._inbox.get(timeout=_IDLE_SECONDS if self._pending else None)
            except queue.Empty:
                kind, payload = Kind.BEAT, b""  # nothing new: the last step can be read
            if kind is Kind.END:
                return
            try:
                self._do(runner, kind, payload)
            except (PeerLost, jax.errors.JaxRuntimeError, ValueError) as error:
                # most likely another host is gone: process 0 says which, and that is the end
                logger.error("step failed: %s", error)
                threading.Event().wait(_NAMING_SECONDS)
                _end(f"a step failed here: {error}")

    def _do(self, runner: Runner, kind: Kind, payload: bytes) -> None:
        if kind is Kind.BEAT:
            self._read(runner)
        elif kind is Kind.STEP:
            self._pending.append(runner.step(_batch(runner, payload)))
            if len(self._pending) > _AHEAD:
                self._read(runner)
        elif kind is Kind.ENCODE:
            runner.encode(_lane(runner, payload))
        elif kind is Kind.UPLOAD:
            rows, slots = unpack_arrays(payload)
            assert rows is not None and slots is not None
            runner.upload(rows, slots)
        elif kind is Kind.SCORE:
            before, after = unpack_arrays(payload)
            assert before is not None and after is not None
            runner.score(before, after)  # process 0 reads what it gives
        elif kind is Kind.PRIME:
            slot, prompt_ids, output_ids, bias_ids, bias = unpack_arrays(payload)
            assert slot is not None and prompt_ids is not None and output_ids is not None
            assert bias_ids is not None and bias is not None
            logit_bias = dict(zip(bias_ids.tolist(), bias.tolist(), strict=True))
            runner.prime(int(slot[0]), prompt_ids, output_ids, logit_bias)

    def _read(self, runner: Runner) -> None:
        """Wait for the oldest step, and tell process 0 what it gave."""
        fetched = runner.fetch(self._pending.popleft(), logprobs=False)
        self._digest = chained(self._digest, fetched.token_B)
        self._channel.send(Kind.DONE, [DONE.pack(self._num_read, self._digest)])
        self._num_read += 1

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
            if kind is Kind.END and payload:
                _end(payload.decode())
            self._inbox.put((kind, payload))
            if kind is Kind.END:
                return


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
    mine = runner.patch_rows((num_rows, num_values))[jax.process_index()]
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
