"""Weights that are updated while a server or an `LLM` lives: every text is what plain `generate()` of the new weights writes."""

import copy
import queue
import shutil

import peft
import pytest
import torch
from encoders import build
from helpers_weights import EAGLE3, changed, plain
from oracle import load_bundled
from test_serve_adapters import save

import hf_specdec
from hf_specdec.candidate_generators.checkpoints.target_parts import renew_copies, rows_of
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.model.prepare import prepare
from hf_specdec.serve import SamplingParams
from hf_specdec.serve.engine.control import Acceptance
from hf_specdec.serve.engine.weights import Weights
from hf_specdec.serve.ipc.messages import Call, Submit

GREEDY = SamplingParams(temperature=0, max_tokens=24)
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
CONFIGS = {
    "none": {"method": "none"},
    "n-gram": NGRAM,
    "draft model": {"method": "draft_model", "model": "tiny-draft"},
    "eagle3": EAGLE3,
    "mtp": {"method": "mtp", "model": "tiny-mtp"},
}


def texts_of(llm, prompts, params=GREEDY):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture
def make():
    made = []

    def make(config=None, **arguments):
        made.append(hf_specdec.LLM("tiny", dtype="float32", max_model_len=256, speculative_config=config, **arguments))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"native": False, "block_size": 4}, marks=pytest.mark.slow),
        pytest.param({"native": False, "prepack_weights": True}, marks=pytest.mark.slow),
        pytest.param({"block_size": 4, "num_blocks": 70}, marks=pytest.mark.slow),
    ],
    ids=["native", "operators", "packed copies", "preempted"],
)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_texts_are_those_of_the_weights(make, three_prompts, both_texts, new_folder, config, options):
    """In batches, from a folder and from tensors. Every text is asked for twice, so that prefixes are shared."""
    llm = make({**config, **options})
    old = [(name, weight.clone()) for name, weight in load_bundled("tiny").named_parameters()]
    assert [texts_of(llm, three_prompts) for _ in range(2)] == [both_texts[0]] * 2
    for weights, texts in ((new_folder, both_texts[1]), (old, both_texts[0])):
        llm.update_weights(weights)
        assert [texts_of(llm, three_prompts) for _ in range(2)] == [texts] * 2
    native = llm.engine.decoder.target.native
    assert ("native" in options) == (native is None) and (native is None or native.refused is None)


def test_a_drafter_of_the_targets_layers_drafts_with_the_new_weights(make, three_prompts, new_folder):
    """With `early_exit` the drafter's keys are of the old weights, too: they are forgotten, and drafts are as if there had been none."""
    accepted = []
    for is_used in (True, False):
        llm = make({"method": "draft_model", "early_exit": 1, "block_size": 4})
        if is_used:
            texts_of(llm, three_prompts)
        llm.update_weights(new_folder)
        outputs = llm.generate(three_prompts, GREEDY, use_tqdm=False)
        accepted.append([output.speculation.num_accepted_tokens for output in outputs])
    assert accepted[0] == accepted[1] and any(accepted[0])


def test_rows_with_adapters_follow(make, three_prompts, new_model, new_folder, tmp_path):
    llm = make(NGRAM, lora_modules={"north": save(tmp_path / "north", 1)})
    params = [GREEDY.copy(lora=name) for name in ("north", None)]
    before = texts_of(llm, three_prompts[:1] * 2, params)
    llm.update_weights(new_folder)
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(new_model), str(tmp_path / "north")).eval()
    texts = plain(adapted, three_prompts[:1]) + plain(new_model, three_prompts[:1])
    assert texts_of(llm, three_prompts[:1] * 2, params) == texts and not {*map(tuple, before)} & {*map(tuple, texts)}


def test_rows_of_a_borrowed_head_are_copied_again(tiny_model):
    model, ids = copy.deepcopy(tiny_model), torch.tensor([5, 3, 9])
    rows = rows_of(model.get_output_embeddings(), ids, ValueError)
    other = rows_of(tiny_model.get_output_embeddings(), ids, ValueError)
    with torch.no_grad():
        model.get_output_embeddings().weight += 1
    renew_copies(model)
    assert torch.equal(rows.weight, model.get_output_embeddings().weight[ids])
    assert torch.equal(other.weight, tiny_model.get_output_embeddings().weight[ids])


