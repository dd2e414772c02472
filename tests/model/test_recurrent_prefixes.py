"""Prefixes of targets whose layers have a state are shared where a state was kept after exactly their tokens."""

import pytest
import torch
from cache_checks import check_cache, check_prefix_states
from recurrent_families import FAMILIES, make, perturbed
from test_recurrent import SHORT, plain
from transformers.cache_utils import Cache

from hf_specdec import LLM, bundled, parse_config
from hf_specdec.cache.state_pool import KeptStates, PrefixStates
from hf_specdec.candidate_generators.base import DrafterContext
from hf_specdec.integration import make_decoder
from hf_specdec.model.recurrent import families
from hf_specdec.serve.engine.engine import Engine
from hf_specdec.serve.engine.params import SamplingParams

pytestmark = pytest.mark.skipif(
    not hasattr(Cache, "get_conv_state"), reason="needs transformers 5.23, as the models do"
)
ALL = [
    pytest.param(name, marks=() if name in SHORT else pytest.mark.slow)
    for name in FAMILIES
    if name not in ("Jamba", "Zamba", "Mamba", "FalconMamba")  # their chunk form starts from no state
]
PREFIX = torch.randint(5, 120, (150,), generator=torch.Generator().manual_seed(1)).tolist()
CHUNK = 64  # of all these models
NEW = 10


