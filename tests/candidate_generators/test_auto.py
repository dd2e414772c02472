"""Method "auto": it finds what can draft, never fails for what it found, and never changes what is written."""

import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import ragged
from paths import ROOT, load_script
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_specdec
from hf_specdec import LLM, SamplingParams, SpeculativeConfigError, parse_config
from hf_specdec.candidate_generators.auto import discovery, hub
from hf_specdec.candidate_generators.auto.generator import AgreedChoice
from hf_specdec.candidate_generators.base import DrafterContext, MayRest
from hf_specdec.core.sequence import Sequence
from hf_specdec.integration import get_decoder
from hf_specdec.policy import Choice, DraftLengthPolicy, Fastest

PARTS = [
    {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4},
    "token_recycling",
    {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3},
    {"method": "eagle3", "model": "tiny-eagle3", "top_k": 3, "total_tokens": 8, "num_speculative_tokens": 3},
    {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3},
]


class RandomChoice:
    """Chooses at random, also whether heads follow texts."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.rested = False

    def heads_follow(self, seq):
        follow = self.random.random() < 0.9
        self.rested |= not follow
        return follow

    def followed(self, seconds, num_rows):
        pass

    def is_awake(self, index):
        return True

    def choose(self, sequences, limits, offers, seconds, scores, able=None):
        drafter = self.random.integers(0, len(PARTS), len(limits))
        return Choice(drafter, np.minimum(self.random.integers(0, 5, len(limits)), limits))


# ---- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), do_sample=st.booleans())
def test_text_does_not_depend_on_the_choice(tiny_model, seed, do_sample):
    """Five drafters, chains and trees, chosen at random for each row and step, against no drafter."""
    config = {"method": "auto", "methods": PARTS, "seed": 5}
    decoder = get_decoder(tiny_model, parse_config(config), DrafterContext())
    decoder.generator.chooser, decoder.policy = RandomChoice(seed), DraftLengthPolicy()
    inputs = ragged([9, 4, 17], seed=seed % 7)
    arguments = {
        "max_new_tokens": 20,
        "do_sample": do_sample,
        **({"temperature": 0.8, "top_k": 30} if do_sample else {}),
    }
    auto = tiny_model.generate(**inputs, **arguments, speculative_config=config, return_dict_in_generate=True)
    none = tiny_model.generate(**inputs, **arguments, speculative_config={"method": "none", "seed": 5})
    assert auto.sequences.tolist() == none.tolist()
    if not do_sample:
        assert auto.sequences.tolist() == tiny_model.generate(**inputs, **arguments).tolist()
    drafters = auto.speculation["drafters"]
    assert len(drafters) >= 2 and set(drafters) <= {"ngram", "token_recycling", "eagle3", "eagle3-2", "draft_model"}
    assert sum(each["num_new_tokens"] for each in drafters.values()) <= auto.speculation["num_new_tokens"]
    hf_specdec.release(tiny_model)


def test_one_word(tiny_model):
    inputs = ragged([12, 5], seed=2)
    plain = tiny_model.generate(**inputs, max_new_tokens=40, do_sample=False)
    auto = tiny_model.generate(**inputs, max_new_tokens=40, do_sample=False, speculative_config="auto")
    assert auto.tolist() == plain.tolist()
    (decoder,) = [each for each in hf_specdec.integration.kept_decoders(tiny_model) if each.config.method == "auto"]
    report = decoder.policy.report(2)
    assert report["plain_ms"] > 0 and set(report["drafters"]) == set(decoder.generator.drafters)
    hf_specdec.release(tiny_model)


@pytest.mark.parametrize("methods", [["none"], ["none", "ngram"]])
def test_a_part_may_draft_nothing(tiny_model, methods):
    arguments = {**ragged([12, 5], seed=2), "max_new_tokens": 20, "do_sample": False}
    auto = tiny_model.generate(**arguments, speculative_config={"method": "auto", "methods": methods})
    assert auto.tolist() == tiny_model.generate(**arguments).tolist()
    hf_specdec.release(tiny_model)


def counting(calls, name, real):
    """`real`, with its calls counted."""

    def call(*args):
        calls[name] += 1
        return real(*args)

    return call


@pytest.mark.parametrize("num_rows", [1, 4])
def test_steps_that_must_be_plain_ask_and_tell_nobody(tiny_model, monkeypatch, num_rows):
    """No look-up is asked or told, and heads do not follow where that has proved to be too much; a draft model is not called either.
    Later texts begin with all of them."""
    suffix = {"method": "suffix"}
    config = {"method": "auto", "methods": [*PARTS, suffix], "memory": False}
    inputs = ragged([9, 4, 17, 6][:num_rows])
    arguments = {"max_new_tokens": 40, "eos_token_id": [], "do_sample": False}
    plain = tiny_model.generate(**inputs, **arguments)
    tiny_model.generate(**inputs, **arguments, speculative_config=config)
    decoder = get_decoder(tiny_model, parse_config(config), DrafterContext())
    generator, policy, calls = decoder.generator, decoder.policy, Counter()
    monkeypatch.setattr(policy, "is_plain", lambda sequences: True)
    monkeypatch.setattr(policy, "_followed", 1.0)  # a head would take as long as the target
    for name, part in generator.by_name.items():
        for each in ("propose", "observe", "features"):
            if hasattr(part, each):
                monkeypatch.setattr(part, each, counting(calls, f"{name}.{each}", getattr(part, each)))
    tree = generator.by_name["suffix"].spaces.shared[""].trees
    waiting = len(generator.by_name["suffix"].waiting)
    monkeypatch.setattr(tree, "add_active_response", counting(calls, "suffix.add", tree.add_active_response))
    assert tiny_model.generate(**inputs, **arguments, speculative_config=config).tolist() == plain.tolist()
    assert not [name for name in calls if name.endswith("propose")], calls
    assert not calls["token_recycling.observe"] and not calls["suffix.observe"]
    assert (
        not calls["suffix.add"] and len(generator.by_name["suffix"].waiting) == waiting + num_rows
    )  # for the next draft
    assert calls["eagle3.features"] <= 2 and not generator._followed, calls
    policy._of_fresh = 2.0  # and gain more than it takes
    calls.clear()
    assert tiny_model.generate(**inputs, **arguments, speculative_config=config).tolist() == plain.tolist()
    assert calls["eagle3.features"] > 4
    hf_specdec.release(tiny_model)


LONE = {**PARTS[2], "draft_length": "auto"}  # an EAGLE-3 head


@pytest.mark.parametrize(
    "config", [{"method": "auto", "methods": PARTS[2:3], "memory": False}, LONE], ids=["auto", "head"]
)
def test_texts_that_nobody_follows(tiny_model, monkeypatch, config):
    """The only drafter is a head, which rests: it reads no hidden state, and drafts again where that pays."""
    inputs, calls = ragged([9, 4]), Counter()
    plain = tiny_model.generate(**inputs, max_new_tokens=12, do_sample=False)
    decoder = get_decoder(tiny_model, parse_config(config), DrafterContext())
    (head,) = decoder.generator.parts
    monkeypatch.setattr(head, "observe", counting(calls, "observe", head.observe))
    for followed, reads in ((2.0, False), (0.0, True)):
        decoder.policy._followed = followed
        out = tiny_model.generate(**inputs, max_new_tokens=12, do_sample=False, speculative_config=config)
        assert out.tolist() == plain.tolist() and bool(calls["observe"]) == reads
    hf_specdec.release(tiny_model)


def test_a_head_that_learns_never_rests(tiny_model, tmp_path):
    config = {**LONE, "model": str(tmp_path / "head"), "learn": True}
    shutil.copytree(hf_specdec.bundled("tiny-eagle3"), tmp_path / "head")
    assert not isinstance(get_decoder(tiny_model, parse_config(config), DrafterContext()).generator, MayRest)
    hf_specdec.release(tiny_model)


def test_heads_let_go_in_steps_from_the_table_too(tiny_model, monkeypatch):
    """Else one rank, which chooses, would go on with them, and the others would not."""
    config = {"method": "auto", "methods": PARTS[1:3], "memory": False}
    generator, blind = get_decoder(tiny_model, parse_config(config), DrafterContext()).generator, []
    tell = generator._tell_heads
    monkeypatch.setattr(generator.policy, "_followed", 0.0)  # whatever it has measured

    def tell_in_held_step(outcome):
        monkeypatch.setattr(generator.policy, "_followed", 1.0)  # a head would take as long as the target
        monkeypatch.setattr(generator.policy, "holds", True)
        tell(outcome)
        blind.append(not generator._followed)

    monkeypatch.setattr(generator, "_tell_heads", tell_in_held_step)
    tiny_model.generate(**ragged([9]), max_new_tokens=12, do_sample=False, eos_token_id=[], speculative_config=config)
    assert any(blind)
    hf_specdec.release(tiny_model)


def test_requests_name_a_drafter_of_auto(tiny_model, tiny_tokenizer):
    llm = LLM(tiny_model, tiny_tokenizer, {"method": "auto", "methods": PARTS[:3]}, max_model_len=96)
    params = [SamplingParams(temperature=0, max_tokens=12, drafter=name) for name in ("ngram", "eagle3", None)]
    first, *others = [
        each.outputs[0].token_ids for each in llm.generate(["The dog. The dog."] * 3, params, use_tqdm=False)
    ]
    assert all(each == first for each in others)
    with pytest.raises(ValueError, match="ngram, token_recycling, eagle3"):
        llm.generate(["x"], SamplingParams(drafter="medusa"), use_tqdm=False)
    llm.close()


@pytest.mark.parametrize("others", [["ngram"], [PARTS[2]]], ids=["look-up", "head"])
def test_a_named_drafter_drafts_as_deep_as_its_request_may_up_to_the_longest_draft(tiny_model, others):
    """Whatever the policy would choose: with and without look-ups, and for a request that asks for longer drafts than the method's."""
    model = {**PARTS[4], "num_speculative_tokens": 8}
    config = {"method": "auto", "methods": [model, *others], "num_speculative_tokens": 3, "memory": False}
    decoder = get_decoder(tiny_model, parse_config(config))
    sequences = [Sequence([5, 6, 7], 80, drafter="draft_model", num_speculative_tokens=k) for k in (1, 3, 8)]
    decoder.allocate(400, len(sequences))
    with decoder.active():
        for seq in sequences:
            decoder.add(seq)
        for _ in range(20):
            decoder.step(sequences)
    depths = [[depth for _, depth, *_ in decoder.remove(seq).steps] for seq in sequences]
    assert [set(row) - {0} for row in depths] == [{1}, {3}, {3}]
    assert all(row.count(0) < 8 for row in depths), "only steps that measure the target do not draft"
    hf_specdec.release(tiny_model)


