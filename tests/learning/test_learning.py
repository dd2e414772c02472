"""Heads that learn while they serve: what they learn from, what it costs, and that the text stays the target's."""

import json
import shutil
import threading

import pytest
import torch
from cache_checks import check_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import ragged
from safetensors.torch import load_file, save_file

import hf_specdec
from hf_specdec import LLM, SamplingParams, SpeculativeConfigError, parse_config
from hf_specdec.bundled import resolve_model
from hf_specdec.candidate_generators.base import DrafterContext
from hf_specdec.integration import get_decoder
from hf_specdec.learning.folder import begin_learning, folder_of
from hf_specdec.learning.learner import Learner
from hf_specdec.learning.texts import Recorder
from hf_specdec.model.architectures import tapped

pytestmark = pytest.mark.ci
HEADS = {"mlp_speculator": "tiny-mlp_speculator", "eagle3": "tiny-eagle3"}


def config_of(method, folder, begin=True, **more):
    model = {"model": HEADS[method]} if begin else {}
    return {"method": method, **model, "learn": str(folder), **more}


def decoder_of(model, config):
    return get_decoder(model, parse_config(config), DrafterContext())


def hasty(model, config):
    """The learner of the decoder that `generate()` uses, with time for a step of training after every step."""
    learner = decoder_of(model, config).learner
    learner.share = 5.0
    return learner


@pytest.fixture(autouse=True)
def released(tiny_model):
    yield
    hf_specdec.release(tiny_model)


@pytest.fixture
def eager(monkeypatch):
    """Learn after every step, and take whatever was learnt."""
    monkeypatch.setattr(Learner, "JUDGE", 2)
    monkeypatch.setattr(Learner, "FEWEST", 1)
    monkeypatch.setattr(Learner, "BETTER", -10.0)
    monkeypatch.setattr(Learner, "TOKENS", 24)


