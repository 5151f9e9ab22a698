"""jaxmm's own endpoints: generation as the engine takes it, tokens, plans, caches, aborts."""

import asyncio
import base64
import json
import re
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from serving.config import ServerConfig
from serving.example import picture_uri
from serving.metrics import CONTENT_TYPE
from tests.fakes import FakeEngine
from tests.serving.conftest import ASK, post_to, running
from tests.serving.test_clients import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ANSWER = "A red square. \u56f3 \U0001f600"
PICTURE = {"type": "image_url", "image_url": {"url": picture_uri()}}


def encoded(**tensors):
    data = save(tensors)
    return {
        "safetensors": f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"
    }


ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)
GRID = np.array([1, 4, 4], np.int64)


# /generate


@pytest.mark.parametrize(
    "prompt",
    [{"text": "It is"}, {"token_ids": [5, 6]}, {"messages": ASK}],
    ids=lambda p: next(iter(p)),
)
def test_every_form_of_a_prompt_is_answered_as_the_engine_tells_it(url, engine, prompt):
    body = post_to(url, "/generate", {**prompt, "n": 2, "logprobs": 1}).json()
    assert [c["index"] for c in body["completions"]] == [0, 1]
    first = body["completions"][0]
    ids = engine.tokenizer.encode_text(ANSWER).tolist()
    assert (first["text"], first["finish_reason"], first["token_ids"]) == (ANSWER, "stop", ids)
    assert first["logprobs"][0] == {"token_id": ids[0], "logprob": -1.0, "top": [[ids[0], -1.0]]}
    assert body["usage"]["completion_tokens"] == 2 * len(ids)
    request = engine.requests[0]
    given = {"text": request.text, "token_ids": request.token_ids}
    name, value = next(iter(prompt.items()))
    assert name == "messages" or given[name] == value
    assert request.sampling.temperature == 0.0


def test_a_stream_gives_the_engines_deltas(url, engine):
    lines = post_to(url, "/generate", {"text": "a", "stream": True}).text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(e["text"] for e in events) == ANSWER
    ids = [i for e in events for i in e["token_ids"]]
    assert ids == engine.tokenizer.encode_text(ANSWER).tolist()
    assert events[-1]["usage"]["completion_tokens"] == len(ids)


def test_images_stand_beside_token_ids_encoded_ones_too(url, engine):
    images = [picture_uri(), encoded(rows=ROWS, grid_thw=GRID)]
    assert post_to(url, "/generate", {"token_ids": [5, 6], "images": images}).status_code == 200
    picture, rows = engine.requests[0].images
    assert picture == base64.b64decode(picture_uri().partition(",")[2])
    np.testing.assert_array_equal(rows.rows, ROWS)
    assert rows.grid_thw == (1, 4, 4)


def test_images_of_messages_stand_in_their_parts(url, engine):
    messages = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "?"}]}]
    assert post_to(url, "/generate", {"messages": messages}).status_code == 200
    assert len(engine.requests[0].images) == 1


def test_a_schema_and_a_grammar_reach_the_engine(url, engine):
    post_to(url, "/generate", {"text": "a", "grammar": 'start: "a"'})
    post_to(url, "/generate", {"text": "a", "json_schema": {"const": 7}})
    first, second = (r.sampling.grammar for r in engine.requests)
    assert first == 'start: "a"' and '"const": 7' in second


BAD_ROWS = {
    "no file": b"abc",
    "another tensor": save({"rows": ROWS, "grid_thw": GRID, "more": ROWS}),
    "no grid": save({"rows": ROWS}),
    "bool rows": save({"rows": ROWS > 0, "grid_thw": GRID}),
    "float grid": save({"rows": ROWS, "grid_thw": GRID.astype(np.float32)}),
    "short grid": save({"rows": ROWS, "grid_thw": GRID[:2]}),
}