def test_rank_0_notes_drafters_that_requests_name_in_its_own_choice():
    """Its policy learns from the drafts of the drafters that made them."""
    made = Choice(np.array([0, 1]), np.array([2, 0]))
    chooser = SimpleNamespace(choose=lambda *_: made)
    ranks = SimpleNamespace(leads=True, same=list)
    assert AgreedChoice(ranks, chooser).choose([None] * 2, [3, 3], [], [], []) is made


def test_prompts_that_the_model_itself_read_are_no_plain_step(tiny_model, monkeypatch):
    """One-token prompts are read before the clock starts."""
    seconds, real = [], Fastest.observe_plain
    monkeypatch.setattr(Fastest, "observe_plain", lambda *args: (seconds.append(args[2]), real(*args))[1])
    embeds = tiny_model.get_input_embeddings()(torch.tensor([[5]]))
    config = {"method": "auto", "methods": ["ngram"], "memory": False}
    tiny_model.generate(inputs_embeds=embeds, max_new_tokens=2, do_sample=False, speculative_config=config)
    assert seconds[0] is None
    hf_specdec.release(tiny_model)


def test_rows_that_do_not_draft_pass_by_the_policy(tiny_model, monkeypatch):
    """It is asked in few steps of a quiet batch, and counts all of them. Nothing of the rows is left afterwards."""
    asked, real = [], Fastest.is_plain
    monkeypatch.setattr(Fastest, "is_plain", lambda self, rows: (asked.append(len(rows)), real(self, rows))[1])
    config, steps = {"method": "auto", "methods": ["ngram"], "memory": False}, 0
    decoder = get_decoder(tiny_model, parse_config(config))
    ids = torch.randint(5, 4000, (8, 12), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        before, asked[:] = decoder.policy.num_steps + decoder._num_passed, []
        out = tiny_model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=150, do_sample=False, eos_token_id=-1, pad_token_id=0,
            return_dict_in_generate=True, speculative_config=config,
        )  # fmt: skip
        steps = max(row["num_steps"] for row in out.speculation["rows"])
    # the policy is told of the last still steps when it is next asked
    assert decoder.policy.num_steps + decoder._num_passed - before == steps and len(asked) < steps / 2
    assert not decoder._still and not decoder._num_still
    hf_specdec.release(tiny_model)


