"""Make the bundled target's draft heads with one command: `python -m recipes.tiny.heads`. Stopped and run again, it goes on.

The target answers the prompts of its own training chats greedily, every head learns from these answers, and what is
measured on the held-out prompts that ship with the models goes into the cards, `log/heads.json` and the README.
"""

import argparse
import json
import random
import re
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.cli import main as hf_specdec_command
from hf_specdec.training import available_trainers
from hf_specdec.training.data import read_rows
from hf_specdec.training.pipeline import train_head
from hf_specdec.training.regenerate import Regeneration, regenerate
from hf_specdec.training.target import TargetModel

from .data import load_documents
from .run import HERE, SHARED

CHATS = ("gsm8k", "mbpp", "more_stories", "stories_chat", "stdlib_chat", "edit")
LONGEST_PROMPT = 1500  # characters
_WORD = r"\b(?:[A-Za-z]{4,}|[0-9]+)\b"
ANSWERS = Regeneration(
    max_new_tokens=200,
    batch_size=128,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
        "num_speculative_tokens_per_batch_size": [[1, 48, 3], [49, 128, 0]],
    },
)
DATA = (
    "the target's greedy answers to the prompts of its own training chats, by `recipes/tiny/heads.py`: GSM8K (MIT), MBPP "
    "(CC-BY-4.0), TinyStories (CDLA-Sharing-1.0) and stories by stories260K (MIT), Python's standard library (PSF)"
)
FURTHER_DATA = (
    "further runs, on the target's greedy answers to 4,096 of the first run's prompts and to 8,192 with words, names and numbers "
    "exchanged; the first run read " + DATA
)
CHAIN = {"num_speculative_tokens": 5}
MEASURED = {"eagle": CHAIN, "eagle3": CHAIN, "mtp": CHAIN}  # what a card's figures are for; others: their defaults

# Small batches: at this size a step's gradient is not what limits learning, the number of steps is.
SHARED_OPTIONS = {"bf16": True, "tokens_per_batch": 1024, "eval_every": 500, "save_every": 250, "log_every": 25}
RUNS = {
    "eagle3": {
        "epochs": 2,
        "learning_rate": 4e-3,
        "num_steps": 4,
        "feature_layers": "2,4,7",
        "fc_norm": True,
        "feature_weight": 10.0,
    },
    "eagle": {"epochs": 2, "learning_rate": 4e-3, "num_steps": 2, "own_embeddings": False},
    "mtp": {"epochs": 1, "learning_rate": 2e-3, "num_steps": 3},
    "mlp_speculator": {
        "max_steps": 2500,
        "learning_rate": 3e-3,
        "num_heads": 4,
        "inner_dim": 192,
        "tie_weights": True,
        "loss": "kl",
    },
    "hydra": {"max_steps": 1200, "learning_rate": 2e-3, "num_heads": 3},
    "medusa": {"max_steps": 1200, "learning_rate": 2e-3, "num_layers": 2, "own_lm_head": False},
    "dflash": {
        "max_steps": 1400,
        "learning_rate": 2e-3,
        "tokens_per_batch": 2048,
        "num_anchors": 32,
        "intermediate_size": 512,
    },
}


# Further runs, each of which begins with the head of the one before and reads answers to changed prompts too.
FURTHER_RUNS = {
    "mlp_speculator": [{"max_steps": 2400, "learning_rate": 2e-3, "bf16": False}],
    "medusa": [
        {"max_steps": 2400, "learning_rate": 1.5e-3, "bf16": False},
        {"max_steps": 8000, "learning_rate": 2e-3, "bf16": False},
    ],
    "dflash": [
        {"max_steps": 500, "learning_rate": 1e-3, "bf16": False},
        {"max_steps": 900, "learning_rate": 1.5e-3, "bf16": False},
    ],
}
NUM_SAME, NUM_CHANGED = 4096, 8192  # prompts of further runs: of the training chats as they are, and changed


def write_prompts(data: Path, stories: Path, path: Path) -> None:
    """The different prompts of the target's training chats, shuffled: rows {"prompt", "task"}."""
    train, _ = load_documents(data, stories)
    prompts: dict[str, str] = {}
    for task in CHATS:
        for document in train.get(task, ()):
            prompt = re.match(r"<\|user\|>(.*?)<\|end\|>", document, re.DOTALL).group(1)
            if len(prompt) < LONGEST_PROMPT:
                prompts.setdefault(prompt, task)
    rows = [{"prompt": prompt, "task": task} for prompt, task in prompts.items()]
    random.Random(0).shuffle(rows)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_changed_prompts(prompts: Path, path: Path, share: float = 0.3, seed: int = 1) -> None:
    """The prompts again with a `share` of their words, names and numbers exchanged for those of others of the same task, each
    the same throughout a prompt. The target knows the answers of its training chats by heart; to these it must find one."""
    rng = random.Random(seed)
    rows = read_rows(prompts)
    pools: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for word in re.findall(_WORD, row["prompt"]):
            pools.setdefault((row["task"], _kind(word)), []).append(word)
    changed = []
    for row in rows:
        words = set(re.findall(_WORD, row["prompt"]))
        other = {word: rng.choice(pools[row["task"], _kind(word)]) for word in sorted(words) if rng.random() < share}
        prompt = re.sub(_WORD, lambda found, other=other: other.get(found[0], found[0]), row["prompt"])
        changed.append({"prompt": prompt, "task": row["task"]})
    rng.shuffle(changed)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in changed), encoding="utf-8")


