"""Which frames come out of a video: each test clip's frames tell their own index."""

import functools
import io
import random
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from jaxmm.errors import MediaError, MediaTooLarge
from jaxmm.host.clip import Timeline, open_clip, sample_frames
from jaxmm.host.media import Limits
from tests.clips import grey_frame, index_of, make_clip

MEDIA = Path(__file__).parents[2] / "data" / "media"
LIMITS = Limits(1 << 20, 1 << 20)
FORMS: dict[str, dict[str, Any]] = {
    "mp4, B-frames": {"options": {"bf": "2"}},
    "mp4, open groups": {"options": {"bf": "2", "x264-params": "open-gop=1"}},
    "mp4, one key frame": {"key_every": 1000},
    "mp4 of MPEG-4 part 2": {"codec": "mpeg4"},
    "webm": {"form": "webm", "codec": "libvpx-vp9"},
    "webm of VP8": {"form": "webm", "codec": "libvpx"},
    "gif": {"form": "gif", "codec": "gif"},
    "30000/1001 a second": {"fps": Fraction(30000, 1001)},
}


@functools.cache
def clip_of(form: str) -> bytes:
    return make_clip(24, **FORMS[form])


def frames_at(data: Any, indices: list[int], limits: Limits = LIMITS) -> list[Image.Image]:
    with open_clip(data, lambda _: indices, limits, fps=2) as clip:
        return list(clip.frames)


def timeline_of(data: Any) -> Timeline:
    with open_clip(data, lambda _: [0], LIMITS, fps=2) as clip:
        return clip.timeline


@pytest.mark.parametrize("form", FORMS)
def test_every_frame_is_the_one_asked_for(form: str) -> None:
    everything = frames_at(clip_of(form), list(range(24)))
    assert [index_of(frame) for frame in everything] == list(range(24))
    assert {(frame.mode, frame.size) for frame in everything} == {("RGB", (64, 48))}


@settings(deadline=None, max_examples=20)
@given(form=st.sampled_from(sorted(FORMS)), wanted=st.sets(st.integers(0, 23), min_size=1))
def test_any_few_frames_are_those_asked_for(form: str, wanted: set[int]) -> None:
    indices = sorted(wanted)
    assert [index_of(frame) for frame in frames_at(clip_of(form), indices)] == indices


@pytest.mark.parametrize("form", FORMS)
def test_timeline_is_that_of_the_packets(form: str) -> None:
    fps = float(FORMS[form].get("fps", 10))
    timeline = timeline_of(clip_of(form))
    assert (timeline.num_frames, timeline.height, timeline.width) == (24, 48, 64)
    assert timeline.fps == pytest.approx(fps, rel=1e-3)


def test_what_lies_between_wanted_frames_is_not_decoded() -> None:
    data = bytearray(clip_of("mp4 of MPEG-4 part 2"))
    with av.open(io.BytesIO(data)) as container:
        packets = [p for p in container.demux(video=0) if p.size]
    # the rest of the second group of pictures; its first two the decoder may read ahead
    for packet in packets[8:12]:
        data[packet.pos : packet.pos + packet.size] = bytes(packet.size)
    indices = [0, 5, 12, 23]
    assert [index_of(frame) for frame in frames_at(bytes(data), indices)] == indices
    with pytest.raises(MediaError, match="damaged"):
        frames_at(bytes(data), [9])


@pytest.mark.parametrize(
    ("name", "frames", "fps"),
    [("10f_10fps", 10, 10), ("9f_2997", 9, 30000 / 1001), ("24f_8fps", 24, 8), ("1f", 1, 10)],
)
def test_rates_and_counts_of_files(name: str, frames: int, fps: float) -> None:
    timeline = timeline_of((MEDIA / f"{name}.mp4").read_bytes())
    assert timeline.num_frames == frames
    assert timeline.fps == pytest.approx(fps)


