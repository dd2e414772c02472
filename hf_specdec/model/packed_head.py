"""PackedHead: a draft head's own layers over ragged rows and a paged cache, as PackedModel is for whole models."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from transformers import PretrainedConfig

from ..cache import PagedStaticCache
from ..core.names import ATTENTION_NAME, CACHE
from ..core.rows import RowInput
from ..kernels.attention.inputs import Window
from . import architectures
from .attention import paged_attention_forward
from .captures import uses_graphs
from .graphs import CapturedBatch, GraphRunner
from .latent import is_latent
from .options.compiled import RewrittenLayers, layers_of
from .options.prepacked import prepack
from .options.replaced_linears import few_row_linears
from .packed_batch import PackedBatch

if TYPE_CHECKING:
    from typing_extensions import Self


class NativeHeadForwards(Protocol):
    """Runs forwards in place of the head while its context is entered: `native.bind.NativeHead`, which says more."""

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Inside the context, forwards may run."""
        ...

    def run(self, head: Any, rows: list[RowInput], features: Any, cache: Any, reads: bool = False) -> Any:
        """The head's output; None: another way must be taken."""
        ...

    def current(self, key: str) -> Any:
        """Its program for this kind of call, if there is one now."""
        ...

    def apply(self, function: Callable[..., torch.Tensor], called: list[nn.Module], hidden: Any) -> torch.Tensor:
        """What a function that calls these modules makes of hidden states."""
        ...


class PackedHead:
    """Runs a head over packed rows.

    Args:
        module: the head, on its device: it fuses tokens and features, then applies transformers' decoder layers, which use `config`. It is
            called with ids [1, T], features [1, T, F], positions [1, T] and what it passes to its layers: attention_mask, the cache (by the
            name CACHE) and `specdec` for our attention. It returns hidden states [1, T, H]. `borrowed()` lists modules that it calls and
            does not own, such as the target's embeddings.
        config: of the layers. Its attention implementation is set to ours permanently, because we own the head.
        num_layers: number of layers with keys and values.
        prepack_weights: see `prepack`.
        fuse: computes features [.., F] from the target's states; None: texts are read with features directly.

    Attributes:
        graphs, reading_graphs: run forwards without and with `fuse` as CUDA graphs; None: kernels are launched one by one.
        native: runs forwards in the native library on a CPU; None: operators are called one by one.
        after: what is applied to the hidden states of `module` at the end, such as its last norm; None: nothing.
    """

    graphs: GraphRunner | None = None
    reading_graphs: GraphRunner | None = None
    native: NativeHeadForwards | None = None
    window: int | Window | None = None
    after: Callable[[torch.Tensor], torch.Tensor] | None = None
    _layers: RewrittenLayers | None = None

    def __init__(
        self,
        module: nn.Module,
        config: PretrainedConfig,
        num_layers: int,
        prepack_weights: bool | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        fuse: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self.fuse = fuse
        self.module, self.config, self.num_layers = module.eval(), config, num_layers
        self.is_latent = is_latent(module)
        config._attn_implementation = ATTENTION_NAME
        self.linears = prepack(module, prepack_weights)
        weight = next(module.parameters())
        self.device, self.dtype = device or weight.device, dtype or weight.dtype

    def new_cache(self, num_blocks: int, block_size: int) -> PagedStaticCache:
        """A paged cache for the head's layers, which grows up to `num_blocks`. The keys in slot s depend on the tokens up to s + 1: the
        head reads token s + 1 there with the target's feature at s. Hence `ahead=1`."""
        for graphs in (self.graphs, self.reading_graphs):
            if graphs is not None:
                graphs.captures.clear()
        weights = architectures.all_parameters(self.module)
        return PagedStaticCache(
            self.num_layers,
            num_blocks,
            block_size,
            weights=weights,
            ahead=1,
            window=self.window,
            is_latent=self.is_latent,
        )

    def with_graphs(self, wanted: bool | None = True, rewritten: bool = True) -> Self:
        """A copy of this head, with the same weights, that runs its forwards as CUDA graphs; or this head, without graphs.

        Drafters share heads, but graphs belong to one cache, so each drafter needs a copy with graphs of its own.

        Args:
            wanted: True: use graphs; None: use them if the head can be captured; False: do not.
            rewritten: trace and rewrite the decoder layers in captured forwards.

        Raises:
            UnsupportedModel: graphs are wanted, but the head cannot be captured; the message says why.
        """
        if not uses_graphs(wanted, self):
            return self
        captured = copy.copy(self)
        captured.graphs = GraphRunner(captured)
        captured.linears = few_row_linears(captured.module)
        if rewritten and not captured.is_latent:
            captured._layers = layers_of(captured.module, paged_attention_forward, RewrittenLayers)
        if captured.fuse is not None:
            captured.reading_graphs = GraphRunner(captured, captured.read_batch, name="{} (reading texts)")
        return captured

    def modules(self) -> list[nn.Module]:
        """The head's module, and those that it calls and does not own."""
        return [self.module, *getattr(self.module, "borrowed", list)()]

    def active(self) -> contextlib.AbstractContextManager:
        """A context in which `forward` uses the native library or the faster linear layers and, in captured forwards, the rewritten
        layers."""
        if self.native is not None:
            return self.native.active()
        with contextlib.ExitStack() as stack:
            for option in (self.linears, self._layers):
                if option is not None:
                    stack.enter_context(option.active())
            return stack.pop_all()

    @torch.no_grad()
    def forward(self, rows: list[RowInput], features: torch.Tensor, cache: PagedStaticCache) -> torch.Tensor:
        """Hidden states [T, H] of the rows' new tokens. Writes their keys and values to their slots.

        Args:
            features: [T, F], of each token, in the order of the rows.
        """
        return self._run(rows, features, cache, reads=False)

    @torch.no_grad()
    def read(self, rows: list[RowInput], features: torch.Tensor, cache: PagedStaticCache) -> torch.Tensor:
        """`forward` over texts, whose features are fused first if the head has `fuse`.

        Args:
            features: [T, ..], the input of `fuse`; for a head without `fuse`, the input of `forward`.
        """
        return self._run(rows, features, cache, reads=self.fuse is not None)

    def _run(self, rows: list[RowInput], features: torch.Tensor, cache: PagedStaticCache, reads: bool) -> torch.Tensor:
        """As a graph, natively, or operator by operator."""
        graphs, run = (self.reading_graphs, self.read_batch) if reads else (self.graphs, self.forward_batch)
        hidden = None if graphs is None else graphs.run([rows], cache, features)
        if hidden is None and self.native is not None:
            hidden = self.native.run(self, rows, features, cache, reads)
        if hidden is None:
            hidden = run(PackedBatch.pack(rows, cache, self.device, gather=False), features=features)
        return hidden

    def read_batch(self, batch: PackedBatch | CapturedBatch, *, features: torch.Tensor) -> torch.Tensor:
        """`read` of a packed batch, for heads with `fuse`."""
        assert self.fuse is not None
        return self.forward_batch(batch, features=self.fuse(features))

    def forward_batch(self, batch: PackedBatch | CapturedBatch, *, features: torch.Tensor) -> torch.Tensor:
        """`forward` of a packed batch."""
        mask = features.new_zeros(1, 1, 1, 1) if self.is_latent else None  # its values are never read
        given = {"attention_mask": mask, CACHE: batch.cache, "specdec": batch}
        with batch.cache.running(batch):
            hidden = self.module(batch.input_ids, features[None], batch.position_ids, **given)[0]
            return hidden if self.after is None else self.after(hidden)
