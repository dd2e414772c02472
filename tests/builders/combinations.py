"""Fewer combinations of parameters in the default run; the rest are marked slow."""

from itertools import combinations, product

import pytest


def every_second(cases) -> list:
    """Cases for `pytest.mark.parametrize`, every second one marked slow: cases of one kind, of which some will do by default."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=pytest.mark.slow if i % 2 else ()) for i, row in enumerate(rows)]


def covering(*axes, strength: int = 1) -> list:
    """The product of `axes` for `pytest.mark.parametrize`, all but a covering part of it marked slow.

    With strength 1 every value of every axis runs by default; with strength 2 every pair of values of two axes does. A value
    may be a tuple, whose items become parameters of their own.
    """
    places = list(product(*(range(len(axis)) for axis in axes)))

    def parts(place):
        return {tuple((i, place[i]) for i in chosen) for chosen in combinations(range(len(axes)), strength)}

    missing, default = set().union(*map(parts, places)), set()
    while missing:
        best = max(places, key=lambda place: len(parts(place) & missing))
        default.add(best)
        missing -= parts(best)
    rows = []
    for place in places:
        values = [axis[i] for axis, i in zip(axes, place, strict=True)]
        flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
        rows.append(pytest.param(*flat, marks=() if place in default else pytest.mark.slow))
    return rows
