"""What flows through the loop, and how a transformers model runs on it; used for targets and drafters alike."""

from .draft_tree import DraftTrees
from .packed_model import PackedModel, PackedOutput, Taps, UnsupportedModel
from .sequence import Sequence

__all__ = ["DraftTrees", "PackedModel", "PackedOutput", "Sequence", "Taps", "UnsupportedModel"]
