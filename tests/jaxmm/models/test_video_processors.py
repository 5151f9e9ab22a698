"""Videos to steps: sizes, times and timestamps; grids are those of transformers' own processors."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmm.errors import MediaError, MediaTooLarge, RequestError
from jaxmm.host.clip import open_clip
from jaxmm.host.decode import ClipTask, InlineDecoder, process_clip
from jaxmm.host.decode_pool import DecodePool
from jaxmm.host.media import Limits
from jaxmm.host.video import Sampling
from jaxmm.models.qwen2_vl.processor import ImageProcessor
from jaxmm.models.qwen2_vl.video import VideoProcessor as Qwen2Video
from jaxmm.models.qwen3_vl.video import VideoProcessor as Qwen3Video
from tests.checkpoints import checkpoint
from tests.engines import picture

MEDIA = Path(__file__).parents[2] / "data" / "media"
LIMITS = Limits(1 << 20, 1 << 24)
QWEN2 = ImageProcessor(min_pixels=3136, max_pixels=12845056)
QWEN3 = ImageProcessor(
    patch_size=16, min_pixels=65536, max_pixels=16777216, mean=(0.5,) * 3, std=(0.5,) * 3
)
VIDEOS: dict[str, Any] = {
    "qwen2_vl": Qwen2Video(image=QWEN2, max_frames=768),
    "qwen2_5_vl": Qwen2Video(image=QWEN2, max_frames=768, tokens_per_second=2.0),
    "qwen3_vl": Qwen3Video(image=QWEN3, max_frames=768, start_id=7, end_id=8),
}


def process(family: str, source: Any, **sampling: Any) -> Any:
    task = ClipTask(Sampling(**{"fps": 2.0, **sampling}), 12845056)
    return process_clip(source, VIDEOS[family], LIMITS, task)


def frames(count: int, width: int, height: int) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(picture(width, height, i)) for i in range(count))


@pytest.mark.parametrize(
    ("count", "width", "height", "qwen2", "qwen3"),
    [
        # transformers 5.24 with torchvision 0.29, do_sample_frames=False, sizes as published
        (4, 112, 84, (2, 6, 8), (2, 6, 8)),
        (4, 96, 64, (2, 4, 6), (2, 4, 6)),
        (6, 100, 70, (3, 4, 8), (3, 4, 6)),
        (5, 320, 180, (3, 12, 22), (3, 12, 20)),
        (2, 64, 48, (1, 4, 4), (1, 4, 4)),
        (7, 31, 200, (4, 14, 2), (4, 12, 2)),
        (30, 640, 360, (15, 26, 46), (15, 22, 40)),
    ],
)
def test_grids_are_those_of_transformers(
    count: int, width: int, height: int, qwen2: tuple, qwen3: tuple
) -> None:
    source = frames(count, width, height)
    assert process("qwen2_vl", source).grid_thw == qwen2
    assert process("qwen3_vl", source).grid_thw == qwen3


@pytest.mark.parametrize("family", VIDEOS)
def test_a_step_is_the_patches_of_its_two_frames_side_by_side(family: str) -> None:
    image = VIDEOS[family].image
    source = frames(3, 6 * image.unit, 4 * image.unit)
    clip = process(family, source)
    assert clip.grid_thw == (2, 8, 12)
    values = image.num_values
    steps = clip.features.reshape(2, 96, 2, values)
    alone = [image.patches(frame, 1, 12845056)[0] for frame in source]
    for step, frame, expected in ((0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 2)):  # the last repeats
        np.testing.assert_array_equal(steps[step, :, frame], alone[expected])


@pytest.mark.parametrize(
    ("name", "times", "stamps"),
    [
        # two positions a second; a step of "10f_10fps" is half a second long, its rate being 4
        ("10f_10fps", (0, 1), ("0.1", "0.8")),
        ("9f_2997", (0, 0), ("0.1", "0.2")),
        ("24f_8fps", (0, 2, 4), ("0.3", "1.4", "2.6")),
        ("same_4fps", (0, 2, 4), ("0.2", "1.4", "2.5")),
        ("same_12fps", (0, 1), ("0.2", "0.8")),
        ("1f", (0,), ("0.0",)),
        ("2f", (0,), ("0.1",)),
    ],
)
def test_times_and_timestamps(name: str, times: tuple[int, ...], stamps: tuple[str, ...]) -> None:
    data = (MEDIA / f"{name}.mp4").read_bytes()
    absolute, counted, written = (
        process(family, data) for family in ("qwen2_5_vl", "qwen2_vl", "qwen3_vl")
    )
    assert VIDEOS["qwen2_5_vl"].times(absolute.timing) == times
    assert VIDEOS["qwen2_vl"].times(counted.timing) == tuple(range(len(times)))
    assert VIDEOS["qwen3_vl"].times(written.timing) is None
    around = VIDEOS["qwen3_vl"].surroundings(written.timing)
    assert [s.before for s in around] == [(f"<{stamp} seconds>", 7) for stamp in stamps]
    assert {s.after for s in around} == {(8,)}
    assert {s.before + s.after for s in VIDEOS["qwen2_vl"].surroundings(counted.timing)} == {()}


@pytest.mark.parametrize(
    ("name", "steps", "rows"), [("10f_10fps", 2, 4), ("9f_2997", 2, 4), ("24f_8fps", 3, 12)]
)
def test_steps_and_rows_of_files_under_the_published_limits(
    name: str, steps: int, rows: int
) -> None:
    clip = process("qwen3_vl", (MEDIA / f"{name}.mp4").read_bytes())
    assert (clip.grid_thw[0], clip.num_rows) == (steps, rows)


def test_so_many_frames_in_all_are_spread_over_the_clip() -> None:
    """Of 24 frames, 8 a second: 0 3 7 10 13 16 20 23; a step is shown at the mean of its two."""
    eight = process("qwen3_vl", (MEDIA / "24f_8fps.mp4").read_bytes(), num_frames=8)
    assert eight.grid_thw == (4, 6, 8)  # twelve tokens a step, as of six frames
    before = [s.before[0] for s in VIDEOS["qwen3_vl"].surroundings(eight.timing)]
    assert before == [f"<{time} seconds>" for time in ("0.2", "1.1", "1.8", "2.7")]


def test_three_frames_are_two_or_three_by_family() -> None:
    data = (MEDIA / "3f.mp4").read_bytes()
    assert process("qwen2_vl", data).grid_thw == (1, 4, 4)
    assert process("qwen3_vl", data).grid_thw == (2, 4, 4)


def test_steps_of_equal_frames_have_equal_identities_in_any_video() -> None:
    short, long = (process("qwen2_vl", frames(n, 112, 84)) for n in (4, 8))
    assert long.identities[:2] == short.identities
    assert len(set(long.identities)) == 4
    swapped = process("qwen2_vl", frames(2, 112, 84)[::-1])
    assert swapped.identities[0] not in long.identities


@pytest.mark.parametrize("family", VIDEOS)
@pytest.mark.parametrize("max_frames", [1, 2, 5, 64, 768])
def test_no_video_has_more_bytes_than_the_most(family: str, max_frames: int) -> None:
    video = dataclasses.replace(VIDEOS[family], max_frames=max_frames)
    for count in {n for n in (1, 2, 3, 4, max_frames // 2, max_frames) if 1 <= n <= max_frames}:
        for width, height in ((1, 1), (1, 199), (640, 480), (4000, 20), (9000, 9000), (28, 5600)):
            new_height, new_width = video.size(count, height, width, 12845056)
            steps = -(-count // 2)
            assert 2 * 3 * steps * new_height * new_width <= video.max_bytes


def test_worker_gives_what_the_inline_decoder_gives() -> None:
    video = VIDEOS["qwen2_5_vl"]
    inline = InlineDecoder(QWEN2, LIMITS, video)
    pool = DecodePool(QWEN2, LIMITS, 1, video=video, timeout_seconds=60)
    task = ClipTask(Sampling(2.0), 12845056)
    png = (MEDIA / "size_112x84.png").read_bytes()
    try:
        for source in ((MEDIA / "24f_8fps.mp4").read_bytes(), (png, png, png)):
            theirs = pool.submit_clip(source, task).result()
            ours = inline.submit_clip(source, task).result()
            assert (theirs.grid_thw, theirs.num_rows) == (ours.grid_thw, ours.num_rows)
            assert (theirs.identities, theirs.timing) == (ours.identities, ours.timing)
            np.testing.assert_array_equal(theirs.features, ours.features)
            assert not theirs.features.flags.writeable
        with pytest.raises(MediaError, match="damaged"):
            pool.submit_clip((MEDIA / "cut.mp4").read_bytes(), task).result()
    finally:
        pool.close()


def test_what_a_model_cannot_take_is_refused() -> None:
    task = ClipTask(Sampling(2.0), 12845056)
    with pytest.raises(RequestError, match="takes no videos"):
        process_clip(b"", None, LIMITS, task)
    with pytest.raises(MediaTooLarge, match="list of 769 frames; the limit is 768"):
        process("qwen2_vl", frames(1, 28, 28) * 769)
    with pytest.raises(MediaTooLarge, match="the limit is 200"):
        process("qwen3_vl", frames(2, 3000, 10))


def test_settings_come_from_the_checkpoint() -> None:
    image = ImageProcessor.from_checkpoint(checkpoint("qwen2_5_vl"))
    video = Qwen2Video.from_checkpoint(checkpoint("qwen2_5_vl"), image, max_frames=8)
    assert (video.tokens_per_second, video.max_pixels) == (2.0, 25165824)
    assert Qwen2Video.from_checkpoint(checkpoint("qwen2_vl"), image, max_frames=8).times(
        process("qwen2_vl", frames(6, 28, 28)).timing
    ) == (0, 1, 2)
    third = Qwen3Video.from_checkpoint(
        checkpoint("qwen3_vl"), image, max_frames=8, max_pixels=10**6
    )
    assert (third.min_pixels, third.max_pixels) == (4096, 10**6)
    assert third.start_id != third.end_id


def test_frames_are_decoded_one_at_a_time() -> None:
    taken: list[int] = []

    class Frames(tuple):
        def __getitem__(self, index: Any) -> Any:
            taken.append(index)
            return super().__getitem__(index)

    with open_clip(Frames(frames(6, 28, 28)), lambda _: range(6), LIMITS, fps=2) as clip:
        next(clip.frames)
        assert taken == [0, 0]  # its size, and itself
