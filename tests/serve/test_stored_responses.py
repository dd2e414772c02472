"""Responses that are kept in files: conversations go on, by API key, after a restart, within a bound, beside a full disk."""

import errno
import json
import os

import openai
import pytest
from helpers_server import in_thread

from hf_specdec.serve.http.store import ResponseStore

STORY = "Tell me a story about a dog."


def client_of(server, key="first"):
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def serving(folder, most_bytes=1 << 20):
    return in_thread(api_keys=["first", "second"], store=ResponseStore(folder, most_bytes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "responses"


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder) as made:
        yield made


def create(client, **arguments):
    return client.responses.create(
        **{"model": "tiny", "temperature": 0, "max_output_tokens": 12, "input": STORY, **arguments}
    )


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_goes_on(server, streams):
    """It reads as the same items in one request."""
    client = client_of(server)
    first = create(client, instructions="Be short.", metadata={"a": "b"})
    assert first.store is True and client.responses.retrieve(first.id) == first
    more = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "And a cat?"}]}], "stream": streams}
    second = create(client, previous_response_id=first.id, **more)
    second = list(second)[-1].response if streams else second
    assert second.previous_response_id == first.id and client.responses.retrieve(second.id).output == second.output
    items = [
        {"role": "user", "content": STORY}, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And a cat?"},
    ]  # fmt: skip
    whole = create(client, input=items, store=False)
    assert whole.output_text == second.output_text and whole.usage.input_tokens == second.usage.input_tokens
    listed = client.responses.input_items.list(second.id, order="asc")
    assert [item.role for item in listed] == ["user", "assistant", "user"]
    assert [item.content[0].text for item in listed] == [STORY, first.output_text, "And a cat?"]
    backwards = list(client.responses.input_items.list(second.id, limit=2))  # the client asks for the next page
    assert [item.id for item in backwards] == [item.id for item in reversed(list(listed))]
    third = create(client, previous_response_id=second.id, input="Why?")
    assert len(list(client.responses.input_items.list(third.id))) == 5


def test_keys_are_apart_and_deleted_is_gone(server, folder):
    first, second = client_of(server), client_of(server, "second")
    kept, other = create(first), create(first, store=False)
    calls = [
        lambda client, id: client.responses.retrieve(id), lambda client, id: client.responses.delete(id),
        lambda client, id: list(client.responses.input_items.list(id)), lambda client, id: create(client, previous_response_id=id),
    ]  # fmt: skip
    for call in calls:
        for client, id in (
            (second, kept.id),
            (first, other.id),
            (first, "resp_../../etc"),
            (first, "resp_" + "0" * 32),
        ):
            with pytest.raises(openai.NotFoundError):
                call(client, id)
    first.responses.delete(kept.id)
    for call in calls:
        with pytest.raises(openai.NotFoundError):
            call(first, kept.id)
    assert not list(folder.glob(f"*/{kept.id}*")) and not list(folder.glob("*/*.partial"))
    assert all(file.stat().st_mode & 0o77 == 0 for file in folder.glob("*/*.json"))


def test_a_restart_keeps_them(server, folder):
    kept = create(client_of(server))
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / f"{kept.id}.json.x.partial").write_text("{")
    with serving(folder) as again:
        client = client_of(again)
        assert client.responses.retrieve(kept.id) == kept and not list(folder.glob("*/*.partial"))
        assert create(client, previous_response_id=kept.id).status == "incomplete"


def test_the_oldest_go_first(tmp_path):
    with serving(tmp_path, most_bytes=7000) as server:
        client = client_of(server)
        made = [create(client) for _ in range(8)]
        sizes = [file.stat().st_size for file in tmp_path.glob("*/*.json")]
        assert len(sizes) > 1 and sum(sizes) <= 7000 < sum(sizes) + max(sizes)
        assert client.responses.retrieve(made[-1].id).id == made[-1].id
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made[0].id)
        with pytest.raises(openai.InternalServerError, match="--store-bytes"):
            create(client, input=STORY, metadata={"a": "b" * 9000})
    with serving(tmp_path, most_bytes=max(sizes)) as server:
        assert len(list(tmp_path.glob("*/*.json"))) == 1
        client_of(server).responses.retrieve(made[-1].id)


@pytest.mark.parametrize("streams", [False, True])
def test_a_full_disk_is_one_request_s_error(server, monkeypatch, streams):
    client, replace = client_of(server), os.replace

    def full(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    if streams:
        last = list(create(client, stream=True))[-1]
        assert last.type == "response.failed" and "No space left" in last.response.error.message
    else:
        with pytest.raises(openai.InternalServerError, match="No space left"):
            create(client)
    assert create(client, store=False).status == "incomplete"
    monkeypatch.setattr(os, "replace", replace)
    assert create(client).store is True


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"response": {}, "input": 5}', "[" * 100_000])
def test_broken_files(server, folder, content):
    client = client_of(server)
    kept = create(client)
    (file,) = folder.glob(f"*/{kept.id}.json")
    file.write_text(content)
    for call in (lambda: client.responses.retrieve(kept.id), lambda: create(client, previous_response_id=kept.id)):
        with pytest.raises(openai.InternalServerError, match="cannot be read"):
            call()
    client.responses.delete(kept.id)


def test_what_another_server_has_stored(server, folder):
    """It is read, and deleted."""
    with serving(folder) as other:
        kept = create(client_of(server))
        assert client_of(other).responses.retrieve(kept.id) == kept
        client_of(other).responses.delete(kept.id)
        for client in (client_of(server), client_of(other)):
            for call in (client.responses.delete, client.responses.retrieve):
                with pytest.raises(openai.NotFoundError):
                    call(kept.id)


def test_other_files_stay(tmp_path):
    """A folder that holds a user's own files, and links to nothing."""
    others = [tmp_path / "notes" / name for name in ("x.json", "x.partial", "resp_1.json")]
    others[0].parent.mkdir()
    for file in others:
        file.write_text("x" * 5000)
    (tmp_path / "notes" / f"resp_{'0' * 32}.json").symlink_to("nothing")
    with serving(tmp_path, most_bytes=3000) as server:
        kept = create(client_of(server))
        create(client_of(server))
        create(client_of(server))
        with pytest.raises(openai.NotFoundError):
            client_of(server).responses.retrieve(kept.id)
    assert all(file.is_file() for file in others)


def test_items_have_ids_of_their_own(server):
    """Whatever ids a client has given them: pages go on after an id."""
    client = client_of(server)
    ids = ["a", "a", 5, None, ""]
    items = [{"id": id, "role": "user", "content": str(number)} for number, id in enumerate(ids)]
    kept = create(client, input=items)
    listed = [item.content[0].text for item in client.responses.input_items.list(kept.id, order="asc", limit=1)]
    assert listed == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "limit=" + "9" * 5000, "order=up", "after=x", "include[]=x", "stream=true"]
)
def test_wrong_queries(server, query):
    kept = create(client_of(server))
    path = f"/v1/responses/{kept.id}" + ("" if "stream" in query else "/input_items")
    status, _, text = server.ask(f"{path}?{query}", headers={"x-api-key": "first"})
    assert status == 400 and query.partition("=")[0] in json.loads(text)["error"]["message"]


def test_without_a_store():
    with in_thread() as server:
        client = client_of(server)
        assert create(client).store is False
        with pytest.raises(openai.NotFoundError, match="--store"):
            client.responses.retrieve("resp_" + "0" * 32)