def test_a_quantized_target_is_quantized_again(make, three_prompts, new_folder):
    config = {**NGRAM, "target_quantization": "wint8"}
    llm, other = make(config), hf_specdec.LLM(changed(), max_model_len=256, speculative_config=config)
    before = texts_of(llm, three_prompts)
    llm.update_weights(new_folder)
    assert texts_of(llm, three_prompts) == texts_of(other, three_prompts) != before
    other.close()


@pytest.mark.parametrize("config", [{"method": "none"}, NGRAM, CONFIGS["eagle3"]], ids=["none", "n-gram", "eagle3"])
def test_a_seed_means_the_same_after_a_reload_of_the_same_weights(make, three_prompts, config):
    llm, drawn = make(config), GREEDY.copy(temperature=1.0, seed=7, n=2)
    (before,) = llm.generate(three_prompts[0], drawn, use_tqdm=False)
    llm.update_weights(hf_specdec.bundled("tiny"))
    llm.sleep(level=2)
    llm.wake_up()
    llm.update_weights(load_bundled("tiny").named_parameters())
    (after,) = llm.generate(three_prompts[0], drawn, use_tqdm=False)
    assert [choice.token_ids for choice in after.outputs] == [choice.token_ids for choice in before.outputs]


def test_sleep(make, three_prompts, both_texts, new_folder):
    llm = make({**CONFIGS["eagle3"], "prepack_weights": True, "native": False})
    texts_of(llm, three_prompts)
    for level, missing in ((1, None), (2, "weights are missing")):
        llm.sleep(level)
        llm.sleep(level)
        assert not llm.engine.decoder.cache.is_allocated
        with pytest.raises(ValueError, match="The engine sleeps: wake it up"):
            texts_of(llm, three_prompts)
        llm.wake_up(["weights"])
        with pytest.raises(ValueError, match="The engine sleeps"):
            texts_of(llm, three_prompts)
        llm.wake_up()
        if missing is not None:
            with pytest.raises(ValueError, match=missing):
                texts_of(llm, three_prompts)
            llm.update_weights([next(iter(load_bundled("tiny").named_parameters()))])
            with pytest.raises(ValueError, match=missing):
                texts_of(llm, three_prompts)
            llm.update_weights(new_folder)
        assert texts_of(llm, three_prompts) == both_texts[level - 1]
    llm.sleep(1)
    llm.wake_up(["weights"])
    assert torch.any(llm.model.model.norm.weight)
    for levels in ((2,), (1, 2), (2, 1)):  # one that sleeps may go on to level 2, and what is freed stays so
        for level in levels:
            llm.sleep(level)
        assert not llm.model.model.norm.weight.numel(), levels
        llm.wake_up()
        with pytest.raises(ValueError, match="weights are missing"):
            texts_of(llm, three_prompts)
        llm.update_weights(new_folder)
        assert texts_of(llm, three_prompts) == both_texts[1]
    with pytest.raises(ValueError, match="level 3: use 1 or 2"):
        llm.sleep(3)
    with pytest.raises(ValueError, match="tags: use weights and kv_cache"):
        llm.wake_up(["all"])
    llm.sleep(2)
    with pytest.raises(ValueError, match="weights are put away: wake them up"):
        llm.update_weights(new_folder)
    llm.wake_up()
    llm.update_weights(new_folder)


