"""LoRA adapters of requests: each answer is what plain `generate()` writes with its adapter, whatever runs beside it."""

import asyncio
import json
import logging
import re
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from types import SimpleNamespace

import openai
import peft
import pytest
import torch
from helpers_server import Process, in_thread
from oracle import load_bundled

import hf_specdec
from hf_specdec.cli.serve import _lora_modules
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.kernels.native import library
from hf_specdec.model.adapters import lora_layers
from hf_specdec.model.structure import structure_of
from hf_specdec.serve.engine.params import SamplingParams
from hf_specdec.serve.http.endpoints import Completions
from hf_specdec.serve.http.protocol import CompletionRequest
from hf_specdec.serve.http.reader import RequestReader
from hf_specdec.serve.http.server import Server
from hf_specdec.serve.ipc.messages import Facts

GREEDY = {"temperature": 0, "max_tokens": 24}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1}
NAMES = (None, "north", "south")


def save(folder, seed, model="tiny", **options):
    torch.manual_seed(seed)
    options = {"target_modules": ["q_proj", "down_proj"], "r": 4, "init_lora_weights": False, **options}
    adapted = peft.get_peft_model(load_bundled(model), peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            weight *= 0.3 if "lora_B" in name else 1
    adapted.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folders of two adapters, by name."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "north": save(root / "north", 1),
        "south": save(root / "south", 2, target_modules=["v_proj", "o_proj", "lm_head", "embed_tokens"], r=3),
    }


@pytest.fixture(scope="module")
def expected(folders, three_prompts):
    """Plain texts by (prompt's number, adapter)."""
    model, found = load_bundled("tiny"), {}
    for name in NAMES:
        used = model if name is None else peft.PeftModel.from_pretrained(load_bundled("tiny"), folders[name]).eval()
        for number, ids in enumerate(three_prompts):
            output = used.generate(input_ids=torch.tensor([ids]), max_new_tokens=24, do_sample=False)
            found[number, name] = output[0, len(ids) :].tolist()
    assert len({tuple(found[0, name]) for name in NAMES}) == 3
    return found


def params(name, **changes):
    return SamplingParams(**{**GREEDY, **changes}, lora=name)


def texts_of(llm, prompts, wanted, **changes):
    outputs = llm.generate(
        [prompts[number] for number, _ in wanted], [params(name, **changes) for _, name in wanted], use_tqdm=False
    )
    return [output.outputs[0].token_ids for output in outputs]


def without_end(tokens, llm):
    ends = llm.engine.eos_token_ids
    return [token for token in tokens if token not in ends]


def assert_right(llm, prompts, expected, wanted):
    for tokens, key in zip(texts_of(llm, prompts, wanted), wanted, strict=True):
        assert without_end(tokens, llm) == without_end(expected[key], llm)


ALL = [(number, name) for number in range(3) for name in NAMES]


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        (None, {}),
        (NGRAM, {}),
        ({**NGRAM, "block_size": 4, "num_blocks": 70}, {}),  # preempts
        ({"method": "draft_model", "model": "tiny-draft"}, {"max_num_batched_tokens": 24}),
        ({"method": "eagle3", "model": "tiny-eagle3", "branching_factors": [3, 2, 1], "block_size": 4}, {}),
    ],
    ids=["plain", "n-gram", "preempted", "draft model", "tree"],
)
def test_every_row_has_its_adapter(folders, three_prompts, expected, config, limits):
    """Twice, so that prefixes are shared: equal prompts of two adapters are two texts."""
    llm = hf_specdec.LLM(
        "tiny", dtype="float32", max_model_len=256, speculative_config=config, lora_modules=folders, **limits
    )
    for wanted in (ALL, ALL[::-1]):
        assert_right(llm, three_prompts, expected, wanted)
    if config and "num_blocks" in config:
        assert llm.engine.scheduler.num_preemptions
    cached = llm.generate(three_prompts[0], params("north"), use_tqdm=False)[0].num_cached_tokens
    assert cached > 0 or llm.engine.decoder.config.num_blocks
    llm.close()