@pytest.mark.parametrize(
    ("name", "asked", "qwen3", "qwen2"),
    [
        ("10f_10fps", {}, [0, 3, 6, 9], [0, 3, 6, 9]),
        ("9f_2997", {}, [0, 3, 5, 8], [0, 3, 5, 8]),
        ("24f_8fps", {}, [0, 5, 9, 14, 18, 23], [0, 5, 9, 14, 18, 23]),
        (
            "24f_8fps",
            {"num_frames": 8},
            [0, 3, 7, 10, 13, 16, 20, 23],
            [0, 3, 7, 10, 13, 16, 20, 23],
        ),
        ("24f_8fps", {"num_frames": 3}, [0, 12, 23], [0, 23]),
        ("24f_8fps", {"fps": 8.0}, list(range(24)), list(range(24))),
        ("24f_8fps", {"fps": 0.1}, [0, 8, 15, 23], [0, 8, 15, 23]),
        ("same_4fps", {}, [0, 2, 4, 7, 9, 11], [0, 2, 4, 7, 9, 11]),
        ("same_12fps", {}, [0, 4, 7, 11], [0, 4, 7, 11]),
        ("1f", {}, [0], [0]),
        ("2f", {}, [0, 1], [0, 1]),
        ("3f", {}, [0, 1, 2], [0, 2]),
    ],
)
def test_frames_are_spread_evenly(
    name: str, asked: dict[str, Any], qwen3: list[int], qwen2: list[int]
) -> None:
    timeline = timeline_of((MEDIA / f"{name}.mp4").read_bytes())
    for even, expected in ((False, qwen3), (True, qwen2)):
        rule = {"fps": 2.0, "num_frames": None, **asked}
        chosen = sample_frames(timeline, **rule, min_frames=4, max_frames=768, even=even)
        assert chosen == expected


@given(
    total=st.integers(1, 5000),
    fps=st.floats(0.1, 120),
    wanted=st.floats(0.05, 60),
    even=st.booleans(),
    most=st.integers(2, 768),
)
def test_sampled_indices_ascend_within_the_video_and_the_limit(
    total: int, fps: float, wanted: float, even: bool, most: int
) -> None:
    indices = sample_frames(
        Timeline(total, fps, 4, 4),
        fps=wanted,
        num_frames=None,
        min_frames=4,
        max_frames=most,
        even=even,
    )
    assert indices == sorted(set(indices))
    assert 1 <= len(indices) <= min(most, total)
    assert 0 <= indices[0] <= indices[-1] < total
    assert len(indices) == 1 or not (even and len(indices) % 2)


@pytest.mark.parametrize("name", ["no_frames.mp4", "cut.mp4"])
def test_file_that_promises_frames_which_are_not_there_is_refused(name: str) -> None:
    with pytest.raises(MediaError, match=r"no frames|damaged"):
        frames_at((MEDIA / name).read_bytes(), [0])


@pytest.mark.parametrize("keep", [0.6, 0.9])
@pytest.mark.parametrize("form", ["webm", "gif"])
def test_of_a_stream_cut_short_only_the_last_frame_may_suffer(form: str, keep: float) -> None:
    data = clip_of(form)
    cut = data[: int(len(data) * keep)]
    count = timeline_of(cut).num_frames
    assert 0 < count < 24
    found = [index_of(frame) for frame in frames_at(cut, list(range(count - 1)))]
    assert found == list(range(count - 1))


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
def test_mp4_without_its_index_is_refused(keep: float) -> None:
    data = clip_of("mp4, B-frames")
    with pytest.raises(MediaError, match="damaged"):
        frames_at(data[: int(len(data) * keep)], [0])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nothing",
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        (MEDIA / "red.png").read_bytes(),
        b"RIFF\x00\x00\x00\x00AVI LIST",
    ],
)
def test_what_is_no_video_is_refused_by_its_first_bytes(data: bytes) -> None:
    with pytest.raises(MediaError, match="no video that can be read"):
        frames_at(data, [0])


def test_file_with_sound_alone_is_refused() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(MediaError, match="no video in it"):
        frames_at(file.getvalue(), [0])


def test_file_of_an_unknown_codec_is_refused() -> None:
    data = clip_of("mp4, B-frames").replace(b"avc1", b"none")
    with pytest.raises(MediaError, match=r"coded in a way that is not known"):
        frames_at(data, [0])


@pytest.mark.parametrize("form", FORMS)
def test_damaged_bytes_give_frames_or_a_media_error(form: str) -> None:
    chance = random.Random(form)
    refused = 0
    for _ in range(60):
        broken = bytearray(clip_of(form))
        for _ in range(chance.randint(1, 6)):
            broken[chance.randrange(12, len(broken))] = chance.randrange(256)
        try:
            with open_clip(bytes(broken), lambda _: [0], LIMITS, fps=2) as clip:
                list(clip.frames)
        except MediaError:
            refused += 1
    assert refused < 60


def test_frames_above_the_pixel_limit_are_refused_before_decoding() -> None:
    with pytest.raises(MediaTooLarge, match="64 x 48 = 3072 pixels; the limit is 3000"):
        frames_at(clip_of("webm"), [0], Limits(1 << 20, 3000))


def test_messages_name_no_path_and_no_address() -> None:
    for data in (
        b"nothing",
        (MEDIA / "cut.mp4").read_bytes(),
        (MEDIA / "no_frames.mp4").read_bytes(),
    ):
        with pytest.raises(MediaError) as caught:
            frames_at(data, [0])
        assert not any(sign in str(caught.value) for sign in ("0x", "/", "object at", "Errno"))


