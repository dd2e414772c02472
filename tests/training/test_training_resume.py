"""A run that is killed and started again is the run that was not: same losses, same final weights, on the CPU bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers_training import qa_rows, train, write_rows
from paths import BUILDERS, ROOT

from hf_specdec.training import TrainingError
from hf_specdec.training.loop import Run
from hf_specdec.training.state import load_state, read_log, save_state

OPTIONS = {
    "max_steps": 24, "gradient_accumulation": 2, "save_every": 5, "log_every": 2, "eval_every": 4, "held_out": 0.2, "seed": 3,
}  # fmt: skip

CHILD = """
import os, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from hf_specdec.training import state
from hf_specdec.training.loop import Run
from helpers_training import train
from test_training_resume import OPTIONS

mode, folder, data = sys.argv[1:]
if mode == "any time":
    step = Run._step
    def slow(self, batches):
        time.sleep(0.05)
        step(self, batches)
    Run._step = slow
else:  # with the second checkpoint written, but not yet in its place
    replace, seen = os.replace, []
    def killing(source, destination):
        seen.append(Path(destination).name)
        if seen.count("state.pt") == 2 and seen[-1] == "state.pt":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, destination)
    state.os.replace = killing
train("hydra", Path(folder), Path(data), **OPTIONS)
"""


def outcome(folder):
    """(final state, log without clock times)."""
    log = [{k: v for k, v in entry.items() if k != "seconds"} for entry in read_log(folder / "training" / "log.jsonl")]
    return load_state(folder / "training" / "state.pt"), log


def assert_same(one, other):
    (state_a, log_a), (state_b, log_b) = outcome(one), outcome(other)
    assert log_a == log_b
    assert state_a["step"] == state_b["step"] == OPTIONS["max_steps"]
    assert state_a["head"].keys() == state_b["head"].keys()
    for name, weight in state_a["head"].items():
        assert torch.equal(weight, state_b["head"][name]), name
    for kind in ("exp_avg", "exp_avg_sq"):
        for index, moments in state_a["optimizer"]["state"].items():
            assert torch.equal(moments[kind], state_b["optimizer"]["state"][index][kind])
    weights = "hydra_lm_head.safetensors"
    assert (one / weights).read_bytes() == (other / weights).read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(folder of a whole run, its data)."""
    folder = tmp_path_factory.mktemp("whole")
    data = write_rows(folder / "data.jsonl", qa_rows(40))
    train("hydra", folder / "head", data, **OPTIONS)
    return folder / "head", data


@pytest.mark.parametrize("mode", [pytest.param("any time", marks=pytest.mark.slow), "in a checkpoint"])
def test_killed_and_resumed_is_the_same_run(tmp_path, uninterrupted, mode):
    (whole, data), killed = uninterrupted, tmp_path / "killed"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(BUILDERS), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ),
    }
    command = [sys.executable, "-c", CHILD, mode, str(killed), str(data)]
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    if mode == "any time":
        enough = random.Random(time.time_ns()).randrange(4, 22)
        log, deadline = killed / "training" / "log.jsonl", time.monotonic() + 100
        while child.poll() is None and not any(entry["step"] >= enough for entry in read_log(log)):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)
    _, err = child.communicate(timeout=100)
    assert child.returncode == -signal.SIGKILL, err
    state = load_state(killed / "training" / "state.pt")
    assert state is None or state["step"] < OPTIONS["max_steps"]
    if mode == "in a checkpoint":
        assert state["step"] == 5
        assert list((killed / "training").glob("*.partial"))
    train("hydra", killed, data, **OPTIONS)
    assert_same(whole, killed)
    assert not list((killed / "training").glob("*.partial"))


def test_stopped_several_times(tmp_path, uninterrupted, monkeypatch):
    """Also between two log lines, whose means span the stop."""
    whole, data = uninterrupted
    step = Run._step
    for stop in (6, 7, 13, 21):

        def stopping(self, batches, stop=stop):
            if self.step == stop:
                raise KeyboardInterrupt
            step(self, batches)

        monkeypatch.setattr(Run, "_step", stopping)
        with pytest.raises(KeyboardInterrupt):
            train("hydra", tmp_path / "parts", data, **OPTIONS)
    monkeypatch.setattr(Run, "_step", step)
    train("hydra", tmp_path / "parts", data, **OPTIONS)
    assert_same(whole, tmp_path / "parts")


def test_a_finished_run_is_only_exported_again(tmp_path):
    data = write_rows(tmp_path / "data.jsonl", qa_rows(20))
    train("medusa", tmp_path / "head", data)
    before = (tmp_path / "head" / "training" / "log.jsonl").read_text()
    (tmp_path / "head" / "medusa_lm_head.safetensors").unlink()
    trained = train("medusa", tmp_path / "head", data, form="vllm")
    assert trained.steps == 4
    assert trained.estimate is not None
    assert (tmp_path / "head" / "training" / "log.jsonl").read_text() == before
    assert (tmp_path / "head" / "model.safetensors").is_file()


