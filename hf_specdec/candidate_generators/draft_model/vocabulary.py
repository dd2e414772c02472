"""Translating tokens between target and drafter: one vocabulary, the common tokens, or text."""

from __future__ import annotations

import logging

import torch

from ...core.draft_trees import DraftTrees
from ...core.folders import folder_of, same_tokenizer
from ...core.sequence import Sequence
from ...model.packed_model import PackedModel
from ..base import DrafterContext, held_weakly
from ..checkpoints.target_parts import DraftVocabulary, tokenizer_of
from ..growing.tree_shapes import TreeDraftingConfig

logger = logging.getLogger(__name__)

BRIDGES = ("intersection", "text")

# Below this share of common tokens, more drafts are accepted through text than from the intersection.
_USEFUL_INTERSECTION = 0.25
_LOOKBEHIND = 10  # target tokens re-encoded together with the drafted text, for the same tokenization as in context


def make_bridge(
    config: TreeDraftingConfig, wanted: str | None, target: PackedModel, drafter: PackedModel, context: DrafterContext
):
    """Choose how tokens are translated, by comparing tokenizers (vocabulary sizes may differ by padding).

    Args:
        wanted: one of BRIDGES, if the tokenizers differ; None: by how many tokens they share.

    Raises:
        SpeculativeConfigError: the vocabularies differ and cannot be bridged, or only for chains while a tree is configured.
    """
    if drafter.model is target.model:
        return SharedVocabulary(target.vocab_size, target.vocab_size)
    given = context.tokenizer, context.assistant_tokenizer
    if not any(given) and same_tokenizer(
        folder_of(target.model), folder_of(drafter.model)
    ):  # loading takes up to a second
        return SharedVocabulary(target.vocab_size, drafter.vocab_size)
    ours, theirs = (
        tokenizer or tokenizer_of(packed.model) for tokenizer, packed in zip(given, (target, drafter), strict=True)
    )
    if ours is None or theirs is None:
        if target.vocab_size == drafter.vocab_size:
            return SharedVocabulary(target.vocab_size, drafter.vocab_size)
        raise config.fail(
            "model",
            f"has {drafter.vocab_size} tokens and the target {target.vocab_size}, and their tokenizers are not known: pass "
            "tokenizer= and assistant_tokenizer= to generate().",
        )
    if ours.get_vocab() == theirs.get_vocab():
        return SharedVocabulary(target.vocab_size, drafter.vocab_size)
    pairs = _common_tokens(ours, theirs, target.vocab_size, drafter.vocab_size)
    choice = wanted
    if choice is None:
        choice = "intersection" if len(pairs) >= _USEFUL_INTERSECTION * len(ours) else "text"
        logger.warning(
            "The drafter's tokenizer differs from the target's (%d of %d tokens in common): drafting through %s.",
            len(pairs), len(ours), "the common tokens" if choice == "intersection" else "text",
        )  # fmt: skip
    if choice == "text":
        if config.tree_key is not None:
            why = "" if wanted else " (chosen because the tokenizers have few tokens in common)"
            raise config.fail(
                config.tree_key,
                f"cannot be used with vocabulary_bridge 'text'{why}, which drafts chains: leave the tree's keys out, or set "
                "vocabulary_bridge to 'intersection'.",
            )
        return TextBridge(ours, theirs, target, given)
    if not pairs:
        raise config.fail(
            "vocabulary_bridge", "cannot be 'intersection': the tokenizers have no token in common; use 'text'."
        )
    return IntersectionBridge(pairs, ours, theirs, target, given)


def _common_tokens(ours, theirs, our_size: int, their_size: int) -> dict[int, int]:
    """{target id: drafter id} of equal tokens and of special tokens with the same role."""
    their_vocab = theirs.get_vocab()
    pairs = {
        i: their_vocab[t]
        for t, i in ours.get_vocab().items()
        if t in their_vocab and i < our_size and their_vocab[t] < their_size
    }
    for role in ("bos_token_id", "eos_token_id"):
        a, b = getattr(ours, role, None), getattr(theirs, role, None)
        if a is not None and b is not None:
            pairs[a] = b
    return pairs


