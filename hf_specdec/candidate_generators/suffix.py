"""Suffix decoding (Oliaro et al. 2024, "SuffixDecoding"), on arctic-inference's suffix trees."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..config import config_key
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..model.packed_model import PackedModel
from .base import CandidateGenerator, ContinuesDrafts, DrafterContext, KeepsTables, ReadsCorpora, ScoresDrafts
from .corpora import Corpora, CorpusConfig
from .lookup_cache import LookupCache, LookupCacheConfig, Spaces, State, ids_within
from .registry import register

_CORPUS = "corpus"  # the only request in the trees of a corpus, which is its prompt
AT_ONCE = 4  # waiting outputs that one proposal adds: each takes about 0.3 ms


@dataclass
class SuffixConfig(LookupCacheConfig, CorpusConfig):
    """Suffix trees over the text itself and over past outputs: drafts what usually followed. A long match and clear counts give a long
    draft. Needs no model; remembers outputs between `generate()` calls."""

    name = "suffix"
    requires = ("pip install hf-specdec[suffix]",)

    suffix_decoding_max_tree_depth: int = config_key(
        24, "most tokens of a match and its draft together", minimum=2, maximum=2**31 - 1
    )
    suffix_decoding_max_cached_requests: int = config_key(
        10000, "past outputs kept in the shared tree; 0: none, -1: all", minimum=-1, maximum=2**31 - 1
    )
    suffix_decoding_max_spec_factor: float = config_key(
        1.0, "draft at most factor × match length + offset tokens", minimum=0
    )
    suffix_decoding_max_spec_offset: float = config_key(0.0, "see suffix_decoding_max_spec_factor", minimum=-1e6)
    suffix_decoding_min_token_prob: float = config_key(
        0.1, "stop where the estimated probability falls below", minimum=0, maximum=1
    )
    suffix_decoding_use_tree: bool = config_key(False, "draft trees instead of chains")

    def __post_init__(self) -> None:
        self.check_keys()
        self.read_auto()
        if self.num_speculative_tokens is None:
            self.num_speculative_tokens = self.suffix_decoding_max_tree_depth
        super().__post_init__()

    @property
    def implied_length(self) -> int | None:
        return self.suffix_decoding_max_tree_depth


@dataclass(eq=False)
class _Trees:
    """A space's arctic-inference cache, `outputs` (int32 ids, oldest first) that a file is to keep, and their size in that file."""

    trees: Any
    outputs: deque[np.ndarray] = field(default_factory=deque)
    num_bytes: int = 0

    def add(self, output: np.ndarray) -> None:
        """Add an output to the shared tree, without the prompt that it followed."""
        request = object()  # an id that no other output has
        self.trees.start_request(request, output[:0])
        self.trees.add_active_response(request, output)
        self.trees.stop_request(request)

    def keep(self, output: np.ndarray, most: int) -> None:
        """Keep an output for the file, which holds at most `most` of them (-1: all)."""
        self.outputs.append(output)
        self.num_bytes += _size(output)
        while len(self.outputs) > most >= 0:
            self.forget_oldest()

    def forget_oldest(self) -> None:
        self.num_bytes -= _size(self.outputs.popleft())


def _size(output: np.ndarray) -> int:
    return output.nbytes + 4  # 4 bytes for its length


