"""PackedModel: any transformers model that decodes text over ragged rows and a paged cache."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..cache import PagedStaticCache
from ..cache.memory import free_bytes
from ..cache.state_pool import PrefixStates, StatePool
from ..core.errors import UnsupportedModel
from ..core.names import cache_argument
from ..core.output import PackedOutput, Taps
from ..core.rows import RowInput
from ..kernels.attention.inputs import Window
from . import alibi, architectures, attention, encoder_decoder
from .adapters import RowAdapters, have_adapters
from .captures import Captures
from .encoder_decoder.forward import arguments, replaced
from .encoder_decoder.source import Source, dummy_sources, read_source
from .graphs import CapturedBatch, GraphRunner
from .image_layers import attending_to_images, bytes_per_image_key
from .latent import is_latent
from .options.invariant_ops import InvariantOps
from .options.quantized import QuantizedLinears
from .packed_batch import PackedBatch
from .positions import at_positions, counting_tables
from .recurrent.families import attends, family_of, layers_without_keys
from .recurrent.mixers import RecurrentLayers
from .recurrent.plan import make_plan
from .recurrent.stepped import SteppedLayers
from .segments import segments_of
from .sharding import checked_ranks
from .threads import replaced_method

logger = logging.getLogger(__name__)

# Shares of the memory for keys, values and states. If the states of drafts would take more, drafts are replayed.
STATES_SHARE = 0.25
PREFIX_STATES_SHARE = 0.05  # recurrent states after prefixes that later texts may share


class Activated(Protocol):
    """Something that changes how a model's layers compute while its context is entered."""

    def active(self) -> contextlib.AbstractContextManager:
        """A context; the layers are restored on exit."""
        ...


class NativeForwards(Activated, Protocol):
    """Runs forwards in place of the model while its context is entered: `native.bind.NativeRunner`, which says more."""

    @property
    def refused(self) -> str | None:
        """Why no forward runs; None: some do."""
        ...

    @property
    def most_tokens(self) -> int:
        """The most tokens of a forward."""
        ...

    def current(self, key: str) -> Any:
        """Its program for this kind of call, if there is one now."""
        ...

    def run(self, rows: list[RowInput], cache: PagedStaticCache, tapped: bool = True) -> PackedOutput | None:
        """The forward's output; None: the model must run."""
        ...


