"""Draft heads that are known or published for a target."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

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
