"""The scheduler scenario of test_scheduling.py with every drafter that has state of its own: heads, tables, windows, hybrids.

Heads have random weights, so little is accepted; what is tested is that features, caches and slots follow rows that join in
chunks, pause, lose their memory, are cancelled and end.
"""

import helpers_medusa
import pytest
import test_hydra
import torch
from helpers_dflash import make as dflash_checkpoint
from helpers_eagle3 import write as eagle3_checkpoint
from helpers_mtp import store as mtp_checkpoint
from helpers_speculators import lstm_checkpoint, mlp_checkpoint
from oracle import VOCAB, drafter_of, tiny_llama
from scheduling import make_decoder, run_scenario
from test_checkpoints import write as eagle_checkpoint

from hf_specdec.core.sequence import Sequence

PROMPT = [5, 6, 7, 8, 5, 6]
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2, "num_speculative_tokens": 2}
TREE = {"top_k": 2, "total_tokens": 7, "depth": 3}


@pytest.fixture(scope="module")
def target():
    return tiny_llama(max_position_embeddings=512)


def made(name, target, folder):
    """The configuration of a method, its checkpoint written to `folder`."""
    folder = folder / "head"
    if name == "eagle":
        return {"method": "eagle", "model": str(eagle_checkpoint(folder))}
    if name == "eagle3":
        return {"method": "eagle3", "model": eagle3_checkpoint(folder, "yuhuili")[1], **TREE}
    if name == "mlp_speculator":
        return {"method": "mlp_speculator", "model": str(mlp_checkpoint(folder).folder)}
    if name == "arctic":
        return {"method": "arctic", "model": str(lstm_checkpoint(folder).folder), "branching_factors": [2, 2]}
    if name == "medusa":
        return {
            **helpers_medusa.write(folder, helpers_medusa.original()),
            "speculative_token_tree": [[0], [1], [0, 0], [0, 1]],
        }
    if name == "hydra":
        return test_hydra.write(folder, test_hydra.hydra())
    if name == "hydra++":
        return test_hydra.write(folder, test_hydra.hydra(prefix=True, blocks=2))
    if name == "dflash":
        return {"method": "dflash", "model": dflash_checkpoint(folder, target).folder}
    if name == "pard":
        drafter_of(target).save_pretrained(folder)
        return {"method": "pard", "model": str(folder), "mask_token_id": 5, "num_speculative_tokens": 3}
    if name == "hybrid":
        second = {"method": "eagle", "model": str(eagle_checkpoint(folder)), "num_speculative_tokens": 2}
        return {"method": "hybrid", "first": NGRAM, "second": second}
    return {"method": name}


NUM_REQUESTS = {"pard": 24, "token_recycling": 20, "lookahead": 20}  # as many as it takes until one is preempted
METHODS = [
    "eagle", "eagle3", "mlp_speculator", "arctic", "medusa", "hydra", "hydra++", "dflash", "pard", "hybrid", "token_recycling",
    "lookahead",
]  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ("eagle", "hydra") else n for n in METHODS]
)
def test_requests_join_leave_wait_and_are_preempted(target, name, tmp_path):
    run_scenario(target, None, made(name, target, tmp_path), num_requests=NUM_REQUESTS.get(name, 14), vocab_size=VOCAB)


@pytest.mark.long
def test_mtp(tmp_path):
    """Its target is one of the families that have such layers."""
    stored = mtp_checkpoint(tmp_path / "target", "GLM-4.5", num_modules=2)
    config = {"method": "mtp", "model": str(stored.folder), "num_speculative_tokens": 3}
    run_scenario(stored.model, None, config, num_requests=34, vocab_size=stored.model.config.vocab_size)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "hydra++", "dflash", "pard"])
def test_a_drafter_has_no_cache_until_it_is_asked(target, name, tmp_path):
    """Rows that joined and were read before that are read by the drafter when it is first asked. A run in which it is never asked
    costs no cache, and the next one asks anew."""
    decoder = make_decoder(target, made(name, target, tmp_path))
    plain = target.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0].tolist()
    for asks in (False, True, False):
        decoder.allocate(200, 2)
        rows = [Sequence(list(PROMPT), len(PROMPT) + 12, num_speculative_tokens=0) for _ in range(2)]
        with decoder.active():
            for seq in rows:
                decoder.add(seq)
            drafted = 0
            while not all(seq.finished for seq in rows):
                assert (decoder.generator.pages is not None) == bool(drafted)
                if asks and len(rows[0].tokens) > len(PROMPT) + 3:
                    rows[0].num_speculative_tokens = 2
                decoder.step([seq for seq in rows if not seq.finished])
                drafted += decoder.statistics[rows[0].id].steps[-1][0]
            assert (drafted > 0) == asks
            for seq in rows:
                decoder.remove(seq)
        assert [seq.tokens for seq in rows] == [plain] * 2
        decoder.release()
        assert decoder.generator.pages is None
