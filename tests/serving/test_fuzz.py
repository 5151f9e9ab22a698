"""Bodies and pictures that are damaged in every way get an answer, and what answers lives on."""

import json
import random
from pathlib import Path

import httpx
import pytest

from jaxmm.errors import RequestError
from jaxmm.host.decode_pool import DecodePool
from jaxmm.host.media import Limits
from jaxmm.models.qwen2_vl.processor import ImageProcessor
from serving.example import picture_uri
from tests.engines import MEDIA
from tests.serving.conftest import ASK, post

HERE = str(Path(__file__).parents[2])
NUM_BODIES = 400
NUM_PICTURES = 300
PICTURE = {"type": "image_url", "image_url": {"url": picture_uri()}}
BODY = {
    "model": "fake",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [PICTURE, {"type": "text", "text": "What is it?"}]},
    ],
    "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["x"], "seed": 1,
    "logit_bias": {"5": 1.0}, "logprobs": True, "top_logprobs": 2, "stream": True,
    "stream_options": {"include_usage": True}, "mm_hashes": ["ab"], "cache_salt": "s",
}  # fmt: skip
ODD = [
    None, True, False, 0, -1, 1, 2.5, 1e308, -1e308, 10**40, "", "a", "\x00", "\ud83d\ude00", [],
    {}, [[]], {"a": {}}, [None], "9" * 5000, "file:///etc/passwd", "data:,", ["x"] * 50,
]  # fmt: skip


def mutated(value, rng, chance=0.08):
    """The same value with some of its parts replaced, dropped, doubled or renamed."""
    if rng.random() < chance:
        return rng.choice(ODD)
    if isinstance(value, dict):
        items = [(k, mutated(v, rng, chance)) for k, v in value.items() if rng.random() > chance]
        if rng.random() < chance:
            items.append((rng.choice(["x", "messages", "tools", "video_url", ""]), rng.choice(ODD)))
        return dict(items)
    if isinstance(value, list):
        parts = [mutated(v, rng, chance) for v in value]
        return parts * rng.choice([1, 1, 1, 1, 2, 0])
    return value


def damaged(data, rng):
    """The same bytes with some changed, cut out, doubled or appended."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(data) or 1)
        match rng.randrange(5):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + rng.randint(1, 40)]
            case 2:
                data[at:at] = data[at : at + rng.randint(1, 40)]
            case 3:
                data[at : at + 4] = rng.choice([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"])
            case 4:
                data += rng.randbytes(rng.randint(1, 40))
    return bytes(data)


@pytest.mark.slow
def test_any_body_is_answered_and_never_with_a_server_error(url, engine):
    rng = random.Random(7)
    statuses = set()
    client = httpx.Client(base_url=url, timeout=20)
    for i in range(NUM_BODIES):
        body = json.dumps(mutated(BODY, rng)).encode()
        content = damaged(body, rng) if i % 2 else body
        response = client.post("/v1/chat/completions", content=content)
        statuses.add(response.status_code)
        assert response.status_code in (200, 400, 404), (response.status_code, body)
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert not any(leak in response.text for leak in ("Traceback", HERE, "site-packages"))
    client.close()
    assert statuses >= {200, 400}
    assert post(url, {"messages": ASK}).status_code == 200
    assert not engine.running


@pytest.mark.slow
def test_any_picture_is_decoded_or_refused_by_workers_that_live_on():
    rng = random.Random(11)
    sources = [p.read_bytes() for p in sorted(MEDIA.iterdir()) if p.suffix not in (".md", ".json")]
    sources = [data for data in sources if data]
    processor = ImageProcessor(min_pixels=3136, max_pixels=200_704)
    pool = DecodePool(processor, Limits(1 << 20, 2_000_000), workers=2)
    try:
        futures = [pool.submit(damaged(rng.choice(sources), rng)) for _ in range(NUM_PICTURES)]
        outcomes = [future.exception(120) for future in futures]
        assert all(error is None or isinstance(error, RequestError) for error in outcomes)
        assert not any("its process" in str(error) for error in outcomes)  # none has died
        assert None in outcomes and any(outcomes)
        assert pool.submit(MEDIA / "red.png").result().num_rows == 16
    finally:
        pool.close()
