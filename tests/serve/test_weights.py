"""Weights that are updated while a server or an `LLM` lives: every text is what plain `generate()` of the new weights writes."""

import copy
import queue

import openai
import peft
import pytest
import torch
import torch.distributed as dist
from helpers_server import free_port, in_thread
from oracle import bundled_prompts, load_bundled
from test_serve_adapters import save
from torch.distributed import distributed_c10d as c10d

import hf_specdec
from hf_specdec.candidate_generators.checkpoints.target_parts import renew_copies, rows_of
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.serve import SamplingParams
from hf_specdec.serve.engine.control import Acceptance
from hf_specdec.serve.engine.weights import broadcast
from hf_specdec.serve.ipc.messages import CallControl, Submit
from hf_specdec.serve.trainer import WeightSender

GREEDY = SamplingParams(temperature=0, max_tokens=24)
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
CONFIGS = {
    "none": {"method": "none"},
    "n-gram": NGRAM,
    "draft model": {"method": "draft_model", "model": "tiny-draft"},
    "eagle3": {"method": "eagle3", "model": "tiny-eagle3", "top_k": 3, "total_tokens": 8, "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "model": "tiny-mtp"},
}


def changed(seed=0, share=0.2, model="tiny"):
    """The bundled model with noise in all weights: it writes other texts."""
    other = load_bundled(model)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            weight += share * weight.std() * torch.randn(weight.shape, generator=random)
    return other


@pytest.fixture(scope="module")
def new_model():
    return changed()


@pytest.fixture(scope="module")
def folder(new_model, tmp_path_factory):
    root = tmp_path_factory.mktemp("new")
    new_model.save_pretrained(root)
    return str(root)


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer):
    texts = bundled_prompts(tiny_tokenizer, 3)
    return [tiny_tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def plain(model, prompts, count=24):
    texts = []
    for ids in prompts:
        output = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=count, do_sample=False)
        texts.append(output[0, len(ids) :].tolist())
    return texts


def texts_of(llm, prompts, params=GREEDY):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(prompts, new_model):
    """The texts of the old weights and of the new ones."""
    texts = plain(load_bundled("tiny"), prompts), plain(new_model, prompts)
    assert all(old != new for old, new in zip(*texts, strict=True))
    return texts


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
def test_texts_are_those_of_the_weights(make, prompts, expected, folder, config, options):
    """In batches, from a folder and from tensors. Every text is asked for twice, so that prefixes are shared."""
    llm = make({**config, **options})
    old = [(name, weight.clone()) for name, weight in load_bundled("tiny").named_parameters()]
    assert [texts_of(llm, prompts) for _ in range(2)] == [expected[0]] * 2
    for weights, texts in ((folder, expected[1]), (old, expected[0])):
        llm.update_weights(weights)
        assert [texts_of(llm, prompts) for _ in range(2)] == [texts] * 2
    native = llm.engine.decoder.target.native
    assert ("native" in options) == (native is None) and (native is None or native.refused is None)


def test_rows_with_adapters_follow(make, prompts, new_model, folder, tmp_path):
    llm = make(NGRAM, lora_modules={"north": save(tmp_path / "north", 1)})
    params = [GREEDY.copy(lora=name) for name in ("north", None)]
    before = texts_of(llm, prompts[:1] * 2, params)
    llm.update_weights(folder)
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(new_model), str(tmp_path / "north")).eval()
    texts = plain(adapted, prompts[:1]) + plain(new_model, prompts[:1])
    assert texts_of(llm, prompts[:1] * 2, params) == texts and not {*map(tuple, before)} & {*map(tuple, texts)}


def test_rows_of_a_borrowed_head_are_copied_again(tiny_model):
    model, ids = copy.deepcopy(tiny_model), torch.tensor([5, 3, 9])
    rows = rows_of(model.get_output_embeddings(), ids, ValueError)
    other = rows_of(tiny_model.get_output_embeddings(), ids, ValueError)
    with torch.no_grad():
        model.get_output_embeddings().weight += 1
    renew_copies(model)
    assert torch.equal(rows.weight, model.get_output_embeddings().weight[ids])
    assert torch.equal(other.weight, tiny_model.get_output_embeddings().weight[ids])


