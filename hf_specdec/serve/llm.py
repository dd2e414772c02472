"""LLM: continuous batching without a server, with the interface of vLLM's class of that name."""

from __future__ import annotations

import contextlib
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
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..bundled import resolve_model
from ..candidate_generators import parse_config
from ..candidate_generators.base import DrafterContext
from ..config import nearest_hint
from ..core.errors import UnsupportedModel
from ..core.ranks import digest
from ..decoding.decoder import SpeculativeDecoder
from ..integration import make_decoder, model_lock
from ..model.encoder_decoder import check_decoder_only
from ..model.options.fingerprints import fingerprints
from ..model.structure import structure_of
from .engine.engine import Engine
from .engine.params import SamplingParams
from .engine.request import Request, RequestOutput
from .hidden_states import NIXL, KVTransferConfig, with_storage
from .ipc.messages import Load, Order, Submit, Update
from .ipc.worker import EngineWorker, load_of
from .ranks.rank_processes import RankProcesses
from .transfer import Transfers
from .transfer.nixl_link import NixlLink

if TYPE_CHECKING:
    from .metrics import Metric, Metrics

logger = logging.getLogger(__name__)

_MEMORY_SHARE = {"cpu": 0.5, "cuda": 0.8}  # share of the free memory that the KV cache may take by default
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
    "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization", "swap_space",
    "use_v2_block_manager",
)  # fmt: skip


