"""Predicted outputs: drafts follow edits, and whatever is predicted, every method writes what it writes without."""

import gc
import importlib.util
import weakref

import pytest
import torch
from combinations import covering
from recurrent_families import make

import hf_specdec
from hf_specdec import SpeculativeConfigError
from hf_specdec.candidate_generators.prediction import BAND, LONGEST, SHORTEST, Prediction
from hf_specdec.core.sequence import Sequence
from hf_specdec.decoding import decoder as decoder_module
from hf_specdec.serve import LLM, SamplingParams

METHODS = [
    {"method": "none"},
    {"method": "ngram", "num_speculative_tokens": 3},
    {"method": "suffix"},
    {"method": "token_recycling"},
    {"method": "lookahead"},
    {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3},
    {"method": "draft_model", "model": "tiny-draft", "branching_factors": [2, 2]},
    {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": "auto"},
    {"method": "eagle", "model": "tiny-eagle"},
    {"method": "eagle3", "model": "tiny-eagle3"},
    {"method": "medusa", "model": "tiny-medusa"},
    {"method": "hydra", "model": "tiny-hydra"},
    {"method": "mlp_speculator", "model": "tiny-mlp_speculator"},
    {"method": "mtp", "model": "tiny-mtp"},
    {"method": "dflash", "model": "tiny-dflash"},
    {"method": "hybrid", "first": {"method": "ngram"}, "second": {"method": "eagle3", "model": "tiny-eagle3"}},
    {"method": "hybrid", "strategy": "extend", "first": {"method": "draft_model", "model": "tiny-draft"}, "second": {"method": "ngram"}},
    {"method": "auto", "memory": False},
]  # fmt: skip


# ---- alignment ------------------------------------------------------------------------------------------------------


def along(text, prediction, step=1):
    """What is expected after each of the text's beginnings, and the row's prediction at the end."""
    seq = Sequence([7, 7], 10**6)
    seq.prediction, found = Prediction(prediction), []
    for start in range(0, len(text), step):
        found.append(seq.prediction.continuation(seq))
        seq.tokens += text[start : start + step]
    return [*found, seq.prediction.continuation(seq)], seq


@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize(
    ("start", "end", "inserted"),
    [(40, 41, 1), (40, 41, 3), (40, 44, 1), (40, 40, 30), (40, 90, 0), (40, 900, 4), (0, 2, 2), (0, 0, 90), (0, 60, 0)],
)
def test_drafts_go_on_after_an_edit(start, end, inserted, step):
    """A span of the prediction is replaced by other tokens: after at most a few tokens that agree, drafts are right again."""
    prediction = list(range(1000, 2200))
    text = prediction[:start] + list(range(5, 5 + inserted)) + prediction[end:]
    found, _ = along(text, prediction, step)
    right = [draft[:1] == text[i * step :][:1] for i, draft in enumerate(found[:-1])]
    first = (start + inserted) // step + 6  # log2 of the edit's size, over two
    assert all(right[1 : start // step]) and all(right[first:])
    lengths = [len(draft) for draft in found[:-1]]
    assert max(lengths) == LONGEST and min(lengths[first : first + 2]) >= SHORTEST
    assert found[-1] == prediction[len(prediction) :]


def test_small_edits_come_before_large_ones():
    """The text fits at several places: the nearest one counts, until the text itself says otherwise."""
    block = [10, 11, 12, 13]
    prediction = [1, 2, 3, *block, 4, *block, 5, *block, 6]
    found, seq = along([1, 2, 99, *block[:2]], prediction)
    assert found[-1][:3] == [12, 13, 4]
    seq.tokens += [12, 13, 5, 10]  # it was the second one
    assert seq.prediction.continuation(seq)[:2] == [11, 12]


@pytest.mark.parametrize("new", [[50, 51, 52, 7, 8], [50, 51, 9], [6, 9, 52]])
def test_an_edit_is_expected_again(new):
    """Another name for a variable, which one place keeps: after it was seen, a draft brings the whole of it."""
    kept = 5
    prediction = [token for i in range(9) for token in (2, 3, 50, 51, 52, *range(100 * i + 100, 100 * i + 112))]
    text = [
        token
        for i in range(9)
        for token in (2, 3, *([50, 51, 52] if i == kept else new), *range(100 * i + 100, 100 * i + 112))
    ]
    seq, num_steps = Sequence([7, 7], 10**6, prediction=Prediction(prediction)), []
    while seq.num_generated < len(text):
        draft, rest = seq.prediction.continuation(seq), text[seq.num_generated :]
        same = next(
            (i for i, (a, b) in enumerate(zip(draft, rest, strict=False)) if a != b), min(len(draft), len(rest))
        )
        seq.tokens += rest[: same + 1]
        num_steps.append(same + 1)
    assert len(num_steps) <= 15 and max(num_steps) > 17, num_steps


def test_editing_alike_is_bounded():
    """Where everything is alike, neither the prediction nor the time grows with the edits."""
    _, seq = along([5, 5, *[1, 2, 3, 5, 5, 5, 5] * 100], [5] * 600)
    assert len(seq.prediction.ids) < 3 * 1024 + 600


def test_a_text_that_does_not_follow_is_left_alone():
    generator = torch.Generator().manual_seed(0)
    text, prediction = (torch.randint(0, 300, (500,), generator=generator).tolist() for _ in range(2))
    found, _ = along(text, prediction)
    assert sum(map(bool, found)) < 50


def test_tokens_that_were_taken_back_are_forgotten():
    prediction = list(range(100, 150))
    _, seq = along([*prediction[:10], 1, 2, 3], prediction)
    del seq.tokens[2 + 8 :]
    assert seq.prediction.continuation(seq, 4) == prediction[8:12]
    _, seq = along(prediction, prediction)
    assert seq.prediction.continuation(seq) == []
    seq.tokens += [1, 2]
    assert seq.prediction.continuation(seq) == [] and along([1], [])[0] == [[], []]


def test_a_long_prediction_costs_a_band_a_token():
    _, seq = along([1, 2, 3], list(range(10, 10 + 4 * BAND)))
    assert len(seq.prediction._edits) == BAND + 1


# ---- every method ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch(tiny_model, tiny_tokenizer):
    tiny_tokenizer.padding_side = "left"
    texts = ["Once upon a time there was a", "Tom and Lily went to the park. Tom", "Lily"]
    inputs = tiny_tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    return {**inputs, "max_new_tokens": 48}


def written(model, batch, config, sampled, **more):
    own = {"do_sample": True, "temperature": 0.7} if sampled else {"do_sample": False}
    return model.generate(**batch, **{**own, **more}, speculative_config=config, return_dict_in_generate=True)


def edited(rows):
    """Two rows with edits, and one for which nothing is predicted."""
    first, second, _ = rows.tolist()
    return [[*first[:12], 5, 6, *first[12:20], *first[26:]], [9, 9, *second[:4], 8, *second[5:]], None]


@pytest.mark.parametrize(("config", "sampled"), covering(METHODS, [False, True]), ids=str)
def test_predictions_change_no_text(tiny_model, batch, config, sampled):
    if config["method"] == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        pytest.skip("needs arctic-inference")
    seed = {"seed": 3} if sampled else {}
    plain = written(tiny_model, batch, {"method": "none", **seed}, sampled)
    rows = plain.sequences[:, batch["input_ids"].shape[1] :]
    found = written(tiny_model, batch, {**config, **seed, "prediction": edited(rows)}, sampled)
    assert torch.equal(found.sequences, plain.sequences)
    counts = [row.get("drafters", {}).get("prediction") for row in found.speculation.rows]
    assert counts[2] is None
    length = sum(row.num_new_tokens for row in found.speculation.rows[:2])
    assert sum(each["num_accepted_tokens"] for each in counts[:2]) > 0.3 * length
    assert sum(row.num_steps for row in found.speculation.rows[:2]) < 0.6 * length


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_predictions_mix_with_drafts_that_have_probabilities(tiny_model, batch, rule):
    """The drafter's rows have distributions, and the prediction's rows get one-hot ones."""
    plain = written(tiny_model, batch, {"method": "none", "seed": 3}, True, temperature=0.02)
    predicted = plain.sequences[:, batch["input_ids"].shape[1] :].tolist()
    config = {"method": "draft_model", "model": "tiny-draft", "rejection_sample_method": rule, "seed": 3}
    config["prediction"] = [predicted[0], None, predicted[2]]
    found = written(tiny_model, batch, config, True, temperature=0.02)
    assert torch.equal(found.sequences, plain.sequences)
    assert found.speculation.rows[0].drafters["prediction"]["num_accepted_tokens"] > 20
    assert found.speculation.rows[1].num_accepted_tokens > 0


@pytest.mark.parametrize("family", ["Qwen3.5", "Bamba"])
@pytest.mark.parametrize("states", ["kept", "replayed"])
def test_recurrent_targets_draft_from_predictions(family, states):
    """Even where the method drafts nothing, so that no states were reserved for drafts."""
    target, ids = make(family), torch.arange(24).view(2, 12)
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**arguments)
    predicted = [[*row[:5], 3, 4, *row[6:]] for row in plain[:, 12:].tolist()]
    config = {"method": "none", "recurrent_states": states, "prediction": predicted}
    found = target.generate(**arguments, speculative_config=config, return_dict_in_generate=True)
    assert torch.equal(found.sequences, plain) and found.speculation.num_accepted_tokens > 20


def test_few_steps_are_plain_where_predictions_are_right(tiny_model):
    """Measured lengths need the time of plain steps, but only now and then."""
    llm = LLM(tiny_model, speculative_config={"method": "ngram", "num_speculative_tokens": "auto"}, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, num_speculative_tokens=0)
    prompt = {"prompt_token_ids": [5, 6, 7, 8] * 3}
    ids = llm.generate([prompt], params)[0].outputs[0].token_ids
    (output,) = llm.generate([prompt], params.copy(num_speculative_tokens=1, prediction=ids))
    llm.close()
    assert output.outputs[0].token_ids == ids
    figures = output.speculation
    assert figures.num_steps - figures.drafters["prediction"]["num_steps"] < 6


def test_text_and_repeated_rows(tiny_model, tiny_tokenizer, batch):
    one = {"input_ids": batch["input_ids"][:1], "max_new_tokens": 20, "num_return_sequences": 2}
    plain = written(tiny_model, one, {"method": "none", "seed": 1}, True)
    text = tiny_tokenizer.decode(plain.sequences[0, one["input_ids"].shape[1] :])
    found = written(
        tiny_model, one, {"method": "none", "seed": 1, "prediction": [text]}, True, tokenizer=tiny_tokenizer
    )
    assert torch.equal(found.sequences, plain.sequences) and found.speculation.num_steps < plain.speculation.num_steps
    limited = {"method": "none", "seed": 1, "prediction": text, "disable_by_batch_size": 1}
    assert written(tiny_model, one, limited, True, tokenizer=tiny_tokenizer).speculation.num_accepted_tokens == 0


@pytest.mark.parametrize(
    ("prediction", "message"),
    [
        ("text", "tokenizer"),
        ([[1, 2], [3]], "2 entries for a batch of 3 rows"),
        ([4096], "the id 4096"),
        ([-1], "the id -1"),
        (5, "must be a text"),
        ([1.5], "must be a text"),
        ([[1], {"type": "content"}, None], "must be a text"),
    ],
)
def test_bad_predictions(tiny_model, batch, prediction, message):
    with pytest.raises(SpeculativeConfigError, match=message):
        written(tiny_model, batch, {"method": "none", "prediction": prediction}, False)


@pytest.mark.parametrize("config", METHODS[2::5], ids=lambda config: config["method"])
def test_nothing_is_kept_of_a_request_that_has_ended(tiny_model, tiny_tokenizer, config, monkeypatch):
    """A row may hold images, or a long prediction."""
    rows, llm = [], LLM(tiny_model, tiny_tokenizer, config, max_model_len=64)
    monkeypatch.setattr(decoder_module.SpeculativeDecoder, "add", kept_weakly(rows))
    llm.generate("One day", SamplingParams(temperature=0, max_tokens=12, prediction=[5, 6]), use_tqdm=False)
    gc.collect()
    assert [row() for row in rows] == [None]
    llm.close()


def kept_weakly(rows):
    add = decoder_module.SpeculativeDecoder.add

    def add_row(decoder, seq):
        rows.append(weakref.ref(seq))
        add(decoder, seq)

    return add_row


def test_other_loops_refuse_predictions(tiny_model):
    config = {"method": "ngram", "prediction": [5]}
    with pytest.raises(SpeculativeConfigError, match="prediction"), hf_specdec.assisted_loop(tiny_model, config):
        pass