@pytest.mark.parametrize("data", BAD_ROWS.values(), ids=list(BAD_ROWS))
def test_what_is_no_encoded_image_is_refused(url, data):
    image = {"safetensors": f"data:;base64,{base64.b64encode(data).decode()}"}
    response = post_to(url, "/generate", {"token_ids": [5], "images": [image]})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_media"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "exactly one of"),
        ({"text": "a", "token_ids": [1]}, "exactly one of"),
        ({"text": "a", "images": [picture_uri()]}, "images stands beside token_ids"),
        ({"token_ids": [-1]}, r"token_ids\[0\]"),
        ({"token_ids": ["a"]}, r"token_ids\[0\]"),
        ({"text": "a", "grammar": "start: A", "json_schema": {}}, "one of grammar and json_schema"),
        ({"text": "a", "logprobs": 21}, "logprobs"),
        ({"text": "a", "prompt": "b"}, "unknown field prompt"),
        ({"token_ids": [1], "images": [{"url": "a"}]}, r"images\[0\]"),
    ],
)
def test_wrong_bodies_are_refused_by_name(url, body, problem):
    response = post_to(url, "/generate", body)
    assert response.status_code == 400
    assert re.search(problem, response.json()["error"]["message"])


# Tokens


@pytest.mark.parametrize("text", ["", "It is \u56f3 \U0001f600", "<|im_end|> spelled"])
def test_tokens_and_back(url, engine, text):
    tokens = post_to(url, "/tokenize", {"text": text}).json()
    assert tokens["token_ids"] == engine.tokenizer.encode_text(text).tolist()
    assert tokens["count"] == len(tokens["token_ids"])
    back = post_to(url, "/detokenize", {"token_ids": tokens["token_ids"]})
    assert back.json() == {"text": text}


def test_a_conversation_is_tokenized_with_its_placeholders(url, engine):
    messages = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "?"}]}]
    ids = post_to(url, "/tokenize", {"messages": messages}).json()["token_ids"]
    plain = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    assert ids == engine.tokenizer.encode_chat(plain).ids.tolist()
    assert ids.count(engine.tokenizer.placeholder_id) == 1


def test_pictures_of_a_conversation_are_not_counted_as_its_text(url, engine):
    large = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (9 << 20)}}
    plain = [{"role": "user", "content": [{"type": "image"}]}]
    answer = post_to(url, "/tokenize", {"messages": [{"role": "user", "content": [large]}]})
    assert answer.json()["token_ids"] == engine.tokenizer.encode_chat(plain).ids.tolist()


def test_a_text_that_spells_a_picture_is_tokenized_as_it_is(url, engine):
    text = "data:image/png;base64," + "A" * 5000
    tokens = post_to(url, "/tokenize", {"text": text}).json()
    assert tokens["token_ids"] == engine.tokenizer.encode_text(text).tolist()


def test_special_tokens_are_shown_unless_they_are_skipped(url, engine):
    ids = post_to(url, "/tokenize", {"messages": ASK}).json()["token_ids"]
    assert "<|im_start|>" in post_to(url, "/detokenize", {"token_ids": ids}).json()["text"]
    body = {"token_ids": ids, "skip_special_tokens": True}
    assert "<|im_start|>" not in post_to(url, "/detokenize", body).json()["text"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"text": "a", "messages": ASK}),
        ("/tokenize", {"text": "a", "tools": [{"type": "function", "function": {"name": "a"}}]}),
        ("/detokenize", {"token_ids": [-1]}),
        ("/detokenize", {"token_ids": [1 << 31]}),
        ("/detokenize", {}),
        ("/abort", {}),
    ],
)
def test_wrong_bodies_are_refused(url, path, body):
    assert post_to(url, path, body).status_code == 400


def test_an_id_beyond_the_vocabulary_shows_nothing(url):
    assert post_to(url, "/detokenize", {"token_ids": [1 << 30]}).json() == {"text": ""}


# Plans, caches, aborts


