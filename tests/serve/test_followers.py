"""LLM(tensor_parallel_size=) and `--tensor-parallel-size`: processes for the other ranks, what they are told, and how they end."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers_server import children
from paths import ROOT

from hf_specdec.serve.ranks import ENVIRONMENT as ENVIRONMENT_OF_RANKS

pytestmark = pytest.mark.ci
CONFIG = {"method": "eagle3", "model": "tiny-eagle3"}
SIZES = {"max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20, "max_model_len": 256}
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}  # fmt: skip


def test_an_llm_starts_its_ranks_ends_them_and_the_next_one_knows_what_it_has_learnt(tmp_path):
    """Two engines of two ranks after one another in a process: rank 0 knows the model already, the new rank 1 does not."""
    config = {"method": "token_recycling", "recycle_prompt": None, "lookup_cache": str(tmp_path)}
    script = f"""
import json
from hf_specdec import LLM, SamplingParams
answers, refused, left, greedy = [], [], [], SamplingParams(temperature=0, max_tokens=24)
for ranks in (2, 2, 1):
    llm = LLM("tiny", dtype="float32", speculative_config={config!r}, tensor_parallel_size=ranks, **{SIZES!r})
    try:
        llm.generate([[1, 99999]], use_tqdm=False)
    except ValueError as error:
        refused.append(str(error))
    for params in (greedy.copy(private=True), greedy.copy(space="a"), greedy.copy(space="a"), greedy.copy(space=str(len(answers)))):
        (answer,) = llm.generate(["Once upon a time, there was"], params, use_tqdm=False)
        answers.append((answer.outputs[0].token_ids, answer.speculation["mean_accepted_length"]))
    others = llm.processes
    llm.close()
    left.append(others and len(others.processes))
for model, more in ((llm.model, {{}}), ("tiny", {{"max_model_len": 10**9}})):
    try:
        LLM(model, tensor_parallel_size=2, **more)
    except ValueError as error:
        refused.append(str(error))
print(json.dumps((answers, refused, left)))
"""
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    answers, (*unknown, loaded, long), left = json.loads(done.stdout.splitlines()[-1])
    assert all(tokens == answers[0][0] for tokens, _ in answers)
    private, first, second, other = (length for _, length in answers[:4])
    assert second > first == private == other
    for later in (answers[4:8], answers[8:]):
        assert later[0][1] == later[3][1] == private and later[1][1] > first
    assert left == [0, 0, None]
    assert len(unknown) == 3 and all("holds the id 99999" in message for message in unknown)
    assert "pass a name or a folder" in loaded and "has 1024 positions" in long


def test_a_rank_ends_with_the_process_that_started_it():
    """Also while it waits for a store that never answers; it waited for ten minutes."""
    environment = {**ENVIRONMENT, "LOCAL_RANK": "1", ENVIRONMENT_OF_RANKS: "1 1 2"}  # nothing listens on port 1
    code = "from hf_specdec.serve.llm import LLM; from hf_specdec.serve.ranks import main; main(LLM)"
    start = [sys.executable, "-c", code]
    process = subprocess.Popen(start, env=environment, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        process.stdin.write(pickle.dumps({"model": "tiny"}))
        process.stdin.flush()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(8)
        process.stdin.close()
        assert process.wait(30) == 1
    finally:
        process.kill()
        process.wait()


# ---- slow -----------------------------------------------------------------------------------------------------------


def command(*words, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "hf_specdec", *words], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more
    )  # fmt: skip


@pytest.mark.slow
def test_generate_on_two_ranks():
    words = ["generate", "tiny", "--dtype", "float32", "--prompt", "Tell me a story.", "--max-new-tokens", "20"]
    words += ["--speculative-config", json.dumps(CONFIG)]
    one, two = (command(*words, *more) for more in ([], ["--tensor-parallel-size", "2"]))
    texts = [each.communicate(timeout=180)[0] for each in (one, two)]
    text = next(line for line in texts[0].splitlines() if line and "tokens/s" not in line and "Loading" not in line)
    assert texts[1].count(text) == 1, texts


def post(port, body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def followers_of(process):
    """Process ids of the other ranks: the engine's process, a child of the server's, has started them."""
    (engine,) = children(process.pid, "engine_process")
    return children(engine, "serve.ranks ")


@pytest.fixture
def server(free_port=18431):
    words = ["serve", "tiny", "--dtype", "float32", "--tensor-parallel-size", "2", "--port", str(free_port)]
    for name, value in SIZES.items():
        words += ["--" + name.replace("_", "-"), str(value)]
    process = command(*words, "--speculative-config", json.dumps(CONFIG))
    assert process.stdout is not None
    for line in process.stdout:
        if re.search("Serving tiny", line):
            break
    yield process, free_port
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.wait(60)


@pytest.mark.slow
def test_a_server_on_two_ranks(server):
    process, port = server
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    texts = {post(port, body)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 1
    (follower,) = followers_of(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    ends = time.monotonic() + 20
    while Path(f"/proc/{follower}").exists() and time.monotonic() < ends:
        time.sleep(0.1)
    assert not Path(f"/proc/{follower}").exists()


@pytest.mark.slow
def test_a_server_that_has_lost_a_rank_says_so(server):
    process, port = server
    (follower,) = followers_of(process)
    os.kill(follower, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(urllib.error.HTTPError) as error:
        post(port, {"model": "tiny", "prompt": "Once", "max_tokens": 20})
    assert error.value.code >= 500 and time.monotonic() - began < 30
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10)
    assert error.value.code == 503
