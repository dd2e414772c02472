"""Updates of weights that end, or come, in the middle: what is known to be missing, and what is computed again."""

import copy
import itertools

import pytest
import torch
from test_weights import NGRAM, Running

import hf_specdec
from hf_specdec.model.prepare import prepare
from hf_specdec.serve import SamplingParams
from hf_specdec.serve.engine.weights import Weights
from hf_specdec.serve.ipc.messages import Submit


@pytest.fixture
def receiver(tiny_model, monkeypatch):
    """Weights of a model, and a function that lets them receive tensors; exceptions among these are raised."""
    weights = Weights(prepare(copy.deepcopy(tiny_model)))

    def receive(tensors, joined="group"):
        coming = iter([tensor for _, tensor in tensors])

        def broadcast(group, place):
            if isinstance(value := next(coming), Exception):
                raise value
            assert group is joined
            weights._group = None  # another trainer begins to join
            place.copy_(value)

        monkeypatch.setattr("hf_specdec.serve.engine.weights.broadcast", broadcast)
        weights._group = joined, torch.device("cpu")
        state = tiny_model.state_dict()
        shapes = [list(state.get(name, state["model.norm.weight"]).shape) for name, _ in tensors]
        weights.receive([name for name, _ in tensors], ["float32"] * len(tensors), shapes)

    return weights, receive


@torch.no_grad()
def test_a_group_that_joins_in_the_middle_takes_no_tensor(receiver, new_model):
    weights, receive = receiver
    receive(list(new_model.named_parameters()))
    places = weights.places()
    assert not weights.unsure and all(torch.equal(places[name], value) for name, value in new_model.named_parameters())


@torch.no_grad()
def test_a_transfer_that_fails_in_the_middle_leaves_all_unsure(receiver, new_model):
    weights, receive = receiver
    name, value = next(iter(new_model.named_parameters()))
    for error, kind in ((RuntimeError("gone"), ValueError), (MemoryError(), MemoryError)):
        with pytest.raises(kind):
            receive([(name, error), ("model.norm.weight", error)])
        assert not weights.unsure
    with pytest.raises(MemoryError):
        receive([(name, value), ("model.norm.weight", error)])
    assert weights.unsure == {name, "model.norm.weight"}
    with pytest.raises(ValueError, match="The model has no weight 'no'"):  # not that the transfer was cut off
        receive([(name, value), ("no", RuntimeError("gone"))])


@torch.no_grad()
def test_tensors_that_the_model_ties_must_be_equal(receiver, new_model):
    weights, receive = receiver
    value, names = new_model.lm_head.weight, ("model.embed_tokens.weight", "lm_head.weight")
    receive([(name, value) for name in names])
    assert not weights.unsure
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from"):
        receive([(names[0], value), (names[1], value + 1)])
    assert weights.unsure == set(names)


def test_the_scores_of_a_prompt_are_of_the_new_weights_only(three_prompts, new_model, new_folder, monkeypatch):
    params, prompt = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), (three_prompts[0] * 9)[:90]
    arguments = {"speculative_config": NGRAM, "max_model_len": 128, "max_num_batched_tokens": 16}
    other = hf_specdec.LLM(copy.deepcopy(new_model), None, **arguments)
    (expected,) = other.generate(prompt, params, use_tqdm=False)
    other.close()
    engine = Running(hf_specdec.LLM("tiny", dtype="float32", **arguments))
    inner, steps, asked = engine.worker.engine, itertools.count(), []
    step = inner.step

    def stepped(on_schedule):
        if next(steps) == 2:
            asked.append(engine.call("update", weights=new_folder))
        return step(on_schedule)

    monkeypatch.setattr(inner, "step", stepped)
    engine.worker.send(Submit("a", None, prompt, params))
    update = engine.updates.get(timeout=60)
    asked[0].result(60)
    engine.stop()
    for scores, expected_scores in zip(update.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
        (score,), (expected_score,) = scores.values(), expected_scores.values()
        assert score.logprob == pytest.approx(expected_score.logprob, abs=1e-3)
