"""Drafting with a model: any tokenizer, any padding of the vocabulary, chains and trees; the output is the target's own."""

import copy

import pytest
import torch
from combinations import covering
from oracle import VOCAB, assert_clean, drafter_of, ragged, tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hf_specdec
from hf_specdec import integration
from hf_specdec.candidate_generators.draft_model import vocabulary

SHAPES = {"chain": {"num_speculative_tokens": 4}, "tree": {"branching_factors": [3, 2, 1]}}
RAGGED = ragged([6, 13, 1, 9])


def speculate(model, inputs=RAGGED, max_new_tokens=14, config=None, **arguments):
    """The result with `draft_model`, after checking that it is plain decoding's."""
    plain = model.generate(**inputs, max_new_tokens=max_new_tokens)
    output = model.generate(
        **inputs, max_new_tokens=max_new_tokens, return_dict_in_generate=True,
        speculative_config={"method": "draft_model", **(config or {})}, **arguments,
    )  # fmt: skip
    assert torch.equal(output.sequences, plain)
    return output.speculation


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padded", ["target", "drafter", "drafter, by name"])
def test_padded_vocabularies(tmp_path, model, shape, padded):
    """Embedding rows padded differently: one tokenizer, other sizes of the logits, and padding rows that would win."""
    target, drafter = copy.deepcopy(model), drafter_of(model)
    bigger = target if padded == "target" else drafter
    bigger.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    with torch.no_grad():
        bigger.lm_head.weight[VOCAB:] = 100.0 if padded != "target" else 0.0
    tokenizer = word_tokenizer([f"t{i}" for i in range(VOCAB)])
    config, arguments = dict(SHAPES[shape]), {}
    if padded == "drafter, by name":
        for name, each in (("target", target), ("drafter", drafter)):
            each.save_pretrained(tmp_path / name)
            tokenizer.save_pretrained(tmp_path / name)
        target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
        config["model"] = tmp_path / "drafter"
    else:
        arguments = {
            "assistant_model": drafter,
            "tokenizer": tokenizer,
            "assistant_tokenizer": copy.deepcopy(tokenizer),
        }
    assert speculate(target, config=config, **arguments).mean_accepted_length > 1.3
    assert_clean(target)


@pytest.mark.parametrize("shape", SHAPES)
def test_target_that_emits_padding_tokens(model, shape):
    """Tokens that only the target has an embedding for: the drafter reads another one in their place."""
    target, tokenizer = copy.deepcopy(model), word_tokenizer([f"t{i}" for i in range(VOCAB)])
    target.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    with torch.no_grad():
        target.lm_head.weight[VOCAB:] = 0.4 * torch.randn(3, 32)
    text = target.generate(**RAGGED, max_new_tokens=30)
    assert (text >= VOCAB).any()
    both = {
        "assistant_model": drafter_of(model),
        "tokenizer": tokenizer,
        "assistant_tokenizer": copy.deepcopy(tokenizer),
    }
    speculate(target, max_new_tokens=30, config=SHAPES[shape], **both)
    config = {"method": "draft_model", "seed": 1, **SHAPES[shape]}
    one_choice = target.generate(
        **RAGGED, max_new_tokens=30, do_sample=True, top_k=1, speculative_config=config, **both
    )
    assert torch.equal(one_choice, text), "a tree wider than the choices there are"
    assert_clean(target)


def test_another_vocabulary_and_no_tokenizers(model):
    with pytest.raises(hf_specdec.SpeculativeConfigError, match="tokenizer= and assistant_tokenizer="):
        speculate(model, assistant_model=tiny_llama(vocab_size=VOCAB + 3))


# ---- other tokenizers -----------------------------------------------------------------------------------------------


def word_tokenizer(words):
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, padding_side="left")


def bpe_tokenizer(merges):
    """Byte-pair tokens over a few letters; with more merges, longer tokens."""
    tokens = ["<pad>", *"abcdefgh", *("".join(pair) for pair in merges)]
    raw = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", padding_side="left", clean_up_tokenization_spaces=False
    )


COARSE = bpe_tokenizer([("a", "b"), ("c", "d"), ("ab", "cd"), ("e", "f"), ("g", "h")])
FINE = bpe_tokenizer([("a", "b"), ("b", "c"), ("f", "g")])


