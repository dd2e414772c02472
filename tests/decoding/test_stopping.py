"""Stopping is exact: whatever ends a text inside an accepted run ends it where plain decoding would have."""

import time

import pytest
import torch
from combinations import covering
from oracle import VOCAB, drafter_of, interposed, method_configs, ragged
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.stopping_criteria import EosTokenCriteria

METHODS = ["none", "ngram", "chain", "tree", "perfect"]
OVERLAPPING = ["none, overlapping", "tree, overlapping", "perfect, overlapping"]  # with asynchronous scheduling
WIDTH = 8


@pytest.fixture(scope="module")
def configs(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("drafters")
    drafter_of(model).save_pretrained(path / "drafter")
    model.save_pretrained(path / "itself")
    perfect = {
        "method": "draft_model",
        "model": str(path / "itself"),
        "num_speculative_tokens": 9,
    }  # every draft is accepted
    return {**method_configs(str(path / "drafter")), "perfect": perfect}


@pytest.fixture(params=METHODS + OVERLAPPING)
def config(request, configs):
    name, *overlapping = request.param.split(", ")
    return {**configs[name], "async_scheduling": bool(overlapping)}


@pytest.fixture(scope="module")
def tokenizer():
    """Every token is one or two letters, so that stop strings may begin and end inside tokens."""
    letters = [chr(ord("a") + i % 26) + (chr(ord("a") + i // 26) if i >= 26 else "") for i in range(VOCAB - 1)]
    raw = Tokenizer(models.WordLevel({text: i for i, text in enumerate(["<pad>", *letters])}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", padding_side="left", clean_up_tokenization_spaces=False
    )


class Recorded(StoppingCriteria):
    """Calls a rule on the ids and keeps what it was called with."""

    def __init__(self, rule):
        self.rule, self.calls, self.scores = rule, [], []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.clone())
        self.scores.append(None if scores is None else len(scores))
        return self.rule(input_ids)


def assert_same(model, config, inputs, rule=None, **arguments):
    """Sequences, and the calls of a criterion with `rule`, are plain decoding's. Returns the sequences."""
    results = []
    for speculative_config in (None, config):
        recorded = Recorded(rule)
        criteria = StoppingCriteriaList([*arguments.get("stopping_criteria", []), *([recorded] if rule else [])])
        output = model.generate(
            **inputs,
            **{"max_new_tokens": 25, **arguments, "stopping_criteria": criteria},
            speculative_config=speculative_config,
        )
        results.append((output, recorded))
    (plain, expected), (ours, actual) = results
    assert torch.equal(plain, ours)
    assert len(expected.calls) == len(actual.calls) and expected.scores == actual.scores
    assert all(torch.equal(a, b) for a, b in zip(expected.calls, actual.calls, strict=True))
    return ours


RULES = {
    "per row": lambda ids: ids[:, -1] % 5 == 1,
    "per row, by prefix": lambda ids: (ids[:, WIDTH:] % 3 == 0).sum(1) >= 3,
    "scalar": lambda ids: ids.shape[1] >= WIDTH + 7,
    "python bool of one row": lambda ids: bool(ids[0, -1] % 5 == 1),
    "any row": lambda ids: (ids[:, -1] % 5 == 1).any().expand(len(ids)),
    "sum over rows": lambda ids: (ids[:, -1].sum() % 11 == 3).expand(len(ids)),
    "never": lambda ids: torch.zeros(len(ids), dtype=torch.bool),
}


@pytest.mark.parametrize(
    ("rule", "lengths", "eos"),
    covering(list(RULES), [[8, 3, 5], [8]], [None, [5, *range(30, 34)]], strength=2),
    ids=str,
)
def test_custom_criteria_see_what_plain_decoding_shows(model, config, lengths, rule, eos):
    """Without an eos criterion transformers lets rows that have stopped run on; so do we."""
    assert_same(model, config, ragged(lengths), RULES[rule], eos_token_id=eos)


def test_criteria_are_given_the_scores(model, config):
    assert_same(model, config, ragged([8, 3]), RULES["per row"], return_dict_in_generate=False, output_scores=True)
    lengths = []
    for speculative_config in (None, config):
        criterion = Recorded(RULES["scalar"])
        model.generate(
            **ragged([8, 3]), max_new_tokens=20, output_scores=True, return_dict_in_generate=True,
            stopping_criteria=StoppingCriteriaList([criterion]), speculative_config=speculative_config,
        )  # fmt: skip
        lengths.append(criterion.scores)
    assert lengths[0] == lengths[1] == list(range(1, 8))


def test_transformers_own_prompt_lookup_overshoots_and_we_do_not(model, configs):
    """A criterion that fires inside an accepted run: transformers asks it only after the run."""
    inputs = {"input_ids": torch.tensor([[5, 6] * 4])}
    text = model.generate(**inputs, max_new_tokens=40)
    again = torch.cat([text, text[:, -20:]], 1)  # its own text again, so that look-ups are accepted
    repeating = {"input_ids": again, "attention_mask": torch.ones_like(again)}
    start = again.shape[1]

    def stop(ids):
        return torch.tensor([ids.shape[1] >= start + 2])

    def run(**kwargs):
        criteria = StoppingCriteriaList([Recorded(stop)])
        return model.generate(**repeating, max_new_tokens=24, stopping_criteria=criteria, **kwargs).shape[1] - start

    assert run() == 2
    assert [run(speculative_config=configs[name]) for name in METHODS] == [2] * len(METHODS)
    perfect = drafter_of(model, noise=0.0)
    perfect.generation_config.num_assistant_tokens, perfect.generation_config.assistant_confidence_threshold = 8, 0.0
    overshoot = [run(assistant_model=perfect), run(prompt_lookup_num_tokens=8, max_matching_ngram_size=1)]
    assert max(overshoot) > 2, "transformers has been fixed: this test can go"


def test_criteria_of_transformers_given_as_custom_ones(model, config):
    inputs = ragged([8, 3])
    for criteria in (
        [MaxLengthCriteria(13)], [MaxLengthCriteria(3)], [EosTokenCriteria(torch.tensor([5, 9, 11]))],
        [EosTokenCriteria(7), MaxLengthCriteria(15)],
    ):  # fmt: skip
        assert_same(model, config, inputs, stopping_criteria=criteria)


def test_subclasses_of_known_criteria_are_called(model, config):
    class Later(MaxLengthCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= self.max_length + 4)

    assert assert_same(model, config, ragged([8, 3]), stopping_criteria=[Later(10)]).shape[1] == 14


def test_several_eos_ids_inside_an_accepted_run(model, config):
    inputs = ragged([8, 3, 5])
    text = model.generate(**inputs, max_new_tokens=25)
    for at in (1, 7):
        eos = text[:, WIDTH + at].unique().tolist()
        assert_same(model, config, inputs, eos_token_id=eos)
        assert_same(model, config, inputs, eos_token_id=eos[0], max_length=WIDTH + 6)


def test_max_time(model, config):
    """It ends the text soon after the time is up, and never when there is plenty."""
    inputs = ragged([8, 3])
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=9, max_time=600.0, speculative_config=config),
        model.generate(**inputs, max_new_tokens=9),
    )
    assert model.generate(**inputs, max_new_tokens=40, max_time=1e-9, speculative_config=config).shape[1] == WIDTH + 1
    late = MaxTimeCriteria(max_time=0.5, initial_timestamp=time.time() - 1)
    assert_same(model, config, inputs, stopping_criteria=[late])


# ---- stop strings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "eos"),
    [([8, 3, 5], None), ([8, 3, 5], 5)]  # only with an end-of-sequence token do rows stop one by one
    + [pytest.param(*each, marks=pytest.mark.slow) for each in (([8], 5), ([8], None))],
    ids=["ragged", "ragged with eos", "single with eos", "single"],
)
def test_stop_strings(model, config, tokenizer, lengths, eos):
    """Strings that end at any place of the text, inside tokens too, and for some rows earlier than for others."""
    inputs = ragged(lengths)
    texts = [tokenizer.decode(row[WIDTH:]) for row in model.generate(**inputs, max_new_tokens=25)]
    for start, length in ((0, 1), (7, 3), (11, 5)):
        stops = [text[start : start + length] for text in texts]
        for strings in (stops[:1], stops):
            assert_same(model, config, inputs, stop_strings=strings, tokenizer=tokenizer, eos_token_id=eos)
    assert_same(
        model, config, inputs, stopping_criteria=[StopStringCriteria(tokenizer, [texts[0][4:6]])], eos_token_id=eos
    )
    assert_same(
        model, config, inputs, RULES["per row"], stop_strings=texts[0][9:12], tokenizer=tokenizer, eos_token_id=eos
    )


def test_stop_strings_need_a_tokenizer(model, configs):
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(**ragged([5]), max_new_tokens=3, stop_strings=["a"], speculative_config=configs["ngram"])


# ---- transformers' streamers ----------------------------------------------------------------------------------------


def test_text_streamers(model, config, tokenizer, capsys):
    inputs, printed = ragged([8]), []
    for speculative_config in (None, config):
        model.generate(
            **inputs, max_new_tokens=12, streamer=TextStreamer(tokenizer), speculative_config=speculative_config
        )
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and len(printed[0]) > 12
    pieces = []
    for speculative_config in (None, config):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=10)
        model.generate(**inputs, max_new_tokens=12, streamer=streamer, speculative_config=speculative_config)
        pieces.append(list(streamer))
    assert pieces[0] == pieces[1]
    with pytest.raises(ValueError, match="batch size 1"):
        model.generate(**ragged([4, 5]), max_new_tokens=3, streamer=TextStreamer(tokenizer), speculative_config=config)


