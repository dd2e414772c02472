"""The models bundled with the package."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "bundled_models"


def bundled_names() -> list[str]:
    """Names of the bundled models; they are accepted wherever a model name is."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))


def bundled(name: str) -> str:
    """The local folder of a bundled model, for `from_pretrained`.

    Raises:
        ValueError: no such model comes with the package; the message lists those that do.
    """
    if name not in bundled_names():
        raise ValueError(f"No bundled model is called {name!r}. Bundled: {', '.join(bundled_names())}.")
    return str(_FOLDER / name)


def resolve_model(name_or_path: str) -> str:
    """The folder of a bundled model, given its name; anything else unchanged. A local folder of that name takes precedence."""
    if name_or_path in bundled_names() and not Path(name_or_path).exists():
        return bundled(name_or_path)
    return name_or_path
