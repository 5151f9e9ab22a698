"""The OpenAPI page is true: what it says is taken is taken, and nothing else comes back."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
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


@pytest.fixture(scope="module")
def page(tokenizer):
    app = create_app(FakeEngine(tokenizer), ServerConfig())
    return schemathesis.openapi.from_asgi("/openapi.json", app)


schema = schemathesis.pytest.from_fixture("page")


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_one_that_the_page_describes(case):
    case.call_and_validate(checks=CHECKS)


def test_every_reference_of_the_page_leads_somewhere(tokenizer):
    page = create_app(FakeEngine(tokenizer), ServerConfig()).openapi()
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