def _kind(word: str) -> str:
    return f"{len(word)} digits" if word.isdigit() else "name" if word[0].isupper() else "word"


def load_target(dtype: torch.dtype) -> tuple:
    """The bundled target and its tokenizer."""
    folder = hf_specdec.bundled("tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval(), tokenizer


def write_answers(prompts: Path, path: Path, count: int | None = None) -> None:
    """The target's greedy answers to the first `count` prompts (None: all), in float32."""
    target = TargetModel(*load_target(torch.float32), "tiny")
    regenerate(target, read_rows(prompts)[:count], path, ANSWERS, say=print)


def write_further_answers(work: Path) -> Path:
    """What further runs read: answers to prompts of the training chats, and to changed ones."""
    same, changed, path = (work / f"head_answers{name}.jsonl" for name in ("", "_changed", "_further"))
    write_changed_prompts(work / "head_prompts.jsonl", work / "head_prompts_changed.jsonl")
    write_answers(work / "head_prompts_changed.jsonl", changed, NUM_CHANGED)
    rows = same.read_text(encoding="utf-8").splitlines(keepends=True)[:NUM_SAME]
    path.write_text("".join(rows) + changed.read_text(encoding="utf-8"), encoding="utf-8")
    return path


def train(method: str, answers: Path, output: Path, log: Path, name: str, **more) -> None:
    """Train and export one head; its log and curves are kept under `name`."""
    options = available_trainers()[method].options_class(**{**SHARED_OPTIONS, **RUNS[method], **more})
    train_head(
        method,
        *load_target(torch.bfloat16 if options.bf16 else torch.float32),
        answers,
        output,
        options,
        target_name="tiny",
        dtype=torch.float16,
        license="apache-2.0",
        say=print,
    )
    log.mkdir(parents=True, exist_ok=True)
    shutil.copy(output / "training" / "log.jsonl", log / f"{name}.jsonl")
    shutil.copy(output / "training" / "curves.png", log / f"{name}.png")


def ship(method: str, folder: Path, output: Path) -> None:
    """Copy an exported head to where the package carries it, and put what it accepts into its card."""
    name = f"tiny-{method}"
    shutil.rmtree(output / name, ignore_errors=True)
    shutil.copytree(folder, output / name, ignore=shutil.ignore_patterns("training"))
    card = output / name / "README.md"
    text = card.read_text(encoding="utf-8")
    for written, shipped in (
        (f"# {folder.name}\n", f"# {name}\n"),
        (f'{{"model": "{folder.name}"}}', f'{{"model": "{name}"}}'),
        ("`head_answers.jsonl`", DATA),
        ("`head_answers_further.jsonl`", FURTHER_DATA),
    ):
        text = text.replace(written, shipped)
    card.write_text(text, encoding="utf-8")
    keys = json.dumps(MEASURED.get(method, {}))
    arguments = ["--target", "tiny", "--no-baseline", "--update-card", "--speculative-config", keys]
    if hf_specdec_command(["eval", str(output / name), *arguments]):
        raise SystemExit(f"{name} could not be measured.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=SHARED / "data", help="folder with the texts")
    parser.add_argument("--work", type=Path, default=HERE / "work", help="folder of prompts, answers and runs")
    parser.add_argument("--log", type=Path, default=HERE / "log" / "heads", help="folder for logs and curves")
    parser.add_argument(
        "--output", type=Path, default=HERE.parents[1] / "hf_specdec" / "bundled_models", help="heads go here"
    )
    parser.add_argument("--methods", nargs="+", choices=RUNS, default=list(RUNS), help="which heads (default: all)")
    a = parser.parse_args()

    a.work.mkdir(parents=True, exist_ok=True)
    prompts, answers = a.work / "head_prompts.jsonl", a.work / "head_answers.jsonl"
    if not prompts.exists():
        write_prompts(a.data, a.work / "more_stories.jsonl", prompts)
    write_answers(prompts, answers)
    further = write_further_answers(a.work) if FURTHER_RUNS.keys() & set(a.methods) else answers
    for method in a.methods:
        folder = a.work / f"tiny-{method}"
        train(method, answers, folder, a.log, method)
        for number, options in enumerate(FURTHER_RUNS.get(method, ()), 2):
            more = {**options, "init_from": str(folder)}
            folder = a.work / f"tiny-{method}-{number}"
            train(method, further, folder, a.log, f"{method}-{number}", **more)
        ship(method, folder, a.output)


if __name__ == "__main__":
    main()