class PackedModel:
    """An unmodified transformers model, run over packed rows. `prepare` makes one and sets its options.

    The model attends in one of two ways. *Paged*: models on transformers' attention interface; the cache stores the new keys
    and values, and a registered attention reads the pages. *Gather*: all other models; the cache returns the keys and values of
    every row, and the model attends to them under a block-diagonal mask. Gather is slower and works everywhere.

    Args:
        num_layers: run only the first layers (early exit); None: all.
        borrowed: hold the model weakly, because the caller owns it. By default the model is kept alive.

    Attributes:
        gather: attend to gathered keys instead of pages. `self_test.check` may set it.
        tables: of positions, which count from the cache's length (see `model.positions`).
        segments: by index, how layers compress segments of the text (see `model.segments`).
        rounds: its linear layers round what they read, so that rounding errors grow. Set there, too.
        recurrent: its layers with a recurrent or convolutional state; None: it has none.
        replays_drafts: keep the inputs of its recurrences for drafts, not the states (see StatePool).
        chooses_states: `choose_states` may change `replays_drafts`.
        cache_bytes: memory for keys, values and states; None: what is free.
        quantizes_cache: keys and values are kept in int8.
        ranks: the processes that hold the model's shards; None: this one holds all of it.
        deterministic: a token's logits have the same bits whatever else is in the batch (see InvariantOps).
        native: runs forward passes in the native library on a CPU; None: operators are called one by one.
        with_native: single operations may run in that library.
        graphs: runs decoding steps as CUDA graphs; None: kernels are launched one by one.
        active_options: entered while the model is active: quantized, prepacked or compiled layers.
    """

    def __init__(
        self, model: PreTrainedModel, taps: Taps | None = None, num_layers: int | None = None, borrowed: bool = False
    ):
        architectures.check_supported(model)
        self.ranks = checked_ranks(model)
        self._model: Callable[[], PreTrainedModel | None] = weakref.ref(model) if borrowed else lambda: model
        self.family = encoder_decoder.family_of(model)
        self.config = encoder_decoder.text_config(model)
        self.taps = taps or Taps()
        self.num_layers = num_layers
        family = family_of(self.config)
        layers_of = SteppedLayers if family is not None and family.steps else RecurrentLayers
        recurrent = None if family is None else layers_of(model, family)
        self.recurrent = recurrent if recurrent is not None and recurrent.mixers else None
        self.gather = not architectures.reads_pages(model)
        self.is_latent = is_latent(model)
        self.segments = segments_of(model)
        self.rounds = False
        self.replays_drafts, self.chooses_states = False, False
        self.window: int | Window | None = None
        self.cache_bytes: int | None = None
        self.quantizes_cache = False
        self.deterministic = False
        self.graphs: GraphRunner | None = None
        self.native: NativeForwards | None = None
        self.with_native = True
        self.active_options: list[Activated] = []
        self.forward_parameters = _parameters(model)
        self.cache_argument = cache_argument(self.forward_parameters)
        self._takes_positions = "position_ids" in self.forward_parameters or _passes_positions_on(model)
        self._windows = architectures.layer_windows(self.config)
        # `attention_mask` may be a dict of masks, one for each kind of layer.
        self._wants_masks_by_kind = hasattr(self.config, "layer_types") and not architectures.has_bidirectional_prompts(
            model
        )
        self._has_alibi = alibi.is_needed(model)
        self.tables = [] if self.family is not None else counting_tables(model)
        self.checked_prompts: set[frozenset[str]] = set()  # kinds of prompts that `prompt.read_prompt` has checked
        self._logged_choice: bool | None = None
        self._row_adapters: RowAdapters | None = None
        self._lock = threading.RLock()
        self._active = 0

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model. Raises ReferenceError: the model was borrowed and its owner has deleted it."""
        model = self._model()
        if model is None:
            raise ReferenceError(
                "The model has been deleted by its owner: keep a reference to it while its decoder is used."
            )
        return model

    @property
    def module(self) -> PreTrainedModel:
        """The model, under the name that PackedHead uses."""
        return self.model

    def modules(self) -> list[nn.Module]:
        """The modules of a forward, as of PackedHead."""
        return [self.model]

    @property
    def device(self) -> torch.device:
        """Where input ids go."""
        return self._device if self._active else self._find_device()

    def _find_device(self) -> torch.device:
        embeddings: Any = self.model.get_input_embeddings()
        if embeddings.weight.device.type != "meta":
            return embeddings.weight.device
        # Offloaded weights: accelerate brings them to this device when they are needed.
        return torch.device(embeddings._hf_hook.execution_device)

    @property
    def vocab_size(self) -> int:
        """Number of logits per token."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int | None:
        """Number of positions the model was built for; None if its configuration does not say."""
        return architectures.position_limit(self.config)

    def new_cache(
        self, num_blocks: int, block_size: int, share_prefixes: bool = True, grows: bool = False, is_trial: bool = False
    ) -> PagedStaticCache:
        """A paged cache with one layer of pools per layer of the model.

        Args:
            grows: allocate memory as it is needed, up to `num_blocks`; otherwise all of it at the first write.
            is_trial: keep keys and values in the model's dtype in any case, to compare programs with the model.
        """
        if self.graphs is not None:
            self.graphs.captures.clear()
        num_layers = self.num_layers or architectures.num_cache_layers(self.config)
        weights = architectures.all_parameters(self.model) if grows else ()
        keyless = layers_without_keys(self.config)
        states = None if self.recurrent is None else StatePool(self.replays_drafts)
        return PagedStaticCache(
            num_layers, num_blocks, block_size, share_prefixes, weights, keyless=keyless, states=states, window=self.window,
            has_other_keys=self.family is not None or bool(self.tables), is_latent=self.is_latent, segments=self.segments,
            is_quantized=self.quantizes_cache and not is_trial,
        )  # fmt: skip

    def read_source(self, cache: PagedStaticCache, seq_id: int, source: Source | None) -> None:
        """Let the encoder-decoder model attend to a row's source: its encoder reads it, unless the cache holds its keys. `source` None: for
        other models, which do nothing. Raises UnsupportedModel: this model cannot decode without a source, or cannot read this one;
        OutOfBlocks: the keys do not fit; nothing was done."""
        if self.family is None or cache.holds_source(seq_id):
            return
        if source is None:
            raise UnsupportedModel(
                f"{type(self.model).__name__} attends to what an encoder has read, and this text has no input for an encoder: it works for "
                "encoder-decoder models only."
            )
        read_source(self.model, self.family, cache, seq_id, source.read_by(self.model))

    def free_bytes(self) -> int | None:
        """Free memory of the device, the least of all ranks; None if the system does not say."""
        free = free_bytes(self.device)
        return free if self.ranks is None or free is None else self.ranks.least(free)

    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, found by a forward over one token."""
        return self._cache_of_one_token().bytes_per_token

    def bytes_per_source_token(self) -> int:
        """The same for one state of an encoder, or of an image to which some layers attend alone; 0 if there is none."""
        if self.family is None:
            return bytes_per_image_key(self.config, self.model.dtype)
        cross = self._cache_of_one_token().cross
        return 0 if cross is None else cross.bytes_per_token

    def bytes_of_states(self, num_drafts: int, replays: bool | None = None) -> int:
        """Bytes of the recurrent states of a row with a draft of `num_drafts` nodes, found by a forward, too; 0 if no layer has a state.

        Args:
            replays: count the inputs of drafts in place of their states; None: whichever of the two this model keeps.
        """
        if self.recurrent is None:
            return 0
        if not self.recurrent.is_measured:
            self._cache_of_one_token()
        return self.recurrent.bytes_of_row(num_drafts, self.replays_drafts if replays is None else replays)

    def choose_states(self, num_rows: int, num_drafts: int) -> None:
        """Keep the states of drafts if the states of `num_rows` rows, with drafts of `num_drafts` nodes each, take at most STATES_SHARE
        of the memory; otherwise replay the drafts. Does nothing if the model has no states, or if the user chose in the configuration.
        """
        memory = self.free_bytes() if self.cache_bytes is None else self.cache_bytes
        if not self.chooses_states or memory is None:
            return
        kept, replayed = (num_rows * self.bytes_of_states(num_drafts, replays) for replays in (False, True))
        before, self.replays_drafts = self._logged_choice, STATES_SHARE * memory < kept and replayed < kept
        if before != self.replays_drafts:
            self._logged_choice = self.replays_drafts
            logger.info(
                "Recurrent states of drafts are %s: for %d rows of %d draft tokens, kept ones take %.1f MiB and replayed ones %.1f MiB; "
                "the limit is %.1f MiB.",
                "replayed" if self.replays_drafts else "kept", num_rows, num_drafts, kept / 2**20, replayed / 2**20,
                STATES_SHARE * memory / 2**20,
            )  # fmt: skip

    def bytes_of_prefix_states(self) -> int:
        """Memory for recurrent states after prefixes that later texts may share; 0 if no layer has a state, or if the chunk form, which
        reads prompts, cannot start from a state."""
        if self.recurrent is None or not self.recurrent.chunks_continue:
            return 0
        memory = self.free_bytes() if self.cache_bytes is None else self.cache_bytes
        return 0 if memory is None else int(PREFIX_STATES_SHARE * memory)

    def keep_prefix_states(self, cache: PagedStaticCache) -> None:
        """Keep recurrent states after prefixes, so that texts can share prefixes. Does nothing for models without states."""
        num_bytes = self.bytes_of_prefix_states()
        if num_bytes and self.recurrent is not None and cache.prefix_states is None:
            cache.prefix_states = PrefixStates(math.lcm(self.recurrent.chunk_size, cache.block_size), num_bytes)

    @torch.no_grad()
    def _cache_of_one_token(self) -> PagedStaticCache:
        cache = self.new_cache(1, 1, share_prefixes=False)
        cache.add(0)
        cache.reserve(0, 1)
        with self.active():
            self.read_source(cache, 0, None if self.family is None else dummy_sources(self.model, 1, self.device)[0])
            self.forward([RowInput(0, np.zeros(1, dtype=np.int64), 0)], cache)
        return cache

    @contextlib.contextmanager
    def active(self):
        """Inside the context, the model's attention reads our pages. It is restored on exit, also after an error."""
        with self._lock:
            if self._active == 0:
                self._device = self._find_device()  # kept while active: the lookup takes longer than a small layer
                self._entered = self._enter()
            self._active += 1
        try:
            yield self
        finally:
            with self._lock:
                self._active -= 1
                if self._active == 0:
                    self._entered.close()

    def _enter(self) -> contextlib.ExitStack:
        Captures.contexts += 1
        self._row_adapters = None
        self._unread_mask = torch.zeros(1, 1, 1, 1, dtype=self.model.dtype, device=self.device)
        with contextlib.ExitStack() as stack:
            if not self.gather:
                stack.enter_context(attention.replaced_attention(architectures.configs_of(self.model)))
            if self.recurrent is not None:
                stack.enter_context(self.recurrent.active())
            for option in self.active_options:
                stack.enter_context(option.active())
            stack.enter_context(architectures.without_checkpointing(self.model))
            stack.enter_context(architectures.without_temperature(self.model))
            if self.native is not None:
                stack.enter_context(self.native.active())
            return stack.pop_all()

    @contextlib.contextmanager
    def reading(self):
        """Inside the context, the model reads prompts in its own way, with the weights that it decodes with."""
        with contextlib.ExitStack() as stack:
            for option in self.active_options:
                if isinstance(option, QuantizedLinears):
                    stack.enter_context(option.active())
            stack.enter_context(architectures.without_checkpointing(self.model))
            yield

    @property
    def most_tokens_of_one_call(self) -> int:
        """Maximum number of tokens of the forwards that run as one native call now; 0: none do. Larger ones are several calls."""
        return 0 if self.native is None else self.native.most_tokens

    def forward(
        self, rows: list[RowInput], cache: PagedStaticCache, all_hidden_states: bool = False, tapped: bool = True
    ) -> PackedOutput:
        """One forward over the new tokens of `rows`. Writes their keys and values to their slots.

        Call inside `active()`. Shapes: see PackedBatch and PackedOutput. `tapped` False: the taps may be left out.
        """
        # Neither graphs nor programs know keys of images.
        output, is_plain = None, not (all_hidden_states or self._reads_images(rows, cache))
        if self.graphs is not None and is_plain and not have_adapters(rows):
            output = self.graphs.run([rows], cache)
        if output is None and self.native is not None and is_plain:
            output = self.native.run(rows, cache, tapped)
        return self.forward_eagerly(rows, cache, all_hidden_states) if output is None else output

    def forward_eagerly(
        self, rows: list[RowInput], cache: PagedStaticCache, all_hidden_states: bool = False
    ) -> PackedOutput:
        """`forward`, operator by operator."""
        batch = PackedBatch.pack(rows, cache, self.device, self.gather)
        batch.with_native = self.with_native
        if self.recurrent is not None:
            batch.states = make_plan(rows, batch.starts, cache, self.recurrent.chunks_continue)
        return self.forward_batch(batch, batch.logit_index, all_hidden_states)

    def forward_batch(
        self,
        batch: PackedBatch | CapturedBatch,
        logit_index: torch.Tensor | None = None,
        all_hidden_states: bool = False,
    ) -> PackedOutput:
        """`forward` over a packed batch. `logit_index` int64 [R]: tokens that need logits; None: all tokens."""
        architectures.check_autocast(self.model)
        kwargs: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if self.family is not None:
            assert isinstance(batch, PackedBatch)  # such models have no graphs
            kwargs |= arguments(self.model, self.family, batch, self._masks(batch))
        else:
            kwargs |= {"input_ids": batch.input_ids, "attention_mask": self._masks(batch)}
            kwargs[self.cache_argument] = batch.cache
            if self._takes_positions:
                kwargs["position_ids"] = batch.position_ids
        model_selects = logit_index is not None and self.selects_logits
        if model_selects:
            kwargs["logits_to_keep"] = logit_index
        if all_hidden_states:
            kwargs["output_hidden_states"] = True
        if not self.gather:
            kwargs["specdec" if self.family is None else f"{self.family.passes_on}specdec"] = batch
        model, tapped = self.model, {}
        batch.invariant = InvariantOps(type(model).__name__) if self.deterministic else None
        with batch.cache.running(batch), contextlib.ExitStack() as stack:
            # Most forwards need none of these.
            if self.num_layers is not None:
                stack.enter_context(architectures.first_layers(model, self.num_layers))
            if self.taps.last_hidden or self.taps.layers:
                stack.enter_context(architectures.tapped(model, self.taps, tapped))
            if self._has_alibi:
                assert isinstance(batch, PackedBatch)  # such models gather
                stack.enter_context(alibi.packed(model, batch))
            for table in self.tables:
                stack.enter_context(replaced_method(table, "forward", functools.partial(at_positions, batch)))
            if self.family is not None:
                assert isinstance(batch, PackedBatch)
                stack.enter_context(replaced(model, self.family, batch))
            if isinstance(batch, PackedBatch) and have_adapters(batch.inputs):
                stack.enter_context(self.row_adapters.running(batch.inputs, self.selects_logits))
            if batch.invariant is not None:
                stack.enter_context(batch.invariant)
            if isinstance(batch, PackedBatch) and self._reads_images(batch.inputs, batch.cache):
                stack.enter_context(attending_to_images(model, batch, kwargs))
            output = model(**kwargs)
        if not self.gather and batch.attention_calls == 0:
            raise UnsupportedModel(
                f"{type(model).__name__} did not call transformers' attention interface, so its outputs cannot be trusted."
            )
        ran = None if batch.states is None else batch.states.num_calls
        if self.recurrent is not None and ran != self.recurrent.num_calls:
            raise UnsupportedModel(
                f"{type(model).__name__} ran {ran} of its {self.recurrent.num_calls} recurrent layers, so "
                "their states cannot be trusted."
            )
        returned, states = output.logits[0], None
        if all_hidden_states:
            states = getattr(output, "hidden_states", None) or output.decoder_hidden_states
        logits = returned if model_selects or logit_index is None else returned.index_select(0, logit_index)
        return PackedOutput(
            logits=logits.to(torch.float32),
            last_hidden=tapped.get("last_hidden"),
            layers={index: tapped[index] for index in self.taps.layers},
            hidden_states=None if states is None else tuple(map(_of_one_line, states)),
            input_ids=batch.input_ids[0],
            all_logits=returned if self.taps.logits else None,
        )

    def _reads_images(self, rows: list[RowInput], cache: PagedStaticCache) -> bool:
        """True if some layers attend to images of these rows alone."""
        cross = cache.cross if self.family is None else None
        return cross is not None and any(row.seq_id in cross.tables for row in rows)

    @property
    def selects_logits(self) -> bool:
        """True if the model's head reads only the tokens that need logits."""
        return "logits_to_keep" in self.forward_parameters and not self.taps.logits

    @property
    def row_adapters(self) -> RowAdapters:
        """The model's LoRA layers, as they are since the model is active."""
        if self._row_adapters is None:
            self._row_adapters = RowAdapters(self.model)
        return self._row_adapters

    def _masks(self, batch: PackedBatch | CapturedBatch):
        """The model's `attention_mask` argument. It is 4-D, so that transformers passes it on unchanged; None: no layer attends."""
        if not attends(self.config):
            return None
        # Layers with segments would make a mask longer by the entries that they were given: none.
        masks = dict.fromkeys(self._windows, None if self.segments else self._unread_mask)
        if self.gather:
            assert isinstance(batch, PackedBatch)
            dtype, device = self.model.dtype, self.device
            masks = {kind: batch.dense_mask(window, dtype, device) for kind, window in self._windows.items()}
        if self._wants_masks_by_kind:
            return masks
        if self.gather and len(set(self._windows.values())) > 1:
            raise UnsupportedModel(
                f"{type(self.model).__name__} has layers with different windows and takes one mask for all, so it can only attend "
                "through pages, which its configuration does not allow (attn_implementation='eager' may)."
            )
        return next(iter(masks.values()))


def _parameters(model: PreTrainedModel) -> dict[str, inspect.Parameter]:
    """The arguments of a model's forward by name. One that wraps the class's forward and passes everything on has that one's, too."""
    arguments = dict(inspect.signature(model.forward).parameters)
    passes_on = "forward" in vars(model) and any(
        argument.kind == argument.VAR_KEYWORD for argument in arguments.values()
    )
    return {**inspect.signature(type(model).forward).parameters, **arguments} if passes_on else arguments


def _passes_positions_on(model: PreTrainedModel) -> bool:
    """True if a model's forward gives what it does not name to a decoder that takes positions."""
    passes_on = any(parameter.kind == parameter.VAR_KEYWORD for parameter in _parameters(model).values())
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None
    return passes_on and decoder is not None and "position_ids" in inspect.signature(type(decoder).forward).parameters


def _of_one_line(states: torch.Tensor) -> torch.Tensor:
    """[T, H] from hidden states [1, T, H]; [T, A, H] from streams [1, T, A, H] or [A, 1, T, H]."""
    return states[0] if states.dim() == 3 or len(states) == 1 else states[:, 0].transpose(0, 1)
