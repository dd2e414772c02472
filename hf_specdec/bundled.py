"""The models bundled with the package: some in its own wheel, the rest in hf-specdec-models (folder `models/` of a checkout)."""

from __future__ import annotations

import difflib
import importlib.util
import os
from pathlib import Path

_FOLDER = Path(__file__).parent / "bundled_models"
# What the wheel leaves out, so that it stays small. A checkout has all of them; tests/project/test_wheel.py compares this with MANIFEST.in.
APART = (  # models/setup.py reads these lines as text
    "tiny-dflash", "tiny-eagle", "tiny-eagle3", "tiny-hybrid", "tiny-hydra", "tiny-medusa", "tiny-mlp_speculator", "tiny-mtp",
)  # fmt: skip
BUNDLED_PROMPTS = _FOLDER / "prompts.jsonl"
HOW_TO_INSTALL = "pip install 'hf-specdec[models]' (in a checkout: pip install ./models)"


def _other_folder() -> Path | None:
    """Where hf-specdec-models is installed."""
    spec = importlib.util.find_spec("hf_specdec_models")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def bundled_folders() -> dict[str, Path]:
    """Folders of the bundled models that are installed, by name. The package's own models take precedence."""
    places = [place for place in (_other_folder(), _FOLDER) if place is not None]
    return {path.parent.name: path.parent for place in places for path in place.glob("*/config.json")}


def bundled_names() -> list[str]:
    """Names of the bundled models that are installed; they are accepted wherever a model name is."""
    return sorted(bundled_folders())


def bundled(name: str) -> str:
    """The local folder of a bundled model, for `from_pretrained`.

    Raises:
        ValueError: no bundled model has this name; the message lists those that are installed.
        ImportError: it is in a package that is not installed; the message says how to install it.
    """
    folders = bundled_folders()
    if name in folders:
        return str(folders[name])
    if name in APART:
        message = f"The bundled model {name!r} comes in a package of its own: {HOW_TO_INSTALL}."
        raise ImportError(message, name="hf_specdec_models")
    raise ValueError(f"No bundled model is called {name!r}. Bundled: {', '.join(sorted(folders))}.")


def resolve_model(name_or_path: str) -> str:
    """The folder of a bundled model, given its name; anything else unchanged, with the home folder for "~". A local folder of that
    name takes precedence.

    Raises:
        ImportError: the name is that of a bundled model that is not installed.
        ValueError: nothing has this name, which is nearly that of a bundled model. A Hub id would have an owner.
    """
    path, names = os.path.expanduser(name_or_path), {*APART, *bundled_folders()}
    if os.path.exists(path):
        return path
    if name_or_path in names:
        return bundled(name_or_path)
    near = difflib.get_close_matches(name_or_path, names, n=1, cutoff=0.6) if "/" not in name_or_path else None
    if near:
        raise ValueError(
            f"No model is called {name_or_path!r} (did you mean {near[0]!r}?): it is neither bundled nor a folder here, and a Hub id "
            "has the form OWNER/NAME."
        )
    return path
