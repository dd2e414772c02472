"""Servers under the same load: ours, `transformers serve --continuous-batching` and vLLM's CPU build.

    scripts/peers_venv.sh ~/peers vllm
    python benchmarks/serve.py --vllm-python ~/peers/vllm/bin/python --json benchmarks/results/serve-cpu-bf16-85M.json
    python benchmarks/serve.py --servers plain n-gram transformers --clients 1 8 --rounds 1
    python benchmarks/serve.py --device cuda --size 8b --servers plain n-gram EAGLE-3 transformers --clients 1 16 64 256
    python benchmarks/serve.py --servers plain n-gram --clients 1 --adapters 0 1 8
    python benchmarks/serve.py --servers plain n-gram --images

One model for all: the bundled one at the cost of a larger one (loads.py), bfloat16, one thread, greedy, answers of equal length.
Prompts have a shared beginning: GSM8K-like questions for 1 to 64 clients that ask one request after the other, code edits for 8
clients, and questions that arrive at random times (Poisson). Servers take turns within each round, and those whose turn it is not are
stopped; on a GPU, whose memory they would share, one runs after the other. Every request's text is its own but for the beginning, so
that prefix caches help with that and nothing else. `--adapters`: requests of 8 clients name so many LoRA adapters of rank 16 in turn.
`--images`: 8 clients, of whom none, half or all send an image of 196 tokens to a random model of the same size with a vision tower.

Per server and load: output tokens per second of wall time and per second of the server's CPU time (all its processes), the median time
to the first token (TTFT), the median time per further token (TPOT), and goodput: requests per second with TTFT and TPOT within limits.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
OURS = {
    "plain": None,
    "n-gram": {**NGRAM, "num_speculative_tokens": "auto"},
    "draft model": {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": "auto"},
    "EAGLE-3": {
        "method": "eagle3",
        "model": "eagle3",
        "num_speculative_tokens": "auto",
    },  # the head in the model's folder
}
SERVERS = [*OURS, "transformers", "vLLM", "vLLM n-gram"]
IMAGE_SIZE = 112  # pixels: 14 x 14 patches
BEGINNING = (
    "You are a careful assistant. Read the task, think step by step, and then answer in a few short sentences. "
    "Do not repeat the task. If something is missing, say what it is, and go on with what you know.\n\n"
)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="100m", help="see loads.py (default: %(default)s, of 85 M parameters)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--servers", nargs="+", choices=SERVERS, default=[each for each in SERVERS if each != "EAGLE-3"]
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second that arrive at random times")
    parser.add_argument(
        "--goodput", type=float, nargs=2, default=[5.0, 0.25], metavar=("TTFT", "TPOT"), help="limits in seconds"
    )
    parser.add_argument(
        "--adapters", type=int, nargs="+", default=[], help="numbers of LoRA adapters; our servers only"
    )
    parser.add_argument("--images", action="store_true", help="only these loads; our servers only")
    parser.add_argument("--vllm-python", help="the interpreter of vLLM's environment; without it vLLM is left out")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


@dataclass
class Server:
    """A server in processes of its own."""

    name: str
    command: list[str]
    port: int
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.log = tempfile.NamedTemporaryFile("w+", prefix="server-", suffix=".log", delete=False)  # noqa: SIM115
        self.process = subprocess.Popen(
            self.command,
            env={**os.environ, **self.environment},
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, seconds: float = 300) -> None:
        """Until it answers.

        Raises:
            RuntimeError: it has ended, or is not up in time.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                if self.process.poll() is not None:
                    break
                time.sleep(0.5)
        raise RuntimeError(f"{self.name} is not up: {Path(self.log.name).read_text()[-3000:]}")

    def send(self, number: signal.Signals) -> None:
        """A signal for all its processes."""
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself, which `wait` reports
            os.killpg(self.process.pid, number)

    def cpu_seconds(self) -> float:
        """CPU time of all its processes so far."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[3]) == self.process.pid:  # its session
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End it."""
        self.send(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            self.process.wait()


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_server(name: str, model: str, options: argparse.Namespace) -> Server:
    """Start a server of the list."""
    port, vllm_python, most = free_port(), options.vllm_python, str(max(64, *options.clients))
    if name in OURS:
        code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from hf_specdec.cli import main; sys.exit(main())"
        command = [
            sys.executable,
            "-c",
            code,
            "serve",
            model,
            "--port",
            str(port),
            "--max-model-len",
            "512",
            "--max-num-seqs",
            most,
            "--device",
            options.device,
        ]
        if most_adapters := max(options.adapters, default=0):
            command += ["--lora-modules", *(f"adapter{i}={Path(model, f'adapter{i}')}" for i in range(most_adapters))]
        config: dict[str, Any] | None = OURS[name]
        if name == "EAGLE-3":
            config = {**OURS[name], "model": str(Path(model, "eagle3"))}
        return Server(name, command if config is None else [*command, "--speculative-config", json.dumps(config)], port)
    if name == "transformers":
        command = [
            str(Path(sys.executable).with_name("transformers")),
            "serve",
            model,
            "--continuous-batching",
            "--port",
            str(port),
        ]
        # 512 pages of 64 tokens hold what 64 texts of this benchmark take; on a CPU it finds no bound of its own.
        pages = ["--cb-block-size", "64", "--cb-num-blocks", "512", "--cb-max-batch-tokens", "2048"]
        pages = pages if options.device == "cpu" else []
        command += [*pages, "--device", options.device, "--dtype", "bfloat16", "--log-level", "error"]
        return Server(name, command, port)
    assert vllm_python is not None
    command = [
        vllm_python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--port",
        str(port),
        "--dtype",
        "bfloat16",
    ]
    command += ["--max-model-len", "512", "--max-num-seqs", most, "--disable-log-stats"]
    if name == "vLLM n-gram":
        command += ["--speculative-config", json.dumps(NGRAM)]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": "",
    }  # fmt: skip
    return Server(name, command, port, environment)