def test_a_sequence_that_names_no_drafter_of_auto_does_not_start(tiny_model):
    generator = get_decoder(
        tiny_model, parse_config({"method": "auto", "methods": ["ngram"], "memory": False})
    ).generator
    with pytest.raises(ValueError, match="There is no drafter 'x': choose one of ngram"):
        generator.start(Sequence([1, 2], 10, drafter="x"))
    hf_specdec.release(tiny_model)


def test_a_memory_in_the_users_home(tiny_model, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = {"method": "auto", "methods": ["ngram"], "memory": "~/memory"}
    kept = get_decoder(tiny_model, parse_config(config)).generator.memory
    assert kept.path.parent == tmp_path / "memory"
    hf_specdec.release(tiny_model)


# ---- configuration --------------------------------------------------------------------------------------------------


def test_forms():
    assert parse_config("auto") == parse_config({"method": "auto"})
    config = parse_config({"method": "auto", "methods": ["ngram", {"method": "suffix"}]})
    assert [part["method"] for part in config.methods] == ["ngram", "suffix"] and config.draft_length == "auto"
    assert parse_config(config.to_json()) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"methods": []}, "must be a list of methods"),
        ({"methods": "ngram"}, "must be a list of methods"),
        ({"methods": ["ngrm"]}, "did you mean 'ngram'"),
        (
            {"methods": [{"method": "hybrid", "first": {"method": "ngram"}, "second": {"method": "ngram"}}]},
            "has parts itself",
        ),
        ({"max_download_gb": -1}, "at least 0"),
        ({"model": 5}, "must be text"),
    ],
    ids=str,
)
def test_bad_values(values, message):
    with pytest.raises(SpeculativeConfigError, match=message):
        parse_config({"method": "auto", **values})