@register(SuffixConfig)
class SuffixGenerator(CandidateGenerator, ContinuesDrafts, ScoresDrafts, KeepsTables, ReadsCorpora):
    """Drafts chains or trees from suffix trees; each space's shared tree outlives the calls that filled it."""

    config: SuffixConfig

    def __init__(self, config: SuffixConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        try:
            from arctic_inference.suffix_decoding import SuffixDecodingCache
        except ImportError as error:
            raise ImportError(
                "The suffix method needs arctic-inference's suffix trees: pip install 'hf-specdec[suffix]' (a C++ compiler is needed)."
            ) from error
        self.scores: list[float] = []  # of the last proposal
        self.running: dict[int, tuple[Sequence, _Trees]] = {}
        self.known: dict[int, int] = {}  # per running sequence that the trees know, how many of its tokens are in them
        self.waiting: deque[tuple[_Trees, np.ndarray]] = deque()  # outputs of sequences for which no draft was asked
        depth, most = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_cached_requests
        self.spaces = Spaces(lambda shared: _Trees(SuffixDecodingCache(depth, most if shared else 0)))
        self.corpora = Corpora(lambda: _tree_of_corpus(SuffixDecodingCache(depth, 0)), _read_corpus, target.vocab_size)
        self.kept = LookupCache.of(config, target) if most else None
        if self.kept is not None:
            self.kept.follow(self, self._load, functools.partial(_state, self.spaces))

    def _load(self, state: State) -> None:
        """Build the trees from a file, newest outputs first within the bound; raises ValueError or KeyError if it holds something else."""
        assert self.kept is not None
        outputs = {}
        for space, stored in state.items():
            ids, lengths = ids_within(stored["tokens"], self.target.vocab_size), stored["lengths"]
            if ids.ndim != 1 or lengths.dtype.kind != "i" or (lengths < 1).any() or lengths.sum() != len(ids):
                raise ValueError("its texts do not have the lengths that it gives")
            outputs[space] = np.split(ids, lengths.cumsum()[:-1]) if len(lengths) else []
        most = self.config.suffix_decoding_max_cached_requests
        for space, texts in outputs.items():
            room, newest = self.kept.most_bytes // len(outputs), []
            for text in reversed(texts if most < 0 else texts[-most:]):
                room -= _size(text)
                if room < 0:
                    break
                newest.append(text)
            trees = self.spaces.shared[space] = self.spaces.make(True)
            for text in reversed(newest):
                trees.add(text)
                trees.keep(text, most)

    def start(self, seq: Sequence) -> None:
        self.running[seq.id] = seq, self.spaces.enter(seq)

    def _read_all(self) -> None:
        """Add to the trees what sequences have written: only when a draft is asked for, since most steps of method "auto" ask for none."""
        for _ in range(min(len(self.waiting), AT_ONCE)):
            trees, output = self.waiting.popleft()
            trees.add(output)
        for seq, _ in self.running.values():
            self._read(seq)

    def _read(self, seq: Sequence) -> None:
        tokens = np.asarray(seq.tokens[self.known.get(seq.id, 0) :], dtype=np.int32)
        trees = self.running[seq.id][1].trees
        if seq.id not in self.known:
            prompt, tokens = tokens[: seq.prompt_length], tokens[seq.prompt_length :]
            trees.start_request(seq.id, np.concatenate([np.asarray(seq.read_ids, dtype=np.int32), prompt]))
            self.known[seq.id] = len(prompt)
        if len(tokens):
            trees.add_active_response(seq.id, tokens)
            self.known[seq.id] += len(tokens)

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """The likeliest continuation of each row by the suffix trees; empty if nothing matches."""
        use_tree = self.config.suffix_decoding_use_tree
        tokens, parents, self.scores = [], [], []
        self._read_all()
        for seq, limit in zip(sequences, limits, strict=True):
            draft = self._speculate(seq, seq.tokens, limit, use_tree) if limit > 0 else None
            tokens.append(draft.token_ids if draft else [])
            parents.append(draft.parents if draft else [])
            self.scores.append(draft.score if draft else 0.0)
        return DraftTrees.from_lists(tokens, parents if use_tree else None, device=self.target.device)

    def _speculate(self, seq: Sequence, text: list[int], limit: int, use_tree: bool):
        options = {
            "context": np.asarray(text[-self.config.suffix_decoding_max_tree_depth :], dtype=np.int32),
            "max_spec_tokens": limit,
            "max_spec_factor": self.config.suffix_decoding_max_spec_factor,
            "max_spec_offset": self.config.suffix_decoding_max_spec_offset,
            "min_token_prob": self.config.suffix_decoding_min_token_prob,
            "use_tree_spec": use_tree,
        }
        draft = self.running[seq.id][1].trees.speculate(seq.id, **options)
        others = [trees.speculate(_CORPUS, **options) for trees in self.corpora.of(seq)]
        return max([draft, *others], key=lambda draft: draft.score)

    def draft_scores(self, trees: DraftTrees) -> list[float]:
        """The trees' own estimate of how many tokens of the last proposals will be accepted."""
        return self.scores if trees.num_nodes else [0.0] * len(trees.lengths)

    def continue_drafts(self, sequences: list[Sequence], drafts: list[list[int]], limits: list[int]) -> list[list[int]]:
        """The likeliest continuation of each draft, as chains."""
        depth = self.config.suffix_decoding_max_tree_depth
        self._read_all()
        return [
            self._speculate(seq, seq.tokens[-depth:] + draft, limit, use_tree=False).token_ids if limit > 0 else []
            for seq, draft, limit in zip(sequences, drafts, limits, strict=True)
        ]

    def stop(self, seq: Sequence) -> None:
        """Free the sequence's own tree; its output stays in its space's, unless the sequence is not shared."""
        known = self.known.get(seq.id, seq.prompt_length)
        is_read = seq.id in self.known and known - seq.prompt_length >= len(seq.tokens) - known
        if is_read:
            self._read(seq)
        _, trees = self.running.pop(seq.id)
        self.spaces.leave(seq)
        output = np.asarray(seq.tokens[seq.prompt_length :], dtype=np.int32)
        most = self.config.suffix_decoding_max_cached_requests
        if self.known.pop(seq.id, None) is not None:
            trees.trees.stop_request(seq.id)
            # The trees know the smaller part of the output: they drop it, and the next draft adds the whole output.
            if not is_read and seq.id in trees.trees.cached_requests:
                trees.trees.evict_cached_response(seq.id)
        if not is_read and seq.is_shared and len(output) and most:
            self.waiting.append((trees, output))
            if len(self.waiting) > most > 0:
                self.waiting.popleft()
        if self.kept is not None and seq.is_shared and seq.num_generated:
            trees.keep(output, most)
            shared = self.spaces.shared.values()
            while sum(space.num_bytes for space in shared) > self.kept.most_bytes:
                max(shared, key=lambda space: space.num_bytes).forget_oldest()
            self.kept.text_ended()


def _tree_of_corpus(trees: Any) -> Any:
    trees.start_request(_CORPUS, [])
    return trees


def _read_corpus(trees: Any, ids: np.ndarray) -> None:
    trees.add_active_response(_CORPUS, ids)


def _state(spaces: Spaces[_Trees]) -> State:
    return {
        space: {
            "tokens": np.concatenate([*trees.outputs, np.empty(0, dtype=np.int32)]),
            "lengths": np.array([len(output) for output in trees.outputs], dtype=np.int32),
        }
        for space, trees in spaces.shared.items()
    }
