"""DeepSeek-VL2 over HTTP: pictures, their limits, and what the model does not take."""

import base64

import pytest

from serving.config import ServerConfig
from tests.engines import engine, picture, png
from tests.serving.conftest import post, post_to, running

TEXT = {"type": "text", "text": "what is it"}


@pytest.fixture(scope="module")
def url():  # type: ignore[no-untyped-def]
    on = engine("deepseek_vl2_mla")
    with running(on, ServerConfig(engine=on.config)) as base:
        yield base


def image(width: int, height: int, **fields: str) -> dict:
    data = base64.b64encode(png(picture(width, height, 5))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", **fields}}


def body(*parts: dict, **fields: object) -> dict:
    messages = [{"role": "user", "content": [*parts, TEXT]}]
    return {"messages": messages, "max_tokens": 2, "temperature": 0, **fields}


def tokens(url: str, *parts: dict, **fields: object) -> int:
    answer = post(url, body(*parts, **fields))
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["image_tokens"])


def test_tiles_follow_shape_limits_and_number_of_pictures(url: str) -> None:
    wide = image(200, 130)  # 3 x 2 tiles of 72 pixels, 3 x 3 rows each
    assert tokens(url, wide) == 13 + 6 * 10
    assert tokens(url, wide, wide) == 2 * (13 + 6 * 10)
    assert tokens(url, wide, wide, wide) == 3 * (13 + 3 * 4)
    assert tokens(url, wide, max_pixels=2 * 72 * 72) == 13 + 3 * 7
    assert tokens(url, image(20, 20), min_pixels=9 * 72 * 72) == 13 + 9 * 10
    # low detail is at most 512 x 512 pixels, more than these tiles can have
    assert tokens(url, image(200, 130, detail="low")) == 13 + 6 * 10


def test_the_plan_says_the_same(url: str) -> None:
    asked = body(image(200, 130))
    plan = post_to(url, "/v1/plan", asked).json()
    assert [i["tokens"] for i in plan["images"]] == [13 + 6 * 10]
    assert plan["prompt_tokens"] == post(url, asked).json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("parts", "fields", "words"),
    [
        ([image(90, 90)], {"max_pixels": 100}, "max_pixels=100 is outside"),
        ([image(90, 90)] * 3, {"min_pixels": 20000}, "more than 2 images"),
        ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}], {}, "videos"),
    ],
)
def test_what_cannot_be_met_is_refused(
    url: str, parts: list[dict], fields: dict, words: str
) -> None:
    answer = post(url, body(*parts, **fields))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == next(iter(fields), None)
    assert tokens(url, image(90, 90)) > 0
