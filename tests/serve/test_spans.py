"""Spans of requests: a collector receives them in OTLP's JSON, and none that its caller does not sample."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers_server import Process

from hf_specdec.cli import main
from hf_specdec.serve.http.server import Answer
from hf_specdec.serve.http.spans import Spans

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP collector on loopback. `received`: (path, headers, body) of every request."""

    def __init__(self, status=200):
        outer = self
        self.received = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.received.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def do_GET(self):
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def spans(self, count):
        """All spans, once there are that many."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            resources = [resource for *_, body in self.received for resource in body["resourceSpans"]]
            spans = [span for resource in resources for scope in resource["scopeSpans"] for span in scope["spans"]]
            if len(spans) >= count:
                return spans
            time.sleep(0.05)
        raise AssertionError(self.received)


@pytest.fixture
def collector():
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def attributes(span):
    return {pair["key"]: next(iter(pair["value"].values())) for pair in span["attributes"]}


def answer(parent=b"", **changes):
    """An answer that began 3 seconds ago, waited one, and had its first token after another."""
    now = time.monotonic()
    made = Answer("request-1", 0, None, 7, None, began=now - 3.0, first=now - 1.0, num_new=5, parent=parent)
    made.statistics = {"started": now - 2.0, "num_steps": 3, "num_draft_tokens": 6, "num_accepted_tokens": 2}
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_the_parts_of_a_request(collector):
    spans = Spans(collector.url)
    spans.request(answer(f"00-{TRACE}-{PARENT}-01".encode()), "tiny", "stop")
    whole, *parts = collector.spans(4)
    assert whole["name"] == "llm_request" and (whole["traceId"], whole["parentSpanId"]) == (TRACE, PARENT)
    assert [part["name"] for part in parts] == ["queue", "prompt", "steps"]
    assert {(part["traceId"], part["parentSpanId"]) for part in parts} == {(TRACE, whole["spanId"])}
    for part in parts:
        assert int(part["endTimeUnixNano"]) - int(part["startTimeUnixNano"]) == pytest.approx(1e9, rel=0.05)
    assert int(whole["startTimeUnixNano"]) / 1e9 == pytest.approx(time.time() - 3, abs=2)
    figures = attributes(whole)
    assert figures["gen_ai.usage.input_tokens"] == "7" and figures["gen_ai.usage.output_tokens"] == "5"
    assert attributes(parts[2])["hf_specdec.accepted_tokens"] == "2"
    spans.close()


def test_what_is_not_sampled_and_what_is_not_known(collector):
    spans = Spans(collector.url + "/mine")
    spans.request(answer(f"00-{TRACE}-{PARENT}-00".encode()), "tiny", "stop")
    spans.request(answer(b"nonsense", statistics=None, first=None), "tiny", "error")
    (whole,) = collector.spans(1)  # neither its queue nor its prompt ended, as far as is known
    assert whole["status"] == {"code": 2} and whole["parentSpanId"] == "" and len(whole["traceId"]) == 32
    spans.close()
    assert len(collector.received) == 1 and collector.received[0][0] == "/mine"


def test_headers_of_the_environment(collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20b, x-team=c")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    spans = Spans(collector.url)
    spans.request(answer(), "tiny", "stop")
    spans.close()  # sends what is left
    ((path, headers, body),) = collector.received
    assert path == "/v1/traces" and headers["x-key"] == "a b" and headers["x-team"] == "c"
    assert attributes(body["resourceSpans"][0]["resource"]) == {"service.name": "mine"}


@pytest.mark.parametrize(
    "header", [f"00-{32 * '0'}-{PARENT}-01", f"00-{TRACE}-{16 * '0'}-01", f"ff-{TRACE}-{PARENT}-01"]
)
def test_parents_that_the_standard_calls_invalid_begin_a_new_trace(collector, header):
    spans = Spans(collector.url)
    spans.request(answer(header.encode()), "tiny", "stop")
    whole, *_ = collector.spans(4)
    spans.close()
    assert whole["traceId"] not in (TRACE, 32 * "0") and whole["parentSpanId"] == ""


@pytest.mark.parametrize("name", ["x-key=a%0Ab", "x-key=%E2%82%AC"])
def test_headers_that_cannot_be_sent_cost_one_warning_and_not_the_thread(collector, monkeypatch, caplog, name):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", name)
    _check_losses(Spans(collector.url), caplog, "")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/\u00e9", f"http://{70 * 'a'}/", "http://127.0.0.1:port"])
def test_urls_that_cannot_be_opened_cost_one_warning_and_not_the_thread(caplog, url):
    _check_losses(Spans(url), caplog, "")


@pytest.mark.parametrize("status, reason", [(503, "Service Unavailable"), (302, "Found")])
def test_a_collector_that_fails_costs_one_warning(caplog, status, reason):
    failing = Collector(status)
    _check_losses(Spans(failing.url), caplog, f"HTTP Error {status}: {reason}")
    failing.server.shutdown()
    failing.server.server_close()


def _check_losses(spans, caplog, reason):
    """Three losses give one warning, and the thread goes on until it is closed."""
    for _ in range(3):
        spans.request(answer(), "tiny", "stop")
        time.sleep(0.1)
    assert spans._thread.is_alive()
    spans.close()
    (warning,) = [record.getMessage() for record in caplog.records if "Spans are lost" in record.getMessage()]
    assert warning.startswith(f"Spans are lost, because {spans.url} does not take them: {reason}")


@pytest.mark.parametrize("url", ["localhost:4317", "grpc://localhost:4317", "http://"])
def test_other_urls_are_refused(url, capsys):
    assert main(["serve", "tiny", "--otlp-traces-endpoint", url]) == 2
    assert "no URL of an OTLP collector" in capsys.readouterr().err


@pytest.mark.ci
def test_a_server_sends_them(collector):
    with Process.running("--otlp-traces-endpoint", collector.url, "--max-model-len", "128") as server:
        body = {"model": "tiny", "prompt": ["Once", "Lily"], "max_tokens": 9, "temperature": 0}
        server.post("/v1/completions", body, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        spans = collector.spans(8)
    wholes = [span for span in spans if span["name"] == "llm_request"]
    assert {(span["traceId"], span["parentSpanId"]) for span in wholes} == {(TRACE, PARENT)}
    assert len({attributes(span)["gen_ai.request.id"] for span in wholes}) == 2
    for span in spans:
        assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
    assert sorted(span["name"] for span in spans) == sorted(2 * ["llm_request", "queue", "prompt", "steps"])
