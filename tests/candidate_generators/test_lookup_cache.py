"""What look-ups learn from texts: kept apart by space, not learnt from private requests, and kept in files that may be broken."""

import contextlib
import gc
import itertools
import json
import logging
import stat
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers_server import Process, in_thread
from oracle import ragged, tiny_llama
from safetensors.numpy import load_file, save_file

import hf_specdec
from hf_specdec import LLM, SamplingParams, integration, parse_config
from hf_specdec.candidate_generators import lookup_cache
from hf_specdec.candidate_generators.lookup_cache import LookupCache, Spaces
from hf_specdec.core.sequence import Sequence
from hf_specdec.serve.http.guard import space_of
from hf_specdec.serve.http.server import Privacy

PROMPT = "Once upon a time there was a little dog. The"
GREEDY = SamplingParams(temperature=0, max_tokens=40, seed=0)
LEARNERS = {
    "suffix": {"method": "suffix"},
    "suffix tree": {"method": "suffix", "suffix_decoding_use_tree": True},
    "token_recycling": {"method": "token_recycling", "recycle_prompt": None},
    "one matrix": {"method": "token_recycling", "matrix_per_sequence": False},
    "lookahead": {"method": "lookahead"},
    "hybrid": {"method": "hybrid", "first": {"method": "suffix"}, "second": {"method": "token_recycling"}},
    "per_request": {"method": "per_request", "methods": [{"method": "suffix"}, {"method": "ngram"}]},
}
MIXED = {
    **LEARNERS,
    "auto": {"method": "auto", "methods": ["suffix", "ngram", "token_recycling"], "memory": False},
}  # what auto drafts depends on the clock


@pytest.fixture(autouse=True)
def trees(request):
    if "suffix" in request.node.name or "hybrid" in request.node.name or "auto" in request.node.name:
        pytest.importorskip("arctic_inference.suffix_decoding")


@pytest.fixture
def make(tiny_model, tiny_tokenizer):
    """Engines of the bundled model. `again`: end the last one first."""
    made = []

    def make(config, again=False, **arguments):
        if again:
            made.pop().close()
        made.append(LLM(tiny_model, tiny_tokenizer, config, max_model_len=128, max_num_seqs=4, **arguments))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(scope="module")
def plain(tiny_model, tiny_tokenizer):
    llm = LLM(tiny_model, tiny_tokenizer, max_model_len=128, max_num_seqs=4)
    yield ids_of(ask(llm))
    llm.close()


def ask(llm, **params):
    return llm.generate([PROMPT], GREEDY.copy(**params), use_tqdm=False)[0]


def ids_of(answer):
    return answer.outputs[0].token_ids


def accepted(answer):
    """Tokens per step."""
    return answer.speculation["mean_accepted_length"]


def learners(llm_or_generator):
    """The drafters that learn tables."""
    generator = getattr(llm_or_generator, "engine", None)
    generator = llm_or_generator if generator is None else generator.decoder.generator
    return [each for each in getattr(generator, "parts", [generator]) if hasattr(each, "spaces")]


def tables(drafter):
    """space → everything that is in its tables."""
    found = {}
    for space, own in drafter.spaces.shared.items():
        if drafter.config.method == "suffix":
            drafter._read_all()  # what waits would be read by the next request's draft
            waiting = sum(trees is own for trees, _ in drafter.waiting)
            found[space] = len(own.trees.cached_requests) + waiting, own.trees._global_tree.estimate_memory()
        elif drafter.config.method == "lookahead":
            found[space] = {first: list(rest) for first, rest in own.followers.items()}
        else:
            found[space] = drafter.matrices.rows[own].tolist()
    return found


def about(file):
    """The metadata of a file."""
    content = file.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]


def spaces_of(file):
    return json.loads(about(file)["spaces"])


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# ---- spaces -----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_space_is_dropped(monkeypatch):
    monkeypatch.setattr(lookup_cache, "MOST_SPACES", 3)
    dropped = []
    spaces = Spaces(lambda shared: [], dropped.append)
    rows = {name: Sequence([1], 9, space=name) for name in "abcd"}
    for name in "ab":
        spaces.enter(rows[name]).append(name)
        spaces.leave(rows[name])
    assert list(spaces.shared) == ["", "a", "b"] and spaces.enter(rows["a"]) == ["a"]
    spaces.enter(rows["c"]).append("c")
    assert list(spaces.shared) == ["b", "a", "c"]
    spaces.enter(rows["d"])
    assert list(spaces.shared) == ["a", "c", "d"] and dropped == [[], ["b"]]
    later = Sequence([1], 9, space="e")
    spaces.enter(later)  # the others are running
    assert list(spaces.shared) == ["a", "c", "d", "e"]
    spaces.leave(rows["c"])
    assert list(spaces.shared) == ["a", "d", "e"] and dropped[-1] == ["c"]


