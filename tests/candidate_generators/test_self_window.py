"""The target drafts for itself over a window of its own keys: as a mask says, and nothing of a draft stays in its cache."""

import weakref

import numpy as np
import pytest
import torch
import transformers
from encoders import build as build_encoder
from families import build, deepseek_v4
from families import make as make_family
from helpers_drafters import assert_lossless, assert_refused, kept_proposals
from helpers_mtp import KINDS
from helpers_speculators import recorded
from oracle import VOCAB, assert_clean, ragged, tiny_llama
from recurrent_families import make as make_recurrent
from replayed_graphs import defined_attention, graphs_in_python  # noqa: F401
from scheduling import make_decoder, run_scenario

import hf_specdec
from hf_specdec.core.sequence import Sequence

WINDOW, SINKS = 8, 2
CONFIG = {"method": "self_window", "draft_window": WINDOW, "draft_sinks": SINKS, "num_speculative_tokens": 3}
SHAPES = {"chain": {}, "static": {"branching_factors": [2, 2, 1]}, "dynamic": {"top_k": 2, "total_tokens": 9}}
LENGTHS = ((30,), (30, 13, 45, 9, 60))


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_do_not_change(model, shape):
    assert_lossless(model, {**CONFIG, **SHAPES[shape]}, LENGTHS, max_new_tokens=30, temperature=0.9)


@pytest.mark.parametrize("native", [None, False])
@pytest.mark.parametrize("family", ["Llama", "DeepSeek-V3"])
def test_a_draft_sees_the_first_and_the_last_tokens(family, native):
    """Exact keys of the text come from the target, so they are those of layers that saw all of it."""
    target = make_family(family, vocab_size=VOCAB)
    recorder = recorded(target, {**CONFIG, "native": native})
    target.generate(**ragged([30, 13, 45]), max_new_tokens=8, speculative_config={**CONFIG, "native": native})
    assert recorder.seen
    for text, path, logits in recorder.seen:
        place = torch.arange(len(text) + len(path))
        distance = place[:, None] - place
        drafted = place[:, None] >= len(text) - 1
        seen = (distance >= 0) & (~drafted | (distance < WINDOW) | (place < SINKS))
        mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))[None, None]
        with torch.no_grad():
            expected = target(torch.tensor([[*text, *path]]), attention_mask=mask, use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    hf_specdec.release(target)


NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
OTHERS = {
    "deterministic": {**CONFIG, "deterministic": True},
    "rejection": {**CONFIG, "rejection_sample_method": "rejection"},
    "hybrid": {"method": "hybrid", "first": NGRAM, "second": CONFIG},
}


@pytest.mark.parametrize("name", OTHERS)
def test_in_other_methods_and_modes(model, name):
    call = {**ragged(LENGTHS[1]), "max_new_tokens": 30}
    output = model.generate(**call, speculative_config=OTHERS[name], return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(**call))
    assert output.speculation.num_draft_tokens > 0
    assert_clean(model)


@pytest.mark.parametrize("config", [CONFIG, {"method": "auto", "methods": [CONFIG, NGRAM]}], ids=["alone", "auto"])
def test_an_engine_shares_prefixes(model, config):
    """Requests with one beginning, few blocks: texts of their own, whatever drafts have written to shared blocks before."""
    llm = hf_specdec.LLM(model, None, {**config, "block_size": 4, "num_blocks": 40}, max_model_len=96, max_num_seqs=4)
    drafter = "self_window" if config["method"] == "auto" else None
    beginning = ragged([40])["input_ids"][0].tolist()
    prompts = [beginning[: 40 - i % 5] + [7 + i] * (i % 3) for i in range(10)]
    params = hf_specdec.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, drafter=drafter)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    for ids, answer in zip(prompts, answers, strict=True):
        plain = model.generate(torch.tensor([ids]), max_new_tokens=20)[0, len(ids) :].tolist()
        assert list(answer.outputs[0].token_ids) == plain and answer.speculation.num_draft_tokens > 0
    llm.close()


def test_native_chains_are_the_same(model):
    drafts = []
    for native in (None, False):
        config = hf_specdec.parse_config({**CONFIG, "native": native})
        kept = kept_proposals(hf_specdec.integration.get_decoder(model, config).generator)
        model.generate(**ragged(LENGTHS[1]), max_new_tokens=20, speculative_config=config)
        drafts.append([trees.chains() for trees in kept])
    assert drafts[0] == drafts[1] and sum(map(len, drafts[0])) > 50


