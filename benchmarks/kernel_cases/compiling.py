"""Compile Triton kernels for GPUs that are not present, and read what they use: registers, spills, shared memory."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CompileCase:
    """One specialisation of a kernel.

    Attributes:
        name: its name in the table.
        kernel: a `@triton.jit` function.
        signature: Triton type of every run-time argument, in any order: "*bf16", "*i32", "i32", "fp32", ..
        constexprs: values of `tl.constexpr` arguments and of arguments that are None.
        unaligned: arguments that are not multiples of 16 (in bytes for pointers). All others are compiled as multiples of 16,
            as whole tensors and even strides are.
        hopper_only: constexprs that are False below compute capability 9.0.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    unaligned: tuple[str, ...] = ()
    hopper_only: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelResources:
    """What one compiled case uses.

    Attributes:
        architecture: compute capability times ten: 80, 90.
        registers: per thread.
        spill_stores, spill_loads: bytes per thread.
        shared_memory: bytes per block.
        instructions: how often the PTX contains the instructions that show which path was compiled.
    """

    name: str
    architecture: int
    registers: int
    spill_stores: int
    spill_loads: int
    shared_memory: int
    num_warps: int
    num_stages: int
    instructions: dict[str, int] = field(default_factory=dict)


_INSTRUCTIONS = ("wgmma.mma_async", "mma.sync", "cp.async.cg", "ld.global.v4", "st.global.v4")


def compile_case(case: CompileCase, architecture: int) -> KernelResources:
    """Compile one case for `architecture` (80, 90, ..). Needs no GPU.

    Raises:
        ValueError: the case leaves out arguments of the kernel, or names arguments that it does not have.
        RuntimeError: TRITON_INTERPRET is set, so there is nothing to compile.
    """
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    if knobs.runtime.interpret or not hasattr(case.kernel, "arg_names"):
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted, not compiled.")
    names = case.kernel.arg_names
    given = case.signature.keys() | case.constexprs.keys()
    if given != set(names):
        raise ValueError(f"{case.name}: missing {sorted(set(names) - given)}, unknown {sorted(given - set(names))}.")
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in case.unaligned and name not in case.constexprs and case.signature[name][0] in "*i"
    }
    constexprs = case.constexprs if architecture >= 90 else case.constexprs | dict.fromkeys(case.hopper_only, False)
    source = ASTSource(case.kernel, signature, constexprs, aligned)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    report = io.StringIO()
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(report):
        knobs.compilation.always_compile = True  # ptxas reports only when it runs
        knobs.nvidia.dump_ptxas_log = True
        compiled = compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    ptx = compiled.asm["ptx"]
    registers, stores, loads = _read_report(report.getvalue())
    return KernelResources(
        name=case.name,
        architecture=architecture,
        registers=registers,
        spill_stores=stores,
        spill_loads=loads,
        shared_memory=compiled.metadata.shared,
        num_warps=case.num_warps,
        num_stages=case.num_stages,
        instructions={name: ptx.count(name) for name in _INSTRUCTIONS},
    )


def _read_report(report: str) -> tuple[int, int, int]:
    """Registers, bytes of spill stores and bytes of spill loads, from the report of `ptxas -v`."""
    registers = re.search(r"Used (\d+) registers", report)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    if registers is None or spills is None:
        raise RuntimeError(f"The report of ptxas has an unexpected form:\n{report}")
    return int(registers[1]), int(spills[1]), int(spills[2])


def table(results: Iterable[KernelResources]) -> str:
    """A plain-text table, one line per kernel and architecture."""
    head = (
        "kernel",
        "sm",
        "warps",
        "stages",
        "registers",
        "spilled B",
        "shared B",
        "tensor cores",
        "cp.async",
        "16-byte ld/st",
    )
    lines: list[tuple[str, ...]] = [head]
    for r in results:
        used = r.instructions
        cores = "wgmma" if used.get("wgmma.mma_async") else "mma" if used.get("mma.sync") else "-"
        lines.append((
            r.name, str(r.architecture), str(r.num_warps), str(r.num_stages), str(r.registers),
            f"{r.spill_stores}/{r.spill_loads}", str(r.shared_memory), cores, str(used.get("cp.async.cg", 0)),
            f"{used.get('ld.global.v4', 0)}/{used.get('st.global.v4', 0)}",
        ))  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
