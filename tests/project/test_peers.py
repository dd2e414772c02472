"""Tools that people measure servers with, each in an environment of its own: they run against the server and say what was accepted.

scripts/peers_venv.sh FOLDER lm-eval guidellm aiperf vllm makes the environments; HF_SPECDEC_PEERS=FOLDER tells these tests of them.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from helpers_server import Process

import hf_specdec

pytest.importorskip("uvicorn")
pytestmark = pytest.mark.slow

PEERS = Path(os.environ.get("HF_SPECDEC_PEERS", "/nonexistent"))
MODEL = hf_specdec.bundled("tiny")
TEXTS = [
    "Once upon a time there was a little girl. Once upon a time",
    "Tom and Lily went to the park. Tom and Lily",
    "The dog was happy. The dog was",
    "One day, a big cat saw a small bird. The bird",
]


@pytest.fixture(scope="module")
def server():
    config = json.dumps({"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3})
    with Process.running("--speculative-config", config, "--max-model-len", "512", "--seed", "0") as made:
        yield made


@pytest.fixture
def texts(tmp_path):
    """The texts as a file of JSON lines, under the names that the tools look for."""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "prompt": text}) + "\n" for text in TEXTS * 3))
    return str(path)


def run(name, command, folder):
    """What a tool prints. `command`: a program of its environment and its arguments."""
    program = PEERS / name / "bin" / command[0]
    if not program.exists():
        pytest.skip(f"{name} is not there: scripts/peers_venv.sh FOLDER {name}, then HF_SPECDEC_PEERS=FOLDER")
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "HF_HUB_OFFLINE")}
    # aiperf takes a folder for a name of the Hub where the Hub is switched off.
    offline = {} if name == "aiperf" else {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment |= {"HF_HOME": str(folder), "OMP_NUM_THREADS": "1", "COLUMNS": "200", **offline}
    done = subprocess.run(
        [str(program), *map(str, command[1:])], cwd=folder, env=environment, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


# ---- lm-eval --------------------------------------------------------------------------------------------------------

CHOICES = [
    ("Once upon a time there was a little", [" girl", " spoon", " of"]), ("Tom and Lily went to the", [" park", " sky", " was"]),
    ("The dog was very", [" happy", " Tuesday", " the"]), ("The sun was shining and the birds were", [" singing", " reading", " a"]),
    ("Mom said it was time to go to", [" bed", " yellow", " said"]), ("The cat drank all the", [" milk", " houses", " quickly"]),
    ("Ben was sad because he lost his", [" toy", " weather", " and"]), ("They played with the ball in the", [" garden", " soup", " is"]),
]  # fmt: skip
TASKS = {
    "story_choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{begin}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "target_delimiter": "", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "story_perplexity": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{begin}}{{choices[0]}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "story_end": {
        "output_type": "generate_until", "doc_to_text": "{{begin}}", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": [".", "\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def scores(model, arguments, folder):
    """(metrics, answers) of lm-eval's tasks."""
    command = [
        "lm_eval",
        "--model",
        model,
        "--model_args",
        arguments,
        "--tasks",
        ",".join(TASKS),
        "--include_path",
        folder,
    ]
    run(
        "lm-eval",
        [*command, "--batch_size", "1", "--device", "cpu", "--output_path", folder / model, "--log_samples"],
        folder,
    )
    (results,) = (folder / model).rglob("results_*.json")
    answers = {}
    for path in (folder / model).rglob("samples_*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        task = next(name for name in TASKS if name in path.name)
        answers[task] = [row["filtered_resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]
    return json.loads(results.read_text())["results"], answers


def test_lm_eval_scores_are_those_of_the_model(server, tmp_path):
    """Log-likelihoods of choices and of whole texts, and what is generated: through the server as through transformers."""
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps({"begin": a, "choices": b, "answer": 0}) + "\n" for a, b in CHOICES))
    for name, task in TASKS.items():
        source = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps({**source, **task}))  # JSON is YAML
    own, own_answers = scores("hf", f"pretrained={MODEL},dtype=float32", tmp_path)
    address = f"model=tiny,base_url={server.url}/v1/completions,tokenizer_backend=huggingface,tokenizer={MODEL}"
    served, answers = scores(
        "local-completions", f"{address},num_concurrent=4,max_retries=1,tokenized_requests=True", tmp_path
    )
    for name in TASKS:
        for key, value in own[name].items():
            if isinstance(value, float):
                assert served[name][key] == pytest.approx(value, rel=1e-4), (name, key)
    assert own["story_choice"]["acc,none"] > 0.5 and own["story_perplexity"]["word_perplexity,none"] > 1
    assert answers["story_end"] == own_answers["story_end"] and all(answers["story_end"])
    for task in ("story_choice", "story_perplexity"):
        found, expected = ([float(str(one[0] if isinstance(one, list) else one)) for row in rows[task] for one in row]
                           for rows in (answers, own_answers))  # fmt: skip
        assert found == pytest.approx(expected, rel=1e-4)