class LLM:
    """A model that answers many prompts together, with speculation.

        llm = LLM(model="Qwen/Qwen3-0.6B", speculative_config={"method": "ngram", "num_speculative_tokens": 4})
        for output in llm.generate(["Once upon a time", "def fibonacci("], SamplingParams(temperature=0, max_tokens=64)):
            print(output.outputs[0].text)

    Args:
        model: a name, a folder, a bundled model's name, or a loaded model.
        tokenizer: a name, a folder or a tokenizer; None: the model's own. With a loaded model and None, prompts must be token ids.
        speculative_config: as for `generate()`; None: plain decoding.
        dtype: precision of the weights: "auto" (the checkpoint's), one of torch's names, or a torch dtype.
        device: device of the model; None: a GPU if there is one, else the CPU. Ignored with a loaded model.
        max_model_len: maximum number of tokens of a prompt and its answer together; None: the number of the model's positions.
        max_num_seqs: maximum number of rows that run at once.
        max_num_batched_tokens: maximum number of tokens in a step; None: 2048, or on a CPU the 256 that run as one native call, while
            decoding rows take at most half of them.
        kv_cache_memory_bytes: memory of the target's KV cache; None: half of the free memory (0.8 of a GPU's), or what `max_num_seqs`
            texts of `max_model_len` tokens need if that is less.
        seed: seed of the random numbers for requests that have no seed of their own; None: a random one.
        tensor_parallel_size: number of ranks, each of which holds a part of every layer. This process is rank 0; it starts the others on
            this machine, and `close` ends them. Must be 1 with a loaded model, which may be sharded already.
        revision: as for transformers' `from_pretrained`.
        trust_remote_code: the same.
        kv_transfer_config: vLLM's: the folder of the method `extract_hidden_states`, or disaggregated prefill.
        enable_expert_parallel: place whole experts on the ranks instead of parts of each expert.
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
        **others: Any,
    ):
        if type(tensor_parallel_size) is not int or tensor_parallel_size < 1:
            raise ValueError(f"tensor_parallel_size must be an integer of at least 1, not {tensor_parallel_size!r}.")
        given = {key: value for key, value in locals().items() if key not in ("self", "others")} | others
        transfer = KVTransferConfig.of(kv_transfer_config)
        speculative_config = with_storage(_from_older_arguments(speculative_config, others), transfer)
        _check_others(others)
        config = parse_config(speculative_config if speculative_config is not None else {"method": "none"})
        self.processes = _rank_processes(given)
        self._metrics: Metrics | None = None  # without the package for them there are none
        if importlib.util.find_spec("prometheus_client") is not None:
            from .metrics import Metrics

            name = str(getattr(getattr(model, "config", None), "_name_or_path", model))
            self._metrics = Metrics(name, lambda: load_of(self.engine))
        try:
            self.model, self.tokenizer = _loaded(given)
            self._make_engine(
                config, max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache_memory_bytes, seed,
                None if transfer is None or transfer.kv_connector != NIXL else partial(_transfers, transfer),
            )  # fmt: skip
        except BaseException:
            if self.processes is not None:
                self.processes.end()
            raise
        self._ids = itertools.count()
        self._contents: list[bytes] = []
        self._structure = structure_of(self.model)

    def _make_engine(
        self, config, max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache_memory_bytes, seed, make_transfers
    ) -> None:
        """Set `engine`, `ranks` and `max_model_len`. Arguments: see the class."""
        decoder = make_decoder(self.model, config, DrafterContext(tokenizer=self.tokenizer))
        positions, num_drafts = decoder.target.max_positions, decoder.generator.max_draft_nodes
        self.max_model_len = max_model_len or positions or 4096
        if positions is not None and self.max_model_len > positions:
            name = type(self.model).__name__
            raise ValueError(f"max_model_len is {max_model_len}; {name} has {positions} positions.")
        num_blocks = config.num_blocks or _num_blocks(
            decoder.target, self.max_model_len + num_drafts, max_num_seqs, config.block_size, kv_cache_memory_bytes, num_drafts
        )  # fmt: skip
        self.ranks = decoder.target.ranks
        if self.ranks is not None:
            agreed = digest(-1 if seed is None else seed, num_blocks)
            (seed,) = self.ranks.same([random.getrandbits(62) if seed is None else seed], agreed)
        self.engine = Engine(
            decoder, self.tokenizer, num_blocks, self.max_model_len, max_num_seqs, max_num_batched_tokens, seed, make_transfers
        )  # fmt: skip

    def generate(
        self,
        prompts: str | dict | list[int] | Iterable[str | dict | list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts. Returns one result for each, in their order.

        Args:
            prompts: one prompt or many; each is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.
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
        wanted = [Submit(str(next(self._ids)), *self._read(text), of) for text, of in zip(texts, params, strict=True)]
        if self.processes is not None and self.ranks is not None:
            self.ranks.same_object(Order("run", wanted))
        return self.run_requests(wanted, use_tqdm)

    def run_requests(self, wanted: list[Submit], use_tqdm: bool = False) -> list[RequestOutput]:
        """Run requests to their end. With several ranks, each rank calls this with the same requests.

        Raises:
            ValueError: a request cannot be served. Nothing is generated then.
            Exception: every request failed while it ran; this is the error of the first. If only some fail, `RequestOutput.error` tells.
        """
        from tqdm.auto import tqdm

        requests, ranks = [], self.ranks
        with (
            contextlib.nullcontext() if ranks is None else ranks.watched(),
            contextlib.nullcontext() if ranks is None else ranks.agreed(),
            model_lock(self.model),
            tqdm(total=len(wanted), desc="Prompts", disable=not use_tqdm or not (ranks is None or ranks.leads)) as bar,
        ):
            self._check_weights()
            try:
                for it in wanted:
                    requests.append(self.engine.add(it.id, it.prompt, it.prompt_token_ids, it.params))
                self.engine.run(lambda touched: bar.update(sum(request.finished for request in touched)))
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
            messages: one conversation (a list of messages) or a list of them.
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
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        if chat_template is None and self.tokenizer.chat_template is None:
            raise ValueError("The tokenizer has no chat template: pass chat_template=, or use generate().")
        prompts: Any = conversations and self.tokenizer.apply_chat_template(  # which refuses an empty list
            conversations, tools=tools, chat_template=chat_template, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message, tokenize=True, return_dict=False, **(chat_template_kwargs or {}),
        )  # fmt: skip
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer; None: it has none."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of the model's generation config; greedy decoding if that does not sample."""
        config = self.model.generation_config
        if not config.do_sample:
            return SamplingParams(temperature=0.0)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: getattr(config, name, None) for name in names}
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
            self._metrics.request_ended(reason, len(request.prompt_token_ids), request.num_cached_tokens, figures)

    def make_worker(
        self, deliver: Callable[[list[Update]], None], on_load: Callable[[Load], None] = lambda load: None
    ) -> EngineWorker:
        """The thread that will run the engine, not started yet; see `EngineWorker`. The other ranks are told to serve, too."""
        if self.ranks is not None:
            self.ranks.same_object(Order("serve"))
        return EngineWorker(self.engine, deliver, model_lock(self.model), self.ranks, on_load)

    def close(self) -> None:
        """Free the KV cache and end the processes of the other ranks. A model that was passed in stays usable."""
        self.engine.close()
        if self.processes is not None:
            self.processes.end(self.ranks)
            self.processes = None

    def _check_weights(self) -> None:
        """Drop cached prefixes, which old weights have computed, if weights have changed. Raises UnsupportedModel: more has changed."""
        if structure_of(self.model) != self._structure:
            raise UnsupportedModel(
                "The model's modules, hooks or adapters have changed since this LLM was made: undo the change, or make another LLM."
            )
        contents = fingerprints([*self.model.parameters(), *self.model.buffers()])
        changed = contents != self._contents
        if self.ranks is not None:
            changed = self.ranks.least(int(not changed)) == 0
        if changed:
            self.engine.decoder.forget_prefixes()
            self._contents = contents

    def _read(self, prompt: Any) -> tuple[str | None, list[int]]:
        """A prompt's text, if it was given as text, and its token ids. Raises ValueError: no prompt, or a text without a tokenizer."""
        if isinstance(prompt, dict):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            prompt = prompt.get("prompt")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("Text prompts need a tokenizer: pass one to LLM(tokenizer=...), or token ids.")
            return prompt, self.tokenizer(prompt)["input_ids"]
        if isinstance(prompt, (list, tuple)) and all(isinstance(token, int) for token in prompt):
            return None, list(prompt)
        kinds = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"
        raise ValueError(f"A prompt is {kinds}, not {type(prompt).__name__}.")


