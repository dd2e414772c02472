"""Heads keep their own keys and values of a prefix beside the target's, so that both read a shared prefix once."""

import pytest
import torch
from cache_checks import check_blocks
from helpers_mtp import store as mtp_checkpoint
from oracle import VOCAB, tiny_llama
from test_scheduling_heads import made

from hf_specdec import parse_config
from hf_specdec.integration import make_decoder
from hf_specdec.serve.engine.engine import Engine
from hf_specdec.serve.engine.params import SamplingParams

BLOCK = 8
METHODS = ["eagle", "eagle3", "hydra++", "dflash", "hybrid", "mtp", "mtp in turn"]
PREFIX = torch.randint(3, VOCAB, (43,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def target():
    return tiny_llama(max_position_embeddings=512)


def target_and_config(name, target, folder):
    if name.startswith("mtp"):
        stored = mtp_checkpoint(folder / "target", "GLM-4.5", num_modules=3 if name == "mtp in turn" else 1)
        return stored.model, {"method": "mtp", "model": str(stored.folder), "num_speculative_tokens": 3}
    return target, made(name, target, folder)


class Run:
    """One engine that answers requests one after another, and what its drafter proposed."""

    def __init__(self, model, config, shares=True, block_size=BLOCK):
        decoder = make_decoder(model, parse_config({**config, "block_size": block_size}))
        self.engine = Engine(decoder, None, num_blocks=512 // block_size, max_model_len=256)
        decoder.cache.share_prefixes = shares
        self.drafts, propose = [], decoder.generator.propose

        def noting(*args):
            trees = propose(*args)
            self.drafts.append([trees.tokens.tolist(), trees.lengths])
            return trees

        decoder.generator.propose = noting

    def answer(self, prompt, max_tokens=8):
        """(new tokens, cached tokens)"""
        request = self.engine.add(
            "r", None, prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        )
        self.engine.run()
        return request.choices[0].output.token_ids, request.num_cached_tokens


def prompts(count, vocab_size=VOCAB):
    random = torch.Generator().manual_seed(2)
    return [
        [token % vocab_size for token in PREFIX] + torch.randint(3, vocab_size, (3 + i,), generator=random).tolist()
        for i in range(count)
    ]


@pytest.mark.parametrize("name", METHODS)
def test_a_shared_prefix_is_read_once(target, name, tmp_path):
    """As many tokens come from the cache as without a drafter, the drafts are the same as without a cache, and so is the text."""
    model, config = target_and_config(name, target, tmp_path)
    ours, without, plain = Run(model, config), Run(model, config, shares=False), Run(model, {"method": "none"})
    for prompt in prompts(3, model.config.vocab_size):
        answer, cached = ours.answer(prompt)
        assert (answer, 0) == without.answer(prompt)
        assert (answer, cached) == plain.answer(prompt)
    assert cached == 40
    assert ours.drafts == without.drafts and any(any(lengths) for _, lengths in ours.drafts)
    again, all_of_it = ours.answer(prompt + answer)  # a later turn: the answer's tokens are cached, too
    assert all_of_it == (len(prompt) + len(answer) - 1) // BLOCK * BLOCK
    assert again == without.answer(prompt + answer)[0]
    for run in (ours, without, plain):
        check_blocks(run.engine.decoder.cache.pool)
        run.engine.close()


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_a_text_that_ends_before_it_is_drafted_for_is_kept(target, name, tmp_path):
    run = Run(*target_and_config(name, target, tmp_path))
    assert [run.answer(prompt, max_tokens=1)[1] for prompt in prompts(3)] == [0, 40, 40]


def test_the_head_decides_where_it_knows_less(target, tmp_path):
    """The prefix ends with a block. The head's last row of it has read the token after it, which differs."""
    run = Run(*target_and_config("eagle", target, tmp_path))
    first, second = ([*PREFIX[: 4 * BLOCK], *tail] for tail in ([5, 6, 7], [8, 9]))
    assert run.answer(first)[1] == 0
    assert run.answer(second) == (Run(target, {"method": "none"}).answer(second)[0], 3 * BLOCK)


def test_a_changed_model_forgets_what_the_head_read(target, tmp_path):
    run = Run(*target_and_config("eagle3", target, tmp_path))
    (prompt,) = prompts(1)
    assert [run.answer(prompt)[1] for _ in range(2)] == [0, 40]
    run.engine.decoder.forget_prefixes()
    cache = run.engine.decoder.generator.cache
    cache.add(-1)
    assert cache.known_prefix(-1, prompt) == 0
    cache.remove(-1)
    assert run.answer(prompt)[1] == 0


def test_a_drafter_that_keeps_nothing_reads_every_token(target):
    """The default for a method of one's own that taps features of the whole text."""
    run = Run(target, {"method": "ngram"})
    generator = run.engine.decoder.generator
    generator.taps = generator.taps.__class__(last_hidden=True)
    (prompt,) = prompts(1)
    assert [run.answer(prompt)[1] for _ in range(2)] == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_modules_in_turn_share_blocks_of_any_size(tmp_path, block_size):
    """Blocks that end before the last module has begun, and prefixes of all lengths; what the modules reached is let go with the text."""
    model, config = target_and_config("mtp in turn", None, tmp_path)
    run, without = (Run(model, config, shares, block_size) for shares in (True, False))
    base = prompts(1, model.config.vocab_size)[0]
    for length in (40, 1, 2, 3, 5, 18, 33, 34, 40, 40):
        prompt = [*base[:length], 7, 11]
        assert run.answer(prompt)[0] == without.answer(prompt)[0]
    assert run.drafts == without.drafts and run.answer(prompt)[1] > 30
    boundaries = run.engine.decoder.generator.boundaries
    assert not boundaries._waiting and boundaries._kept
    run.engine.decoder.forget_prefixes()
    assert not boundaries._kept
    run.engine.close(), without.engine.close()


def test_states_at_the_ends_of_blocks_go_with_the_blocks(tmp_path):
    """Many texts in a small pool: states are kept for about as many blocks as there are."""
    model, config = target_and_config("mtp in turn", None, tmp_path)
    run = Run(model, config)
    random = torch.Generator().manual_seed(3)
    for _ in range(40):
        run.answer(torch.randint(3, model.config.vocab_size, (50,), generator=random).tolist(), max_tokens=2)
    generator = run.engine.decoder.generator
    kept, blocks = len(generator.boundaries._kept), generator.cache.pool.num_blocks
    assert 0 < kept <= 2 * blocks + 8 and 2 * blocks + 8 < 40 * 6, (kept, blocks)
    run.engine.close()
