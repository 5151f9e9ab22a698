"""Who has a key is answered, and no tenant can reach what another one cached."""

import itertools
import json
import logging
import re

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmm.errors import ConfigError
from serving.config import ServerConfig
from serving.errors import Unauthorized
from serving.tenants import ANYBODY, Tenants, read_keys
from tests.fakes import FakeEngine
from tests.serving.conftest import ASK, post, running

KEYS = ("alpha-key", "beta-key", "team:gamma-key", "team:delta-key")


@pytest.fixture(scope="module")
def closed(tokenizer):
    """A server with keys, and its engine."""
    engine = FakeEngine(tokenizer)
    with running(engine, ServerConfig(api_keys=KEYS)) as url:
        yield url, engine


def ask(url, key, **fields):
    return post(url, {"messages": ASK, **fields}, authorization=f"Bearer {key}")


@pytest.mark.parametrize("key", ["alpha-key", "beta-key", "gamma-key", "delta-key"])
def test_every_key_is_let_in(closed, key):
    assert ask(closed[0], key).status_code == 200


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer alpha", "Bearer alpha-key2", "Bearer ALPHA-KEY",
     "Basic alpha-key", "alpha-key", "Bearer team:gamma-key", "Bearer alpha-key beta-key",
     "Bearer \xfc"],
)  # fmt: skip
def test_all_else_is_refused_before_anything_is_read(closed, header):
    url, engine = closed
    count = len(engine.requests)
    headers = [("authorization", header.encode("latin-1"))] if header else []
    response = httpx.post(f"{url}/v1/chat/completions", content=b"{", headers=headers)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert len(engine.requests) == count
    assert not any(key in response.text for key in KEYS)


def test_only_health_is_answered_without_a_key(closed):
    url, _ = closed
    assert httpx.get(f"{url}/health").status_code == 200
    for path in ("/v1/models", "/docs", "/openapi.json", "/metrics", "/nothing", "//health",
                 "/health/", "/health/../v1/models", "/v1/models?x=/health"):  # fmt: skip
        assert httpx.get(url + path).status_code == 401, path


def test_each_tenant_has_cache_entries_of_its_own_whatever_salt_it_asks_for(closed):
    url, engine = closed
    engine.requests.clear()
    keys = ["alpha-key", "beta-key", "gamma-key"]
    scope = Tenants(KEYS).find("Bearer alpha-key").scope
    salts = [None, "", "a", scope]
    for key, salt in itertools.product(keys, salts):
        assert ask(url, key, cache_salt=salt).status_code == 200
    given = [request.salt for request in engine.requests]
    of = {key: set(given[i * len(salts) : (i + 1) * len(salts)]) for i, key in enumerate(keys)}
    assert all(len(salts) == 3 for salts in of.values())  # none and an empty one are the same
    assert all(not of[a] & of[b] for a, b in itertools.combinations(keys, 2))


def test_two_keys_of_one_tenant_share(closed):
    url, engine = closed
    engine.requests.clear()
    ask(url, "gamma-key", cache_salt="a")
    ask(url, "delta-key", cache_salt="a")
    assert engine.requests[0].salt == engine.requests[1].salt


def test_a_salt_does_not_change_with_the_order_of_the_keys():
    """A restart with a key added must not make the caches of many hosts disagree."""
    a, b = Tenants(["x-key", "y-key"]), Tenants(["y-key", "x-key"])
    assert a.find("Bearer x-key").scope == b.find("Bearer x-key").scope


@given(st.text(max_size=80), st.text(max_size=80))
def test_no_two_salts_of_two_tenants_are_equal(first, second):
    tenants = Tenants(["x-key", "y-key"])
    x, y = tenants.find("Bearer x-key"), tenants.find("bearer  y-key")
    assert x.salt(first) != y.salt(second)
    assert (x.salt(first) == x.salt(second)) == (first == second)


def test_without_keys_everybody_is_one_tenant(url, engine):
    assert Tenants([]).find("") == ANYBODY
    assert post(url, {"messages": ASK, "cache_salt": "s"}).status_code == 200
    assert engine.requests[-1].salt == "s"


