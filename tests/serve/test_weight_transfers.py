"""Tensors that a trainer broadcasts: what is written, and what is known to be missing after an error."""

import copy

import pytest
import torch

from hf_specdec.model.prepare import prepare
from hf_specdec.serve.engine.weights import Weights


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
