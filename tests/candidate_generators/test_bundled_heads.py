"""The heads that come with the package: what they are made of, that they change no output, and that they are worth having."""

import functools
import json
from pathlib import Path

import pytest
import torch
from combinations import every_second
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_specdec
from hf_specdec.candidate_generators import make_generator
from hf_specdec.model.options import prepacked
from hf_specdec.model.prepare import prepare

HEADS = {
    "tiny-eagle": "eagle",
    "tiny-eagle3": "eagle3",
    "tiny-mtp": "mtp",
    "tiny-mlp_speculator": "mlp_speculator",
    "tiny-medusa": "medusa",
    "tiny-hydra": "hydra",
    "tiny-dflash": "dflash",
}
MOST_BYTES = 25e6
CHAIN = {
    "medusa": {"branching_factors": [1, 1, 1, 1]},
    "hydra": {"branching_factors": [1, 1, 1]},
    "mlp_speculator": {"branching_factors": [1, 1, 1]},
    "dflash": {},
}
TREE = {
    "medusa": {"branching_factors": [4, 2, 2, 1]},
    "hydra": {"branching_factors": [4, 2, 2]},
    "mlp_speculator": {"branching_factors": [3, 2, 1]},
}
DYNAMIC = {"depth": 4, "top_k": 3, "total_tokens": 14}


def shapes_of(method: str) -> dict[str, dict]:
    """Configurations of a method by shape; a block of DFlash is a chain."""
    shapes = {"chain": CHAIN.get(method, {"num_speculative_tokens": 5})}
    if method != "dflash":
        shapes["tree"] = TREE.get(method, DYNAMIC)
    return shapes


CASES = [(name, shape) for name, method in HEADS.items() for shape in shapes_of(method)]


def config_of(name: str, shape: str) -> dict:
    return {"model": name, **shapes_of(HEADS[name])[shape]}


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer) -> list[str]:
    path = Path(hf_specdec.bundled("tiny")).parent / "prompts.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows[::6]]
    return [tiny_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]


def encoded(tokenizer, texts):
    return tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False)


@pytest.fixture(scope="module")
def plain(tiny_model, tiny_tokenizer, prompts):
    """Inputs and plain greedy output of a ragged batch and of one row."""
    inputs = {"batch": encoded(tiny_tokenizer, prompts), "single": encoded(tiny_tokenizer, prompts[:1])}
    return {
        name: (each, tiny_model.generate(**each, max_new_tokens=32, do_sample=False)) for name, each in inputs.items()
    }


def test_every_kind_is_there_and_they_are_small():
    assert set(HEADS) <= set(hf_specdec.bundled_names())
    folders = [Path(hf_specdec.bundled(name)) for name in HEADS]
    assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) <= MOST_BYTES
    assert not any((folder / "training").exists() for folder in folders)


@pytest.mark.parametrize("name", HEADS)
def test_cards_name_target_data_licence_and_measured_acceptance(name):
    card = (Path(hf_specdec.bundled(name)) / "README.md").read_text(encoding="utf-8")
    for text in ("base_model: tiny", "license: apache-2.0", "recipes/tiny", "| math |", "| code |", "| all |"):
        assert text in card, text
    assert f"\n# {name}\n" in card and f'speculative_config={{"model": "{name}"}}' in card


@pytest.mark.parametrize("name", HEADS)
def test_weights_are_half_precision_and_the_method_is_inferred(name):
    from safetensors import safe_open

    for path in Path(hf_specdec.bundled(name)).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            kinds = {file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118
        assert all(kind == torch.float16 for kind in kinds if kind.is_floating_point)
    assert hf_specdec.parse_config({"model": name}).method == HEADS[name]


@pytest.mark.parametrize(("name", "shape"), every_second(CASES))
def test_greedy_output_is_plain_generates(tiny_model, plain, name, shape):
    drafted = 0
    for inputs, expected in plain.values():
        out = tiny_model.generate(
            **inputs,
            max_new_tokens=32,
            do_sample=False,
            speculative_config=config_of(name, shape),
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, expected)
        drafted += out.speculation["num_accepted_tokens"]
        assert out.speculation["mean_accepted_length"] > 1.15
    assert drafted > 0


# By default one case per head, by turns.
SAMPLED_CASES = [
    pytest.param(
        name, shape, rule,
        marks=()
        if (shape, rule) == (("tree", "coupled") if i % 2 and "tree" in shapes_of(method) else ("chain", "rejection"))
        else pytest.mark.slow,
    )
    for i, (name, method) in enumerate(HEADS.items())
    for shape in shapes_of(method)
    for rule in ("coupled", "rejection")
]  # fmt: skip
SAMPLED = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.7, "top_k": 0}


