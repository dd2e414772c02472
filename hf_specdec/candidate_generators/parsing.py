"""parse_config: from what a user passes as `speculative_config` to a method's checked configuration."""

from __future__ import annotations

import functools
import json
import logging
import os
from typing import Any

from ..config import SpeculativeConfig, SpeculativeConfigError, nearest_hint
from .checkpoints.files import infer_format, open_checkpoint, versions_of
from .pasted import IGNORED_KEYS, METHOD_NAMES, renamed_method, translated
from .registry import available_methods, broken_method, discover, imported_method

logger = logging.getLogger(__name__)


def parse_config(value: Any) -> SpeculativeConfig:
    """Turn what a user passes as `speculative_config` into a checked configuration.

    Names and keys of vLLM, vLLM-Ascend and FastDeploy are understood (see pasted.py). A method "package.module:Class" is
    imported, so a method can be used without installing a package.

    Args:
        value: a `SpeculativeConfig`, a dict, JSON text, the path of a JSON file, or a method's name such as "auto". `{}` is an error.

    Raises:
        SpeculativeConfigError: unknown method or key (with the nearest valid one), bad value, unreadable text.
    """
    if isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, (str, os.PathLike)):
        value = _read(os.fspath(value))
    if not isinstance(value, dict):
        raise SpeculativeConfigError(
            "speculative_config must be a dict, JSON text, a path to a JSON file, a method's name or a SpeculativeConfig, not "
            f"{type(value).__name__}."
        )
    methods = available_methods()
    value = renamed_method(value)
    method = value.get("method") or None
    if isinstance(method, str) and ":" in method:
        method = imported_method(method)
        methods = available_methods()
    if method is None and isinstance(value.get("model"), (str, os.PathLike)):
        model = os.fspath(value["model"])
        method = infer_method(model, value.get("revision"), value.get("token"), versions_of(model))
    if method is None:
        raise SpeculativeConfigError(f"speculative_config needs a 'method': one of {', '.join(methods)}.")
    if not isinstance(method, str) or method not in methods:
        if isinstance(method, str) and (problem := broken_method(method)):
            raise SpeculativeConfigError(problem)
        raise SpeculativeConfigError(
            f"Unknown speculative method {method!r}{nearest_hint(method, [*methods, *METHOD_NAMES])}. Available: "
            f"{', '.join(methods)}."
        )
    value = translated({**value, "method": method}, methods)
    return methods[value["method"]].from_dict(value, IGNORED_KEYS)


@functools.lru_cache(maxsize=64)
def infer_method(model: str, revision: str | None, token: str | None, versions: tuple) -> str:
    """Find a checkpoint's method from its config.json and tensor names. `versions`: of its files, only a part of the cache's key."""
    discover()
    form = infer_format(open_checkpoint(model, revision, token))
    logger.info("%s: method %r, inferred from its format: %s.", model, form.method, form.name)
    return form.method


def _read(text: str) -> Any:
    text = text.removeprefix("\ufeff")
    names = {*available_methods(), *METHOD_NAMES}
    if text in names:
        return {"method": text}
    source = text
    if not text.lstrip().startswith("{"):
        file = os.path.expanduser(text)
        if not os.path.isfile(file):
            raise SpeculativeConfigError(
                f"speculative_config {_shown(text)} is neither JSON text nor an existing file, and no method has this "
                f"name{nearest_hint(text, names)}."
            )
        with open(file, encoding="utf-8-sig", errors="replace") as f:
            source = f.read()
    try:
        return json.loads(source)
    except json.JSONDecodeError as error:
        raise SpeculativeConfigError(f"speculative_config is not valid JSON ({error}): {_shown(source)}") from None
    except RecursionError:
        raise SpeculativeConfigError(
            f"speculative_config is JSON that is nested too deeply: {_shown(source)}"
        ) from None


def _shown(text: str) -> str:
    """A quoted text, or the beginning of a long one."""
    return repr(text if len(text) <= 80 else text[:80] + "…")
