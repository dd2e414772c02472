"""The folder in which a learning head is kept: made for a new head, found again for an earlier one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..candidate_generators import parse_config
from ..candidate_generators.checkpoints.config import HeadConfig
from ..candidate_generators.checkpoints.files import open_checkpoint
from ..config import SpeculativeConfig
from ..core.folders import cache_folder
from ..training.base import HeadTrainer, trainer_class
from ..training.export import export_head
from ..training.options import TrainingError
from ..training.target import TargetModel

LEARNERS = ("mlp_speculator", "eagle3")  # methods whose heads can learn while they serve
WORK = "learning"  # folder of the learner's own files, in the head's


def located(config: SpeculativeConfig, model: PreTrainedModel) -> HeadConfig:
    """The configuration with the learning head's folder as its `model`. Raises SpeculativeConfigError: it does not learn."""
    if not isinstance(config, HeadConfig) or config.method not in LEARNERS:
        raise config.fail("learn", f"is for {' and '.join(LEARNERS)} heads, not for {config.method!r}.")
    folder = str(folder_of(config, model))
    given = {key: value for key, value in config.to_dict().items() if key != "revision"}
    placed = parse_config({**given, "model": folder, "learn": folder})
    assert isinstance(placed, HeadConfig)
    return placed


def folder_of(config: HeadConfig, model: PreTrainedModel) -> Path:
    """Where the head is kept: the folder that `learn` names, otherwise one for this model and this head in the cache."""
    if isinstance(config.learn, str):
        return Path(os.path.expanduser(config.learn))
    size = sum(p.numel() for p in model.parameters())
    what = [config.method, config.model, type(model).__name__, model.name_or_path, size]
    name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]
    return cache_folder() / "learnt" / name


def begin_learning(config: HeadConfig, model: PreTrainedModel, begin: str | None) -> HeadTrainer:
    """A trainer that holds the head in a located configuration's folder. If the folder has no head yet, it gets a copy of the head
    `begin`; if that is None, a new head. Raises SpeculativeConfigError: the head has a shape that the trainer does not make.
    """
    folder = folder_of(config, model)
    has_head = (folder / "config.json").is_file()
    source = str(folder) if has_head else begin
    with unchanged_flags(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = TargetModel(model, None, model.name_or_path or "")
        try:
            trainer, counts = _trainer(config, target, source)
            trainer.head = trainer.build(counts).to(target.device).train()
            if source is not None:
                trainer.begin_as(source)
            if not has_head:
                (folder / WORK).mkdir(parents=True, exist_ok=True)
                export(trainer, folder, {"num_samples": 0, "num_tokens": 0, "step": 0})
        except TrainingError as error:
            raise config.fail("learn", f"cannot go on with {source}: {error}") from error
    return trainer


def export(trainer: HeadTrainer, folder: Path, facts: dict[str, Any]) -> None:
    """Write the trainer's head to the folder in the first of its formats. Each file is written whole or not at all."""
    told = {"license": None, "data": "texts that the target wrote while it served"}
    export_head(trainer, folder, folder / WORK, None, torch.float32, {**told, **facts})


def _trainer(config: HeadConfig, target: TargetModel, source: str | None) -> tuple[HeadTrainer, torch.Tensor]:
    """A trainer of heads shaped as the source's (None: of the default shape), and token counts that give its draft vocabulary."""
    counts, kind = torch.zeros(target.vocab_size, dtype=torch.long), trainer_class(config.method)
    if source is None:
        return kind(kind.options_class(), target), counts
    checkpoint = open_checkpoint(source)
    shape = checkpoint.config
    if config.method == "mlp_speculator":
        options: dict[str, Any] = {key: bool(shape.get(key)) for key in ("tie_weights", "scale_input")}
        options |= {"num_heads": shape["n_predict"], "inner_dim": shape["inner_dim"], "from_target": False}
        return kind(kind.options_class(**options), target), counts
    layers, size = shape.get("eagle_aux_hidden_state_layer_ids"), shape.get("draft_vocab_size")
    if "d2t" in checkpoint.names():
        offsets = checkpoint.tensor("d2t").long()
        counts[offsets + torch.arange(len(offsets))] = 1
    options = {key: bool(shape.get(key)) for key in ("fc_norm", "norm_output")}
    options |= {key: shape.get(key) for key in ("intermediate_size", "num_key_value_heads")}
    options |= {
        "num_layers": shape.get("num_hidden_layers", 1),
        "draft_vocab_size": None if size == target.vocab_size else size,
    }
    options["feature_layers"] = None if layers is None else ",".join(map(str, layers))
    return kind(kind.options_class(**options), target), counts


@contextlib.contextmanager
def unchanged_flags(model: PreTrainedModel) -> Iterator[None]:
    """Inside, no parameter of the user's model requires gradients. On exit these flags and the training mode are as before."""
    wanted, mode = [p for p in model.parameters() if p.requires_grad], model.training
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        model.train(mode)
