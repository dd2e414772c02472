"""Calibration: measured rates against plain forwards, the best tree against all trees, and the command."""

import itertools
import json

import numpy as np
import pytest
import torch
from helpers_eagle import hidden_states
from helpers_speculators import TrueHidden, mlp_checkpoint, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_clean, drafter_of, ragged, tiny_llama
from test_hydra import PlainPrefix, hydra
from test_hydra import write as write_hydra

from hf_specdec import integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.cli import main
from hf_specdec.decoding import calibration
from hf_specdec.decoding.calibration import calibrated_tree, expected_accepted_length, measure_accuracies

NEW, RANKS = 14, 5
PROMPTS = [row[mask > 0].tolist() for row, mask in zip(*ragged([6, 13, 2, 9]).values(), strict=True)]

SMALL = [[token % 7 + 4 for token in prompt] for prompt in PROMPTS]  # for a vocabulary of 11


pytestmark = pytest.mark.usefixtures("forget_decoders")


def decoder_for(model, config):
    return integration.get_decoder(model, parse_config(config))


def continuations(model, prompts=PROMPTS, eos=None):
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        texts.append(
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, eos_token_id=eos)[0].tolist()
        )
    return texts


def expected_rates(texts, depths, logits_after):
    """Rates counted place by place; `logits_after(text, path)` are the drafter's."""
    hits, tried = np.zeros((depths, RANKS)), np.zeros(depths)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        for place in range(len(prompt) + 1, len(text)):
            for depth in range(min(depths, len(text) - place)):
                logits = logits_after(text[:place], text[place : place + depth])
                rank = int((logits > logits[text[place + depth]]).sum())
                tried[depth] += 1
                if rank < RANKS:
                    hits[depth, rank] += 1
    assert hits.sum() > 10
    return hits / tried[:, None]


# ---- measuring ------------------------------------------------------------------------------------------------------


def test_draft_model(tmp_path, model):
    drafter = drafter_of(model, noise=0.3)
    drafter.save_pretrained(tmp_path)
    decoder = decoder_for(model, {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3})
    measured = measure_accuracies(decoder, PROMPTS, NEW, RANKS)

    def logits_after(text, path):
        with torch.no_grad():
            return drafter(torch.tensor([text + path])).logits[0, -1]

    np.testing.assert_allclose(measured, expected_rates(continuations(model), 3, logits_after))
    for size in (1, 3):
        np.testing.assert_array_equal(measure_accuracies(decoder, PROMPTS, NEW, RANKS, batch_size=size), measured)
    assert_clean(model)


def test_speculator(tmp_path):
    """A vocabulary so small that a random head is right at times."""
    target = tiny_llama(vocab_size=11)
    stored, true = mlp_checkpoint(tmp_path, vocab=11), TrueHidden(target)
    decoder = decoder_for(target, {"method": "mlp_speculator", "model": str(tmp_path), "prefill_chunk_size": 4})
    measured = measure_accuracies(decoder, SMALL, NEW, RANKS)
    texts = continuations(target, SMALL)
    np.testing.assert_allclose(
        measured,
        expected_rates(texts, 3, lambda text, path: reference(stored, true(text[:-1]), [text[-1], *path])),
    )
    assert_clean(target)


def test_head_with_a_cache(tmp_path):
    """Hydra++: the prefix layer reads what the target has read, nothing of the text ahead."""
    target = tiny_llama(vocab_size=11)
    tensors = hydra(prefix=True, blocks=2, vocab=11)
    plain = PlainPrefix(tensors, target)
    decoder = decoder_for(target, write_hydra(tmp_path, tensors) | {"prefill_chunk_size": 4})
    measured = measure_accuracies(decoder, SMALL, NEW, RANKS)
    texts = continuations(target, SMALL)
    states = hidden_states(target, [tuple(text) for text in texts])
    owner = {tuple(text[:end]): states[tuple(text)] for text in texts for end in range(1, len(text) + 1)}
    np.testing.assert_allclose(
        measured,
        expected_rates(texts, 4, lambda text, path: plain.draft_logits(tuple(text), path, owner[tuple(text)])),
    )
    assert_clean(target)


