"""Prints every file of the package with the first line of its docstring: python scripts/files.py [ROOM]"""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "hf_specdec"

if __name__ == "__main__":
    for path in sorted((PACKAGE / "/".join(sys.argv[1:2])).rglob("*.py")):
        first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        print(f"{path.relative_to(PACKAGE)!s:<58}{first}")
