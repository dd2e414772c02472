"""Drafts nothing: saves the target's hidden states while it generates, to train heads on (vLLM's `extract_hidden_states`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..config import SpeculativeConfig, config_key
from ..core.outcome import StepOutcome
from ..core.output import Taps
from ..core.sequence import Sequence
from ..model.packed_model import PackedModel
from .base import DrafterContext
from .none import NoSpeculation
from .registry import register


@dataclass
class ExtractHiddenStatesConfig(SpeculativeConfig):
    """Saves hidden states of chosen layers with their token ids, one safetensors file per request; drafts nothing. Files hold
    `hidden_states` [tokens, layers, hidden] in the target's dtype and `token_ids` [tokens]. They cover the prompt, and the output
    without its last token."""

    name = "extract_hidden_states"
    requires = ("a folder to write to: 'output_dir'",)
    default_num_speculative_tokens = 1
    can_be_combined = False

    eagle_aux_hidden_state_layer_ids: list[int] | None = config_key(
        None,
        "which of transformers' hidden_states to save: 0 is the embeddings, i is the input of layer i, and the number of "
        "layers is the final states, after the norm; negative ids count from the end (default: the final states)",
    )
    output_dir: str | None = config_key(None, "folder for the files, 00000000.safetensors and on; files in it are kept")

    def __post_init__(self) -> None:
        super().__post_init__()
        ids = self.eagle_aux_hidden_state_layer_ids
        if ids is not None and (not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids)):
            raise self.fail("eagle_aux_hidden_state_layer_ids", f"must be a list of layer indices, not {ids!r}.")


@register(ExtractHiddenStatesConfig)
class HiddenStatesWriter(NoSpeculation):
    """Collects a sequence's hidden states and writes them when it ends."""

    config: ExtractHiddenStatesConfig

    def __init__(self, config: ExtractHiddenStatesConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        if config.output_dir is None:
            raise config.fail("output_dir", "is missing: name a folder for the hidden states.")
        num_layers = target.config.num_hidden_layers
        wanted = config.eagle_aux_hidden_state_layer_ids or [num_layers]
        bad = [i for i in wanted if not -num_layers - 1 <= i <= num_layers]
        if bad:
            raise config.fail(
                "eagle_aux_hidden_state_layer_ids",
                f"names {bad}; the target has {num_layers} layers, so indices run from {-num_layers - 1} to {num_layers}.",
            )
        self.layer_ids = [i if i >= 0 else i + num_layers + 1 for i in wanted]
        self.taps = Taps(
            last_hidden=num_layers in self.layer_ids,
            layers=tuple(sorted({i for i in self.layer_ids if i < num_layers})),
        )
        self.folder = Path(config.output_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.next_number = 1 + max(
            (int(p.stem) for p in self.folder.glob("*.safetensors") if p.stem.isdigit()), default=-1
        )
        self.collected: dict[int, list[torch.Tensor]] = {}  # per sequence, [n, layers, H] on the CPU

    def start(self, seq: Sequence) -> None:
        self.collected[seq.id] = []

    def observe(self, outcome: StepOutcome) -> None:
        output = outcome.output
        assert output is not None
        features = {**output.layers, self.target.config.num_hidden_layers: output.last_hidden}
        first = features[self.layer_ids[0]]
        assert first is not None
        sequences, rows, counts = outcome.read_rows()
        index = torch.from_numpy(rows).to(first.device)
        stacked = torch.stack(
            [features[i].index_select(0, index.to(features[i].device)).to(first.device) for i in self.layer_ids], dim=1
        )
        for seq, states in zip(sequences, stacked.cpu().split(counts), strict=True):
            self.collected[seq.id].append(states.clone())

    def evict(self, seq: Sequence) -> None:
        self.collected[seq.id] = []

    def stop(self, seq: Sequence) -> None:
        """Write the sequence's file, also if it was cancelled, unless nothing was read."""
        collected = self.collected.pop(seq.id)
        if not collected:
            return
        hidden = torch.cat(collected)
        path = self.folder / f"{self.next_number:08d}.safetensors"
        self.next_number += 1
        unfinished = path.with_suffix(".partial")
        save_file(
            {"hidden_states": hidden, "token_ids": torch.tensor(seq.tokens[: len(hidden)])},
            unfinished,
            metadata={
                "layer_ids": json.dumps(self.layer_ids),
                "prompt_length": str(seq.prompt_length),
                "model": str(self.target.model.config._name_or_path),
            },
        )
        unfinished.replace(path)  # so a file with its final name is complete
        seq.files["hidden_states_path"] = str(path)