def test_a_prefix_is_of_its_adapter(folders, three_prompts, expected):
    llm = hf_specdec.LLM("tiny", dtype="float32", speculative_config={**NGRAM, "block_size": 4}, lora_modules=folders)
    counts = []
    for name in (None, "north", "south", "north", None):
        (output,) = llm.generate(three_prompts[0], params(name), use_tqdm=False)
        counts.append(output.num_cached_tokens > 0)
        assert without_end(output.outputs[0].token_ids, llm) == without_end(expected[0, name], llm)
    assert counts == [False, False, False, True, True]
    llm.unload_lora_adapter("north")
    llm.load_lora_adapter("north", folders["south"])
    (output,) = llm.generate(three_prompts[0], params("north"), use_tqdm=False)
    assert output.num_cached_tokens == 0
    assert without_end(output.outputs[0].token_ids, llm) == without_end(expected[0, "south"], llm)
    llm.close()


def test_a_seed_means_the_same_beside_other_adapters(folders, three_prompts):
    found = []
    for config in (None, NGRAM):
        llm = hf_specdec.LLM("tiny", dtype="float32", speculative_config=config, lora_modules=folders)
        drawn = {"temperature": 1.0, "seed": 7}
        together = texts_of(llm, three_prompts, ALL, **drawn)
        assert together == [texts_of(llm, three_prompts, [key], **drawn)[0] for key in ALL]
        found.append(together)
        llm.close()
    assert found[0] == found[1]


def test_a_model_that_is_passed_in_is_left_as_it_was(folders, three_prompts, expected):
    model = load_bundled("tiny")
    before, trained = structure_of(model), [parameter.requires_grad for parameter in model.parameters()]
    llm = hf_specdec.LLM(model, speculative_config=NGRAM, lora_modules=folders)
    assert_right(llm, three_prompts, expected, ALL)
    llm.unload_lora_adapter("north")
    with pytest.raises(ValueError, match=r"lora 'north' is not loaded. Loaded: south"):
        texts_of(llm, three_prompts, [(0, "north")])
    assert_right(llm, three_prompts, expected, [(0, None), (0, "south")])
    llm.close()
    assert structure_of(model) == before and not hasattr(model, "peft_config")
    assert [parameter.requires_grad for parameter in model.parameters()] == trained


def test_adapters_of_a_peft_model(folders, three_prompts, expected):
    """Its active adapter computes requests without a name, and others are loaded beside it."""
    model = peft.PeftModel.from_pretrained(load_bundled("tiny"), folders["south"]).eval()
    llm = hf_specdec.LLM(model, speculative_config=NGRAM, lora_modules={"north": folders["north"]})
    tokens = texts_of(llm, three_prompts, [(0, None), (0, "north")])
    assert [without_end(each, llm) for each in tokens] == [
        without_end(expected[0, name], llm) for name in ("south", "north")
    ]
    llm.close()
    assert model.active_adapter == "default" and list(model.peft_config) == ["default"]
    with model.disable_adapter():
        llm = hf_specdec.LLM(model, speculative_config=NGRAM, lora_modules={"north": folders["north"]})
        tokens = texts_of(llm, three_prompts, [(0, None), (0, "north")])
        assert [without_end(each, llm) for each in tokens] == [
            without_end(expected[0, name], llm) for name in (None, "north")
        ]
        llm.close()


def test_plain_calls_of_another_thread_do_not_see_adapters_come_and_go(folders, three_prompts, expected):
    """Neither layers without weights, nor an adapter that nobody has chosen."""
    model, over, texts = load_bundled("tiny"), threading.Event(), []
    llm = hf_specdec.LLM(model)

    def plainly():
        while not over.is_set():
            texts.append(
                model.generate(torch.tensor(three_prompts[:1]), max_new_tokens=24, do_sample=False)[0].tolist()
            )
        return texts

    with ThreadPoolExecutor(1) as pool:
        plain = pool.submit(plainly)
        try:
            while len(texts) < 4 and not plain.done():
                for name, folder in folders.items():
                    llm.load_lora_adapter(name, folder)
                for name in folders:
                    llm.unload_lora_adapter(name)
        finally:
            over.set()
        wanted = [*three_prompts[0], *expected[0, None]]
        assert all(text == wanted for text in plain.result())
    llm.close()


