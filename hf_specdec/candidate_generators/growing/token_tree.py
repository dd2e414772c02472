"""Reading `speculative_token_tree`: child-rank paths, such a list as text, or the name of a published tree."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...config import MOST_DRAFT_NODES, MOST_DRAFT_TOKENS, SpeculativeConfig, nearest_hint

# Static trees published with EAGLE, Medusa and Token Recycling (whose code calls its tree "2.2.2"). The file has one path per node, a
# digit for each child rank.
_PUBLISHED = json.loads(Path(__file__).with_name("published_trees.json").read_text(encoding="utf-8"))
PUBLISHED_TREES: dict[str, list[list[int]]] = {
    name: [[int(rank) for rank in path] for path in text.split()] for name, text in _PUBLISHED.items()
}

_KEY = "speculative_token_tree"


def read_token_tree(config: SpeculativeConfig, value: Any) -> list[list[int]]:
    """The tree's child-rank paths: [[0], [1], [0, 0]] is a root with two children, the first of which has one.

    Raises:
        SpeculativeConfigError: an unknown name, not a list of paths, an empty list, or too many or too long paths.
    """
    paths = value
    if isinstance(value, str):
        if not value.lstrip().startswith(("[", "(")):
            return _published(config, value)
        try:  # vLLM writes the tree as the text of a Python list of tuples
            paths = ast.literal_eval(value)
        except (ValueError, SyntaxError) as error:
            raise config.fail(_KEY, f"cannot be read: {error}.") from None
    is_list = isinstance(paths, (list, tuple)) and all(isinstance(path, (list, tuple)) and path for path in paths)
    if not paths or not is_list or not all(type(rank) is int and rank >= 0 for path in paths for rank in path):
        raise config.fail(_KEY, f"must be a list of child-rank paths like [[0], [1], [0, 0]], not {value!r}.")
    if max(map(len, paths)) > MOST_DRAFT_TOKENS or _has_too_many_nodes(paths):
        raise config.fail(
            _KEY,
            f"has {len(paths)} paths of up to {max(map(len, paths))} tokens; a tree has at most {MOST_DRAFT_NODES} nodes, a path "
            f"{MOST_DRAFT_TOKENS}.",
        )
    return [list(path) for path in paths]


def _has_too_many_nodes(paths: Iterable[Sequence[int]]) -> bool:
    nodes: set[tuple[int, ...]] = set()
    for path in paths:
        for end in range(len(path), 0, -1):
            prefix = tuple(path[:end])
            if prefix in nodes:  # then its own prefixes are in, too
                break
            nodes.add(prefix)
        if len(nodes) > MOST_DRAFT_NODES:
            return True
    return False


def _published(config: SpeculativeConfig, name: str) -> list[list[int]]:
    if name not in PUBLISHED_TREES:
        hint, names = nearest_hint(name, PUBLISHED_TREES), ", ".join(PUBLISHED_TREES)
        raise config.fail(_KEY, f"names no published tree: {name!r}{hint}; there are {names}.")
    return PUBLISHED_TREES[name]