def test_seeds(tmp_path):
    data = write_rows(tmp_path / "data.jsonl", qa_rows(30))
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train("mlp_speculator", tmp_path / name, data, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_a_folder_with_another_run_is_refused(tmp_path):
    data = write_rows(tmp_path / "data.jsonl", qa_rows(20))
    train("medusa", tmp_path / "head", data)
    with pytest.raises(TrainingError, match=r"other settings: learning_rate \(0.001 then, 0.01 now\)"):
        train("medusa", tmp_path / "head", data, learning_rate=0.01)
    with pytest.raises(TrainingError, match="data"):
        train("medusa", tmp_path / "head", write_rows(tmp_path / "other.jsonl", qa_rows(21)))
    with pytest.raises(TrainingError, match="method"):
        train("hydra", tmp_path / "head", data)
    train("medusa", tmp_path / "head", data, eval_every=1, log_every=2, save_every=3)  # these do not matter
    path = tmp_path / "head" / "training" / "state.pt"
    state = load_state(path)
    settings = json.loads(state["settings"])
    assert settings.pop("schedule") == "cosine"
    save_state(
        path, {**state, "settings": json.dumps(settings)}
    )  # of a version without this option, which had its default
    train("medusa", tmp_path / "head", data)
    with pytest.raises(TrainingError, match="schedule"):
        train("medusa", tmp_path / "head", data, schedule="linear")


def test_a_damaged_checkpoint_is_named(tmp_path):
    data = write_rows(tmp_path / "data.jsonl", qa_rows(20))
    train("medusa", tmp_path / "head", data)
    path = tmp_path / "head" / "training" / "state.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(TrainingError, match=r"state\.pt cannot be read"):
        train("medusa", tmp_path / "head", data)


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def test_nan_stops_the_run_and_spoils_no_checkpoint(tmp_path, monkeypatch):
    from hf_specdec.training.medusa import MedusaTrainer

    data = write_rows(tmp_path / "data.jsonl", qa_rows(20))
    loss, seen = MedusaTrainer.loss, []

    def poisoned(self, batch):
        out = loss(self, batch)
        seen.append(1)
        if len(seen) == 4:
            out.loss = out.loss * float("nan")
        return out

    monkeypatch.setattr(MedusaTrainer, "loss", poisoned)
    with pytest.raises(TrainingError, match=r"loss of step 3 is nan.*Lower --learning-rate \(now 0.001\)"):
        train("medusa", tmp_path / "head", data, max_steps=8, save_every=1)
    state = load_state(tmp_path / "head" / "training" / "state.pt")
    assert state["step"] == 3
    assert all(torch.isfinite(weight).all() for weight in state["head"].values())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_clear_error_and_the_old_checkpoint_stays(tmp_path):
    path = tmp_path / "state.pt"
    save_state(path, {"step": 1, "weights": torch.zeros(10)})
    os.symlink("/dev/full", tmp_path / f"state.pt.{os.getpid()}.partial")
    with pytest.raises(
        TrainingError, match=r"state\.pt failed: No space left on device .* Make room and start the same command"
    ):
        save_state(path, {"step": 2, "weights": torch.zeros(10**6)})
    assert load_state(path)["step"] == 1


def test_too_little_room_is_said_before_the_work(tmp_path, monkeypatch):
    from hf_specdec.training import state

    data = write_rows(tmp_path / "data.jsonl", qa_rows(20))
    monkeypatch.setattr(state.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100_000}))
    with pytest.raises(TrainingError, match=r"take 0\.\d MiB; .* has 0\.1 MiB free"):
        train("medusa", tmp_path / "head", data)
    assert not (tmp_path / "head" / "training" / "log.jsonl").exists()


def test_log_lines_are_json_and_cut_lines_are_dropped(tmp_path):
    data = write_rows(tmp_path / "data.jsonl", qa_rows(20))
    train("medusa", tmp_path / "head", data)
    path = tmp_path / "head" / "training" / "log.jsonl"
    lines = path.read_text().splitlines()
    first = json.loads(lines[0])
    assert {
        "step",
        "loss",
        "accuracy_1",
        "accuracy_4",
        "learning_rate",
        "grad_norm",
        "tokens",
        "seconds",
    } <= first.keys()
    assert {"step", "tau", "acceptance", "anchors"} <= json.loads(lines[-1]).keys()
    path.write_text("\n".join(lines)[:-7])
    assert read_log(path) == [json.loads(line) for line in lines[:-1]]
    assert (path.parent / "curves.png").read_bytes()[:4] == b"\x89PNG"
