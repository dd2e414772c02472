"""Every kernel of `hf_specdec.kernels` against its definition in float64."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import hf_specdec.kernels

from . import (
    check_attention,
    check_cache,
    check_drafting,
    check_invariant,
    check_layers,
    check_sampling,
    check_verification,
)
from .context import Context
from .report import Row

CHECKS = (
    check_attention,
    check_cache,
    check_verification,
    check_sampling,
    check_drafting,
    check_invariant,
    check_layers,
)


def unchecked() -> list[str]:
    """Modules with Triton kernels (they list them in `compile_cases`) that no check here is for."""
    covered = {name for check in CHECKS for name in check.MODULES}
    package = hf_specdec.kernels
    found = []
    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in covered and hasattr(
            importlib.import_module(f"{package.__name__}.{module.name}"), "compile_cases"
        ):
            found.append(module.name)
    return found


def rows(context: Context) -> Iterator[Row]:
    """Dtype by dtype; a module that nothing here checks is a miss."""
    for module in unchecked():
        yield Row(
            "correctness", f"kernels/{module}.py", ok=False, aim="checked", note="no check in benchmarks/gpu_sections"
        )
    for name, dtype in context.dtypes().items():
        for check in CHECKS:
            yield from check.rows(context, name, dtype)
