"""Whole runs: from a file to a head that drafts, in every format; hidden states on disk; several processes; the command line."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from helpers_training import qa_rows, random_text, target, train, word_tokenizer, write_rows
from oracle import EOS, VOCAB, ragged, tiny_llama
from paths import BUILDERS, ROOT
from safetensors.torch import load_file

import hf_specdec
from hf_specdec.candidate_generators import parse_config
from hf_specdec.cli import main
from hf_specdec.core.output import Taps
from hf_specdec.training import TrainingError, TrainingOptions, available_trainers, pipeline, trainer_class
from hf_specdec.training.base import register
from hf_specdec.training.batch import BatchOrder, collate
from hf_specdec.training.data import encode, read_rows
from hf_specdec.training.export import push_to_hub
from hf_specdec.training.features import FeatureFiles
from hf_specdec.training.loop import learning_rate
from hf_specdec.training.pipeline import check_installed, train_head
from hf_specdec.training.regenerate import Regeneration, regenerate
from hf_specdec.training.target import TargetModel

VARIANTS = [
    ("medusa", {}),
    pytest.param("medusa", {"num_layers": 2, "num_heads": 3}, marks=pytest.mark.slow),
    ("medusa", {"own_lm_head": False}),
    ("medusa", {"form": "vllm"}),
    pytest.param("medusa", {"form": "vllm", "own_lm_head": False}, marks=pytest.mark.slow),
    pytest.param("mlp_speculator", {}, marks=pytest.mark.slow),
    ("mlp_speculator", {"tie_weights": True, "inner_dim": 24, "num_heads": 4}),
    ("hydra", {}),
    pytest.param("hydra", {"num_layers": 2}, marks=pytest.mark.slow),
    ("hydra", {"prefix_layer": True, "num_layers": 2}),
]


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "data.jsonl", qa_rows(30))


# ---- a head that drafts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "options"), VARIANTS, ids=lambda value: str(value))
def test_exported_heads_load_by_their_folder_and_are_lossless(tmp_path, data, method, options):
    model, folder = tiny_llama(), tmp_path / "head"
    train(method, folder, data, model, **options)
    assert parse_config({"model": str(folder)}).method == method
    inputs = ragged([9, 5, 12])
    plain = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    out = model.generate(
        **inputs,
        max_new_tokens=16,
        do_sample=False,
        speculative_config={"model": str(folder)},
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, plain)
    assert out.speculation["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("method", "options"),
    [("mlp_speculator", {})]
    + [
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("hydra", {"prefix_layer": True}), ("medusa", {}), ("hydra", {}))
    ],
    ids=str,
)
def test_the_estimate_is_what_drafting_then_does(tmp_path, method, options):
    """Held out are copies of texts that were learnt by heart: there the decoder's τ is the estimated one."""
    model, folder, written = tiny_llama(), tmp_path / "head", tmp_path / "answers.jsonl"
    rows = read_rows(write_rows(tmp_path / "data.jsonl", qa_rows(16)))
    regenerate(TargetModel(model, word_tokenizer(), "tiny"), rows, written, Regeneration(max_new_tokens=80), quiet=True)
    texts = [json.loads(line) for line in written.read_text().splitlines()]
    texts = [text for text in texts if len(text["answer_ids"]) == 80][:3]
    assert texts
    data = write_rows(tmp_path / "copies.jsonl", [{**text, "group": f"{i}"} for i in range(4) for text in texts])
    settings = {"max_steps": 250, "tokens_per_batch": 256, "learning_rate": 1e-2, "weight_decay": 0.0, "held_out": 0.25}
    estimate = train(method, folder, data, model, eval_every=250, **settings, **options).estimate
    assert estimate.tau > 2.8
    steps = tokens = 0
    for text in texts:
        out = model.generate(
            torch.tensor([text["prompt_ids"]]), max_new_tokens=80, do_sample=False, eos_token_id=EOS, pad_token_id=0,
            speculative_config={"model": str(folder)}, return_dict_in_generate=True,
        )  # fmt: skip
        assert out.sequences[0, len(text["prompt_ids"]) :].tolist() == text["answer_ids"]
        steps += out.speculation["num_steps"] - 1  # the prompt's, which drafts nothing
        tokens += out.speculation["num_new_tokens"] - 1
    assert tokens / steps == pytest.approx(estimate.tau, rel=0.15)