def test_tokens_arrive_as_they_are_accepted(model, configs):
    """Several tokens of one forward arrive together, and before the next forward."""
    events = []

    class Events:
        def put(self, value):
            events.append("token")

        def end(self):
            events.append("end")

    config = {**configs["perfect"], "native": False}
    with interposed(model, lambda *_: events.append("forward")):
        model.generate(**ragged([8]), max_new_tokens=20, streamer=Events(), speculative_config=config)
    assert events == ["token", "forward", *["token"] * 10, "forward", *["token"] * 10, "end"]


# ---- asynchronous scheduling ----------------------------------------------------------------------------------------


def test_a_step_begins_before_the_last_one_is_shown(model, configs, monkeypatch):
    """Before it is finished, where it needs no more of it than tokens that are on the device. And not where a forward's tensors
    are to be returned, which the next one may overwrite."""
    from hf_specdec.decoding.decoder import SpeculativeDecoder
    from hf_specdec.decoding.stopping import LockstepObserver

    events = []
    for owner, name in ((SpeculativeDecoder, "begin"), (SpeculativeDecoder, "finish"), (LockstepObserver, "advance")):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda self, *a, _of=original, _name=name, **k: (events.append(_name), _of(self, *a, **k))[1]
        )
    config = {**configs["none"], "async_scheduling": True}
    model.generate(**ragged([5]), max_new_tokens=3, do_sample=False, speculative_config=config)
    assert events == ["begin", *["begin", "finish", "advance"] * 2, "finish", "advance"]
    events.clear()
    # a processor that reads the text
    model.generate(**ragged([5]), max_new_tokens=3, do_sample=False, repetition_penalty=1.1, speculative_config=config)
    assert events == ["begin", *["finish", "begin", "advance"] * 2, "finish", "advance"]
    events.clear()
    more = {"return_dict_in_generate": True, "output_scores": True}
    model.generate(**ragged([5]), max_new_tokens=3, do_sample=False, speculative_config=config, **more)
    assert events == ["begin", "finish", "advance"] * 3