def test_a_drafter_that_was_asked_for_must_work(tiny_model):
    with pytest.raises(SpeculativeConfigError, match="neither a bundled name nor a folder"):
        tiny_model.generate(torch.tensor([[1, 2]]), speculative_config={"method": "auto", "model": "no/such-head"})


# ---- what is found --------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty local cache; `add(repo, source, ...)` puts a folder into it as the Hub's client would."""
    root = tmp_path / "hub"
    root.mkdir()
    monkeypatch.setattr(hub, "scan_cache_dir", lambda scan=hub.scan_cache_dir: scan(root))

    def add(repo, source, card=None, config=None):
        folder = root / f"models--{repo.replace('/', '--')}"
        snapshot = folder / "snapshots" / "0123"
        shutil.copytree(source, snapshot)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0123")
        (folder / "blobs").mkdir()
        if card is not None:
            (snapshot / "README.md").write_text(card)
        if source == TINY:
            other_words(snapshot)
        if config:
            values = json.loads((snapshot / "config.json").read_text())
            (snapshot / "config.json").write_text(json.dumps({**values, **config}))
        return snapshot

    return add


def target(folder, **values):
    """A model that was loaded from a folder, which may have had the name of a Hub model."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for name, value in values.items():
        setattr(model.config, name, value)
    return model


def found_for(model, **values):
    decoder = get_decoder(model, parse_config({"method": "auto", **values}), DrafterContext())
    return decoder.generator


def other_words(folder):
    """Give a copy of the bundled model a tokenizer of its own, so that no bundled model is a small one of its vocabulary."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = list(words)[310:312]
    words[first], words[second] = words[second], words[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


TINY = Path(hf_specdec.bundled("tiny"))
CARD = "---\nbase_model: {}\n---\n"


def test_a_bundled_head(tiny_model):
    generator = found_for(target(TINY))
    assert "the bundled tiny-eagle3" in str(generator.search) and "the bundled tiny-draft" in str(generator.search)
    assert generator.drafters[generator.num_lookups :] == ["eagle3", "draft_model"]
    assert {"ngram", "token_recycling"} < set(generator.drafters[: generator.num_lookups])


def test_look_ups_where_there_is_nothing_else(cache, tmp_path):
    other_words(shutil.copytree(TINY, tmp_path / "mine"))
    generator = found_for(target(tmp_path / "mine"))
    assert len(generator.drafters) == generator.num_lookups and "needs no model" in str(generator.search)


def test_own_mtp_layers_come_first(cache, tmp_path):
    """The target's folder with the bundled MTP module in it, as DeepSeek-V3's checkpoints have theirs."""
    folder = tmp_path / "mine"
    shutil.copytree(TINY, folder)
    tensors = load_file(TINY / "model.safetensors")
    module = load_file(Path(hf_specdec.bundled("tiny-mtp")) / "model.safetensors")
    save_file({**tensors, **module}, folder / "model.safetensors")
    generator = found_for(target(folder))
    assert "mtp (the target's own MTP layers)" in str(generator.search)
    assert generator.drafters[generator.num_lookups :] == ["mtp", "draft_model"]


def test_files_of_the_target_that_are_damaged_are_noted(cache, tmp_path):
    """Its MTP layers are then not found. Files without such layers are worth no word."""
    model = target(other_words(shutil.copytree(TINY, tmp_path / "mine")))
    assert not [note for note in found_for(model).search.notes if "MTP" in note]
    hf_specdec.release(model)
    (tmp_path / "mine" / "model.safetensors.index.json").write_text("{")
    (note,) = [note for note in found_for(model).search.notes if "MTP" in note]
    assert note.startswith("the target's own MTP layers: ") and "index.json is not valid JSON" in note


def test_a_head_in_the_local_cache_by_its_card(cache):
    snapshot = cache("org/target", TINY)
    cache("org/target-eagle", hf_specdec.bundled("tiny-eagle"), CARD.format("org/target"))
    cache("org/target-medusa", hf_specdec.bundled("tiny-medusa"), CARD.format("[org/target, org/other]"))
    cache("org/others-eagle3", hf_specdec.bundled("tiny-eagle3"), CARD.format("org/other"))
    cache("org/broken-card", hf_specdec.bundled("tiny-eagle3"), "---\n: [\n---\n")
    generator = found_for(target(snapshot))
    assert generator.drafters[-1] == "eagle" and "org/target-eagle, in the local cache" in str(generator.search)


def test_a_head_that_does_not_fit_is_left_out_with_its_reason(cache):
    snapshot = cache("org/target", TINY)
    cache("org/broken", hf_specdec.bundled("tiny-eagle3"), CARD.format("org/target"), {"hidden_size": 128})
    generator = found_for(target(snapshot))
    assert len(generator.drafters) == generator.num_lookups
    (note,) = [note for note in generator.search.notes if "org/broken" in note]
    assert "hidden" in note or "shape" in note
    out = generator.target.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, speculative_config="auto")
    assert out.shape[1] > 3