@pytest.mark.skipif(library() is None, reason="the native library is not compiled")
@pytest.mark.parametrize(
    "config", [NGRAM, {"method": "draft_model", "early_exit": 2}], ids=lambda config: config["method"]
)
def test_rows_without_adapters_need_no_program_of_their_own(folders, three_prompts, expected, tmp_path, config, caplog):
    """One that serves rows with adapters serves them, whichever adapters come and go in its layers."""
    others = [save(tmp_path / str(seed), seed) for seed in (3, 4)]
    llm = hf_specdec.LLM("tiny", dtype="float32", speculative_config=config)
    counts, plain = [], [(0, None), (1, None), (2, None)]
    with caplog.at_level(logging.INFO, "hf_specdec.model.native"):
        for change in (
            lambda: None,
            lambda: llm.load_lora_adapter("north", folders["north"]),
            lambda: llm.load_lora_adapter("more", others[0]),
            lambda: llm.load_lora_adapter("most", others[1]),
            lambda: llm.unload_lora_adapter("more"),
            lambda: [llm.unload_lora_adapter(name) for name in ("north", "most")],
        ):
            change()
            assert_right(
                llm, three_prompts, expected, [*plain, (1, "north")] if "north" in llm.engine.adapters.paths else plain
            )
            counts.append(sum("runs in the native library" in line for line in caplog.messages))
    assert len(set(counts[1:])) == 1, counts
    llm.close()


def test_no_prefix_outlives_the_scaling_that_computed_it(folders, three_prompts):
    model = peft.PeftModel.from_pretrained(load_bundled("tiny"), folders["south"]).eval()
    llm = hf_specdec.LLM(model, speculative_config={**NGRAM, "block_size": 4})
    for factor in (1.0, 2.5):
        for layer in lora_layers(model):
            layer.set_scale("default", factor)
        ids = torch.tensor(three_prompts[:1])
        wanted = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
        assert without_end(texts_of(llm, three_prompts, [(0, None)])[0], llm) == without_end(wanted, llm)
    llm.close()


def test_a_model_keeps_no_adapter_of_an_llm_that_cannot_be_made(folders, tmp_path):
    model = load_bundled("tiny")
    before = structure_of(model)
    for wrong in ({"south": str(tmp_path)}, {"": folders["south"]}, {3: folders["south"]}):
        with pytest.raises(ValueError, match=r"cannot be loaded from|must be a text, and not empty"):
            hf_specdec.LLM(model, lora_modules={"north": folders["north"], **wrong})
        assert structure_of(model) == before and not hasattr(model, "peft_config")


