"""From pictures to items to a prompt, through the parts that a server uses."""

import dataclasses
import gc
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxmm.config import MediaConfig
from jaxmm.errors import EngineStopped, MediaError, MediaTooLarge, PlaceholderError, RequestError
from jaxmm.host.decode import InlineDecoder, Processed
from jaxmm.host.decodes import Decodes
from jaxmm.host.embedded import RowForm
from jaxmm.host.identity import caller_identity, sentinels_for
from jaxmm.host.media import Limits, decode_rgb
from jaxmm.host.media_map import MediaMap
from jaxmm.host.prepare import Preparer
from jaxmm.models.qwen2_vl.processor import ImageProcessor

DATA = Path(__file__).parents[2] / "data" / "media"
PAD = 90
LIMITS = Limits(max_bytes=1 << 20, max_decode_pixels=2_000_000)


class CountingDecoder(InlineDecoder):
    """Counts the pictures that were decoded."""

    num_decoded = 0

    def submit(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        self.num_decoded += 1
        return super().submit(*args, **kwargs)


class SlowStart:
    """Holds back the first picture until told to answer, or cancels it."""

    def __init__(self, decoder: InlineDecoder) -> None:
        self._decoder = decoder
        self.asked = threading.Event()
        self.abandoned: list[Future[Processed]] = []
        self._arguments: tuple[object, ...] = ()
        self._future: Future[Processed] = Future()

    def submit(self, *arguments: object) -> Future[Processed]:
        assert not self.asked.is_set(), "one decode"
        self._arguments = arguments
        self.asked.set()
        return self._future

    def answer(self) -> None:
        self.asked.wait()
        self._future.set_result(self._decoder.submit(*self._arguments).result())

    def abandon(self, future: Future[Processed]) -> None:
        self.abandoned.append(future)

    def close(self) -> None:
        self.asked.wait()
        self._future.cancel()


class Kit:
    """A preparer and the parts whose counters the tests read."""

    def __init__(self, **config: int) -> None:
        self.processor = ImageProcessor(min_pixels=3136, max_pixels=1003520)
        self.media = MediaConfig(max_bytes=1 << 20, max_decode_pixels=2_000_000, **config)
        self.decoder = CountingDecoder(self.processor, LIMITS)
        self.files = MediaMap(self.media.map_entries)
        self.preparer = self.preparer_with(self.decoder)

    def preparer_with(self, decoder: Any) -> Preparer:
        return Preparer(
            self.processor, Decodes(decoder, self.files), self.media, PAD, RowForm(8, 2)
        )


@pytest.fixture
def kit() -> Kit:
    return Kit()


def picture(name: str) -> bytes:
    return (DATA / name).read_bytes()


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("bytes_150x30.png", "bytes_30x150.png"),
        ("pal_a.png", "pal_b.png"),
        ("onepix_a.png", "onepix_b.png"),
        ("q95.jpg", "q60.jpg"),
    ],
)
def test_pictures_that_look_different_are_never_one_item(kit: Kit, a: str, b: str) -> None:
    first, second = kit.preparer.prepare_items([picture(a), picture(b)])
    assert first.num_rows == second.num_rows
    assert first.identity != second.identity
    assert not set(first.sentinels) & set(second.sentinels)


def test_raw_bytes_in_two_shapes_are_two_items(kit: Kit) -> None:
    rgb = decode_rgb(DATA / "bytes_150x30.png", LIMITS)
    assert rgb.tobytes() == decode_rgb(DATA / "bytes_30x150.png", LIMITS).tobytes()
    wide, tall = kit.preparer.prepare_items([rgb, rgb.reshape(150, 30, 3)])
    assert wide.identity != tall.identity


def test_one_picture_at_two_resolutions_is_two_items(kit: Kit) -> None:
    """224 x 224 and 448 x 448 pixels, 64 and 256 tokens; the third is the first again."""
    data = picture("big.png")
    items = [kit.preparer.prepare_items([data], max_pixels=n)[0] for n in (50176, 200704, 50176)]
    assert [item.num_rows for item in items] == [64, 256, 64]
    assert items[0].identity == items[2].identity != items[1].identity


def test_forms_of_one_picture_are_one_item(kit: Kit) -> None:
    path = DATA / "size_640x480.png"
    sources = [path, path.read_bytes(), Image.open(path), decode_rgb(path, LIMITS)]
    items = kit.preparer.prepare_items(sources)
    assert len({item.identity for item in items}) == 1
    assert items[0].features is not None
    assert items[0].features.shape == (items[0].num_patches, 588)


def test_known_file_is_not_decoded_again(kit: Kit) -> None:
    (first,) = kit.preparer.prepare_items([picture("red.png")])
    assert first.features is not None
    first = dataclasses.replace(first, features=None)
    gc.collect()
    (second,) = kit.preparer.prepare_items([DATA / "red.png"])
    assert kit.decoder.num_decoded == 1
    assert second.features is None
    assert (second.identity, second.grid_thw) == (first.identity, first.grid_thw)
    assert (second.num_rows, second.sentinels) == (first.num_rows, first.sentinels)


