"""prepare(): checks a model and applies its options: quantization, compilation, prepacking, determinism, CUDA graphs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from transformers import PreTrainedModel

from ..core.errors import UnsupportedModel
from ..core.output import Taps
from . import architectures, self_test
from .attention import paged_attention_forward
from .captures import uses_graphs
from .graphs import GraphRunner
from .native import NativeRunner, can_try
from .options import invariant_check
from .options.compiled import CompiledLayers, RewrittenLayers, layers_of
from .options.prepacked import prepack
from .options.quantized import QuantizedLinears, quantize_for_good, quantized_linears, quantizes_natively
from .options.replaced_linears import few_row_linears
from .packed_model import Activated, PackedModel


@dataclass(frozen=True)
class ModelOptions:
    """How a model runs. None lets the library decide.

    Attributes:
        prepack_weights: keep a second copy of the weights, packed for the CPU's fastest product.
        cuda_graphs: run decoding steps as CUDA graphs.
        deterministic: give a token's logits the same bits whatever else is in the batch.
        keep_linears: never replace the linear layers, because a deterministic model runs them, too.
        quantization: "wint8" or "wint4" weights in the linear layers; None: the model's own weights.
        owned: the model is ours, so quantized weights may replace its own. Otherwise they are swapped in while it is active.
        recurrent_states: "kept" or "replayed": what is kept of each draft by layers with a recurrent state. "auto": see
            `PackedModel.choose_states`.
        kv_cache_dtype: "int8": keep keys and values in int8. "auto": in the model's dtype.
        native: run forward passes, and products with quantized weights, in the native library on a CPU. None: where it is compiled
            and can run the model; False: use none of it.
        compile: compile the decoder layers. None: only trace and rewrite them, where they run as CUDA graphs.
    """

    prepack_weights: bool | None = None
    cuda_graphs: bool | None = False
    deterministic: bool = False
    keep_linears: bool = False
    quantization: str | None = None
    owned: bool = False
    compile: bool | None = False
    recurrent_states: str = "auto"
    native: bool | None = None
    kv_cache_dtype: str = "auto"


DEFAULTS = ModelOptions()


def prepare(
    model: PreTrainedModel,
    options: ModelOptions = DEFAULTS,
    taps: Taps | None = None,
    num_layers: int | None = None,
    borrowed: bool = False,
) -> PackedModel:
    """A PackedModel with its options applied.

    Raises:
        UnsupportedModel: the model or one of its options cannot run correctly here; the message says why.
    """
    packed = PackedModel(model, taps, num_layers, borrowed)
    _set_states(packed, options)
    if options.kv_cache_dtype == "int8":
        _quantize_cache(packed)
    if packed.family is not None:
        _check_options(packed, options, "an encoder-decoder model")
    if packed.segments:
        _check_options(packed, options, "whose layers compress segments of the text")
    # Prepacked products depend on the number of rows, which determinism forbids; and they cannot be compiled.
    keeps_linears = options.deterministic or options.keep_linears
    wants_prepacked = False if keeps_linears or options.compile else options.prepack_weights
    linears: Activated | None = None if options.quantization is not None else prepack(model, wants_prepacked)
    packed.with_native = options.native is not False
    # A program of the native library can do nothing of these.
    others = options.deterministic, options.compile, options.prepack_weights
    tries_native = options.native is not False and not any(others) and can_try(packed)
    packed.active_options = [option for option in (linears,) if option is not None and not tries_native]
    self_test.check(packed)

    quantized: QuantizedLinears | None = None
    if options.quantization is not None:
        if options.owned:
            quantize_for_good(model, options.quantization, native=quantizes_natively(options))
        else:
            quantized = quantized_linears(model, options.quantization, quantizes_natively(options))
        with quantized.active() if quantized is not None else contextlib.nullcontext():
            linears = prepack(model, wants_prepacked)
    packed.active_options = [option for option in (quantized, linears) if option is not None]
    if options.deterministic:
        if packed.ranks is not None and packed.ranks.size > 2:
            raise UnsupportedModel(
                f"'deterministic': {type(model).__name__} is sharded over {packed.ranks.size} ranks, whose sums are added in an order that "
                "depends on an element's place. It works with 2 ranks. Leave the key out, or use tp_size=2."
            )
        packed.deterministic = True
        invariant_check.check(packed)
    layers: Activated | None = None
    if options.compile:
        if packed.gather or packed.is_latent:
            raise UnsupportedModel(
                f"'compile' needs a model on transformers' attention interface that caches whole keys; {type(model).__name__} is none. "
                "Leave the key out."
            )
        layers = layers_of(model, paged_attention_forward, CompiledLayers)
    if uses_graphs(options.cuda_graphs, packed):
        packed.graphs = GraphRunner(packed, by_lines=options.deterministic)
        if not keeps_linears:
            left_out = list(architectures.decoder_layers(model)) if options.compile else ()
            linears = few_row_linears(model, left_out=left_out)
        traces = options.compile is None and not packed.is_latent  # latents pass through no operator of a traced layer
        if traces and not options.deterministic and options.quantization is None:
            layers = layers_of(model, paged_attention_forward, RewrittenLayers)
    # Quantized weights come first, so that the options entered after them compute with these weights.
    packed.active_options = [option for option in (quantized, linears, layers) if option is not None]
    if tries_native and can_try(packed):
        packed.native = NativeRunner(packed, otherwise=linears, required=bool(options.native))
        packed.active_options = [] if quantized is None else [quantized]
    elif options.native:
        raise UnsupportedModel(
            f"'native' cannot run {type(model).__name__} here: it needs the compiled library (`hf-specdec models` says whether it is "
            "there) and a whole model on the CPU that attends to pages. Leave the key out."
        )
    return packed


def _quantize_cache(packed: PackedModel) -> None:
    """Keep keys and values in int8. Raises UnsupportedModel: this model caches other things, or more."""
    kinds = {
        "an encoder-decoder model": packed.family is not None, "which is sharded over ranks": packed.ranks is not None,
        "which caches compressed keys": packed.is_latent or bool(packed.segments),
        "whose layers have a recurrent state": packed.recurrent is not None,
    }  # fmt: skip
    for kind in [kind for kind, is_one in kinds.items() if is_one]:
        raise _cannot("kv_cache_dtype 'int8'", packed, kind)
    packed.quantizes_cache = True


def _set_states(packed: PackedModel, options: ModelOptions) -> None:
    """Decide what is kept of each draft by layers with a recurrent state. Raises UnsupportedModel: what is asked for is impossible."""
    name, wanted = type(packed.model).__name__, options.recurrent_states
    if packed.recurrent is None:
        if wanted != "auto":
            raise UnsupportedModel(
                f"'recurrent_states' is for models with recurrent layers; {name} has none. Leave it out."
            )
        return
    _check_options(packed, options, "whose layers have a recurrent state")
    steps = packed.recurrent.family.steps
    if wanted == "replayed" and steps:
        raise UnsupportedModel(f"'recurrent_states' of {name} are kept, not replayed: leave it out.")
    packed.chooses_states, packed.replays_drafts = wanted == "auto" and not steps, wanted == "replayed"


def _check_options(packed: PackedModel, options: ModelOptions, what: str) -> None:
    """Raise UnsupportedModel for options that are not shown to be right with such a model."""
    wanted = {
        "early_exit": packed.num_layers is not None, "deterministic": options.deterministic, "compile": bool(options.compile),
        "target_quantization or quantization": options.quantization is not None,
    }  # fmt: skip
    for name in [name for name, is_set in wanted.items() if is_set]:
        raise _cannot(name, packed, what)


def _cannot(name: str, packed: PackedModel, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"{name} cannot be used with {type(packed.model).__name__}, {what}. Leave the key out.")