def test_counts_follow_the_known_text(tmp_path, model):
    """Also where the target would go another way now."""
    drafter = drafter_of(model, noise=0.3)
    drafter.save_pretrained(tmp_path)
    decoder = decoder_for(model, {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3})
    texts = [
        text[: len(prompt)] + text[len(prompt) :][::-1]
        for text, prompt in zip(continuations(model), PROMPTS, strict=True)
    ]
    counts = calibration._Counts(decoder.generator, RANKS)
    assert calibration._run(decoder, PROMPTS, list(map(len, texts)), frozenset(), texts, counts) == texts
    with torch.no_grad():
        expected = expected_rates(texts, 3, lambda text, path: drafter(torch.tensor([text + path])).logits[0, -1])
    np.testing.assert_allclose(counts.hits / counts.tried[:, None], expected)


def test_a_perfect_drafter_gets_a_chain(tmp_path, model):
    model.save_pretrained(tmp_path)
    decoder = decoder_for(model, {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 4})
    measured = measure_accuracies(decoder, PROMPTS, NEW, RANKS)
    np.testing.assert_array_equal(measured, np.eye(1, RANKS).repeat(4, axis=0))
    assert calibrated_tree(measured, 10) == [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]
    assert expected_accepted_length(measured, calibrated_tree(measured, 10)) == 5


def test_texts_that_end(tmp_path, model):
    """Texts stop at an end token, and a row that is done does not count on."""
    eos = continuations(model)[1][len(PROMPTS[1]) + 4]
    drafter_of(model, 0.3).save_pretrained(tmp_path)
    decoder = decoder_for(model, {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2})
    measured = measure_accuracies(decoder, PROMPTS, NEW, RANKS, frozenset([eos]))
    texts = continuations(model, eos=eos)
    assert len({len(text) - len(prompt) for text, prompt in zip(texts, PROMPTS, strict=True)}) > 1
    drafter = drafter_of(model, 0.3)
    with torch.no_grad():
        expected = expected_rates(texts, 2, lambda text, path: drafter(torch.tensor([text + path])).logits[0, -1])
    np.testing.assert_allclose(measured, expected)
    too_short = measure_accuracies(decoder, PROMPTS, 1, RANKS)
    assert not too_short.any()


def test_the_decoder_can_be_used_again(tmp_path, model):
    drafter_of(model).save_pretrained(tmp_path)
    config = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    tree = calibrated_tree(measure_accuracies(decoder_for(model, config), PROMPTS, NEW, RANKS), 6)
    plain = model.generate(**ragged([6, 3]), max_new_tokens=12)
    with_tree = {"method": "draft_model", "model": str(tmp_path), "speculative_token_tree": tree}
    for each in (config, with_tree):
        assert torch.equal(model.generate(**ragged([6, 3]), max_new_tokens=12, speculative_config=each), plain)
    assert_clean(model)


def test_drafters_that_cannot_be_calibrated(tmp_path, model):
    with pytest.raises(ValueError, match="'ngram' cannot be calibrated"):
        measure_accuracies(decoder_for(model, {"method": "ngram"}), PROMPTS, NEW)
    drafter_of(model).save_pretrained(tmp_path)
    decoder = decoder_for(model, {"method": "draft_model", "model": str(tmp_path)})
    decoder.generator.vocabulary.in_target_vocabulary = False
    with pytest.raises(ValueError, match="does not rank the target's tokens"):
        measure_accuracies(decoder, PROMPTS, NEW)


def test_an_error_leaves_nothing_running(tmp_path, model):
    drafter_of(model).save_pretrained(tmp_path)
    decoder = decoder_for(model, {"method": "draft_model", "model": str(tmp_path)})
    expand, decoder.generator.expand = decoder.generator.expand, None
    with pytest.raises(TypeError):
        measure_accuracies(decoder, PROMPTS, NEW)
    decoder.generator.expand = expand
    assert measure_accuracies(decoder, PROMPTS, NEW).any()
    assert_clean(model)


# ---- the tree -------------------------------------------------------------------------------------------------------