def test_a_quantized_target_is_quantized_again(make, prompts, folder):
    config = {**NGRAM, "target_quantization": "wint8"}
    llm, other = make(config), hf_specdec.LLM(changed(), max_model_len=256, speculative_config=config)
    before = texts_of(llm, prompts)
    llm.update_weights(folder)
    assert texts_of(llm, prompts) == texts_of(other, prompts) != before
    other.close()


@pytest.mark.parametrize("config", [{"method": "none"}, NGRAM, CONFIGS["eagle3"]], ids=["none", "n-gram", "eagle3"])
def test_a_seed_means_the_same_after_a_reload_of_the_same_weights(make, prompts, config):
    llm, drawn = make(config), GREEDY.copy(temperature=1.0, seed=7, n=2)
    (before,) = llm.generate(prompts[0], drawn, use_tqdm=False)
    llm.update_weights(hf_specdec.bundled("tiny"))
    llm.sleep(level=2)
    llm.wake_up()
    llm.update_weights(load_bundled("tiny").named_parameters())
    (after,) = llm.generate(prompts[0], drawn, use_tqdm=False)
    assert [choice.token_ids for choice in after.outputs] == [choice.token_ids for choice in before.outputs]


def test_sleep(make, prompts, expected, folder):
    llm = make({**CONFIGS["eagle3"], "prepack_weights": True, "native": False})
    texts_of(llm, prompts)
    for level, missing in ((1, None), (2, "weights are missing")):
        llm.sleep(level)
        llm.sleep(level)
        assert not llm.engine.decoder.cache.is_allocated
        with pytest.raises(ValueError, match="The engine sleeps: wake it up"):
            texts_of(llm, prompts)
        llm.wake_up(["weights"])
        with pytest.raises(ValueError, match="The engine sleeps"):
            texts_of(llm, prompts)
        llm.wake_up()
        if missing is not None:
            with pytest.raises(ValueError, match=missing):
                texts_of(llm, prompts)
            llm.update_weights([next(iter(load_bundled("tiny").named_parameters()))])
            with pytest.raises(ValueError, match=missing):
                texts_of(llm, prompts)
            llm.update_weights(folder)
        assert texts_of(llm, prompts) == expected[level - 1]
    with pytest.raises(ValueError, match="level 3: use 1 or 2"):
        llm.sleep(3)
    with pytest.raises(ValueError, match="tags: use weights and kv_cache"):
        llm.wake_up(["all"])
    llm.sleep(2)
    with pytest.raises(ValueError, match="weights are put away: wake them up"):
        llm.update_weights(folder)
    llm.wake_up()
    llm.update_weights(folder)


def refusals(model, folder, root):
    """Weights that are refused, each with what the error says."""
    state = dict(model.named_parameters())
    name, weight = next(iter(state.items()))
    yield [(name, weight), ("no.such", weight)], "The model has no weight 'no.such'"
    yield [(name, weight), ("model.norm.weight", weight[:2])], "model.norm.weight has the shape"
    yield (
        [(name, weight), ("model.norm.weight", state["model.norm.weight"].long())],
        "is torch.int64; the model's is torch.float32",
    )
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
    yield hf_specdec.bundled("tiny-draft"), "is of another model|cannot be read"


def test_what_is_refused_changes_nothing(make, prompts, expected, new_model, folder, tmp_path):
    llm = make(NGRAM)
    for weights, message in refusals(new_model, folder, tmp_path):
        with pytest.raises(ValueError, match=message):
            llm.update_weights(weights)
        assert texts_of(llm, prompts[:1]) == expected[0][:1]


def test_targets_that_cannot_be_updated(tiny_model, tiny_tokenizer, folder, tmp_path):
    merged = peft.PeftModel.from_pretrained(load_bundled("tiny"), save(tmp_path / "north", 1))
    merged.merge_adapter()
    llm = hf_specdec.LLM(merged, tiny_tokenizer)
    with pytest.raises(ValueError, match="An adapter is merged into LlamaForCausalLM: unmerge it"):
        llm.update_weights(folder)
    llm.close()
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantized = load_bundled("tiny")
    quantize_(quantized, Int8WeightOnlyConfig())
    llm = hf_specdec.LLM(quantized, tiny_tokenizer)
    with pytest.raises(ValueError, match="has quantized weights"):
        llm.update_weights(folder)
    llm.close()


def test_a_merge_between_updates_is_told(make, prompts, folder):
    """`update_weights` is no way around the check that the model's structure is the same."""
    llm = make(NGRAM)
    llm.update_weights(folder)
    llm.model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModel):
        texts_of(llm, prompts)