class SharedVocabulary(DraftVocabulary):
    """Both models use the same tokenizer; their embeddings may be padded to different sizes."""

    nodes_are_drafter_tokens = True  # an accepted node's KV can be kept

    def __init__(self, vocab_size: int, drafter_size: int):
        super().__init__(vocab_size)
        self.drafter_size = drafter_size
        # per sequence: tokens checked, and whether the drafter lacks an embedding for one
        self.checked: dict[int, tuple[int, bool]] = {}

    def max_drafter_tokens(self, num_tokens: int) -> int:
        """The most drafter tokens that `num_tokens` target tokens can become."""
        return num_tokens

    def to_drafter(self, seq: Sequence) -> list[int]:
        """The sequence in the drafter's tokens; ids beyond its embeddings (padding) become its last id."""
        if self.drafter_size >= self.vocab_size:
            return seq.tokens
        done, unknown = self.checked.get(seq.id, (0, False))
        unknown = unknown or any(token >= self.drafter_size for token in seq.tokens[done:])
        self.checked[seq.id] = (len(seq.tokens), unknown)
        return [min(token, self.drafter_size - 1) for token in seq.tokens] if unknown else seq.tokens

    def num_unchanged(self, seq: Sequence, text: list[int]) -> int:
        """How many leading tokens of `text` are unchanged since the last round."""
        return len(text)

    def drafter_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Drafted tokens [R, F] in the drafter's ids."""
        return tokens if self.drafter_size >= self.vocab_size else tokens.clamp(max=self.drafter_size - 1)

    def to_target(self, trees: DraftTrees, sequences: list[Sequence], texts: list[list[int]]) -> DraftTrees:
        """The drafted trees in the target's tokens."""
        return trees

    def forget(self, seq: Sequence) -> None:
        """The sequence has left: drop what is known of its text."""
        self.checked.pop(seq.id, None)


class TokenizerBridge(SharedVocabulary):
    """Base for two tokenizers, which `ours` and `theirs` return: held weakly if `given` to the call. `read`: per sequence, what the drafter
    has read of it."""

    nodes_are_drafter_tokens = False

    def __init__(self, ours, theirs, target: PackedModel, given: tuple):
        super().__init__(target.vocab_size, len(theirs))
        self.target, self.read = target, {}
        self.ours, self.theirs = (
            held_weakly(tokenizer) if is_given is not None else lambda tokenizer=tokenizer: tokenizer
            for tokenizer, is_given in zip((ours, theirs), given, strict=True)
        )

    def max_drafter_tokens(self, num_tokens: int) -> int:
        """A token that is not shared can become several."""
        return 4 * num_tokens

    def forget(self, seq: Sequence) -> None:
        self.read.pop(seq.id, None)


class IntersectionBridge(TokenizerBridge):
    """The drafter chooses among the tokens both tokenizers have (token-level intersection, Timor et al. 2025)."""

    read: dict[int, tuple[int, list[int]]]  # number of tokens, and these in the drafter's tokens

    def __init__(self, pairs: dict[int, int], ours, theirs, target: PackedModel, given: tuple):
        super().__init__(ours, theirs, target, given)
        device = target.device
        self.pairs = pairs
        self.our_ids = torch.tensor(list(pairs.keys()), device=device)
        self.their_ids = torch.tensor(list(pairs.values()), device=device)
        self.table = torch.zeros(target.vocab_size, dtype=torch.long, device=device)
        self.table[self.our_ids] = self.their_ids

    def to_drafter(self, seq: Sequence) -> list[int]:
        done, ids = self.read.get(seq.id, (0, []))
        ids = list(ids)
        for token in seq.tokens[done:]:
            if token in self.pairs:
                ids.append(self.pairs[token])
            else:
                ids += self.theirs().encode(self.ours().decode([token]), add_special_tokens=False)
        self.read[seq.id] = (len(seq.tokens), ids)
        return ids

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        out = logits.new_full((logits.shape[0], self.vocab_size), float("-inf"))
        out[:, self.our_ids] = logits[:, self.their_ids]
        return out

    def drafter_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]


class TextBridge(TokenizerBridge):
    """The drafter reads and writes text; what it writes is tokenized for the target (universal assisted generation)."""

    in_target_vocabulary = False
    read: dict[int, list[int]]  # the drafter's tokens

    def to_drafter(self, seq: Sequence) -> list[int]:
        text = self.ours().decode(seq.tokens, skip_special_tokens=True)
        return self.theirs().encode(text) or [self.theirs().bos_token_id or 0]

    def num_unchanged(self, seq: Sequence, text: list[int]) -> int:
        before = self.read.get(seq.id, [])
        self.read[seq.id] = text
        same = 0
        while same < min(len(before), len(text) - 1) and before[same] == text[same]:
            same += 1
        return same

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def to_target(self, trees: DraftTrees, sequences: list[Sequence], texts: list[list[int]]) -> DraftTrees:
        """The drafted text in the target's tokens, as chains."""
        chains = []
        for i, (seq, text) in enumerate(zip(sequences, texts, strict=True)):
            drafted = trees.tokens[i, : trees.lengths[i]].tolist()
            chains.append(self._retokenize(seq, text, drafted)[: len(drafted)])
        return DraftTrees.from_lists(chains, device=self.target.device)

    def _retokenize(self, seq: Sequence, text: list[int], drafted: list[int]) -> list[int]:
        if not drafted:
            return []
        known = self.theirs().decode(text, skip_special_tokens=True)
        addition = self.theirs().decode(text + drafted, skip_special_tokens=True)[len(known) :]
        tail = seq.tokens[-_LOOKBEHIND:]
        together = self.ours().encode(self.ours().decode(tail) + addition, add_special_tokens=False)
        if together[: len(tail)] == tail:
            return together[len(tail) :]
        return self.ours().encode(addition, add_special_tokens=False)
