"""Keys of method `hydra`."""

from __future__ import annotations

from dataclasses import dataclass

from ..growing.last_hidden import LastHiddenConfig


@dataclass
class HydraConfig(LastHiddenConfig):
    """Hydra: heads like Medusa's, but each also reads the tokens drafted before it. Hydra++ checkpoints (arch "prefix-mlp") put
    a decoder layer of their own, with its own KV, between the target and the heads."""

    name = "hydra"
    requires = ("Hydra heads trained for the target: 'model'",)