def test_a_small_model_with_the_same_vocabulary(cache):
    snapshot = cache("org/target", TINY)
    cache("org/small", hf_specdec.bundled("tiny-draft"), CARD.format("org/elsewhere"))
    other = cache("org/other-words", hf_specdec.bundled("tiny-draft"), CARD.format("org/elsewhere"))
    tokenizer = json.loads((snapshot / "tokenizer.json").read_text())
    (snapshot.parent.parent.parent / "models--org--small" / "snapshots" / "0123" / "tokenizer.json").write_text(
        json.dumps(tokenizer)
    )
    words = tokenizer["model"]["vocab"]
    first, second = list(words)[300:302]
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    generator = found_for(target(snapshot))
    line = str(generator.search)
    assert generator.drafters[-1] == "draft_model" and "draft_model (org/small, in the local cache)" in line
    assert "org/other-words, in the local cache: small enough, but it has another vocabulary" in line
    assert len(line.splitlines()) == 1


class Hub:
    """Answers as the Hub would."""

    def __init__(self, models, error=None):
        self.models, self.error = models, error

    def list_models(self, filter, **others):
        if self.error:
            raise self.error
        wanted = filter.removeprefix("base_model:")
        return [
            SimpleNamespace(id=id, tags=each.get("tags", []))
            for id, each in self.models.items()
            if each["of"] == wanted
        ]

    def model_info(self, repo, files_metadata):
        each = self.models[repo]
        files = [SimpleNamespace(rfilename=name, size=size) for name, size in each.get("files", {}).items()]
        return SimpleNamespace(gated=each.get("gated", False), siblings=files)


