"""Draft heads that are known or published for a target; the models in the Hub's local cache."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CacheNotFound, HfApi, constants, metadata_load, scan_cache_dir
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...core.folders import same_tokenizer

# The methods of heads, best first if nothing else is known, and words in the names or tags of their repositories.
_KINDS = {
    "eagle3": ("eagle3", "eagle-3", "peagle", "p-eagle"),
    "dflash": ("dflash", "dspark", "domino"),
    "gemma4_assistant": ("-it-assistant",),
    "eagle": ("eagle",),
    "hydra": ("hydra",),
    "arctic": ("arctic-lstm-speculator", "arctic-speculator"),
    "mtp": ("-mtp",),
    "mlp_speculator": ("accelerator", "mlp_speculator", "mlp-speculator"),
    "medusa": ("medusa",),
}
# the base error of the HTTP library under the Hub's client: requests or httpx, depending on the client's version
_HTTP_ERROR: Any = HfHubHTTPError.__bases__[0]
_MOST_LISTED = 50  # the Hub is asked for at most this many models
TABLE = Path(__file__).with_name("published_heads.json")  # checked by scripts/check_published_heads.py


@dataclass(frozen=True)
class PublishedHead:
    """A head on the Hub.

    Attributes:
        tau: tokens per step that its publisher measured, on `task`.
        gigabytes: size of its weights; 0: unknown.
    """

    repo: str
    method: str
    licence: str | None = None
    tau: float | None = None
    task: str | None = None
    gigabytes: float = 0.0

    @property
    def about(self) -> str:
        """Its size and what its publisher says, as text to show."""
        size = f", {self.gigabytes:.1f} GB" if self.gigabytes else ""
        tau = "" if self.tau is None else f", published τ {self.tau}{f' on {self.task}' if self.task else ''}"
        return size + tau + (f", {self.licence}" if self.licence else "")


def rank(method: str) -> int:
    """The place of a method in the order of preference; 0 is the best."""
    return list(_KINDS).index(method) if method in _KINDS else len(_KINDS)


@functools.cache
def known_heads() -> list[tuple[str, PublishedHead]]:
    """The heads that the package knows, each after its target's id."""
    rows, keys = json.loads(TABLE.read_text(encoding="utf-8")), ("head", "method", "licence", "tau", "task")
    return [
        (row["target"], PublishedHead(*(row[key] for key in keys), gigabytes=row.get("gigabytes", 0.0))) for row in rows
    ]


def _name(target_id: str) -> str:
    """A form in which a target's ids are equal: Llama 3's repositories have been renamed."""
    return target_id.lower().replace("/meta-llama-3", "/llama-3")


def published_heads(target_id: str) -> list[PublishedHead]:
    """The heads that the package knows for a target, best first."""
    heads = [head for target, head in known_heads() if _name(target) == _name(target_id)]
    return sorted(heads, key=lambda head: (rank(head.method), -(head.tau or 0.0)))


def heads_on_hub(target_id: str, known: list[PublishedHead], notes: list[str]) -> Iterator[PublishedHead]:
    """The heads that the Hub has for a target, known ones first, with their sizes.

    Args:
        notes: a line is added for each head that cannot be used, or one if the Hub cannot be reached.
    """
    if constants.HF_HUB_OFFLINE:
        notes += [f"{head.repo} ({head.method}{head.about}): offline, and not in the local cache" for head in known]
        return
    api, seen = HfApi(), set()
    try:
        for head in [*known, *_by_metadata(api, target_id)]:
            if head.repo in seen:
                continue
            seen.add(head.repo)
            sized = _sized(api, head, notes)
            if sized is not None:
                yield sized
    except (OfflineModeIsEnabled, _HTTP_ERROR, OSError) as error:
        notes.append(f"heads on the Hub: the Hub cannot be reached ({type(error).__name__})")


def _by_metadata(api: HfApi, target_id: str) -> list[PublishedHead]:
    """Models whose card names the target as `base_model` and whose name or tags name a method; the most used first."""
    heads = []
    for model in api.list_models(filter=f"base_model:{target_id}", sort="downloads", limit=_MOST_LISTED):
        words = " ".join([model.id, *(model.tags or [])]).lower()
        method = next((method for method, names in _KINDS.items() if any(name in words for name in names)), None)
        if method is not None and "quantized" not in words:
            heads.append(PublishedHead(model.id, method))
    return sorted(heads, key=lambda head: rank(head.method))


def _sized(api: HfApi, head: PublishedHead, notes: list[str]) -> PublishedHead | None:
    """The head with its size; None, with a note, if it cannot be used."""
    try:
        info = api.model_info(head.repo, files_metadata=True)
    except HfHubHTTPError as error:
        notes.append(f"{head.repo}: {type(error).__name__}")
        return None
    if info.gated:
        notes.append(f"{head.repo}: gated; accept its terms on the Hub, then name it as 'model'")
        return None
    sizes = [file.size or 0 for file in info.siblings or [] if file.rfilename.endswith(".safetensors")]
    if not sizes:
        notes.append(f"{head.repo}: no safetensors; name it as 'model' to read other files")
        return None
    return replace(head, gigabytes=sum(sizes) / 1e9)


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
    if same_tokenizer(folder, other):
        return True
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
