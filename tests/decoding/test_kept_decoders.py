"""What outlives a call: decoders go with the objects that they were made from, and are few."""

import gc
import weakref

import pytest
import torch
from oracle import drafter_of, ragged, tiny_llama

import hf_specdec
from hf_specdec import integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.candidate_generators.base import DrafterContext

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
DRAFT = {"method": "draft_model", "num_speculative_tokens": 3}
INPUTS = ragged([6, 3])


@pytest.fixture
def model():
    made = tiny_llama()
    yield made
    hf_specdec.release(made)


class Tokenizer:
    """Tokens are numbers; `first` of them are spelled as in all others."""

    bos_token_id = eos_token_id = None

    def __init__(self, first=61, other=""):
        self.names = [str(i) if i < first else f"{other}{i}" for i in range(61)]

    def __len__(self):
        return len(self.names)

    def get_vocab(self):
        return {name: i for i, name in enumerate(self.names)}

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(self.names[i] for i in ids)

    def encode(self, text, add_special_tokens=True):
        return [int("".join(filter(str.isdigit, word))) for word in text.split()]


def draft(model, **given):
    out = model.generate(**INPUTS, max_new_tokens=6, do_sample=False, speculative_config=DRAFT, **given)
    assert torch.equal(out, model.generate(**INPUTS, max_new_tokens=6, do_sample=False))


@pytest.mark.long
def test_a_decoder_goes_with_its_assistant_model(model):
    alive = []
    for _ in range(5):
        drafter = drafter_of(model)
        draft(model, assistant_model=drafter)
        draft(model, assistant_model=drafter)
        (decoder,) = integration.kept_decoders(model)
        alive += [weakref.ref(drafter), weakref.ref(decoder)]
        del drafter, decoder
        gc.collect()
        assert integration.kept_decoders(model) == []
    assert not any(each() for each in alive)


@pytest.mark.long
@pytest.mark.parametrize("first", [61, 40, 2], ids=["shared", "intersection", "text"])
def test_a_decoder_goes_with_its_tokenizers(model, first):
    drafter, alive = drafter_of(model), []
    for _ in range(3):
        given = {"tokenizer": Tokenizer(), "assistant_tokenizer": Tokenizer(first, "x")}
        draft(model, assistant_model=drafter, **given)
        (decoder,) = integration.kept_decoders(model)
        alive += [weakref.ref(each) for each in (decoder, *given.values())]
        del given, decoder
        gc.collect()
        assert integration.kept_decoders(model) == []
    assert not any(each() for each in alive)


def test_what_a_method_does_not_use_makes_no_other_decoder(model):
    for _ in range(3):
        model.generate(**INPUTS, max_new_tokens=4, do_sample=False, speculative_config=NGRAM, tokenizer=Tokenizer())
    assert len(integration.kept_decoders(model)) == 1


def test_an_object_in_the_place_of_one_that_is_gone_is_another(model):
    """Identity is the object's, not its address: references that are dead serve nobody, not even a call that gives nothing."""
    drafter = drafter_of(model)
    config = parse_config(DRAFT)
    decoder = integration.get_decoder(model, config, DrafterContext(drafter))
    assert integration.get_decoder(model, config, DrafterContext(drafter)) is decoder
    other = drafter_of(model)
    assert integration.get_decoder(model, config, DrafterContext(other)) is not decoder
    (entry, _) = vars(model)["_hf_specdec"].entries
    del drafter
    gc.collect()
    assert not entry.serves(DrafterContext()) and not entry.serves(DrafterContext(other))
    with pytest.raises(ReferenceError, match=r"has been deleted by its owner"):
        decoder.generator.drafter.model  # noqa: B018


def test_few_decoders_are_kept_and_the_one_used_longest_ago_goes(model, monkeypatch):
    monkeypatch.setattr(integration, "MOST_DECODERS", 3)

    def call(k):
        model.generate(**INPUTS, max_new_tokens=4, speculative_config={**NGRAM, "num_speculative_tokens": k})
        return integration.kept_decoders(model)[-1]

    first, second = call(1), call(2)
    third = call(3)
    assert call(1) is first
    fourth = call(4)
    assert integration.kept_decoders(model) == [third, first, fourth]
    gone = weakref.ref(second)
    del second
    gc.collect()
    assert gone() is None


class Slotted:
    """Cannot be referred to weakly."""

    __slots__ = ("own",)

    def __init__(self, *args):
        self.own = Tokenizer(*args)

    def __getattr__(self, name):
        return getattr(self.own, name)

    def __len__(self):
        return len(self.own)


def test_objects_without_weak_references_are_kept_for_a_few_calls_only(model, monkeypatch):
    monkeypatch.setattr(integration, "MOST_DECODERS", 2)
    drafter = drafter_of(model)
    for _ in range(4):
        draft(model, assistant_model=drafter, tokenizer=Slotted(), assistant_tokenizer=Slotted(40, "x"))
    assert len(integration.kept_decoders(model)) == 2
