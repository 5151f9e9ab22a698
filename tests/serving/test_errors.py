"""Every error has its status."""

import httpx
import pytest

from jaxmm import errors as jaxmm_errors
from jaxmm.errors import JaxmmError, MediaTooLarge, ModelError, RecompileError
from serving import errors
from serving.errors import INTERNAL, BadBody, answer_for, error_body
from tests.serving.conftest import ASK


def all_errors():
    kinds, found = [JaxmmError], []
    while kinds:
        kind = kinds.pop()
        found.append(kind)
        kinds += kind.__subclasses__()
    return found


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_a_request_error_and_a_flood_are_the_clients_fault_and_the_others_are_not(kind):
    status = answer_for(kind("what was wrong")).status
    by_the_client = (jaxmm_errors.Overloaded, errors.ClientGone, errors.Aborted)
    if issubclass(kind, (jaxmm_errors.RequestError, *by_the_client)):
        assert 400 <= status < 500
    else:
        assert 500 <= status < 600


def test_the_nearest_class_answers():
    assert answer_for(MediaTooLarge("a")).code == "media_too_large"
    assert answer_for(KeyError("a")).status == 500


def test_the_body_has_the_four_fields_of_the_api():
    assert error_body(BadBody("n: wrong", "n"))["error"] == {
        "message": "n: wrong",
        "type": "invalid_request_error",
        "param": "n",
        "code": "invalid_body",
    }


@pytest.mark.parametrize("error", [KeyError("secret"), ModelError("secret"), RecompileError("s")])
def test_internal_errors_tell_nothing_of_themselves(error):
    assert error_body(error)["error"]["message"] == INTERNAL


def test_a_model_that_is_not_served_is_refused_by_its_field(url):
    chat = httpx.post(f"{url}/v1/chat/completions", json={"model": "other", "messages": ASK})
    for response in (chat, httpx.get(f"{url}/v1/models/other")):
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "model_not_found")
        assert error["param"] == "model"
