"""Traces arrive at a collector with their stages, go on from the client's, and quote nothing."""

import contextlib
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from serving.config import ServerConfig
from tests.fakes import FakeEngine
from tests.serving.conftest import post, running

ROOT = Path(__file__).parents[2]
SECRET = "the-secret-of-the-prompt"
BODY = {"messages": [{"role": "user", "content": SECRET}]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class _Collector(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()


@contextlib.contextmanager
def collector():
    """A collector of OTLP over HTTP; `bodies` is what it was sent."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as server:
        server.bodies = []
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def spans_of(bodies):
    """All spans that were sent, by name."""
    requests = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    scopes = [s for r in requests for resource in r.resource_spans for s in resource.scope_spans]
    return {span.name: span for scope in scopes for span in scope.spans}


def attributes(span):
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


def test_a_request_is_a_trace_with_its_stages(tokenizer):
    with collector() as server:
        endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        config = ServerConfig(trace_endpoint=endpoint, api_keys=("team:a-key",))
        with running(FakeEngine(tokenizer), config) as url:
            key = {"authorization": "Bearer a-key"}
            answer = post(url, BODY, traceparent=PARENT, **key)
            assert answer.status_code == 200
            assert post(url, {**BODY, "stream": True}, **key).status_code == 200
            assert post(url, {SECRET: SECRET}, **key).status_code == 400
            assert httpx.get(f"{url}/{SECRET}").status_code == 401
        # the server has ended: all is sent
        spans = spans_of(server.bodies)
        assert set(spans) >= {"POST /v1/chat/completions", "receive", "fetch", "first token", "GET"}
        assert not any(SECRET.encode() in body or b"a-key" in body for body in server.bodies)
        requests = [
            span
            for body in server.bodies
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
    root = next(s for s in requests if s.trace_id.hex() == PARENT.split("-")[1] and s.kind == 2)
    assert root.parent_span_id.hex() == PARENT.split("-")[2]
    stages = [s.name for s in requests if s.parent_span_id == root.span_id]
    assert stages == ["receive", "fetch", "first token"]
    found = attributes(root)
    assert found["http.response.status_code"] == 200
    assert found["jaxmm.request_id"] == answer.headers["x-request-id"]
    assert found["jaxmm.tenant"] == "team"


def test_a_collector_that_is_not_there_costs_no_request(tokenizer):
    config = ServerConfig(trace_endpoint="http://127.0.0.1:1/v1/traces")
    with running(FakeEngine(tokenizer), config) as url:
        assert post(url, BODY).status_code == 200


def test_without_an_endpoint_the_sdk_is_not_imported():
    program = "import sys, serving.app\nassert 'opentelemetry.sdk' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