def test_a_folder_in_the_users_home(tiny_model, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = parse_config(config_of("eagle3", "~/head"))
    assert folder_of(config, tiny_model) == tmp_path / "head"


# ---- what is written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", list(HEADS))
def test_the_text_is_the_targets_while_weights_are_swapped(tiny_model, tmp_path, eager, method):
    """Greedy and seeded texts, call after call, with new weights put in between."""
    config = config_of(method, tmp_path, seed=3)
    hasty(tiny_model, config)
    for turn in range(5):
        inputs = ragged([9, 4, 15], seed=turn)
        arguments = {"max_new_tokens": 16, "do_sample": bool(turn % 2)} | ({"top_k": 20} if turn % 2 else {})
        out = tiny_model.generate(**inputs, **arguments, speculative_config=config, return_dict_in_generate=True)
        none = tiny_model.generate(**inputs, **arguments, speculative_config={"method": "none", "seed": 3})
        assert out.sequences.tolist() == none.tolist()
    learnt = out.speculation["learning"]
    assert learnt["swaps"] >= 2 and learnt["texts"] >= 12 and learnt["steps"] >= 4


@pytest.mark.parametrize("method", list(HEADS))
def test_a_swap_in_the_middle_of_texts(tiny_model, tiny_tokenizer, tmp_path, eager, method):
    """In an engine, weights change while rows are running."""
    prompts = [{"prompt_token_ids": row} for row in ragged([8, 5, 12, 9, 7, 11], seed=1)["input_ids"].tolist()]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    swapped_while = []
    with_swaps = LLM(tiny_model, tiny_tokenizer, config_of(method, tmp_path), max_model_len=96)
    learner = with_swaps.engine.decoder.learner
    learner.share = 5.0
    put = learner.swap
    learner.swap = lambda: put() and not swapped_while.append(len(with_swaps.engine.scheduler.running))
    found = []
    for _ in range(3):
        found.append([each.outputs[0].token_ids for each in with_swaps.generate(prompts, params, use_tqdm=False)])
    check_blocks(with_swaps.engine.decoder.cache.pool)
    with_swaps.close()
    plain = LLM(tiny_model, tiny_tokenizer, None, max_model_len=96)
    expected = [each.outputs[0].token_ids for each in plain.generate(prompts, params, use_tqdm=False)]
    plain.close()
    assert all(each == expected for each in found)
    assert any(swapped_while), "no swap happened while rows were running"


# ---- what is learnt -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", list(HEADS))
def test_the_recorded_states_are_those_of_the_target(tiny_model, tmp_path, method):
    """Tokens, answers and hidden states of a text, against one forward of the model."""
    config = config_of(method, tmp_path)
    decoder = decoder_of(tiny_model, config)
    inputs = ragged([9, 6], seed=4)
    out = tiny_model.generate(**inputs, max_new_tokens=24, do_sample=False, eos_token_id=[], speculative_config=config)
    texts = [*decoder.learner.texts.training, *decoder.learner.texts.held_out]
    assert len(texts) == 2
    for text in texts:
        row = next(
            row
            for row, mask in zip(out.tolist(), inputs["attention_mask"].tolist(), strict=True)
            if row[len(mask) - sum(mask) :][: len(text.token_ids)] == text.token_ids.tolist()
        )
        assert len(text.token_ids) >= len([each for each in row if each]) - 12
        assert 20 <= text.is_answer.sum() <= 24
        with tapped(tiny_model, decoder.learner.taps) as found, torch.no_grad():
            tiny_model(torch.from_numpy(text.token_ids)[None])
        for name, states in text.states.items():
            torch.testing.assert_close(states, found["last_hidden" if name == "last" else name], atol=2e-4, rtol=2e-4)


def test_of_a_long_text_the_newest_states_are_kept(tiny_model, tmp_path, monkeypatch):
    """So that memory, and the time of a step of training, are bounded."""
    monkeypatch.setattr(Recorder, "LONGEST", 12)
    config = config_of("eagle3", tmp_path)
    learner, most = decoder_of(tiny_model, config).learner, []
    observe = learner.observe

    def watched(outcome):
        observe(outcome)
        for record in learner.recorder._records.values():
            most.append(sum(len(piece[learner.taps.layers[0]]) for piece in record.pieces))

    learner.observe = watched
    out = tiny_model.generate(
        **ragged([30]), max_new_tokens=40, do_sample=False, eos_token_id=[], speculative_config=config
    )
    (text,) = learner.texts.training
    assert len(text.token_ids) == 12 and text.is_answer.all() and 12 < max(most) < 24
    row = out[0].tolist()
    (begin,) = [i for i in range(50, 60) if row[i : i + 12] == text.token_ids.tolist()]
    with tapped(tiny_model, learner.taps) as found, torch.no_grad():
        tiny_model(out)
    for name, states in text.states.items():
        torch.testing.assert_close(
            states, found["last_hidden" if name == "last" else name][begin : begin + 12], atol=2e-4, rtol=2e-4
        )


@pytest.mark.parametrize(
    ("method", "begin"), [("mlp_speculator", False), pytest.param("mlp_speculator", True, marks=pytest.mark.slow)]
)
def test_it_learns(tiny_model, tiny_tokenizer, tmp_path, monkeypatch, method, begin):
    """Held-out acceptance rises, the folder's head is the better one, and a decoder that only reads it drafts as well."""
    monkeypatch.setattr(Learner, "JUDGE", 8)
    monkeypatch.setattr(Learner, "TOKENS", 96)
    config = config_of(method, tmp_path, begin, num_speculative_tokens=3)
    stories = [f"Tell me a story about a {animal}." for animal in ("dog", "cat", "bird", "fish", "bear", "frog")]
    ids = [
        tiny_tokenizer.apply_chat_template(
            [{"role": "user", "content": each}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        for each in stories
    ]

    def tau(settings):
        outs = [
            tiny_model.generate(each, max_new_tokens=48, do_sample=False, speculative_config=settings, return_dict_in_generate=True)
            for each in ids
        ]  # fmt: skip
        return sum(o.speculation.num_new_tokens for o in outs) / sum(o.speculation.num_steps for o in outs)

    learner = hasty(tiny_model, config)
    first = tau(config)
    for _ in range(1 if begin else 3):
        last = tau(config)
    assert learner.history and learner.steps >= 8
    taken = [each["tau"] for each in learner.history if each["taken"]]
    assert taken == sorted(taken) and (taken or begin)
    hf_specdec.release(tiny_model)
    frozen = tau({"model": str(tmp_path), "num_speculative_tokens": 3})
    if not begin:
        assert last > first + 0.15 and frozen > first + 0.15, (first, last, frozen, learner.history)
    assert frozen >= last - 0.1


def test_it_goes_on_where_a_process_was_killed(tiny_model, tmp_path, eager):
    config = config_of("mlp_speculator", tmp_path)
    hasty(tiny_model, config)
    for turn in range(4):
        tiny_model.generate(**ragged([9, 4], seed=turn), max_new_tokens=16, speculative_config=config)
    before = decoder_of(tiny_model, config).learner
    assert before.steps >= 4
    hf_specdec.release(tiny_model)  # as a kill: nothing is written at the end
    after = decoder_of(tiny_model, config).learner
    assert before.JUDGE >= before.steps - after.steps >= 0 and after.swaps <= before.swaps and after.history
    assert not list(tmp_path.rglob("*.partial"))


def test_worse_weights_are_dropped(tiny_model, tmp_path, monkeypatch):
    """Whatever the comparison finds much worse does not stay, and is not put in place."""
    monkeypatch.setattr(Learner, "BETTER", 10.0)
    monkeypatch.setattr(Learner, "WORSE", -10.0)
    config = config_of("mlp_speculator", tmp_path)
    learner = decoder_of(tiny_model, config).learner
    tiny_model.generate(**ragged([9, 4]), max_new_tokens=16, speculative_config=config)
    served, rate = {name: each.clone() for name, each in learner.places.items()}, learner.rate
    with torch.no_grad():
        for each in learner.parameters.values():
            each.add_(torch.randn_like(each))
    learner._judge()
    assert learner.rollbacks == 1 and learner.rate == rate / 2 and not learner.has_swap
    assert all(torch.equal(each, learner.best[name]) for name, each in learner.parameters.items())
    assert all(torch.equal(each, learner.places[name]) for name, each in served.items())


def test_learning_goes_on_after_a_gradient_that_is_not_finite(tiny_model, tmp_path, eager):
    config = config_of("mlp_speculator", tmp_path)
    learner = decoder_of(tiny_model, config).learner
    tiny_model.generate(**ragged([9, 4]), max_new_tokens=16, speculative_config=config)
    loss = learner.trainer.loss

    def broken(batch):
        out = loss(batch)
        out.loss = out.loss * float("nan")
        return out

    learner.trainer.loss = broken
    learner._train()
    assert learner.rollbacks == 1
    learner.trainer.loss = loss
    learner._train()
    assert learner.rollbacks == 1
    assert any(not torch.equal(each, learner.best[name]) for name, each in learner.parameters.items())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.001, 0.2), min_size=50, max_size=200), st.floats(0.001, 0.3))
