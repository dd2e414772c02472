"""Writing a trained head as a folder that common tools load: weights, config.json, model card; and uploading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save

from .base import HeadTrainer
from .options import TrainingError
from .state import check_room, write_text, write_whole

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# In the run's folder: the name of the weights' file, which an export in another format deletes.
_RECORD = "exported.json"


def export_head(
    trainer: HeadTrainer, folder: Path, work: Path, form: str | None, dtype: torch.dtype | None, facts: dict[str, Any]
) -> Path:
    """Write the head to `folder`. Raises TrainingError: the disk is full.

    Args:
        work: the run's own folder.
        form: layout, one of the trainer's formats; None: its first.
        dtype: of the weights; None: the target's.
    """
    head = trainer.head.eval()
    with torch.no_grad():
        exported = trainer.exported(form or trainer.formats[0])
        dtype = dtype or trainer.target.model.dtype
        tensors = {
            name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None, copy=True).contiguous()
            for name, tensor in exported.tensors.items()
        }
    head.train()
    check_room(folder, sum(t.numel() * t.element_size() for t in tensors.values()), "The head's weights")
    record = work / _RECORD
    if record.is_file() and (before := json.loads(record.read_text())["file"]) != exported.file_name:
        (folder / before).unlink(missing_ok=True)
    config = {**exported.config, "torch_dtype": str(dtype).removeprefix("torch.")}
    content = save(tensors, {"format": "pt"})
    write_whole(folder / exported.file_name, lambda file: file.write(content))
    if exported.write_others is not None:
        exported.write_others(folder)
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
    write_text(record, json.dumps({"file": exported.file_name, "format": form or trainer.formats[0]}))
    parameters = sum(t.numel() for t in tensors.values())
    facts = {"method": trainer.method, "target": trainer.target.name, "options": trainer.options.to_dict(), **facts}
    write_card(folder, {**facts, "parameters": parameters, "file": exported.file_name, "dtype": config["torch_dtype"]})
    return folder


def check_format(trainer: HeadTrainer | type[HeadTrainer], form: str | None) -> None:
    """Raise TrainingError if heads of this method cannot be written in `form`."""
    if form is not None and form not in trainer.formats:
        raise TrainingError(f"--format {form}: {trainer.method} heads are written as {', '.join(trainer.formats)}.")


def push_to_hub(folder: Path, repository: str, private: bool = False) -> str:
    """Upload an exported head (without the run's own files); returns its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repository, private=private, exist_ok=True)
    info = api.upload_folder(repo_id=repository, folder_path=folder, ignore_patterns=["training/*"])
    return str(info)


_BEGIN, _END = "<!-- measured: written by hf-specdec eval -->", "<!-- end of measured -->"


def write_card(folder: Path, facts: dict[str, Any]) -> None:
    """Write README.md of an exported head from `facts` (method to dtype, see the caller), in place of an earlier one."""
    estimate, target, name = facts.get("estimate"), facts["target"], folder.resolve().name
    front = {
        "license": facts["license"] or "other",
        "library_name": "hf-specdec",
        "base_model": target,
        "tags": ["speculative-decoding", facts["method"]],
    }
    lines = [
        f"---\n{yaml.safe_dump(front, sort_keys=False).strip()}\n---\n# {name}\n",
        f"A draft head for speculative decoding with `{target}`, method `{facts['method']}`.",
        "It makes generation faster and does not change the output. It is of no use with any other model.",
        "",
        f'```python\nmodel.generate(**inputs, speculative_config={{"model": "{name}"}})\n```\n',
        "| | |\n|---|---|",
        f"| target | `{target}` |",
        f"| parameters | {facts['parameters']:,} in {facts['dtype']} (`{facts['file']}`) |",
        f"| data | {facts['data']} |",
        f"| samples, tokens | {facts['num_samples']:,}, {facts['num_tokens']:,} a pass |",
        f"| steps | {facts['step']:,} |",
        f"| licence | {facts['license'] or 'not stated'} |",
    ]
    if estimate is not None:
        rates = ", ".join(f"{rate:.0%}" for rate in estimate.acceptance)
        lines += [f"| τ on held-out text, estimated | {estimate.tau:.2f} (acceptance per position: {rates}) |"]
    options = json.dumps(facts["options"], indent=1)
    lines += ["", _BEGIN, _END, "", f"Options of the run:\n\n```json\n{options}\n```\n"]
    write_text(folder / "README.md", "\n".join(lines))


def has_measurements(folder: Path) -> bool:
    """Whether the folder has a card of ours, which has a place for measurements."""
    path = folder / "README.md"
    return path.is_file() and 0 <= (text := path.read_text(encoding="utf-8")).find(_BEGIN) < text.find(_END)


def add_measurements(folder: Path, table: str) -> Path:
    """Put a table of measurements in the place of the earlier one in a card of ours. Returns the card's file."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8")
    new = f"{text[: text.find(_BEGIN) + len(_BEGIN)]}\n{table.strip()}\n{text[text.find(_END) :]}"
    write_text(path, new)
    return path
