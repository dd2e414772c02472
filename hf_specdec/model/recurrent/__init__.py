"""Layers with a state: recurrences and short convolutions over packed rows."""

from .families import FAMILIES, RecurrentFamily, family_of, layers_without_keys, stateful_layers, states_of
from .mixers import RecurrentLayers
from .plan import StatePlan, make_plan

__all__ = [
    "FAMILIES", "RecurrentFamily", "RecurrentLayers", "StatePlan", "family_of", "layers_without_keys", "make_plan", "stateful_layers",
    "states_of",
]  # fmt: skip