def test_bundled_target(tmp_path, tiny_model, tiny_tokenizer):
    """20 steps on the bundled target, export, generate: what a user does first."""
    rows = [{"prompt": f"What is {a} + {b}?", "completion": f"The sum is {a + b}."} for a in range(6) for b in range(5)]
    options = available_trainers()["medusa"].options_class(
        max_steps=20, tokens_per_batch=256, num_heads=2, own_lm_head=False
    )
    data, folder = write_rows(tmp_path / "sums.jsonl", rows), tmp_path / "head"
    said: list[str] = []
    trained = train_head(
        "medusa", tiny_model, tiny_tokenizer, data, folder, options, target_name="tiny", dtype=torch.float16, license="mit",
        quiet=True, say=said.append,
    )  # fmt: skip
    assert trained.steps == 20
    assert trained.estimate.tau > 1.0
    assert any("on the fly" in line for line in said)
    assert {tensor.dtype for tensor in load_file(folder / "medusa_lm_head.safetensors").values()} == {torch.float16}
    ids = tiny_tokenizer("Tell me a story about a dog.", return_tensors="pt").input_ids
    plain = tiny_model.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(
        tiny_model.generate(ids, max_new_tokens=24, do_sample=False, speculative_config={"model": str(folder)}), plain
    )
    hf_specdec.release(tiny_model)


# ---- hidden states --------------------------------------------------------------------------------------------------


def test_hidden_states_from_disk_are_those_on_the_fly(tmp_path, data):
    model = target()
    samples = encode(read_rows(data), model.tokenizer, VOCAB, {EOS}, 100)[:5]
    taps = Taps(last_hidden=True, layers=(2, 0))
    files = FeatureFiles(model, tmp_path / "states", taps, samples)
    assert files.num_bytes == sum(map(len, samples)) * 3 * 32 * 4
    fresh = model.capture(collate(samples), taps)
    for batch in (files(samples, taps), FeatureFiles(model, tmp_path / "states", taps, samples)(samples, taps)):
        assert torch.equal(batch.input_ids, fresh.input_ids)
        there = fresh.present
        assert torch.allclose(batch.last_hidden[there], fresh.last_hidden[there], atol=1e-6)
        for index in taps.layers:
            assert torch.allclose(batch.layers[index][there], fresh.layers[index][there], atol=1e-6)
    again = FeatureFiles(model, tmp_path / "states", taps, samples)
    model.capture = None  # must not be needed
    again(samples, taps)
    assert len(list((tmp_path / "states").glob("*.safetensors"))) == 5


def test_states_the_decoder_wrote_are_used(tmp_path):
    """Files of the method extract_hidden_states, which end one token before the text does."""
    model = target()
    ids = torch.tensor([random_text(9)])
    config = {"method": "extract_hidden_states", "output_dir": str(tmp_path)}
    text = model.model.generate(ids, max_new_tokens=7, do_sample=False, speculative_config=config)[0]
    rows = [{"prompt_ids": text[:9].tolist(), "answer_ids": text[9:].tolist(), "_where": ""}]
    samples = encode(rows, model.tokenizer, VOCAB, set(), 100)
    taps = Taps(last_hidden=True)
    fresh = model.capture(collate(samples), taps)
    files = FeatureFiles(model, tmp_path, taps, samples)
    model.capture = None
    assert torch.allclose(files(samples, taps).last_hidden[:, :-1], fresh.last_hidden[:, :-1], atol=1e-5)


