"""An item's digest, and the sentinels that carry it in cache ids. Host only."""

import hashlib
import logging
import re
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxmm.errors import ModelError
from jaxmm.host.item import Modality

logger = logging.getLogger(__name__)

SENTINEL_BASE = 1_000_000
"""Every sentinel is at least this, every token id below it."""
NUM_SENTINELS = 4
MAX_CALLER_HASH = 128
"""Hex digits of a caller's hash."""

_FORMAT = b"jaxmm.identity.1"
_SENTINEL_TAG = b"jaxmm.sentinel.1"
_CALLER_TAG = b"jaxmm.caller.1"
_HEX_PAIRS = re.compile(r"(?:[0-9a-fA-F]{2})+")

Sentinels = tuple[int, int, int, int]


def item_identity(
    modality: Modality,
    fingerprint: bytes,
    grid_thw: tuple[int, int, int],
    *,
    features: npt.NDArray[np.generic] | None = None,
    embeddings: npt.NDArray[np.generic] | None = None,
) -> bytes:
    """Digest of everything that decides an item's rows.

    Args:
        modality: What the item is.
        fingerprint: Of the processor that made the features; of the encoder for embeddings.
        grid_thw: Patches by (time, height, width), before merging.
        features: Exactly one of these two; read in place when contiguous, never copied whole.
        embeddings: Finished rows; the same bytes as features give another identity.

    Returns:
        32 bytes: SHA-256 of a versioned encoding in which every field carries its length.
    """
    content = features if embeddings is None else embeddings
    assert content is not None and (features is None or embeddings is None), "exactly one content"
    assert not content.dtype.hasobject, "an identity covers values, not references"
    digest = hashlib.sha256()
    for field in (
        _FORMAT,
        b"features" if embeddings is None else b"embeddings",
        modality.value.encode(),
        fingerprint,
        struct.pack("<3q", *grid_thw),
        f"{content.dtype.name} {content.dtype.str}".encode(),  # bfloat16's str alone is void
        struct.pack(f"<{content.ndim}q", *content.shape),
    ):
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    digest.update(struct.pack("<Q", content.nbytes))
    _update(digest, content)
    return digest.digest()


def sentinels_for(identity: bytes) -> Sentinels:
    """Four words of 62 bits each, above every token id, each set by the whole identity."""
    a, b, c, d = (_word(index, identity) for index in range(NUM_SENTINELS))
    return a, b, c, d


def caller_identity(caller_hash: bytes, salt: str) -> bytes:
    """What stands for a caller's hash when sentinels are made; 32 bytes, one tenant's own.

    It is SHA-256 of `jaxmm.caller.1`, the salt's length in bytes (8, little-endian), the salt in
    UTF-8 and the hash's bytes, so that a router can make the same. It never guards rows.
    """
    scope = salt.encode()
    return hashlib.sha256(
        _CALLER_TAG + struct.pack("<Q", len(scope)) + scope + caller_hash
    ).digest()


def sentinel_array(sentinels: Sentinels, length: int) -> npt.NDArray[np.int64]:
    """int64[length]: the four words over and over, v0 first."""
    return np.resize(np.array(sentinels, np.int64), length)


def check_vocabulary(vocab_size: int) -> None:
    """Refuse a model that has token ids where sentinels begin.

    Raises:
        ModelError: Names the constant to change.
    """
    if vocab_size > SENTINEL_BASE:
        raise ModelError(
            f"the vocabulary has {vocab_size} ids; sentinels begin at {SENTINEL_BASE}. "
            "Raise SENTINEL_BASE in jaxmm/host/identity.py above the vocabulary."
        )


def parse_caller_hashes(
    mm_hashes: Sequence[str] | None, num_items: int
) -> tuple[bytes | None, ...]:
    """Caller's hashes as bytes, one for each item; None where the item's own identity stands.

    A list of a wrong length is ignored whole, a malformed entry alone; both are logged.
    """
    if mm_hashes is None:
        return (None,) * num_items
    if isinstance(mm_hashes, str) or len(mm_hashes) != num_items:
        logger.warning(
            "mm_hashes ignored: not one hash for each item given=%d items=%d",
            *(len(mm_hashes), num_items),
        )
        return (None,) * num_items
    return tuple(_parse(index, entry) for index, entry in enumerate(mm_hashes, start=1))


def _parse(index: int, entry: object) -> bytes | None:
    fits = isinstance(entry, str) and len(entry) <= MAX_CALLER_HASH
    if isinstance(entry, str) and fits and _HEX_PAIRS.fullmatch(entry):
        return bytes.fromhex(entry)
    logger.warning(
        "mm_hashes entry ignored: not an even number of up to %d hex digits item=%d",
        *(MAX_CALLER_HASH, index),
    )
    return None


def _word(index: int, identity: bytes) -> int:
    digest = hashlib.sha256(_SENTINEL_TAG + bytes([index]) + identity).digest()
    return SENTINEL_BASE + (int.from_bytes(digest[:8], "little") >> 2)


def _update(digest: "hashlib._Hash", array: npt.NDArray[np.generic]) -> None:
    """Feed an array's bytes in C order, by its first axis where it is not contiguous."""
    if array.flags.c_contiguous:
        digest.update(array.reshape(-1).view(np.uint8).data)
        return
    for part in array:
        _update(digest, part)