def test_a_private_text_has_tables_of_its_own_while_it_runs():
    dropped = []
    spaces = Spaces(lambda shared: [shared], dropped.append)
    seq = Sequence([1], 9, is_shared=False, space="a")
    own = spaces.enter(seq)
    assert own == [False] and spaces.enter(seq) is own and list(spaces.shared) == [""]
    spaces.leave(seq)
    assert dropped == [own] and spaces.enter(seq) is not own


@pytest.mark.parametrize("name", MIXED)
def test_spaces_learn_nothing_of_each_other(make, plain, name):
    config = MIXED[name]
    first, second = (ask(llm := make(config), space="a") for _ in range(2))
    llm = make(config)
    untaught = [tables(drafter)[""] for drafter in learners(llm)]
    answers = [ask(llm, space=space) for space in ("a", "a", "b", "a", "b")]
    assert all(ids_of(each) == plain for each in [first, second, *answers])
    for drafter, before in zip(learners(llm), untaught, strict=True):
        found = tables(drafter)
        assert found[""] == before
        # look-ups that rest learn nothing
        assert name == "auto" or (set(found) == {"", "a", "b"} and found["a"] != before)
    if name != "auto":
        fresh, known, other, _, learnt = map(accepted, answers)
        assert known > fresh == accepted(first) == accepted(second) and other == fresh and learnt == known


@pytest.mark.parametrize("name", MIXED)
def test_spaces_side_by_side(make, plain, name):
    """Rows of two spaces and a private one in the same steps."""
    llm = make(MIXED[name])
    params = [GREEDY.copy(space="a"), GREEDY.copy(space="b"), GREEDY.copy(private=True), GREEDY]
    for _ in range(2):
        answers = llm.generate([PROMPT] * 4, params, use_tqdm=False)
        assert all(ids_of(each) == plain for each in answers)
    for drafter in learners(llm):
        found = tables(drafter)
        assert name == "auto" or (set(found) == {"", "a", "b"} and found["a"] == found["b"] == found[""])


@pytest.mark.parametrize("name", MIXED)
def test_a_private_request_leaves_no_trace_and_sees_none(make, plain, name):
    fresh = accepted(ask(make(MIXED[name])))
    llm = make(MIXED[name])
    before = [tables(each) for each in learners(llm)]
    private = ask(llm, private=True)
    assert [tables(each) for each in learners(llm)] == before and ids_of(private) == plain
    ask(llm)
    before = [tables(each) for each in learners(llm)]
    again = ask(llm, private=True)
    assert [tables(each) for each in learners(llm)] == before and ids_of(again) == plain
    assert name == "auto" or accepted(private) == accepted(again) == fresh


@pytest.mark.parametrize("name", ["suffix", "token_recycling", "one matrix", "lookahead"])
def test_preempted_rows_keep_to_their_tables(make, plain, name):
    """Too few blocks for all rows: some are paused, and read their texts again."""
    llm = make({**MIXED[name], "block_size": 4, "num_blocks": 24})
    params = [GREEDY.copy(space="a"), GREEDY.copy(private=True), GREEDY.copy(space="b"), GREEDY.copy(private=True)]
    answers = llm.generate([PROMPT] * 4, params, use_tqdm=False)
    assert all(ids_of(each) == plain for each in answers) and llm.engine.scheduler.num_preemptions
    (drafter,) = learners(llm)
    untaught = tables(learners(make(MIXED[name]))[0])[""]
    found = tables(drafter)
    assert set(found) == {"", "a", "b"} and found[""] == untaught and found["a"] != untaught
    assert not drafter.spaces._running
    if hasattr(drafter, "matrices"):
        used = drafter.spaces.shared.values()
        assert sorted([*drafter.matrices.free, *used]) == list(range(len(drafter.matrices.rows)))


