"""Keys of method `medusa`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..checkpoints.files import Checkpoint
from ..growing.last_hidden import LastHiddenConfig


@dataclass
class MedusaConfig(LastHiddenConfig):
    """Medusa: several heads on the target's last hidden state each guess one of the next tokens. A chain by default; heads
    are made for trees: `speculative_token_tree` "medusa_mc_sim_7b_63", or one measured with `hf-specdec calibrate`.

    `max_paths` and `topk` in a converted checkpoint's config.json bound the trees of an engine that built them from it; they
    say nothing about the weights and are not used here.
    """

    name = "medusa"
    requires = ("Medusa heads trained for the target: 'model'",)

    def open(self, wanted: Callable[[str], bool] | None = None) -> Checkpoint:
        """The checkpoint. If it is merged with the target (Medusa-2), shards that hold only the target are left out."""
        return super().open(wanted or (lambda name: not name.startswith(("model.", "transformer."))))
