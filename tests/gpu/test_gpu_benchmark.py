"""benchmarks/gpu.py: its table, budgets and floors; runs in processes of their own, in the interpreter where there is no GPU."""

import contextlib
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from paths import ROOT
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "recipes" / "tiny"))

from gpu_sections import context as context_module
from gpu_sections import floors
from gpu_sections.budget import Budget, OutOfTime, share
from gpu_sections.context import Context
from gpu_sections.report import Report, Row, SectionResult, at_least, at_most, condensed, number, summary, table

BENCHMARKS = ROOT / "benchmarks"


def run(*command, **environment):
    """A process without what this one has set for itself."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "TRITON_", "HF_SPECDEC_"))}
    return subprocess.run(
        [sys.executable, *map(str, command)], env={**kept, **environment}, capture_output=True, text=True, timeout=900
    )


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_aims():
    assert at_least("s", "n", 0.8, 0.8).ok and not at_least("s", "n", 0.79, 0.8).ok
    assert at_most("s", "n", 0.0, 0).ok and not at_most("s", "n", 1, 0).ok
    assert at_most("s", "n", float("nan"), 1.0).ok is False and at_least("s", "n", float("nan"), 1.0).ok is False
    assert at_least("s", "n", 0.1, 0.8, judged=False).ok is None


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (0, "0"), (0.85123, "0.8512"), (3.4e-7, "3.40e-07"), (123456.0, "1.23e+05")]
)
def test_numbers(value, shown):
    assert number(value) == shown


def test_table_is_aligned():
    rows = [Row("a", "long name", 1.5, "ms", floor=1.0, aim="≤ 2", ok=True), Row("section", "b", ok=False, note="why")]
    lines = table(rows).splitlines()
    assert lines[0].split() == ["section", "what", "value", "unit", "floor", "aim", "ok", "note"]
    assert lines[1].index("ms") == lines[0].index("unit") and lines[2].index("why") == lines[0].index("note")
    assert "yes" in lines[1] and "NO" in lines[2]


def test_alike_rows_are_shown_as_one_unless_one_is_wrong():
    errors = (0.001, 0.004, 0.002)
    rows = [at_most("c", f"attention: {i}", error, 0.01, "rel. error") for i, error in enumerate(errors)]
    (one,) = condensed(rows)
    assert one.name == "attention (3 variants)" and one.value == 0.004 and one.note == "worst: 1" and one.ok
    wrong = at_most("c", "attention: 3", 0.5, 0.01, "rel. error")
    assert condensed([*rows, wrong])[1] == wrong
    kept = [at_least("c", f"speed: {i}", 0.9, 0.8) for i in range(2)] + [Row("c", f"plain: {i}", 1.0) for i in range(2)]
    assert condensed(kept) == kept


def test_summary_names_what_missed():
    report = Report("command", {}, [SectionResult("s", "failed", 1.0, "trace")])
    report.rows = [at_least("s", "slow", 0.5, 0.8), at_least("s", "fast", 0.9, 0.8), Row("s", "plain", 1.0)]
    text = summary(report)
    assert text.startswith("1 of 2 aims met") and "s: slow: 0.5" in text and "fast" not in text and "s: failed" in text
    assert report.failed == report.sections


# ---- budgets --------------------------------------------------------------------------------------------------------


def test_shares_of_time():
    weights = {"a": 1.0, "b": 2.0, "c": 1.0}
    assert share("a", ["b", "c"], weights, 100) == 25
    assert share("b", ["c"], weights, 90) == 60  # a was quick: b and c gain
    assert share("c", [], weights, 30) == 30


def test_a_budget_ends():
    budget = Budget(0.05)
    budget.check()
    time.sleep(0.06)
    assert budget.left < 0 < budget.spent
    with pytest.raises(OutOfTime):
        budget.check()


def test_the_alarm_interrupts_what_never_asks():
    def stubborn():
        began = time.monotonic()
        while time.monotonic() - began < 20:
            with contextlib.suppress(Exception):
                time.sleep(0.01)

    with pytest.raises(OutOfTime), Budget(0.05).alarm(grace=0.05):
        stubborn()
    with Budget(0.05).alarm(grace=0.1):
        pass
    time.sleep(0.2)  # a late alarm would end this process


# ---- floors ---------------------------------------------------------------------------------------------------------


def test_floors():
    assert floors.attention_bytes(1, 1, 32768, 32, 8, 128, 2) == 2 * (32768 * 8 * 256 + 32 * 256)
    assert floors.logits_bytes(512, 128256, 2) == 512 * 128256 * 2
    assert floors.moved_bytes(10, 32, 8, 128, 2) == 2 * 10 * 32 * 2 * 8 * 128 * 2
    assert floors.milliseconds_of(4e9, 4e12) == 1.0


@pytest.mark.parametrize("flush", [True, False])
def test_kernels_are_timed_alone_after_a_read_of_what_they_do_not_need(monkeypatch, flush):
    """With a stand-in for the GPU: it writes down what it is told, and a run takes 2 ms, but now and then 50."""
    told, runs = [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            told.append("event")
            self.runs = len(runs)

        def elapsed_time(self, end):
            assert end.runs == self.runs + 1
            return 50.0 if end.runs % 5 == 0 else 2.0

    def run():
        told.append("run")
        runs.append(1)

    def read(tensor, dim, out):
        told.append("read")
        assert tensor.nbytes == 4096

    monkeypatch.setattr(Context, "on_gpu", property(lambda self: True))
    monkeypatch.setattr(context_module, "captured", lambda run: run)
    monkeypatch.setattr(context_module, "FLUSHED", 4096)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))
    monkeypatch.setattr(torch, "sum", read)
    took = Context(torch.device("cpu"), False, Budget(600)).milliseconds(run, flush=flush)
    assert took == 2.0 and len(runs) == 10 + 12 + 50  # an estimate, 25 ms to warm up, 100 ms
    one = ["read"] * flush + ["event", "run", "event"]
    assert told == [*one * 10, "wait", *one * 12, "wait", *one * 50, "wait"]


@pytest.mark.parametrize("tied", [True, False])
def test_weights_that_a_step_reads(tied):
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied,
    )  # fmt: skip
    layer = 16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16
    assert floors.step_weight_bytes(LlamaForCausalLM(config)) == 4 * (layer + 16 + 50 * 16)
    assert floors.step_cache_bytes(config, 3, 100, 2) == 3 * 100 * 2 * 1 * 8 * 2


def test_weights_of_active_experts():
    """Of every layer's 4 experts a token reads 2."""
    from gpu_sections import experts

    model = experts.mixture(Context(torch.device("cpu"), True, Budget(1)))
    own = sum(p.numel() for name, p in model.model.layers.named_parameters() if ".experts." not in name)
    tied, norm = model.lm_head.weight.numel(), 64
    assert experts.active_bytes(model) == 4 * (own + tied + norm + 2 * 2 * 3 * 32 * 64)