def test_matrices_of_dropped_spaces_and_private_texts_are_used_again(make, monkeypatch):
    monkeypatch.setattr(lookup_cache, "MOST_SPACES", 2)
    llm = make({"method": "token_recycling"})
    for number in range(12):
        ask(llm, space=str(number), private=number % 3 == 0, max_tokens=4)
    (drafter,) = learners(llm)
    assert len(drafter.spaces.shared) == 2 and len(drafter.matrices.rows) <= 8
    used = set(drafter.spaces.shared.values())
    assert sorted([*drafter.matrices.free, *used]) == list(range(len(drafter.matrices.rows)))


@pytest.mark.parametrize("wrong", [{"private": 1}, {"space": None}])
def test_wrong_values(wrong):
    with pytest.raises(ValueError, match="private must be"):
        SamplingParams(**wrong)


# ---- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXED)
def test_what_was_learnt_is_there_in_the_next_engine(make, plain, name, tmp_path):
    config = {**MIXED[name], "lookup_cache": str(tmp_path / "kept")}
    llm = make(MIXED[name])
    answers = [ask(llm, space=space) for space in ("a", "a", "", "a")]
    llm = make(config)
    for space in ("a", "a", ""):
        ask(llm, space=space)
    left = [tables(each) for each in learners(llm)]
    llm = make(config, again=True)
    for drafter, before in zip(learners(llm), left, strict=True):
        found = tables(drafter)
        if drafter.config.method == "suffix":  # what the trees take depends on how they grew
            assert {space: count for space, (count, _) in found.items()} == {
                k: count for k, (count, _) in before.items()
            }
        else:
            assert found == before
    later = ask(llm, space="a")
    assert all(ids_of(each) == plain for each in [*answers, later])
    if name != "auto":
        assert accepted(later) == accepted(answers[3]) > accepted(answers[0])
    for file in (tmp_path / "kept").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    methods = {each.config.method for each in learners(llm)}
    assert set(files_of(tmp_path / "kept")) == {f"{each}.safetensors" for each in methods}


