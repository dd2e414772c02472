"""Plain decoding of a 4-bit or 8-bit model of Llama-3-8B's shape on a CPU, batch 1, beside llama.cpp's Q4_0: tokens a second of CPU time.

    python benchmarks/quantized_8b.py --llama-cpp-python VENV/bin/python --output benchmarks/results/quantized-cpu-8b.json

Weights are random. Layers are made one after the other, so that a model of 8 B parameters never takes more memory than 4-bit layers and
bfloat16 embeddings. llama.cpp (scripts/peers_venv.sh) reads a file of the same shape. Both answer a prompt with `--tokens` tokens, in
turns; each figure is the median of the turns, each ratio the median of ratios within a turn.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode import Worker
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec.core.rows import RowInput
from hf_specdec.model.options.native_weights import NativeWeight
from hf_specdec.model.options.quantized import num_bytes, quantize_for_good
from hf_specdec.model.prepare import prepare

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 128256},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "vocab_size": 128256},
}  # fmt: skip
PROMPT = 16  # tokens


def config_of(shape: str) -> LlamaConfig:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    return LlamaConfig(
        **SHAPES[shape],
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def made(config: LlamaConfig, kind: str) -> LlamaForCausalLM:
    """A model whose layers have copies of one layer's quantized weights."""
    with torch.device("meta"):
        made: Any = LlamaForCausalLM(config)
        model = made.to(torch.bfloat16).eval()
    first = model.model.layers[0].to_empty(device="cpu")
    for parameter in first.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() == 2 else nn.init.ones_(parameter)
    quantize_for_good(first, kind)
    source = dict(first.named_modules())
    for layer in model.model.layers[1:]:
        for name, module in layer.named_modules():
            for key, parameter in source[name]._parameters.items():
                module._parameters[key] = None if parameter is None else _copied(parameter)
    for module in (model.model.embed_tokens, model.lm_head, model.model.norm):
        module.to_empty(device="cpu")
        for parameter in module.parameters():
            parameter.data.uniform_(-0.03, 0.03) if parameter.dim() == 2 else nn.init.ones_(parameter)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.requires_grad_(False)


def _copied(parameter: torch.Tensor) -> nn.Parameter:
    own = parameter.data.clone() if type(parameter) is nn.Parameter else None
    if own is None:
        assert isinstance(parameter, NativeWeight)
        own = NativeWeight(parameter.panels.clone(), parameter.form, parameter.dtype)
    return nn.Parameter(own, requires_grad=False)


class Ours:
    """Greedy decoding of one text, forward by forward."""

    def __init__(self, model: LlamaForCausalLM, length: int):
        self.packed = prepare(model)
        self.blocks = length // 16 + 1

    @torch.no_grad()
    def decode(self, num_tokens: int) -> float:
        """CPU seconds of `num_tokens` tokens after a prompt."""
        packed = self.packed
        cache = packed.new_cache(num_blocks=self.blocks, block_size=16, share_prefixes=False)
        cache.add(0)
        cache.reserve(0, self.blocks * 16)
        with packed.active():
            token = packed.forward([RowInput(0, np.arange(5, 5 + PROMPT), 0)], cache).logits[-1].argmax()
            begun = time.process_time()
            for step in range(num_tokens):
                token = packed.forward([RowInput(0, np.array([int(token)]), PROMPT + step)], cache).logits[-1].argmax()
            return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", choices=list(SHAPES))
    parser.add_argument("--kind", default="wint4", choices=("wint4", "wint8"))
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--llama-cpp-python", help="the Python of an environment with llama-cpp-python")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = config_of(arguments.shape)
    model = made(config, arguments.kind)
    ours = Ours(model, PROMPT + arguments.tokens)
    result = {
        "shape": arguments.shape, "kind": arguments.kind, "threads": 1, "tokens": arguments.tokens, "repeats": arguments.repeats,
        "gibibytes": round(num_bytes(model) / 2**30, 2), "tokens_per_second": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        worker = None
        if arguments.llama_cpp_python:
            config.save_pretrained(folder)
            given = {"model": folder, "dtype": "q4_0", "threads": 1, "rows": 1}
            worker = Worker(arguments.llama_cpp_python, "llama_cpp_worker.py", given)
            result["llama.cpp"] = {"version": worker.version, "gibibytes": _file_size(Path(folder))}
        speeds: dict[str, list[float]] = {"ours": [], "llama.cpp": []}
        for turn in range(arguments.repeats + 1):
            found = {"ours": arguments.tokens / ours.decode(arguments.tokens)}
            if worker is not None:
                short, long = (_seconds(worker, count) for count in (1, 1 + arguments.tokens))
                found["llama.cpp"] = arguments.tokens / (long - short)
            print(turn, {name: round(each, 2) for name, each in found.items()}, flush=True)
            for name, each in found.items() if turn else ():  # the first warms up
                speeds[name].append(each)
    assert ours.packed.native is not None and ours.packed.native.refused is None
    for name, each in speeds.items():
        if each:
            result["tokens_per_second"][name] = round(statistics.median(each), 2)
    if speeds["llama.cpp"]:
        ratios = [a / b for a, b in zip(speeds["ours"], speeds["llama.cpp"], strict=True)]
        result["ratio"] = round(statistics.median(ratios), 2)
        result["quartiles"] = [round(each, 2) for each in np.quantile(ratios, (0.25, 0.75))]
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


def _file_size(folder: Path) -> float:
    return round(sum(each.stat().st_size for each in folder.glob("*.gguf")) / 2**30, 2)


def _seconds(worker: Worker, count: int) -> float:
    """CPU seconds in which llama.cpp reads the prompt and writes `count` tokens."""
    request = {"prompts": [list(range(5, 5 + PROMPT))], "max_tokens": count}
    return worker._ask(request)["cpu_seconds"]


if __name__ == "__main__":
    main()
