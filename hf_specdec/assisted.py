"""assisted_loop(): our generators inside transformers' own assisted generation (one sequence, chains)."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator as TransformersCandidateGenerator
from transformers.generation.stopping_criteria import EosTokenCriteria, StoppingCriteriaList, StopStringCriteria

from .candidate_generators import CandidateGenerator, parse_config
from .candidate_generators.base import DrafterContext, active_drafter
from .config import PER_CALL_KEYS
from .core.draft_trees import DraftTrees
from .core.outcome import StepOutcome
from .core.output import PackedOutput
from .core.sequence import Sequence
from .integration import generator_for
from .model.architectures import tapped
from .model.threads import replaced_values

_ENDS = (EosTokenCriteria, StopStringCriteria)

# Keys that say how our loop verifies, and what the target computes.
_OF_OUR_LOOP = (*PER_CALL_KEYS, "deterministic", "target_quantization", "kv_cache_dtype", "learn")


@contextlib.contextmanager
def assisted_loop(
    model: PreTrainedModel,
    speculative_config: Any,
    assistant_model: PreTrainedModel | None = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
):
    """Inside the context, transformers' assisted generation drafts with one of our methods. Yields the `AssistedDrafter`.

        with hf_specdec.assisted_loop(model, {"method": "ngram"}):
            model.generate(**inputs, prompt_lookup_num_tokens=1)  # any argument that turns assisted generation on

    transformers has no argument for a candidate generator, so the model's `_get_candidate_generator` is replaced. Its loop looks at
    stopping criteria only after all tokens of a step, so drafts end where a stop text or an end-of-sequence token would.
    """
    context = DrafterContext(assistant_model, tokenizer, assistant_tokenizer, chains_only=True)
    config = parse_config(speculative_config)
    for key in [key for key in _OF_OUR_LOOP if key in config.to_dict()]:
        raise config.fail(key, "is for generate(speculative_config=...), not for transformers' loop.")
    drafter = AssistedDrafter(generator_for(model, config, context))
    generating: Any = model  # has GenerationMixin's methods
    original = generating._get_stopping_criteria

    def criteria(*args, **kwargs):
        given = original(*args, **kwargs)
        drafter.ends = StoppingCriteriaList(criterion for criterion in given if isinstance(criterion, _ENDS))
        return given

    ours = {"_get_candidate_generator": lambda *args, **kwargs: drafter, "_get_stopping_criteria": criteria}
    changes = [(vars(model), name, function) for name, function in ours.items()]
    with contextlib.closing(drafter), replaced_values(changes), tapped(model, drafter.generator.taps, drafter.features):
        yield drafter


class AssistedDrafter(TransformersCandidateGenerator):
    """One of our generators as a candidate generator of transformers, which verifies one chain of one sequence.

    Attributes:
        sequence: the text that is being generated; None before the first call and after `close`.
        features: the target's hidden states in its last forward, [T, H] by tap: filled from outside (see `tapped`).
        ends: criteria of the call by which a token ends the text.
    """

    def __init__(self, generator: CandidateGenerator):
        self.generator = generator
        self.sequence: Sequence | None = None
        self.ends = StoppingCriteriaList()
        self.features: dict[Any, torch.Tensor] = {}
        self._proposal: tuple[DraftTrees, list[int]] | None = None  # the last draft, and its nodes that were candidates
        self._num_fed = 0  # length of the text when the draft was proposed

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs) -> tuple[Any, Any]:
        """The text followed by one chain of drafted tokens: int64 [1, S + K]. Drafts are deterministic, so no logits.

        Raises:
            ValueError: more than one sequence.
        """
        seq = self._follow(input_ids)
        with active_drafter(self.generator):
            trees = self.generator.propose([seq], [self.generator.config.longest_draft])
        path = trees.first_path(0)
        tokens = trees.tokens[0, torch.tensor(path, dtype=torch.long, device=trees.tokens.device)]
        candidates: Any = torch.cat([input_ids, tokens[None].to(input_ids.device)], dim=1)
        start = input_ids.shape[1]
        # The token that ends the text is not drafted: verification gives it after the last draft, and then nothing follows.
        ends = (
            bool(self.ends) and bool(self.ends(candidates[:, : start + i + 1], None).all()) for i in range(len(path))
        )
        count = next((i for i, ended in enumerate(ends) if ended), len(path))
        self._proposal, self._num_fed = (trees, path[:count]), len(seq.tokens)
        return candidates[:, : start + count], None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Tell the generator which candidates the last forward accepted.

        Args:
            scores: the target's processed scores [1, K + 1, V] after the text and after each candidate.
        """
        self._follow(input_ids, scores[0])

    def close(self) -> None:
        """Forget the text that was being generated."""
        if self.sequence is not None:
            self.generator.stop(self.sequence)
            self.generator.release()
        self.sequence = self._proposal = None
        self.features.clear()

    def _follow(self, input_ids: torch.LongTensor, scores: torch.Tensor | None = None) -> Sequence:
        """The sequence with these tokens: the running one, extended, or a new one."""
        if input_ids.shape[0] != 1:
            raise ValueError("transformers' assisted decoding takes one sequence: use speculative_config for batches.")
        tokens = input_ids[0].tolist()
        seq = self.sequence
        if seq is None or tokens[: len(seq.tokens)] != seq.tokens or len(tokens) > seq.max_length:
            return self._start(tokens)
        new = tokens[len(seq.tokens) :]
        if new:
            seq.tokens = tokens
            if self._proposal is not None:
                with active_drafter(self.generator):
                    self.generator.observe(self._outcome(seq, *self._proposal, new, scores))
                self._proposal = None
        return seq

    def _start(self, tokens: list[int]) -> Sequence:
        self.close()
        generator = self.generator
        # The final length is unknown: make room for twice the text, and start again when that is used up.
        self.sequence = seq = Sequence(tokens, max_length=2 * len(tokens) + 256)
        generator.allocate(seq.max_length + generator.max_draft_nodes, 1, generator.config.block_size)
        generator.start(seq)
        return seq

    def _outcome(
        self, seq: Sequence, trees: DraftTrees, path: list[int], new: list[int], scores: torch.Tensor | None
    ) -> StepOutcome:
        """The step that verified the candidates, nodes `path` of the proposal. `new`: appended tokens; `scores`: [K + 1, V] or None."""
        chain = [int(token) for token in trees.tokens[0, path]]
        matched = 0
        while matched < min(len(chain), len(new) - 1) and chain[matched] == new[matched]:
            matched += 1
        states = self.features
        num_forwarded = next((len(tensor) for tensor in states.values()), len(chain) + 1)
        layers = {index: states[index] for index in self.generator.taps.layers if index in states}
        logits = scores if scores is not None else torch.empty(0)
        output = PackedOutput(logits=logits, last_hidden=states.get("last_hidden"), layers=layers)
        verified_trees, num_own = DraftTrees.from_lists([chain], device=trees.tokens.device), num_forwarded - len(chain)
        fed = {"starts": [0], "chunks": [(seq, self._num_fed)], "num_own": [num_own]}
        verified = StepOutcome([seq], verified_trees, [list(range(matched))], [new], output, **fed)
        return verified.for_proposal([path[:matched]])