def test_known_file_gives_its_features_when_asked(kit: Kit) -> None:
    (item,) = kit.preparer.prepare_items([picture("red.png")])
    assert item.features is not None
    expected = item.features.copy()
    for source in (picture("red.png"), DATA / "red.png", Image.open(DATA / "red.png")):
        assert np.array_equal(kit.preparer.load_features(source, item), expected)
    assert kit.decoder.num_decoded == 4


@pytest.mark.parametrize("form", [np.asarray, Image.fromarray])
def test_known_pixels_are_not_processed_again(kit: Kit, form: Any) -> None:
    pixels = decode_rgb(DATA / "red.png", LIMITS)
    (first,) = kit.preparer.prepare_items([form(pixels)])
    identity, features = first.identity, first.features
    assert features is not None
    del first, features
    gc.collect()
    (second,) = kit.preparer.prepare_items([form(pixels.copy())])
    assert kit.decoder.num_decoded == 1
    assert (second.identity, second.features) == (identity, None)
    changed = pixels.copy()
    changed[0, 0, 0] ^= 1
    (other,) = kit.preparer.prepare_items([form(changed)])
    assert kit.decoder.num_decoded == 2
    assert other.identity != identity


def test_array_that_its_owner_changes_later_stays_the_picture_it_was(kit: Kit) -> None:
    pixels = decode_rgb(DATA / "red.png", LIMITS).copy()
    (item,) = kit.preparer.prepare_items([pixels])
    pixels[:] = 0
    (black,) = kit.preparer.prepare_items([pixels])
    assert item.identity != black.identity
    (again,) = kit.preparer.prepare_items([decode_rgb(DATA / "red.png", LIMITS)])
    assert again.identity == item.identity


def test_picture_with_exif_orientation_is_turned_once(kit: Kit) -> None:
    path = DATA / "exif_6.jpg"
    of_file, of_image = kit.preparer.prepare_items([path, Image.open(path)])
    assert of_file.identity == of_image.identity


def test_features_that_another_item_holds_are_shared(kit: Kit) -> None:
    (first,) = kit.preparer.prepare_items([picture("red.png")])
    (second,) = kit.preparer.prepare_items([picture("red.png")])
    assert kit.decoder.num_decoded == 1
    assert second.features is first.features


def test_requests_that_come_together_share_one_decode() -> None:
    kit = Kit()
    pool = SlowStart(kit.decoder)
    preparer = kit.preparer_with(pool)
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(preparer.prepare_items, [picture("red.png")]) for _ in range(4)]
        pool.answer()
        items = [future.result()[0] for future in waiting]
    assert kit.decoder.num_decoded == 1
    assert len({id(item.features) for item in items}) == 1


def wait_until_joined(preparer: Preparer, num_waiting: int) -> None:
    """Until so many requests wait for the one decode."""
    on_their_way = preparer._decodes._on_their_way
    while [decode.num_waiting for decode in on_their_way.values()] != [num_waiting]:
        time.sleep(0.001)


def test_decode_ends_when_the_last_request_for_it_is_gone() -> None:
    kit = Kit()
    pool = SlowStart(kit.decoder)
    preparer = kit.preparer_with(pool)
    gone: list[Future[None]] = [Future(), Future()]

    def ask(index: int) -> Any:
        return preparer.prepare_items([picture("red.png")], gone=gone[index])

    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(ask, index) for index in range(2)]
        wait_until_joined(preparer, 2)
        gone[0].set_result(None)
        with pytest.raises(EngineStopped):
            waiting[0].result(30)
        assert not pool.abandoned
        gone[1].set_result(None)
        with pytest.raises(EngineStopped):
            waiting[1].result(30)
    assert pool.abandoned == [pool._future]


def test_request_that_stays_gets_what_another_has_left() -> None:
    kit = Kit()
    pool = SlowStart(kit.decoder)
    preparer = kit.preparer_with(pool)
    gone: Future[None] = Future()
    with ThreadPoolExecutor(2) as threads:
        left = threads.submit(preparer.prepare_items, [picture("red.png")], gone=gone)
        stays = threads.submit(preparer.prepare_items, [picture("red.png")])
        wait_until_joined(preparer, 2)
        gone.set_result(None)
        with pytest.raises(EngineStopped):
            left.result(30)
        pool.answer()
        assert stays.result(30)[0].num_rows == 16


def test_failed_decode_is_tried_again(kit: Kit) -> None:
    for _ in range(2):
        with pytest.raises(MediaError):
            kit.preparer.prepare_items([picture("cut.png"), picture("cut.png")])
    assert kit.decoder.num_decoded >= 2