def test_keys_come_from_a_file_and_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# ours\nfile-key\n\n  team:other-key  \n")
    tenants = read_keys(("env-key",), str(file))
    for key in ("file-key", "other-key", "env-key"):
        assert tenants.find(f"Bearer {key}")
    with pytest.raises(Unauthorized):
        tenants.find("Bearer #")


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "cannot be read"), (b"\n# none\n", "no key in it"), (b"\xff", "not UTF-8"),
     (b"one\ntwo words\n", "API key 2 is not of the form"), (b"a:k\nb:k", "key 2 is also that")],
)  # fmt: skip
def test_a_key_file_that_cannot_work_is_told_at_start(tmp_path, content, problem):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as refused:
        read_keys((), str(file))
    assert "two words" not in str(refused.value)


def test_no_key_is_shown_or_logged(closed, caplog):
    url, _ = closed
    with caplog.at_level(logging.DEBUG):
        ask(url, "alpha-key")
        ask(url, "gamma-key")
        ask(url, "wrong-key")
    assert "tenant=team" in caplog.text and "tenant=1" in caplog.text
    for key in ("alpha-key", "gamma-key", "wrong-key"):
        assert key not in caplog.text
        assert key not in repr(ServerConfig(api_keys=KEYS))


@pytest.mark.parametrize(
    ("keys", "admins", "sent", "status"),
    [((), (), None, 200), (("a-key",), (), "a-key", 403), (("a-key",), ("b:b-key",), "a-key", 403),
     (("a-key",), ("b:b-key",), "b-key", 200), (("a-key",), ("b:b-key",), "c-key", 401),
     (("a-key", "b-key"), ("b-key",), "b-key", 200), (("a-key", "b-key"), ("b-key",), "a-key", 403),
     ((), ("b-key",), None, 403), ((), ("b-key",), "c-key", 403), ((), ("b-key",), "b-key", 200)],
)  # fmt: skip
def test_what_concerns_all_tenants_takes_a_key_of_an_administrator(
    tokenizer, keys, admins, sent, status
):
    engine = FakeEngine(tokenizer)
    headers = {"authorization": f"Bearer {sent}"} if sent else {}
    with running(engine, ServerConfig(api_keys=keys, admin_keys=admins)) as url:
        answer = httpx.post(f"{url}/flush_cache", headers=headers)
        assert (answer.status_code, engine.flushes) == (status, status == 200)
        if status == 403:
            assert answer.json()["error"]["code"] == "admin_key_needed"
            assert "admin_keys" in answer.json()["error"]["message"]
        if status == 200:  # an administrator's key is a key like any other, too
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200


BODIES = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/generate": {"text": "a", "max_tokens": 2},
    "/v1/plan": {"messages": ASK},
}
"""Every path whose bodies become requests of the engine."""


@pytest.mark.parametrize("path", list(BODIES))
def test_requests_of_every_path_are_scoped_by_their_tenant(closed, path):
    url, engine = closed
    engine.requests.clear()
    for key in ("alpha-key", "beta-key"):
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(url + path, json={**BODIES[path], "cache_salt": "s"}, headers=headers)
        assert answer.status_code == 200, answer.text
    first, second = (request.salt for request in engine.requests)
    tenants = Tenants(KEYS)
    assert first == tenants.find("Bearer alpha-key").salt("s")
    assert second == tenants.find("Bearer beta-key").salt("s")


def test_no_other_path_takes_a_salt(closed):
    """A new path whose bodies become requests must be added above."""
    headers = {"authorization": "Bearer alpha-key"}
    described = httpx.get(f"{closed[0]}/openapi.json", headers=headers).json()
    posted = {path: about for path, about in described["paths"].items() if "post" in about}
    salted = {path for path, about in posted.items() if _salts(described, about)}
    assert salted == set(BODIES)


def _salts(description, about):
    """Whether a path's body has a `cache_salt`, in it or in what it refers to."""
    text = json.dumps(about["post"].get("requestBody", {}))
    names = re.findall(r"#/components/schemas/(\w+)", text)
    schemas = [json.dumps(description["components"]["schemas"][name]) for name in names]
    return any("cache_salt" in schema for schema in [text, *schemas])
