"""LLM: continuous batching without a server, with the interface of vLLM's class of that name."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import itertools
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoFeatureExtractor, AutoTokenizer, PreTrainedModel, ProcessorMixin
from transformers.models.auto import modeling_auto as auto

from ..bundled import resolve_model
from ..candidate_generators import parse_config
from ..candidate_generators.base import DrafterContext
from ..config import SpeculativeConfig, nearest_hint
from ..core.errors import UnsupportedModel
from ..core.ranks import digest
from ..integration import make_decoder, model_lock
from ..model.architectures import all_modules
from ..model.encoder_decoder import is_encoder_decoder
from ..model.image_layers import most_keys_of_image
from ..model.options.fingerprints import fingerprints
from ..model.structure import state_of, structure_of
from .engine.encoder import EncoderFacts, EncoderSide
from .engine.engine import Engine
from .engine.images import load_processor, reads_images
from .engine.memory import num_blocks_for
from .engine.outputs import RequestOutput
from .engine.params import OF_MODELS, SamplingParams
from .engine.prompts import PromptReader
from .engine.request import Request
from .hidden_states import NIXL, KVTransferConfig, with_storage
from .ipc.messages import Load, Submit, Update
from .ipc.worker import EngineWorker, load_of
from .ranks import RankProcesses
from .transfer import Transfers

if TYPE_CHECKING:
    from .metrics import Metric, Metrics

logger = logging.getLogger(__name__)

_OLDER_NAMES = {  # vLLM's arguments before it had `speculative_config` → the keys that replaced them
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
}
# vLLM's arguments that are ignored, with a warning: what they switch on is always on here, or does not exist.
_IGNORED_ARGUMENTS = (
    "async_scheduling", "compilation_config", "disable_log_stats", "distributed_executor_backend", "enable_chunked_prefill",
    "enable_lora", "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "max_lora_rank", "max_loras", "swap_space",
    "use_v2_block_manager",
)  # fmt: skip


class LLM:
    """A model that answers many prompts together, with speculation.

        llm = LLM(model="Qwen/Qwen3-0.6B", speculative_config={"method": "ngram", "num_speculative_tokens": 4})
        for output in llm.generate(["Once upon a time", "def fibonacci("], SamplingParams(temperature=0, max_tokens=64)):
            print(output.outputs[0].text)

    Args:
        model: a name, a folder, a bundled model's name, or a loaded model, with PEFT's adapters or without.
        tokenizer: a name, a folder, a tokenizer, or transformers' processor of images and text; None: the model's own. With a loaded
            model and None, prompts must be token ids.
        speculative_config: as for `generate()`; None: plain decoding.
        dtype: precision of the weights: "auto" (the checkpoint's), one of torch's names, or a torch dtype.
        device: device of the model; None: a GPU if there is one, else the CPU. Ignored with a loaded model.
        max_model_len: maximum number of tokens of a prompt and its answer together; None: the number of the model's positions. With an
            encoder-decoder model, of a text that the encoder reads, and of the decoder's prompt and the answer.
        max_num_seqs: maximum number of rows that run at once.
        max_num_batched_tokens: maximum number of tokens in a step; None: 2048, or on a CPU the 256 that run as one native call, while
            decoding rows take at most half of them.
        kv_cache_dtype: the key of that name in `speculative_config`: "int8" keeps keys and values in 8 bits, which is lossy.
        kv_cache_memory_bytes: memory of the target's keys, of which images may have a part; None: half of the free memory (0.8 of a
            GPU's), or what `max_num_seqs` texts of `max_model_len` tokens need if that is less.
        seed: seed of the random numbers for requests that have no seed of their own; None: a random one.
        tensor_parallel_size: number of ranks, each of which holds a part of every layer. This process is rank 0; it starts the others on
            this machine, and `close` ends them. Must be 1 with a loaded model, which may be sharded already.
        revision: as for transformers' `from_pretrained`.
        trust_remote_code: the same.
        kv_transfer_config: vLLM's: the folder of the method `extract_hidden_states`, or disaggregated prefill.
        enable_expert_parallel: place whole experts on the ranks instead of parts of each expert.
        lora_modules: LoRA adapters by name: folders or ids on the Hub. `SamplingParams(lora=name)` chooses one.
        others: vLLM's further arguments: older ones are translated, and those without effect are ignored, each with a warning.

    Raises:
        ValueError: an argument cannot be used.
        TypeError: an argument is unknown.
    """

    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        tokenizer: Any = None,
        speculative_config: Any = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        seed: int | None = 0,
        tensor_parallel_size: int = 1,
        revision: str | None = None,
        trust_remote_code: bool = False,
        kv_transfer_config: KVTransferConfig | dict[str, Any] | None = None,
        enable_expert_parallel: bool = False,
        lora_modules: dict[str, str] | None = None,
        kv_cache_dtype: str = "auto",
        **others: Any,
    ):
        given = {key: value for key, value in locals().items() if key not in ("self", "others")} | others
        transfer = KVTransferConfig.of(kv_transfer_config)
        speculative_config = with_storage(_from_older_arguments(speculative_config, others), transfer)
        _check_others(others)
        config = parse_config(speculative_config if speculative_config is not None else {"method": "none"})
        if kv_cache_dtype != "auto":
            config = copy.copy(config)
            config.kv_cache_dtype = kv_cache_dtype
            config.check_keys()
        self.processes = RankProcesses.of(given)
        self._metrics: Metrics | None = None  # without the package for them there are none
        if importlib.util.find_spec("prometheus_client") is not None:
            from .metrics import Metrics

            name = str(getattr(getattr(model, "config", None), "_name_or_path", model))
            self._metrics = Metrics(name, lambda: load_of(self.engine))
        try:
            self.model, self.tokenizer, self.processor = _loaded(given)
            self._make_engine(config, transfer, given)
            self._structure = structure_of(self.model)
            for name, path in (lora_modules or {}).items():
                self.load_lora_adapter(name, path)
        except BaseException:
            if "engine" in vars(self):
                self.engine.close()  # it may have changed a model that was passed in
            if self.processes is not None:
                self.processes.end()
            raise
        self._ids = itertools.count()
        self._contents: Any = None

    def _make_engine(self, config: SpeculativeConfig, transfer: KVTransferConfig | None, given: dict[str, Any]) -> None:
        """Set `engine`, `encoder`, `ranks` and `max_model_len`. `given`: the arguments of the class."""
        decoder = make_decoder(self.model, config, DrafterContext(tokenizer=self.tokenizer))
        positions, seed, name = decoder.target.max_positions, given["seed"], type(self.model).__name__
        self.max_model_len = given["max_model_len"] or positions or 4096
        if positions is not None and self.max_model_len > positions:
            raise ValueError(f"max_model_len is {self.max_model_len}; {name} has {positions} positions.")
        self.encoder, make_transfers, side = EncoderFacts.of(self.model, self.processor, self.max_model_len), None, None
        if transfer is not None and transfer.kv_connector == NIXL:
            if self.encoder is not None:
                raise ValueError(f"kv_transfer_config is for decoder-only models; {name} has an encoder.")
            make_transfers = partial(Transfers.of, transfer.kv_connector_extra_config)
        self.prompts = PromptReader(self.model, self.tokenizer, self.processor, self.encoder)
        num_states = most_keys_of_image(self.model) if self.encoder is None else self.encoder.max_length
        num_blocks, num_source_blocks = num_blocks_for(
            decoder, self.max_model_len, num_states, given["max_num_seqs"], given["kv_cache_memory_bytes"]
        )
        if self.encoder is not None:
            side = EncoderSide(self.model, num_states, num_source_blocks)
        self.ranks = decoder.target.ranks
        if self.ranks is not None:
            agreed = digest(-1 if seed is None else seed, num_blocks)
            (seed,) = self.ranks.same([random.getrandbits(62) if seed is None else seed], agreed)
        limits = self.max_model_len, given["max_num_seqs"], given["max_num_batched_tokens"]
        self.engine = Engine(
            decoder, self.tokenizer, num_blocks, *limits, seed, make_transfers, side, num_source_blocks
        )

    def generate(
        self,
        prompts: str | dict | list[int] | Iterable[str | dict | list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts. Returns one result for each, in their order.

        Args:
            prompts: one prompt or many; each is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}. An
                encoder-decoder model's encoder reads it; {"encoder_prompt": prompt, "decoder_prompt": prompt} has both; a
                decoder's text follows the token with which the model begins. Whisper's is
                {"prompt": text, "multi_modal_data": {"audio": (samples, sampling rate)}}, of at most one window; without "prompt" it
                transcribes in the language that it hears. A model with a vision tower takes {"prompt": text with placeholders,
                "multi_modal_data": {"image": one or a list}}, images as its processor takes them; one that hears, {"audio": (samples,
                rate) or list}. A pair whose encoder reads an image takes that; "prompt" is how its decoder begins.
            sampling_params: for all prompts, or a list with one for each; None: `get_default_sampling_params`.
            use_tqdm: show a progress bar.

        Raises:
            ValueError: a prompt cannot be served. Nothing is generated then.
        """
        is_ids = isinstance(prompts, (list, tuple)) and prompts and all(isinstance(token, int) for token in prompts)
        texts = [prompts] if is_ids or isinstance(prompts, (str, dict)) else list(prompts)
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = list(params) if isinstance(params, (list, tuple)) else [params] * len(texts)
        if len(params) != len(texts):
            counts = f"{len(texts)} prompts and {len(params)} sampling_params"
            raise ValueError(f"There are {counts}: pass one for all, or one each.")
        wanted = [self._submit(text, of) for text, of in zip(texts, params, strict=True)]
        if self.processes is not None and self.ranks is not None:
            self.ranks.same_object(wanted)
        return self.run_requests(wanted, use_tqdm)

    def run_requests(self, wanted: list[Submit], use_tqdm: bool = False) -> list[RequestOutput]:
        """Run requests to their end. With several ranks, each rank calls this with the same requests.

        Raises:
            ValueError: a request cannot be served. Nothing is generated then.
            Exception: every request failed while it ran; this is the error of the first. If only some fail, `RequestOutput.error` tells.
        """
        from tqdm.auto import tqdm

        requests, ranks, ended = [], self.ranks, self.engine.num_ended
        with (
            contextlib.nullcontext() if ranks is None else ranks.watched(),
            contextlib.nullcontext() if ranks is None else ranks.agreed(),
            model_lock(self.model),
            tqdm(total=len(wanted), desc="Prompts", disable=not use_tqdm or not (ranks is None or ranks.leads)) as bar,
        ):
            self._check_weights()
            try:
                for submit in wanted:
                    requests.append(self.engine.add(*submit))
                self.engine.run(lambda touched: bar.update(self.engine.num_ended - ended - bar.n))
            finally:
                for request in requests:
                    self.engine.abort(request, request.error)
        self._count(requests)
        errors = [request.error for request in requests if request.error is not None]
        if errors and len(errors) == len(requests):
            raise errors[0]
        return [request.result() for request in requests]

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations. Returns one result for each, in their order.

        Args:
            messages: one conversation (a list of messages) or a list of them. An image is a part {"type": "image", "image": image} or
                {"type": "image_url", "image_url": {"url": a data URL}} of a message's content; {"type": "audio", "audio": (samples,
                sampling rate)} is a recording.
            sampling_params: see `generate`.
            use_tqdm: see `generate`.
            chat_template: a Jinja template; None: the tokenizer's own.
            add_generation_prompt: as for transformers' `apply_chat_template`.
            continue_final_message: the same.
            tools: the same.
            chat_template_kwargs: further variables for the template.

        Raises:
            ValueError: the tokenizer has no chat template and none is given.
        """
        if self.tokenizer is None:
            raise ValueError("chat() needs a tokenizer: pass one to LLM(tokenizer=...).")
        conversations: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        if chat_template is None and self.tokenizer.chat_template is None:
            raise ValueError("The tokenizer has no chat template: pass chat_template=, or use generate().")
        prompts = self.prompts.of_conversations(
            conversations, tools=tools, chat_template=chat_template, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message, **(chat_template_kwargs or {}),
        )  # fmt: skip
        return self.generate(prompts, sampling_params, use_tqdm)

    def load_lora_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter that PEFT has saved, for requests with `SamplingParams(lora=name)`. Rows of different adapters share steps,
        but no keys and values. Raises ValueError: it cannot be loaded; nothing has changed then."""
        if self.ranks is not None:
            raise ValueError("LoRA adapters need a whole model: use tensor_parallel_size=1.")
        with model_lock(self.model):
            self.engine.adapters.load(name, path)
            self._structure = structure_of(self.model)

    def unload_lora_adapter(self, name: str) -> None:
        """Free a LoRA adapter. Raises ValueError: none of this name is loaded."""
        with model_lock(self.model):
            self.engine.adapters.unload(name)
            self.engine.free_adapters()
            self._structure = structure_of(self.model)

    def update_weights(self, weights: str | os.PathLike | Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace weights by those of a folder in transformers' format, or by named tensors such as `model.named_parameters()`. Raises
        ValueError: they are not this model's; nothing has changed then."""
        with model_lock(self.model):
            self.engine.control.update(weights)

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache and move the weights of a GPU to host memory (1), or free them (2; `update_weights` after `wake_up`)."""
        with model_lock(self.model):
            self.engine.control.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Bring back what sleeps: "weights", "kv_cache"; None: both."""
        with model_lock(self.model):
            self.engine.control.wake_up(tags)

    def reset_prefix_cache(self) -> None:
        """Drop the KV of texts that have ended."""
        with model_lock(self.model):
            self.engine.control.reset_prefix_cache()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer; None: it has none."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of the model's generation config; greedy decoding if that does not sample."""
        config = self.model.generation_config
        if not config.do_sample:
            penalty = None if self.encoder is None else config.repetition_penalty
            return SamplingParams(temperature=0.0, repetition_penalty=penalty or 1.0)
        given = {name: getattr(config, name, None) for name in OF_MODELS}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def get_metrics(self) -> list[Metric]:
        """Metrics of all requests so far, under the names that the server's `/metrics` has: `Counter`, `Gauge` and `Vector` of
        `hf_specdec.serve.metrics`, as vLLM's method returns them. Figures of speculation are `vllm:spec_decode_*`.

        Raises:
            ImportError: prometheus-client is not installed.
        """
        if self._metrics is None:
            raise ImportError("get_metrics() needs prometheus-client: pip install 'hf-specdec[serve]'")
        return self._metrics.snapshot()

    def _count(self, requests: list[Request]) -> None:
        if self._metrics is None:
            return
        for request in requests:
            figures = request.figures(self.engine.decoder.config.longest_draft)
            self._metrics.tokens_written(figures["num_new_tokens"], figures["num_steps"])
            reason = "error" if request.error is not None else request.choices[0].output.finish_reason or "abort"
            counts = request.num_prompt, request.num_cached_tokens
            self._metrics.request_ended(reason, *counts, figures, request.params.lora)

    def make_worker(
        self, deliver: Callable[[list[Update]], None], on_load: Callable[[Load], None] = lambda load: None
    ) -> EngineWorker:
        """The thread that will run the engine, not started yet; see `EngineWorker`. The other ranks are told to serve, too."""
        if self.ranks is not None:
            self.ranks.same_object("serve")
        return EngineWorker(self.engine, deliver, model_lock(self.model), self.ranks, on_load)

    def close(self) -> None:
        """Free the KV cache and end the processes of the other ranks. A model that was passed in stays usable."""
        self.engine.close()
        if self.processes is not None:
            self.processes.end(self.ranks)
            self.processes = None

    def _check_weights(self) -> None:
        """Drop cached prefixes if weights or settings that computed them have changed. Raises UnsupportedModel: more has changed."""
        if (obstacle := self.engine.control.obstacle) is not None:
            raise ValueError(obstacle)
        if structure_of(self.model) != self._structure:
            raise UnsupportedModel(
                "The model's modules, hooks or adapters have changed since this LLM was made: undo the change, or make another LLM."
            )
        contents = state_of(all_modules(self.model)), fingerprints([*self.model.parameters(), *self.model.buffers()])
        changed = contents != self._contents
        if self.ranks is not None:
            changed = self.ranks.least(int(not changed)) == 0
        if changed:
            self.engine.decoder.forget_prefixes()
            self._contents = contents

    def _submit(self, prompt: Any, params: SamplingParams) -> Submit:
        text, ids, reasoning, encoder = self.prompts.read(prompt, params)
        return Submit(str(next(self._ids)), text, ids, params, reasoning, encoder)


def _loaded(given: dict[str, Any]) -> tuple[PreTrainedModel, Any, Any]:
    """The model, its tokenizer, and by the arguments of `LLM` what it needs to read more than text (else None): its processor of images, or
    the feature extractor of a Whisper model from a folder."""
    model, tokenizer, dtype, size = (given[key] for key in ("model", "tokenizer", "dtype", "tensor_parallel_size"))
    origin = {key: given[key] for key in ("revision", "trust_remote_code")}
    if hasattr(model, "get_base_model"):  # PEFT's wrapper; its adapters are layers of the model
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError("LLM adds no virtual tokens to prompts: use generate(), or an adapter of weights.")
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        name, sharding = resolve_model(os.fspath(model)), {}
        tokenizer = name if tokenizer is None else tokenizer
        dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
        if size > 1:
            from transformers.distributed.configuration_utils import DistributedConfig

            experts = size if given["enable_expert_parallel"] else 1
            sharding = {"distributed_config": DistributedConfig(tp_size=size, ep_size=experts)}
        config = AutoConfig.from_pretrained(name, **origin)
        kind: Any = auto.AutoModelForImageTextToText if reads_images(config) else auto.AutoModelForCausalLM
        if is_encoder_decoder(config) and type(config) in auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING:
            kind = auto.AutoModelForSpeechSeq2Seq
        elif type(config) in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:  # also of decoders that hear
            kind = auto.AutoModelForSeq2SeqLM
        elif is_encoder_decoder(config) and config.model_type != "vision-encoder-decoder":
            raise UnsupportedModel(
                f"{name} is a {config.model_type} model, whose encoder LLM does not know: call generate()."
            )
        loaded: Any = kind.from_pretrained(name, dtype=dtype, **origin, **sharding).eval()
        device = given["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
        model = loaded.to(device) if size == 1 else loaded
    if isinstance(tokenizer, (str, Path)):
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(os.fspath(tokenizer)), **origin)
    if isinstance(tokenizer, ProcessorMixin):
        return model, tokenizer.tokenizer, tokenizer
    folder, processor = str(model.config._name_or_path), None
    if model.config.model_type == "whisper" and folder:
        processor = AutoFeatureExtractor.from_pretrained(folder, **origin)
    elif folder:
        processor = load_processor(folder, model.config, tokenizer, **origin)
    return model, tokenizer, processor


def _from_older_arguments(config: Any, others: dict[str, Any]) -> Any:
    """`speculative_config`, or one made from vLLM's older arguments, which are removed from `others`. Raises ValueError: both are given."""
    given = {key: others.pop(key) for key in _OLDER_NAMES if key in others}
    if not given:
        return config
    if config is not None:
        raise ValueError(f"{', '.join(given)} cannot be combined with speculative_config: put everything into that.")
    config = {_OLDER_NAMES[key]: value for key, value in given.items()}
    warnings.warn(f"{', '.join(given)}: pass speculative_config={config!r} instead.", FutureWarning, stacklevel=3)
    return config


def _check_others(others: dict[str, Any]) -> None:
    ignored = [key for key in others if key in _IGNORED_ARGUMENTS]
    if ignored:
        logger.warning("LLM(%s): ignored, because it has no effect here.", ", ".join(ignored))
    if unknown := [key for key in others if key not in _IGNORED_ARGUMENTS]:
        hint = nearest_hint(unknown[0], [*inspect.signature(LLM).parameters, *_IGNORED_ARGUMENTS, *_OLDER_NAMES])
        names = ", ".join(map(repr, unknown))
        raise TypeError(f"LLM() has no argument {names}{hint}; docs/coming-from/vllm.md says which of vLLM's it takes.")