def test_the_account_bounds_the_time(decoding, unit):
    """At most the share of the decoding time, and one unit of work."""

    class Timed(Learner):
        def __init__(self):
            self.now, self.share, self.clock = 0.0, 0.03, lambda: self.now
            self._account, self._at, self.seconds, self.steps, self._judged_at = 0.0, None, 0.0, 0, 0
            self.texts = type("Texts", (), {"training": range(10), "held_out": range(3)})()
            model = torch.nn.Linear(1, 1)
            self.trainer = type("Trainer", (), {"target": type("Target", (), {"model": model})()})()

        def _train(self):
            self.now += unit

    learner, spent = Timed(), 0.0
    for seconds in decoding:
        learner.now += seconds
        spent += seconds
        learner.between_steps()
    assert learner.seconds <= 0.03 * spent + unit + 1e-9


def test_private_texts_are_not_learnt_from(tiny_model, tmp_path):
    config = config_of("mlp_speculator", tmp_path)
    decoder = decoder_of(tiny_model, config)
    observe = decoder.learner.observe

    def private(outcome):
        for seq in outcome.sequences:
            seq.is_shared = False
        for seq, _ in outcome.chunks:
            seq.is_shared = False
        observe(outcome)

    decoder.learner.observe = private
    tiny_model.generate(**ragged([9, 4], seed=1), max_new_tokens=16, speculative_config=config)
    assert decoder.learner.texts.count == 0