def test_a_learning_head_goes_on(make, prompts, expected, folder, tmp_path):
    llm = make({"method": "eagle3", "model": "tiny-eagle3", "learn": str(tmp_path / "head")})
    learner = llm.engine.decoder.learner
    for _ in range(4):
        texts_of(llm, prompts)
    assert learner.texts.training and learner.texts.held_out
    llm.update_weights(folder)
    assert not learner.texts.training and not learner.texts.held_out and not learner.texts.num_bytes
    for _ in range(4):
        assert texts_of(llm, prompts) == expected[1]
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

    def submit(self, name, ids, count=200):
        self.tokens[name] = []
        self.worker.send(Submit(name, None, ids, GREEDY.copy(max_tokens=count, ignore_eos=True)))

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
        return self.worker.ask(CallControl(method, arguments))

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
def test_a_running_text_goes_on_with_the_new_weights(running, prompts, new_model, folder, config, pauses):
    """It keeps what was written, and reads it again."""
    engine = running(config)
    for name, ids in zip("ab", prompts, strict=False):
        engine.submit(name, ids, 60)
    engine.read("b", 5)
    if pauses:
        engine.call("pause", mode="keep").result(60)
        engine.read_what_came()
        held = {name: len(tokens) for name, tokens in engine.tokens.items()}
        engine.call("update", weights=folder).result(60)
        engine.submit("c", prompts[2], 10)
        engine.call("reset_prefix_cache").result(60)
        engine.read_what_came()
        assert held == {name: len(engine.tokens[name]) for name in held} and engine.worker.load.is_paused
        engine.call("resume").result(60)
    else:
        engine.call("start_update").result(60)
        engine.read_what_came()
        held = {name: len(tokens) for name, tokens in engine.tokens.items()}
        engine.call("update", weights=folder).result(60)
        engine.call("finish_update").result(60)
    engine.read()
    assert set(engine.reasons.values()) == {"length"}
    for name, ids in zip("abc" if pauses else "ab", prompts, strict=False):
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


def test_pause_with_wait_lets_running_texts_end(running, prompts):
    engine = running(NGRAM)
    engine.submit("a", prompts[0], 40)
    engine.read("a", 2)
    paused = engine.call("pause", mode="wait")
    engine.submit("b", prompts[1], 5)
    paused.result(60)
    engine.read_what_came()
    assert engine.reasons == {"a": "length"} and len(engine.tokens["a"]) == 40 and not engine.tokens["b"]
    engine.call("resume").result(60)
    engine.read()
    assert len(engine.tokens["b"]) == 5


@pytest.mark.parametrize(("method", "arguments"), [("pause", {"mode": "abort"}), ("sleep", {"level": 1})])
def test_what_ends_requests(running, prompts, method, arguments):
    engine = running(NGRAM)
    engine.submit("a", prompts[0])
    engine.read("a", 2)
    engine.call(method, **arguments).result(60)
    engine.read()
    assert engine.reasons == {"a": "abort"} and len(engine.tokens["a"]) < 200
    engine.submit("b", prompts[1], 5)
    engine.call("resume" if method == "pause" else "wake_up").result(60)
    engine.read()
    assert len(engine.tokens["b"]) == 5


def test_a_resume_ends_a_pause_that_waits(running, prompts):
    engine = running({"method": "none"})
    engine.submit("a", prompts[0], 150)
    engine.read("a", 2)
    paused = engine.call("pause", mode="wait")
    engine.call("resume").result(60)
    paused.result(60)
    engine.read()
    assert len(engine.tokens["a"]) == 150


# ---- a server ----------------------------------------------------------------------------------------------------------


def test_without_the_flag_every_path_is_refused(tiny_tokenizer):
    from fastapi.testclient import TestClient

    from hf_specdec.serve.http.api import make_app
    from hf_specdec.serve.http.server import Limits, Server
    from hf_specdec.serve.http.weights import GETS, POSTS

    client = TestClient(make_app(Server(tiny_tokenizer, ["tiny"], Limits())))
    for path, ask in [*((path, client.post) for path in POSTS), *((path, client.get) for path in GETS)]:
        answer = ask(path)
        assert answer.status_code == 403, path
        message = "This needs a server that was started with --enable-weight-updates."
        assert answer.json()["error"]["message"] == message


