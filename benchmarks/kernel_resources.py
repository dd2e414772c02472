"""What our Triton kernels use on GPUs that need not be present: registers, spills, shared memory.

    python benchmarks/kernel_resources.py [--arch 80 90] [--once 80] [--only attention] [--json out.json]

Compiles every case of `benchmarks/kernel_cases` and prints one table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported: interpreted functions cannot be compiled

from triton.compiler.errors import CompilationError

sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import all_cases
from kernel_cases.compiling import compile_case, table


def main() -> None:
    """Compile, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90], help="compute capabilities times ten")
    parser.add_argument(
        "--once", type=int, nargs="+", default=[], help="of these, compile only the first case of each kernel"
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cases = [case for case in all_cases() if arguments.only in case.name]
    first = {case.kernel: case.name for case in reversed(cases)}
    results, failed = [], []
    for case in cases:
        for architecture in arguments.arch:
            if architecture in arguments.once and first[case.kernel] != case.name:
                continue
            try:
                results.append(compile_case(case, architecture))
            except CompilationError as error:
                failed.append(f"{case.name} for sm_{architecture}: {error}")
    print(table(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1) + "\n")
    if failed:
        raise SystemExit("\n".join(["", "Not compiled:", *failed]))


if __name__ == "__main__":
    main()
