"""/v1/lookup: corpora of API keys, and what is wrong with them."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers_server import Process, in_thread

from hf_specdec.cli.serve import _with_corpora

pytest.importorskip("uvicorn")

PROMPT = "Once upon a time there was a little dog. The"
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3, "num_speculative_tokens": 8}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpora") / "notes.txt"
    file.write_text("Notes of the house.")
    config = {**NGRAM, "lookup_corpus": {"notes": str(file)}, "lookup_corpus_tokens": 400}
    with in_thread(config, api_keys=["first", "second"]) as made:
        yield made


def ask(server, method, path, body=None, key="first"):
    status, _, text = server.ask(path, body, {"Authorization": f"Bearer {key}"}, method)
    return status, json.loads(text)


def write(server, key="first", **more):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 60, "model": "tiny", **more}
    status, answer = ask(server, "POST", "/v1/completions", body, key)
    assert status == 200, answer
    figures = answer["metrics"]["speculative_decoding"]
    return answer["choices"][0]["text"], figures["num_accepted_draft_tokens"]


def test_a_key_has_its_own_corpora(server):
    text, alone = write(server)
    own = {"id": "stories/one", "object": "lookup", "owned_by": "client"}
    for given in (PROMPT + text, ["A text.", PROMPT + text]):
        status, made = ask(server, "PUT", "/v1/lookup/stories/one", {"text": given})
        assert status == 200 and made == {**own, "num_tokens": made["num_tokens"]} and made["num_tokens"] > 60
        assert ask(server, "GET", "/v1/lookup/stories/one") == (200, made)
    assert [each["id"] for each in ask(server, "GET", "/v1/lookup")[1]["data"]] == ["notes", "stories/one"]
    assert write(server) == (text, accepted := write(server)[1]) and accepted > alone + 10
    assert write(server, "second") == (text, alone)
    assert [each["id"] for each in ask(server, "GET", "/v1/lookup", key="second")[1]["data"]] == ["notes"]
    for method in ("GET", "DELETE"):
        assert ask(server, method, "/v1/lookup/stories/one", key="second")[0] == 404
    assert ask(server, "DELETE", "/v1/lookup/stories/one") == (
        200, {"id": "stories/one", "object": "lookup.deleted", "deleted": True},
    )  # fmt: skip
    assert ask(server, "GET", "/v1/lookup/stories/one")[0] == ask(server, "DELETE", "/v1/lookup/stories/one")[0] == 404
    assert write(server) == (text, alone)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "text"), ({"text": ""}, "empty"), ({"text": []}, "empty"), ({"text": 5}, "text"), ({"text": ["a", 5]}, "text.1"),
        ({"text": ["a"] * 40_000}, "at most 32768"),
        (b"{", "not JSON"), ({"text": "dog " * 500}, "lookup_corpus_tokens allows 400"), ({"text": "x" * 2**21}, "at most 1048576"),
    ],
)  # fmt: skip
def test_wrong_corpora(server, body, message):
    """They are one request's error, and leave what was there."""
    assert ask(server, "PUT", "/v1/lookup/x", {"text": "A good text."})[0] == 200
    status, answer = ask(server, "PUT", "/v1/lookup/x", body)
    assert status == 400 and message in answer["error"]["message"], answer
    assert ask(server, "GET", "/v1/lookup/x")[1]["num_tokens"] == 4
    assert ask(server, "DELETE", "/v1/lookup/x")[0] == 200


def test_what_cannot_be_changed(server):
    assert ask(server, "DELETE", "/v1/lookup/notes")[0] == 403
    for name in ("x" * 300, ""):
        assert ask(server, "PUT", f"/v1/lookup/{name}", {"text": "a"})[0] == 400
    with in_thread({"method": "token_recycling"}) as other:
        status, answer = ask(other, "PUT", "/v1/lookup/x", {"text": "a"})
        assert status == 400 and "auto, suffix or ngram" in answer["error"]["message"]
        assert ask(other, "GET", "/v1/lookup") == (200, {"object": "list", "data": []})


def test_clients_change_one_corpus_at_once(server):
    """What one adds, another removes before the answer."""

    def change(number):
        return ask(server, ("PUT", "DELETE")[number % 2], "/v1/lookup/x", {"text": "A good text."})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(change, range(400)))
    assert {status for status, _ in answers[::2]} == {200} and {status for status, _ in answers} <= {200, 404}
    assert all(answer["num_tokens"] == 4 for _, answer in answers[::2])


@pytest.mark.parametrize(
    ("config", "message"),
    [(None, "add --speculative-config auto"), ({**NGRAM, "lookup_corpus": ["notes.txt"]}, "not in both")],
)
def test_flags_that_do_not_fit(config, message):
    with pytest.raises(ValueError, match=message):
        _with_corpora(config, ["faq.txt"])


@pytest.mark.slow
def test_processes_and_flags(tmp_path):
    """The engine in a process of its own; a long corpus is read in the process for long bodies."""
    file = tmp_path / "faq.jsonl"
    file.write_text('{"text": "What is it? A dog."}')
    server = Process("--speculative-config", json.dumps(NGRAM), "--lookup-corpus", str(file), f"more={file}")
    try:
        server.wait()
        text, alone = write(server)
        status, made = ask(server, "PUT", "/v1/lookup/long", {"text": "A cat. " * 8000 + PROMPT + text})
        assert status == 200 and made["num_tokens"] > 20_000
        assert write(server)[0] == text and write(server)[1] > alone + 10
        assert [each["id"] for each in ask(server, "GET", "/v1/lookup")[1]["data"]] == ["faq", "more", "long"]
    finally:
        server.stop()