def test_a_model_in_training_stays_so(folders):
    """Its own adapter's dropout, too, while another adapter is loaded and after it has gone."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.5, target_modules=["q_proj"])
    model = peft.get_peft_model(load_bundled("tiny"), config).train()
    modules = list(model.modules())
    llm = hf_specdec.LLM(model, lora_modules={"north": folders["north"]})
    number = llm.engine.adapters.id_of("north")
    assert all(module.training for module in modules)
    assert not any(module.training for name, module in model.named_modules() if number in name)
    llm.close()
    assert all(module.training for module in model.modules())


def test_two_engines_of_one_model_do_not_mix_their_adapters(folders, three_prompts, expected):
    model = load_bundled("tiny")
    first = hf_specdec.LLM(model, lora_modules={"one": folders["north"]})
    second = hf_specdec.LLM(model, lora_modules={"one": folders["south"]})
    (tokens,) = texts_of(second, three_prompts, [(0, "one")])
    assert without_end(tokens, second) == without_end(expected[0, "south"], second)
    with pytest.raises(UnsupportedModel, match="adapters have changed since this LLM was made"):
        texts_of(first, three_prompts, [(0, "one")])
    second.close()
    (tokens,) = texts_of(first, three_prompts, [(0, "one")])
    assert without_end(tokens, first) == without_end(expected[0, "north"], first)
    first.close()


BROKEN = {
    "no folder": (lambda folder: shutil.rmtree(folder), "Can't find 'adapter_config.json'"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "cannot be loaded from"),
    "cut off": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 100), "cannot be loaded from"),
    "another rank": (lambda folder: replace_in(folder, '"r": 4', '"r": 5'), r"has the shape \[4, .* ask for \[5, "),
    "a rank beyond all memory": (
        lambda folder: replace_in(folder, '"r": 4', '"r": 1000000000000'), r"has the shape \[4, .* ask for \[1000000000000, ",
    ),
    "other layers": (lambda folder: replace_in(folder, '"down_proj"', '"up_proj"'), "the file has no .*up_proj.lora_A"),
    "unknown layers": (lambda folder: replace_in(folder, '_proj"', '_none"'), "not found in the base model"),
    "another kind": (lambda folder: replace_in(folder, '"LORA"', '"IA3"'), "it is a IA3 adapter"),
    "DoRA": (lambda folder: save(folder, 1, use_dora=True), "DoraLinearVariant"),
    "biases": (lambda folder: replace_in(folder, '"bias": "none"', '"bias": "all"'), "its bias changes weights"),
    "PiSSA": (lambda folder: replace_in(folder, '"init_lora_weights": false', '"init_lora_weights": "pissa"'), "pissa"),
    "whole modules": (lambda folder: save(folder, 1, modules_to_save=["lm_head"]), "its modules_to_save changes"),
    "another model": (lambda folder: save(folder, 1, "tiny-draft"), "has the shape|the file has no|has no place"),
    "other embeddings": (lambda folder: save(folder, 1, target_modules=["embed_tokens"]), "differs from the model's"),
}  # fmt: skip


def replace_in(folder, old, new):
    text = (folder / "adapter_config.json").read_text()
    assert old in text
    (folder / "adapter_config.json").write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def patient(folders):
    """An LLM that outlives adapters that cannot be loaded."""
    llm = hf_specdec.LLM("tiny", dtype="float32", speculative_config=NGRAM, lora_modules=folders)
    yield llm
    llm.close()


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_adapter_is_one_error_and_changes_nothing(patient, three_prompts, expected, tmp_path, kind):
    folder, (damage, message) = tmp_path / "broken", BROKEN[kind]
    save(folder, 3)
    before = structure_of(patient.model)
    if kind == "other embeddings":
        with torch.no_grad():
            patient.model.get_input_embeddings().base_layer.weight[0, 0] += 1
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        patient.load_lora_adapter("broken", str(folder))
    assert "The lora adapter 'broken' cannot be loaded from" in str(caught.value) and "\n" not in str(caught.value)
    if kind == "other embeddings":
        with torch.no_grad():
            patient.model.get_input_embeddings().base_layer.weight[0, 0] -= 1
    assert structure_of(patient.model) == before
    assert_right(patient, three_prompts, expected, ALL[:3])


def test_an_adapter_that_is_not_finite_spoils_only_its_rows(patient, three_prompts, expected, tmp_path):
    save(tmp_path / "nan", 3)
    patient.load_lora_adapter("nan", str(tmp_path / "nan"))
    number = patient.engine.adapters.id_of("nan")
    with torch.no_grad():
        for name, weight in patient.model.named_parameters():
            if number in name:
                weight.fill_(float("nan"))
    outputs = patient.generate([three_prompts[0]] * 4, [params(name) for name in ("nan", *NAMES)], use_tqdm=False)
    for output, name in zip(outputs[1:], NAMES, strict=True):
        assert without_end(output.outputs[0].token_ids, patient) == without_end(expected[0, name], patient)
    patient.unload_lora_adapter("nan")


# ---- over HTTP ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(folders):
    flags = ["--lora-modules", f"north={folders['north']}", "--allow-runtime-lora-updating", "--max-model-len", "1024"]
    with Process.running("--served-model-name", "base", *flags, "--speculative-config", "ngram") as made:
        yield made


def told(server, path, body):
    """(status, the line of text or the error's message) of a request whose answer may be no JSON."""
    status, _, text = server.ask(path, body)
    return status, text if status == 200 else json.loads(text)["error"]["message"]


def test_requests_name_an_adapter_as_their_model(client, server, folders, three_prompts, expected, tiny_tokenizer):
    models = {model.id: model.model_extra.get("parent") for model in client.models.list()}
    assert models == {"base": None, "north": "base"} and client.models.retrieve("north").id == "north"
    status, text = told(server, "/v1/load_lora_adapter", {"lora_name": "south", "lora_path": folders["south"]})
    assert (status, text) == (200, "Success: LoRA adapter 'south' added successfully.")
    assert [model.id for model in client.models.list()] == ["base", "north", "south"]

    def ask(key):
        number, name = key
        answer = client.completions.create(
            model=name or "base", prompt=three_prompts[number], max_tokens=24, temperature=0
        )
        assert answer.model == (name or "base")
        return answer.choices[0].text

    def decoded(key):
        return tiny_tokenizer.decode(expected[key], skip_special_tokens=True)

    with ThreadPoolExecutor(9) as pool:
        for wanted in (ALL, ALL[::-1]):
            assert list(pool.map(ask, wanted)) == [decoded(key) for key in wanted]
    long = "Once upon a time " * 3000  # is read in another process, which must know the new adapter
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.completions.create(model="south", prompt=long)
    chat = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0, "max_tokens": 12}
    texts = {name: client.chat.completions.create(model=name, **chat).choices[0].message.content for name in models}
    assert texts["base"] != texts["north"]
    assert (
        client.responses.create(model="north", input="Tell me a story.", temperature=0, max_output_tokens=12).model
        == "north"
    )
    counted = [
        line for line in server.ask("/metrics")[2].splitlines() if line.startswith("vllm:spec_decode_num_drafts_total")
    ]
    assert {line.partition('model_name="')[2].partition('"')[0] for line in counted} == {"base", "north", "south"}
    assert told(server, "/v1/unload_lora_adapter", {"lora_name": "south"})[0] == 200
    with pytest.raises(openai.NotFoundError, match="Served: base, north"):
        ask((0, "south"))