def test_states_of_other_weights_are_not_used(tmp_path, data):
    """The target's name stays the same while its weights, or its configuration, change."""
    model = target()
    samples = encode(read_rows(data), model.tokenizer, VOCAB, {EOS}, 100)[:2]
    taps = Taps(last_hidden=True)
    before = FeatureFiles(model, tmp_path, taps, samples)(samples, taps).last_hidden
    with torch.no_grad():
        model.lm_head.weight.add_(1)  # not tied to the embeddings
        model.embed_tokens.weight.mul_(2)
    after, fresh = (
        FeatureFiles(model, tmp_path, taps, samples)(samples, taps).last_hidden,
        model.capture(collate(samples), taps),
    )
    assert torch.allclose(after[fresh.present], fresh.last_hidden[fresh.present], atol=1e-6)
    assert not torch.allclose(after, before, atol=1e-3)
    known = FeatureFiles(model, tmp_path, taps, samples)
    assert all(known._file(sample) for sample in samples)
    model.config.rms_norm_eps *= 2
    assert not any(FeatureFiles(model, tmp_path, taps, samples)._file(sample) for sample in samples)


def test_states_the_decoder_wrote_before_the_weights_changed_are_not_used(tmp_path, caplog):
    source = target()
    source.model.save_pretrained(tmp_path / "model")
    model = TargetModel(type(source.model).from_pretrained(tmp_path / "model"), source.tokenizer, "tiny")
    config = {"method": "extract_hidden_states", "output_dir": str(tmp_path / "states")}
    ids = torch.tensor([random_text(9)])
    text = model.model.generate(ids, max_new_tokens=7, do_sample=False, speculative_config=config)[0]
    rows = [{"prompt_ids": text[:9].tolist(), "answer_ids": text[9:].tolist(), "_where": ""}]
    (sample,) = encode(rows, model.tokenizer, VOCAB, set(), 100)
    taps = Taps(last_hidden=True)
    assert FeatureFiles(model, tmp_path / "states", taps, [sample])._file(sample) is not None
    later = time.time() + 60
    os.utime(tmp_path / "model" / "model.safetensors", (later, later))
    assert FeatureFiles(model, tmp_path / "states", taps, [sample])._file(sample) is None
    assert "older than" in caplog.text


def test_a_run_from_disk_is_a_run_on_the_fly(tmp_path, data):
    said: list[str] = []
    train("hydra", tmp_path / "fly", data)
    train("hydra", tmp_path / "disk", data, cache_dir=tmp_path / "states", say=said.append)
    assert any("kept in" in line and "MiB" in line for line in said)
    one, two = (load_file(tmp_path / name / "hydra_lm_head.safetensors") for name in ("fly", "disk"))
    for name in one:
        assert torch.allclose(one[name], two[name], atol=1e-5), name


# ---- steps ----------------------------------------------------------------------------------------------------------


def test_accumulated_batches_are_one_big_batch(tmp_path, data):
    """Also where the batches hold different numbers of tokens that count."""
    common = {"held_out": 0.0, "max_steps": 3}
    train("medusa", tmp_path / "one", data, tokens_per_batch=10_000, **common)
    steps = json.loads((tmp_path / "one" / "training" / "log.jsonl").read_text().splitlines()[0])
    lengths = [len(s) for s in encode(read_rows(data), word_tokenizer(), VOCAB, {EOS}, 100)]
    count = len(BatchOrder(lengths, 128, 1, 0).epoch(0))
    assert count > 3
    train("medusa", tmp_path / "many", data, tokens_per_batch=128, gradient_accumulation=count, **common)
    other = json.loads((tmp_path / "many" / "training" / "log.jsonl").read_text().splitlines()[0])
    assert other["loss"] == pytest.approx(steps["loss"], rel=1e-5)
    assert other["grad_norm"] == pytest.approx(steps["grad_norm"], rel=1e-4)
    assert other["accuracy_2"] == steps["accuracy_2"]


WORKER = """
import sys
import time
from pathlib import Path
import torch
torch.set_num_threads(1)
from helpers_training import train
train("medusa", Path(sys.argv[1]), Path(sys.argv[2]), max_steps=5, gradient_accumulation=int(sys.argv[3]), held_out=0.2, seed=1)
"""


