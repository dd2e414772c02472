"""Token Recycling (Luo et al. 2024): the target's own second-best tokens, remembered per token, make the next draft."""

from __future__ import annotations

import functools
import itertools
import logging
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..config import config_key
from ..core.draft_trees import DraftTrees
from ..core.outcome import StepOutcome
from ..core.output import Taps
from ..core.sequence import Sequence
from ..kernels.transfer import upload
from ..model.packed_model import PackedModel
from .base import CandidateGenerator, DrafterContext, KeepsTables, MayMissSteps
from .growing.tree_shapes import PUBLISHED_TREES, TreeTemplate, read_token_tree
from .lookup_cache import LookupCache, LookupCacheConfig, Spaces, State, ids_within
from .registry import register

logger = logging.getLogger(__name__)

PROMPT_SOURCES = ("logits", "text")
_GROUP = 128


@dataclass
class TokenRecyclingConfig(LookupCacheConfig):
    """Remembers, for every token, the best successors the target last gave it, and drafts a fixed tree by looking them up.
    Needs no model; learns from every token it verifies, accepted or not, and remembers between `generate()` calls."""

    name = "token_recycling"

    use_tree: bool = config_key(True, "draft a tree; false: the chain of best successors")
    speculative_token_tree: list[list[int]] | str | None = config_key(
        None, "the tree, as in the keys of trees; default: the paper's 80 nodes"
    )
    num_successors: int = config_key(8, "successors remembered per token", minimum=1)
    matrix_per_sequence: bool = config_key(
        True,
        "each running sequence goes on with its own copy of the table of successors (4 bytes x vocabulary x num_successors each); "
        "false: all write into one",
    )
    recycle_prompt: str | None = config_key(
        "text",
        "what to learn from prompts: 'text', which tokens follow which; 'logits', the best successors of every "
        "token (computes and keeps logits of whole prompts); null: nothing",
        choices=PROMPT_SOURCES,
    )

    def __post_init__(self) -> None:
        self.check_keys()
        if self.speculative_token_tree is not None and not self.use_tree:
            raise self.fail("speculative_token_tree", "cannot be combined with use_tree = false, which drafts a chain.")
        self.read_auto()
        if self.use_tree and self.num_speculative_tokens is None and self.num_speculative_tokens_per_batch_size is None:
            self.num_speculative_tokens = self.depth
        super().__post_init__()
        if not self.use_tree:
            return
        if (self.num_speculative_tokens or 0) > self.depth:
            raise self.fail(
                "num_speculative_tokens", f"is {self.num_speculative_tokens}, but the tree is {self.depth} tokens deep."
            )
        highest = max(max(path) for path in self.paths)
        if highest >= self.num_successors:
            raise self.fail(
                "speculative_token_tree",
                f"takes the successor of rank {highest}, but num_successors is {self.num_successors} (ranks from 0).",
            )

    @property
    def paths(self) -> list[list[int]]:
        """The tree as child-rank paths."""
        if self.speculative_token_tree is not None:
            return read_token_tree(self, self.speculative_token_tree)
        # With fewer successors: the part of the paper's tree that uses no higher rank.
        return [path for path in PUBLISHED_TREES["token_recycling_80"] if max(path) < self.num_successors]

    @property
    def depth(self) -> int:
        """Nodes on the tree's longest path."""
        return max(map(len, self.paths))

    @property
    def implied_length(self) -> int | None:
        return self.depth if self.use_tree else super().implied_length