def test_an_adapter_is_replaced_and_refused(client, server, folders, three_prompts, expected, tiny_tokenizer, tmp_path):
    load = {"lora_name": "other", "lora_path": folders["north"]}
    assert told(server, "/v1/load_lora_adapter", load)[0] == 200
    status, message = told(server, "/v1/load_lora_adapter", load)
    assert status == 400 and "has already been loaded" in message
    status, _ = told(server, "/v1/load_lora_adapter", {**load, "lora_path": folders["south"], "load_inplace": True})
    assert status == 200
    answer = client.completions.create(model="other", prompt=three_prompts[0], max_tokens=24, temperature=0)
    assert answer.choices[0].text == tiny_tokenizer.decode(expected[0, "south"], skip_special_tokens=True)
    for body, wrong in (
        ({"lora_name": "base", "lora_path": folders["north"]}, "name of the model"),
        ({"lora_name": "bad", "lora_path": str(tmp_path)}, "cannot be loaded from .*adapter_config.json"),
        ({"lora_name": "bad"}, "lora_path"),
    ):
        status, message = told(server, "/v1/load_lora_adapter", body)
        assert status == 400 and re.search(wrong, message)
    assert told(server, "/v1/unload_lora_adapter", {"lora_name": "other"})[0] == 200
    status, message = told(server, "/v1/unload_lora_adapter", {"lora_name": "other"})
    assert (status, message) == (404, "The lora adapter 'other' cannot be found.")


def test_an_adapter_that_is_unloaded_ends_what_it_began(client, server, folders, three_prompts):
    """Its name is gone at once, also if another adapter gets it meanwhile; answers that use it go on."""
    load = {"lora_name": "brief", "lora_path": folders["north"]}
    assert told(server, "/v1/load_lora_adapter", load)[0] == 200
    call = {"prompt": three_prompts[1], "temperature": 0, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(model="brief", **call).choices[0].text
    stream, pieces = client.completions.create(model="brief", stream=True, **call), []
    pieces.append(next(stream).choices[0].text)
    assert told(server, "/v1/unload_lora_adapter", {"lora_name": "brief"})[0] == 200
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="brief", prompt="x")
    assert told(server, "/v1/load_lora_adapter", {**load, "lora_path": folders["south"]})[0] == 200
    other = client.completions.create(model="brief", **call).choices[0].text
    pieces += [event.choices[0].text for event in stream]
    assert "".join(pieces) == whole != other
    assert told(server, "/v1/unload_lora_adapter", {"lora_name": "brief"})[0] == 200


