"""Process 0's runner: tells the followers each call before it makes it. Host only.

The followers make the same calls in the same order on the same global arrays, so that every chip of
a replica runs the same program. Tokens are read on a thread of their own: a chip that waits for a
host that is gone would otherwise hold the engine's thread for ever.
"""

import hashlib
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt

from jaxmm.device.backend import Backend
from jaxmm.device.runner import Runner
from jaxmm.device.sampling import Sampled
from jaxmm.errors import PeerLost
from jaxmm.host.batch import StepBatch, StepLayout
from jaxmm.host.lanes import EncodeBatch
from jaxmm.pod.followers import Followers
from jaxmm.pod.join import part
from jaxmm.pod.messages import Kind, pack_arrays, pack_step

_Result = TypeVar("_Result")

_NAMING_SECONDS = 2.0
"""An error of the devices waits so long for the name of the host that caused it."""


class Elsewhere:
    """What a step sampled on the chips of other processes; `PodRunner.fetch` has it from there."""


class PodRunner:
    """Like a `Runner`, for a replica that has chips of other processes; one thread calls it.

    Where process 0 has none of its chips, the first process that has some tells what it sampled.
    """

    def __init__(
        self,
        runner: Runner | None,
        followers: Followers,
        *,
        replica: int,
        backend: Backend,
        layout: Callable[[int], StepLayout],
        num_executables: int,
    ) -> None:
        """Take this host's runner, if it has chips of the replica, and the followers; both are
        closed with this.

        Args:
            runner: On this process's chips.
            followers: Those of all replicas.
            replica: Its number.
            backend: Its chips.
            layout: As `Runner.layout`.
            num_executables: As `Runner.num_executables`.
        """
        self._runner = runner
        self._followers = followers
        self._backend = backend
        self.layout = layout
        self.num_executables = num_executables
        self._num_steps = self._num_read = 0
        self._digest = b""
        self._wanted: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        on_result = None if runner is not None else self._results.put
        self._track = followers.track(replica, backend.process_ids, on_result)
        followers.on_failure(self._results.put)
        if runner is not None:
            threading.Thread(target=self._fetch, name="jaxmm-fetch", daemon=True).start()

    def settle(self) -> None:
        """Wait for executables that are still being read from the cache."""
        if self._runner is not None:
            self._runner.settle()

    def encode(self, lanes: EncodeBatch) -> None:
        """Encode all lanes; each host gets the patches that its own chips take."""
        small = pack_arrays((lanes.coords, lanes.segment, lanes.window, lanes.sizes, lanes.slots))
        frames = [lanes.patches] if lanes.later is None else [lanes.patches, lanes.later]
        head = np.array([*lanes.patches.shape, lanes.num_patches, len(frames)], np.int64)
        for process_id, rows in self._backend.lane_rows(lanes.patches.shape).items():
            if process_id != jax.process_index():
                parts = pack_arrays((head, *(frame[r] for frame in frames for r in rows)))
                size = np.int64(sum(map(len, parts))).tobytes()
                self._track.tell_one(process_id, Kind.ENCODE, [size, *parts, *small])
        self._here(lambda runner: runner.encode(lanes))

    def upload(self, rows: npt.NDArray[np.float32], slots: npt.NDArray[np.int32]) -> None:
        """Put rows that a caller gave, float32[M, D], into the arena's slots, however many."""
        self._track.tell(Kind.UPLOAD, pack_arrays((rows, slots)))
        self._here(lambda runner: runner.upload(rows, slots))

    def score(
        self, before: npt.NDArray[np.int32], after: npt.NDArray[np.int32]
    ) -> list[jax.Array] | None:
        """Compare arena rows pair by pair, however many; `read_scores` reads the result.

        None where it lies on the chips of others.
        """
        self._track.tell(Kind.SCORE, pack_arrays((before, after)))
        return self._here(lambda runner: runner.score(before, after))

    def read_scores(self, scores: list[jax.Array] | None) -> npt.NDArray[np.float32]:
        """Wait for what `score` gave.

        Raises:
            PeerLost: A host of the pod is gone or too slow.
        """
        result = self._read(lambda runner: runner.read_scores(scores or []))
        read: npt.NDArray[np.float32] = result[0] if self._runner is None else result
        return read

    def step(self, batch: StepBatch) -> Sampled | Elsewhere:
        """Run a language step; the rows asked for come back in order, those after are filler."""
        masks = None if batch.allowed_BO is None else batch.allowed_BO[: batch["num_samples"]]
        message = pack_step(batch.layout.num_tokens, batch.buffer, masks)
        self._track.began(self._num_steps)
        self._track.tell(Kind.STEP, message)
        self._num_steps += 1
        return self._here(lambda runner: runner.step(batch)) or Elsewhere()

    def prime(
        self,
        slot: int,
        prompt_ids: npt.NDArray[np.int64],
        output_ids: npt.NDArray[np.int64],
        logit_bias: dict[int, float],
    ) -> None:
        """Give a state slot a request's history and bias, however long."""
        message = pack_arrays(
            (
                np.array([slot], np.int64),
                prompt_ids.astype(np.int64, copy=False),
                output_ids.astype(np.int64, copy=False),
                np.array(list(logit_bias), np.int64),
                np.array(list(logit_bias.values()), np.float32),
            )
        )
        self._track.tell(Kind.PRIME, message)
        self._here(lambda runner: runner.prime(slot, prompt_ids, output_ids, logit_bias))

    def fetch(self, sampled: Sampled | Elsewhere, *, logprobs: bool) -> Sampled:
        """Wait for a step and read what it sampled; without logprobs, the tokens alone.

        Raises:
            PeerLost: A host of the pod is gone, too slow, or came to other tokens.
        """
        result = self._read(lambda runner: runner.fetch(sampled, logprobs=logprobs))
        fetched: Sampled = _as_sampled(result) if self._runner is None else result
        self._digest = chained(self._digest, fetched.token_B)
        self._track.finished(self._num_read, self._digest)
        self._num_read += 1
        return fetched

    def close(self) -> None:
        """Let the followers end, and stop what runs in the background."""
        self._wanted.put(None)
        if self._followers.failure is None:
            self._followers.end("")
            part()
        self._followers.close()
        if self._runner is not None:
            self._runner.close()

    def _read(self, read: Callable[[Any], Any]) -> Any:
        """Read what the chips give, here or there, unless the pod ends meanwhile."""
        if self._runner is not None:
            self._wanted.put(partial(read, self._runner))
        result = self._results.get()
        if isinstance(result, BaseException):
            raise self._blame(result)
        return result

    def _fetch(self) -> None:
        while (read := self._wanted.get()) is not None:
            try:
                self._results.put(read())
            except Exception as error:  # noqa: BLE001  # raised on the engine's thread
                self._results.put(error)

    def _here(self, call: Callable[[Runner], _Result]) -> _Result | None:
        """Make a call of this process's runner, if there is one."""
        if self._runner is None:
            return None
        try:
            return call(self._runner)
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # the latter from gloo
            raise self._blame(error) from error

    def _blame(self, error: BaseException) -> BaseException:
        """The lost host, when that is why the devices failed."""
        if isinstance(error, PeerLost):
            return error
        return self._followers.named(_NAMING_SECONDS) or error


def _as_sampled(arrays: list[npt.NDArray[Any] | None]) -> Sampled:
    """What another process has read; of logprobs that nobody wants it sends nothing."""
    values: list[Any] = [*arrays, *[None] * (len(Sampled._fields) - len(arrays))]
    return Sampled(*values)


def chained(digest: bytes, token_B: Any) -> bytes:
    """Digest of the tokens of a step and of all before it."""
    hashed = hashlib.blake2b(digest, digest_size=16)
    hashed.update(np.ascontiguousarray(token_B).tobytes())
    return hashed.digest()
