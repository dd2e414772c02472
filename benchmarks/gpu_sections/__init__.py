"""The sections of `benchmarks/gpu.py`, a file each: a function `rows(context)` that yields what it found, line by line."""
