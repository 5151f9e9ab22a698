"""Videos over HTTP: files, data URIs and lists of frames, and what is refused."""

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from serving.protocol import parse_chat_request
from serving.translate import images_in, media_urls, num_items, videos_in
from tests.clips import grey_frame, make_clip
from tests.engines import MEDIA, engine
from tests.serving.conftest import post, running

PICTURE = {"type": "image_url", "image_url": {"url": "http://host/a.png"}}
TEXT = {"type": "text", "text": "what is it"}
HERE = str(Path(__file__).parents[2])


def uri(data: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def video_part(url: str) -> dict:
    return {"type": "video_url", "video_url": {"url": url}}


def body(*parts: dict, **fields: object) -> dict:
    content = [*parts, TEXT]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}


def parsed(*parts: dict):  # type: ignore[no-untyped-def]
    return parse_chat_request(json.dumps(body(*parts)).encode(), "model")


def test_every_url_has_its_place_and_each_video_its_files() -> None:
    frames = {"type": "video", "video": ["http://host/1.png", "http://host/2.png"]}
    chat = parsed(PICTURE, frames, video_part("http://host/b.mp4"), PICTURE)
    place = "messages[0].content"
    assert media_urls(chat) == {
        f"{place}[0].image_url": "http://host/a.png",
        f"{place}[1].video[0]": "http://host/1.png",
        f"{place}[1].video[1]": "http://host/2.png",
        f"{place}[2].video_url": "http://host/b.mp4",
        f"{place}[3].image_url": "http://host/a.png",
    }
    assert num_items(chat.messages) == 4
    media = {where: where.encode() for where in media_urls(chat)}
    assert images_in(chat.messages, media) == (
        f"{place}[0].image_url".encode(),
        f"{place}[3].image_url".encode(),
    )
    assert videos_in(chat.messages, media) == (
        [f"{place}[1].video[0]".encode(), f"{place}[1].video[1]".encode()],
        f"{place}[2].video_url".encode(),
    )


@pytest.fixture(scope="module")
def url():  # type: ignore[no-untyped-def]
    with running(engine("qwen2_5_vl")) as address:
        yield address


def usage(url: str, *parts: dict, **fields: object) -> dict:
    answer = post(url, body(*parts, **fields))
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]


FORMS = {
    "mp4": {},
    "webm": {"form": "webm", "codec": "libvpx-vp9"},
    "gif": {"form": "gif", "codec": "gif"},
}


@pytest.mark.parametrize("form", FORMS)
def test_files_of_every_form_are_answered(url: str, form: str) -> None:
    data = make_clip(8, **FORMS[form])
    # 64 x 48 becomes 56 x 56: four tokens for each two of four frames
    assert usage(url, video_part(uri(data)))["video_tokens"] == 8
    assert usage(url, video_part(uri(data)), num_frames=8)["video_tokens"] == 16
    assert usage(url, video_part(uri(data)), fps=7.5)["video_tokens"] == 12


def test_frames_sent_as_such_are_a_video(url: str) -> None:
    urls = []
    for index in range(4):
        file = io.BytesIO()
        Image.fromarray(grey_frame(index)).save(file, "PNG")
        urls.append(uri(file.getvalue(), "image/png"))
    details = usage(url, {"type": "video", "video": urls})
    assert (details["video_tokens"], details["image_tokens"]) == (8, 0)
    pruned = usage(url, {"type": "video", "video": urls}, video_pruning_rate=0.25)
    assert pruned["video_tokens"] == 6  # the first step's four, and two of the second


@pytest.mark.parametrize("name", ["1f", "2f", "3f", "10f_10fps"])
def test_short_clips_are_answered(url: str, name: str) -> None:
    tokens = {"1f": 4, "2f": 4, "3f": 4, "10f_10fps": 8}
    data = (MEDIA / f"{name}.mp4").read_bytes()
    assert usage(url, video_part(uri(data)))["video_tokens"] == tokens[name]


def refused(url: str, *parts: dict, **fields: object) -> str:
    answer = post(url, body(*parts, **fields))
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert not any(sign in message for sign in ("Traceback", "0x", HERE, "object at"))
    return str(message)


def test_what_cannot_be_used_is_refused_and_the_server_goes_on(url: str) -> None:
    for name in ("no_frames.mp4", "cut.mp4", "red.png"):
        data = (MEDIA / name).read_bytes()
        assert "video 1 of 1" in refused(url, video_part(uri(data)))
    # frames joined by commas in one data URL are no form that is taken
    assert refused(url, video_part((MEDIA / "frames40.txt").read_text().strip()))
    assert "fps" in refused(url, video_part(uri(make_clip(2))), fps=-1)
    assert "num_frames" in refused(url, video_part(uri(make_clip(2))), num_frames=0)
    assert "video_pruning_rate" in refused(url, video_part(uri(make_clip(2))), video_pruning_rate=1)
    assert "not both" in refused(url, video_part(uri(make_clip(2))), num_frames=1, fps=1)
    assert refused(url, {"type": "video", "video": []})
    assert refused(url, {"type": "video_url", "image_url": {"url": "http://host/a"}})
    assert usage(url, video_part(uri(make_clip(2))))["video_tokens"] == 4
