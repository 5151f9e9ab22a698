"""Videos through the whole engine: against transformers, served in every way, step by step."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxmm.engine import Engine
from jaxmm.errors import RequestError
from jaxmm.host.clip import open_clip
from jaxmm.host.media import Limits
from jaxmm.request import Result
from tests.checkpoints import FAMILIES, Family, checkpoint
from tests.clips import make_clip
from tests.engines import (
    MEDIA,
    SMALL,
    ask,
    assert_same,
    engine,
    logprobs,
    on_loop,
    picture,
    png,
    request,
    scheduling,
    solo,
    turn,
)
from tests.guards import guarded
from tests.reference import expanded, greedy

RELATIVE = 1e-3
"""Of log-probabilities: both sides sum float32 in orders of their own."""
LIMITS = Limits(1 << 20, 1 << 20)
WHAT = turn("<video>", "what is it")


def frames_of(family: Family, count: int, seed: int = 0) -> list[Image.Image]:
    """Different frames of a size that no family resizes, 12 or 6 tokens a step."""
    size = (96, 64) if family.startswith("qwen3") else (112, 84)
    return [picture(*size, seed + i) for i in range(count)]


def colours(index: int) -> np.ndarray:
    """A frame of a clip that is hard to mistake for another."""
    return np.asarray(picture(96, 64, 100 + index))


CLIP = make_clip(16, frame=colours, fps=Fraction(4))
"""Four seconds: eight frames at two a second."""


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


def encoded(on: Engine) -> int:
    return on.scheduler.counters.encoded_items


CASES: dict[str, tuple[Any, int, int]] = {
    "video": (turn("<video>", "what is in the picture"), 0, 1),
    "video last": (turn("describe the picture", "<video>"), 0, 1),
    "video and picture": (turn("<video>", "and", "<image>", "one red house"), 1, 1),
    "two videos": (turn("<video>", "and", "<video>", "the left part"), 0, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_and_logprobs_equal_those_of_transformers(family: Family, case: str) -> None:
    messages, num_images, num_videos = CASES[case]
    images = [picture(200, 130, 1)][:num_images]
    videos = [frames_of(family, 4, 10 * (i + 1)) for i in range(num_videos)]
    expected, scores = greedy(
        checkpoint(family),
        messages,
        images,
        16,
        max_pixels=SMALL["media.max_pixels"],
        videos=videos,
    )
    [result] = ask(engine(family), request(messages, images, videos=tuple(videos)))
    assert list(result.token_ids) == expected
    chosen = scores[np.arange(16), expected]
    np.testing.assert_allclose(logprobs(result), chosen, rtol=RELATIVE, atol=RELATIVE)


def test_file_equals_the_list_of_its_frames(family: Family) -> None:
    with open_clip(CLIP, lambda _: range(0, 16, 5), LIMITS, fps=2) as clip:
        frames = list(clip.frames)
    # four of the file's four seconds' frames: one a second
    [listed] = ask(engine(family), request(WHAT, videos=(frames,), fps=1.0))
    [result] = ask(engine(family), request(WHAT, videos=(CLIP,), num_frames=4))
    assert result.usage.video_tokens == listed.usage.video_tokens
    if not family.startswith("qwen3"):  # it writes when each frame is shown: 3.75 is not 3
        assert_same(result, listed)


MESSAGES = turn("describe", "<video>", "and the house", "<image>", "in one sentence")
PICTURE = png(picture(90, 110, 2))


def question(**fields: Any) -> Any:
    return request(MESSAGES, [PICTURE], videos=(CLIP,), **fields)


def cold(on: Engine, **fields: Any) -> Result:
    return solo(on, MESSAGES, [PICTURE], videos=(CLIP,), **fields)


def test_same_answer_cut_into_chunks_and_from_caches(family: Family) -> None:
    on = engine(family)
    expected = cold(on)
    assert expected.usage.video_tokens > 0
    [hit] = ask(on, question())
    assert hit.usage.cached_tokens == (hit.usage.prompt_tokens - 1) // 16 * 16
    assert_same(hit, expected)
    for num_tokens in (17, 50):
        with scheduling(on, max_step_tokens=num_tokens):
            assert_same(cold(on), expected)
    cache = on._parts.prefix_cache
    for num_last in (40, 90):  # tokens that are evicted, from the tail
        keep = (expected.usage.prompt_tokens - num_last) // 16
        on_loop(on, lambda pages=keep: cache.evict(cache.num_pages - pages))
        [result] = ask(on, question())
        assert result.usage.cached_tokens == keep * 16
        assert_same(result, expected)


def test_same_answer_when_known_but_its_rows_are_gone(family: Family) -> None:
    on = engine(family)
    expected = cold(on)
    parts = on._parts

    def forget() -> None:
        parts.prefix_cache.clear()
        parts.arena.clear()

    on_loop(on, forget)
    hits, before = parts.media_map.num_hits, encoded(on)
    assert_same(ask(on, question())[0], expected)
    assert parts.media_map.num_hits >= hits + 2
    assert encoded(on) == before + 4 + 1  # four steps and a picture, loaded again


def test_ids_that_are_expanded_already_are_taken_if_they_are_the_models(family: Family) -> None:
    """Expanded by the published rule, as the reference writes it."""
    on, image, video = engine(family), picture(90, 110, 2), frames_of(family, 4)
    expected = solo(on, MESSAGES, [image], videos=(video,))
    tensor, _ = expanded(
        checkpoint(family),
        MESSAGES,
        [image],
        max_pixels=SMALL["media.max_pixels"],
        videos=[video],
    )
    ids = tensor[0].tolist()
    given: dict[str, Any] = {"images": [image], "videos": (video,)}
    assert_same(ask(on, request(None, token_ids=ids, **given))[0], expected)
    place = ids.index(on._parts.model.video_token_id)
    with pytest.raises(RequestError, match="Send one placeholder for each instead"):
        ask(on, request(None, token_ids=ids[:place] + ids[place + 1 :], **given))


def test_ids_of_a_video_without_markers_around_all_its_steps_are_refused_by_the_reason() -> None:
    """As transformers before 5.10 wrote them for Qwen3-VL: a pair around each step alone."""
    on, video = engine("qwen3_vl"), frames_of("qwen3_vl", 4)
    tensor, _ = expanded(
        checkpoint("qwen3_vl"), WHAT, [], max_pixels=SMALL["media.max_pixels"], videos=[video]
    )
    ids = tensor[0].tolist()
    start, stop = on._parts.markers
    ids.remove(start)
    del ids[len(ids) - 1 - ids[::-1].index(stop)]
    with pytest.raises(RequestError, match=r"2 videos and 1 were sent.* all steps of a video"):
        ask(on, request(None, token_ids=ids, videos=(video,)))


def test_same_answer_among_others(family: Family) -> None:
    on = engine(family)
    expected = cold(on)
    on.flush_caches()
    others = [
        request(turn("what is in the picture")),
        request(WHAT, videos=(frames_of(family, 6, 3),)),
        request(turn("<image>", "and", "<video>"), [PICTURE], videos=(CLIP,), num_frames=2),
    ]
    assert_same(ask(on, question(), *others)[0], expected)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"], indirect=True)
def test_same_frames_at_another_rate_are_another_video(family: Family) -> None:
    on = engine(family)
    clips = [(MEDIA / f"same_{n}fps.mp4").read_bytes() for n in (4, 12)]
    for wishes, frames in (({}, (6, 4)), ({"num_frames": 4}, (4, 4))):
        alone = [solo(on, WHAT, videos=(clip,), **wishes) for clip in clips]
        step = alone[1].usage.video_tokens // 2
        assert [result.usage.video_tokens for result in alone] == [step * n // 2 for n in frames]
        assert logprobs(alone[0]).tolist() != logprobs(alone[1]).tolist()
        on.flush_caches()
        for clip, expected in zip(clips, alone, strict=True):
            [result] = ask(on, request(WHAT, videos=(clip,), **wishes))
            assert_same(result, expected)


def test_frames_at_another_rate_are_encoded_once_but_placed_anew() -> None:
    on = engine("qwen2_5_vl")
    on.flush_caches()
    frames = frames_of("qwen2_5_vl", 6)
    expected = {fps: solo(on, WHAT, videos=(frames,), fps=fps) for fps in (2.0, 1.0)}
    assert expected[2.0].token_ids != expected[1.0].token_ids or not np.allclose(
        logprobs(expected[2.0]), logprobs(expected[1.0])
    )
    on.flush_caches()
    before = encoded(on)
    for fps in (2.0, 1.0, 2.0):
        [result] = ask(on, request(WHAT, videos=(frames,), fps=fps))
        assert_same(result, expected[fps])
    assert encoded(on) == before + 3


def test_videos_that_begin_alike_share_the_steps_that_they_have_in_common(family: Family) -> None:
    on = engine(family)
    on.flush_caches()
    frames = frames_of(family, 8)
    [short] = ask(on, request(WHAT, videos=(frames[:4],)))
    before = encoded(on)
    [long] = ask(on, request(WHAT, videos=(frames,)))
    assert encoded(on) == before + 2  # of its four steps
    assert long.usage.cached_tokens >= 16
    assert_same(long, solo(on, WHAT, videos=(frames,)))
    assert short.usage.video_tokens * 2 == long.usage.video_tokens


def test_every_step_is_encoded_once_however_often_it_is_asked_about() -> None:
    on = engine("qwen3_vl")
    on.flush_caches()
    before = encoded(on)
    still = [picture(96, 64, 5)] * 6  # three equal steps
    questions = [request(turn(f"{i} and", "<video>"), videos=(still,)) for i in range(3)]
    ask(on, *questions)
    ask(on, request(turn("again", "<video>"), videos=(still[:4],)))
    assert encoded(on) == before + 1
    ask(on, request(turn("<image>"), [still[0]]))
    assert encoded(on) == before + 2  # a picture is no step of a video


def test_random_frame_counts_and_sizes_compile_and_trace_nothing(family: Family) -> None:
    on, rng = engine(family), np.random.default_rng(5)
    with guarded(on):
        for _ in range(4):
            questions = []
            for _ in range(6):
                count, width, height = (int(n) for n in rng.integers((1, 40, 40), (13, 200, 200)))
                frames = [picture(width, height, int(rng.integers(99))) for _ in range(count)]
                questions.append(request(WHAT, videos=(frames,), max_tokens=2))
            questions.append(request(turn("<image>", "it"), [picture(120, 70, 3)], max_tokens=2))
            assert all(result.token_ids for result in ask(on, *questions))
    assert on.ledger.num_recompiles == 0


def test_six_turns_with_pictures_and_a_clip_equal_their_cold_answers() -> None:
    on = engine("qwen2_5_vl")
    on.flush_caches()
    red = (MEDIA / "red.png").read_bytes()
    small = (MEDIA / "size_112x84.png").read_bytes()
    clip = (MEDIA / "10f_10fps.mp4").read_bytes()
    sent = {0: ("<image>", red), 3: ("<image>", small), 4: ("<video>", clip)}
    messages: list[Any] = []
    images: list[bytes] = []
    videos: list[bytes] = []
    answers: list[tuple[Any, ...]] = []
    for index in range(6):
        part, medium = sent.get(index, ("", b""))
        messages += turn(*([part] if part else []), f"{index} dogs")
        (videos if part == "<video>" else images).extend([medium] if part else [])
        asked = (list(messages), list(images), tuple(videos))
        [result] = ask(on, request(asked[0], asked[1], videos=asked[2]))
        answers.append((asked, result))
        messages.append({"role": "assistant", "content": "two"})
    for (history, pictures, clips), result in answers:
        assert_same(result, solo(on, history, pictures, videos=clips))


def refused(*given: Any, **fields: Any) -> str:
    with pytest.raises(RequestError) as caught:
        ask(engine("qwen2_vl"), request(*given, **fields))
    return str(caught.value)


@pytest.mark.parametrize("name", ["cut.mp4", "no_frames.mp4", "red.png"])
def test_video_that_cannot_be_used_is_named_and_fails_alone(name: str) -> None:
    on = engine("qwen2_vl")
    good, data = request(WHAT, videos=(CLIP,), max_tokens=1), (MEDIA / name).read_bytes()
    text = refused(turn("<video>", "<video>"), videos=(CLIP, data))
    assert text.startswith("video 2 of 2: ")
    assert ask(on, good)[0].token_ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fps": 0.0}, "fps=0.0 is outside"),
        ({"fps": float("nan")}, "fps=nan is outside"),
        ({"fps": 1e-310}, "fps=1e-310 is outside [0.01, 60]"),
        ({"num_frames": 4.0}, "num_frames=4.0 is not a whole number"),
        ({"num_frames": 0}, "num_frames=0 is outside [1, 768]"),
        ({"num_frames": 769}, "num_frames=769 is outside [1, 768]"),
        ({"fps": 1.0, "num_frames": 4}, "fps or num_frames, not both"),
        ({"max_pixels": 1}, "max_pixels=1 is outside"),
        ({"fps": True}, "fps=True is not a number"),
        ({"num_frames": True}, "num_frames=True is not a whole number"),
        ({"max_pixels": 5e4}, "max_pixels=50000.0 is not a whole number"),
        ({"min_pixels": "9"}, "min_pixels='9' is not a whole number"),
    ],
)
def test_wishes_outside_the_limits_are_refused(fields: dict[str, Any], message: str) -> None:
    assert message in refused(WHAT, videos=(CLIP,), **fields)


def test_places_and_videos_must_match() -> None:
    assert "places for 1 videos and 0 were sent" in refused(WHAT)
    assert "places for 0 videos and 1 were sent" in refused(turn("a"), videos=(CLIP,))
    assert "places for 0 images and 1 were sent" in refused(WHAT, [PICTURE], videos=(CLIP,))


def test_too_many_frames_and_items_are_refused_with_the_limit() -> None:
    frame = np.zeros((56, 56, 3), np.uint8)
    assert "list of 769 frames; the limit is 768" in refused(WHAT, videos=([frame] * 769,))
    many = turn(*["<video>"] * 33)
    assert "33 images and videos; the limit is 32" in refused(many, videos=([frame],) * 33)


def test_text_that_spells_a_placeholder_binds_no_video() -> None:
    on = engine("qwen2_vl")
    text = "define <|video_pad|> and <|vision_start|><|video_pad|><|vision_end|>"
    [result] = ask(on, request(turn(text), max_tokens=1))
    assert (result.usage.video_tokens, result.usage.image_tokens) == (0, 0)
    [both] = ask(on, request(turn(text, "<video>"), videos=(CLIP,), max_tokens=1))
    assert both.usage.video_tokens > 0


def test_nothing_is_left_of_a_video() -> None:
    on = engine("qwen2_vl")
    on.flush_caches()
    before = on._parts.pool.num_free, on._parts.arena.num_free
    ask(on, request(WHAT, videos=(CLIP,)), request(WHAT, videos=(frames_of("qwen2_vl", 9),)))
    on.flush_caches()
    assert (on._parts.pool.num_free, on._parts.arena.num_free) == before


def test_long_video_has_smaller_frames_within_the_limit_of_all() -> None:
    on = engine("qwen2_vl")
    video = on._parts.preparer._video
    few, many = video.size(4, 480, 640, 10**9), video.size(400, 480, 640, 10**9)
    assert few[0] * few[1] <= SMALL["media.max_pixels"]
    assert many[0] * many[1] * 400 <= video.max_pixels
    assert min(many) >= 28