@pytest.mark.parametrize("bridge", ["intersection", "text", None])
@pytest.mark.parametrize("pair", ["coarse target", "fine target"])
@pytest.mark.parametrize("lengths", [[6], [6, 9, 3]], ids=["single", "ragged"])
def test_drafter_with_another_tokenizer(bridge, pair, lengths):
    ours, theirs = (COARSE, FINE) if pair == "coarse target" else (FINE, COARSE)
    target, drafter = tiny_llama(3, vocab_size=len(ours)), tiny_llama(4, vocab_size=len(theirs))
    inputs = ragged(lengths, vocab_size=len(ours))
    config = {"num_speculative_tokens": 3} | ({"vocabulary_bridge": bridge} if bridge else {})
    figures = speculate(target, inputs, 20, config, assistant_model=drafter, tokenizer=ours, assistant_tokenizer=theirs)
    assert figures.num_draft_tokens > 0
    assert_clean(target)


def test_intersection_drafts_trees_and_text_does_not():
    target, drafter = tiny_llama(3, vocab_size=len(COARSE)), tiny_llama(4, vocab_size=len(FINE))
    inputs = ragged([6, 9, 3], vocab_size=len(COARSE))
    both = {"assistant_model": drafter, "tokenizer": COARSE, "assistant_tokenizer": FINE}
    trees = [{"branching_factors": [2, 2]}, {"speculative_token_tree": [[0], [1], [0, 0]]}, {"top_k": 2}]
    for tree in trees:
        speculate(target, inputs, 20, {**tree, "vocabulary_bridge": "intersection"}, **both)
    for tree in [*trees, {"total_tokens": 5}]:
        key = "top_k" if "total_tokens" in tree else next(iter(tree))
        with pytest.raises(hf_specdec.SpeculativeConfigError, match=rf"{key}.*'text', which drafts chains"):
            speculate(target, inputs, 20, {**tree, "vocabulary_bridge": "text"}, **both)
    nothing = word_tokenizer(["x", "y", "z"])
    none_in_common = {
        "assistant_model": tiny_llama(5, vocab_size=4),
        "tokenizer": COARSE,
        "assistant_tokenizer": nothing,
    }
    with pytest.raises(
        hf_specdec.SpeculativeConfigError, match=r"top_k.*'text' \(chosen because .* few tokens in common"
    ):
        speculate(target, inputs, 5, {"top_k": 2}, **none_in_common)
    with pytest.raises(hf_specdec.SpeculativeConfigError, match="no token in common"):
        speculate(target, inputs, 5, {"vocabulary_bridge": "intersection"}, **none_in_common)


@pytest.mark.parametrize("bridge", ["intersection", "text"])
def test_coupled_sampling_through_a_bridge_is_the_one_without(bridge):
    target, drafter = tiny_llama(3, vocab_size=len(COARSE)), tiny_llama(4, vocab_size=len(FINE))
    arguments = dict(**ragged([6, 9, 3], vocab_size=len(COARSE)), max_new_tokens=20, do_sample=True)
    plain = target.generate(**arguments, speculative_config={"method": "none", "seed": 5})
    config = {"method": "draft_model", "vocabulary_bridge": bridge, "seed": 5}
    both = {"assistant_model": drafter, "tokenizer": COARSE, "assistant_tokenizer": FINE}
    assert torch.equal(target.generate(**arguments, speculative_config=config, **both), plain)


# ---- early exit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layers", [1, 2])
def test_early_exit(model, shape, layers):
    speculate(model, config={**SHAPES[shape], "early_exit": layers})
    assert len(model.model.layers) == 3
    assert_clean(model)


def test_early_exit_of_idle_layers_accepts_everything(model):
    """A last layer that adds nothing: the first two layers are then a perfect drafter."""
    idle = copy.deepcopy(model)
    for projection in (idle.model.layers[2].self_attn.o_proj, idle.model.layers[2].mlp.down_proj):
        torch.nn.init.zeros_(projection.weight)
    figures = speculate(idle, max_new_tokens=15, config={"early_exit": 2, "num_speculative_tokens": 4})
    assert figures.acceptance_rate == 1 and figures.mean_accepted_length == 5


# ---- drafts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_its_own_copy_is_always_right(model, shape):
    figures = speculate(model, max_new_tokens=16, config=SHAPES[shape], assistant_model=copy.deepcopy(model))
    deepest = len(figures.acceptance_per_position)
    assert deepest == (4 if shape == "chain" else 3) and figures.acceptance_per_position == [1.0] * deepest


