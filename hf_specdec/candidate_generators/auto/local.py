"""What is on this machine: the models in the Hub's local cache."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from huggingface_hub import CacheNotFound, metadata_load, scan_cache_dir
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

logger = logging.getLogger(__name__)


def hub_id_of(model: PreTrainedModel) -> str | None:
    """The Hub id of a model that was loaded by id or from the Hub's cache; None for other folders."""
    name = model.name_or_path
    cached = re.search(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots", name or "")
    if cached:
        return f"{cached[1]}/{cached[2]}"
    return name if name and re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists() else None


def cached_models() -> list[tuple[str, Path]]:
    """(Hub id, folder of the newest snapshot) of each model in the local cache."""
    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []
    models = []
    for repo in cache.repos:
        if repo.repo_type == "model" and repo.revisions:
            newest = max(repo.revisions, key=lambda revision: revision.last_modified)
            models.append((repo.repo_id, Path(newest.snapshot_path)))
    return sorted(models)


def base_models(folder: Path) -> list[str]:
    """The models that a model card names as its `base_model`."""
    card = folder / "README.md"
    try:
        metadata = metadata_load(card) if card.is_file() else None
    except Exception as error:  # the card's YAML is whatever its author wrote
        logger.debug("%s has no metadata that can be read: %s", card, error)
        metadata = None
    stated = (metadata or {}).get("base_model") or []
    return [stated] if isinstance(stated, str) else [name for name in stated if isinstance(name, str)]


def weight_bytes(folder: Path) -> int:
    """Size of a folder's safetensors."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def is_language_model(folder: Path) -> bool:
    """True if transformers loads the folder as a causal language model."""
    return _json(folder / "config.json").get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def same_vocabulary(folder: Path, other: Path) -> bool:
    """True if both folders' tokenizers map the same texts to the same ids."""
    ours, theirs = (_vocabulary(_json(path / "tokenizer.json")) for path in (folder, other))
    return ours is not None and ours == theirs


def _vocabulary(tokenizer: dict) -> tuple | None:
    """The parts of a tokenizer.json that decide which ids a text gets."""
    model = tokenizer.get("model")
    if not isinstance(model, dict) or not model.get("vocab"):
        return None
    added = [(token.get("id"), token.get("content")) for token in tokenizer.get("added_tokens") or []]
    return model.get("type"), model["vocab"], model.get("merges"), added, tokenizer.get("pre_tokenizer")


def _json(path: Path) -> dict:
    """The JSON object in a file; {} if the file is missing or holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig")) if path.is_file() else {}
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