def _loaded(given: dict[str, Any]) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer, by the arguments of `LLM`."""
    model, tokenizer, dtype, size = (given[key] for key in ("model", "tokenizer", "dtype", "tensor_parallel_size"))
    origin = {key: given[key] for key in ("revision", "trust_remote_code")}
    if not isinstance(model, PreTrainedModel):
        name, sharding = resolve_model(os.fspath(model)), {}
        tokenizer = name if tokenizer is None else tokenizer
        dtype = getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
        if size > 1:
            from transformers.distributed.configuration_utils import DistributedConfig

            experts = size if given["enable_expert_parallel"] else 1
            sharding = {"distributed_config": DistributedConfig(tp_size=size, ep_size=experts)}
        check_decoder_only(name, **origin)
        loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **origin, **sharding).eval()
        on_one = given["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
        model = loaded.to(on_one) if size == 1 else loaded
    if isinstance(tokenizer, (str, Path)):
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(os.fspath(tokenizer)), **origin)
    return model, tokenizer


def _transfers(config: KVTransferConfig, decoder: SpeculativeDecoder) -> Transfers:
    seconds = {key: value for key, value in config.kv_connector_extra_config.items() if key.endswith("_seconds")}
    return Transfers(decoder, NixlLink(), **seconds)


def _rank_processes(given: dict[str, Any]) -> RankProcesses | None:
    """Start the other ranks' processes; None for one rank, or under torchrun. Raises ValueError: the arguments do not fit together."""
    size = given["tensor_parallel_size"]
    if size == 1:
        return None
    if isinstance(given["model"], PreTrainedModel):
        raise ValueError(
            f"tensor_parallel_size={size} shards a model while it is loaded: pass a name or a folder; or a model that was loaded with "
            "distributed_config=DistributedConfig(tp_size=...) on every rank, without tensor_parallel_size."
        )
    if dist.is_initialized() or "WORLD_SIZE" in os.environ:
        return None
    return RankProcesses(size, {**given, "model": os.fspath(given["model"])})


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


def _num_blocks(
    target, most_tokens: int, max_num_seqs: int, block_size: int, memory_bytes: int | None, num_drafts: int
) -> int:
    """Number of KV blocks for `max_num_seqs` texts of `most_tokens` tokens, or as many as the memory holds.

    Args:
        memory_bytes: for KV and recurrent states; None: a share of the free memory.
        num_drafts: maximum number of nodes of a row's draft. Layers with a recurrent state need memory for each of them.

    Raises:
        ValueError: not one block fits, or the amount of free memory is unknown.
    """
    wanted = max_num_seqs * (-(-most_tokens // block_size) + 1)
    per_block = max(target.bytes_per_token(), 1) * block_size  # 0: no layer has keys
    if memory_bytes is None:
        free = target.free_bytes()
        if free is None:
            raise ValueError("This system does not say how much memory is free: pass kv_cache_memory_bytes.")
        memory_bytes = int(_MEMORY_SHARE[target.device.type] * free)
    target.cache_bytes = memory_bytes
    target.choose_states(max_num_seqs, num_drafts)
    states = target.bytes_of_states(num_drafts) * max_num_seqs + target.bytes_of_prefix_states()
    fitting = (memory_bytes - states) // per_block
    if fitting < 1:
        beside = f" in addition to {states} bytes of recurrent states of {max_num_seqs} texts" if states else ""
        raise ValueError(
            f"kv_cache_memory_bytes of {memory_bytes} holds no block of {block_size} tokens ({per_block} bytes){beside}."
        )
    return min(wanted, fitting)
