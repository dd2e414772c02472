"""How test files of Triton kernels run: compiled on a GPU if there is one, else interpreted on the CPU.

Triton chooses between compiling and interpreting when it is imported, and torch and transformers import it. Where it was
imported to compile and there is no GPU, tests marked `needs_triton` are not collected. tests/kernels/test_triton_interpreted.py runs
them in processes of their own. To run one file, or the slow tests: `TRITON_INTERPRET=1 pytest -n0 [-m slow] tests/test_triton_*.py`.
"""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _runs_here() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    import triton.language as tl

    return DEVICE == "cuda" or type(tl.cdiv).__name__ == "InterpretedFunction"


def _interpret_without_overflow_checks() -> None:
    """They take half of the interpreter's time, and what tests index is too small to overflow."""
    from triton.runtime import interpreter

    builder = getattr(interpreter, "interpreter_builder", None)
    if builder is not None and hasattr(builder.options, "sanitize_overflow"):
        object.__setattr__(builder.options, "sanitize_overflow", False)


def fixed_order_product(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """a [.., M, K] @ b [.., K, N] in `dtype`: the halves of each element's K products are added until one is left.

    So an element's bits depend on its row and its column alone, as in a GPU's matrix unit. A BLAS sums in an order of its own
    for rows at a tile's edge, which one depends on the processor.
    """
    products = a.astype(dtype)[..., :, :, None] * b.astype(dtype)[..., None, :, :]
    while (size := products.shape[-2]) > 1:
        half = size // 2
        sums = products[..., :half, :] + products[..., half : 2 * half, :]
        products = np.concatenate([sums, products[..., 2 * half :, :]], axis=-2) if size % 2 else sums
    return products[..., 0, :]


def _interpret_products_in_a_fixed_order() -> None:
    """What kernels promise of bits can then be tested on every processor."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    numpys_dot = builder.create_dot

    def create_dot(self, a, b, d, *options):
        if not all(np.issubdtype(each.data.dtype, np.floating) for each in (a, b)):  # integers are exact in any order
            return numpys_dot(self, a, b, d, *options)
        return interpreter.TensorHandle(fixed_order_product(a.data, b.data, d.data.dtype) + d.data, d.dtype.scalar)

    builder.create_dot = create_dot


RUNS_HERE = _runs_here()
if RUNS_HERE and DEVICE == "cpu":
    _interpret_without_overflow_checks()
    _interpret_products_in_a_fixed_order()


def needs_triton(test):
    """Leave a test out of this process where it cannot run; tests/kernels/test_triton_interpreted.py runs it."""
    test.__test__ = RUNS_HERE
    return test


def run_interpreted(files: list[str]) -> None:
    """Run the tests of `files` with the interpreter in a new process; skip if they run here."""
    if RUNS_HERE or importlib.util.find_spec("triton") is None:
        pytest.skip("the tests run in this process" if RUNS_HERE else "triton is not installed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