@pytest.fixture(scope="module")
def server():
    with in_thread(CONFIGS["eagle3"], updates_weights=True) as server:
        yield server


def get(server, path):
    import httpx2

    return httpx2.get(server.url + path).json()


def ask(server, path, body=None):
    status, _, answer = server.post(path, {} if body is None else body)
    assert status == 200, answer
    return answer


def written(server, prompts, **more):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    body = {"model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 24, **more}
    answer = client.completions.create(**body, extra_body={"return_token_ids": True})
    return [choice.token_ids for choice in answer.choices]


def restore(server):
    ask(server, "/update_weights", {"update_info": {"path": hf_specdec.bundled("tiny")}})


def test_from_disk_in_both_shapes(server, prompts, expected, folder):
    for path, body in (
        ("/update_weights", lambda at: {"update_info": {"path": at}}),
        ("/update_weights_from_disk", lambda at: {"model_path": at}),
    ):
        assert written(server, prompts) == expected[0]
        assert ask(server, path, body(folder)).get("success", True)
        assert written(server, prompts) == expected[1]
        status, _, answer = server.post(path, body("/nothing"))
        assert status == 400 and answer["error"]["message"] == "'/nothing' is no folder on the server's machine."
        assert written(server, prompts) == expected[1]
        ask(server, path, body(hf_specdec.bundled("tiny")))


def trainers_group(address, port, name):
    """The trainer's side as trainers for SGLang's servers make it: a group beside torch's default one."""
    store, rank, size = next(c10d.rendezvous(f"tcp://{address}:{port}", 0, 2))
    store = c10d.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(
        size, rank, [], dist.Backend("gloo"), store, group_name=name, timeout=dist.default_pg_timeout
    )
    return group


def test_the_group_of_trainers_for_sglang(server, prompts, expected, new_model):
    from concurrent.futures import ThreadPoolExecutor

    port, names = free_port(), [name for name, _ in new_model.named_parameters()]
    where = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "updates",
        "backend": "gloo",
    }
    tensors = [weight.detach().bfloat16() for weight in new_model.parameters()]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, "/init_weights_update_group", where)
        group = trainers_group("127.0.0.1", port, "updates")
        assert asked.result()["success"]
        what = {
            "names": names,
            "dtypes": ["bfloat16"] * len(names),
            "shapes": [list(tensor.shape) for tensor in tensors],
        }
        asked = pool.submit(ask, server, "/update_weights_from_distributed", what)
        for tensor in tensors:
            broadcast(group, tensor)
        assert asked.result()["success"]
    rounded = copy.deepcopy(new_model)
    with torch.no_grad():
        for weight, tensor in zip(rounded.parameters(), tensors, strict=True):
            weight.copy_(tensor)
    assert written(server, prompts) == plain(rounded, prompts)
    restore(server)


def test_a_stream_of_tensors(server, prompts, expected, new_model):
    sender = WeightSender(server.url, free_port())
    sender.connect()
    for _ in range(2):
        ask(server, "/start_weight_update")
        sender.send(new_model.named_parameters())
        assert (
            server.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1, "max_time": 0.2})[2][
                "usage"
            ]["completion_tokens"]
            == 0
        )
        ask(server, "/finish_weight_update")
        assert written(server, prompts) == expected[1]
    state = dict(load_bundled("tiny").named_parameters())
    for wrong, message in (
        ({**state, "no": torch.ones(3)}, "no weight 'no'"),
        ({**state, "model.norm.weight": torch.ones(2)}, "has the shape"),
    ):
        with pytest.raises(ValueError, match=message):
            sender.send(wrong.items())
        assert written(server, prompts) == expected[1]  # and the group is as useful as before
    sender.send(state.items())
    assert written(server, prompts) == expected[0]
    sender.close()


