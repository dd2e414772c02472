"""ModelDrafter: drafters that run a whole language model, perhaps the target itself."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...model.packed_model import PackedModel
from ...model.prepare import ModelOptions, prepare
from ..base import RunsModel
from .own_cache import ReadsPages
from .tree_growth import DraftLevel


class ModelDrafter(ReadsPages, RunsModel):
    """Drafts with a causal language model, run like the target by a PackedModel over pages.

    Attributes:
        drafter: the model, after `draft_with`.
    """

    drafter: PackedModel
    # where to enter the drafter's context, before it is first asked
    _resting: contextlib.ExitStack | None = None

    def draft_with(
        self, model: PreTrainedModel, num_layers: int | None = None, borrowed: bool = False, owned: bool = False
    ) -> None:
        """Draft with this model. Raises SpeculativeConfigError: it is the target, and `quantization` is given; UnsupportedModel: it cannot
        run."""
        config, is_target = self.config, model is self.target.model
        if is_target and config.quantization is not None:
            raise config.fail(
                "quantization",
                "cannot be given: the target drafts for itself. Use 'target_quantization', or leave it out.",
            )
        options = ModelOptions(
            prepack_weights=config.prepack_weights,
            keep_linears=config.deterministic and is_target,  # it shares its layers
            cuda_graphs=config.cuda_graphs,
            quantization=config.quantization,
            owned=owned,
            compile=config.compile,
            native=config.native,
        )
        self.drafter = prepare(model, options, num_layers=num_layers, borrowed=borrowed)
        self.drafter.window = config.window

    @contextlib.contextmanager
    def active(self):
        """The drafter's attention reads pages from the first draft on."""
        with contextlib.ExitStack() as self._resting:
            try:
                yield
            finally:
                self._resting = None

    def wake(self) -> None:
        """Enter the drafter's context, which the first draft needs."""
        if self._resting is not None:
            self._resting.enter_context(self.drafter.active())
            self._resting = None

    def modules(self) -> list[nn.Module]:
        return [self.drafter.model]

    def drafter_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Drafted tokens [R, F] in the drafter's ids."""
        return tokens

    def expand(self, level: DraftLevel) -> torch.Tensor:
        """Run the drafter over the nodes of one depth: logits [R, F, V]."""
        rows, count = level.tokens.shape
        output = self.over_nodes(self.drafter, level, self.drafter_ids(level.tokens), level.ancestors)
        return output.logits.view(rows, count, -1)

    def round_programs(self) -> tuple[Any, None] | None:
        native = self.drafter.native
        program = None if native is None else native.current("forward")
        return program and (program, None)
