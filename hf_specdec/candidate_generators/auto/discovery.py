"""Finds what can draft for a target, the preferred drafters first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...bundled import bundled_folders
from ...config import SpeculativeConfig
from ...core.folders import folder_of
from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.files import Checkpoint, CheckpointError, NoWeightsError, infer_format
from ..mtp.layouts import find_layout, is_mtp_tensor
from ..parsing import parse_config
from . import hub
from .config import AutoConfig

LOOKUPS = ("suffix", "ngram", "token_recycling")
SMALL_ENOUGH = 0.25  # a draft model has at most this share of the target's bytes
BEST_SHARE = 1 / 16  # of several small models, the one whose share is nearest to this is taken


@dataclass(eq=False)
class Candidate:
    """A drafter that can be made: its configuration, where it comes from, and whether the user named it (then failures are errors)."""

    config: SpeculativeConfig
    why: str
    is_given: bool = False


@dataclass
class Search:
    """What a search for drafters has brought.

    Attributes:
        taken: the drafters to make.
        notes: what was not taken, and why.
        downloads: heads on the Hub that are larger than `max_download_gb`.
    """

    taken: list[Candidate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)

    def drop(self, candidate: Candidate, why: str) -> None:
        """Remove a candidate that turned out not to work, and note why."""
        self.taken.remove(candidate)
        self.notes.append(f"{candidate.why}: {why.strip().splitlines()[0] if why.strip() else 'failed'}")

    def __str__(self) -> str:
        taken = ", ".join(f"{candidate.config.method} ({candidate.why})" for candidate in self.taken) or "nothing"
        parts = [f"auto: drafting with {taken}"]
        if self.notes:
            parts.append(f"not taken: {'; '.join(self.notes)}")
        if self.downloads:
            parts.append(f"to download: {'; '.join(self.downloads)}")
        return ". ".join(parts) + "."


def find_drafters(config: AutoConfig, target: PackedModel, context: DrafterContext | None) -> Search:
    """The drafters to choose among: those the configuration names, or a head, a small model and all look-ups."""
    search = Search()
    if config.methods is not None:
        search.taken = [Candidate(parse_config(part), "given", is_given=True) for part in config.methods]
    named = _named(config, context)
    if named is not None:
        search.taken.insert(0, named)
    if config.methods is None:
        if named is None:  # the best head and the best small model: which of the two is faster depends on the text
            heads = itertools.chain(_own_layers(target, search), _bundled_heads(target), _heads(config, target, search))
            for kind in (heads, _small_models(target, search)):
                search.taken += itertools.islice(kind, 1)
        # Token Recycling learns in one place for all rows; on a CPU, where every packed token costs time, it drafts chains.
        special = {"token_recycling": {"matrix_per_sequence": False, "use_tree": target.device.type != "cpu"}}
        search.taken += [
            Candidate(_drafting(method=method, **special.get(method, {})), "needs no model") for method in LOOKUPS
        ]
    return search


def _named(config: AutoConfig, context: DrafterContext | None) -> Candidate | None:
    """The drafter that `model` or `generate(assistant_model=)` names."""
    if config.model is not None:
        return Candidate(_drafting(model=config.model), config.model, is_given=True)
    if context is not None and context.assistant_model is not None:
        return Candidate(_drafting(method="draft_model"), "assistant_model", is_given=True)
    return None


def _own_layers(target: PackedModel, search: Search) -> Iterator[Candidate]:
    """MTP layers in the files that the target was loaded from; only a note if the files cannot be read."""
    folder = folder_of(target.model)
    if folder is None or not any(folder.glob("*.safetensors")):
        return
    checkpoint = Checkpoint(folder, wanted=is_mtp_tensor(target.config.num_hidden_layers))
    try:
        names = checkpoint.names()
    except NoWeightsError:  # no MTP layers
        return
    except CheckpointError as error:
        search.notes.append(f"the target's own MTP layers: {error}")
        return
    if find_layout(names, target.config.num_hidden_layers) is not None:
        yield Candidate(_drafting(method="mtp", model=str(folder)), "the target's own MTP layers")


def _bundled_heads(target: PackedModel) -> Iterator[Candidate]:
    """Heads that come with this package, if the target does too."""
    folder, bundles = folder_of(target.model), bundled_folders()
    names = {name for name, place in bundles.items() if folder is not None and place.resolve() == folder.resolve()}
    heads = [head for head, place in sorted(bundles.items()) if names and names & set(hub.base_models(place))]
    for head in sorted(heads, key=lambda head: hub.rank(_method_of(bundles[head]))):
        yield Candidate(_drafting(model=head), f"the bundled {head}")


def _heads(config: AutoConfig, target: PackedModel, search: Search) -> Iterator[Candidate]:
    """Heads made for the target: in the local cache, then on the Hub."""
    target_id = hub.hub_id_of(target.model)
    if target_id is None:
        return
    published = {head.repo: head for head in hub.published_heads(target_id)}
    cached = []
    for repo, folder in hub.cached_models():
        if repo in published or target_id in hub.base_models(folder):
            try:
                cached.append((hub.rank(_method_of(folder)), repo, folder))
            except CheckpointError:  # another kind of model that was made from the target
                continue
    for _, repo, folder in sorted(cached):
        yield from _made(str(folder), f"{repo}, in the local cache", search)
    for head in hub.heads_on_hub(target_id, list(published.values()), search.notes):
        what = f"{head.repo} ({head.method}{head.about})"
        if head.gigabytes > config.max_download_gb:
            search.downloads.append(f"{what}: set max_download_gb")
        else:
            yield from _made(head.repo, f"{what}, from the Hub", search)


def _small_models(target: PackedModel, search: Search) -> Iterator[Candidate]:
    """Small models with the target's vocabulary, bundled or in the local cache."""
    folder = folder_of(target.model)
    if folder is None:
        return
    target_bytes = sum(p.numel() * p.element_size() for p in target.model.parameters())
    bundles = [(f"the bundled {name}", place) for name, place in sorted(bundled_folders().items())]
    cached = [(f"{repo}, in the local cache", other) for repo, other in hub.cached_models()]
    sized = []
    for where, other in [*bundles, *cached]:
        share = hub.weight_bytes(other) / target_bytes
        if not (0 < share <= SMALL_ENOUGH and hub.is_language_model(other)):
            continue
        if not hub.same_vocabulary(folder, other):
            # without a tokenizer it is most likely a head
            if where.endswith("cache") and (other / "tokenizer.json").is_file():
                search.notes.append(f"{where}: small enough, but it has another vocabulary")
        else:
            sized.append((abs(math.log(share / BEST_SHARE)), where, other))
    for _, where, other in sorted(sized):
        yield Candidate(_drafting(method="draft_model", model=str(other)), where)


def _method_of(folder: Path) -> str:
    return infer_format(Checkpoint(folder)).method


def _made(model: str, why: str, search: Search) -> Iterator[Candidate]:
    """The head as a candidate; only a note if it cannot be used after all."""
    try:
        yield Candidate(_drafting(model=model), why)
    except (ValueError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        search.notes.append(f"{why}: {reason[0]}")


def _drafting(**keys: Any) -> SpeculativeConfig:
    return parse_config({"num_speculative_tokens": "auto", **keys})
