"""AutoMemory: what method "auto" has learnt about a model on a machine, kept in a file from process to process."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from pathlib import Path

import torch

from ...core.folders import cache_folder, write_private
from ...model.packed_model import PackedModel
from ...policy import Fastest
from ..base import CandidateGenerator
from .config import AutoConfig

logger = logging.getLogger(__name__)

FORMAT = 5
# Seconds between the first two writes, and the most between later ones: a write takes about 1 ms.
SOONEST, LATEST = 2.0, 64.0


class AutoMemory:
    """Numbers only: times of steps, and shares of accepted tokens by drafter and depth. Nothing of any text.

    The file is named after all that the numbers depend on: the model, its drafters, the machine and its threads. A file that cannot
    be read or written only causes a warning, because it affects nothing but speed.
    """

    def __init__(self, path: Path):
        self.path = path
        self._due, self._pause = 0.0, SOONEST

    @classmethod
    def of(cls, config: AutoConfig, target: PackedModel, drafters: dict[str, CandidateGenerator]) -> AutoMemory | None:
        """The memory that a configuration asks for; None if it asks for none. `drafters`: by name."""
        if config.memory is False:
            return None
        model, device = target.model, target.device
        what = [
            FORMAT, type(model).__name__, model.name_or_path, sum(p.numel() for p in model.parameters()), str(model.dtype), str(device),
            torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(), torch.get_num_threads(),
            [[name, part.config.to_dict()] for name, part in drafters.items()], config.to_dict().get("native"),
        ]  # fmt: skip
        name = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:24]
        folder = cache_folder() / "auto" if config.memory is True else Path(os.path.expanduser(config.memory))
        return cls(folder / f"{name}.json")

    def restore(self, policy: Fastest) -> None:
        """Give a new policy what was learnt before, if there is anything."""
        try:
            policy.load(json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return
        except (OSError, RecursionError, KeyError, OverflowError, TypeError, ValueError) as error:
            what = "cannot be read, or does not fit this model and its drafters"
            logger.warning("auto: %s %s (%r); measuring anew.", self.path, what, error)

    def keep(self, policy: Fastest) -> None:
        """Write what the policy knows, if it knows anything and a write is due: after pauses that double, because ever less is learnt."""
        now = time.monotonic()
        state = policy.state() if now >= self._due else None
        if not state:
            return
        self._due, self._pause = now + self._pause, min(2 * self._pause, LATEST)
        try:
            write_private(self.path, json.dumps(state).encode())
        except OSError as error:
            logger.warning("auto: %s cannot be written (%s); what was learnt ends with this process.", self.path, error)
            self._due = float("inf")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