# ---- calls ----------------------------------------------------------------------------------------------------------


class Clock:
    """Stands in for a Context: runs take the given seconds."""

    toy = False

    def __init__(self, *seconds):
        self.left, self.warnings = iter(seconds), []

    def seconds(self, call):
        call()
        return next(self.left)


class Target:
    """Takes a step for every two tokens."""

    def generate(self, max_new_tokens, **_):
        rows = [{"num_steps": -(-max_new_tokens // 2)}, {"num_steps": 1}]
        return SimpleNamespace(speculation={"rows": rows, "mean_accepted_length": 2.0})


@pytest.mark.parametrize(
    ("seconds", "speed", "step", "setup"),
    [
        ((3.0, 2.0, 6.0, 5.0), 20.0, 200.0, 1.0),  # 30 tokens, 15 steps, 2 rows, in 5 - 2 seconds
        ((3.0, 2.0, 1.0, 1.5), 80.0, 50.0, 0.0),  # nothing to subtract: 40 tokens, 20 steps in 1 second
    ],
)
def test_times_of_steps(seconds, speed, step, setup):
    from gpu_sections.generating import Way, measure

    models, batch = SimpleNamespace(target=Target()), {"input_ids": torch.zeros(2, 3)}
    found = measure(Clock(*seconds), models, batch, Way("ours", {"speculative_config": {}}), (10, 40))
    assert (found.tokens_per_second, found.step_ms, found.setup_seconds) == (speed, step, setup)
    assert bool(found.note) == (setup == 0.0)


def test_times_of_whole_calls():
    from gpu_sections.generating import Way, measure

    models, batch = SimpleNamespace(target=Target()), {"input_ids": torch.zeros(2, 3)}
    found = measure(Clock(4.0, 5.0), models, batch, Way("theirs", whole_calls=True), (10, 40))
    assert found.tokens_per_second == 20.0 and found.step_ms != found.step_ms


# ---- whole runs -----------------------------------------------------------------------------------------------------

_SECTIONS_OF_A_TEST = """
import sys, types, time
sys.path.insert(0, {benchmarks!r})
import gpu
from gpu_sections.report import Row, at_most

def fine(context):
    yield at_most("fine", "right", 0, 0)

def fails(context):
    yield Row("fails", "before", 1.0)
    raise RuntimeError("broken on purpose")

def slow(context):
    for i in range(1000):
        yield Row("slow", str(i), float(i))
        time.sleep(0.05)

for section in (fails, slow, fine):
    module = types.ModuleType("gpu_sections." + section.__name__)
    module.rows = section
    sys.modules[module.__name__] = module
gpu.MODULES = {{"correctness": "fails", "decoding": "slow", "equality": "fine"}}
sys.exit(gpu.main(["--sections", "correctness", "decoding", "equality", "--minutes", "0.05", "--json", {path!r}]))
"""


def test_a_section_that_fails_or_overruns_does_not_take_the_others_along(tmp_path):
    path = tmp_path / "out.json"
    done = run("-c", _SECTIONS_OF_A_TEST.format(benchmarks=str(BENCHMARKS), path=str(path)))
    report = json.loads(path.read_text(encoding="utf-8"))
    assert [s["status"] for s in report["sections"]] == ["failed", "out of time", "done"], done.stderr[-2000:]
    assert "broken on purpose" in report["sections"][0]["error"] and "broken on purpose" in done.stdout
    names = [row["name"] for row in report["rows"]]
    assert names[:3] == ["before", "failed", "0"] and names[-2:] == ["out of time", "right"]
    assert done.returncode == 1


@pytest.mark.slow
def test_one_section_runs(tmp_path):
    path = tmp_path / "out.json"
    done = run(BENCHMARKS / "gpu.py", "--toy", "--sections", "kernels", "--seed", "1", "--json", path)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["sections"][0]["status"] == "done" and report["environment"]["seed"] == 1
    for what in ("bandwidth", "attention, decode", "verify tree of 8", "verification, rejection", "cache moves"):
        assert any(what in row["name"] and row["value"] > 0 for row in report["rows"]), what
    if not torch.cuda.is_available():
        assert "interpreter: correctness only, times mean nothing" in done.stdout
        assert all(row["ok"] is None for row in report["rows"])  # no time is judged


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_everything_runs(tmp_path):
    path = tmp_path / "out.json"
    done = run(BENCHMARKS / "gpu.py", "--toy", "--minutes", "14", "--json", path)
    report = json.loads(path.read_text(encoding="utf-8"))
    statuses = {section["name"]: section["status"] for section in report["sections"]}
    assert statuses == dict.fromkeys(("correctness", "kernels", "decoding", "equality", "training"), "done"), statuses
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert {row["section"] for row in report["rows"] if row["ok"]} >= {"correctness", "equality"}


def test_bad_minutes_are_one_clear_error():
    done = run(BENCHMARKS / "gpu.py", "--minutes", "0")
    assert done.returncode == 2 and "--minutes must be above 0" in done.stderr
