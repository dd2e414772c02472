"""Attention to compressed segments of the text (DeepSeek-V4): greedy text is that of plain `generate()` for each row alone.

Alone, because plain `generate()` compresses padding, too: `test_padding_changes_plain_text`.
"""

import pytest
import torch
import transformers
from families import VOCAB, deepseek_v4, perturbed
from recurrent_families import WrongAt, WrongAtInTrees

import hf_specdec
from hf_specdec import integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.core.names import CACHE
from hf_specdec.decoding import SpeculativeDecoder
from hf_specdec.model import captures, segments
from hf_specdec.model.prepare import ModelOptions, prepare

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "DeepseekV4ForCausalLM"), reason="this transformers has no DeepSeek-V4"
)
NEW, LENGTHS = 40, (17, 3, 9, 30, 1)
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
CHAIN, TREE = (
    {"method": "draft_model", "num_speculative_tokens": 4},
    {"method": "draft_model", "branching_factors": [3, 2, 1]},
)
METHODS = {
    "none": {"method": "none"}, "ngram": NGRAM, "chain": CHAIN, "tree": TREE, "recycling": {"method": "token_recycling"},
    "prompts in parts, beside rows that decode": {**TREE, "prefill_chunk_size": 7, "block_size": 4},
    "rows that wait and are read again": {**CHAIN, "num_blocks": 20, "block_size": 4},
}  # fmt: skip


def rows_of(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, VOCAB, (1, length), generator=generator) for length in lengths]


def padded(rows):
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


@pytest.fixture(scope="module")
def models():
    model = deepseek_v4()
    drafter = perturbed(model, 0.05)
    drafter.load_state_dict(dict(model.named_buffers()), strict=False)
    yield model, drafter
    hf_specdec.release(model)


@pytest.fixture(scope="module")
def texts(models):
    """What the target writes after each row of `rows_of()` alone."""
    return [models[0].generate(row, max_new_tokens=NEW + 5, do_sample=False)[0].tolist() for row in rows_of()]


def generate(models, inputs, config=None, **options):
    if config is not None:
        options["speculative_config"] = config
        if config["method"] == "draft_model":
            options["assistant_model"] = models[1]
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **options}
    return models[0].generate(**inputs, **options)


def assert_rows(output, texts, rows):
    width = max(row.shape[1] for row in rows)
    for written, text, row in zip(output.sequences, texts, rows, strict=True):
        assert written[width - row.shape[1] :].tolist() == text[: row.shape[1] + NEW]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_plain_text(method, models, texts, monkeypatch):
    preempted, preempt = [], SpeculativeDecoder.preempt
    monkeypatch.setattr(
        SpeculativeDecoder, "preempt", lambda decoder, seq: preempted.append(seq.num_generated) or preempt(decoder, seq)
    )
    assert min(len(set(text[-NEW:])) for text in texts) > NEW // 3  # the texts do not loop
    output = generate(models, padded(rows_of()), METHODS[method])
    assert_rows(output, texts, rows_of())
    if method in ("chain", "tree"):
        assert 1.2 < output.speculation.mean_accepted_length < 4
        assert_rows(generate(models, padded(rows_of()[:1]), METHODS[method]), texts[:1], rows_of()[:1])
    assert bool(preempted) == (method == "rows that wait and are read again")


@pytest.mark.parametrize("drafter", [WrongAt, WrongAtInTrees])
def test_rejections_at_every_position(drafter, models, texts, monkeypatch):
    WrongAt.texts = texts
    config = {"method": "ngram", "num_speculative_tokens": 3}
    decoder = SpeculativeDecoder(drafter(parse_config(config), prepare(models[0])))
    monkeypatch.setattr(integration, "get_decoder", lambda *_: decoder)
    output = generate(models, padded(rows_of()), config)
    assert_rows(output, texts, rows_of())
    depths = output.speculation.acceptance_per_position
    assert len(depths) == 3 and 0 < depths[2] < depths[0] < 1  # some rounds accept none, some all


def test_sampled_text_depends_on_the_seed_alone(models):
    """Rows of equal length: the reference is our text without drafts."""
    inputs = {"input_ids": torch.cat(rows_of((13, 13)))}
    sampled = [
        generate(models, inputs, {**METHODS[name], "seed": 5}, do_sample=True).sequences
        for name in ("none", "ngram", "tree", "rows that wait and are read again")
    ]
    assert all(torch.equal(text, sampled[0]) for text in sampled)
    assert not torch.equal(sampled[0], generate(models, inputs, {**NGRAM, "seed": 6}, do_sample=True).sequences)


def test_prompts_in_parts_and_shared(models, monkeypatch):
    """Queries of a long prompt are taken in several products; rows share blocks as these are written."""
    monkeypatch.setattr(segments, "_MOST_QUERIES", 16)
    rows = rows_of((100, 45))
    rows.append(torch.cat([rows[0][:, :60], rows[1]], dim=1))
    expected = [models[0].generate(row, max_new_tokens=NEW, do_sample=False)[0].tolist() for row in rows]
    output = generate(models, padded(rows), {**NGRAM, "block_size": 4, "prefill_chunk_size": 50})
    assert_rows(output, expected, rows)


def test_padding_changes_plain_text(models, texts):
    rows = rows_of()
    plain = generate(models, padded(rows)).sequences
    assert plain[3].tolist() == texts[3][: 30 + NEW]
    assert any(
        written[30:].tolist() != text[len(text) - NEW - 5 : -5] for written, text in zip(plain, texts, strict=True)
    )


def test_hidden_states_have_streams(models):
    inputs = {"input_ids": torch.cat(rows_of((9, 9)))}
    plain, ours = (generate(models, inputs, config, output_hidden_states=True) for config in (None, NGRAM))
    for before, after in zip(plain.hidden_states, ours.hidden_states, strict=True):
        for expected, found in zip(before, after, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert ours.hidden_states[0][1].shape == (2, 9, 2, 48)


def test_what_segments_cannot_do(models, caplog):
    model = models[0]
    for option in ("deterministic", "compile"):
        with pytest.raises(UnsupportedModel, match="compress segments of the text"):
            prepare(model, ModelOptions(**{option: True}))
    assert "compress segments of the text row by row" in captures.capture_obstacle(prepare(model))
    prompt = {"input_ids": rows_of()[0]}
    assert CACHE not in generate(models, prompt, NGRAM)
    assert "The output has no cache: DeepseekV4ForCausalLM compresses segments" in caplog.text
    with pytest.raises(UnsupportedModel, match="what an open segment needs: pass input_ids alone"):
        generate(models, {"inputs_embeds": model.get_input_embeddings()(rows_of()[0])}, NGRAM)
    given = generate(models, prompt)
    with pytest.raises(ValueError, match="no longer hold the whole text"):
        generate(models, {"input_ids": given.sequences, CACHE: given[CACHE]}, NGRAM)


def test_a_token_keeps_its_keys_once(models):
    """Keys are values. A closed segment's entry, and what it is made of, are kept in further pools."""
    own, sparse, heavy = 16, 4 * 16 + 16 + 4 * 16 + 16, 2 * 16 + 16
    assert prepare(models[0]).bytes_per_token() == 4 * (3 * own + sparse + heavy)
