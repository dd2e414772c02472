"""`transformers serve` in a process that imported the plugin takes `speculative_config` in a request's generation_config."""

import json
import socket
import time
import urllib.request

import pytest
from oracle import drafter_of
from transformers.utils.import_utils import is_serve_available

from hf_specdec import integration

pytestmark = pytest.mark.skipif(not is_serve_available(), reason="transformers[serving] is not installed")


@pytest.fixture(scope="module")
def model_folder(tiny_model, tiny_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    tiny_model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    drafter_of(tiny_model).save_pretrained(folder / "drafter")
    return folder


@pytest.fixture(scope="module")
def server(model_folder):
    from transformers.cli.serve import Serve

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    serve = Serve(force_model=str(model_folder), device="cpu", dtype="float32", port=port, non_blocking=True)
    wait_until_up(f"http://localhost:{port}/health")
    yield f"http://localhost:{port}"
    serve.kill_server()


def wait_until_up(url, seconds=60):
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert time.monotonic() < deadline, f"{url} did not answer within {seconds} s"
            time.sleep(0.2)


def ask(server, model_folder, stream=False, **generation_config):
    """The answer to a chat request, or the concatenated pieces of a streamed one."""
    body = {
        "model": str(model_folder), "messages": [{"role": "user", "content": "Once upon a time"}], "stream": stream,
        "generation_config": json.dumps({"max_new_tokens": 24, "do_sample": False, **generation_config}),
    }  # fmt: skip
    request = urllib.request.Request(
        f"{server}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        text = response.read().decode()
    if not stream:
        return json.loads(text)["choices"][0]["message"]["content"]
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_requests_with_speculation(server, model_folder, monkeypatch, stream):
    plain = ask(server, model_folder, stream)
    calls = []
    decode = integration.decode
    monkeypatch.setattr(
        integration, "decode", lambda *args, **kwargs: calls.append(args[0].config.method) or decode(*args, **kwargs)
    )
    ngram = {"method": "ngram", "prompt_lookup_min": 1}
    drafter = {"method": "draft_model", "model": str(model_folder / "drafter")}
    assert plain
    assert ask(server, model_folder, stream, speculative_config=ngram) == plain
    assert ask(server, model_folder, stream, speculative_config=drafter) == plain
    assert ask(server, model_folder, stream) == plain
    assert calls == ["ngram", "draft_model"]
