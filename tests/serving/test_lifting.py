"""A body means the same whether its large data URIs are taken out or not."""

import base64
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.completions import read_chat
from serving.errors import BadBody
from serving.lifting import lift
from serving.protocol import parse_chat_request
from serving.translate import image_urls

LARGE = "data:image/png;base64," + base64.b64encode(bytes(range(256)) * 300).decode()
ASK = {"messages": [{"role": "user", "content": "a"}]}


def picture(url):
    return {"type": "image_url", "image_url": {"url": url}}


def ask(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


def text(value):
    return {"type": "text", "text": value}


def encode(body, **options):
    return bytearray(json.dumps(body, **options).encode())


def as_text(urls):
    return {
        where: url if isinstance(url, str) else str(url, "ascii") for where, url in urls.items()
    }


@pytest.mark.parametrize("separators", [(",", ":"), (" , ", " :\n ")])
def test_large_pictures_are_taken_out_and_put_back_in_their_places(separators):
    urls = [LARGE, "data:,short", LARGE + "=", "http://a/b", LARGE]
    body = encode(ask(*map(picture, urls), text("hello")), separators=separators)
    lifted = lift(body)
    assert len(lifted.uris) == 3 and len(lifted.rest) < 2000
    chat, found = read_chat(body)
    assert as_text(found) == image_urls(parse_chat_request(body))
    assert list(as_text(found).values()) == urls
    assert chat.messages[0].content[-1].text == "hello"


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
    chat, urls = read_chat(data)
    whole = parse_chat_request(data)
    assert as_text(urls) == image_urls(whole)
    assert texts(chat) == texts(whole)
    assert (chat.user, chat.metadata) == (whole.user, whole.metadata)


def test_an_escaped_string_is_not_taken_out():
    body = encode(ask(picture(LARGE))).replace(b"/", b"\\/")
    assert lift(body).uris == {}
    assert as_text(read_chat(body)[1]) == {"messages[0].content[0].image_url": LARGE}


def test_a_name_cannot_be_guessed():
    first, second = (lift(encode(ask(picture(LARGE)))) for _ in range(2))
    assert not first.uris.keys() & second.uris.keys()


@given(st.randoms(), st.lists(st.sampled_from(["{", "}", '"', ":", ",", "\\", '"data:', LARGE])))
def test_any_bytes_are_refused_or_read_as_without(rng, pieces):
    body = bytearray("".join(pieces).encode())
    whole = encode({**ASK, "user": "".join(pieces)})
    if rng.random() < 0.5:
        at = rng.randrange(len(whole))
        whole[at : at + 1] = rng.choice([b"", b'"', b"\\", b"}"])
    for data in (body, whole):
        try:
            expected = parse_chat_request(bytes(data))
        except BadBody:
            with pytest.raises(BadBody):
                read_chat(data)
        else:
            assert read_chat(data)[0] == expected


def test_the_parts_make_up_the_body():
    rng = random.Random(1)
    urls = [rng.choice([LARGE, "data:,x", "data:," + "a" * rng.randrange(70_000, 80_000)])
            for _ in range(10)]  # fmt: skip
    body = encode(ask(*map(picture, urls)))
    rest, uris = lift(body)
    for name, uri in uris.items():
        rest = rest.replace(name.encode(), bytes(uri))
    assert rest == body
