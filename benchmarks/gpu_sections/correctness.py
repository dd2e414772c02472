"""Every kernel of `hf_specdec.kernels` against its definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hf_specdec.kernels

from . import (
    check_attention,
    check_cache,
    check_drafting,
    check_invariant,
    check_layers,
    check_recurrent,
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
    check_recurrent,
)


def unchecked() -> list[str]:
    """Operations with Triton kernels that no check here covers."""
    covered = {name for check in CHECKS for name in check.MODULES}
    folders = [Path(folder) for folder in hf_specdec.kernels.__path__]
    operations = sorted(path.parent.name for folder in folders for path in folder.glob("*/triton.py"))
    return [name for name in operations if name not in covered]


def rows(context: Context) -> Iterator[Row]:
    """Dtype by dtype; an operation that nothing here checks is a miss."""
    for module in unchecked():
        yield Row(
            "correctness", f"kernels/{module}", ok=False, aim="checked", note="no check in benchmarks/gpu_sections"
        )
    for name, dtype in context.dtypes().items():
        for check in CHECKS:
            yield from check.rows(context, name, dtype)