@pytest.mark.parametrize(
    ("shape", "rule", "draft"),
    covering(list(SHAPES), ["coupled", "rejection"], ["greedy", "probabilistic"], strength=2),
)
def test_sampled_drafts(model, shape, rule, draft):
    """A probabilistic drafter that is the target itself is accepted wherever drafts are drawn as the target draws."""
    config = {
        "method": "draft_model", "seed": 4, "rejection_sample_method": rule, "draft_sample_method": draft, **SHAPES[shape],
    }  # fmt: skip
    arguments = dict(
        **RAGGED, max_new_tokens=16, do_sample=True, temperature=0.9, top_p=0.95, return_dict_in_generate=True
    )
    outputs = [
        model.generate(**arguments, speculative_config=config, assistant_model=drafter)
        for drafter in (copy.deepcopy(model), drafter_of(model, 0.2))
    ]
    for output in outputs:
        assert output.speculation.num_accepted_tokens > 0
        assert all(row.num_new_tokens == 16 for row in output.speculation.rows)
    if draft == "probabilistic":
        assert all(rate > 0.999 for rate in outputs[0].speculation.acceptance_per_position)
    if rule == "coupled":
        plain = model.generate(
            **(arguments | {"return_dict_in_generate": False}), speculative_config={"method": "none", "seed": 4}
        )
        assert all(torch.equal(output.sequences, plain) for output in outputs)


def test_drafter_with_fewer_positions_stops_drafting(model):
    """The text outgrows the drafter: rows go on without drafts."""
    drafter = tiny_llama(max_position_embeddings=16)
    figures = speculate(model, max_new_tokens=30, config={"num_speculative_tokens": 3}, assistant_model=drafter)
    assert 0 < figures.num_draft_tokens < 3 * figures.num_steps


def test_named_drafters_are_bundled_or_folders(tmp_path, model):
    drafter_of(model).save_pretrained(tmp_path / "drafter")
    for name in (tmp_path / "drafter", str(tmp_path / "drafter")):
        speculate(model, config={"model": name})
    assert type(integration.kept_decoders(model)[-1].config.model) is str
    with pytest.raises(hf_specdec.SpeculativeConfigError, match="could not be loaded"):
        speculate(model, config={"model": str(tmp_path / "nothing")})


def test_bundled_pair(tiny_model, tiny_tokenizer):
    inputs = tiny_tokenizer(["Once upon a time, there was", "Once upon a time"], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    for shape in SHAPES.values():
        plain = tiny_model.generate(**inputs, max_new_tokens=40, do_sample=False)
        output = tiny_model.generate(
            **inputs, max_new_tokens=40, do_sample=False, return_dict_in_generate=True,
            speculative_config={"method": "draft_model", "model": "tiny-draft", **shape},
        )  # fmt: skip
        assert torch.equal(output.sequences, plain)
        assert output.speculation.mean_accepted_length > 1.5


def test_bundled_pair_through_text(tiny_model, tiny_draft, tiny_tokenizer):
    """One tokenizer, told apart on purpose: the drafter's has one token more."""
    target, tokenizer, drafter = tiny_model, tiny_tokenizer, copy.deepcopy(tiny_draft)
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<never>"])
    inputs = {"input_ids": tokenizer("Once upon a time, there was a little girl", return_tensors="pt").input_ids}
    plain = target.generate(**inputs, max_new_tokens=40, do_sample=False)
    drafter.resize_token_embeddings(len(other), mean_resizing=False)
    for bridge in ("intersection", "text"):
        output = target.generate(
            **inputs, max_new_tokens=40, do_sample=False, assistant_model=drafter, tokenizer=tokenizer, assistant_tokenizer=other,
            speculative_config={"method": "draft_model", "vocabulary_bridge": bridge}, return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(output.sequences, plain)
        assert output.speculation.mean_accepted_length > 1.5, bridge


def test_equal_tokenizer_files_are_not_loaded(tiny_model, monkeypatch):
    """Loading two large tokenizers to compare them takes seconds."""
    monkeypatch.setattr(vocabulary, "tokenizer_of", None)
    config = {"method": "draft_model", "model": hf_specdec.bundled("tiny-draft")}
    arguments = {"inputs": torch.tensor([[5, 9, 33]]), "max_new_tokens": 8, "do_sample": False}
    drafted = tiny_model.generate(**arguments, speculative_config=config)
    assert torch.equal(drafted, tiny_model.generate(**arguments))
    hf_specdec.release(tiny_model)
