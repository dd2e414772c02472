"""Lookahead decoding (Fu et al. 2024): a window of Jacobi iterations in every step fills a pool of n-grams to verify."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch

from ..config import MOST_DRAFT_NODES, config_key
from ..core.draft_trees import DraftTrees
from ..core.outcome import StepOutcome
from ..core.sequence import Sequence
from ..kernels.verification import greedy_tokens
from ..model.packed_model import PackedModel
from .base import CandidateGenerator, DrafterContext, KeepsTables
from .lookup_cache import LookupCache, LookupCacheConfig, Spaces, State, ids_within
from .registry import register


@dataclass
class LookaheadConfig(LookupCacheConfig):
    """Every step verifies known n-grams that begin with the last token, and refines a window of guesses about the tokens to
    come (Jacobi iteration). The window's columns become new n-grams. Needs no model."""

    name = "lookahead"
    can_be_combined = False  # its window must be verified whole

    window_size: int = config_key(7, "columns of the window (W): how far ahead it guesses", minimum=1)
    ngram_size: int = config_key(5, "tokens per n-gram (N, the paper's level): the window has N - 1 levels", minimum=2)
    guess_set_size: int = config_key(
        7, "n-grams kept per first token, and verified per step (G); the least recent go first", minimum=1
    )
    pool_from_prompt: bool = config_key(
        True, "also put the n-grams of the text itself, prompt and answer, into the pool"
    )
    share_pool: bool = config_key(
        True,
        "texts of a space (an API key, or a value of SamplingParams(space=)) share an n-gram pool that outlives calls; false: none do",
    )

    def __post_init__(self) -> None:
        self.check_keys()
        self.read_auto()
        if self.num_speculative_tokens is None and self.num_speculative_tokens_per_batch_size is None:
            self.num_speculative_tokens = self.depth
        super().__post_init__()
        if (self.num_speculative_tokens or 0) > self.depth:
            raise self.fail(
                "num_speculative_tokens",
                f"is {self.num_speculative_tokens}, but window_size = {self.window_size} and ngram_size = {self.ngram_size} "
                f"draft {self.depth} tokens deep at most.",
            )
        if self.num_nodes > MOST_DRAFT_NODES:
            raise self.fail(
                "window_size",
                f"= {self.window_size}, ngram_size = {self.ngram_size} and guess_set_size = {self.guess_set_size} make "
                f"{self.num_nodes} nodes a step; at most {MOST_DRAFT_NODES} are verified: lower them.",
            )

    @property
    def num_nodes(self) -> int:
        """The nodes of all n-grams and of the window at its largest, which can be before it is full."""
        width, levels = self.window_size, self.ngram_size - 1
        filled = min(max((width + levels) // 2, 1), levels)  # (width + levels - filled) * filled is largest there
        return (width + levels - filled) * filled - 1 + self.guess_set_size * levels

    @property
    def depth(self) -> int:
        """Nodes on the longest path: the window's last column, or an n-gram if the window has one column."""
        return self.ngram_size - 2 + max(self.window_size - 1, 1)

    @property
    def implied_length(self) -> int | None:
        return self.depth


class NGramPool:
    """For each token, the last `size` distinct n-grams that begin with it, least recent first."""

    def __init__(self, size: int):
        self.size = size
        self.followers: dict[int, dict[tuple[int, ...], None]] = {}  # a dict keeps the order of insertion

    def add(self, ngram: tuple[int, ...]) -> None:
        """Add an n-gram, or make it the most recent of its first token."""
        followers = self.followers.setdefault(ngram[0], {})
        followers.pop(ngram[1:], None)
        followers[ngram[1:]] = None
        if len(followers) > self.size:
            del followers[next(iter(followers))]

    def add_text(self, tokens: list[int], n: int) -> None:
        """Add every run of `n` ids."""
        for i in range(len(tokens) - n + 1):
            self.add(tuple(tokens[i : i + n]))

    def starting_with(self, token: int) -> list[tuple[int, ...]]:
        """The continuations of `token`, most recent first."""
        return list(reversed(self.followers.get(token, ())))


class Window:
    """The Jacobi window: `tokens[l, c]`, int64 [L, w], guesses the token l + c places after the last one.

    Level 0 starts with the last token. The tokens of a column above level 0 follow each other, and were computed after level
    0 up to that column. The window starts as one level of random tokens of the prompt and gains a level per step, each one
    column narrower, until it has N - 1 levels of W columns; then every step drops the oldest level.
    """

    def __init__(self, config: LookaheadConfig, seq: Sequence):
        self.num_levels = config.ngram_size - 1
        self.random = np.random.default_rng(seq.seed & (2**63 - 1))
        self.prompt = np.asarray(seq.tokens, dtype=np.int64)
        self.ends = np.fromiter(seq.eos_token_ids, dtype=np.int64)
        self.tokens = self._prompt_tokens(config.window_size + config.ngram_size - 2)[None]

    @property
    def is_full(self) -> bool:
        """Whether all levels are there: a column and its next output then make an n-gram."""
        return len(self.tokens) == self.num_levels

    def num_columns(self, limit: int) -> int:
        """The number of columns whose nodes are at most `limit` deep."""
        return max(0, min(self.tokens.shape[1], limit - len(self.tokens) + 2))

    def advance(self, outputs: np.ndarray) -> None:
        """Add the next level: `outputs` int64 [n] are the target's tokens after the last level's first n columns."""
        level = self._prompt_tokens(self.tokens.shape[1])
        kept = ~np.isin(outputs, self.ends)  # end tokens are not kept: nothing follows them
        level[: len(outputs)][kept] = outputs[kept]
        joined = np.concatenate([self.tokens, level[None]])
        self.tokens = joined[1:] if self.is_full else joined[:, 1:]

    def _prompt_tokens(self, count: int) -> np.ndarray:
        return self.prompt[self.random.integers(len(self.prompt), size=count)]


@lru_cache(maxsize=256)
def window_parents(num_levels: int, num_columns: int) -> list[int]:
    """Parents of the window's nodes, level by level: level 0 is a chain, a cell above is a child of the one below (the paper's mask)."""
    cells = np.arange(1, num_levels * num_columns)
    return (np.where(cells < num_columns, cells - 1, cells - num_columns) - 1).tolist()


@dataclass
class _Row:
    pool: NGramPool
    window: Window
    num_guesses: int = 0  # nodes of n-grams in the last draft, before the window's
    num_columns: int = 0  # columns of the window in the last draft


@register(LookaheadConfig)
class LookaheadGenerator(CandidateGenerator, KeepsTables):
    """Drafts one tree per row: the pool's n-grams after the last token, then the window, whose outputs come from the same forward."""

    config: LookaheadConfig

    def __init__(self, config: LookaheadConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        self.chains_only = context is not None and context.chains_only
        # Without a window, which is a tree, the text is the only source of n-grams.
        self.reads_text = config.pool_from_prompt or self.chains_only
        self.rows: dict[int, _Row] = {}
        size = config.guess_set_size
        # at most `guess_set_size` n-grams per token of the vocabulary
        self.spaces = Spaces(lambda shared: NGramPool(size))
        self.kept = LookupCache.of(config, target) if config.share_pool else None
        if self.kept is not None:
            self.kept.follow(self, self._load, partial(_state, self.spaces, config.ngram_size, self.kept.most_bytes))

    def _load(self, state: State) -> None:
        """Fill the pools from a file; raises ValueError or KeyError if it holds something else, such as n-grams of another length."""
        n = self.config.ngram_size
        ngrams = {space: ids_within(tensors["ngrams"], self.target.vocab_size) for space, tensors in state.items()}
        if any(stored.ndim != 2 or stored.shape[1] != n for stored in ngrams.values()):
            raise ValueError(f"it has no n-grams of {n} tokens")
        for space, stored in ngrams.items():
            pool = self.spaces.shared[space] = self.spaces.make(True)
            for ngram in stored.tolist():
                pool.add(tuple(ngram))

    @property
    def max_draft_nodes(self) -> int:
        return self.config.num_nodes

    def start(self, seq: Sequence) -> None:
        pool = self.spaces.enter(seq) if self.config.share_pool else NGramPool(self.config.guess_set_size)
        self.rows[seq.id] = row = _Row(pool, Window(self.config, seq))
        if self.reads_text:
            row.pool.add_text(seq.tokens, self.config.ngram_size)

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        drafts = [self._draft(seq, limit) for seq, limit in zip(sequences, limits, strict=True)]
        return DraftTrees.from_lists([d[0] for d in drafts], [d[1] for d in drafts], device=self.target.device)

    def _draft(self, seq: Sequence, limit: int) -> tuple[list[int], list[int]]:
        row = self.rows[seq.id]
        tokens, parents = merged(row.pool.starting_with(seq.tokens[-1]), limit) if limit else ([], [])
        row.num_guesses = first = len(tokens)
        row.num_columns = row.window.num_columns(limit) if limit and not self.chains_only else 0
        if row.num_columns:
            window = row.window.tokens
            window[0, 0] = seq.tokens[-1]
            tokens += window[:, : row.num_columns].ravel()[1:].tolist()
            parents += [first + p if p >= 0 else -1 for p in window_parents(len(window), row.num_columns)]
        return tokens, parents

    def observe(self, outcome: StepOutcome) -> None:
        """Advance the windows by the outputs of their last levels; columns of a full window become n-grams."""
        self._advance(outcome)
        n = self.config.ngram_size
        for seq, new in zip(outcome.sequences, outcome.new_tokens, strict=True):
            row = self.rows[seq.id]
            row.num_guesses = row.num_columns = 0  # the next step may have no proposal
            if self.reads_text:
                row.pool.add_text(seq.tokens[-len(new) - n + 1 :], n)

    def _advance(self, outcome: StepOutcome) -> None:
        rows, wanted, counts = [], [], outcome.trees.lengths
        roots = outcome.root_rows or [0, *np.cumsum(np.add(counts, 1))][: len(counts)]
        for seq, root, count in zip(outcome.sequences, roots, counts, strict=True):
            row = self.rows[seq.id]
            cells = row.num_columns * len(row.window.tokens)
            # not if the tree was cut for lack of KV blocks
            if row.num_columns and count == row.num_guesses + cells - 1:
                rows.append(row)
                last_level = np.arange(cells - row.num_columns, cells)  # cell 0 is the root
                wanted.append(root + np.where(last_level > 0, row.num_guesses + last_level, 0))
        if not rows:
            return
        assert outcome.output is not None
        logits = outcome.output.logits
        index = torch.from_numpy(np.concatenate(wanted)).to(logits.device)
        outputs = greedy_tokens(logits.index_select(0, index)).cpu().numpy()
        for row, level in zip(rows, np.split(outputs, np.cumsum([row.num_columns for row in rows])[:-1]), strict=True):
            if row.window.is_full:
                for ngram in np.concatenate([row.window.tokens[:, : len(level)], level[None]]).T.tolist():
                    row.pool.add(tuple(ngram))
            row.window.advance(level)

    def stop(self, seq: Sequence) -> None:
        del self.rows[seq.id]
        self.spaces.leave(seq)
        if self.kept is not None and seq.is_shared:
            self.kept.text_ended()


def _state(spaces: Spaces[NGramPool], n: int, most_bytes: int) -> State:
    """The n-grams of each space, as a file keeps them. If there is not room for all: those whose first token was added last."""
    state, room = {}, most_bytes // max(len(spaces.shared), 1) // (4 * n)
    for space, pool in spaces.shared.items():
        ngrams = [(first, *rest) for first, followers in pool.followers.items() for rest in followers]
        newest = ngrams[max(len(ngrams) - room, 0) :]
        state[space] = {"ngrams": np.array(newest, dtype=np.int32).reshape(len(newest), n)}
    return state


def merged(ngrams: list[tuple[int, ...]], depth: int) -> tuple[list[int], list[int]]:
    """(tokens, parents) of a tree of n-grams, cut to `depth`, with common prefixes merged."""
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, int], int] = {}
    for ngram in ngrams:
        parent = -1
        for token in ngram[:depth]:
            node = nodes.setdefault((parent, token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(parent)
            parent = node
    return tokens, parents
