"""Suffix decoding (Oliaro et al. 2024, "SuffixDecoding"), on arctic-inference's suffix trees."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..model.packed_model import PackedModel
from .base import CandidateGenerator, DrafterContext
from .registry import register


@dataclass
class SuffixConfig(SpeculativeConfig):
    """Suffix trees over the sequence's own text and over past outputs: drafts what usually followed, as long as the match
    is long and the counts are sure. Needs no model; adapts its draft length; remembers outputs between `generate()` calls."""

    name = "suffix"
    requires = ("pip install hf-specdec[suffix]",)

    suffix_decoding_max_tree_depth: int = field(
        default=24, metadata={"help": "match and draft length together, at most"}
    )
    suffix_decoding_max_cached_requests: int = field(
        default=10000, metadata={"help": "past outputs kept in the shared tree; 0: none, -1: all"}
    )
    suffix_decoding_max_spec_factor: float = field(
        default=1.0, metadata={"help": "draft at most factor × match length + offset tokens"}
    )
    suffix_decoding_max_spec_offset: float = field(
        default=0.0, metadata={"help": "see suffix_decoding_max_spec_factor"}
    )
    suffix_decoding_min_token_prob: float = field(
        default=0.1, metadata={"help": "stop where the estimated probability falls below"}
    )
    suffix_decoding_use_tree: bool = field(default=False, metadata={"help": "draft trees instead of chains"})

    def __post_init__(self) -> None:
        self.method = self.method or self.name  # for error messages
        self.read_auto()
        self.check_int("suffix_decoding_max_tree_depth", minimum=2, maximum=2**31 - 1)
        if self.num_speculative_tokens is None:
            self.num_speculative_tokens = self.suffix_decoding_max_tree_depth
        super().__post_init__()
        self.check_int("suffix_decoding_max_cached_requests", minimum=-1, maximum=2**31 - 1)
        self.check_number("suffix_decoding_max_spec_factor", minimum=0)
        self.check_number("suffix_decoding_max_spec_offset", minimum=-1e6)
        self.check_number("suffix_decoding_min_token_prob", minimum=0, maximum=1)
        self.check_bool("suffix_decoding_use_tree")

    def to_dict(self):
        """As in the base, without a draft length that follows from the tree depth."""
        out = super().to_dict()
        if self.num_speculative_tokens == self.suffix_decoding_max_tree_depth:
            out.pop("num_speculative_tokens", None)
        else:
            out["num_speculative_tokens"] = self.num_speculative_tokens
        return out


@register(SuffixConfig)
class SuffixGenerator(CandidateGenerator):
    """Drafts chains or trees from suffix trees; the shared tree outlives the calls that filled it."""

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
        self.running: dict[int, Sequence] = {}
        self.known: dict[int, int] = {}  # per running sequence, how many of its tokens are in the trees
        self.cache = SuffixDecodingCache(
            max_tree_depth=config.suffix_decoding_max_tree_depth,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
        )

    def start(self, seq: Sequence) -> None:
        """Build the sequence's own tree from its prompt."""
        tokens = np.asarray(seq.tokens, dtype=np.int32)  # first, since it may fail
        self.cache.start_request(seq.id, tokens[: seq.prompt_length])
        self.running[seq.id], self.known[seq.id] = seq, seq.prompt_length

    def _read_all(self) -> None:
        """Add to the trees what running sequences have written. This waits until a draft is asked for, since most steps of method "auto"
        ask for none."""
        for seq in self.running.values():
            self._read(seq)

    def _read(self, seq: Sequence) -> None:
        new = seq.tokens[self.known[seq.id] :]
        if new:
            self.cache.add_active_response(seq.id, np.asarray(new, dtype=np.int32))
            self.known[seq.id] += len(new)

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
        return self.cache.speculate(
            seq.id,
            np.asarray(text[-self.config.suffix_decoding_max_tree_depth :], dtype=np.int32),
            max_spec_tokens=limit,
            max_spec_factor=self.config.suffix_decoding_max_spec_factor,
            max_spec_offset=self.config.suffix_decoding_max_spec_offset,
            min_token_prob=self.config.suffix_decoding_min_token_prob,
            use_tree_spec=use_tree,
        )

    def draft_scores(self, trees: DraftTrees) -> list[float]:
        """The trees' own estimate of how many tokens of the last proposals will be accepted."""
        return self.scores if trees.num_nodes else [0.0] * len(trees.lengths)

    continues_drafts = True

    def continue_drafts(self, sequences: list[Sequence], drafts: list[list[int]], limits: list[int]) -> list[list[int]]:
        """The likeliest continuation of each draft, as chains."""
        depth = self.config.suffix_decoding_max_tree_depth
        self._read_all()
        return [
            self._speculate(seq, seq.tokens[-depth:] + draft, limit, use_tree=False).token_ids if limit > 0 else []
            for seq, draft, limit in zip(sequences, drafts, limits, strict=True)
        ]

    def stop(self, seq: Sequence) -> None:
        """Free the sequence's own tree; its output stays in the shared one."""
        self._read(seq)
        del self.running[seq.id], self.known[seq.id]
        self.cache.stop_request(seq.id)
