"""Identity cannot be confused; sentinels carry it."""

import hashlib
import logging

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmm.errors import ModelError
from jaxmm.host.identity import (
    SENTINEL_BASE,
    caller_identity,
    check_vocabulary,
    item_identity,
    parse_caller_hashes,
    sentinel_array,
    sentinels_for,
)
from jaxmm.host.item import Modality

GRID = (1, 2, 2)


def identity_of(
    features: np.ndarray,
    *,
    modality: Modality = Modality.IMAGE,
    fingerprint: bytes = b"f",
    grid: tuple[int, int, int] = GRID,
) -> bytes:
    return item_identity(modality, fingerprint, grid, features=features)


def test_identity_is_the_digest_of_the_documented_encoding() -> None:
    features = np.arange(6, dtype=np.uint8).reshape(2, 3)
    fields = [
        b"jaxmm.identity.1",
        b"features",
        b"image",
        b"f",
        (1).to_bytes(8, "little") + (2).to_bytes(8, "little") * 2,
        b"uint8 |u1",
        (2).to_bytes(8, "little") + (3).to_bytes(8, "little"),
        bytes(range(6)),
    ]
    encoding = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    assert identity_of(features) == hashlib.sha256(encoding).digest()


def test_everything_that_decides_the_rows_is_in_the_identity() -> None:
    features = np.arange(12, dtype=np.uint8)
    different = [
        identity_of(features.reshape(3, 4)),
        identity_of(features.reshape(4, 3)),
        identity_of(features.reshape(2, 6)),
        identity_of(features.reshape(3, 4).view(np.int8)),
        identity_of(features.reshape(3, 4).view(np.uint16)),
        identity_of(features.reshape(3, 4), grid=(1, 4, 1)),
        identity_of(features.reshape(3, 4), grid=(1, 1, 4)),
        identity_of(features.reshape(3, 4), fingerprint=b"g"),
        identity_of(features.reshape(3, 4), modality=Modality.VIDEO),
        item_identity(Modality.IMAGE, b"f", GRID, embeddings=features.reshape(3, 4)),
    ]
    changed = features.copy()
    changed[5] ^= 1
    different.append(identity_of(changed.reshape(3, 4)))
    assert len(set(different)) == len(different)
    assert all(len(d) == 32 for d in different)


def test_dtypes_of_one_width_and_byte_orders_differ() -> None:
    data = np.arange(8, dtype=np.uint16)
    views = [data, data.view(np.float16), data.view(ml_dtypes.bfloat16), data.view(">u2")]
    assert len({identity_of(view) for view in views}) == len(views)


def test_field_borders_cannot_be_moved() -> None:
    a = item_identity(Modality.IMAGE, b"ab", GRID, features=np.zeros(1, np.uint8))
    b = item_identity(Modality.IMAGE, b"a", GRID, features=np.zeros(1, np.uint8))
    assert a != b


def test_layout_in_memory_does_not_matter() -> None:
    base = np.arange(60, dtype=np.uint8).reshape(3, 4, 5)
    for view in (base[:, ::2], base[::-1], base.transpose(2, 0, 1), np.asfortranarray(base)):
        assert identity_of(view) == identity_of(np.ascontiguousarray(view))


def test_sentinels_of_many_pictures_never_meet() -> None:
    """5,000 seeded pictures of 28 x 28."""
    chance = np.random.default_rng(0)
    words = np.array(
        [
            sentinels_for(identity_of(chance.integers(0, 256, (4, 588), dtype=np.uint8)))
            for _ in range(5000)
        ]
    )
    assert len(np.unique(words)) == words.size
    assert words.min() >= SENTINEL_BASE
    assert words.max() < 2**62 + SENTINEL_BASE < 2**63


def test_every_sentinel_depends_on_the_whole_identity() -> None:
    identity = bytes(32)
    for byte in range(32):
        changed = identity[:byte] + b"\1" + identity[byte + 1 :]
        pairs = zip(sentinels_for(identity), sentinels_for(changed), strict=True)
        assert all(a != b for a, b in pairs)


@given(length=st.integers(0, 40))
def test_sentinels_cycle_from_the_first(length: int) -> None:
    words = (SENTINEL_BASE, SENTINEL_BASE + 1, 2**62, SENTINEL_BASE + 3)
    array = sentinel_array(words, length)
    assert array.dtype == np.int64
    assert array.tolist() == [words[i % 4] for i in range(length)]


def test_vocabulary_must_end_below_the_sentinels() -> None:
    check_vocabulary(SENTINEL_BASE)
    with pytest.raises(ModelError, match="SENTINEL_BASE"):
        check_vocabulary(SENTINEL_BASE + 1)


def test_callers_hash_is_scoped_by_tenant() -> None:
    names = {caller_identity(h, s) for h in (b"\1", b"\2") for s in ("", "a", "b")}
    assert len(names) == 6
    assert caller_identity(b"b", "a") != caller_identity(b"", "ab")
    made = hashlib.sha256(b"jaxmm.caller.1" + (1).to_bytes(8, "little") + b"a" + b"\xa1").digest()
    assert caller_identity(b"\xa1", "a") == made


def test_good_hashes_are_taken_in_either_case() -> None:
    assert parse_caller_hashes(("a1", "A1", "00" * 64), 3) == (b"\xa1", b"\xa1", bytes(64))
    assert parse_caller_hashes(None, 2) == (None, None)


@pytest.mark.parametrize(
    "entry", ["zz", "a", "", "a1" * 65, "a1 b2", "٠٠", None, 7, "0x12", "a1\n"]
)
def test_malformed_hash_falls_back_alone(entry: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_caller_hashes(("a1", entry, "b2"), 3) == (b"\xa1", None, b"\xb2")
    assert "item=2" in caplog.text


@pytest.mark.parametrize("hashes", [(), ("a1",), ("a1",) * 3, "a1"])
def test_list_of_the_wrong_length_is_ignored_whole(
    hashes: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_caller_hashes(hashes, 2) == (None, None)
    assert "items=2" in caplog.text
