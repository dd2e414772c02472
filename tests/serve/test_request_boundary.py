"""Nothing of one request harms another: whatever raises for it in the engine ends it alone."""

import asyncio
import contextlib

import pytest
import torch
from cache_checks import check_blocks
from tokenizers import decoders
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from hf_specdec.candidate_generators.prediction import Prediction
from hf_specdec.sampling.grammar import GrammarLogitsProcessor
from hf_specdec.serve import LLM, SamplingParams, StructuredOutputsParams
from hf_specdec.serve.engine import engine, request
from hf_specdec.serve.engine.request import Request
from hf_specdec.serve.engine.text import Detokenizer
from hf_specdec.serve.http.errors import ApiError
from hf_specdec.serve.http.server import Limits, Server
from hf_specdec.serve.ipc.messages import Submit
from hf_specdec.serve.ipc.worker import EngineWorker

NUM_OTHERS = 31
BAD = SamplingParams(
    temperature=0, max_tokens=12, stop=["bad"], logprobs=3, prompt_logprobs=3, bad_words=["xyz"],
    structured_outputs=StructuredOutputsParams(regex="[a-z ]+"), prediction=[5, 6, 7],
)  # fmt: skip
# where, the function, and whether it is called for the bad request; `bad` has its choice once it is added
SITES = {
    "text of a token": (Detokenizer, "add", lambda bad, text, *_: text is bad.text),
    "text at the end": (Detokenizer, "finish", lambda bad, text, *_: text is bad.text),
    "stop search": (engine, "find_stop", lambda bad, text, num_new, stops: stops == ["bad"]),
    "log-probabilities": (engine, "logprobs_of", lambda bad, logits, tokens, count, text_of: count == 3 and len(tokens) == 1),
    "log-probabilities of the prompt": (
        engine, "logprobs_of", lambda bad, logits, tokens, count, text_of: count == 3 and len(tokens) > 1
    ),
    "grammar, accept": (GrammarLogitsProcessor, "accept", lambda bad, grammar, *_: grammar is bad.grammar),
    "grammar, masks": (GrammarLogitsProcessor, "along", lambda bad, grammar, *_: grammar is bad.grammar),
    "grammar, drafts": (GrammarLogitsProcessor, "possible", lambda bad, grammar, *_: grammar is bad.grammar),
    "prediction": (Prediction, "continuation", lambda bad, prediction, seq, *_: seq is bad.sequence),
    "grammar, forced": (GrammarLogitsProcessor, "forced", lambda bad, grammar, *_: grammar is bad.grammar),
    "a processor": (NoBadWordsLogitsProcessor, "__call__", lambda *_: True),
    "end of what can be sent": (request, "safe_length", lambda bad, text, stops: stops == ["bad"]),
    "statistics": (Request, "figures", lambda bad, request, longest: request.id == "bad"),
}  # fmt: skip
SITES |= {f"panic: {site}": SITES[site] for site in ("text of a token", "grammar, masks", "statistics")}


def panic():
    """The exception by which a library in Rust says that it has a bug."""
    try:
        decoders.Strip(" ", 0, 3).decode([" "])
    except BaseException as error:
        return type(error)
    return pytest.fail("tokenizers no longer panics there")


@pytest.fixture(scope="module")
def llm(tiny_model, tiny_tokenizer):
    pytest.importorskip("llguidance")
    made = LLM(
        tiny_model, tiny_tokenizer, {"method": "ngram", "prompt_lookup_min": 1}, max_model_len=64, max_num_seqs=32
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def others(llm):
    """The requests beside the bad one, and their answers without it."""
    prompt = llm.tokenizer("the dog and the dog and the")["input_ids"]
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=6 + i % 5) for i in range(NUM_OTHERS)]
    outputs = llm.generate([prompt] * NUM_OTHERS, params, use_tqdm=False)
    return prompt, params, [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("site", SITES)
def test_one_request_fails_and_the_others_finish(llm, others, monkeypatch, caplog, site):
    prompt, params, expected = others
    updates, called = [], []
    running = EngineWorker(llm.engine, updates.extend, contextlib.nullcontext())
    bad_prompt = llm.tokenizer("the dog and the dog and the cat")["input_ids"]
    messages = [Submit(str(i), None, prompt, each) for i, each in enumerate(params)]
    messages.insert(16, Submit("bad", None, bad_prompt, BAD))
    for message in messages:
        running.send(message)
    running._read(block=False)
    bad = running._requests["bad"].choices[0]
    owner, name, is_bad = SITES[site]
    original, error = getattr(owner, name), panic() if site.startswith("panic") else RuntimeError

    def call(*arguments, **keywords):
        if is_bad(bad, *arguments):
            called.append(site)
            raise error(f"injected: {site}")
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, call)
    with llm.engine.decoder.active():
        while llm.engine.has_work:
            assert running._step()
    ended = {update.id: update for update in updates if update.request_finished}
    assert called and set(ended) == {message.id for message in messages}
    assert str(ended["bad"].error) == f"injected: {site}" and not ended["bad"].is_refused
    tokens = {str(i): [] for i in range(NUM_OTHERS)}
    for update in updates:
        tokens.get(update.id, []).extend(update.token_ids)
    assert list(tokens.values()) == expected and all(ended[id].error is None for id in tokens)
    assert any("injected" in str(record.exc_info) for record in caplog.records)
    assert not running._requests and not llm.engine._choices
    check_blocks(llm.engine.decoder.cache.pool)
    assert llm.engine.decoder.cache.pool.num_used == 0


