"""train_head: a whole run of `hf-specdec train`, from a data file to an exported head."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..core.output import Taps
from .base import Estimate, trainer_class
from .batch import collate
from .data import Sample, encode, read_rows, split
from .export import check_format, export_head
from .features import FeatureFiles, Features
from .loop import Run
from .options import TrainingOptions
from .regenerate import Regeneration, regenerate
from .target import TargetModel

logger = logging.getLogger(__name__)

FEW_STEPS = 200  # fewer are worth a remark


@dataclass
class Trained:
    """The result of a run.

    Attributes:
        folder: the exported head.
        estimate: τ on held-out text, None if nothing was held out.
    """

    folder: Path
    steps: int
    estimate: Estimate | None


def check_installed() -> None:
    """Raise ImportError, with what to install, if a package that training needs is missing."""
    missing = [name for name in ("accelerate", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"Training needs {', '.join(missing)}: pip install 'hf-specdec[train]'")


def train_head(
    method: str,
    model: PreTrainedModel,
    tokenizer: Any,
    data: str | Path,
    output: str | Path,
    options: TrainingOptions | None = None,
    *,
    target_name: str | None = None,
    regeneration: Regeneration | None = None,
    cache_dir: str | Path | None = None,
    form: str | None = None,
    dtype: torch.dtype | None = None,
    license: str | None = None,
    quiet: bool = False,
    say: Callable[[str], None] = logger.info,
) -> Trained:
    """Train a head for `model` and export it to `output`; an interrupted run is resumed.

    Args:
        model: the target, on its device.
        data: see data.py.
        output: the head's folder; the run's own files are in its folder `training`.
        options: an instance of the method's options class.
        target_name: for config.json and the model card (default: where the model was loaded from).
        regeneration: have the target write the answers first.
        cache_dir: keep the target's hidden states in this folder instead of computing them for every batch.
        form: the exported head's layout (default: the method's own).
        say: called with progress messages, one line each.

    Raises:
        TrainingError: bad data or options, too little disk space, a loss that is not finite, or a folder with another run.
    """
    check_installed()
    from accelerate import Accelerator

    kind = trainer_class(method)
    check_format(kind, form)
    options = options or kind.options_class()
    output, work = Path(output), Path(output) / "training"
    work.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(cpu=model.device.type == "cpu", device_placement=False)
    if accelerator.num_processes > 1:
        model.to(accelerator.device)  # pyright: ignore[reportArgumentType]
    target = TargetModel(model, tokenizer, target_name or str(model.config._name_or_path))
    path, origin = Path(data), ""
    if regeneration is not None:
        answers = Path(regeneration.path or work / "regenerated.jsonl")
        with accelerator.main_process_first():
            path = regenerate(target, read_rows(path), answers, regeneration, quiet, say)
        origin = ", answers written by the target"
    rows = read_rows(path)
    longest = min(options.max_length, getattr(target.config, "max_position_embeddings", None) or options.max_length)
    samples = encode(rows, tokenizer, target.vocab_size, target.end_tokens, longest)
    training, held_out = split(samples, options.held_out, options.seed)
    num_tokens = sum(map(len, training))
    say(f"{len(rows)} rows: {len(training)} samples ({num_tokens} tokens) to train on, {len(held_out)} held out")
    trainer = kind(options, target)
    features, how = features_of(target, cache_dir, trainer.taps | Taps(last_hidden=True), samples)
    say(f"hidden states: {how}")
    identity = {"target": target.name, "data": fingerprint(samples)}
    run = Run(trainer, training, held_out, features, work, identity, accelerator, quiet)
    resumed = f", {run.step} of which are done" if run.step else ""
    say(f"{method}: {run.num_parameters / 1e6:.2f} M parameters, {run.num_steps} steps{resumed}")
    if run.num_steps < FEW_STEPS and options.max_steps is None:
        say(_advice(run.num_steps, len(training), num_tokens, options))
    estimate = run.train()
    if run.is_main:
        facts = {
            "license": license,
            "data": f"`{path.name}`{origin}",
            "num_samples": len(training),
            "num_tokens": num_tokens,
            "step": run.step,
            "estimate": estimate,
        }
        export_head(trainer, output, work, form, dtype, facts)
    accelerator.wait_for_everyone()
    return Trained(output, run.step, estimate)


def features_of(
    target: TargetModel, cache_dir: str | Path | None, taps: Taps, samples: list[Sample]
) -> tuple[Features, str]:
    """Where a run takes the target's hidden states from, and this in words."""
    if cache_dir is None:
        words = "computed on the fly, one forward of the target per batch; nothing kept on disk"
        return lambda samples, taps: target.capture(collate(samples), taps), words
    files = FeatureFiles(target, Path(cache_dir), taps, samples)
    return files, f"kept in {cache_dir}, {files.num_bytes / 2**20:.1f} MiB"


def _advice(steps: int, samples: int, tokens: int, options: TrainingOptions) -> str:
    size = min(options.tokens_per_batch, max(512, tokens * options.epochs // FEW_STEPS))
    per_pass = max(1, min(samples, -(-tokens // size)) // options.gradient_accumulation)
    return (
        f"{steps} steps teach a head little: {samples} samples have only {tokens} tokens. Give more data (thousands of samples), or try "
        f"--tokens-per-batch {size} --epochs {-(-FEW_STEPS // per_pass)} for about {FEW_STEPS} steps."
    )


def fingerprint(samples: list[Sample]) -> str:
    """A hash of the samples' tokens and masks, in order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(len(sample).to_bytes(8, "big") + sample.token_ids.tobytes() + sample.loss_mask.tobytes())
    return digest.hexdigest()[:16]