@pytest.fixture(scope="module")
def sampled(tiny_model, plain):
    """What no speculation gives with the seed."""
    return tiny_model.generate(**plain["batch"][0], **SAMPLED, speculative_config={"method": "none", "seed": 5})


@pytest.mark.parametrize(("name", "shape", "rule"), SAMPLED_CASES)
def test_sampling(tiny_model, plain, sampled, name, shape, rule):
    """Coupled sampling gives what no speculation gives with the seed; rejection runs and accepts."""
    config = {**config_of(name, shape), "rejection_sample_method": rule, "seed": 5}
    out = tiny_model.generate(**plain["batch"][0], **SAMPLED, speculative_config=config, return_dict_in_generate=True)
    assert out.speculation["num_accepted_tokens"] > 0
    if rule == "coupled":
        assert torch.equal(out.sequences, sampled)


@pytest.fixture(scope="module")
def accepted_length(tiny_model, plain):
    """τ of a head in a shape on the ragged batch, measured once."""

    @functools.cache
    def measured(name: str, shape: str) -> float:
        out = tiny_model.generate(
            **plain["batch"][0],
            max_new_tokens=48,
            do_sample=False,
            speculative_config=config_of(name, shape),
            return_dict_in_generate=True,
        )
        return out.speculation["mean_accepted_length"]

    return measured


@pytest.mark.long
@pytest.mark.parametrize(("deep", "flat"), [("tiny-hydra", "tiny-medusa"), ("tiny-eagle3", "tiny-medusa")])
def test_heads_that_read_the_drafted_tokens_accept_more(accepted_length, deep, flat):
    assert accepted_length(deep, "chain") > accepted_length(flat, "chain")


@pytest.mark.long
@pytest.mark.parametrize("name", ["tiny-eagle3", "tiny-medusa"])
def test_trees_accept_more_than_chains(accepted_length, name):
    assert accepted_length(name, "tree") > accepted_length(name, "chain")


class StopsRows(StoppingCriteria):
    """Rows stop one by one at places that depend on their text alone."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -2:].sum(1) + 3 * input_ids.shape[1]) % 17 == 0


OTHERS = {
    "ngram": {}, "suffix": {}, "token_recycling": {}, "lookahead": {}, "draft_model": {"model": "tiny-draft"},
    "hybrid": {"first": {"method": "suffix"}, "second": {"method": "eagle3", "model": "tiny-eagle3"}},
}  # fmt: skip


STOPPED = {"max_new_tokens": 20, "do_sample": False, "stopping_criteria": StoppingCriteriaList([StopsRows()])}


@pytest.fixture(scope="module")
def stopped(tiny_model, tiny_tokenizer, plain):
    """Plain greedy output of the ragged batch whose rows stop one by one."""
    expected = tiny_model.generate(**plain["batch"][0], **STOPPED)
    ends = (expected != tiny_tokenizer.pad_token_id).sum(1)
    assert len(set(ends.tolist())) > 3, "rows do not stop one by one"
    return expected


@pytest.mark.parametrize("name", [*HEADS, *OTHERS])
def test_rows_stopped_while_their_next_step_is_pending(tiny_model, plain, stopped, name):
    """Asynchronous scheduling, for every drafter: the step that is forgotten leaves no trace in the rows that go on."""
    if name in ("suffix", "hybrid"):
        pytest.importorskip("arctic_inference.suffix_decoding")
    config = config_of(name, "chain") if name in HEADS else {"method": name, **OTHERS[name]}
    out = tiny_model.generate(**plain["batch"][0], **STOPPED, speculative_config={**config, "async_scheduling": True})
    assert torch.equal(out, stopped)


@pytest.mark.parametrize("name", ["tiny-eagle", "tiny-eagle3", "tiny-mtp", "tiny-dflash"])
def test_a_head_in_use_is_prepacked_as_each_configuration_says(tiny_model, monkeypatch, name):
    monkeypatch.setattr(prepacked, "_FLOAT32_WEIGHTS", 1)
    target, drafters = prepare(tiny_model), []
    for wanted in (False, True, False):
        drafters.append(make_generator(hf_specdec.parse_config({"model": name, "prepack_weights": wanted}), target))
    assert [drafter.head.linears is not None for drafter in drafters] == [False, True, False]
