"""Loads the native library for CPUs, and defines the structures that it reads.

It is compiled when the package is installed (`setup.py`), for several instruction sets, and chooses among them at run time. Without it
every operation runs as plain torch. Structures are those of `source/abi.h` and `source/program.h`; every field is 8 bytes wide.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from enum import IntEnum
from pathlib import Path

import numpy as np
import torch

logger = logging.getLogger(__name__)

VERSION = 13  # version of the structures; the library reports the version it was compiled with
PATH = Path(__file__).with_name("library.so")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_Pointer, _Integer, _Number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Attention(ctypes.Structure):
    """See `source/abi.h`."""

    _fields_ = [
        ("rows", _Pointer),
        ("num_rows", _Integer),
        *_fields(_Pointer, "query keys values sinks out"),
        *_fields(_Integer, "type sinks_type heads kv_heads width value_width"),
        *_fields(_Integer, "query_token query_head key_slot key_head value_slot value_head window kept"),
        *_fields(_Number, "scaling softcap"),
        *_fields(_Pointer, "biases key_scales value_scales"),
        *_fields(_Integer, "scale_slot scale_head"),
    ]


class Linear(ctypes.Structure):
    """See `source/abi.h`."""

    _fields_ = [
        *_fields(_Pointer, "x w bias y"),
        *_fields(_Integer, "type rows n k ldx ldw ldy streams bits group scales by_columns"),
    ]


class Sampling(ctypes.Structure):
    """See `source/abi.h`."""

    _fields_ = _fields(_Pointer, "seeds positions steps draws temperature top_k top_p min_p")


class Choice(ctypes.Structure):
    """See `source/abi.h`."""

    _fields_ = [
        *_fields(_Pointer, "scores keys out"),
        *_fields(_Integer, "rows vocab ahead stream"),
        ("sampling", Sampling),
    ]


class Drafts(ctypes.Structure):
    """See `source/abi.h`."""

    _fields_ = [
        *_fields(_Pointer, "scores first lengths tokens parents table"),
        *_fields(_Integer, "rows width vocab"),
        ("sampling", Sampling),
    ]


class StepInputs(ctypes.Structure):
    """See `source/program.h`."""

    _fields_ = [
        *_fields(_Integer, "num_tokens num_selected"),
        *_fields(_Pointer, "ids positions selected write_slots rows"),
        ("num_rows", _Integer),
        *_fields(_Pointer, "pools scales sources adapters"),
        ("num_adapters", _Integer),
        *_fields(_Pointer, "groups selected_groups"),
    ]


class Round(ctypes.Structure):
    """See `source/program.h`."""

    _fields_ = [
        ("ops", _Pointer),
        ("num_ops", _Integer),
        *_fields(_Pointer, "slots head"),
        ("num_head_ops", _Integer),
        *_fields(_Pointer, "head_slots features output"),
        ("width", _Integer),
        ("logits", _Pointer),
        *_fields(_Integer, "type size vocab"),
        ("target_ids", _Pointer),
        ("num_texts", _Integer),
        *_fields(_Pointer, "rows limits texts pools scales nodes"),
        *_fields(_Integer, "num_nodes keep most"),
        ("least", _Number),
        *_fields(_Pointer, "lengths tokens values parents expanded probs"),
        *_fields(_Integer, "num_probs num_tokens stream draws"),
        ("sampling", Sampling),
    ]


# ---- programs, as in `source/program.h` ----


class Operation(IntEnum):
    """What an operation does."""

    EMBED = 0
    ELEMENTWISE = 1
    LINEAR = 2
    SELECT = 3
    WRITE = 4
    ATTEND = 5
    CALL = 6  # a module, called from Python between two parts of a program: the library does not know it


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
        ("layer", "i8"), ("heads", "i8"), ("kv_heads", "i8"), ("width", "i8"), ("value_width", "i8"), ("window", "i8"), ("kept", "i8"),
        ("streams", "i8"), ("bits", "i8"), ("group", "i8"),
    ]
)  # fmt: skip
LOW_RANK = np.dtype([(name, "i8") for name in ("down", "up", "bias", "rank", "type")] + [("scale", "f8")])

# Functions of OpenMP runtimes: GCC's and LLVM's way to run a function in all threads, and what both have.
_OPENMP = ("GOMP_parallel", "__kmpc_fork_call", "omp_get_thread_num", "omp_get_num_threads")
_PROCESS = os.getpid()  # the OpenMP runtime's threads belong to it, and a forked process has none of them


# ---- the library ----


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None if this installation has no working one; the reason is logged once."""
    reason = why_not_loaded()
    if reason is not None:
        logger.info("The native library for CPUs is not used: %s. Plain torch runs in its place.", reason)
        return None
    loaded = ctypes.CDLL(str(PATH))
    loaded.specdec_instruction_set.restype = ctypes.c_char_p
    loaded.specdec_use.argtypes = [ctypes.c_char_p]
    loaded.specdec_use.restype = _Integer
    for name in ("attention", "linear", "dequantize", "choices", "follow_choices", "round"):
        getattr(loaded, f"specdec_{name}").argtypes = [_Pointer, _Integer]
    loaded.specdec_run.argtypes = [_Pointer, _Integer, _Pointer, _Pointer, _Integer]
    loaded.specdec_run.restype = loaded.specdec_round.restype = _Integer
    loaded.specdec_use_openmp.argtypes = [_Pointer] * len(_OPENMP)
    loaded.specdec_use_openmp.restype = _Integer
    torch_library = ctypes.CDLL(torch._C.__file__)  # finds what it depends on, too: the OpenMP runtime
    functions = [getattr(torch_library, name, None) for name in _OPENMP]
    if os.getpid() == _PROCESS and not loaded.specdec_use_openmp(*functions):
        logger.warning("torch has no OpenMP runtime here, so that small steps on the CPU run in one thread.")
    logger.info("The native library for CPUs runs with %s.", instruction_set(loaded))
    return loaded


def library_of() -> ctypes.CDLL:
    """The library, for callers that know that it is there."""
    loaded = library()
    assert loaded is not None
    return loaded


def why_not_loaded() -> str | None:
    """Why the library cannot be used; None if it can."""
    if not PATH.exists():
        return (
            "it was not compiled when the package was installed (install g++ or clang++ and install hf-specdec again)"
        )
    try:
        loaded = ctypes.CDLL(str(PATH))
    except OSError as error:
        return f"it does not load ({error})"
    loaded.specdec_version.restype = _Integer
    if loaded.specdec_version() != VERSION:
        return "it was compiled from other sources (install hf-specdec again)"
    return None


def description() -> str:
    """The instruction set that the library uses here, or why the library is not used."""
    loaded = library()
    return f"runs with {instruction_set(loaded)}" if loaded is not None else f"is not used: {why_not_loaded()}"


def instruction_set(loaded: ctypes.CDLL) -> str:
    """The instruction set that a loaded library uses on this CPU, such as "avx512_bf16"."""
    return loaded.specdec_instruction_set().decode()