def test_a_prediction_without_tokens_ends_its_own_request(llm, others, monkeypatch):
    """The tokenizer raises for its text."""
    prompt, params, expected = others
    original = request.Admission._predicted

    def predicted(admission, given):
        if given == "x":
            raise RuntimeError("no ids")
        return original(admission, given)

    monkeypatch.setattr(request.Admission, "_predicted", predicted)
    updates = []
    running = EngineWorker(llm.engine, updates.extend, contextlib.nullcontext())
    running.send(Submit("bad", None, prompt, SamplingParams(prediction="x")))
    running.send(Submit("good", None, prompt, params[0].copy(prediction="the dog")))
    running._read(block=False)
    with llm.engine.decoder.active():
        while llm.engine.has_work:
            assert running._step()
    ended = {update.id: update.error for update in updates if update.request_finished}
    assert str(ended["bad"]) == "no ids" and ended["good"] is None
    assert [token for update in updates if update.id == "good" for token in update.token_ids] == expected[0]


def test_a_batch_keeps_the_answers_of_the_others(llm, others, monkeypatch):
    """`LLM.generate` tells which request failed. If all did, it raises."""
    prompt, params, expected = others
    original = Detokenizer.finish

    def finish(text, tokens):
        if text._ids[: len(prompt) + 1][-1] == 7:
            raise RuntimeError("no text")
        return original(text, tokens)

    monkeypatch.setattr(Detokenizer, "finish", finish)
    outputs = llm.generate([prompt, [*prompt, 7]], params[:2], use_tqdm=False)
    assert outputs[0].error is None and outputs[0].outputs[0].token_ids == expected[0]
    assert str(outputs[1].error) == "no text" and outputs[1].outputs[0].finish_reason == "error"
    with pytest.raises(RuntimeError, match="no text"):
        llm.generate([[*prompt, 7]], params[1], use_tqdm=False)


def test_a_request_that_fails_keeps_its_text(llm, others, monkeypatch):
    """All choices of it, up to the tokens that they had."""
    prompt, params, expected = others
    original, named = engine.token_text, []

    def named_text(tokenizer, token):
        named.append(token)
        if len(named) == 7:
            raise RuntimeError("no name")
        return original(tokenizer, token)

    monkeypatch.setattr(engine, "token_text", named_text)
    asked = [params[0], SamplingParams(temperature=1.0, seed=3, max_tokens=20, logprobs=0, n=2)]
    good, bad = llm.generate([prompt] * 2, asked, use_tqdm=False)
    assert good.outputs[0].token_ids == expected[0] and str(bad.error) == "no name"
    for output in bad.outputs:
        assert output.token_ids and output.text == llm.tokenizer.decode(prompt + output.token_ids)[-len(output.text) :]
        assert len(llm.tokenizer.decode(output.token_ids)) == len(output.text) and output.finish_reason == "error"


def test_text_that_is_made_for_the_client(tiny_model, tiny_tokenizer, monkeypatch, caplog):
    """Without stop texts the HTTP side makes the text: one client reads an error, the other its answer."""
    pytest.importorskip("fastapi")

    original, params = Detokenizer.add, SamplingParams(temperature=0, max_tokens=8)
    bad_ids, good_ids = (tiny_tokenizer(text)["input_ids"] for text in ("A bad one", "A good one"))

    def add(text, token):
        if tiny_tokenizer.decode(text._ids).startswith("A bad"):
            raise RuntimeError("no text")
        return original(text, token)

    async def read(server, ids):
        answers = [server.submit(ids, params)]
        try:
            return "".join([found[1].text async for found in server.updates(answers) if found is not None])
        finally:
            server.release(answers)

    async def serve():
        server = Server(tiny_tokenizer, ["tiny"], Limits())
        server.start(LLM(tiny_model, tiny_tokenizer, max_model_len=64, max_num_seqs=2), asyncio.get_running_loop())
        failed, text = await asyncio.gather(read(server, bad_ids), read(server, good_ids), return_exceptions=True)
        assert (
            isinstance(failed, ApiError) and failed.status == 500 and "The tokenizer raised RuntimeError" in str(failed)
        )
        assert "no text" in caplog.text and not server.answers
        await asyncio.to_thread(server.stop)
        return text

    monkeypatch.setattr(Detokenizer, "add", add)
    text = asyncio.run(serve())
    whole = tiny_model.generate(torch.tensor([good_ids]), max_new_tokens=8, do_sample=False)[0].tolist()
    assert text == tiny_tokenizer.decode(whole)[len(tiny_tokenizer.decode(good_ids)) :]
