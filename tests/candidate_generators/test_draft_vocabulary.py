"""`draft_vocabulary`: every kind of drafter scores some rows of its head, and no text changes."""

import json

import numpy as np
import pytest
import torch
from helpers_dflash import make
from helpers_drafters import assert_refused, kept_proposals
from helpers_eagle3 import write
from oracle import tiny_llama

import hf_specdec
from hf_specdec import integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.candidate_generators.growing.grower import GrowsDrafts
from hf_specdec.candidate_generators.growing.own_cache import OwnsCache
from hf_specdec.cli import main

DRAFTERS = {
    "eagle": {"model": "tiny-eagle", "num_speculative_tokens": 4},
    "eagle tree": {"model": "tiny-eagle", "depth": 3, "top_k": 3, "total_tokens": 12},
    "eagle3": {"model": "tiny-eagle3", "num_speculative_tokens": 4},
    "mtp": {"model": "tiny-mtp", "num_speculative_tokens": 3},
    "dflash": {"model": "tiny-dflash"},
    "medusa": {"model": "tiny-medusa"},
    "mlp_speculator": {"model": "tiny-mlp_speculator"},
    "draft_model": {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 4},
}
NEW = 24


@pytest.fixture(scope="module")
def inputs(tiny_tokenizer):
    questions = ["Tom has 3 apples and buys 4 more. How many has he?", "Write a story about a fox."]
    return tiny_tokenizer(
        [f"<|user|>{each}<|end|><|assistant|>" for each in questions], return_tensors="pt", padding=True
    )


@pytest.fixture(scope="module")
def texts(tiny_model, inputs):
    """Plain greedy text, and sampled text without drafts."""
    sampled = {"do_sample": True, "speculative_config": {"method": "none", "seed": 3}}
    return [tiny_model.generate(**inputs, max_new_tokens=NEW, **more) for more in ({}, sampled)]