def refusals(model, new_folder, root):
    """Weights that are refused, each with what the error says."""
    state = dict(model.named_parameters())
    name, weight = next(iter(state.items()))
    yield [(name, weight), ("no.such", weight)], "The model has no weight 'no.such'"
    yield [(name, weight), ("model.norm.weight", weight[:2])], "model.norm.weight has the shape"
    yield (
        [(name, weight), ("model.norm.weight", state["model.norm.weight"].long())],
        "is torch.int64; the model's is torch.float32",
    )
    for other in (state["model.norm.weight"].to("meta"), state["model.norm.weight"].detach().to_sparse()):
        yield [(name, weight), ("model.norm.weight", other)], "model.norm.weight is no plain tensor"
    yield str(root / "nothing"), "is no folder on the server's machine"
    (root / "empty").mkdir()
    yield str(root / "empty"), "cannot be read"
    other = copy.deepcopy(model)
    other.config.rope_parameters = {**other.config.rope_parameters, "rope_theta": 5.0}
    other.save_pretrained(root / "rope")
    yield str(root / "rope"), "is of another model: its config.json differs in 'rope_parameters.rope_theta'"
    less = {name: weight for name, weight in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(root / "less", state_dict=less)
    yield str(root / "less"), "is not of this model: missing model.layers.1.mlp.up_proj.weight"
    more = {**model.state_dict(), "model.layers.0.more.weight": torch.zeros(2)}
    model.save_pretrained(root / "more", state_dict=more)
    yield str(root / "more"), "is not of this model: unexpected model.layers.0.more.weight"
    adapted = shutil.copytree(hf_specdec.bundled("tiny"), root / "adapted")
    shutil.copy(f"{save(root / 'adapter', 1)}/adapter_config.json", adapted)
    yield str(adapted), "has a LoRA adapter: merge it into the weights first"
    yield hf_specdec.bundled("tiny-draft"), "is of another model|cannot be read"


def test_what_is_refused_changes_nothing(make, three_prompts, both_texts, new_model, new_folder, tmp_path):
    llm = make(NGRAM)
    for weights, message in refusals(new_model, new_folder, tmp_path):
        with pytest.raises(ValueError, match=message):
            llm.update_weights(weights)
        assert texts_of(llm, three_prompts[:1]) == both_texts[0][:1]


def test_targets_that_cannot_be_updated(tiny_model, tiny_tokenizer, new_folder, tmp_path):
    merged = peft.PeftModel.from_pretrained(load_bundled("tiny"), save(tmp_path / "north", 1))
    merged.merge_adapter()
    llm = hf_specdec.LLM(merged, tiny_tokenizer)
    with pytest.raises(ValueError, match="An adapter is merged into LlamaForCausalLM: unmerge it"):
        llm.update_weights(new_folder)
    llm.close()
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantized = load_bundled("tiny")
    quantize_(quantized, Int8WeightOnlyConfig())
    llm = hf_specdec.LLM(quantized, tiny_tokenizer)
    with pytest.raises(ValueError, match="has quantized weights"):
        llm.update_weights(new_folder)
    llm.close()


def test_a_merge_between_updates_is_told(make, three_prompts, new_folder):
    """`update_weights` is no way around the check that the model's structure is the same."""
    llm = make(NGRAM)
    llm.update_weights(new_folder)
    llm.model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModel):
        texts_of(llm, three_prompts)


def test_a_learning_head_goes_on(make, three_prompts, both_texts, new_folder, tmp_path):
    llm = make({"method": "eagle3", "model": "tiny-eagle3", "learn": str(tmp_path / "head")})
    learner = llm.engine.decoder.learner
    for _ in range(4):
        texts_of(llm, three_prompts)
    assert learner.texts.training and learner.texts.held_out
    llm.update_weights(new_folder)
    assert not learner.texts.training and not learner.texts.held_out and not learner.texts.num_bytes
    for _ in range(4):
        assert texts_of(llm, three_prompts) == both_texts[1]
    learner.steps, learner._account = 0, 1e9
    learner.clock = lambda: 0.0
    learner.between_steps()
    assert learner.texts.held_out and learner.steps == 1


def test_a_collapse_of_acceptance_is_told_once(caplog):
    acceptance = Acceptance()
    for steps, tokens in ((100, 300), (63, 63)):
        acceptance.note(steps, tokens)
        assert acceptance.report() is None or acceptance.report()["accepted_length"] is None
        acceptance.updated()
    assert acceptance.report() == {"updates": 2, "accepted_length": None, "best_accepted_length": 3.0}
    for steps, tokens, warnings in ((64, 140, 0), (100, 101, 1), (100, 101, 1), (1000, 3000, 1)):
        acceptance.note(steps, tokens)
        assert len(caplog.records) == warnings
    assert "After update 2 of the weights a step gives 1.47 tokens, and gave 3.00 before" in caplog.text
    assert acceptance.report()["accepted_length"] == round(3342 / 1264, 3)