@pytest.mark.slow
def test_two_processes_are_two_accumulated_batches(tmp_path, data):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(BUILDERS), os.environ.get("PYTHONPATH", "")]),
    }
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        "0",
        "--standalone",
    ]
    command = [*launch, str(script), str(tmp_path / "two"), str(data), "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    train("medusa", tmp_path / "one", data, max_steps=5, gradient_accumulation=2, held_out=0.2, seed=1)
    logs = [
        [json.loads(line) for line in (tmp_path / n / "training" / "log.jsonl").read_text().splitlines()]
        for n in ("one", "two")
    ]
    assert [entry["step"] for entry in logs[0]] == [entry["step"] for entry in logs[1]]
    for ours, theirs in zip(*logs, strict=True):
        for key in set(ours) - {"seconds"}:
            assert theirs[key] == pytest.approx(ours[key], rel=1e-4), key
    one, two = (load_file(tmp_path / name / "medusa_lm_head.safetensors") for name in ("one", "two"))
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


def test_bf16_computes_in_bf16_and_keeps_float32_weights(tmp_path, data):
    train("hydra", tmp_path / "full", data)
    train("hydra", tmp_path / "half", data, bf16=True)
    logs = [
        json.loads((tmp_path / n / "training" / "log.jsonl").read_text().splitlines()[-2]) for n in ("full", "half")
    ]
    assert logs[0]["loss"] != logs[1]["loss"] == pytest.approx(logs[0]["loss"], rel=0.05)
    assert load_file(tmp_path / "half" / "hydra_lm_head.safetensors")["hydra_lm_head.0.weight"].dtype == torch.float32


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator", "hydra"])
def test_bfloat16_targets(tmp_path, data, method):
    model = tiny_llama().to(torch.bfloat16)
    options = {"own_lm_head": False} if method == "medusa" else {}
    train(method, tmp_path / "head", data, model, cache_dir=tmp_path / "states", **options)
    (weights,) = (tmp_path / "head").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(weights).values()} == {torch.bfloat16}


def test_learning_rates():
    options = TrainingOptions(learning_rate=1.0, warmup=0.1, final_learning_rate=0.1)
    rates = [learning_rate(options, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.55)
    assert 0.1 < rates[-1] < 0.102
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    linear = dataclasses.replace(options, schedule="linear")
    assert learning_rate(linear, 55, 100) == pytest.approx(0.55)
    assert learning_rate(dataclasses.replace(options, schedule="constant"), 99, 100) == 1.0
    assert learning_rate(options, 0, 1) == 1.0


# ---- options and errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "--epochs must be an integer of at least 1, not 0"),
        ({"epochs": 1.5}, "--epochs must be an integer of at least 1, not 1.5"),
        ({"learning_rate": float("nan")}, "--learning-rate must be a number of at least 0, not nan"),
        ({"bf16": "yes"}, "--bf16 must be true or false, not 'yes'"),
        ({"init_from": ""}, "--init-from must be text, not ''"),
        ({"warmup": 1.5}, "--warmup must be a number of at least 0 and at most 1, not 1.5"),
        ({"schedule": "cosin"}, "one of 'cosine', 'linear', 'constant', not 'cosin' .did you mean 'cosine'"),
    ],
)
def test_bad_options(values, message):
    with pytest.raises(TrainingError, match=message):
        TrainingOptions(**values)


def test_unknown_methods_and_formats(tmp_path, data):
    with pytest.raises(TrainingError, match=r"no trainer for 'medussa' \(did you mean 'medusa'\?\)"):
        trainer_class("medussa")
    with pytest.raises(TrainingError, match="--format speculators: medusa heads are written as original, vllm"):
        train("medusa", tmp_path / "head", data, form="speculators")


def test_a_trainer_that_is_defined_again_takes_the_place_of_the_first():
    """As when a notebook's cell is run again."""
    first = trainer_class("medusa")
    again = type(first.__qualname__, (first,), {})
    try:
        assert register(first.options_class)(again) is again is trainer_class("medusa")
    finally:
        register(first.options_class)(first)
    with pytest.raises(ValueError, match="already registered"):
        register(first.options_class)(trainer_class("eagle"))
    assert trainer_class("medusa") is first and trainer_class("eagle").method == "eagle"


