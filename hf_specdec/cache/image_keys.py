"""ImageKeys: what a row's text attends to beside text, in layers that attend to images alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class ImageKeys:
    """Keys and values of the image tiles that all tokens after a row's prompt see. They have no pages, since no token adds to them.

    Attributes:
        layers: by index, keys and values [1, heads, n, width].
        sees_tiles: False if the prompt's mask hides all tiles, so that the layers' MLPs add nothing.
    """

    layers: dict[int, tuple[torch.Tensor, ...]]
    sees_tiles: bool

    @property
    def num_bytes(self) -> int:
        """Of all layers."""
        return sum(part.nbytes for pair in self.layers.values() for part in pair)