def loads(options: argparse.Namespace, round_: int) -> dict[str, dict[str, Any]]:
    """Load → what streams.py is to do. Every round has other texts; all servers of a round have the same."""
    from loads import prompts

    rng = random.Random(round_)
    questions, edits = prompts("math"), prompts("edit")

    def texts(kind: str, count: int, own: list[str]) -> list[str]:
        return [f"{BEGINNING}{kind} {rng.randint(1000, 9999)}: {rng.choice(own)}\nAnswer:" for _ in range(count)]

    found: dict[str, dict[str, Any]] = {}
    if options.images:
        for share in (0, 1, 2):
            bodies = [conversation(rng, with_image=i % 2 < share) for i in range(16)]
            found[f"8 clients, {('no', '8 of 16 with', '16')[share]} images"] = {"clients": 8, "bodies": bodies}
        return found
    for count in options.adapters:
        models = [f"adapter{i % count}" for i in range(16)] if count else [None] * 16
        found[f"8 clients, {count} adapters"] = {
            "clients": 8,
            "texts": texts("Question", 16, questions),
            "models": models,
        }
    for clients in options.clients:
        found[f"{clients} clients" if clients > 1 else "1 client"] = {
            "clients": clients, "texts": texts("Question", max(clients, 4), questions)
        }  # fmt: skip
    found["8 clients, edits"] = {"clients": 8, "texts": texts("Change", 8, edits)}
    times, now = [], 0.0
    for _ in range(16):
        now += rng.expovariate(options.rate)
        times.append(now)
    found[f"Poisson, {options.rate:g}/s"] = {"arrivals": times, "texts": texts("Question", 16, questions)}
    return found


def conversation(rng: random.Random, with_image: bool) -> dict[str, Any]:
    """The body of a request of 32 letters, with an image or without."""
    from PIL import Image

    text: dict[str, Any] = {"type": "text", "text": "".join(rng.choices("abcdefgh", k=32))}
    raw = io.BytesIO()
    Image.frombytes("RGB", (IMAGE_SIZE, IMAGE_SIZE), rng.randbytes(3 * IMAGE_SIZE**2)).save(raw, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(raw.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}] * with_image + [text]
    return {
        "messages": [{"role": "user", "content": content}],
        "skip_special_tokens": False,
    }  # a random model writes these


def measure(server: Server, model: str, load: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """One load on one server."""
    body = {"max_tokens": options.new_tokens, "temperature": 0}
    # its answers end with usage, and go on after the end-of-sequence token by their config
    if server.name != "transformers":
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    wanted = {key: value for key, value in load.items() if key in ("clients", "arrivals")}
    bodies = load.get("bodies") or [{"prompt": text} for text in load["texts"]]
    names = load.get("models") or [None] * len(bodies)
    bodies = [{**body, **own, "model": name or model} for own, name in zip(bodies, names, strict=True)]
    path = "/v1/chat/completions" if "bodies" in load else "/v1/completions"
    wanted |= {"port": server.port, "path": path, "bodies": bodies}
    spent = server.cpu_seconds()
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "streams.py")],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
    )
    spent = server.cpu_seconds() - spent
    if done.returncode:
        raise RuntimeError(f"{server.name}: {done.stderr[-2000:]}")
    answers = json.loads(done.stdout)
    tokens = sum(answer["tokens"] for answer in answers)
    if tokens != options.new_tokens * len(answers):
        raise RuntimeError(f"{server.name} wrote {tokens} tokens instead of {len(answers)} × {options.new_tokens}.")
    seconds = max(answer["last"] for answer in answers) - min(answer["began"] for answer in answers)
    first = [answer["first"] - answer["began"] for answer in answers]
    each = [(answer["last"] - answer["first"]) / (options.new_tokens - 1) for answer in answers]
    most_first, most_each = options.goodput
    good = sum(a <= most_first and b <= most_each for a, b in zip(first, each, strict=True))
    return {
        "tokens_per_second": tokens / seconds, "tokens_per_cpu_second": tokens / spent, "ttft_ms": 1e3 * statistics.median(first),
        "tpot_ms": 1e3 * statistics.median(each), "goodput_per_second": good / seconds,
    }  # fmt: skip