# ---- load generators ------------------------------------------------------------------------------------------------


def test_guidellm(server, texts, tmp_path):
    """Its name for acceptance: output tokens per iteration of the stream."""
    report = tmp_path / "report.json"
    shown = run("guidellm", [
        "guidellm", "run", "--backend", f"kind=openai_http,target={server.url},model=tiny", "--profile", "kind=concurrent,streams=2",
        "--constraint", "kind=max_requests,count=8", "--tokenizer", f"kind=hf_auto,model={MODEL}", "--data", f"kind=json_file,path={texts}",
        "--output", "kind=console", "--output", f"kind=json,path={report}", "--disable-progress",
    ], tmp_path)  # fmt: skip
    assert "Per Stream Iter" in shown and "TPOT" in shown, shown
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests, metrics = benchmark["metrics"]["request_totals"], benchmark["metrics"]
    assert requests["successful"] == 8 and not requests["errored"], requests
    assert metrics["output_tokens_per_iteration"]["successful"]["mean"] > 1.1, metrics.keys()


def test_aiperf(server, texts, tmp_path):
    shown = run("aiperf", [
        "aiperf", "profile", "--model", "tiny", "--url", server.url, "--endpoint-type", "chat", "--streaming", "--tokenizer", MODEL,
        "--input-file", texts, "--custom-dataset-type", "single_turn", "--request-count", "12", "--concurrency", "3",
        "--output-tokens-mean", "16", "--extra-inputs", "temperature:0", "--extra-inputs", "ignore_eos:true",
        "--use-server-token-count", "--artifact-dir", tmp_path / "out", "--ui", "simple",
    ], tmp_path)  # fmt: skip
    assert "Acceptance Length" in shown and "Draft Acceptance Rate" in shown, shown
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 12 and report["output_sequence_length"]["avg"] == 16
    assert 1.1 < report["spec_decode_acceptance_length"]["avg"] <= 4, report.keys()


@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllm_bench_serve(server, texts, tmp_path, backend, path):
    """vLLM's CPU build has no command `vllm`: its own main function is called."""
    code = "from argparse import ArgumentParser as P; from vllm.benchmarks.serve import add_cli_args, main; p = P(); add_cli_args(p)"
    code += "; main(p.parse_args())"
    shown = run("vllm", [
        "python", "-c", code, "--backend", backend, "--base-url", server.url, "--endpoint", path, "--model", "tiny", "--tokenizer", MODEL,
        "--dataset-name", "custom", "--dataset-path", texts, "--custom-output-len", "16", "--skip-chat-template", "--num-prompts", "8",
        "--max-concurrency", "2", "--temperature", "0", "--ignore-eos", "--save-result", "--result-dir", tmp_path,
    ], tmp_path)  # fmt: skip
    assert "Acceptance rate" in shown and "Acceptance length" in shown and "Position 2" in shown, shown
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert result["completed"] == 8 and result["total_output_tokens"] == 8 * 16
    assert 1.1 < result["spec_decode_acceptance_length"] <= 4, result.keys()