def test_by_default_nothing_is_kept(make, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path))
    llm = make({"method": "token_recycling"})
    ask(llm)
    make({"method": "token_recycling"}, again=True)
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_a_folder_of_the_cache(make, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_CACHE", str(tmp_path))
    config = {"method": "token_recycling", "lookup_cache": "stories"}
    ask(make(config))
    make(config, again=True)
    assert (tmp_path / "lookups" / "stories" / "token_recycling.safetensors").is_file()
    monkeypatch.chdir(tmp_path)
    target = learners(make(config))[0].target
    for name, folder in {"..": "..", "a/b": "a/b", "~/x": None}.items():
        path = LookupCache.of(parse_config({**config, "lookup_cache": name}), target).path.parent
        assert tmp_path / "lookups" not in path.parents and (folder is None or str(path) == folder)


@pytest.mark.parametrize("name", ["suffix", "token_recycling", "lookahead", "hybrid"])
def test_a_private_request_is_in_no_file(make, name, tmp_path):
    config = {**LEARNERS[name], "lookup_cache": str(tmp_path / "kept")}
    llm = make(config)
    ask(llm, private=True)
    llm = make(config, again=True)
    assert not (tmp_path / "kept").exists()
    ask(llm)
    llm = make(config, again=True)
    before = files_of(tmp_path / "kept")
    llm.generate(["Lily and Tom went to the park."], GREEDY.copy(private=True), use_tqdm=False)
    make(config, again=True)
    assert files_of(tmp_path / "kept") == before


def broken(tensors, header):
    """Files of one suffix tree's outputs that hold something else: (tensors, metadata), or bytes."""
    ids, lengths = tensors["0/tokens"], tensors["0/lengths"]
    without = {key: value for key, value in header.items() if key != "spaces"}
    return {
        "empty": b"",
        "garbage": b"\x00\xff" * 500,
        "a huge header": (2**62).to_bytes(8, "little") + b"{}",
        "ids beyond the vocabulary": ({**tensors, "0/tokens": ids + 10**6}, header),
        "negative ids": ({**tensors, "0/tokens": -1 - ids}, header),
        "floats": ({**tensors, "0/tokens": ids.astype(np.float32)}, header),
        "lengths of more": ({**tensors, "0/lengths": lengths + 1}, header),
        "negative lengths": ({**tensors, "0/lengths": np.array([-1, len(ids) + 1], dtype=np.int32)}, header),
        "one tensor less": ({"0/tokens": ids}, header),
        "tensors of no space": ({**tensors, "7/tokens": ids}, header),
        "tensors without a place": ({**tensors, "tokens": ids}, header),
        "no spaces": (tensors, without),
        "spaces that are no JSON": (tensors, {**header, "spaces": "["}),
        "spaces that are no list": (tensors, {**header, "spaces": "7"}),
    }


def test_broken_files_are_passed_over_and_replaced(make, plain, tmp_path, caplog):
    pytest.importorskip("arctic_inference.suffix_decoding")
    config = {"method": "suffix", "lookup_cache": str(tmp_path / "kept")}
    fresh = accepted(ask(make(config)))
    make({"method": "none"}, again=True)
    file = tmp_path / "kept" / "suffix.safetensors"
    good, tensors, header = file.read_bytes(), load_file(file), about(file)
    for name, content in {"cut": good[:-5], **broken(tensors, header)}.items():
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            save_file(content[0], file, content[1])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            llm = make(config, again=True)
        assert sum("cannot be used" in each.message for each in caplog.records) == 1, name
        answer = ask(llm)
        assert ids_of(answer) == plain and accepted(answer) == fresh, name
        make({"method": "none"}, again=True)
        assert load_file(file)["0/tokens"].tolist() == tensors["0/tokens"].tolist(), name


@pytest.mark.parametrize("name", ["token_recycling", "lookahead"])
def test_broken_tables_are_passed_over(make, plain, name, tmp_path, caplog):
    config = {**LEARNERS[name], "lookup_cache": str(tmp_path)}
    ask(make(config))
    make({"method": "none"}, again=True)
    file = tmp_path / f"{name}.safetensors"
    tensors, header = load_file(file), about(file)
    for key in tensors:
        for wrong in (
            tensors[key] + 10**6,
            -1 - tensors[key],
            tensors[key].reshape(-1)[:-1],
            tensors[key].astype(np.float64),
        ):
            save_file({**tensors, key: wrong}, file, header)
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                llm = make(config, again=True)
            assert sum("cannot be used" in each.message for each in caplog.records) == 1
            assert ids_of(ask(llm)) == plain
            make({"method": "none"}, again=True)


def test_a_file_of_another_vocabulary_is_left_as_it_is(make, tmp_path, caplog):
    config = {"method": "token_recycling", "lookup_cache": str(tmp_path)}
    ask(make(config))
    make({"method": "none"}, again=True)
    before, other = files_of(tmp_path), tiny_llama()
    with caplog.at_level(logging.WARNING):
        other.generate(**ragged([9]), max_new_tokens=8, speculative_config=config)
        hf_specdec.release(other)
    assert sum("of another model" in each.message for each in caplog.records) == 1
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    ("written_by", "is_replaced", "says"),
    [
        ("an earlier release", True, "of an earlier release"),
        ("a later release", False, "of a later release"),
        ("somebody else", False, "of another model"),
    ],
)
def test_a_file_in_another_format(tmp_path, caplog, monkeypatch, written_by, is_replaced, says):
    monkeypatch.setattr(lookup_cache, "FORMAT", 7)
    path, state = tmp_path / "x.safetensors", {"a": {"ids": np.arange(3)}}
    header = {"owner": "me", "spaces": '["a"]'}
    formats = {"an earlier release": {"format": "6"}, "a later release": {"format": "8"}, "somebody else": {}}
    save_file({"0/ids": np.zeros(2, dtype=np.int64)}, path, header | formats[written_by])
    before, loaded = path.read_bytes(), []
    cache = LookupCache(path, "me", 1000)
    with caplog.at_level(logging.INFO):
        cache.follow(cache, loaded.append, lambda: state)
    cache.changed = True
    cache.save()
    assert not loaded and [says in each.message for each in caplog.records] == [True]
    assert (path.read_bytes() != before) == is_replaced
    if is_replaced:
        LookupCache(path, "me", 1000).follow(cache, loaded.append, lambda: state)
        assert loaded[0]["a"]["ids"].tolist() == [0, 1, 2]


def test_other_numbers_of_successors(make, plain, tmp_path):
    config = {"method": "token_recycling", "lookup_cache": str(tmp_path)}
    ask(make(config))
    for k in (3, 8, 20):
        llm = make({**config, "num_successors": k}, again=True)
        assert ids_of(ask(llm)) == plain