@pytest.fixture(scope="module")
def chosen(texts, tmp_path_factory):
    """A file with a sixteenth of the tokens: most of those in the plain text, in no order."""
    written = texts[0].flatten().unique()
    ids = list(dict.fromkeys([*reversed(written[: len(written) * 3 // 4].tolist()), *range(3000, 4096, 9)]))
    path = tmp_path_factory.mktemp("ids") / "ids.json"
    path.write_text(json.dumps(ids))
    return str(path), ids


def scores_of_first_round(decoder, call):
    """The first round's scores [R, V] of the tokens after the texts, and the call's result."""
    vocabulary, seen = decoder.generator.vocabulary, []
    scores = vocabulary.scores
    vocabulary.scores = lambda logits: seen.append(scores(logits)) or seen[-1]
    try:
        result = call()
    finally:
        del vocabulary.scores
    return seen[0], result


@pytest.mark.parametrize("name", DRAFTERS)
def test_chosen_rows_are_scored_and_texts_stay(tiny_model, inputs, texts, chosen, name, monkeypatch):
    monkeypatch.setattr(OwnsCache, "at_once", GrowsDrafts.at_once)  # which score where nobody sees it
    path, ids = chosen
    scores = []
    for config in (DRAFTERS[name], DRAFTERS[name] | {"draft_vocabulary": path}):
        decoder = integration.get_decoder(tiny_model, parse_config(config))
        drafts = kept_proposals(decoder.generator)

        def call(config=config):
            return tiny_model.generate(
                **inputs, max_new_tokens=NEW, speculative_config=config, return_dict_in_generate=True
            )

        first, out = scores_of_first_round(decoder, call)
        assert torch.equal(out.sequences, texts[0]) and out.speculation.num_accepted_tokens > 0
        scores.append(first)
    outside = torch.ones(4096, dtype=torch.bool).index_fill(0, torch.tensor(ids), False)
    torch.testing.assert_close(scores[1][:, ids], scores[0][:, ids], rtol=1e-4, atol=1e-4)
    assert (scores[1][:, outside] == float("-inf")).all() and not scores[0][:, outside].isinf().any()
    tokens = {int(t) for trees in drafts for row, n in zip(trees.tokens, trees.lengths, strict=True) for t in row[:n]}
    assert tokens and tokens <= set(ids)
    sampled = tiny_model.generate(**inputs, max_new_tokens=NEW, do_sample=True, speculative_config=config | {"seed": 3})
    assert torch.equal(sampled, texts[1])
    hf_specdec.release(tiny_model)


def test_forms_of_files_and_numbers(tiny_model, tiny_tokenizer, tmp_path):
    ids, config = [7, 300, 2, 41], DRAFTERS["medusa"]
    for name, content in (("ids.json", "[7, 300,\n 2, 41]"), ("ids.txt", "7\n300\n2\n41\n"), ("ids", " [7,300,2,41]")):
        (tmp_path / name).write_text(content)
    np.save(tmp_path / "ids.npy", np.array(ids, dtype=np.int32))
    torch.save(ids, tmp_path / "list.pt")
    torch.save(torch.tensor(ids), tmp_path / "tensor.pt")
    for path in tmp_path.iterdir():
        decoder = integration.get_decoder(tiny_model, parse_config(config | {"draft_vocabulary": str(path)}))
        assert decoder.generator.vocabulary.target_ids.tolist() == ids
    counted = integration.get_decoder(tiny_model, parse_config(config | {"draft_vocabulary": 700}))
    kept = counted.generator.vocabulary.target_ids.tolist()
    assert len(set(kept)) == 700 and tiny_tokenizer.encode(" the")[-1] in kept[:20] and set(range(90)) <= set(kept)
    hf_specdec.release(tiny_model)


BAD = {
    "missing": (None, "cannot be read from .*No such file"),
    "out of range": ("[1, 4096]", "holds the id 4096: .* different ids of the target's 4096"),
    "negative": ("-1\n3", "holds the id -1"),
    "repeated": ("[5, 6, 5]", "holds an id twice"),
    "empty": ("", "holds no id"),
    "not a list": ('{"ids": [1]}', "holds no list of token ids"),
    "not numbers": ("[1, 2.5]", "holds no list of token ids"),
    "words": ("the\nof", "cannot be read from .*'the'"),
    "broken": ("[1, 2", "cannot be read from"),
    "broken.pt": ("[1, 2", "cannot be read from"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(tiny_model, tmp_path, name):
    content, says = BAD[name]
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    assert_refused(tiny_model, DRAFTERS["mtp"] | {"draft_vocabulary": str(path)}, says)


def test_what_cannot_be_reduced(tiny_model, tmp_path):
    for number in (0, 4097, True, 1.5, [3]):
        assert_refused(
            tiny_model, DRAFTERS["mtp"] | {"draft_vocabulary": number}, "must be a file, or a number of tokens"
        )
    assert_refused(tiny_model, {"model": "tiny-hydra", "draft_vocabulary": 9}, "'hydra' cannot be used")
    learning = {"model": "tiny-mlp_speculator", "learn": str(tmp_path / "learnt"), "draft_vocabulary": 9}
    assert_refused(tiny_model, learning, "cannot be combined with 'learn'")
    assert_refused(tiny_model, {"method": "draft_model", "early_exit": 2, "draft_vocabulary": 9}, "name it in 'model'")
    small = tiny_llama()
    ids = tmp_path / "ids.txt"
    ids.write_text("3\n4")
    write(tmp_path / "eagle3", "yuhuili")
    assert_refused(
        small, {"model": str(tmp_path / "eagle3"), "draft_vocabulary": str(ids)}, "draft vocabulary in its file"
    )
    make(tmp_path / "dspark", small, head="dspark")
    assert_refused(small, {"model": str(tmp_path / "dspark"), "draft_vocabulary": str(ids)}, "MarkovHead corrects")


def test_command(tiny_model, tiny_tokenizer, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "ids.json"
    prompts.write_text("Write a story about a fox.\nWhat is 2 + 2?")
    argv = ["calibrate", "tiny", "--prompts", str(prompts), "--no-chat", "--max-new-tokens"]
    assert main([*argv, "12", "--draft-vocabulary", "5", "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    written = []
    for prompt in prompts.read_text().splitlines():
        ids = tiny_tokenizer(prompt, return_tensors="pt")["input_ids"]
        written += tiny_model.generate(ids, max_new_tokens=12)[0, ids.shape[1] :].tolist()
    ids = json.loads(out.read_text())
    assert ids == sorted(set(written), key=lambda token: (-written.count(token), token))[:5]
    share = 100 * sum(token in ids for token in written) / len(written)
    assert f"{len(ids)} of {len(set(written))} different tokens: {share:.1f} % of {len(written)}" in lines[-2]
    config = DRAFTERS["mtp"] | json.loads(lines[-1])
    assert integration.get_decoder(tiny_model, parse_config(config)).generator.vocabulary.target_ids.tolist() == ids
    hf_specdec.release(tiny_model)
    assert main([*argv, "0", "--draft-vocabulary", "3"]) == 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])) <= set(
        tiny_tokenizer(prompts.read_text().replace("\n", ""))["input_ids"]
    )
    for wrong in (
        ["0", "--speculative-config", "mtp"],
        ["4", "--speculative-config", "mtp", "--draft-vocabulary", "9"],
    ):
        assert main([*argv, *wrong]) == 2
