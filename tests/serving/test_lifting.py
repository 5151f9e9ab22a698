"""A body means the same whether its large data URIs are taken out or not."""

import base64
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.ask import Ask
from serving.completions import read_ask
from serving.errors import BadBody
from serving.lifting import lift
from serving.protocol import parse_chat_request
from serving.translate import media_urls

LARGE = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 300).decode()
ASK = {"messages": [{"role": "user", "content": "a"}]}


def picture(url):
    return {"type": "image_url", "image_url": {"url": url}}


def ask(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


def text(value):
    return {"type": "text", "text": value}


def encode(body, **options):
    return json.dumps(body, **options).encode()


class Bodies:
    """An endpoint that keeps what it read last."""

    def read(self, body):
        chat = parse_chat_request(body, "model")
        self.fields = chat.model_dump()
        for part in (p for m in self.fields["messages"] for p in m["content"]):
            if isinstance(part, dict):
                part.pop("image_url")
        urls = media_urls(chat)
        return Ask(
            id="", model=None, stream=False, urls=urls, num_items=0, requests=None, writer=None
        )


def read(body):
    """All fields of a body but the URLs of pictures, and these by place, as text."""
    bodies = Bodies()
    _, urls = read_ask(bodies, body)
    return bodies.fields, {
        at: url if isinstance(url, str) else str(url, "ascii") for at, url in urls.items()
    }


def read_whole(body):
    """The same from the body as it came."""
    bodies = Bodies()
    ask = bodies.read(bytes(body))
    return bodies.fields, dict(ask.urls)


@pytest.mark.parametrize("separators", [(",", ":"), (" , ", " :\n ")])
def test_large_pictures_are_taken_out_and_put_back_in_their_places(separators):
    urls = [LARGE, "data:,short", LARGE + "=", "http://a/b", LARGE]
    body = encode(ask(*map(picture, urls), text("hello")), separators=separators)
    lifted = lift(body)
    assert len(lifted.uris) == 3 and len(lifted.rest) < 2000
    assert read(body) == read_whole(body)
    assert list(read(body)[1].values()) == urls


@pytest.mark.parametrize(
    "body",
    [
        ask(text(LARGE)),
        ask(picture(LARGE), text(LARGE)),
        {**ask(picture(LARGE)), "user": LARGE},
        {**ask(picture(LARGE)), "metadata": {"a": LARGE, LARGE: "b"}},
        ask(text(f'"{LARGE}"'), picture(LARGE)),
        ask(text(f'\\"{LARGE}'), picture("data:," + "\\" * 70_000)),
        ask(picture(LARGE + '"' + LARGE)),
        ask(picture("DATA:" + LARGE[5:])),
    ],
)  # fmt: skip
def test_what_only_looks_like_a_picture_is_read_as_it_came(body):
    data = encode(body)
    assert read(data) == read_whole(data)


def test_a_string_with_slashes_escaped_is_taken_out_without_that():
    body = encode(ask(picture(LARGE))).replace(b"/", b"\\/")
    [uri] = lift(body).uris.values()
    assert bytes(uri).decode() == LARGE
    assert read(body)[1] == {"messages[0].content[0].image_url": LARGE}


@pytest.mark.parametrize("escape", [b"\\u002f", b"\\\\", b"\\\\/", b"\\n"])
def test_a_string_with_other_escapes_is_not_taken_out(escape):
    body = encode(ask(picture(LARGE))).replace(b"/", escape)
    assert lift(body).uris == {}
    assert read(body) == read_whole(body)


def test_short_pictures_stay_where_they_are():
    assert lift(encode(ask(picture(LARGE[:4000])))).uris == {}
    assert len(lift(encode(ask(picture(LARGE[:5000])))).uris) == 1


def test_a_name_cannot_be_guessed():
    first, second = (lift(encode(ask(picture(LARGE)))) for _ in range(2))
    assert not first.uris.keys() & second.uris.keys()


@given(st.randoms(), st.lists(st.sampled_from(["{", "}", '"', ":", ",", "\\", '"data:', LARGE])))
def test_any_bytes_are_refused_or_read_as_without(rng, pieces):
    body = "".join(pieces).encode()
    whole = encode({**ASK, "user": "".join(pieces)})
    if rng.random() < 0.5:
        at = rng.randrange(len(whole))
        whole = whole[:at] + rng.choice([b"", b'"', b"\\", b"}"]) + whole[at + 1 :]
    for data in (body, whole):
        try:
            expected = read_whole(data)
        except BadBody:
            with pytest.raises(BadBody):
                read(data)
        else:
            assert read(data) == expected


def test_the_parts_make_up_the_body():
    rng = random.Random(1)
    urls = [rng.choice([LARGE, "data:,x", "data:," + "a" * rng.randrange(70_000, 80_000)])
            for _ in range(10)]  # fmt: skip
    body = encode(ask(*map(picture, urls)))
    rest, uris = lift(body)
    for name, uri in uris.items():
        rest = rest.replace(name.encode(), bytes(uri))
    assert rest == body
