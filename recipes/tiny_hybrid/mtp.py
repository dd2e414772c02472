"""The hybrid's own MTP layer: a layer of attention that learns from the target's greedy answers, and its place in the checkpoint."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.training.data import read_rows
from hf_specdec.training.mtp import MtpOptions
from hf_specdec.training.pipeline import train_head
from hf_specdec.training.regenerate import Regeneration, regenerate
from hf_specdec.training.target import TargetModel

from ..tiny.heads import write_prompts

ANSWERS = Regeneration(max_new_tokens=128, batch_size=128, speculative_config={"method": "none"})
OPTIONS = MtpOptions(
    num_steps=3, learning_rate=2e-3, tokens_per_batch=2048, bf16=False, eval_every=250, save_every=100, log_every=25
)
# DeepSeek-V3's names, which `hf-specdec train` writes for a layer after the target's last, and Qwen3.5's.
QWEN_NAMES = (
    (r"eh_proj\.", "mtp.fc."),
    (r"enorm\.", "mtp.pre_fc_norm_embedding."),
    (r"hnorm\.", "mtp.pre_fc_norm_hidden."),
    (r"shared_head\.norm\.", "mtp.norm."),
    (r"", "mtp.layers.0."),
)


def load(folder: Path):
    """The exported target in float32, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def write_answers(target: Path, data: Path, work: Path, count: int) -> Path:
    """The target's greedy answers to prompts of its training chats. Goes on with a file that exists."""
    prompts, answers = work / "mtp_prompts.jsonl", work / "mtp_answers.jsonl"
    if not prompts.exists():
        write_prompts(data, work / "more_stories.jsonl", prompts)
    regenerate(TargetModel(*load(target), target.name), read_rows(prompts)[:count], answers, ANSWERS, say=print)
    return answers


def train_mtp(target: Path, answers: Path, output: Path, max_steps: int) -> Path:
    """Train the layer; resumable. Returns its folder."""
    options = MtpOptions(**{**vars(OPTIONS), "max_steps": max_steps})
    trained = train_head(
        "mtp", *load(target), answers, output, options, target_name=target.name, dtype=torch.float16, license="apache-2.0",
        say=print,
    )  # fmt: skip
    return trained.folder


def join(target: Path, layer: Path) -> None:
    """Put a trained layer's tensors into the target's checkpoint, under Qwen3.5's names."""
    weights = load_file(target / "model.safetensors")
    prefix = re.compile(r"model\.layers\.\d+\.")
    for name, tensor in load_file(layer / "model.safetensors").items():
        rest = name[prefix.match(name).end() :]
        pattern, new = next((pattern, new) for pattern, new in QWEN_NAMES if re.match(pattern, rest))
        weights[new + re.sub(pattern, "", rest, count=1)] = tensor.half().contiguous()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "model.safetensors").chmod(0o644)
    config = json.loads((target / "config.json").read_text())
    config["mtp_num_hidden_layers"] = 1
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
