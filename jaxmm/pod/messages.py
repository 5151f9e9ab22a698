"""What process 0 tells the others: steps, lanes and histories as bytes, small. Host only.

A step's buffer has room for the longest request in every row, and most of it is zero. It is cut
into blocks; a bit for each block says whether it is there.
"""

import enum
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCK_WORDS = 32
_DTYPES = ("uint8", "int32", "int64", "float32")
_HEAD = struct.Struct("<BB")
_STEP = struct.Struct("<II")


class Kind(enum.IntEnum):
    """What a frame holds."""

    STEP = 1
    ENCODE = 2
    PRIME = 3
    UPLOAD = 4
    BEAT = 5
    """Nothing: process 0 is there. Answered with ALIVE."""
    END = 6
    """Why the pod ends, as text; empty: it was asked to."""
    ALIVE = 7
    """From a follower: one byte, 1 if it was asked to end."""
    DONE = 8
    """From a follower: a replica, a step's number, and the digest of all tokens up to it."""
    READY = 9
    """From a follower: it has its weights and executables. From process 0: all have."""
    SCORE = 10
    RESULT = 11
    """From a follower: a replica that process 0 has no chip of, and what its next step sampled or
    its next comparison gave."""


def pack_step(
    num_tokens: int,
    buffer: npt.NDArray[np.int32],
    masks: npt.NDArray[np.uint32] | None = None,
) -> list[bytes | memoryview]:
    """A step: its bucket, which blocks of its buffer are not zero, those, and the masks.

    Args:
        num_tokens: The bucket.
        buffer: int32[X], as `StepBatch` has it.
        masks: uint32[rows, O], of the rows that are sampled; None if none has one.
    """
    words = buffer
    if len(words) % _BLOCK_WORDS:
        words = np.concatenate([words, np.zeros(-len(words) % _BLOCK_WORDS, np.int32)])
    blocks = words.reshape(-1, _BLOCK_WORDS)
    there = blocks.any(axis=1)
    head = _STEP.pack(num_tokens, len(buffer))
    step = b"".join((head, np.packbits(there).tobytes(), blocks[there].tobytes()))
    return [step] if masks is None else [step, np.ascontiguousarray(masks).tobytes()]


def unpack_step(
    payload: bytes,
) -> tuple[int, npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
    """The bucket, the buffer, and the words of all masks, one after the other."""
    num_tokens, size = _STEP.unpack_from(payload)
    num_blocks = -(-size // _BLOCK_WORDS)
    mask_bytes = -(-num_blocks // 8)
    mask = np.frombuffer(payload, np.uint8, mask_bytes, _STEP.size)
    there = np.unpackbits(mask, count=num_blocks).astype(bool)
    num_words = int(there.sum()) * _BLOCK_WORDS
    start = _STEP.size + mask_bytes
    blocks = np.zeros((num_blocks, _BLOCK_WORDS), np.int32)
    words = np.frombuffer(payload, np.int32, num_words, start)
    blocks[there] = words.reshape(-1, _BLOCK_WORDS)
    masks = np.frombuffer(payload, np.uint32, offset=start + 4 * num_words)
    return num_tokens, blocks.reshape(-1)[:size], masks


def pack_arrays(arrays: Sequence[npt.NDArray[Any] | None]) -> list[bytes | memoryview]:
    """Arrays as buffers to be sent one after the other; their values are not copied."""
    heads, values = [bytes([len(arrays)])], []
    for array in arrays:
        if array is None:
            heads.append(_HEAD.pack(255, 0))
            continue
        whole = np.ascontiguousarray(array)
        assert whole.dtype.name in _DTYPES, f"no message has arrays of {whole.dtype}"
        heads.append(_HEAD.pack(_DTYPES.index(whole.dtype.name), whole.ndim))
        heads.append(struct.pack(f"<{whole.ndim}I", *whole.shape))
        values.append(whole.reshape(-1).view(np.uint8).data)
    return [b"".join(heads), *values]


def unpack_arrays(payload: bytes) -> list[npt.NDArray[Any] | None]:
    """The arrays of `pack_arrays`, read-only views of the payload."""
    kinds: list[tuple[str, tuple[int, ...]] | None] = []
    offset = 1
    for _ in range(payload[0]):
        code, ndim = _HEAD.unpack_from(payload, offset)
        offset += _HEAD.size
        if code == 255:
            kinds.append(None)
            continue
        kinds.append((_DTYPES[code], struct.unpack_from(f"<{ndim}I", payload, offset)))
        offset += 4 * ndim
    arrays: list[npt.NDArray[Any] | None] = []
    for kind in kinds:
        if kind is None:
            arrays.append(None)
            continue
        dtype, shape = kind
        count = int(np.prod(shape))
        array: npt.NDArray[Any] = np.frombuffer(payload, dtype, count, offset)
        arrays.append(array.reshape(shape))
        offset += array.nbytes
    return arrays