def test_missing_packages_are_named(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    with pytest.raises(ImportError, match=r"Training needs matplotlib: pip install 'hf-specdec\[train\]'"):
        check_installed()


def test_targets_whose_logits_are_not_understood_are_refused():
    model = tiny_llama()
    model.lm_head.register_forward_hook(
        lambda module, args, out: out.sin() if out.shape[1] == 1 and out.dim() == 3 else out
    )
    with pytest.raises(TrainingError, match="does something to its logits"):
        TargetModel(model, word_tokenizer(), "odd")


def test_the_hub_gets_the_head_without_the_run(tmp_path, data, monkeypatch):
    import huggingface_hub

    calls = []

    class Api:
        def __init__(self, token=None):
            pass

        def create_repo(self, repository, **options):
            calls.append((repository, options))

        def upload_folder(self, **options):
            calls.append(options)
            return "https://hub/me/head"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert push_to_hub(tmp_path, "me/head", private=True) == "https://hub/me/head"
    assert calls[0] == ("me/head", {"private": True, "exist_ok": True})
    assert calls[1] == {"repo_id": "me/head", "folder_path": tmp_path, "ignore_patterns": ["training/*"]}


# ---- the command line -----------------------------------------------------------------------------------------------


def test_train_and_eval_commands(tmp_path, capsys):
    rows = [{"question": f"What is {a} + 1?", "answer": "I do not know.", "task": "sum"} for a in range(8)]
    data, head = write_rows(tmp_path / "data.jsonl", rows), tmp_path / "head"
    command = [
        "train", "medusa", "--target", "tiny", "--data", str(data), "--output", str(head), "--max-steps", "6", "--num-heads", "2",
        "--no-own-lm-head", "--tokens-per-batch", "256", "--regenerate", "--max-new-tokens", "12", "--held-out", "0.2", "--quiet",
        "--export-dtype", "float16", "--license", "apache-2.0", "--cache-dir", str(tmp_path / "states"), "--dtype", "float32",
    ]  # fmt: skip
    assert main(command) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert out.startswith(f"{head}: 6 steps; estimated τ ")
    assert "the target answers 8 prompts" in err
    assert "hidden states: kept in" in err
    assert "steps teach a head little" not in err  # with --max-steps they are what was asked for
    assert (head / "training" / "regenerated.jsonl").is_file()

    figures, bars = tmp_path / "figures.json", tmp_path / "bars.png"
    command = [
        "eval", str(head), "--target", "tiny", "--limit", "1", "--max-new-tokens", "8", "--json", str(figures), "--plot", str(bars),
        "--update-card", "--dtype", "float32",
    ]  # fmt: skip
    assert main(command) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    report = json.loads(figures.read_text())
    assert report["method"] == "medusa"
    assert list(report["tasks"]) == ["math", "code", "story", "edit"]
    for task in (*report["tasks"].values(), report["all"]):
        assert 1.0 <= task["tau"] <= 3.0
        assert len(task["acceptance_per_position"]) == 2
        assert task["speed_up"] > 0 and task["speed_up_over_none"] > 0
    assert report["all"]["prompts"] == 4
    assert "story" in out
    assert bars.read_bytes()[:4] == b"\x89PNG"
    card = (head / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "base_model: tiny" in card
    assert f"| all | 4 | {report['all']['tau']:.2f} |" in card
    assert "answers written by the target" in card
    assert f"wrote {head / 'README.md'}" in err


def test_the_command_line_says_what_is_wrong(tmp_path, capsys):
    def line(*argv):
        assert main(["train", "medusa", "--target", "tiny", *argv]) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    output = ("--output", str(tmp_path / "head"))
    assert "no such file" in line("--data", str(tmp_path / "none.jsonl"), *output)
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": "a"}])
    assert "data.jsonl:1: a prompt without an answer; --regenerate" in line("--data", str(data), *output)
    assert "--epochs must be an integer of at least 1" in line("--data", str(data), *output, "--epochs", "0")
    assert "--format gguf: medusa heads are written as original, vllm" in line(
        "--data", str(data), *output, "--format", "gguf"
    )
    for argv in (("train", "--help"), ("train", "hydra", "--help"), ("eval", "--help")):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert "examples" in text
        if "hydra" in argv:
            assert "--loss {kl,ce,lk,dpace}" in text and "--objective" not in text
            assert "--tokens-per-batch N" in text


# ---- a head to begin with -------------------------------------------------------------------------------------------

BEGUN = {
    "medusa": {"own_lm_head": False},
    "mlp_speculator": {"tie_weights": True, "inner_dim": 24},
    "hydra": {},
    "eagle": {},
    "eagle3": {"draft_vocab_size": 25},
    "mtp": {},
    "dflash": {"num_layers": 2, "num_anchors": 4, "variant": "domino", "head_rank": 7},
    "draft_model": {"num_layers": 1},
}


@pytest.mark.parametrize(
    "method", [m if m in ("eagle3", "mtp") else pytest.param(m, marks=pytest.mark.slow) for m in BEGUN]
)
def test_a_run_can_begin_with_a_head_that_is_there(tmp_path, data, method):
    """The weights are those of the file (training too slowly to move them shows it), in every method."""
    options = {"tokens_per_batch": 256, **BEGUN[method]}
    train(method, tmp_path / "first", data, max_steps=3, learning_rate=1e-2, **options)
    begun = {"init_from": str(tmp_path / "first"), "seed": 7, "held_out": 0.05}
    if method == "eagle3":  # its draft vocabulary is that of the same texts
        begun["seed"] = 0
    train(method, tmp_path / "second", data, max_steps=1, learning_rate=1e-12, **{**options, **begun})
    train(method, tmp_path / "other", data, max_steps=1, learning_rate=1e-12, **{**options, "seed": begun["seed"]})
    first, second, other = (
        {k: v for path in sorted((tmp_path / name).glob("*.safetensors")) for k, v in load_file(path).items()}
        for name in ("first", "second", "other")
    )
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=1e-6, rtol=1e-6)
    assert any(not torch.allclose(other[name], tensor, atol=1e-4) for name, tensor in first.items())


def test_a_head_that_does_not_fit_is_refused(tmp_path, data):
    train("medusa", tmp_path / "first", data, max_steps=1)
    begun = {"init_from": str(tmp_path / "first"), "max_steps": 1}
    with pytest.raises(TrainingError, match=r"--init-from .*lacks 4\.0\.linear.*Give the options it was made with"):
        train("medusa", tmp_path / "second", data, num_heads=5, own_lm_head=True, **begun)
    with pytest.raises(TrainingError, match=r"--init-from .*not a head of this shape and layout"):
        train("mlp_speculator", tmp_path / "third", data, **begun)
    with pytest.raises(TrainingError, match=r"--init-from .*nowhere"):
        train("medusa", tmp_path / "fourth", data, init_from=str(tmp_path / "nowhere"), max_steps=1)


@pytest.mark.parametrize(("samples", "length"), [(3, 30), (40, 150), (900, 250)])
def test_few_steps_are_announced_with_values_that_help(samples, length):
    """The values that are named make about as many steps as are wanted."""
    steps = BatchOrder([length] * samples, TrainingOptions().tokens_per_batch, 1, 0).num_steps(TrainingOptions().epochs)
    text = pipeline._advice(steps, samples, samples * length, TrainingOptions())
    size, epochs = (int(text.split(name)[1].split()[0]) for name in ("--tokens-per-batch ", "--epochs "))
    assert steps < pipeline.FEW_STEPS and text.startswith(f"{steps} steps teach a head little")
    assert (
        0.8 * pipeline.FEW_STEPS
        < BatchOrder([length] * samples, size, 1, 0).num_steps(epochs)
        < 1.5 * pipeline.FEW_STEPS
    )