@pytest.mark.parametrize(
    "name", ["suffix", *(pytest.param(name, marks=pytest.mark.slow) for name in ("token_recycling", "lookahead"))]
)
def test_files_are_bounded(make, name, tmp_path):
    """The newest texts are kept; the file has no more than the bound, and its header."""
    most = 6000
    config = {**LEARNERS[name], "lookup_cache": str(tmp_path), "lookup_cache_mb": most / 1e6}
    llm = make(config)
    for number, space in enumerate("abab" * 5):
        llm.generate([f"{number} dogs and {PROMPT}"], GREEDY.copy(space=space, max_tokens=100), use_tqdm=False)
    newest = ids_of(ask(llm, space="b", max_tokens=100))
    make(config, again=True)
    content = (tmp_path / f"{name}.safetensors").read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    assert most // 3 < len(content) - header <= most and header < 1000
    if name == "suffix":
        file = tmp_path / "suffix.safetensors"
        kept = load_file(file)[f"{spaces_of(file).index('b')}/tokens"].tolist()
        assert kept[-len(newest) :] == newest
    if name == "suffix":
        llm = make({**config, "lookup_cache_mb": 0}, again=True)
        assert [count for count, _ in tables(learners(llm)[0]).values()] == [0, 0, 0]


def test_a_folder_that_cannot_be_written(make, plain, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    llm = make({"method": "token_recycling", "lookup_cache": str(tmp_path / "file" / "kept")})
    assert ids_of(ask(llm)) == plain
    with caplog.at_level(logging.WARNING):
        make({"method": "none"}, again=True)
    assert sum("cannot be written" in each.message for each in caplog.records) == 1


def test_tables_are_written_now_and_then(make, tmp_path, monkeypatch):
    """While the engine runs, so that a kill loses little; but writing takes a small share of the time."""
    from hf_specdec.candidate_generators import lookup_cache

    now, written = [1000.0], []
    monkeypatch.setattr(lookup_cache.time, "monotonic", lambda: now[0])
    llm = make({"method": "token_recycling", "lookup_cache": str(tmp_path)})
    kept, write = learners(llm)[0].kept, LookupCache._write

    def slow(self, state):
        written.append(now[0])
        now[0] += 1.0
        write(self, state)

    monkeypatch.setattr(LookupCache, "_write", slow)
    for _ in range(100):
        now[0] += 10.0
        ask(llm, max_tokens=4)
    assert written[0] == 1030.0 and all(b - a >= 1.0 / lookup_cache.SHARE for a, b in itertools.pairwise(written))
    assert len(written) == 5 and kept.changed


def test_calls_of_generate_and_a_decoder_that_is_dropped(tiny_model, tmp_path):
    config = {"method": "token_recycling", "lookup_cache": str(tmp_path / "kept"), "recycle_prompt": None}
    call = lambda: tiny_model.generate(  # noqa: E731
        **ragged([9]), max_new_tokens=32, do_sample=False, return_dict_in_generate=True, speculative_config=config
    )
    plain = tiny_model.generate(**ragged([9]), max_new_tokens=32, do_sample=False)
    first = call()
    hf_specdec.release(tiny_model)
    second = call()
    assert torch.equal(first.sequences, plain) and torch.equal(second.sequences, plain)
    assert second.speculation.mean_accepted_length > first.speculation.mean_accepted_length
    (tmp_path / "kept" / "token_recycling.safetensors").unlink()
    integration._kept(tiny_model).entries.clear()
    gc.collect()
    assert (tmp_path / "kept" / "token_recycling.safetensors").is_file()


def test_the_end_of_a_process_writes(tmp_path):
    code = f"""
import torch, hf_specdec
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(hf_specdec.bundled("tiny"))
config = {{"method": "token_recycling", "lookup_cache": {str(tmp_path)!r}}}
model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, speculative_config=config)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert (tmp_path / "token_recycling.safetensors").is_file()


def test_only_rank_0_writes(tiny_model, tmp_path):
    config = parse_config({"method": "token_recycling", "lookup_cache": str(tmp_path)})
    for leads in (True, False):
        target = SimpleNamespace(model=tiny_model, vocab_size=9, ranks=SimpleNamespace(leads=leads))
        kept = LookupCache.of(config, target)
        drafter = type("Drafter", (), {})()
        kept.follow(drafter, lambda state: None, lambda: {"": {"ids": np.zeros(3, dtype=np.int32)}})
        kept.text_ended()
        kept.save()
        assert kept.path.exists() is leads
        kept.path.unlink(missing_ok=True)


# ---- keys -------------------------------------------------------------------------------------------------------------


def test_the_whole_gives_its_parts_the_key(tmp_path):
    from hf_specdec.candidate_generators.combined import with_common_keys

    whole = parse_config(
        {"method": "auto", "methods": ["ngram", "token_recycling"], "lookup_cache": "x", "lookup_cache_mb": 3}
    )
    parts = [with_common_keys(each, whole) for each in whole.methods]
    assert not hasattr(parts[0], "lookup_cache") and (parts[1].lookup_cache, parts[1].lookup_cache_mb) == ("x", 3)
    second = {"method": "token_recycling", "lookup_cache": "y"}
    own = parse_config({"method": "hybrid", "first": {"method": "ngram"}, "second": second, "lookup_cache": "x"})
    assert own.part("second").lookup_cache == "y"


@pytest.mark.parametrize("wrong", [{"lookup_cache": 3}, {"lookup_cache": ""}, {"lookup_cache_mb": -1}])
def test_wrong_keys(wrong):
    with pytest.raises(hf_specdec.SpeculativeConfigError, match=next(iter(wrong))):
        parse_config({"method": "token_recycling", **wrong})


# ---- the server -------------------------------------------------------------------------------------------------------

KEYS = {"a": {"Authorization": "Bearer key-of-a"}, "b": {"Authorization": "Bearer key-of-b"}}


@contextlib.contextmanager
def serving(folder, *flags):
    """A function that asks a server with two keys. It returns (text, tokens per step)."""
    config = {"method": "token_recycling", "recycle_prompt": None, "lookup_cache": str(folder)}
    keys = [f"key-of-{key}" for key in KEYS]
    if flags:
        keys = [flag for key in keys for flag in ("--api-key", key)]
        made = Process.running("--speculative-config", json.dumps(config), *keys, *flags)
    else:
        made = in_thread(config, api_keys=keys)
    with made as server:

        def ask(key, path="/v1/completions", **more):
            body = {"input": PROMPT} if path == "/v1/responses" else {"prompt": PROMPT, "max_tokens": 40}
            status, _, answer = server.post(path, {**body, "temperature": 0, **more}, KEYS[key])
            assert status == 200, answer
            if path == "/v1/responses":
                return None
            return answer["choices"][0]["text"], answer["metrics"]["speculative_decoding"]["mean_acceptance_length"]

        ask.post = server.post
        yield ask


def test_api_keys_learn_nothing_of_each_other(tmp_path):
    folder = tmp_path / "kept"
    with serving(folder) as ask:
        text, fresh = ask("a")
        private = {"speculative_config": {"private": True}}
        assert ask("a", **private) == (text, fresh)
        known = ask("a")
        assert known[0] == text and known[1] > fresh
        assert ask("b", **private) == (text, fresh)
        assert ask("b") == (text, fresh) and ask("b") == known
        status, _, answer = ask.post(
            "/v1/completions", {"prompt": "x", "speculative_config": {"private": "yes"}}, KEYS["a"]
        )
        assert status == 400 and "private" in answer["error"]["message"]
    (file,) = folder.iterdir()
    assert b"key-of" not in file.read_bytes()
    assert {space_of(b"key-of-a"), space_of(b"key-of-b")} < set(spaces_of(file))


@pytest.mark.slow
def test_the_next_server_knows_what_each_key_taught(tmp_path):
    folder = tmp_path / "kept"
    with serving(folder) as ask:
        text, fresh = ask("a")
        known = ask("a")
        ask("b")
    with serving(folder) as ask:
        assert ask("a")[1] > fresh and ask("b")[1] > fresh
    with serving(folder, "--share-across-api-keys") as ask:
        assert ask("a") == (text, fresh)  # what the keys taught stays theirs
        assert ask("b") == known


@pytest.mark.slow
def test_a_server_that_learns_from_no_request(tmp_path):
    with serving(tmp_path / "kept", "--private-requests") as ask:
        assert ask("a") == ask("a") == ask("a", speculative_config={"private": False})
        ask("a", "/v1/responses")
    assert not (tmp_path / "kept").exists()


@pytest.mark.slow
def test_responses_can_be_private(tmp_path):
    with serving(tmp_path / "kept") as ask:
        ask("a", "/v1/responses", speculative_config={"private": True})
    assert not (tmp_path / "kept").exists()


def test_a_head_of_several_keys_must_be_allowed():
    config = {"method": "mlp_speculator", "model": "tiny-mlp_speculator", "learn": "x"}
    Privacy().check(config, ["a"])
    Privacy().check(None, ["a", "b"])
    Privacy(shares_across_keys=True).check(config, ["a", "b"])
    with pytest.raises(ValueError, match="--share-across-api-keys"):
        Privacy().check(config, ["a", "b"])
