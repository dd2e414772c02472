"""The source of a batch's hidden states: a forward of the target, or files written once."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch.nn.utils.rnn import pad_sequence

from ..core.output import Taps
from ..model.options.fingerprints import fingerprints
from .batch import Batch, collate
from .data import Sample
from .state import check_room, write_whole
from .target import TargetModel

logger = logging.getLogger(__name__)

# samples as a batch on the target's device, with the hidden states in taps
Features = Callable[[list[Sample], Taps], Batch]


class FeatureFiles:
    """Hidden states from files, written when a sample is first used.

    The files are those of the method `extract_hidden_states` (`hidden_states` [tokens, layers, H] in the target's dtype,
    `token_ids` [tokens], metadata `layer_ids` and `model`), named by a hash of the text and of the target's weights and configuration.
    Files written by that method are found too, unless they are older than the files of the target. Runs of different methods can share
    a folder.

    Args:
        taps: the hidden states to keep.
        samples: all samples, to check that their files fit on the disk.

    Raises:
        TrainingError: the files do not fit on the disk.
    """

    def __init__(self, target: TargetModel, folder: Path, taps: Taps, samples: list[Sample]):
        self.target, self.folder = target, folder
        self.layer_ids = [*sorted(taps.layers), target.num_layers]
        folder.mkdir(parents=True, exist_ok=True)
        self.model_name = str(target.model.config._name_or_path)
        self._identity = _identity(target)
        self.known = self._found()
        itemsize = target.model.dtype.itemsize
        per_token = len(self.layer_ids) * target.hidden_size * itemsize
        missing = [sample for sample in samples if self._file(sample) is None]
        self.num_bytes = sum(len(sample) for sample in samples) * per_token
        needed = sum(len(sample) for sample in missing) * per_token
        check_room(folder, needed, f"Hidden states of {len(missing)} samples")
        mebibytes = self.num_bytes / 2**20, needed / 2**20
        logger.info("%s: %.1f MiB of hidden states, %.1f MiB of it still to be written.", folder, *mebibytes)

    def __call__(self, samples: list[Sample], taps: Taps) -> Batch:
        """The samples as a batch; the target runs only for samples without a file."""
        missing = [sample for sample in samples if self._file(sample) is None]
        if missing:
            self._write(missing)
        batch = collate(samples).to(self.target.device)
        kept = []
        for sample in samples:
            path = self._file(sample)
            assert path is not None
            states = load_file(path)["hidden_states"]
            kept.append(F.pad(states, (0, 0, 0, 0, 0, len(sample) - len(states))))  # the last token's may be missing
        states = pad_sequence(kept, batch_first=True).to(self.target.device).float()
        batch.layers = {index: states[:, :, self.layer_ids.index(index)] for index in taps.layers}
        batch.last_hidden = states[:, :, -1] if taps.last_hidden else None
        return batch

    def _file(self, sample: Sample) -> Path | None:
        """The sample's file. It may lack the last token, whose states are not used."""
        return self.known.get(self._key(sample.token_ids)) or self.known.get(self._key(sample.token_ids[:-1]))

    def _key(self, token_ids: np.ndarray) -> str:
        content = f"{self.model_name}\0{self.layer_ids}\0".encode() + self._identity
        return hashlib.sha256(content + np.asarray(token_ids, dtype=np.int32).tobytes()).hexdigest()[:32]

    def _found(self) -> dict[str, Path]:
        """Files of this target with these layers, by key. Files named by their key need not be opened."""
        patterns = ("config.json", "*.safetensors", "*.bin")
        files = [path for pattern in patterns for path in Path(self.model_name).glob(pattern)]
        changed = max((path.stat().st_mtime for path in files), default=0.0)  # 0 if the name is not that of a folder
        known, num_old = {}, 0
        for path in self.folder.glob("*.safetensors"):
            if len(path.stem) == 32:
                known[path.stem] = path
                continue
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("model") != self.model_name or json.loads(metadata["layer_ids"]) != self.layer_ids:
                    continue
                if path.stat().st_mtime < changed:
                    num_old += 1
                else:
                    known[self._key(file.get_tensor("token_ids").numpy())] = path
        if num_old:
            logger.warning(
                "%s: %d files are older than the target %s: not used.", self.folder, num_old, self.model_name
            )
        return known

    def _write(self, samples: list[Sample]) -> None:
        taps = Taps(last_hidden=True, layers=tuple(self.layer_ids[:-1]))
        batch = self.target.capture(collate(samples), taps)
        stacked = torch.stack([*(batch.layers[i] for i in self.layer_ids[:-1]), batch.hidden()], dim=2)
        stacked = stacked.to(self.target.model.dtype).cpu()
        metadata = {"layer_ids": json.dumps(self.layer_ids), "prompt_length": "0", "model": self.model_name}
        for states, sample in zip(stacked, samples, strict=True):
            ids, states = torch.from_numpy(sample.token_ids).long(), states[: len(sample)].contiguous()
            content = save({"hidden_states": states, "token_ids": ids}, metadata)
            key = self._key(sample.token_ids)
            self.known[key] = path = self.folder / f"{key}.safetensors"
            write_whole(path, lambda file, content=content: file.write(content))


def _identity(target: TargetModel) -> bytes:
    """Equal for targets with equal weights and configurations: weights may change while the target's name stays the same."""
    config = {key: value for key, value in target.config.to_dict().items() if key != "transformers_version"}
    weights = b"".join(fingerprints(list(target.model.parameters())))
    return json.dumps(config, sort_keys=True, default=str).encode() + weights
