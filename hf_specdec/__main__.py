"""`python -m hf_specdec`: the command `hf-specdec`."""

import sys

from .cli import main

sys.exit(main())