@pytest.mark.slow
def test_adapters_come_and_go_while_requests_run(client, server, folders, three_prompts, expected, tiny_tokenizer):
    """Whole, cut and streamed answers; each has the text of one adapter, and that of its name where the name stays."""
    texts = {key: tiny_tokenizer.decode(tokens, skip_special_tokens=True) for key, tokens in expected.items()}
    over, wrong, right = threading.Event(), [], []

    def churn():
        for turn in range(40):
            folder = folders["south" if turn % 2 else "north"]
            body = {"lora_name": "churn", "lora_path": folder, "load_inplace": bool(turn % 3)}
            status, message = told(server, "/v1/load_lora_adapter", body)
            if status != 200 and "already been loaded" not in message:
                wrong.append(message)
            if turn % 4 == 3:
                told(server, "/v1/unload_lora_adapter", {"lora_name": "churn"})
            told(server, "/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": "/nowhere"})
        over.set()

    def ask(seed):
        random, number = Random(seed), seed % 3
        while not over.is_set():
            name = random.choice(["base", "north", "churn"])
            call = {"model": name, "prompt": three_prompts[number], "max_tokens": 24, "temperature": 0}
            try:
                if random.random() < 0.3:
                    with client.completions.create(stream=True, **call) as stream:
                        next(iter(stream))
                    continue
                text = client.completions.create(**call).choices[0].text
            except (openai.NotFoundError, openai.BadRequestError) as error:
                if name != "churn":
                    wrong.append(str(error))
                continue
            names = {"base": [None], "north": ["north"], "churn": ["north", "south"]}[name]
            (right if text in [texts[number, each] for each in names] else wrong).append(text)

    with ThreadPoolExecutor(9) as pool:
        tasks = [pool.submit(ask, seed) for seed in range(8)]
        tasks.append(pool.submit(churn))
        for task in tasks:
            task.result()
    assert not wrong and len(right) > 20
    told(server, "/v1/unload_lora_adapter", {"lora_name": "churn"})


def test_a_name_that_goes_while_a_body_is_read_is_not_the_model(tiny_tokenizer):
    """Bodies are read in a thread of their own; the engine then refuses the name."""
    reader = RequestReader(tiny_tokenizer, ["base"], None, None)
    reader.facts = Facts(max_model_len=64, adapters=("north",))
    endpoint = Completions(reader, CompletionRequest(model="north", prompt="Once", max_tokens=4), "")
    reader.facts = Facts(max_model_len=64)
    endpoint.prepare()
    assert endpoint.params.lora == "north"
    assert reader.facts.adapters == () and "north" not in reader.served


def test_an_adapter_is_known_though_its_client_has_left():
    """Otherwise it could be neither used nor unloaded."""
    asked = Future()

    class OfWorker(Server):
        running_worker = SimpleNamespace(ask=lambda wish: asked)

    server = OfWorker.__new__(OfWorker)
    server.facts, server.names, server.loads_adapters = Facts(adapters=("south",)), ["base"], True

    async def leave():
        request = asyncio.ensure_future(server.change_adapters("north", "folder"))
        await asyncio.sleep(0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        assert not asked.cancelled()
        asked.set_result(None)
        await asyncio.sleep(0.1)

    asyncio.run(leave())
    assert server.facts.adapters == ("south", "north")


def test_adapters_are_not_loaded_unless_allowed(folders):
    with in_thread() as server:
        status, message = told(server, "/v1/load_lora_adapter", {"lora_name": "north", "lora_path": folders["north"]})
        assert status == 403 and "--allow-runtime-lora-updating" in message
        assert told(server, "/v1/unload_lora_adapter", {"lora_name": "north"})[0] == 403


def test_names_that_cannot_be(folders):
    with pytest.raises(ValueError, match="lora must be the name of an adapter, not 3"):
        SamplingParams(lora=3)
    llm = hf_specdec.LLM("tiny", lora_modules={"tiny": folders["north"]})
    reader = RequestReader(llm.tokenizer, ["tiny"], None, None)
    with pytest.raises(ValueError, match="'tiny' is the name of the model"):
        reader.know(Facts.of(llm, llm.tokenizer))
    llm.close()


@pytest.mark.parametrize("given", ["north", "=path", "north=", "north=a north=b"])
def test_lora_modules_are_names_and_paths(given):
    with pytest.raises(ValueError, match="NAME=PATH"):
        _lora_modules(given.split())
