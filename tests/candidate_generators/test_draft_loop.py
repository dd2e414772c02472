"""Whole rounds of drafting as one function over static buffers: the drafts, and keys and values, of the growing path."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_checks import check_blocks
from combinations import covering
from helpers_mtp import store
from replayed_graphs import CaptureInPython, defined_attention, graphs_in_python  # noqa: F401
from scheduling import make_decoder
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import hf_specdec
from hf_specdec import integration
from hf_specdec.candidate_generators.growing.grower import CapturedRounds
from hf_specdec.candidate_generators.growing.tree_growth import growth_of
from hf_specdec.core.sequence import Sequence
from hf_specdec.sampling import FusedSamplingLogitsWarper
from hf_specdec.sampling.processors import NodeProcessors

HEADS = {
    "tiny-eagle": "eagle",
    "tiny-eagle3": "eagle3",
    "tiny-mtp": "mtp",
    "tiny-draft": "draft_model",
    "tiny-mlp_speculator": "mlp_speculator",
    "tiny-medusa": "medusa",
    "tiny-hydra": "hydra",
}
SHAPES = {
    "chain": {"num_speculative_tokens": 3},
    "tree": {"speculative_token_tree": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]},
    "dynamic tree": {"depth": 3, "top_k": 3, "total_tokens": 9},
}
LIMITS = [3, 0, 1, 2]  # of the rows; they take turns


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer):
    """Four ragged texts of the kind the heads were trained on."""
    path = Path(hf_specdec.bundled("tiny")).parent / "prompts.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows[::4]]
    encode = tiny_tokenizer.apply_chat_template
    texts = [encode(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    return sorted(texts, key=len)[:4]


@pytest.fixture
def compared(monkeypatch):
    """Every captured round is also grown, from the same roots; yields the drafts, and `replayed`, which of them were captured."""
    original, drafts = CapturedRounds.draft, []

    def both(self, growth, roots):
        drafter, before = self.drafter, None
        roots = tuple(root.clone() for root in roots)  # the growing path's forwards may overwrite what a graph returned
        cache = getattr(drafter, "cache", None)
        pools = (
            []
            if cache is None
            else [pool for layer in cache.layers if layer.is_initialized for pool in (layer.keys, layer.values)]
        )
        before = [pool.clone() for pool in pools]
        eager = growth_of(drafter, growth.sequences, growth.limits)
        expected = eager.draft(*eager.levels(drafter.begin(*roots)))
        wanted = [pool.clone() for pool in pools]
        for pool, old in zip(pools, before, strict=True):
            pool.copy_(old)
        found = original(self, growth, roots)
        assert_same(found, expected)
        for pool, other in zip(pools, wanted, strict=True):
            torch.testing.assert_close(pool, other, rtol=1e-4, atol=1e-4)
        drafts.append(found)
        return found

    monkeypatch.setattr(CapturedRounds, "draft", both)
    return drafts


def assert_same(found, expected):
    trees, others = found.trees, expected.trees
    assert trees.lengths == others.lengths and max(trees.lengths) > 0
    assert (trees.parents is None) == (others.parents is None) and (trees.probs is None) == (others.probs is None)
    for row, count in enumerate(trees.lengths):
        assert torch.equal(trees.tokens[row, :count], others.tokens[row, :count])
        if trees.probs is not None:
            probs, wanted = (
                each.probs[row, range(count) if each.prob_index is None else each.prob_index[row, :count]]
                for each in (trees, others)
            )
            torch.testing.assert_close(probs, wanted, rtol=1e-4, atol=1e-5)
        assert np.array_equal(trees.parent_index[row, :count], others.parent_index[row, :count])
        assert np.array_equal(found.expanded[row, :count], expected.expanded[row, :count])


def run_rounds(target, config, texts, num_steps, samplings=()):
    """Steps of rows whose limits change; the decoder, and how many tokens were drafted and accepted."""
    decoder, _, steps = decode_rows(target, {**config, "cuda_graphs": True}, texts, num_steps, samplings)
    return decoder, sum(each[0] for each in steps), sum(each[3] for each in steps)


def decode_rows(target, config, texts, num_steps, samplings=()):
    """The decoder, the rows' new tokens, and their steps."""
    decoder = make_decoder(target, config)
    decoder.target.graphs = None  # the drafter is what is tested
    rows = [Sequence(list(text), len(text) + 100) for text in texts]
    for seed, (seq, warpers) in enumerate(zip(rows, samplings, strict=False)):
        seq.do_sample, seq.seed = bool(warpers), 77 + seed
        seq.processors = NodeProcessors(LogitsProcessorList(warpers), torch.tensor([seq.tokens]), None)
    decoder.allocate(1000, len(rows))
    for seq in rows:
        decoder.add(seq)
    with decoder.active():
        for step in range(num_steps):
            for i, seq in enumerate(rows):
                seq.num_speculative_tokens = LIMITS[(i + step // 2) % 4]
            decoder.step(rows)
    steps = [each for seq in rows for each in decoder.remove(seq).steps]
    check_blocks(decoder.cache.pool)
    return decoder, [seq.tokens[seq.prompt_length :] for seq in rows], steps


@pytest.mark.parametrize(("name", "shape"), covering(list(HEADS), list(SHAPES)))
def test_rounds_are_those_of_the_growing_path(
    tiny_model, prompts, graphs_in_python, defined_attention, compared, name, shape  # noqa: F811
):  # fmt: skip
    config = {"method": HEADS[name], "model": name, **SHAPES[shape]}
    decoder, drafted, accepted = run_rounds(tiny_model, config, prompts, num_steps=8)
    captures = decoder.generator.rounds.captures
    assert 0 < accepted < drafted and len(compared) >= 6
    assert not any(each.refused for each in graphs_in_python)
    assert 1 <= captures.capture.count <= 2  # 3 or 4 rows are one bucket, all limits another's first levels
    decoder.release()
    assert len(captures) > 0  # kept for the next call, with the pools they read


def samplings():
    """Of four rows: each its own parameters, one of them greedy."""
    return [
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(20)],
        [],
        [TemperatureLogitsWarper(1.2), TopPLogitsWarper(0.9)],
        [FusedSamplingLogitsWarper(min_p=0.05)],
    ]


@pytest.mark.parametrize(
    ("name", "shape", "rule"),
    covering(["tiny-eagle3", "tiny-medusa", "tiny-draft"], list(SHAPES), ["coupled", "rejection"], strength=2),
)
def test_rows_that_sample(tiny_model, prompts, graphs_in_python, defined_attention, compared, name, shape, rule):  # noqa: F811
    """Noise, sampling parameters and the distributions drafts are drawn from are part of what is captured."""
    config = {"method": HEADS[name], "model": name, **SHAPES[shape], "rejection_sample_method": rule}
    decoder, drafted, accepted = run_rounds(tiny_model, config, prompts, num_steps=8, samplings=samplings())
    captures = decoder.generator.rounds.captures
    assert 0 < accepted < drafted and len(compared) >= 6
    assert any(each.trees.probs is not None for each in compared) == (rule == "rejection" and shape != "dynamic tree")
    assert not any(each.refused for each in graphs_in_python)
    assert 1 <= captures.capture.count <= 2  # as for greedy rows


@pytest.mark.parametrize(
    "rule", ["block", *(pytest.param(each, marks=pytest.mark.slow) for each in ("coupled", "rejection", "typical"))]
)
@pytest.mark.parametrize("name", ["tiny-eagle3", "tiny-draft", "tiny-mtp", "tiny-mlp_speculator"])
def test_texts_that_are_sampled(tiny_model, prompts, graphs_in_python, defined_attention, name, rule):  # noqa: F811
    """Rows of a round differ in depth: what a graph leaves behind a row's limit reaches nobody."""
    config = {"method": HEADS[name], "model": name, "num_speculative_tokens": 3, "rejection_sample_method": rule}
    warpers = [each or [TemperatureLogitsWarper(0.9)] for each in samplings()]
    found, expected = (
        decode_rows(tiny_model, {**config, "cuda_graphs": graphs}, prompts, 8, warpers)[1:] for graphs in (True, False)
    )
    assert found == expected
    assert graphs_in_python and not any(each.refused for each in graphs_in_python)


@pytest.mark.long
def test_rules_share_no_captures(tiny_model, tiny_tokenizer, prompts, graphs_in_python, defined_attention):  # noqa: F811
    """The rule is a call's own; the decoder, and what it captured, are the next call's too."""
    config = {"method": "medusa", "model": "tiny-medusa", "num_speculative_tokens": 3, "seed": 5, "compile": False}

    def call(rule: str, num_rows: int, cuda_graphs: bool = True):
        inputs = tiny_tokenizer.pad({"input_ids": prompts[:num_rows]}, return_tensors="pt", padding_side="left")
        how = {**config, "rejection_sample_method": rule, "cuda_graphs": cuda_graphs}
        out = tiny_model.generate(
            **inputs, max_new_tokens=12, do_sample=True, speculative_config=how, return_dict_in_generate=True
        )
        return out.sequences.tolist(), out.speculation["num_accepted_tokens"]

    expected = {rule: call(rule, 2, False) for rule in ("rejection", "coupled")}
    hf_specdec.release(tiny_model)
    for _ in range(2):  # the first call's pools come with its first step; the memory for distributions stays
        call("rejection", 4)
    for rule in ("coupled", "rejection", "coupled"):
        assert call(rule, 2) == expected[rule], rule
    # Played again in Python, a round reads the rule anew, as a graph does not: so what they are kept by is looked at, too.
    loops = [each for each in graphs_in_python if each.name == "The drafting loop of MedusaGenerator"]
    assert {independent for each in loops for *_, independent in each._found} == {True, False}
    hf_specdec.release(tiny_model)
    assert not any(each.refused for each in graphs_in_python)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_any_number_of_rows(tiny_model, prompts, graphs_in_python, defined_attention, compared, num_rows):  # noqa: F811
    config = {"method": "eagle3", "model": "tiny-eagle3", **SHAPES["dynamic tree"]}
    decoder, drafted, _ = run_rounds(tiny_model, config, prompts[:num_rows], num_steps=9)
    assert drafted > 0 and decoder.generator.rounds.captures.capture.count == 3  # of rows or depths


@pytest.mark.parametrize("shape", SHAPES)
def test_modules_that_take_turns(tmp_path, graphs_in_python, defined_attention, compared, shape):  # noqa: F811
    """Each reads the nodes of several depths, behind keys that end earlier; short texts have no module behind the first."""
    target = store(tmp_path, "MiMo", 3).model
    texts = [list(range(1, 1 + length)) for length in (9, 2, 5, 14)]
    config = {"method": "mtp", **SHAPES[shape]}
    decoder, drafted, _ = run_rounds(target, config, texts, num_steps=8)
    assert drafted and len(decoder.generator.heads) == 3 and len(compared) >= 6
    assert decoder.generator.rounds.captures.capture.count >= 1


def test_the_best_paths_of_a_tree(tiny_model, prompts, graphs_in_python, defined_attention, compared):  # noqa: F811
    """Which nodes stay is found behind the loop, from the rows' own limits."""
    config = {
        "method": "mlp_speculator",
        "model": "tiny-mlp_speculator",
        "top_k_tokens_per_head": [3, 2, 2],
        "n_candidates": 3,
    }
    decoder, drafted, _ = run_rounds(tiny_model, config, prompts, num_steps=6)
    assert drafted and decoder.generator.rounds.captures.capture.count == 1


@pytest.mark.parametrize(
    ("config", "call"),
    [
        ({"seed": 1}, {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.3}),
        ({}, {"do_sample": False, "repetition_penalty": 1.3}),
        ({"draft_confidence_threshold": 0.4}, {"do_sample": False}),
    ],
)
def test_other_rounds_grow_as_ever(tiny_model, prompts, graphs_in_python, defined_attention, config, call):  # noqa: F811
    config = {"method": "eagle", "model": "tiny-eagle", "num_speculative_tokens": 3, **config}
    ids = torch.tensor([prompts[0]])
    outputs = []
    for cuda_graphs in (False, True):
        outputs.append(
            tiny_model.generate(
                ids, max_new_tokens=10, speculative_config={**config, "cuda_graphs": cuda_graphs},
                return_dict_in_generate=True, **call,
            )
        )  # fmt: skip
        hf_specdec.release(tiny_model)
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert outputs[0].speculation == outputs[1].speculation
    counts = {each.name: each.capture.count for each in graphs_in_python}
    assert counts["The drafting loop of EagleGenerator"] == 0 < counts["EagleHead"] < 6


@pytest.mark.parametrize("name", ["tiny-eagle", "tiny-eagle3", "tiny-mtp", "tiny-mlp_speculator", "tiny-draft"])
def test_generate(tiny_model, tiny_tokenizer, prompts, graphs_in_python, defined_attention, name):  # noqa: F811
    """Target and drafter replayed: the texts of plain generate(), in few captures."""
    inputs = tiny_tokenizer.pad({"input_ids": prompts[:2]}, return_tensors="pt", padding_side="left")
    plain = tiny_model.generate(**inputs, max_new_tokens=24, do_sample=False)
    config = {"method": HEADS[name], "model": name, "num_speculative_tokens": 3, "cuda_graphs": True}
    out = tiny_model.generate(
        **inputs, max_new_tokens=24, do_sample=False, speculative_config=config, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, plain)
    assert out.speculation.num_accepted_tokens > 0
    used = [each.capture.count for each in graphs_in_python if each.capture.count]
    assert len(used) == (2 if name == "tiny-mlp_speculator" else 3)  # the target, a head or drafter, its loop
    assert max(used) <= 9 and not any(each.refused for each in graphs_in_python)
    hf_specdec.release(tiny_model)


def test_other_pools_and_weights_are_captured_anew(tiny_model, prompts, graphs_in_python, defined_attention, compared):  # noqa: F811
    config = {"method": "eagle", "model": "tiny-eagle", **SHAPES["chain"]}
    decoder, _, _ = run_rounds(tiny_model, config, prompts[:1], num_steps=4)
    captures, generator = decoder.generator.rounds.captures, decoder.generator

    def another_round():
        seq = Sequence(list(prompts[0]), 200)
        decoder.add(seq)
        with decoder.active():
            for _ in range(4):
                decoder.step([seq])
        decoder.remove(seq)
        return captures.capture.count

    assert another_round() == 1
    decoder.allocate(300, 1)  # what there is serves
    assert another_round() == 1
    decoder.allocate(3000, 1)  # what may be needed one day takes no other pools
    assert another_round() == 1
    before = generator.cache.identity
    generator.cache.add(-1)
    generator.cache.reserve(-1, generator.cache.num_slots + 1)
    generator.cache.remove(-1)
    assert set(before).isdisjoint(generator.cache.identity)
    assert another_round() == 2 and len(captures) == 1
    parameter = next(generator.head.module.parameters())
    parameter.data = parameter.data.clone()
    assert another_round() == 3 and len(captures) == 1


@pytest.mark.long
def test_calls_share_pools_and_what_was_captured_on_them(tiny_model, prompts, graphs_in_python, defined_attention):  # noqa: F811
    """A call that needs no more memory than the last one captures nothing; one that needs more does, and is right too."""
    config = {
        "method": "eagle3",
        "model": "tiny-eagle3",
        "num_speculative_tokens": 3,
        "cuda_graphs": True,
        "compile": False,
    }

    def call(count: int, **more) -> int:
        ids = torch.tensor([prompts[0]])
        arguments = {"max_new_tokens": count, "do_sample": False}
        out = tiny_model.generate(ids, **arguments, speculative_config={**config, **more})
        assert torch.equal(out, tiny_model.generate(ids, **arguments))
        return sum(each.capture.count for each in graphs_in_python)

    call(14)  # its pools come with its first step, which is no step to be captured
    warm = call(14)
    assert call(14) == warm > 0
    longer = call(70)
    assert longer > warm
    layer = tiny_model.model.layers[-1]  # graphs hold addresses and numbers
    layer.mlp.down_proj.weight = torch.nn.Parameter(layer.mlp.down_proj.weight.detach().clone())
    moved = call(70)
    layer.self_attn.scaling *= 0.9
    try:
        scaled = call(70)
        tiny_model.config.final_logit_softcapping = 30.0
        assert call(70) > scaled > moved > longer
    finally:
        layer.self_attn.scaling /= 0.9
        del tiny_model.config.final_logit_softcapping
    hf_specdec.release(tiny_model)


def test_a_loop_that_cannot_be_captured_is_grown(tiny_model, prompts, graphs_in_python, defined_attention, caplog):  # noqa: F811
    def fails(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    config = {"method": "eagle3", "model": "tiny-eagle3", **SHAPES["dynamic tree"]}
    ids = torch.tensor([prompts[0]])
    plain = tiny_model.generate(ids, max_new_tokens=8, do_sample=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CaptureInPython, "__call__", lambda self, function: fails(function))
        out = tiny_model.generate(
            ids, max_new_tokens=8, do_sample=False, speculative_config={**config, "cuda_graphs": True}
        )
    hf_specdec.release(tiny_model)
    assert torch.equal(out, plain)
    names = ("LlamaForCausalLM", "Eagle3Head", "Eagle3Head (reading texts)", "The drafting loop of Eagle3Generator")
    for name in names:
        assert caplog.text.count(f"{name} runs without CUDA graphs: operation not permitted") == 1


def test_blocks_have_no_loop(tiny_model, graphs_in_python):  # noqa: F811
    config = {"method": "dflash", "model": "tiny-dflash", "cuda_graphs": True}
    assert make_decoder(tiny_model, config).generator.rounds is None
    assert make_decoder(tiny_model, {**config, "method": "eagle", "model": "tiny-eagle"}).generator.rounds is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures for real")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", HEADS)
def test_on_a_gpu(tiny_model, prompts, monkeypatch, name, shape):
    monkeypatch.setenv("HF_SPECDEC_KERNELS", "triton")
    target = copy.deepcopy(tiny_model).to("cuda")
    config = {"method": HEADS[name], "model": name, **SHAPES[shape], "cuda_graphs": True}
    ids = torch.tensor([prompts[0]], device="cuda")
    plain = target.generate(ids, max_new_tokens=40, do_sample=False)
    out = target.generate(
        ids, max_new_tokens=40, do_sample=False, speculative_config=config, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, plain) and out.speculation.num_accepted_tokens > 0
    rounds = integration.get_decoder(target, integration.parse_config(config)).generator.rounds
    assert not rounds.captures.refused
    hf_specdec.release(target)