def all_trees(depths, ranks, size):
    """Every set of `size` paths that holds all its prefixes."""
    trees = {frozenset()}
    for _ in range(size):
        trees = {
            tree | {(*parent, rank)}
            for tree in trees
            for parent in tree | {()}
            if len(parent) < depths
            for rank in range(ranks)
            if (*parent, rank) not in tree
        }
    return trees


@pytest.mark.parametrize(("depths", "ranks", "size"), [(1, 4, 3), (3, 2, 5), (2, 3, 5), (4, 2, 4)])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_tree_is_better(depths, ranks, size, data):
    """Rates in any order: the tree's expected length is the greatest of all trees of its size."""
    rate = st.one_of(st.just(0.0), st.floats(0.01, 1.0))
    rows = data.draw(st.lists(st.lists(rate, min_size=ranks, max_size=ranks), min_size=depths, max_size=depths))
    rates = np.array(rows)
    rates[0, data.draw(st.integers(0, ranks - 1))] = 0.5
    tree = calibrated_tree(rates, size)
    assert len(tree) <= size and len(set(map(tuple, tree))) == len(tree)
    assert all(len(path) == 1 or path[:-1] in tree for path in tree)
    best = max(
        expected_accepted_length(rates, [list(path) for path in each]) for each in all_trees(depths, ranks, size)
    )
    assert expected_accepted_length(rates, tree) == pytest.approx(best)


def test_expected_length():
    rates = np.array([[0.5, 0.25], [0.4, 0.1]])
    assert expected_accepted_length(rates, [[0], [1], [0, 0], [1, 1]]) == pytest.approx(1 + 0.5 + 0.25 + 0.2 + 0.025)
    assert expected_accepted_length(rates, []) == 1


def test_nodes_that_are_never_right_are_left_out():
    rates = np.array([[0.5, 0.0, 0.2], [0.0, 0.0, 0.0]])
    assert calibrated_tree(rates, 10) == [[0], [2]]
    for bad in (np.zeros((2, 3)), np.zeros((0, 3))):
        with pytest.raises(ValueError, match="sometimes right"):
            calibrated_tree(bad, 4)


def test_the_tree_is_a_configuration():
    rates = np.outer([0.9, 0.8, 0.7], [0.6, 0.2, 0.1])
    for size in (1, 7, 30):
        tree = calibrated_tree(rates, size)
        template = parse_config({"method": "draft_model", "model": "x", "speculative_token_tree": tree}).shape()
        assert template.num_nodes(template.depth) == len(tree) == size


# ---- the command ----------------------------------------------------------------------------------------------------

DRAFT = '{"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3}'


def test_command(tmp_path, capsys):
    out_file = tmp_path / "tree.json"
    code = main(
        ["calibrate", "tiny", "--speculative-config", DRAFT, "--limit", "2", "--max-new-tokens", "12", "--nodes", "7",
         "--ranks", "4", "--json", str(out_file)]
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0, err
    lines, report = out.strip().splitlines(), json.loads(out_file.read_text())
    fitted = json.loads(lines[-1])
    assert fitted == report["speculative_config"] and "num_speculative_tokens" not in fitted
    assert len(fitted["speculative_token_tree"]) <= 7 and parse_config(fitted).shape().depth <= 3
    rates = np.array(report["accuracies"])
    assert rates.shape == (3, 4) and 0 < rates[0].sum() <= 1
    assert f"{100 * rates[0, 0]:.1f}" in out
    assert f"expected τ: {expected_accepted_length(rates, fitted['speculative_token_tree']):.2f}" in out
    for depth, rank in itertools.product(range(3), range(4)):
        assert 0 <= rates[depth, rank] <= 1
    code = main(["generate", "tiny", "--prompt", "A dog", "--max-new-tokens", "8", "--speculative-config", lines[-1]])
    assert code == 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--speculative-config", '{"method": "ngram"}'], "'ngram' cannot be calibrated"),
        (["--speculative-config", DRAFT, "--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--speculative-config", DRAFT, "--nodes", "0"], "at least 1"),
        ([], "--speculative-config"),
    ],
)
def test_command_errors_are_one_line(capsys, argv, says):
    try:
        code = main(["calibrate", "tiny", "--limit", "1", "--max-new-tokens", "4", *argv])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1) and says in err


def test_help(capsys):
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    assert "examples:" in capsys.readouterr().out
