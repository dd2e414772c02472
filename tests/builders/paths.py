"""Where things are in a checkout."""

from pathlib import Path

BUILDERS = Path(__file__).resolve().parent
TESTS = BUILDERS.parent
ROOT = TESTS.parent
