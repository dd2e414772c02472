"""The operations of a program of the native library: their numbers and their layout, as in `source/program.h`."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Operation(IntEnum):
    """What an operation does."""

    EMBED = 0
    ELEMENTWISE = 1
    LINEAR = 2
    SELECT = 3
    WRITE = 4
    ATTEND = 5


class Rows(IntEnum):
    """How many rows a tensor has: one, one per token, or one per token whose logits are wanted."""

    ONE = 0
    TOKENS = 1
    SELECTED = 2


UNARY, BINARY, MEAN, LAYER_NORM = range(4)  # kinds of ELEMENTWISE
UNARY_FUNCTIONS = (
    "copy", "negate", "rsqrt", "sqrt", "exp", "silu", "gelu", "gelu_tanh", "relu", "tanh", "sigmoid", "square", "power", "reciprocal",
    "absolute", "plus", "times", "over", "minus_from", "clamp",
)  # fmt: skip
BINARY_FUNCTIONS = ("add", "subtract", "multiply", "divide", "maximum", "minimum")

PLACE = np.dtype([("slot", "i8"), ("offset", "i8"), ("type", "i8"), ("token", "i8"), ("stride", "i8", 3)])
OP = np.dtype(
    [
        ("operation", "i8"), ("kind", "i8"), ("function", "i8"), ("rows", "i8"), ("size", "i8", 3), ("waits", "i8"),
        ("scalar", "f8"), ("scalar2", "f8"), ("out", PLACE), ("a", PLACE), ("b", PLACE), ("c", PLACE),
        ("layer", "i8"), ("heads", "i8"), ("kv_heads", "i8"), ("width", "i8"), ("value_width", "i8"), ("window", "i8"),
    ]
)  # fmt: skip
