"""The OpenAPI page is true: what it says is taken is taken, and nothing else comes back."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.python import asgi
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from serving.app import create_app
from serving.config import ServerConfig
from tests.fakes import FakeEngine

CHECKS = (
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)


OPERATIONS = (
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/generate", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/plan", "POST"),
    ("/flush_cache", "POST"),
    ("/abort", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/health", "GET"),
    ("/ready", "GET"),
    ("/metrics", "GET"),
)


MAX_EXAMPLES = 8
"""Of each route and kind of body, the same ones in every run."""

RUNS = [(path, method, GenerationMode.POSITIVE) for path, method in OPERATIONS]
RUNS += [
    (path, method, GenerationMode.NEGATIVE)
    for path, method in OPERATIONS
    if method == "POST" and path != "/flush_cache"  # nothing can be wrong about the others
]


@pytest.fixture(scope="module")
def app(tokenizer):
    return create_app(FakeEngine(tokenizer), ServerConfig())


@pytest.fixture(scope="module")
def page(app):
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.fixture(scope="module")
def session(app):
    """One for all: the server would else be started and ended for every request."""
    with asgi.get_client(app) as client:
        yield client


def test_every_operation_is_asked(page):
    found = {(op.ok().path, op.ok().method.upper()) for op in page.get_all_operations()}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize(("path", "method", "mode"), RUNS)
def test_every_answer_is_one_that_the_page_describes(page, session, path, method, mode):
    """Bodies that the page allows, and bodies that it does not."""
    operation = page[path][method]

    @settings(
        max_examples=MAX_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        case.call_and_validate(checks=CHECKS, session=session)

    ask()


def test_every_reference_of_the_page_leads_somewhere(app):
    page = app.openapi()
    schemas = page["components"]["schemas"]

    def references(value):
        if isinstance(value, dict):
            for key, inner in value.items():
                if key == "$ref":
                    yield inner
                else:
                    yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    found = set(references(page))
    assert {"#/components/schemas/ChatRequest", "#/components/schemas/ErrorBody"} <= found
    assert {ref.removeprefix("#/components/schemas/") for ref in found} <= set(schemas)
    assert {"/v1/chat/completions", "/v1/completions", "/generate", "/v1/plan"} <= set(
        page["paths"]
    )


def test_nothing_that_is_served_is_a_page_for_browsers(app, session):
    """FastAPI's own ones have a browser ask a public host for their scripts."""
    paths = [r.path for r in app.routes if "GET" in r.methods and "{" not in r.path]
    assert {"/openapi.json", "/health"} <= set(paths)
    for path in paths:
        assert "html" not in session.get(path).headers["content-type"], path