def test_closed_decoder_is_said_plainly() -> None:
    kit = Kit()
    pool = SlowStart(kit.decoder)
    preparer = kit.preparer_with(pool)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(preparer.prepare_items, [picture("red.png")])
        pool.close()
        with pytest.raises(EngineStopped):
            waiting.result()


def test_changed_file_is_not_taken_for_the_known_one(kit: Kit, tmp_path: Path) -> None:
    path = tmp_path / "camera.png"
    path.write_bytes(picture("red.png"))
    kit.preparer.prepare_items([path])
    (item,) = kit.preparer.prepare_items([path])
    path.write_bytes(picture("blue.png"))
    with pytest.raises(MediaError, match="changed"):
        kit.preparer.load_features(path, item)
    (fresh,) = kit.preparer.prepare_items([path])
    assert fresh.identity != item.identity


def test_same_file_in_one_request_is_decoded_once(kit: Kit) -> None:
    x, y = picture("blue.png"), picture("size_112x84.png")
    items = kit.preparer.prepare_items([x, y, x])
    assert kit.decoder.num_decoded == 2
    assert [item.num_rows for item in items] == [16, 12, 16]
    assert items[0].identity == items[2].identity
    assert items[0].features is items[2].features


def test_tenants_do_not_learn_of_each_others_files(kit: Kit) -> None:
    for salt in ("a", "b"):
        (item,) = kit.preparer.prepare_items([picture("red.png")], salt=salt)
        assert item.features is not None
    assert kit.decoder.num_decoded == 2


def test_callers_hash_gives_sentinels_but_never_the_identity(kit: Kit) -> None:
    red, blue = (
        kit.preparer.prepare_items([picture(name)], mm_hashes=["a1"], salt="t")[0]
        for name in ("red.png", "blue.png")
    )
    assert red.sentinels == blue.sentinels == sentinels_for(caller_identity(b"\xa1", "t"))
    assert red.identity != blue.identity
    (other,) = kit.preparer.prepare_items([picture("red.png")], mm_hashes=["a1"], salt="u")
    assert other.sentinels != red.sentinels
    assert other.identity == red.identity


def test_wrong_hashes_leave_the_items_own_sentinels(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    images = [picture("red.png"), picture("blue.png")]
    own = [item.sentinels for item in kit.preparer.prepare_items(images)]
    with caplog.at_level(logging.WARNING):
        short = kit.preparer.prepare_items(images, mm_hashes=["a1"])
        one = kit.preparer.prepare_items(images, mm_hashes=["a1", "z" * 5000])
    assert [item.sentinels for item in short] == own
    assert one[0].sentinels != own[0]
    assert one[1].sentinels == own[1]
    assert len(caplog.records) == 2


def test_one_bad_picture_refuses_the_request_and_is_named(kit: Kit) -> None:
    images = [picture("red.png"), picture("cut.png"), picture("blue.png")]
    with pytest.raises(MediaError, match=r"^image 2 of 3: "):
        kit.preparer.prepare_items(images)
    with pytest.raises(MediaTooLarge, match=r"^image 1 of 1: .*4000 times"):
        kit.preparer.prepare_items([picture("thin_4000x1.png")])
    with pytest.raises(MediaError, match=r"^image 2 of 2: "):
        kit.preparer.prepare_items([picture("red.png"), b""])


def test_number_of_pictures_is_limited() -> None:
    kit = Kit(max_items=2)
    with pytest.raises(RequestError, match="3 images; the limit is 2"):
        kit.preparer.prepare_items([picture("red.png")] * 3)


def test_request_may_not_pass_the_servers_pixels(kit: Kit) -> None:
    with pytest.raises(RequestError, match="max_pixels=1003521"):
        kit.preparer.prepare_items([picture("red.png")], max_pixels=1003521)
    assert kit.decoder.num_decoded == 0


def test_prompt_binds_items_to_their_slots(kit: Kit) -> None:
    items = kit.preparer.prepare_items([picture("red.png"), picture("size_112x84.png")])
    prompt = kit.preparer.prompt(np.array([1, PAD, 2, PAD, 3]), [1, 3], items)
    assert prompt.num_tokens == 3 + 16 + 12
    assert [tuple(item.offsets[0]) for item in prompt.items] == [(1, 17), (18, 30)]
    assert prompt.positions.max() + 1 == prompt.num_tokens + prompt.delta


def test_placeholder_in_the_text_never_takes_a_pictures_slot(kit: Kit) -> None:
    items = kit.preparer.prepare_items([picture("green.png")])
    with pytest.raises(PlaceholderError, match=r"2 placeholders \(id 90\) for 1 items"):
        kit.preparer.prompt(np.array([1, PAD, 2, PAD, 3]), [3], items)
    with pytest.raises(PlaceholderError, match=r"1 placeholders \(id 90\) for 0 items"):
        kit.preparer.prompt(np.array([1, PAD, 2]), [], [])
    with pytest.raises(PlaceholderError, match="0 placeholders"):
        kit.preparer.prompt(np.array([1, 2]), [0], items)
