"""Drafters that keep one hidden state per sequence: it is the right one whatever joins, leaves, waits or is preempted."""

import random

import pytest
import torch
from helpers_speculators import TrueHidden, lstm_checkpoint, mlp_checkpoint
from oracle import ragged, tiny_llama
from scheduling import make_decoder

import hf_specdec
from hf_specdec.candidate_generators import generator_class, parse_config
from hf_specdec.core.sequence import Sequence
from hf_specdec.decoding import SpeculativeDecoder
from hf_specdec.model.prepare import prepare

VOCAB = 11
TREE = {"branching_factors": [5, 3, 1]}


@pytest.fixture(scope="module")
def model():
    return tiny_llama(vocab_size=VOCAB)


def allocated(model, folder, **keys):
    """A decoder and its generator, with a pool for a few sequences."""
    mlp_checkpoint(folder, vocab=VOCAB)
    config = {"method": "mlp_speculator", "model": str(folder), "block_size": 4, "num_blocks": 60, **keys}
    decoder = make_decoder(model, config)
    decoder.allocate(0, 2)
    return decoder, decoder.generator


def prompt(rng, longest=17):
    return [rng.randrange(4, VOCAB) for _ in range(rng.randint(1, longest))]


def check_states(generator, true):
    for seq_id, seq in generator.followed.items():
        if seq_id in generator.hidden and not seq.finished:
            torch.testing.assert_close(generator.hidden[seq_id].double(), true(seq.tokens[:-1]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("seed", range(3))
def test_states_follow_their_texts(tmp_path, model, shape, seed):
    """Random arrivals, prompt chunks, pauses, preemptions, cancellations and row limits: every state that is kept is the
    target's own behind the row's text, rows without one are not drafted for, and all texts are plain decoding's."""
    rng, true = random.Random(seed), TrueHidden(model)
    decoder, generator = allocated(model, tmp_path, **shape)
    generator.followed, finished, running, submitted, drafted, undrafted = {}, [], [], 0, 0, 0
    propose = generator.propose

    def checked_propose(sequences, limits):
        nonlocal drafted, undrafted
        known, trees = set(generator.hidden), propose(sequences, limits)
        for seq, limit, length in zip(sequences, limits, trees.lengths, strict=True):
            assert (length > 0) == (limit > 0 and seq.id in known)
            drafted, undrafted = drafted + (length > 0), undrafted + (limit > 0 and not length)
        return trees

    generator.propose = checked_propose
    with decoder.active():
        while submitted < 12 or running:
            if submitted < 12 and len(running) < 5 and rng.random() < 0.5:
                tokens = prompt(rng)
                seq = Sequence(
                    tokens, len(tokens) + rng.randint(1, 14), num_speculative_tokens=rng.choice([None, None, 0, 1])
                )
                decoder.add(seq)
                generator.followed[seq.id] = seq
                running.append(seq)
                submitted += 1
            chosen = [seq for seq in running if rng.random() < 0.8]
            if chosen:
                chunks = [rng.randint(1, 40) for _ in chosen]
                decoder.step(chosen, chunks)
                check_states(generator, true)
            for seq in list(running):
                if seq.finished or rng.random() < 0.02:
                    decoder.remove(seq)
                    running.remove(seq)
                    del generator.followed[seq.id]
                    finished += [seq] if seq.finished else []
                elif rng.random() < 0.05:
                    decoder.preempt(seq)
                    assert seq.id not in generator.hidden
    assert drafted > 20 and undrafted > 5 and len(finished) > 5
    assert not generator.hidden
    for seq in finished:
        text = torch.tensor([seq.tokens[: seq.prompt_length]])
        plain = model.generate(text, max_new_tokens=seq.num_generated, attention_mask=torch.ones_like(text))
        assert plain[0].tolist() == seq.tokens


def test_nothing_is_drafted_before_a_prompt_has_been_read(tmp_path, model):
    decoder, generator = allocated(model, tmp_path)
    first, second = Sequence([5, 6, 7], 20), Sequence([8, 9, 10, 4], 20)
    with decoder.active():
        decoder.add(first)
        decoder.step([first])
        decoder.remove(first)
        decoder.add(second)
        decoder.step([second], [2])
        assert not generator.hidden and generator.propose([second], [3]).lengths == [0]
        decoder.step([second], [2])
        assert set(generator.hidden) == {second.id} and generator.propose([second], [3]).lengths == [3]
        assert generator.propose([second], [2]).lengths == [2]
        decoder.remove(second)
    decoder.release()
    assert not generator.hidden and generator.state is None


@pytest.mark.parametrize("build", [mlp_checkpoint, lstm_checkpoint])
def test_rows_of_a_level_may_end_before_others(tmp_path, model, build):
    """Rows with different limits in one batch draft what each would draft alone."""
    build(tmp_path / "heads", vocab=VOCAB)
    for shape in ({}, TREE):
        config = parse_config({"method": "arctic", "model": str(tmp_path / "heads"), **shape})
        target = prepare(model)
        decoder = SpeculativeDecoder(generator_class("arctic")(config, target))
        decoder.allocate(400, 4)
        rng = random.Random(3)
        rows = [Sequence(prompt(rng), 40) for _ in range(4)]
        with decoder.active():
            for seq in rows:
                decoder.add(seq)
            decoder.step(rows)
            limits = [1, 3, 0, 2]
            together = decoder.generator.propose(rows, limits)
            for i, (seq, limit) in enumerate(zip(rows, limits, strict=True)):
                alone = decoder.generator.propose([seq], [limit])
                assert together.lengths[i] == alone.lengths[0]
                count = alone.lengths[0]
                assert together.tokens[i, :count].tolist() == alone.tokens[0, :count].tolist()


def test_in_transformers_own_loop(tmp_path, model):
    """transformers' assisted generation has the same features, by hooks."""
    mlp_checkpoint(tmp_path, vocab=VOCAB)
    inputs = ragged([9], vocab_size=VOCAB)
    plain = model.generate(**inputs, max_new_tokens=20)
    with hf_specdec.assisted_loop(model, {"method": "mlp_speculator", "model": str(tmp_path)}) as drafter:
        generator = drafter.generator
        lengths, propose = [], generator.propose
        generator.propose = lambda *args: lengths.append(propose(*args)) or lengths[-1]
        assert torch.equal(model.generate(**inputs, max_new_tokens=20, prompt_lookup_num_tokens=1), plain)
    assert sum(trees.lengths[0] > 0 for trees in lengths) > 3