def run(decoder, lengths):
    """Four texts, decoded side by side; their keys and values at the end."""
    batch = ragged(lengths)
    rows = [
        Sequence(ids[mask.bool()].tolist(), max_length=int(mask.sum()) + 40)
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    decoder.allocate(2000, len(rows))
    for seq in rows:
        decoder.add(seq)
    with decoder.active():
        while going := [seq for seq in rows if not seq.finished]:
            decoder.step(going)
        kept = [decoder.read_cache(seq) for seq in rows]
    for seq in rows:
        decoder.remove(seq)
    return [seq.tokens for seq in rows], kept


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_of_a_draft_stays(model, shape, monkeypatch):
    """Texts and keys are plain decoding's after many rejections, although drafts have written other keys there."""
    lengths = [30, 13, 45, 60]
    texts, plain = run(make_decoder(model, {"method": "none"}), lengths)
    decoder, written = make_decoder(model, {**CONFIG, **SHAPES[shape]}), []
    propose = decoder.generator.propose

    def noted(sequences, limits):
        trees = propose(sequences, limits)
        for seq, length in zip(sequences, trees.lengths, strict=True):
            if length:
                at = len(seq.tokens) - 1
                slot = decoder.cache.tables[seq.id].slots[at]
                written.append((lengths.index(seq.prompt_length), at, decoder.cache.layers[2].keys[slot].clone()))
        return trees

    monkeypatch.setattr(decoder.generator, "propose", noted)
    found, kept = run(decoder, lengths)
    assert found == texts
    for ours, theirs in zip(kept, plain, strict=True):
        for layer, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(layer, other, atol=1e-5, rtol=1e-5)
    differences = [float((plain[row][2][0][at] - keys).abs().max()) for row, at, keys in written]
    assert len(written) > 60 and np.median(differences) > 0.01
    assert decoder.cache.window is None


def test_a_window_over_all_of_the_text_is_always_right(model, monkeypatch):
    """Drafted as the target chooses, greedily and by the same noise, in calls with other texts."""
    config = {**CONFIG, "draft_window": 1000, "seed": 3}
    generator = hf_specdec.integration.get_decoder(model, hf_specdec.parse_config(config)).generator
    monkeypatch.setattr(generator, "_least", 1)
    for lengths in ([6, 13, 9], [8]):
        for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}):
            call = {**ragged(lengths), "max_new_tokens": 17, "return_dict_in_generate": True, **sampling}
            figures = model.generate(**call, speculative_config=config).speculation
            assert figures.acceptance_rate == 1 and figures.mean_accepted_length > 3
    hf_specdec.release(model)


def test_texts_that_the_window_covers_get_no_drafts(model):
    for length, drafts in ((WINDOW + SINKS - 2, False), (WINDOW + SINKS - 1, True)):
        call = {**ragged([length]), "max_new_tokens": 4, "return_dict_in_generate": True}
        figures = model.generate(**call, speculative_config=CONFIG).speculation
        assert bool(figures.num_draft_tokens) is drafts


def test_rows_that_join_pause_and_leave():
    """With prefixes that are shared, few blocks, and cancelled requests."""
    run_scenario(tiny_llama(max_position_embeddings=512), None, {**CONFIG, "draft_window": 6}, 60, VOCAB)


def test_in_graphs(model, graphs_in_python, defined_attention):  # noqa: F811
    for shape in ("chain", "dynamic"):
        assert_lossless(model, {**CONFIG, **SHAPES[shape], "cuda_graphs": True}, [[30, 13, 45]], 16)
    assert any("SelfWindow" in each.name and each.capture.count for each in graphs_in_python if not each.refused)
    decoder = make_decoder(model, {**CONFIG, "cuda_graphs": True})
    run(decoder, [30, 13])
    pools = weakref.ref(decoder.cache.layers[0].keys)
    decoder.release(keeps_pools=False)
    decoder.allocate(100, 0)
    assert pools() is None, "graphs of a sleeping engine keep its memory"


OLD = transformers.__version__.startswith("5.17.")


@pytest.mark.parametrize(
    "family", ["Cohere2", *(() if OLD else ("Gemma2",))]
)  # which 5.17 runs without its soft-capping
def test_layers_with_windows_of_their_own(family):
    """They see no more than before."""
    target = make_family(family, vocab_size=VOCAB)
    assert {"full_attention", "sliding_attention"} <= set(target.config.layer_types)
    assert_lossless(target, CONFIG, LENGTHS, 20)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("Mistral", "no layer of which attends to all"),
        ("GPT-Neo", "attends to a copy of all keys"),
        ("BART", "an encoder-decoder model"),
        ("DeepSeek-V4", "compress segments"),
        ("DeepSeek-V3.2", "no layer of which attends to all"),
        pytest.param("Qwen3.5", "recurrent state", marks=pytest.mark.skipif(OLD, reason="5.17 keeps states otherwise")),
    ],
)
def test_targets_that_gain_nothing_are_refused(family, why):
    makers = {
        "Qwen3.5": lambda: make_recurrent(family),
        "DeepSeek-V4": deepseek_v4,
        "BART": lambda: build_encoder("bart"),
    }
    makers["DeepSeek-V3.2"] = lambda: build(KINDS[family].model_type, vocab_size=VOCAB, **KINDS[family].options)
    target = makers[family]() if family in makers else make_family(family, vocab_size=VOCAB)
    assert_refused(target, CONFIG, f"cannot draft with {type(target).__name__}, .*{why}")


def test_bad_values(model, tmp_path):
    assert_refused(
        model, {**CONFIG, "draft_window": None, "draft_sinks": None}, "'draft_window'.*must be a number of tokens"
    )
    assert_refused(model, {**CONFIG, "draft_window": 0}, "'draft_window'.*at least 1")
    assert_refused(model, {**CONFIG, "quantization": "wint8"}, "'quantization'.*the target drafts for itself")
    ids = tmp_path / "ids.json"
    ids.write_text("[5, 6]")
    assert_refused(model, {**CONFIG, "draft_vocabulary": str(ids)}, "'draft_vocabulary'.*scores all tokens")