# ---- a worker whose rows run -------------------------------------------------------------------------------------------


class Running:
    """An engine's thread, asked directly."""

    def __init__(self, llm):
        self.updates, self.tokens, self.reasons = queue.SimpleQueue(), {}, {}
        self.worker = llm.make_worker(lambda updates: [self.updates.put(update) for update in updates])
        self.worker.start()

    def submit(self, name, ids, count=200, like=None):
        self.tokens[name], params = [], GREEDY.copy(max_tokens=count, ignore_eos=True)
        self.worker.send(Submit(name, None, ids, params) if like is None else like._replace(id=name, params=params))

    def read(self, name=None, least=1):
        """Read updates until a request has so many tokens; None: until all have ended."""
        while len(self.reasons) < len(self.tokens) if name is None else len(self.tokens[name]) < least:
            self._take(self.updates.get(timeout=60))

    def read_what_came(self):
        while not self.updates.empty():
            self._take(self.updates.get())

    def _take(self, update):
        self.tokens[update.id] += update.token_ids
        if update.request_finished:
            self.reasons[update.id] = update.finish_reason

    def call(self, method, **arguments):
        return self.worker.ask(Call("control", method, arguments))

    def stop(self):
        self.worker.stop()
        self.worker.join()


@pytest.fixture
def running(make):
    started = []

    def running(config):
        started.append(Running(make(config)))
        return started[-1]

    yield running
    for each in started:
        each.stop()


@pytest.mark.parametrize("config", [NGRAM, CONFIGS["eagle3"]], ids=["n-gram", "eagle3"])
@pytest.mark.parametrize("pauses", [True, False])
def test_a_running_text_goes_on_with_the_new_weights(running, three_prompts, new_model, new_folder, config, pauses):
    """It keeps what was written, and reads it again."""
    engine = running(config)
    for name, ids in zip("ab", three_prompts, strict=False):
        engine.submit(name, ids, 60)
    engine.read("b", 5)
    if pauses:
        engine.call("pause", mode="keep").result(60)
        engine.read_what_came()
        held = {name: len(tokens) for name, tokens in engine.tokens.items()}
        engine.call("update", weights=new_folder).result(60)
        engine.submit("c", three_prompts[2], 10)
        engine.call("reset_prefix_cache").result(60)
        engine.read_what_came()
        assert held == {name: len(engine.tokens[name]) for name in held} and engine.worker.load.is_paused
        engine.call("resume").result(60)
    else:
        engine.call("start_update").result(60)
        engine.read_what_came()
        held = {name: len(tokens) for name, tokens in engine.tokens.items()}
        engine.call("update", weights=new_folder).result(60)
        engine.call("finish_update").result(60)
    engine.read()
    assert set(engine.reasons.values()) == {"length"}
    for name, ids in zip("abc" if pauses else "ab", three_prompts, strict=False):
        written, count = engine.tokens[name], held.get(name, 0)
        assert (count > 0) == (name != "c")
        rest = new_model.generate(
            torch.tensor([ids + written[:count]]), max_new_tokens=len(written) - count, do_sample=False, eos_token_id=-1
        )
        assert written == rest[0, len(ids) :].tolist()
        old = load_bundled("tiny").generate(
            torch.tensor([ids]), max_new_tokens=len(written), do_sample=False, eos_token_id=-1
        )
        assert written[:count] == old[0, len(ids) :][:count].tolist() and written != old[0, len(ids) :].tolist()