@pytest.fixture
def online(monkeypatch, cache):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "published_heads", lambda target_id: [])

    def answering(models, error=None):
        monkeypatch.setattr(hub, "HfApi", lambda: Hub(models, error))
        return cache("org/target", TINY)

    return answering


HEAD = {"of": "org/target", "tags": ["eagle3"], "files": {"model.safetensors": 10**8}}


def downloads_to(monkeypatch, folder):
    """Hub ids of heads resolve to a folder, as if they had been downloaded."""
    taken = []

    def drafting(real=discovery._drafting, **keys):
        model = keys.get("model", "")
        if "/" in model and not Path(model).exists():
            taken.append(model)
            keys["model"] = folder
        return real(**keys)

    monkeypatch.setattr(discovery, "_drafting", drafting)
    return taken


def test_a_head_on_the_hub(online, monkeypatch):
    taken = downloads_to(monkeypatch, hf_specdec.bundled("tiny-eagle3"))
    models = {
        "some/quantized": {**HEAD, "tags": ["eagle3", "base_model:quantized:org/target"]},
        "some/head-eagle3": HEAD,
    }
    generator = found_for(target(online(models)))
    assert taken == ["some/head-eagle3"] and "some/head-eagle3 (eagle3, 0.1 GB), from the Hub" in str(generator.search)


@pytest.mark.parametrize(
    ("models", "error", "values", "line"),
    [
        ({"some/head": {**HEAD, "gated": "auto"}}, None, {}, "some/head: gated"),
        (
            {"some/head": {**HEAD, "files": {"model.safetensors": 5 * 10**9}}},
            None,
            {},
            "some/head (eagle3, 5.0 GB): set max_download_gb",
        ),
        ({"some/head": HEAD}, None, {"max_download_gb": 0}, "0.1 GB): set max_download_gb"),
        ({"some/head": {**HEAD, "files": {"pytorch_model.bin": 10**8}}}, None, {}, "some/head: no safetensors"),
        ({}, ConnectionError("no route"), {}, "heads on the Hub: the Hub cannot be reached (ConnectionError)"),
        ({"some/model": {**HEAD, "tags": ["text-generation"]}}, None, {}, "auto: drafting with"),
    ],
    ids=["gated", "too big", "no downloads", "pickles", "unreachable", "no head"],
)
def test_heads_that_cannot_be_had(online, monkeypatch, models, error, values, line):
    taken = downloads_to(monkeypatch, "nowhere")
    generator = found_for(target(online(models, error)), **values)
    assert not taken and len(generator.drafters) == generator.num_lookups
    assert line in str(generator.search) and len(str(generator.search).splitlines()) == 1


def test_generate_never_fails_for_what_it_could_not_find(online, monkeypatch):
    """Whatever the Hub and the cache answer, the text is the target's own."""
    downloads_to(monkeypatch, "nowhere")  # a head that is found there cannot be loaded
    answers = [{"some/head": {**HEAD, "gated": "auto"}}, {"some/head": HEAD}, {}]
    inputs = torch.tensor([[5, 6, 7]])
    model = target(online({}, ConnectionError("no route")))
    plain = model.generate(inputs, max_new_tokens=8, do_sample=False)
    for models in answers:
        monkeypatch.setattr(hub, "HfApi", lambda models=models: Hub(models))
        hf_specdec.release(model)
        out = model.generate(inputs, max_new_tokens=8, do_sample=False, speculative_config="auto")
        assert out.tolist() == plain.tolist()


