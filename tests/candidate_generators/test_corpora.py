"""Corpora: look-ups draft from them, the text stays the same, and what is removed is gone."""

import copy
import gc
import json
import threading
import weakref

import numpy as np
import pytest
import torch

from hf_specdec import LLM, SamplingParams, parse_config
from hf_specdec.candidate_generators import corpora as module
from hf_specdec.candidate_generators.corpora import Corpora, ids_of
from hf_specdec.config import SpeculativeConfigError
from hf_specdec.core.sequence import Sequence

PROMPT = "Once upon a time there was a little dog. The"
GREEDY = SamplingParams(temperature=0, max_tokens=48, seed=0)
METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    "tree": {"method": "suffix", "suffix_decoding_max_cached_requests": 0, "suffix_decoding_use_tree": True},
    "hybrid": {"method": "hybrid", "first": {"method": "ngram"}, "second": {"method": "token_recycling"}},
    "auto": {"method": "auto", "methods": ["ngram", "suffix"], "memory": False},
}
METHODS = {name: {**config, "num_speculative_tokens": 8} for name, config in METHODS.items()}
METHODS["per_request"] = {"method": "per_request", "methods": {"first": METHODS["ngram"]}}


@pytest.fixture(autouse=True)
def trees(request):
    if any(word in request.node.name for word in ("suffix", "tree", "auto")):
        pytest.importorskip("arctic_inference.suffix_decoding")


@pytest.fixture(scope="module")
def answer(tiny_model, tiny_tokenizer):
    """The text that plain generate() writes after the prompt."""
    inputs = tiny_tokenizer(PROMPT, return_tensors="pt")
    output = tiny_model.generate(**inputs, max_new_tokens=48, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture
def make(tiny_model, tiny_tokenizer):
    made = []

    def make(config):
        made.append(LLM(tiny_model, tiny_tokenizer, config, max_model_len=256, max_num_seqs=4))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def ask(llm, **params):
    result = llm.generate([PROMPT], GREEDY.copy(**params), use_tqdm=False)[0]
    return result.outputs[0].token_ids, result.speculation["mean_accepted_length"]


@pytest.mark.parametrize("name", METHODS)
def test_a_corpus_is_drafted_from_and_changes_no_text(make, answer, tiny_tokenizer, tmp_path, name):
    """Also in batches with others, for private requests and other spaces; a corpus of a space is for that space only."""
    file = tmp_path / "faq.txt"
    file.write_text("Something else. " + PROMPT + tiny_tokenizer.decode(answer))
    config = METHODS[name]
    without, fresh = ask(make(config))
    llm = make({**config, "lookup_corpus": [str(file)]})
    for more in ({}, {"private": True}, {"space": "a"}):
        ids, length = ask(llm, **more)
        assert ids == without == answer and (name == "auto" or length > fresh + 1), (more, length, fresh)
    assert llm.engine.corpora.sizes["faq"] > 48

    llm, ids = make(config), ids_of([file.read_text()], tiny_tokenizer)
    llm.engine.corpora.start("a", "faq", ids).result(30)
    lengths = {}
    for space in ("a", "b", "a lora"):
        written, lengths[space] = ask(llm, space=space, private=True)  # so that nothing is learnt from the texts before
        assert written == answer
    assert name == "auto" or (lengths["a"] == lengths["a lora"] > fresh + 1 and lengths["b"] == fresh)
    llm.engine.corpora.start("a", "faq", None).result(30)
    assert ask(llm, space="a", private=True)[0] == answer
    assert name == "auto" or ask(llm, space="a", private=True)[1] == fresh
    assert not llm.engine.corpora.sizes and all(not each._spaces for each in llm.engine.corpora._corpora)


@pytest.mark.parametrize("name", ["ngram", "suffix", "tree"])
def test_generate(tiny_model, tiny_tokenizer, tmp_path, name):
    """Ragged batches, a .jsonl with names, sampling with a seed."""
    prompts = [PROMPT, "The cat", "Lily and her mother went to the park. They"]
    inputs = tiny_tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    expected = tiny_model.generate(**inputs, max_new_tokens=32, do_sample=False)
    texts = tiny_tokenizer.batch_decode(expected, skip_special_tokens=True)
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    arguments = {"max_new_tokens": 32, "tokenizer": tiny_tokenizer, "return_dict_in_generate": True, **inputs}

    def run(config, **more):
        return tiny_model.generate(**arguments, **more, speculative_config=config)

    config = {**METHODS[name], "lookup_corpus": {"stories": str(file)}}
    output, without = run(config), run(METHODS[name])
    assert torch.equal(output.sequences, without.sequences)
    assert output.speculation["mean_accepted_length"] > without.speculation["mean_accepted_length"] + 0.5
    sampled = [run({**each, "seed": 3}, do_sample=True).sequences for each in (config, METHODS[name])]
    assert torch.equal(*sampled)


def make_corpora(begin=list):
    return Corpora(begin, lambda table, ids: table.extend(ids.tolist()), 1500)


def test_bounds(monkeypatch):
    monkeypatch.setattr(module, "MOST_CORPORA", 2)
    corpora, ids = make_corpora(), np.arange(1500, dtype=np.int32)
    corpora.add("a", "one", ids, 2000)
    corpora.add("a", "two", ids[:500], 2000)
    with pytest.raises(ValueError, match="2 corpora already"):
        corpora.add("a", "three", ids[:1], 9000)
    with pytest.raises(ValueError, match="have 2001 tokens; lookup_corpus_tokens allows 2000"):
        corpora.add("a", "two", ids[:501], 2000)
    with pytest.raises(ValueError, match="empty"):
        corpora.add("a", "two", ids[:0], 2000)
    with pytest.raises(ValueError, match="'two' holds the id 1500; the model has ids 0 to 1499"):
        corpora.add("a", "two", ids[:2] + 1499, 2000)
    corpora.add("b", "one", ids[:3], 2000)
    assert corpora.sizes("a") == {"one": 1500, "two": 500} and corpora.sizes("b") == {"one": 3}
    assert [len(table) for table in corpora.of(Sequence([1], 9, space="a lora"))] == [1500, 500]
    corpora.add("a", "one", ids[:7], 2000)
    assert corpora.sizes("a") == {"two": 500, "one": 7}


def test_what_is_removed_is_gone():
    class Table(list):
        pass

    corpora = make_corpora(Table)
    corpora.add(None, "one", np.arange(5, dtype=np.int32), 9)
    (table,) = corpora.of(Sequence([1], 9))
    gone = weakref.ref(table)
    del table
    corpora.remove(None, "one")
    corpora.remove(None, "one")
    gc.collect()
    assert gone() is None and not corpora.of(Sequence([1], 9))


def test_tables_are_read_while_others_are_made():
    corpora, seq, errors = make_corpora(), Sequence([1], 9, space="a"), []

    def change():
        try:
            for number in range(300):
                corpora.add("a", str(number % 5), np.arange(20, dtype=np.int32), 1000)
                corpora.remove("a", str((number + 1) % 5))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    while thread.is_alive():
        assert all(len(table) == 20 for table in corpora.of(seq))
    assert not errors


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lookup_corpus": 5}, "must be a list of files"),
        ({"lookup_corpus": [5]}, "different names"),
        ({"lookup_corpus": {"a": 5}}, "must be a list of files"),
        ({"lookup_corpus": ["a/x.txt", "b/x.txt"]}, "different names"),
        ({"lookup_corpus_tokens": 0}, "at least 1"),
    ],
)
def test_wrong_keys(more, message):
    with pytest.raises(SpeculativeConfigError, match=message):
        parse_config({"method": "ngram", **more})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", None, "no such file"), ("x.txt", b"\xff\xfe\x00", "not UTF-8"), ("x.txt", b"  ", "is empty"),
        ("x.jsonl", b'{"text": "a"}\n{"txt": "b"}', 'x.jsonl:2: the row has no "text"'), ("x.jsonl", b"{", "not JSON"),
        ("x.jsonl", b'{"text": "\\ud800"}', "surrogates not allowed"),
    ],
)  # fmt: skip
def test_broken_files(make, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SpeculativeConfigError, match=message):
        make({"method": "ngram", "lookup_corpus": [str(tmp_path / name)]})


