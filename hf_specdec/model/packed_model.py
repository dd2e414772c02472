"""PackedModel: any decoder-only transformers model over ragged rows and a paged cache."""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import weakref
from collections.abc import Callable

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..cache import PagedStaticCache
from ..core.errors import UnsupportedModel
from ..core.names import ATTENTION_NAME
from ..core.output import PackedOutput, Taps
from ..core.rows import RowInput
from . import architectures, self_test
from .graphs import GraphRunner, StaticBatch, uses_graphs
from .options import invariant_check
from .options.compiled import TRACED, CompiledLayers, RewrittenLayers, TracedLayers, layers_of, traced_attention
from .options.few_row_linears import few_row_linears
from .options.invariant_ops import InvariantOps
from .options.prepacked import prepack
from .options.quantized import QuantizedLinears, quantize_for_good, quantized_linears
from .packed_batch import PackedBatch

logger = logging.getLogger(__name__)


class PackedModel:
    """A transformers model, unmodified, run over packed rows.

    Attributes:
        graphs: runs steps of decoding as CUDA graphs; None: every kernel is launched by itself.
        deterministic: a token's logits are the same bits whatever else is in the batch (see InvariantOps).
        quantized: the model's linear layers with int8 or int4 weights, used while `active()` (`quantization=`); None: its own.

    Args:
        borrowed: the model is held weakly: whoever runs it has it. Otherwise it is kept.

    Two ways to attend, chosen by what the model is: *paged* (models on transformers' attention interface: the cache
    stores the new keys and a registered attention reads the pages) and *gather* (all others: the cache returns every
    row's keys and values and the model attends to them under a block-diagonal mask; slower, works everywhere).

    Raises:
        UnsupportedModel: neither can serve the model; the message says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        taps: Taps | None = None,
        num_layers: int | None = None,
        prepack_weights: bool | None = None,
        cuda_graphs: bool | None = False,
        deterministic: bool = False,
        quantization: str | None = None,
        owned: bool = False,
        compile: bool | None = False,
        borrowed: bool = False,
    ):
        architectures.check_supported(model)
        self._model: Callable[[], PreTrainedModel | None] = weakref.ref(model) if borrowed else lambda: model
        self.config = model.config.get_text_config(decoder=True)
        self.taps = taps or Taps()
        self.num_layers = num_layers  # early exit: run only the first layers
        self.gather = not architectures.reads_pages(model)
        self.forward_parameters = inspect.signature(model.forward).parameters
        self._windows = architectures.layer_windows(self.config)
        self._wants_masks_by_kind = hasattr(self.config, "layer_types")
        self._lock = threading.RLock()
        self._active = 0
        self.deterministic = False
        self.quantized: QuantizedLinears | None = None
        self._compiled: TracedLayers | None = None
        # Packed weights are not used for products of few rows, which determinism forbids, nor can they be compiled.
        prepack_weights = False if deterministic or compile else prepack_weights
        self._linears = None if quantization is not None else prepack(model, prepack_weights)
        self.graphs: GraphRunner | None = None
        self_test.check(self)
        if quantization is not None:
            self._quantize(quantization, owned)
            with self._quantized_weights():
                self._linears = prepack(model, prepack_weights)
        if deterministic:
            self.deterministic = True
            invariant_check.check(self)
        if compile:
            self._compiled = self._compile()
        if uses_graphs(cuda_graphs, self):
            self.graphs = GraphRunner(self, by_lines=deterministic)
            if not deterministic:
                self._linears = few_row_linears(model, left_out=architectures.decoder_layers(model) if compile else ())
                if compile is None and quantization is None:
                    self._compiled = layers_of(model, paged_attention_forward, RewrittenLayers)

    @property
    def model(self) -> PreTrainedModel:
        """The model.

        Raises:
            ReferenceError: it was borrowed, and is gone.
        """
        model = self._model()
        if model is None:
            raise ReferenceError("The model was given to a call that is over, and was not kept.")
        return model

    @property
    def module(self) -> PreTrainedModel:
        """The model, by the name that heads have it under."""
        return self.model

    @property
    def device(self) -> torch.device:
        """Where input ids go."""
        return self._place if self._active else self._find_device()

    def _find_device(self) -> torch.device:
        embeddings = self.model.get_input_embeddings()
        if embeddings.weight.device.type != "meta":
            return embeddings.weight.device
        return torch.device(
            embeddings._hf_hook.execution_device
        )  # accelerate brings offloaded weights there when needed

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int | None:
        """Positions the model was built for, or None if it says nothing."""
        return getattr(self.config, "max_position_embeddings", None)

    def new_cache(
        self, num_blocks: int, block_size: int, share_prefixes: bool = True, grows: bool = False
    ) -> PagedStaticCache:
        """A paged cache with one layer of pools per layer of the model.

        Args:
            grows: memory comes as it is needed, up to `num_blocks`; otherwise all of it with the first write.
        """
        if self.graphs is not None:
            self.graphs.captures.clear()
        num_layers = self.num_layers or self.config.num_hidden_layers
        weights = self.model.parameters() if grows else ()
        return PagedStaticCache(num_layers, num_blocks, block_size, share_prefixes, weights)

    @contextlib.contextmanager
    def active(self):
        """While inside, the model's attention reads our pages; restored on exit, also after an error."""
        with self._lock:
            if self._active == 0:
                self._place = self._find_device()  # looking it up takes longer than a small layer
                self._entered = self._enter()
            self._active += 1
        try:
            yield self
        finally:
            with self._lock:
                self._active -= 1
                if self._active == 0:
                    self._entered.close()

    def _quantize(self, kind: str, owned: bool) -> None:
        if owned:
            quantize_for_good(self.model, kind)
        else:
            self.quantized = quantized_linears(self.model, kind)

    def _compile(self) -> CompiledLayers:
        if self.gather:
            raise UnsupportedModel(
                f"'compile' needs a model on transformers' attention interface, which {type(self.model).__name__} is not. "
                "Leave the key out."
            )
        return layers_of(self.model, paged_attention_forward, CompiledLayers)

    def _quantized_weights(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.quantized is None else self.quantized.active()

    def _enter(self) -> contextlib.ExitStack:
        self._unread_mask = torch.zeros(1, 1, 1, 1, dtype=self.model.dtype, device=self.device)
        with contextlib.ExitStack() as stack:
            if not self.gather:
                stack.callback(self.model.set_attn_implementation, self.config._attn_implementation)
                self.model.set_attn_implementation(ATTENTION_NAME)
            stack.enter_context(self._quantized_weights())
            if self._linears is not None:
                stack.enter_context(self._linears.active())
            if self._compiled is not None:
                stack.enter_context(self._compiled.active())
            stack.enter_context(architectures.without_checkpointing(self.model))
            return stack.pop_all()

    def forward(self, rows: list[RowInput], cache: PagedStaticCache, all_hidden_states: bool = False) -> PackedOutput:
        """One forward over the new tokens of `rows`; their keys and values are written to their slots.

        Must run inside `active()`. Shapes: see PackedBatch and PackedOutput.
        """
        if self.graphs is not None and not all_hidden_states:
            output = self.graphs.run([rows], cache)
            if output is not None:
                return output
        batch = PackedBatch.pack(rows, cache, self.device, self.gather)
        return self.forward_batch(batch, batch.logit_index, all_hidden_states)

    def forward_batch(
        self,
        batch: PackedBatch | StaticBatch,
        logit_index: torch.Tensor | None = None,
        all_hidden_states: bool = False,
    ) -> PackedOutput:
        """`forward` of a batch that is packed; without `logit_index` [R] logits of every token."""
        kwargs = {
            "input_ids": batch.input_ids,
            "past_key_values": batch.cache,
            "use_cache": True,
            "attention_mask": self._masks(batch),
            "return_dict": True,
        }
        if "position_ids" in self.forward_parameters:
            kwargs["position_ids"] = batch.position_ids
        keeps = logit_index is not None and "logits_to_keep" in self.forward_parameters and not self.taps.logits
        if keeps:
            kwargs["logits_to_keep"] = logit_index
        if all_hidden_states:
            kwargs["output_hidden_states"] = True
        if not self.gather:
            kwargs["specdec"] = batch
        batch.cache.batch = batch
        batch.invariant = InvariantOps(type(self.model).__name__) if self.deterministic else None
        try:
            with (
                architectures.first_layers(self.model, self.num_layers),
                architectures.tapped(self.model, self.taps) as tapped,
                architectures.alibi(self.model, batch),
                batch.invariant or contextlib.nullcontext(),
            ):
                output = self.model(**kwargs)
        finally:
            batch.cache.batch = None
        if not self.gather and batch.attention_calls == 0:
            raise UnsupportedModel(
                f"{type(self.model).__name__} did not call transformers' attention interface; its outputs cannot be trusted here."
            )
        every = output.logits[0]
        logits = every if keeps or logit_index is None else every.index_select(0, logit_index)
        return PackedOutput(
            logits=logits.to(torch.float32),
            last_hidden=tapped.get("last_hidden"),
            layers={index: tapped[index] for index in self.taps.layers},
            hidden_states=tuple(map(_of_one_line, output.hidden_states)) if all_hidden_states else None,
            input_ids=batch.input_ids[0],
            all_logits=every if self.taps.logits else None,
        )

    def _masks(self, batch: PackedBatch | StaticBatch):
        """What the model gets as `attention_mask`: 4-D, so that transformers hands it on untouched."""
        if self.gather:
            masks = {
                kind: batch.dense_mask(window, self.model.dtype, self.device) for kind, window in self._windows.items()
            }
        else:
            masks = dict.fromkeys(self._windows, self._unread_mask)
        return masks if self._wants_masks_by_kind else next(iter(masks.values()))


def _of_one_line(states: torch.Tensor) -> torch.Tensor:
    """[T, H] from hidden states [1, T, H], or [T, A, H] from [A, 1, T, H]."""
    return states[0] if states.dim() == 3 else states[:, 0].transpose(0, 1)


def paged_attention_forward(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, specdec=None, **kwargs
):
    """The attention registered as "hf_specdec": reads the pages of `specdec`, or is plain sdpa when called without it."""
    if specdec is TRACED:
        return traced_attention(query, key, value, scaling=scaling, **kwargs), None
    if specdec is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    batch: PackedBatch = specdec
    batch.attention_calls += 1
    layer = batch.cache.layers[module.layer_idx]
    window = kwargs["sliding_window"] if "sliding_window" in kwargs else architectures.layer_window(module)
    options = {
        "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "softcap": kwargs.get("softcap"),
        "sinks": kwargs.get("s_aux"),
    }
    packed = query[0].transpose(0, 1)
    attend = batch.on(query.device).attend
    with contextlib.nullcontext() if batch.invariant is None else batch.invariant.direct():
        return attend(packed, layer.keys, layer.values, batch, window=window, **options)[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
