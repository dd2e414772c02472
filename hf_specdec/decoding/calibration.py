"""Measures how often a drafter is right at each depth and rank, and builds the best static tree from it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ..candidate_generators.growing.grower import GrowsDrafts
from ..candidate_generators.growing.tree_growth import DraftLevel
from ..candidate_generators.growing.tree_shapes import TreeTemplate
from ..core.sequence import Sequence
from ..model.architectures import check_length
from .decoder import SpeculativeDecoder


def measure_accuracies(
    decoder: SpeculativeDecoder,
    prompts: list[list[int]],
    max_new_tokens: int = 128,
    num_ranks: int = 10,
    eos_token_ids: frozenset[int] = frozenset(),
    batch_size: int = 8,
) -> np.ndarray:
    """How often the drafter's token of each rank is right, on the target's own greedy continuations.

    At every position of a continuation the drafter drafts as in decoding but follows the true tokens: at each depth it predicts
    the next token, given that all tokens before were right (Cai et al. 2024, "Medusa", section 2.3.3).

    Args:
        decoder: its drafter must grow drafts depth by depth; no sequence may be running.
        prompts: token ids, none empty.
        num_ranks: how many of the drafter's best tokens to count.

    Returns: float64 [depths, num_ranks]; 0 at depths that no continuation reached.

    Raises:
        ValueError: the drafter is of another kind, or its tokens are not the target's.
    """
    generator = decoder.generator
    if not isinstance(generator, GrowsDrafts) or not generator.vocabulary.in_target_vocabulary:
        raise ValueError(
            f"Trees for method {decoder.config.method!r} cannot be calibrated: it does not rank the target's tokens depth by "
            "depth, as draft models and heads with the target's tokenizer do."
        )
    counts = _Counts(generator, num_ranks)
    for batch, texts in _continued(decoder, prompts, max_new_tokens, eos_token_ids, batch_size):
        _run(decoder, batch, list(map(len, texts)), frozenset(), texts, counts)
    return counts.hits / np.maximum(counts.tried, 1)[:, None]


def written_ids(
    decoder: SpeculativeDecoder, prompts: list[list[int]], max_new_tokens: int, eos_token_ids: frozenset[int], batch_size: int
) -> list[list[int]]:  # fmt: skip
    """What the target writes after the prompts, greedily: ids, without the prompts'. Args: see `measure_accuracies`."""
    runs = _continued(decoder, prompts, max_new_tokens, eos_token_ids, batch_size)
    return [text[len(prompt) :] for run in runs for prompt, text in zip(*run, strict=True)]


def _continued(
    decoder: SpeculativeDecoder, prompts: list[list[int]], max_new_tokens: int, ends: frozenset[int], batch_size: int
) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """The prompts in batches, with the texts that begin with them."""
    for i in range(0, len(prompts), batch_size):
        batch = prompts[i : i + batch_size]
        yield batch, _run(decoder, batch, [len(prompt) + max_new_tokens for prompt in batch], ends)


def calibrated_tree(accuracies: np.ndarray, num_nodes: int) -> list[list[int]]:
    """`speculative_token_tree`: the child-rank paths of the best tree of at most `num_nodes` nodes. Raises ValueError: the drafter was
    never right, so no tree helps."""
    template = TreeTemplate.from_accuracies(accuracies, num_nodes)
    paths: list[list[int]] = []
    for parent, rank in zip(template.parents.tolist(), template.ranks.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), rank])
    return paths


def expected_accepted_length(accuracies: np.ndarray, paths: list[list[int]]) -> float:
    """Tokens per target forward with the tree of these paths: the mean number of accepted nodes, plus one."""
    return 1 + sum(float(np.prod(accuracies[np.arange(len(path)), path])) for path in paths)


class _Counts:
    """Counts how often a drafter is right along given texts: `hits` int64 [depths, ranks] of `tried` [depths]."""

    def __init__(self, generator: GrowsDrafts, num_ranks: int):
        self.generator = generator
        self.hits = np.zeros((generator.shape.depth, num_ranks), dtype=np.int64)
        self.tried = np.zeros(generator.shape.depth, dtype=np.int64)

    @torch.no_grad()
    def follow(self, sequences: list[Sequence], texts: list[list[int]]) -> None:
        """Draft from each sequence's current end along its whole text, `texts[seq.row]`."""
        ahead = [texts[seq.row][len(seq.tokens) :] for seq in sequences]
        limits = self.generator.begin_round(sequences, [min(len(self.tried), len(left)) for left in ahead])
        rows = [i for i, limit in enumerate(limits) if limit]
        if not rows:
            return
        logits = self.generator.root_logits([sequences[i] for i in rows], [limits[i] for i in rows])
        for depth in range(1, max(limits) + 1):
            true = torch.tensor([ahead[i][depth - 1] for i in rows], device=logits.device)
            self._count(depth, logits, true)
            deeper = [i for i in rows if limits[i] > depth]
            if not deeper:
                break
            kept = [rows.index(i) for i in deeper]
            tokens = true[torch.tensor(kept, device=true.device)][:, None]
            chain = np.ones((len(deeper), 1, depth), dtype=bool)
            level = DraftLevel(
                depth, deeper, kept, tokens, torch.zeros_like(tokens), depth - 1, chain, np.arange(1, depth + 1)
            )
            logits, rows = self.generator.expand(level)[:, 0], deeper

    def _count(self, depth: int, logits: torch.Tensor, true: torch.Tensor) -> None:
        scores = self.generator.vocabulary.scores(logits)
        of_true = scores.gather(1, true[:, None])
        ranks = (scores > of_true).sum(1)[of_true[:, 0] > float("-inf")].cpu().numpy()
        ranks = ranks[ranks < self.hits.shape[1]]
        self.hits[depth - 1] += np.bincount(ranks, minlength=self.hits.shape[1])
        self.tried[depth - 1] += len(true)


def _run(
    decoder: SpeculativeDecoder,
    prompts: list[list[int]],
    max_lengths: list[int],
    eos_token_ids: frozenset[int],
    known: list[list[int]] | None = None,
    counts: _Counts | None = None,
) -> list[list[int]]:
    """Decode without drafts, greedily or along `known` texts, counting at every position. Returns the texts."""
    sequences = [
        Sequence(list(prompt), max_length, eos_token_ids, row=i, num_speculative_tokens=0)
        for i, (prompt, max_length) in enumerate(zip(prompts, max_lengths, strict=True))
    ]
    for seq in sequences:
        check_length(decoder.target.model, seq.prompt_length, seq.max_length)
    chunk = decoder.config.prefill_chunk_size
    with decoder.memory_for(sequences), decoder.active():
        for seq in sequences:
            decoder.add(seq)
        while running := [seq for seq in sequences if not seq.finished]:
            results = decoder.step(running, [chunk] * len(running))
            if known is not None and counts is not None:
                advanced = [result.sequence for result in results if result.new_tokens]
                for seq in advanced:  # a near tie may have gone the other way this time
                    seq.tokens[-1] = known[seq.row][len(seq.tokens) - 1]
                counts.follow([seq for seq in advanced if not seq.finished], known)
        for seq in sequences:
            decoder.remove(seq)
    return [seq.tokens for seq in sequences]