class SuccessorMatrices:
    """The best k successors last seen of each of V tokens: int32 [S, V + 1, k] on the target's device.

    Some matrices are shared by the texts of a space. The others are copies of these that running sequences continue with, or belong to
    a text that shares nothing. The id `V` means "unknown": rows not yet written hold it, and so does row V itself.
    """

    def __init__(self, vocab_size: int, k: int, device: torch.device | str):
        self.nothing, self.k = vocab_size, k
        self.free: list[int] = []
        self.rows = torch.empty(0, vocab_size + 1, k, dtype=torch.int32, device=device)
        self.resize(1)

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices and of what writing needs."""
        return self.rows.nbytes + self._latest.nbytes

    def resize(self, count: int) -> None:
        """Change the number of matrices. Matrices that are removed must be free; new ones are."""
        old, self.rows = self.rows, self.rows.new_full((count, *self.rows.shape[1:]), self.nothing)
        self.rows[: len(old)] = old[:count]
        self.free = [matrix for matrix in self.free if matrix < count] + list(range(len(old), count))
        self._latest = torch.zeros(count * (self.nothing + 1), dtype=torch.int32, device=old.device)

    def keep(self, matrices: list[int]) -> None:
        """Remove all but these, which get the numbers 0, 1, .. in this order."""
        if matrices == list(range(len(self.rows))):
            return  # those are all
        if matrices != list(range(len(matrices))):
            self.rows = self.rows[matrices]
        self.free.clear()
        self.resize(len(matrices))

    def new(self) -> int:
        """Take a matrix in which nothing is known; returns its number."""
        matrix = self._taken()
        self.rows[matrix] = self.nothing
        return matrix

    def copy(self, matrix: int = 0) -> int:
        """Take a matrix with the content of this one; returns its number."""
        copy = self._taken()
        self.rows[copy] = self.rows[matrix]
        return copy

    def _taken(self) -> int:
        if not self.free:
            self.resize(2 * len(self.rows))
        return self.free.pop()

    def write(self, matrices: torch.Tensor | int, tokens: torch.Tensor, successors: torch.Tensor) -> None:
        """Set the rows of `tokens` int64 [n], each in its matrix, to `successors` [n, k]; of a row set twice, the last value stays."""
        rows = tokens + matrices * (self.nothing + 1)
        order = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        latest = self._latest.scatter_reduce_(0, rows, order, "amax", include_self=False).index_select(0, rows)
        self.rows.view(-1, self.k)[rows] = successors.index_select(0, latest).to(self.rows.dtype)

    def move_to_front(self, matrix: int, tokens: torch.Tensor, followers: torch.Tensor) -> None:
        """Make `followers` [n] the best successors of `tokens` [n]; the other successors keep their order."""
        known = self.rows[matrix].index_select(0, tokens)
        joined = torch.cat([followers[:, None].to(known.dtype), known], dim=1)
        repeated = torch.cat([torch.zeros_like(followers, dtype=torch.bool)[:, None], known == joined[:, :1]], dim=1)
        order = repeated.to(torch.int8).argsort(dim=1, stable=True)
        self.write(matrix, tokens, joined.gather(1, order)[:, : self.k])

    def follow(self, matrices: torch.Tensor, tokens: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """The successors of `tokens` [B, n] with `ranks` [n] in matrices [B, 1]: int64 [B, n]."""
        places = (matrices * (self.nothing + 1) + tokens) * self.k + ranks
        return self.rows.view(-1).index_select(0, places.view(-1)).view(tokens.shape).long()


@register(TokenRecyclingConfig)
class TokenRecyclingGenerator(CandidateGenerator, KeepsTables, MayMissSteps):
    """Fills the tree depth by depth, all rows at once, and stores the target's best successors of every verified token."""

    config: TokenRecyclingConfig

    def __init__(self, config: TokenRecyclingConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        self.chains_only = context is not None and context.chains_only
        if config.num_successors > target.vocab_size:
            raise config.fail("num_successors", f"is more than the target's {target.vocab_size} tokens.")
        self.taps = Taps(logits=config.recycle_prompt == "logits")
        paths = config.paths if config.use_tree else [[0] * config.longest_draft]
        self.tree = TreeTemplate.from_paths(path[: config.num_speculative_tokens] for path in paths)
        self.matrices = SuccessorMatrices(target.vocab_size, config.num_successors, target.device)
        self.matrix_of: dict[int, int] = {}  # sequence id -> its matrix
        matrices = self.matrices
        self.spaces: Spaces[int] = Spaces(lambda shared: matrices.new(), lambda matrix: matrices.free.append(matrix))
        size = f"{target.vocab_size} x {config.num_successors} successors, {self.matrices.num_bytes / 1e6:.1f} MB"
        whom = " for all and for each running sequence" if config.matrix_per_sequence else ""
        logger.info("Token Recycling keeps %s%s on %s.", size, whom, target.device)
        self.kept = LookupCache.of(config, target)
        if self.kept is not None:
            self.kept.follow(
                self, self._load, functools.partial(_state, self.matrices, self.spaces, self.kept.most_bytes)
            )

    # ---- from process to process ------------------------------------------------------------------------------------

    def _load(self, state: State) -> None:
        """Fill the matrices from a file, with the best of its successors; raises ValueError or KeyError if it holds something else."""
        nothing, k = self.matrices.nothing, self.matrices.k
        checked = {}
        for space, stored in state.items():
            tokens, successors = ids_within(stored["tokens"], nothing), ids_within(stored["successors"], nothing + 1)
            if tokens.ndim != 1 or successors.ndim != 2 or len(tokens) != len(successors):
                raise ValueError("its rows have another shape")
            checked[space] = tokens, successors[:, :k]
        for space, (tokens, successors) in checked.items():
            matrix = self.spaces.shared.pop(space) if space in self.spaces.shared else self.matrices.new()
            self.spaces.shared[space] = matrix
            rows = self.matrices.rows[matrix]
            rows[torch.from_numpy(tokens).to(rows.device).long(), : successors.shape[1]] = torch.from_numpy(
                successors
            ).to(rows.device)

    # ---- memory -----------------------------------------------------------------------------------------------------

    @property
    def max_draft_nodes(self) -> int:
        return len(self.tree.parents)

    def allocate(self, num_tokens: int, num_sequences: int, block_size: int) -> None:
        if self.config.matrix_per_sequence:
            self.release()
            self.matrices.resize(len(self.spaces.shared) + num_sequences)

    def release(self) -> None:
        self.matrices.keep(list(self.spaces.shared.values()))
        self.spaces.shared = {space: matrix for matrix, space in enumerate(self.spaces.shared)}

    def evict(self, seq: Sequence) -> None:
        """Free the sequence's matrix; if it goes on, a new one is filled from its text."""
        matrix = self.matrix_of.pop(seq.id, None)
        if matrix is not None and matrix != self.spaces.enter(seq):
            self.matrices.free.append(matrix)

    def stop(self, seq: Sequence) -> None:
        """Free the sequence's matrix; that of its space has learned the same, unless the sequence is not shared."""
        self.evict(seq)
        self.spaces.leave(seq)
        if self.kept is not None and seq.is_shared:
            self.kept.text_ended()

    def _matrices_of(self, sequences: list[Sequence]) -> list[int]:
        """The matrix number of each sequence. Reads the text of new sequences."""
        unread: dict[int, list[list[int]]] = {}
        for seq in sequences:
            if seq.id not in self.matrix_of:
                shared = self.spaces.enter(seq)
                matrix = shared
                if self.config.matrix_per_sequence and seq.is_shared:
                    self._read(unread)  # the copy knows them, too
                    unread, matrix = {}, self.matrices.copy(shared)
                self.matrix_of[seq.id] = matrix
                if self.config.recycle_prompt == "text":
                    for target in {shared, matrix}:
                        unread.setdefault(target, []).append(seq.tokens)
        self._read(unread)
        return [self.matrix_of[seq.id] for seq in sequences]

    # ---- drafting ---------------------------------------------------------------------------------------------------

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """The tree filled from each row's last token, without unknown nodes and nodes beyond the row's limit."""
        depth = min(max(limits, default=0), self.tree.depth)
        if depth == 0:
            return DraftTrees.empty(len(sequences), self.target.device)
        starts = list(zip(self._matrices_of(sequences), (seq.tokens[-1] for seq in sequences), strict=True))
        device = self.matrices.rows.device
        matrices, roots = torch.tensor(starts, device=device).split(1, dim=1)
        filled = roots.new_empty(len(starts), self.tree.level_ends[depth - 1])
        for level in self.tree.levels_on(device)[:depth]:
            above = filled.index_select(1, level.parents) if level.nodes.start else roots.expand(-1, len(level.ranks))
            filled[:, level.nodes] = self.matrices.follow(matrices, above, level.ranks)
        tokens = filled.cpu().numpy()  # the only transfer: the number of nodes is needed
        known = tokens != self.matrices.nothing
        wanted = self.tree.depths[: tokens.shape[1]] <= np.asarray(limits)[:, None]
        if self.chains_only:
            wanted &= self.tree.on_first_path[: tokens.shape[1]]
        keep, (rows, count) = known & wanted, tokens.shape
        parents = None if self.tree.is_chain else np.tile(self.tree.parents[:count], (rows, 1))
        trees = DraftTrees(torch.from_numpy(np.where(keep, tokens, 0)), [count] * rows, parents).kept(keep)
        return replace(trees, tokens=trees.tokens.to(self.target.device))

    # ---- learning ---------------------------------------------------------------------------------------------------

    def observe(self, outcome: StepOutcome) -> None:
        """Store the best successors of every token that was fed, from its logits; without logits, from the text."""
        output = outcome.output
        if output is not None and output.all_logits is not None and output.input_ids is not None and self.taps.logits:
            sequences, rows, counts = _fed_tokens(outcome)
            tokens, logits = output.input_ids, output.all_logits
            if len(rows) < len(tokens):  # some rows have left
                index = upload(rows, logits.device)
                tokens, logits = tokens.index_select(0, index), logits.index_select(0, index)
            self._recycle(sequences, counts, tokens, logits)
        elif output is not None and output.logits.numel() and outcome.sequences:
            counts, logits = np.asarray(outcome.trees.lengths) + 1, output.logits
            if counts.sum() < len(logits):  # some rows have left
                assert outcome.root_rows is not None
                rows = [np.arange(root, root + count) for root, count in zip(outcome.root_rows, counts, strict=True)]
                logits = logits.index_select(0, upload(np.concatenate(rows), logits.device))
            self._recycle(outcome.sequences, counts, _verified_tokens(outcome), logits)
        else:
            unread: dict[int, list[list[int]]] = {}
            for seq, new in zip(outcome.sequences, outcome.new_tokens, strict=True):
                for matrix in {*self._matrices_of([seq]), self.spaces.enter(seq)}:
                    unread.setdefault(matrix, []).append(seq.tokens[-len(new) - 1 :])
            self._read(unread)

    def _recycle(
        self, sequences: list[Sequence], counts: np.ndarray, tokens: torch.Tensor, logits: torch.Tensor
    ) -> None:
        """Store the best successors of `tokens` [n] from logits [n, V]; `counts` are the tokens of each sequence, in order."""
        device = self.matrices.rows.device
        tokens, best = tokens.to(device), best_tokens(logits, self.config.num_successors).to(device)
        copies, shared = self._matrices_of(sequences), [self.spaces.enter(seq) for seq in sequences]
        for matrices in (copies, shared) if copies != shared else (shared,):
            one = len(set(matrices)) == 1
            places = matrices[0] if one else torch.from_numpy(np.repeat(matrices, counts)).to(device)
            self.matrices.write(places, tokens, best)

    def _read(self, unread: dict[int, list[list[int]]]) -> None:
        """Make the tokens that follow a token in the texts of a matrix its best successors, the latest first."""
        for matrix, texts in unread.items():
            followers: dict[int, dict[int, None]] = {}  # a dict keeps the order of insertion
            for token, follower in itertools.chain.from_iterable(map(itertools.pairwise, texts)):
                after = followers.setdefault(token, {})
                after.pop(follower, None)
                after[follower] = None
            recent = {token: list(after)[-self.config.num_successors :] for token, after in followers.items()}
            for age in range(max(map(len, recent.values()), default=0)):
                pairs = [(token, after[age]) for token, after in recent.items() if len(after) > age]
                tokens, newest = torch.tensor(pairs, device=self.matrices.rows.device).unbind(1)
                self.matrices.move_to_front(matrix, tokens, newest)


def _state(matrices: SuccessorMatrices, spaces: Spaces[int], most_bytes: int) -> State:
    """The known rows of each space's matrix; of too many, those of the lowest ids, usually the most frequent tokens."""
    state = {}
    room = most_bytes // max(len(spaces.shared), 1) // (4 + 4 * matrices.k)
    for space, matrix in spaces.shared.items():
        rows = matrices.rows[matrix, :-1]
        known = (rows[:, 0] != matrices.nothing).nonzero().flatten()[:room]
        known_rows = {"tokens": known.to(torch.int32), "successors": rows[known]}
        state[space] = {name: tensor.cpu().numpy() for name, tensor in known_rows.items()}
    return state


def best_tokens(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k largest of V logits, best first: int64 [R, k] from [R, V].

    The k largest are in the k groups with the largest maxima, so one pass over the logits is enough.
    """
    num_rows, vocab_size = logits.shape
    num_groups = vocab_size // _GROUP
    if num_groups <= k:
        return logits.topk(k, dim=1).indices
    grouped = num_groups * _GROUP
    groups = logits[:, :grouped].view(num_rows, num_groups, _GROUP).amax(2).topk(k, dim=1).indices
    columns = groups[:, :, None] * _GROUP + torch.arange(_GROUP, device=logits.device)
    rest = torch.arange(grouped, vocab_size, device=logits.device).expand(num_rows, -1)
    columns = torch.cat([columns.flatten(1), rest], dim=1)
    return columns.gather(1, logits.gather(1, columns).topk(k, dim=1).indices)


def _fed_tokens(outcome: StepOutcome) -> tuple[list[Sequence], np.ndarray, np.ndarray]:
    """The sequences of a forward, the indices of their fed tokens (drafts included) in its output, and the counts per sequence."""
    assert outcome.starts is not None and outcome.chunks is not None and outcome.num_own is not None
    drafted = {seq.id: count for seq, count in zip(outcome.sequences, outcome.trees.lengths, strict=True)}
    sequences = [seq for seq, _ in outcome.chunks]
    counts = np.array(
        [num_own + drafted.get(seq.id, 0) for seq, num_own in zip(sequences, outcome.num_own, strict=True)]
    )
    rows = [np.arange(start, start + count) for start, count in zip(outcome.starts, counts, strict=True)]
    return sequences, np.concatenate(rows), counts


def _verified_tokens(outcome: StepOutcome) -> torch.Tensor:
    """The tokens that `outcome.output.logits` follow: for each row the token before the draft, then its nodes."""
    trees = outcome.trees
    roots = [seq.tokens[-len(new) - 1] for seq, new in zip(outcome.sequences, outcome.new_tokens, strict=True)]
    device = trees.tokens.device
    if not any(trees.lengths):
        return torch.tensor(roots, device=device)
    tokens = torch.cat([torch.tensor(roots, device=device)[:, None], trees.tokens], dim=1)
    fed = np.concatenate([np.ones((len(roots), 1), dtype=bool), trees.valid], axis=1)
    return tokens.view(-1).index_select(0, torch.from_numpy(np.flatnonzero(fed)).to(device))
