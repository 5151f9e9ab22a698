"""Process 0's runner: tells the followers each call before it makes it. Host only.

The followers make the same calls in the same order on the same global arrays, so that every chip
runs the same program. Tokens are read on a thread of their own: a chip that waits for a host that
is gone would otherwise hold the engine's thread for ever.
"""

import hashlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt

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


class PodRunner:
    """Like a `Runner`, on all hosts of the pod; one thread calls it."""

    def __init__(self, runner: Runner, followers: Followers) -> None:
        """Take this host's runner, and the followers; both are closed with this."""
        self._runner = runner
        self._followers = followers
        self._num_steps = self._num_read = 0
        self._digest = b""
        self._wanted: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        followers.on_failure(self._results.put)
        self._fetcher = threading.Thread(target=self._fetch, name="jaxmm-fetch", daemon=True)
        self._fetcher.start()

    @property
    def num_executables(self) -> int:
        return self._runner.num_executables

    def layout(self, num_tokens: int) -> StepLayout:
        """Layout of the smallest bucket with `num_tokens`."""
        return self._runner.layout(num_tokens)

    def settle(self) -> None:
        """Wait for executables that are still being read from the cache."""
        self._runner.settle()

    def encode(self, lane: EncodeBatch) -> None:
        """Encode a lane into the arena; each host gets the patches of its own chips."""
        small = pack_arrays((lane.coords, lane.segment, lane.window, lane.sizes, lane.slots))
        frames = [lane.patches] if lane.later is None else [lane.patches, lane.later]
        head = np.array([*lane.patches.shape, lane.num_patches, len(frames)], np.int64)
        for process_id, rows in self._runner.patch_rows(lane.patches.shape).items():
            if process_id != jax.process_index():
                parts = pack_arrays((head, *(frame[r] for frame in frames for r in rows)))
                size = np.int64(sum(map(len, parts))).tobytes()
                self._followers.tell_one(process_id, Kind.ENCODE, [size, *parts, *small])
        self._guarded(lambda: self._runner.encode(lane))

    def upload(self, rows: npt.NDArray[np.float32], slots: npt.NDArray[np.int32]) -> None:
        """Put rows that a caller gave, float32[M, D], into the arena's slots, however many."""
        self._followers.tell(Kind.UPLOAD, pack_arrays((rows, slots)))
        self._guarded(lambda: self._runner.upload(rows, slots))

    def score(self, before: npt.NDArray[np.int32], after: npt.NDArray[np.int32]) -> list[jax.Array]:
        """Compare arena rows pair by pair, however many; `read_scores` reads the result."""
        self._followers.tell(Kind.SCORE, pack_arrays((before, after)))
        return self._guarded(lambda: self._runner.score(before, after))

    def read_scores(self, scores: list[jax.Array]) -> npt.NDArray[np.float32]:
        """Wait for what `score` gave.

        Raises:
            PeerLost: A host of the pod is gone or too slow.
        """
        read: npt.NDArray[np.float32] = self._read(lambda: self._runner.read_scores(scores))
        return read

    def step(self, batch: StepBatch) -> Sampled:
        """Run a language step; the rows asked for come back in order, those after are filler."""
        masks = None if batch.allowed_BO is None else batch.allowed_BO[: batch["num_samples"]]
        message = pack_step(batch.layout.num_tokens, batch.buffer, masks)
        self._followers.began(self._num_steps)
        self._followers.tell(Kind.STEP, message)
        self._num_steps += 1
        return self._guarded(lambda: self._runner.step(batch))

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
        self._followers.tell(Kind.PRIME, message)
        self._guarded(lambda: self._runner.prime(slot, prompt_ids, output_ids, logit_bias))

    def fetch(self, sampled: Sampled, *, logprobs: bool) -> Sampled:
        """Wait for a step and read what it sampled; without logprobs, the tokens alone.

        Raises:
            PeerLost: A host of the pod is gone, too slow, or came to other tokens.
        """
        result: Sampled = self._read(lambda: self._runner.fetch(sampled, logprobs=logprobs))
        self._digest = chained(self._digest, result.token_B)
        self._followers.finished(self._num_read, self._digest)
        self._num_read += 1
        return result

    def close(self) -> None:
        """Let the followers end, and stop what runs in the background."""
        self._wanted.put(None)
        if self._followers.failure is None:
            self._followers.end("")
            part()
        self._followers.close()
        self._runner.close()

    def _read(self, read: Callable[[], Any]) -> Any:
        """Read what the chips give, unless the pod ends meanwhile."""
        self._wanted.put(read)
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

    def _guarded(self, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # the latter from gloo
            raise self._blame(error) from error

    def _blame(self, error: BaseException) -> BaseException:
        """The lost host, when that is why the devices failed."""
        if isinstance(error, PeerLost):
            return error
        return self._followers.named(_NAMING_SECONDS) or error


def chained(digest: bytes, token_B: Any) -> bytes:
    """Digest of the tokens of a step and of all before it."""
    hashed = hashlib.blake2b(digest, digest_size=16)
    hashed.update(np.ascontiguousarray(token_B).tobytes())
    return hashed.digest()
