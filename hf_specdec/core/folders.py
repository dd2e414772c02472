"""Folders: where files are kept between processes, and where a model's own files are."""

from __future__ import annotations

import filecmp
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VARIABLE = "HF_SPECDEC_CACHE"


def cache_folder() -> Path:
    """Where files are kept between processes: $HF_SPECDEC_CACHE, otherwise a folder of the Hub's cache."""
    return Path(os.path.expanduser(os.environ.get(VARIABLE) or os.path.join(constants.HF_HOME, "hf_specdec")))


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, with its folder: whole, or not at all. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(".partial", path.name + ".", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


def same_tokenizer(folder: Path | None, other: Path | None) -> bool:
    """True if the tokenizer.json of both folders are the same bytes, so that texts get the same ids."""
    files = [place / "tokenizer.json" for place in (folder, other) if place is not None]
    return len(files) == 2 and all(file.is_file() for file in files) and filecmp.cmp(*files, shallow=False)


def folder_of(model: PreTrainedModel) -> Path | None:
    """The folder with the files that the model was loaded from; None if it was not loaded, or the files are gone."""
    name = model.name_or_path
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    try:
        config = try_to_load_from_cache(name, "config.json", revision=getattr(model.config, "_commit_hash", None))
    except HFValidationError:  # a path that no longer exists
        return None
    return Path(config).parent if isinstance(config, str) else None
