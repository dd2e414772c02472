"""One compile case per specialisation of our Triton kernels, for `benchmarks/kernel_resources.py` and the tests."""

from __future__ import annotations

from . import attention, cache, drafting, invariant, linear, norms, recurrent, rejection, sampling, verification
from .compiling import CompileCase

OPERATIONS = (attention, cache, drafting, invariant, linear, norms, recurrent, rejection, sampling, verification)


def all_cases() -> list[CompileCase]:
    """The cases of every operation."""
    return [case for operation in OPERATIONS for case in operation.compile_cases()]
