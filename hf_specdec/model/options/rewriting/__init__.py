"""Rewriting the graphs of traced layers: what our kernels do in fewer launches than inductor's."""

from .linears import put_together
from .nodes import without_dropout, works_in_place
from .norms import join_norms
from .rotation import rotate_with_attention

__all__ = ["join_norms", "put_together", "rotate_with_attention", "without_dropout", "works_in_place"]