def prompt(length, seed, prefix=PREFIX):
    return prefix + torch.randint(5, 120, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Run:
    """One engine, and the answers that it should give."""

    def __init__(self, model, drafter=None, states="kept", **engine):
        config = {"method": "draft_model", "num_speculative_tokens": 3} if drafter else {"method": "none"}
        config = parse_config({**config, "block_size": 8, "recurrent_states": states})
        self.model, self.drafter = model, drafter
        self.decoder = make_decoder(model, config, DrafterContext(assistant_model=drafter))
        self.engine = Engine(self.decoder, None, num_blocks=engine.pop("num_blocks", 256), max_model_len=400, **engine)

    def add(self, ids, new=NEW, **params):
        params = SamplingParams(**{"temperature": 0, "max_tokens": new, "ignore_eos": True, **params})
        return self.engine.add("r", None, ids, params)

    def answers(self, *prompts, new=NEW):
        """Cached tokens of requests that come together; their answers are those of plain `generate()`."""
        requests = [self.add(ids, new) for ids in prompts]
        self.engine.run()
        for request in requests:
            expected = plain(self.model, {"input_ids": torch.tensor([request.prompt_token_ids])}, new)
            assert request.prompt_token_ids + request.choices[0].output.token_ids == expected[0].tolist()
        check_cache(self.decoder.cache)
        return [request.num_cached_tokens for request in requests]


@pytest.mark.long
@pytest.mark.parametrize("states", ["kept", "replayed"])
@pytest.mark.parametrize("name", ALL)
def test_a_shared_prefix_is_read_once(name, states):
    """The second text shows where they part, and its state there is kept; the third begins there."""
    if states == "replayed" and families.FAMILIES[FAMILIES[name][0]].steps:
        pytest.skip("layers that read token by token replay nothing, which test_recurrent.py sees refused")
    model = make(name)
    run = Run(model, perturbed(model), states)
    assert [run.answers(prompt(9 + seed, seed))[0] for seed in range(4)] == [0, 0, 2 * CHUNK, 2 * CHUNK]
    assert run.answers(prompt(5, 7), prompt(30, 8), prompt(70, 9)) == [2 * CHUNK] * 3
    assert run.answers(PREFIX[:100] + [7, 8, 9]) == [0]  # a shorter beginning: its state is not known yet
    assert run.answers(PREFIX[:100] + [9, 8, 7]) == [CHUNK]
    assert run.answers(prompt(9, 1)) == [2 * CHUNK]
    run.engine.decoder.forget_prefixes()
    assert run.answers(prompt(9, 2)) == [0]
    run.engine.close()


def test_what_a_text_wrote_itself_is_no_beginning_of_a_prompt():
    """Nemotron-H reads prompts by another rule than its own tokens: only states, keys and values of prompts are shared."""
    model = make("Nemotron-H")
    run = Run(model)
    first = prompt(4, 0)
    request = run.add(first, 60)
    run.engine.run()
    conversation = first + request.choices[0].output.token_ids
    assert len(conversation) > 3 * CHUNK > len(first)
    assert [run.answers([*conversation, turn, turn])[0] for turn in (7, 8, 9)] == [0, 2 * CHUNK, 3 * CHUNK]
    # A row that comes back goes on from no state beyond its prompt, though one of another's prompt is there.
    request = run.add(first, 60)
    with run.decoder.active():
        while len(request.choices[0].output.token_ids) < 50:
            run.engine.step()
        run.engine.scheduler.preempt(request.choices[0])
        while run.engine.has_work:
            run.engine.step()
    expected = plain(model, {"input_ids": torch.tensor([first])}, 60)[0].tolist()
    assert first + request.choices[0].output.token_ids == expected
    run.engine.close()


@pytest.mark.long
def test_rows_that_give_way_begin_at_the_prefix():
    model = make("Qwen3-Next")
    run = Run(model, perturbed(model), num_blocks=42, max_num_seqs=4)
    for seed in range(3):
        run.answers(prompt(3, seed))
    assert run.answers(*(prompt(20 + seed, seed) for seed in range(5)), new=40) == [2 * CHUNK] * 5
    assert run.engine.scheduler.num_preemptions
    assert run.decoder.cache.states.num_used == 0
    run.engine.close()


def test_prompts_in_chunks_keep_states_on_the_way():
    """Chunks end at multiples of the layers' own chunk, and their states cost nothing more."""
    model = make("Qwen3-Next")
    run = Run(model, max_num_batched_tokens=70)
    assert run.answers(prompt(9, 0)) == [0]
    assert run.answers(prompt(9, 1)) == [2 * CHUNK]
    run.engine.close()


def test_seeded_answers_do_not_depend_on_what_is_cached():
    model = make("Granite-hybrid")
    run, texts = Run(model, perturbed(model)), []
    for seed in (0, 1, 2, 2, 2):
        request = run.add(prompt(9, seed), temperature=0.9, seed=3)
        run.engine.run()
        texts.append((request.num_cached_tokens, request.choices[0].output.token_ids))
    assert [cached for cached, _ in texts] == [0, 0, 2 * CHUNK, 2 * CHUNK, 2 * CHUNK]
    alone = Run(model)
    request = alone.add(prompt(9, 2), temperature=0.9, seed=3)
    alone.engine.run()
    assert [text for _, text in texts[2:]] == [request.choices[0].output.token_ids] * 3
    for each in (run, alone):
        each.engine.close()


def test_static_batches_and_jamba_share_none():
    """A static batch begins at once, and Jamba would read the rest of a prompt token by token."""
    model = make("Jamba")
    run = Run(model)
    assert [run.answers(prompt(9, seed))[0] for seed in range(3)] == [0, 0, 0]
    run.engine.close()
    config = parse_config({"method": "none"})
    decoder = make_decoder(make("Qwen3-Next"), config)
    decoder.allocate(100, 2)
    assert not decoder.cache.share_prefixes


def test_memory_of_kept_states_is_bounded():
    """The one that was not used for longest goes first; what is larger than the memory is not kept."""

    def states(size=4):
        return KeptStates({0: torch.zeros(size // 4)}, {})

    kept = PrefixStates(8, 12)
    for name in (b"a", b"b", b"c"):
        kept.put(name, states())
    kept.get(b"a")
    kept.put(b"d", states())
    kept.put(b"e", states(16))
    assert [name in kept for name in (b"a", b"b", b"c", b"d", b"e")] == [True, False, True, True, False]
    assert kept.longest([b"x", b"a", b"b", b"d", b"y"]) == 4 and kept.longest([b"x"]) == 0
    check_prefix_states(kept)
    kept.forget()
    check_prefix_states(kept)
    assert kept.longest([b"a"]) == 0


def test_a_head_and_its_hybrid_target_share_a_prefix():
    """The bundled hybrid with its own MTP layer: chats with one system prompt, of which both read only what differs."""
    name = bundled("tiny-hybrid")
    llm = LLM(
        name, name, {"method": "mtp", "model": name, "num_speculative_tokens": 3}, max_model_len=400, dtype="float32"
    )
    params = SamplingParams(temperature=0, max_tokens=24)
    story = "You tell stories. " + "The dog and the cat went to the park, and they were very happy there. " * 9
    system, cached = {"role": "system", "content": story}, []
    for question in ("Tell me of a dog.", "Who went to the park?", "Was it a cat?", "Tell me a story."):
        conversation = [system, {"role": "user", "content": question}]
        (output,) = llm.chat([conversation], params, use_tqdm=False)
        ids = torch.tensor([output.prompt_token_ids])
        expected = llm.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        assert output.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist()
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 2 * CHUNK, 2 * CHUNK]
    check_cache(llm.engine.decoder.cache)
    llm.close()