@pytest.mark.parametrize(
    "body",
    [
        {"messages": ASK, "tools": []},
        {"text": "a"},
        {"messages": ASK, "max_tokens": 7},
        {"messages": ASK, "json_schema": {"type": "object"}},
        {"messages": None, "text": "a"},
    ],
)
def test_a_plan_is_of_a_request_that_is_not_run(url, engine, body):
    plan = post_to(url, "/v1/plan", body).json()
    assert plan["prompt_tokens"] > 0 and plan["images"] == []
    assert plan["max_output_tokens"] == body.get("max_tokens", 2048)
    assert (not engine.running and engine.num_tokens == 0) or len(engine.requests) == 1


def test_a_plan_of_a_wrong_request_is_refused_like_the_request(url):
    assert post_to(url, "/v1/plan", {"messages": ASK, "max_tokens": 0}).status_code == 400
    assert post_to(url, "/v1/plan", {"messages": ASK, "model": "x"}).status_code == 404


def test_flushing_reaches_the_engine(url, engine):
    before = engine.flushes
    assert post_to(url, "/flush_cache", b"").json() == {"status": "ok"}
    assert engine.flushes == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_answer_ends_with_an_error_that_says_so(tokenizer, stream):
    engine, answers = FakeEngine(tokenizer, seconds_per_token=0.01), []
    body = {"messages": ASK, "max_tokens": 100_000, "ignore_eos": True, "stream": stream}
    with running(engine) as url:
        asking = threading.Thread(
            target=lambda: answers.append(post_to(url, "/v1/chat/completions", body))
        )
        asking.start()
        wait_until(lambda: engine.num_tokens > 3)
        answer_id = next(iter(engine.running))
        assert post_to(url, "/abort", {"id": answer_id}).json() == {"status": "ok"}
        asking.join(20)
        wait_until(lambda: not engine.running)
        assert post_to(url, "/abort", {"id": answer_id}).status_code == 404
    last = answers[0].text.strip().split("\n\n")[-1].removeprefix("data: ")
    assert json.loads(last)["error"]["code"] == "aborted"
    assert answers[0].status_code == (200 if stream else 409)


# Metrics


def families(text):
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))


def test_metrics_are_those_of_the_page(url):
    response = httpx.get(f"{url}/metrics")
    assert response.headers["content-type"].replace("; ", ";") == CONTENT_TYPE.replace("; ", ";")
    shown = families(response.text)
    page = PAGE.read_text(encoding="utf-8")
    listed = {}
    for line in page.splitlines():
        if line.startswith("| `"):
            names, kind = line.split("|")[1:3]
            for name in re.findall(r"`([a-z_]+)", names):
                listed[name] = kind.strip()
    assert {n: k for n, k in shown.items() if not n.endswith("_created")} == listed


def test_times_and_ends_are_counted(tokenizer):
    engine = FakeEngine(tokenizer)
    with running(engine) as url:
        for _ in range(2):
            post_to(url, "/v1/chat/completions", {"messages": ASK, "n": 2})
        text = httpx.get(f"{url}/metrics").text
    assert "jaxmm_time_to_first_token_seconds_count 2.0" in text
    assert 'jaxmm_completions_total{finish_reason="stop"} 4.0' in text
    assert "jaxmm_request_seconds_count 2.0" in text
    assert 'jaxmm_cache_hits_total{cache="items"} 2.0' in text
    assert 'jaxmm_cache_hits_total{cache="rows"} 60.0' in text
    assert 'jaxmm_cache_misses_total{cache="rows"} 30.0' in text
    assert f"jaxmm_inline_decodes_total {float(engine.num_tokens)}" in text


class Planning(FakeEngine):
    """Takes its time over a plan."""

    async def cost(self, request):
        self.running.add(request.id)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.aborted.append(request.id)
            raise
        finally:
            self.running.discard(request.id)


def test_a_plan_ends_with_its_deadline_and_with_its_client(tokenizer):
    engine = Planning(tokenizer)
    body = {"messages": ASK}
    with running(engine, ServerConfig(deadline_seconds=1.0)) as url:
        refused = post_to(url, "/v1/plan", body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert len(engine.aborted) == 1
    with running(engine) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/plan", json=body, timeout=2.0)
        wait_until(lambda: len(engine.aborted) == 2)
        assert not engine.running
