"""The media map remembers the most recent files and takes no two keys for one."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxmm.host.media_map import Known, MediaMap, media_key

KNOWN = Known(bytes(32), (1, 2, 2), 1)


def test_least_recently_used_file_is_forgotten() -> None:
    files = MediaMap(2)
    files.put(b"a", KNOWN)
    files.put(b"b", KNOWN)
    assert files.get(b"a") == KNOWN
    files.put(b"c", KNOWN)
    assert files.get(b"b") is None
    assert files.get(b"a") is files.get(b"c") is KNOWN
    assert (files.num_hits, files.num_misses, len(files)) == (3, 1, 2)


def test_capacity_of_zero_keeps_nothing() -> None:
    files = MediaMap(0)
    files.put(b"a", KNOWN)
    assert files.get(b"a") is None


def test_key_covers_file_processor_limits_and_tenant() -> None:
    keys = {
        media_key(b"data", b"fp", (1, 2)),
        media_key(b"datb", b"fp", (1, 2)),
        media_key(b"data", b"fq", (1, 2)),
        media_key(b"data", b"fp", (1, 3)),
        media_key(b"data", b"fp", (2, 2)),
        media_key(b"data", b"fp", (1, 2), "tenant"),
        media_key(b"pdata", b"f", (1, 2)),
        media_key(b"ata", b"fp", (1, 2), "d"),
    }
    assert len(keys) == 8


def test_key_of_pixels_covers_their_shape_and_is_no_files() -> None:
    wide, tall = np.zeros((2, 3, 3), np.uint8), np.zeros((3, 2, 3), np.uint8)
    contents = [wide, tall, wide + 1, wide.tobytes()]
    assert len({media_key(content, b"fp", (1, 2)) for content in contents}) == 4


def test_threads_share_it_within_its_capacity() -> None:
    files = MediaMap(16)

    def work(seed: int) -> None:
        for i in range(500):
            key = bytes([(seed * 31 + i * 7) % 40])
            known = Known(key, (1, 2, 2), 1)
            found = files.get(key)
            assert found is None or found.identity == key
            files.put(key, known)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert len(files) == 16
    assert files.num_hits + files.num_misses == 2000
