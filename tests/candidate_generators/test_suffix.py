"""Suffix decoding on arctic-inference's trees: what is kept, what is let go, and what its keys do."""

import pytest
import torch

pytest.importorskip("arctic_inference.suffix_decoding", reason="arctic-inference is not installed")

from test_ngram import TARGET, speed
from transformers import LlamaConfig, LlamaForCausalLM

import hf_specdec
from hf_specdec import integration, parse_config
from hf_specdec.candidate_generators.suffix import SuffixGenerator
from hf_specdec.core.sequence import Sequence


@pytest.fixture
def model():
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0, initializer_range=0.6,
    )  # fmt: skip
    yield (made := LlamaForCausalLM(config).eval())
    hf_specdec.release(made)


PROMPTS = torch.tensor([[5, 9, 33, 2, 40, 8, 17], [11, 3, 25, 60, 21, 50, 6]])


def decode(model, prompts=PROMPTS, new=48, **config):
    """Sequences and statistics of a greedy call."""
    out = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, do_sample=False, return_dict_in_generate=True,
        speculative_config={"method": "suffix", **config},
    )  # fmt: skip
    return out.sequences, out.speculation


def generator_of(model, **config):
    config = parse_config({"method": "suffix", **config})
    return integration.get_decoder(model, config).generator


def started(config, text, generated=()):
    generator = SuffixGenerator(parse_config({"method": "suffix", **config}), TARGET)
    seq = Sequence(list(text), 10_000)
    generator.start(seq)
    if generated:
        seq.tokens += generated
    return generator, seq


@pytest.mark.parametrize("tree", [False, True])
def test_outputs_are_remembered_between_calls(model, tree):
    """The second identical call drafts from the first one's output: exact both times, and much longer runs."""
    plain = model.generate(PROMPTS, attention_mask=torch.ones_like(PROMPTS), max_new_tokens=48, do_sample=False)
    first, before = decode(model, suffix_decoding_use_tree=tree)
    second, after = decode(model, suffix_decoding_use_tree=tree)
    assert torch.equal(first, plain) and torch.equal(second, plain)
    assert after.mean_accepted_length > before.mean_accepted_length
    assert after.mean_accepted_length > 3
    cache = generator_of(model, suffix_decoding_use_tree=tree).spaces.shared[""].trees
    assert len(cache.active_requests) == 0 and len(cache.cached_requests) == 4
    hf_specdec.release(model)
    _, forgotten = decode(model, suffix_decoding_use_tree=tree)
    assert forgotten.mean_accepted_length == before.mean_accepted_length


def test_without_a_shared_tree_nothing_is_remembered(model):
    _, before = decode(model, suffix_decoding_max_cached_requests=0)
    _, after = decode(model, suffix_decoding_max_cached_requests=0)
    assert after.mean_accepted_length == before.mean_accepted_length
    assert len(generator_of(model, suffix_decoding_max_cached_requests=0).spaces.shared[""].trees.cached_requests) == 0


def test_oldest_outputs_are_dropped(model):
    for _ in range(3):
        decode(model, new=8, suffix_decoding_max_cached_requests=3)
    assert len(generator_of(model, suffix_decoding_max_cached_requests=3).spaces.shared[""].trees.cached_requests) == 3


@pytest.mark.parametrize(("asked_at", "waits"), [(4, True), (30, False)])
def test_an_output_that_is_mostly_unread_waits_for_the_next_draft(asked_at, waits):
    """Reading it when its row ends would take time that no draft gives back; the next draft knows all of it."""
    output = [20 + i for i in range(40)]
    generator, seq = started({}, [5, 6, 7], output[:asked_at])
    generator.propose([seq], [4])
    seq.tokens += output[asked_at:]
    generator.stop(seq)
    assert bool(generator.waiting) == waits
    other = Sequence([9, *output[30:36]], 10_000)
    generator.start(other)
    assert generator.propose([other], [3]).tokens[0].tolist() == output[36:39] and not generator.waiting
    generator.stop(other)


def test_prompts_are_private_outputs_are_shared():
    """The shared tree holds outputs; another row's prompt is never drafted from."""
    generator, one = started({}, [1, 2, 3, 4, 5, 6], generated=[21, 22, 23, 24, 25, 26])
    other = Sequence([2, 3, 4], 100)
    generator.start(other)
    assert generator.propose([other], [5]).lengths == [0]
    other.tokens += [21, 22, 23]
    assert generator.propose([other], [5]).tokens[0, :3].tolist() == [24, 25, 26]
    generator.stop(one)
    assert generator.propose([other], [5]).tokens[0, :3].tolist() == [24, 25, 26]
    generator.stop(other)
    assert len(generator.spaces.shared[""].trees.active_requests) == 0


TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, 4),  # factor 1: as many as matched
        ({"suffix_decoding_max_spec_factor": 2.0}, 8),
        ({"suffix_decoding_max_spec_factor": 0.5}, 2),
        ({"suffix_decoding_max_spec_factor": 0.0}, 0),
        ({"suffix_decoding_max_spec_factor": 0.0, "suffix_decoding_max_spec_offset": 3.0}, 3),
        ({"suffix_decoding_max_spec_offset": -1.0}, 3),
        ({"suffix_decoding_max_tree_depth": 6}, 3),  # match and draft share the depth
    ],
    ids=str,
)
def test_length_follows_the_match(config, length):
    generator, seq = started(config, TEXT)
    trees = generator.propose([seq], [12])
    if "suffix_decoding_max_tree_depth" in config:
        assert 0 < trees.lengths[0] <= config["suffix_decoding_max_tree_depth"] - 1
    else:
        assert trees.lengths == [length]
    assert trees.tokens[0, : trees.lengths[0]].tolist() == list(range(5, 5 + trees.lengths[0]))


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_limits(limit):
    generator, seq = started({}, TEXT)
    assert generator.propose([seq], [limit]).lengths == [limit]


def test_unsure_continuations_are_not_drafted():
    """1 was followed by 2 three times and by 3 once."""
    text = [1, 2, 9, 1, 2, 8, 1, 3, 7, 1, 2, 6, 1]
    offset = {"suffix_decoding_max_spec_offset": 4.0}
    drafts = {}
    for probability in (0.0, 0.5, 0.9):
        generator, seq = started({"suffix_decoding_min_token_prob": probability, **offset}, text)
        drafts[probability] = generator.propose([seq], [4])
    assert drafts[0.5].tokens[0, :1].tolist() == [2] and drafts[0.5].lengths == [1]
    assert drafts[0.9].lengths == [0]
    assert drafts[0.0].lengths[0] > 1


def test_trees_branch():
    text = [1, 2, 9, 1, 2, 8, 1, 3, 7, 1, 2, 6, 1]
    config = {
        "suffix_decoding_use_tree": True,
        "suffix_decoding_min_token_prob": 0.0,
        "suffix_decoding_max_spec_offset": 5.0,
    }
    generator, seq = started(config, text)
    trees = generator.propose([seq], [6])
    assert not trees.is_chain
    roots = [int(t) for t, p in zip(trees.tokens[0], trees.parents[0], strict=True) if p == -1]
    assert sorted(roots) == [2, 3]
    assert trees.lengths[0] <= 6


@pytest.mark.parametrize("when", ["propose", "forward", "observe", "processor"])
def test_an_error_leaves_nothing_behind(model, when, monkeypatch):
    """No active request, no block; and the next call works and is exact."""
    first, _ = decode(model)
    decoder = integration.get_decoder(model, parse_config({"method": "suffix"}))
    calls = []

    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) >= 3:
            raise RuntimeError("on purpose")
        return real(*args, **kwargs)

    extra = {}
    if when == "processor":
        real = lambda ids, scores: scores  # noqa: E731
        extra["logits_processor"] = [fails]
    else:
        owner = decoder.target if when == "forward" else decoder.generator
        real = getattr(owner, when)
        monkeypatch.setattr(owner, when, fails)
    with pytest.raises(RuntimeError, match="on purpose"):
        model.generate(
            PROMPTS,
            attention_mask=torch.ones_like(PROMPTS),
            max_new_tokens=60,
            speculative_config={"method": "suffix"},
            **extra,
        )
    assert len(calls) >= 3
    assert len(decoder.generator.spaces.shared[""].trees.active_requests) == 0 and decoder.statistics == {}
    assert decoder.cache.tables == {} and decoder.cache.pool.num_used == 0
    monkeypatch.undo()
    assert torch.equal(decode(model)[0], first)


def test_texts_that_ended_before_a_draft_was_asked_for_are_read_with_the_next_ones():
    """They cost nothing until then, a few are added at a time, and they count as past outputs."""
    generator, _ = started({"suffix_decoding_max_cached_requests": 6}, [1, 2, 3])
    trees = generator.spaces.shared[""].trees
    for first in range(10, 90, 10):
        seq = Sequence([5, 5], max_length=99)
        generator.start(seq)
        seq.tokens += range(first, first + 6)
        generator.stop(seq)
    assert len(generator.waiting) == 6 and not trees.cached_requests
    asker = Sequence([5, 80, 81, 82], max_length=99)
    generator.start(asker)
    drafts = [generator.propose([asker], [3]).tokens[0].tolist() for _ in range(2)]
    assert drafts[0] == [] and drafts[-1] == [83, 84, 85] and not generator.waiting
    generator.stop(asker)


@pytest.mark.slow  # a stopwatch
@pytest.mark.parametrize("bound", [400, 50])
@pytest.mark.parametrize("tree", [False, True])
def test_speed(bound, tree):
    """Trees of the default depth over 100k tokens of prompt."""
    config = {"method": "suffix", "num_speculative_tokens": 5, "suffix_decoding_use_tree": tree}
    speed(SuffixGenerator(parse_config(config), TARGET), bound, f"suffix {'tree' if tree else 'chain'}")
