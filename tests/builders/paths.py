"""Where things are in a checkout."""

import importlib.util
from pathlib import Path

BUILDERS = Path(__file__).resolve().parent
TESTS = BUILDERS.parent
ROOT = TESTS.parent


def load_script(path):
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