def test_a_transfer_that_is_cut_off(server, prompts, expected, new_model):
    """Requests wait until all that is missing has been sent."""
    from concurrent.futures import ThreadPoolExecutor

    sender, tensors = WeightSender(server.url, free_port()), list(new_model.named_parameters())
    sender.connect()
    metadata = [(name, "float32", list(weight.shape)) for name, weight in tensors]
    ask(server, "/start_weight_update")
    with ThreadPoolExecutor(1) as pool:
        names, dtypes, shapes = zip(*metadata, strict=True)
        body = {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}}
        asked = pool.submit(server.post, "/update_weights", body)
        for _, weight in tensors[:3]:
            broadcast(sender._group, weight.detach())
        sender.close()
        status, _, answer = asked.result()
    message = answer["error"]["message"]
    assert status == 400 and "The transfer was cut off before" in message and "send all weights again." in message
    status, _, answer = server.post("/finish_weight_update", {})
    assert status == 400 and "weights are missing, such as" in answer["error"]["message"]
    status, _, answer = server.post("/update_weights", body)
    assert status == 400 and "There is no trainer's group" in answer["error"]["message"]
    sender.connect()
    sender.send(tensors)
    ask(server, "/finish_weight_update")
    assert written(server, prompts) == expected[1]
    restore(server)


def test_pauses_and_sleep(server, prompts, expected):
    assert get(server, "/get_world_size") == {"world_size": 1}
    assert get(server, "/server_info?config_format=json")["vllm_config"]["model_config"] == {
        "logprobs_mode": "raw_logprobs"
    }
    for path, undo, state, name in (
        ("/pause?mode=keep", "/resume", "/is_paused", "is_paused"),
        ("/pause?mode=wait&clear_cache=true", "/resume", "/is_paused", "is_paused"),
        ("/sleep?level=1", "/wake_up?tags=weights&tags=kv_cache", "/is_sleeping", "is_sleeping"),
    ):
        assert get(server, state) == {name: False}
        ask(server, path)
        assert get(server, state) == {name: True}
        waits = {"model": "tiny", "prompt": "a", "max_tokens": 1, "max_time": 0.2}
        assert server.post("/v1/completions", waits)[2]["usage"]["completion_tokens"] == 0
        ask(server, undo)
        assert get(server, state) == {name: False}
    status, headers, answer = server.post("/pause?mode=keep&clear_cache=true", {"other": 1})
    assert (status, answer) == (200, {"status": "paused"}) and headers["x-ignored-fields"] == "clear_cache, other"
    assert ask(server, "/resume") == {"status": "resumed"} and ask(server, "/reset_prefix_cache") == {"success": True}
    assert written(server, prompts) == expected[0]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/pause?mode=later", {}, "mode: Input should be 'abort', 'wait' or 'keep'."),
        ("/sleep?level=3", {}, "level: Input should be 1, 2"),
        ("/wake_up?tags=all", {}, "tags"),
        ("/finish_weight_update", {}, "No update of the weights has begun."),
        ("/update_weights", {}, "update_info: Field required."),
        ("/update_weights", {"update_info": {}}, "give either path or names, dtype_names and shapes."),
        ("/update_weights", {"update_info": {"names": ["a"], "packed": True}}, "update_info.packed: Input should be False."),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": [[-1]]}, "shapes.0.0: Input should be greater than"),
        ("/init_weights_update_group", {"master_address": "a", "master_port": 1, "backend": "nccl"}, "backend 'nccl': use 'gloo'"),
        ("/init_weights_update_group", {"master_address": "a", "master_port": 1, "world_size": 3}, "world_size is 2 and rank_offset 1"),
    ],
)  # fmt: skip
def test_requests_that_are_refused(server, path, body, message):
    status, _, answer = server.post(path, body)
    assert status == 400 and message in answer["error"]["message"]


def test_metrics_tell_of_updates(server, prompts, folder):
    ask(server, "/update_weights_from_disk", {"model_path": folder})
    before = server.metrics()["hf_specdec_weights_updates"]
    for _ in range(3):
        written(server, prompts)
    restore(server)
    metrics = server.metrics()
    assert (
        metrics["hf_specdec_weights_updates"] == before + 1 and metrics["hf_specdec_weights_best_accepted_length"] > 1
    )
    assert "hf_specdec_weights_accepted_length" not in metrics


def test_token_ids_in_place_of_texts(server, prompts):
    """TRL and verl read log-probabilities by token id."""
    more = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = ask(server, "/v1/completions", {"model": "tiny", "prompt": prompts[0], "logprobs": 0, **more})["choices"][
        0
    ]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [
        [name] for name in choice["logprobs"]["tokens"]
    ]
    messages = [{"role": "user", "content": "Hello"}]
    choice = ask(server, "/v1/chat/completions", {"model": "tiny", "messages": messages, "logprobs": True, **more})[
        "choices"
    ][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]