@pytest.mark.parametrize(
    ("matrix", "size", "corner"),
    [
        ((0, 1, -1, 0), (48, 64), (47, 0)),  # a quarter turn to the right
        ((-1, 0, 0, -1), (64, 48), (63, 47)),
        ((0, -1, 1, 0), (48, 64), (0, 63)),
    ],
)
def test_frames_are_turned_as_the_file_says(
    matrix: tuple[int, int, int, int], size: tuple[int, int], corner: tuple[int, int]
) -> None:
    def marked(index: int) -> np.ndarray:
        frame = grey_frame(index)
        frame[:16, :16] = 250  # top left as stored
        return frame

    data = bytearray(make_clip(2, frame=marked))
    a, b, c, d = (value << 16 for value in matrix)
    identity = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    at = data.find(identity, data.find(b"tkhd"))
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    [frame] = frames_at(bytes(data), [1])
    assert frame.size == size
    timeline = timeline_of(bytes(data))
    assert (timeline.width, timeline.height) == size  # from which the resized size follows
    assert np.asarray(frame.convert("L"))[corner[1], corner[0]] > 200


@pytest.mark.parametrize(
    ("start", "tenths", "frames"), [(0, 24, range(24)), (0, 10, range(10)), (8, 5, range(8, 13))]
)
@pytest.mark.parametrize("form", ["mp4, B-frames", "mp4, open groups", "mp4, one key frame"])
def test_what_an_edit_list_cuts_off_is_no_part_of_the_video(
    form: str, start: int, tenths: int, frames: range
) -> None:
    """A frame is a tenth of a second: 1024 ticks of its stream, 100 of the file."""
    data = bytearray(clip_of(form))
    at = data.find(b"elst") + 12
    _, first = struct.unpack(">Ii", data[at : at + 8])  # B-frames come two frames late
    data[at : at + 8] = struct.pack(">Ii", 100 * tenths, first + 1024 * start)
    assert timeline_of(bytes(data)).num_frames == len(frames)
    found = frames_at(bytes(data), list(range(len(frames))))
    assert [index_of(frame) for frame in found] == list(frames)


def test_hidden_frames_of_vp8_are_no_part_of_the_video() -> None:
    """Two-pass encoders write some; bit 4 of a frame's first byte says that it is shown."""
    data = bytearray(clip_of("webm of VP8"))
    with av.open(io.BytesIO(data)) as container:
        packets = [p for p in container.demux(video=0) if p.size]
    hidden = (8, 15, 23)  # no key frames
    for packet in (packets[index] for index in hidden):
        data[data.find(bytes(packet), packet.pos)] &= ~(1 << 4)
    left = [index for index in range(24) if index not in hidden]
    assert timeline_of(bytes(data)).num_frames == 21
    assert [index_of(frame) for frame in frames_at(bytes(data), list(range(21)))] == left


def test_a_file_that_says_that_it_lasts_for_ages_is_refused() -> None:
    """A frame of 10240 ticks a second is 1024 of them; here of one a second, and longer."""
    data = bytearray(clip_of("mp4, B-frames").replace(b"edts", b"free"))
    ticks, length = data.find(b"mdhd") + 16, data.find(b"stts") + 16
    data[ticks : ticks + 4] = struct.pack(">I", 1)
    assert timeline_of(bytes(data)).fps == 1 / 1024
    data[length : length + 4] = struct.pack(">I", 1 << 20)
    with pytest.raises(MediaTooLarge, match="is 25165824 s long; the limit is 1000000"):
        timeline_of(bytes(data))


def test_list_of_frames_is_a_video() -> None:
    images = [Image.fromarray(grey_frame(i)) for i in range(5)]
    file = io.BytesIO()
    images[0].save(file, "PNG")
    source = [file.getvalue(), *images[1:3], *map(np.asarray, images[3:])]
    assert timeline_of(source) == Timeline(5, 2, 48, 64)
    assert [index_of(frame) for frame in frames_at(source, [0, 2, 4])] == [0, 2, 4]
    stacked = np.stack([grey_frame(i) for i in range(3)])
    assert [index_of(frame) for frame in frames_at(stacked, [0, 1, 2])] == [0, 1, 2]


def test_list_of_frames_of_two_sizes_is_refused() -> None:
    source = [grey_frame(0), grey_frame(1, 32, 48)]
    with pytest.raises(MediaError, match="frame 2 of the video is 32 x 48, the first 64 x 48"):
        frames_at(source, [0, 1])
    with pytest.raises(MediaError, match="no frames"):
        frames_at([], [])
