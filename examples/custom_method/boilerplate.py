"""Method `boilerplate`: drafts from texts that are expected to come, such as a licence, a form letter or an import block.

pip install ./examples/custom_method
model.generate(..., speculative_config={"method": "boilerplate", "texts": [[5, 17, 3, ...]]})
"""

from dataclasses import dataclass, field

from hf_specdec import CandidateGenerator, DraftTrees, Sequence, SpeculativeConfig, register


@dataclass
class BoilerplateConfig(SpeculativeConfig):
    """Drafts what follows the last tokens in given texts."""

    name = "boilerplate"
    default_num_speculative_tokens = 16

    texts: list[list[int]] | None = field(default=None, metadata={"help": "token ids of the texts"})
    match: int = field(default=2, metadata={"help": "tokens that have to agree before a draft"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_int("match", minimum=1)
        if not self.texts or not all(len(text) > self.match for text in self.texts):
            raise self.fail("texts", f"must be lists of more than {self.match} token ids.")


@register(BoilerplateConfig)
class BoilerplateGenerator(CandidateGenerator):
    """A table from every few tokens of the texts to what follows them."""

    def __init__(self, config, target, context=None):
        super().__init__(config, target, context)
        n = config.match
        self.following = {tuple(t[i - n : i]): t[i:] for t in config.texts for i in range(len(t) - 1, n - 1, -1)}

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """A chain per row where its last tokens stand in a text."""
        keys = [tuple(seq.tokens[-self.config.match :]) for seq in sequences]
        drafts = [self.following.get(key, [])[:limit] for key, limit in zip(keys, limits, strict=True)]
        return DraftTrees.from_lists(drafts, device=self.target.device)