def test_a_running_text_of_an_encoder_goes_on_with_the_new_weights():
    """The encoder reads its input again, too. Buffers, which are no parameters, outlive a sleep."""
    model, new_model, ids = build("bart", 4), build("bart", 5), [5, 9, 12, 7, 33, 21]
    llm = hf_specdec.LLM(model, None, NGRAM, max_model_len=64)
    engine = Running(llm)
    engine.submit("a", [], 16, llm._submit(ids, GREEDY))
    engine.read("a", 3)
    engine.call("pause", mode="keep").result(60)
    engine.read_what_came()
    written = engine.tokens["a"]
    count = len(written)
    engine.call("update", weights=list(new_model.state_dict().items())).result(60)
    engine.call("resume").result(60)
    engine.read()
    for method, arguments in (
        ("sleep", {"level": 2}),
        ("wake_up", {}),
        ("update", {"weights": list(new_model.named_parameters())}),
    ):
        engine.call(method, **arguments).result(60)
    engine.submit("b", [], 16, llm._submit(ids, GREEDY))
    engine.read()
    engine.stop()
    whole = new_model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
    assert engine.tokens["b"] == whole[0, 1:].tolist()
    start = torch.tensor([[model.generation_config.decoder_start_token_id, *written[:count]]])
    rest = new_model.generate(torch.tensor([ids]), decoder_input_ids=start, max_new_tokens=16 - count, do_sample=False)
    old = build("bart", 4).generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
    assert written == rest[0, 1:].tolist() != old[0, 1:].tolist()


def test_pause_with_wait_lets_running_texts_end(running, three_prompts):
    engine = running(NGRAM)
    engine.submit("a", three_prompts[0], 40)
    engine.read("a", 2)
    paused = engine.call("pause", mode="wait")
    engine.submit("b", three_prompts[1], 5)
    paused.result(60)
    engine.read_what_came()
    assert engine.reasons == {"a": "length"} and len(engine.tokens["a"]) == 40 and not engine.tokens["b"]
    engine.call("resume").result(60)
    engine.read()
    assert len(engine.tokens["b"]) == 5


@pytest.mark.parametrize(("method", "arguments"), [("pause", {"mode": "abort"}), ("sleep", {"level": 1})])
def test_what_ends_requests(running, three_prompts, method, arguments):
    engine = running(NGRAM)
    engine.submit("a", three_prompts[0])
    engine.read("a", 2)
    engine.call(method, **arguments).result(60)
    engine.read()
    assert engine.reasons == {"a": "abort"} and len(engine.tokens["a"]) < 200
    engine.submit("b", three_prompts[1], 5)
    engine.call("resume" if method == "pause" else "wake_up").result(60)
    engine.read()
    assert len(engine.tokens["b"]) == 5


def test_a_second_pause_lets_no_more_run_than_the_first(running, three_prompts):
    engine = running(NGRAM)
    for mode in ("wait", "keep"):
        engine.call("pause", mode=mode).result(60)
        engine.submit(mode, three_prompts[0], 5)
        engine.call("pause", mode="wait").result(60)
        engine.read_what_came()
        assert not engine.tokens[mode] and engine.worker.load.is_paused
        engine.call("resume").result(60)
        engine.read()


def test_a_pause_that_would_wait_for_sleeping_requests_is_refused(running, three_prompts):
    engine = running(NGRAM)
    engine.call("sleep", level=1).result(60)
    engine.call("pause", mode="wait").result(60)
    engine.submit("a", three_prompts[0], 5)
    engine.call("pause", mode="wait").result(60)
    engine.call("resume").result(60)
    with pytest.raises(ValueError, match="The engine sleeps: wake it up"):
        engine.call("pause", mode="wait").result(60)
    engine.call("wake_up").result(60)
    engine.read()


def test_a_sleep_that_is_refused_ends_no_request(running, three_prompts, monkeypatch):
    engine = running(NGRAM)
    engine.submit("a", three_prompts[0], 40)
    engine.read("a", 2)
    monkeypatch.setattr(engine.worker.engine.control.weights, "_exchanges_kv", True)
    with pytest.raises(ValueError, match="engines that exchange KV must keep their weights"):
        engine.call("sleep", level=1).result(60)
    engine.read()
    assert engine.reasons == {"a": "length"}


def test_a_resume_ends_a_pause_that_waits(running, three_prompts):
    engine = running({"method": "none"})
    engine.submit("a", three_prompts[0], 150)
    engine.read("a", 2)
    paused = engine.call("pause", mode="wait")
    engine.call("resume").result(60)
    paused.result(60)
    engine.read()
    assert len(engine.tokens["a"]) == 150


def test_engines_that_exchange_kv_keep_their_weights(tiny_model):
    weights = Weights(prepare(tiny_model), exchanges_kv=True)
    with pytest.raises(ValueError, match="engines that exchange KV must keep their weights"):
        weights.write(tiny_model.named_parameters())