def test_the_users_model_is_left_as_it_was(tiny_model, tmp_path, eager):
    tiny_model.requires_grad_(True)
    random_state = torch.get_rng_state()
    config = config_of("mlp_speculator", tmp_path, seed=1)
    hasty(tiny_model, config)
    for _ in range(3):
        tiny_model.generate(**ragged([9, 4]), max_new_tokens=16, do_sample=False, speculative_config=config)
    assert decoder_of(tiny_model, config).learner.steps
    assert all(p.requires_grad and p.grad is None for p in tiny_model.parameters())
    assert torch.equal(random_state, torch.get_rng_state())


# ---- configuration --------------------------------------------------------------------------------------------------


def test_other_heads_do_not_learn(tiny_model):
    with pytest.raises(SpeculativeConfigError, match="is for mlp_speculator and eagle3"):
        tiny_model.generate(
            torch.tensor([[5, 6]]), max_new_tokens=2, speculative_config={"model": "tiny-medusa", "learn": True}
        )


def test_errors_about_a_head_name_no_flag_of_the_command_line(tiny_model, tmp_path):
    """They are those of `train --init-from`, which a learning head does not have."""
    other = shutil.copytree(resolve_model("tiny-eagle3"), tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:1000].contiguous()
    tensors["d2t"], tensors["t2d"] = torch.zeros(1000, dtype=torch.long), torch.zeros(4096, dtype=torch.bool)
    for name, change in (("t2d", {}), ("hidden_norm", {"midlayer.hidden_norm.weight": None})):
        save_file(
            {key: each for key, each in (tensors | change).items() if each is not None}, other / "model.safetensors"
        )
        settings = json.loads((other / "config.json").read_text()) | {"draft_vocab_size": 1000}
        (other / "config.json").write_text(json.dumps(settings))
        config = parse_config({"method": "eagle3", "model": str(other), "learn": str(tmp_path / name)})
        with pytest.raises(SpeculativeConfigError, match=f"cannot go on with .*{name}") as found:
            begin_learning(config, tiny_model, str(other))
        assert "--init-from" not in str(found.value) and str(found.value).count(str(other)) == 1


def test_a_folder_with_the_state_of_another_head(tiny_model, tmp_path):
    (tmp_path / "learning").mkdir()
    torch.save({"trained": {"x": torch.zeros(1)}}, tmp_path / "learning" / "state.pt")
    with pytest.raises(ValueError, match="state of a head of another shape"):
        tiny_model.generate(
            torch.tensor([[5, 6]]), max_new_tokens=2, speculative_config=config_of("mlp_speculator", tmp_path)
        )


def test_the_folder_can_be_read_at_any_time(tiny_model, tmp_path, eager):
    """While a head learns and is written, every reading finds a whole one."""
    config = config_of("mlp_speculator", tmp_path)
    hasty(tiny_model, config)
    tiny_model.generate(**ragged([5]), max_new_tokens=4, speculative_config=config)
    ended, read = threading.Event(), []

    def reading():
        from hf_specdec.candidate_generators.checkpoints.files import open_checkpoint

        while not ended.is_set():
            checkpoint = open_checkpoint(str(tmp_path))
            read.append({name: checkpoint.tensor(name).isfinite().all() for name in checkpoint.names()})
            json.loads((tmp_path / "config.json").read_text())

    thread = threading.Thread(target=reading)
    thread.start()
    try:
        for turn in range(4):
            tiny_model.generate(**ragged([9, 4], seed=turn), max_new_tokens=16, speculative_config=config)
    finally:
        ended.set()
        thread.join()
    assert len(read) > 3 and all(all(each.values()) for each in read)
