"""Rewrites the graphs of traced layers to use our fused kernels, which need fewer launches than inductor's."""

from .linears import fuse_linears
from .nodes import modifies_in_place, without_dropout
from .norms import fuse_norms
from .rotation import fuse_rotation

__all__ = ["fuse_linears", "fuse_norms", "fuse_rotation", "modifies_in_place", "without_dropout"]