@pytest.mark.parametrize("method", ["none", "chain", "tree"])
@pytest.mark.parametrize("num_blocks", [None, 5])
def test_overlapping_rows_leave_and_wait_as_others_do(model, configs, method, num_blocks):
    """Ragged lengths, an end-of-sequence token, and too few blocks for all rows at once."""
    config = {
        **configs[method],
        "block_size": 8,
        "num_blocks": num_blocks,
        "rejection_sample_method": "coupled",
        "seed": 2,
    }
    arguments = {**ragged([5, 11, 3, 8]), "max_new_tokens": 20, "do_sample": True, "pad_token_id": 0}
    whole = model.generate(**arguments, eos_token_id=None, speculative_config={**config, "num_blocks": None})
    arguments["eos_token_id"] = [int(whole[0, -15]), int(whole[2, -8])]
    synchronous, overlapping = (
        model.generate(**arguments, speculative_config={**config, "async_scheduling": wanted})
        for wanted in (False, True)
    )
    assert torch.equal(overlapping, synchronous)
    assert overlapping[0, -1] == 0, "no row ended before the others"


def test_an_error_while_a_step_is_pending_leaves_nothing_behind(model, configs):
    class Failing(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] > WIDTH + 4:
                raise RuntimeError("criterion failed")
            return torch.zeros(len(input_ids), dtype=torch.bool)

    arguments = {**ragged([5, 8]), "max_new_tokens": 12, "do_sample": False}
    config = {**configs["chain"], "async_scheduling": True}
    plain = model.generate(**arguments)
    with pytest.raises(RuntimeError, match="criterion failed"):
        model.generate(**arguments, speculative_config=config, stopping_criteria=StoppingCriteriaList([Failing()]))
    assert torch.equal(model.generate(**arguments, speculative_config=config), plain)