@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_tokens_that_the_model_lacks(make, tiny_tokenizer, name):
    """A draft of such an id would be read from beyond the embeddings."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(["<new>"])
    ids = ids_of([PROMPT + "<new>" * 5], tokenizer)
    llm = make(METHODS[name])
    with pytest.raises(ValueError, match=f"holds the id {len(tokenizer) - 1}"):
        llm.engine.corpora.start("", "x", ids).result(30)
    assert ask(llm) == ask(make(METHODS[name]))


def test_methods_without_look_ups(make, tmp_path, tiny_model):
    (tmp_path / "x.txt").write_text("Once upon a time")
    files = {"lookup_corpus": [str(tmp_path / "x.txt")]}
    recycling = {"method": "token_recycling"}
    with pytest.raises(SpeculativeConfigError, match="no key 'lookup_corpus' for method 'token_recycling'"):
        make({**recycling, **files})
    with pytest.raises(SpeculativeConfigError, match="read by suffix and ngram"):
        make({"method": "hybrid", "first": recycling, "second": recycling, **files})
    with pytest.raises(SpeculativeConfigError, match="move it there"):
        make({"method": "hybrid", "first": {"method": "ngram", **files}, "second": recycling})
    with pytest.raises(SpeculativeConfigError, match="tokenizer"):
        tiny_model.generate(torch.ones(1, 3, dtype=torch.long), speculative_config={"method": "ngram", **files})
    refused = make(recycling).engine.corpora.start("", "x", np.ones(3, dtype=np.int32))
    with pytest.raises(ValueError, match="No drafter looks into corpora"):
        refused.result(30)