def test_known_heads_offline(cache, monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    generator = found_for(target(cache("Qwen/Qwen3-8B", TINY)))
    assert "AngelSlim/Qwen3-8B_eagle3 (eagle3, published τ 1.97 on MT-bench): offline" in str(generator.search)


def test_the_table_of_published_heads():
    """Llama 3's two spellings are one, sizes are known, and every method has a rank."""
    assert all(head.method in hub._KINDS for _, head in hub.known_heads())
    new, old = (hub.published_heads(f"meta-llama/{name}-8B-Instruct") for name in ("Llama-3.1", "Meta-Llama-3.1"))
    assert new == old and new[0].method == "eagle3"
    (head,) = hub.published_heads("Qwen/Qwen3-32B-FP8")
    assert head.gigabytes == 6.4 and head.about == ", 6.4 GB, published τ 2.46 on ShareGPT, SGLang, concurrency 8"


def test_the_check_of_published_heads(monkeypatch, capsys):
    """scripts/check_published_heads.py: the table passes; every kind of fault is found; so is a head that is gone."""
    check = load_script(ROOT / "scripts" / "check_published_heads.py")
    rows = json.loads(hub.TABLE.read_text(encoding="utf-8"))
    assert check.main([]) == 0 and capsys.readouterr().out == f"{len(rows)} rows, 0 problems\n"
    wrong = [
        ({"size": 1}, "has the keys"),
        ({"head": "no-owner"}, "'head' is not of the form"),
        ({"method": "eagle9"}, "no method 'eagle9'"),
        ({"source": ""}, "has no source"),
        ({"tau": 2.0, "task": None}, "has a task"),
        ({"gigabytes": 0}, "'gigabytes' is positive"),
        ({key: rows[1][key] for key in ("target", "head")}, "is there twice"),
        ({"target": "zz/last"}, "belongs before"),
    ]
    for change, message in wrong:
        found = list(check.problems([rows[0] | change, rows[1]]))
        assert any(message in line for line in found), (message, found)

    def model_info(self, head):
        if head == "google/gemma-4-E2B-it-assistant":
            raise RepositoryNotFoundError("gone", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(check.HfApi, "model_info", model_info)
    assert check.main(["--online"]) == 1
    assert capsys.readouterr().out.startswith("google/gemma-4-E2B-it-assistant: is not on the Hub\n")


def test_gated_errors_are_http_errors():
    """`_sized` relies on it."""
    assert issubclass(GatedRepoError, hub.HfHubHTTPError)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_explain(capsys):
    from hf_specdec.cli import main

    assert main(["explain", "tiny", "--limit", "3", "--max-new-tokens", "24", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"method": "eagle3", "from": "the bundled tiny-eagle3"} in report["drafters"]
    assert (
        report["plain_ms"] > 0
        and report["mean_accepted_length"] >= 1
        and set(report["measured"]) >= {"ngram", "eagle3", "draft_model", "auto"}
    )
    for name in ("eagle3", "draft_model"):  # heads are measured too, although auto may not ask them
        figures = report["measured"][name]
        assert (
            figures["milliseconds"] > 0 and figures["speed_up_over_none"] > 0 and figures["mean_accepted_length"] > 1.2
        )
    assert main(["explain", "tiny", "--no-measurement"]) == 0
    assert "drafts with eagle3: the bundled tiny-eagle3" in capsys.readouterr().out
    bounded = '{"method": "auto", "methods": ["ngram"], "disable_by_batch_size": 4, "memory": false}'
    assert main(["explain", "tiny", "--limit", "1", "--max-new-tokens", "4", "--speculative-config", bounded]) == 0
    assert "ngram" in capsys.readouterr().out
    assert main(["explain", "tiny", "--speculative-config", '{"method": "ngram"}']) == 2
    assert "needs 'auto'" in capsys.readouterr().err


def test_what_no_step_has_shown_is_unknown(tiny_model):
    config = {
        "method": "auto",
        "methods": [{"method": "ngram"}, {"method": "eagle3", "model": "tiny-eagle3"}],
        "memory": False,
    }
    output = tiny_model.generate(
        **ragged([12]), max_new_tokens=1, do_sample=False, speculative_config=config, return_dict_in_generate=True
    )
    assert output.speculation["drafters"] == output.speculation["rows"][0]["drafters"] == {}
    (decoder,) = hf_specdec.integration.kept_decoders(tiny_model)
    drafters = decoder.policy.report()["drafters"]
    assert drafters["eagle3"].pop("milliseconds") > 0  # measured when the decoder was made
    assert drafters["eagle3"] == {"acceptance": None, "steps": 0}
    assert drafters["ngram"]["acceptance"] is None
    hf_specdec.release(tiny_model)


@pytest.mark.parametrize("value", [None, 5, [], ""])
def test_a_memory_that_is_no_folder(value):
    with pytest.raises(SpeculativeConfigError, match=r"\['memory'\].*must be true, false or a folder"):
        parse_config({"method": "auto", "memory": value})