def save_model(options: argparse.Namespace, folder: str) -> int:
    """Write the model for all servers, and its head; the model's number of parameters. No token ends a text."""
    import torch
    from loads import larger
    from transformers import AutoConfig

    import hf_specdec
    from hf_specdec.inflation import inflate_eagle3

    if options.images:
        return save_model_with_tower(options, folder)
    model, tokenizer = larger(options.size, "bfloat16", options.device)
    model.generation_config.eos_token_id = -1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if "EAGLE-3" in options.servers:
        source, head = AutoConfig.from_pretrained(hf_specdec.bundled("tiny")), hf_specdec.bundled("tiny-eagle3")
        inflate_eagle3(head, source, model.config, Path(folder, "eagle3"), torch.bfloat16, model.device)
    count = sum(parameter.numel() for parameter in model.parameters())
    for i in range(max(options.adapters, default=0)):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(i)
        projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        lora = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules=projections, init_lora_weights=False)
        adapted: Any = get_peft_model(model, lora)
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.data *= 0.01  # so that texts differ, and are texts
        adapted.save_pretrained(Path(folder, f"adapter{i}"))
        adapted.unload()
    if options.device == "cuda":
        del model
        torch.cuda.empty_cache()
    return count


def save_model_with_tower(options: argparse.Namespace, folder: str) -> int:
    """Write a random LLaVA whose text model has the size that is asked for, with its processor; its number of parameters."""
    sys.path.append(str(ROOT / "tests" / "builders"))
    import torch
    from loads import SIZES
    from multimodal import VOCAB, build_multimodal, build_processor  # pyright: ignore[reportMissingImports]

    size = SIZES[options.size]
    assert size is not None
    tower = {
        "model_type": "clip_vision_model", "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 4, "image_size": IMAGE_SIZE, "patch_size": 8,
    }  # fmt: skip
    text = {"model_type": "llama", "max_position_embeddings": 512, "vocab_size": VOCAB, **size}
    model = build_multimodal("llava", text_config=text, vision_config=tower).to(torch.bfloat16)
    model.generation_config.eos_token_id = -1
    processor: Any = build_processor("llava")
    processor.image_processor.size = processor.image_processor.crop_size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def show(load: str, results: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians over rounds, and of ratios to transformers within a round; printed."""
    found: dict[str, dict[str, float]] = {}
    for name, rounds in results.items():
        found[name] = {key: round(statistics.median(each[key] for each in rounds), 2) for key in rounds[0]}
        for key in ("tokens_per_second", "tokens_per_cpu_second"):
            base = results.get("transformers")
            if base is not None:
                ratios = [own[key] / other[key] for own, other in zip(rounds, base, strict=True)]
                found[name][f"{key}_ratio"] = round(statistics.median(ratios), 2)
        shown = "  ".join(f"{key} {value:g}" for key, value in found[name].items())
        print(f"{load:18} {name:14} {shown}", flush=True)
    return found


def main() -> None:
    """Measure and print."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end with it
    from decode import machine

    names = [name for name in options.servers if options.vllm_python or not name.startswith("vLLM")]
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    servers: list[Server] = []
    with tempfile.TemporaryDirectory() as folder:
        parameters = save_model(options, folder)

        def start(name: str) -> Server:
            servers.append(make_server(name, folder, options))
            servers[-1].wait()
            count = min(32, *options.clients) if options.device == "cuda" else 2  # a GPU's kernels are compiled
            warm: dict[str, Any] = {"texts": [f"{BEGINNING}{i}, two, three." for i in range(max(count, 2))]}
            if options.images:
                warm = {"bodies": [conversation(random.Random(i), with_image=True) for i in range(2)]}
            warm["clients"] = max(count, 2)
            measure(servers[-1], folder, warm, options)
            print(f"{name} is up", flush=True)
            return servers[-1]

        def run(server: Server, round_: int, load: str, what: dict[str, Any]) -> None:
            found = measure(server, folder, what, options)
            results.setdefault(load, {}).setdefault(server.name, []).append(found)
            print(round_, load, server.name, {key: round(value, 2) for key, value in found.items()}, flush=True)

        try:
            if options.device == "cuda":
                for name in names:
                    server = start(name)
                    for round_ in range(options.rounds):
                        for load, what in loads(options, round_).items():
                            run(server, round_, load, what)
                    server.stop()
            else:
                for name in names:
                    start(name).send(signal.SIGSTOP)
                for round_ in range(options.rounds):
                    for load, what in loads(options, round_).items():
                        for server in servers[round_ % len(servers) :] + servers[: round_ % len(servers)]:
                            server.send(signal.SIGCONT)
                            run(server, round_, load, what)
                            server.send(signal.SIGSTOP)
        finally:
            for server in servers:
                server.stop()
    report = {load: show(load, {name: own[name] for name in names if name in own}) for load, own in results.items()}
    if options.json:
        settings = {
            "parameters": parameters,
            "new_tokens": options.new_tokens,
            "rounds": options.rounds,
            "goodput": options.goodput,
        }
        options.json.write_text(
            json.dumps({"machine": machine(), **settings, "loads": report}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
