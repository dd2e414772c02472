"""Targets that other libraries have quantized, on this machine: the path that runs, texts beside plain `generate()` of the same quantized
model, CPU time over it, and bytes of weights.

    python benchmarks/loaded_quantized.py --output benchmarks/results/loaded-quantized-cpu.json
    python benchmarks/loaded_quantized.py --kinds "quanto int4" --dtypes bfloat16 --turns 9

The bundled model at the cost of a larger one, one thread, greedy, 32 tokens, batch 1 and 5. Texts: rows that are equal, of all rows with
`none`, `ngram` and `draft_model`. Times: whole calls in turns; medians of a call's CPU time over that of plain `generate()` beside it.
Kinds whose library is missing are left out by name. With `--output`, kinds that are in the file already are replaced, others stay.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from decode import machine
from loads import SIZES, larger, prompts
from transformers import AutoModelForCausalLM

from hf_specdec import parse_config
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.integration import get_decoder
from hf_specdec.model.options.quantized import num_bytes

CONFIGS = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 4},
}
NEW_TOKENS, BATCHES = 32, (1, 5)


# ---- how the kinds are loaded: functions of a folder with the unquantized model, and a dtype ------------------------


def as_it_is(folder: str, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def by(config: str, **options: Any) -> Callable[[str, torch.dtype], Any]:
    """With one of transformers' quantization configurations; option values may be functions of the dtype."""

    def load(folder: str, dtype: torch.dtype) -> Any:
        own = {name: value(dtype) if callable(value) else value for name, value in options.items()}
        quantization = getattr(transformers, config)(**own)
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map="cpu", quantization_config=quantization
        )

    return load


def torchao(name: str, module: str = "torchao.quantization", **options: Any) -> Callable[[str, torch.dtype], Any]:
    def config(dtype: torch.dtype) -> Any:
        return getattr(importlib.import_module(module), name)(set_inductor_config=False, **options)

    return by("TorchAoConfig", quant_type=config)


def compressed(scheme: str, form: str) -> Callable[[str, torch.dtype], Any]:
    """A checkpoint of compressed-tensors, with scales from the largest weights."""

    def load(folder: str, dtype: torch.dtype) -> Any:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationConfig,
            QuantizationStatus,
            apply_quantization_config,
            preset_name_to_scheme,
        )  # fmt: skip

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        groups: Any = {"group_0": preset_name_to_scheme(scheme, ["Linear"])}
        apply_quantization_config(
            model,
            QuantizationConfig(
                config_groups=groups,
                ignore=["lm_head"],
                quantization_status=QuantizationStatus.INITIALIZED,
                format=form,
            ),
        )
        for module in model.modules():
            if hasattr(module, "quantization_scheme"):
                own, weight = module.quantization_scheme.weights, module.weight.data
                largest = 448.0 if own.type == "float" else 2 ** (own.num_bits - 1) - 1
                groups = (
                    weight
                    if own.strategy == "tensor"
                    else weight.view(len(weight), -1, own.group_size or weight.shape[1])
                )
                most = groups.abs().max() if own.strategy == "tensor" else groups.abs().amax(2)
                module.weight_scale.data = (most / largest).clamp(min=1e-6).reshape(module.weight_scale.shape).to(dtype)
                if hasattr(module, "input_scale"):
                    module.input_scale.data.fill_(6 / largest)
                module.quantization_status = QuantizationStatus.FROZEN
        with tempfile.TemporaryDirectory() as to:
            compressor: Any = ModelCompressor.from_pretrained_model(model)
            compressor.compress_model(model)
            model.save_pretrained(to)
            compressor.update_config(to)
            return AutoModelForCausalLM.from_pretrained(to, dtype=dtype)

    return load


def hqq(folder: str, dtype: torch.dtype) -> Any:
    """By HQQ itself: transformers 5.24 cannot."""
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    AutoHQQHFModel.quantize_model(model, BaseQuantizeConfig(nbits=4, group_size=64), compute_dtype=dtype, device="cpu")
    return model


def fp8_blocks(folder: str, dtype: torch.dtype) -> Any:
    """A checkpoint of fine-grained FP8: a scale for every block of 128 x 128."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = {}
    for name, weight in model.state_dict().items():
        tensors[name] = weight
        if name.endswith("_proj.weight"):
            rows, columns = (-(-size // 128) for size in weight.shape)
            padded = torch.zeros(rows * 128, columns * 128)
            padded[: weight.shape[0], : weight.shape[1]] = weight
            scales = padded.view(rows, 128, columns, 128).abs().amax((1, 3)).clamp(min=1e-6) / 448
            spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
            tensors[name], tensors[f"{name}_scale_inv"] = (weight / spread).to(torch.float8_e4m3fn), scales
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    return _from_tensors(model, tensors, quantization, dtype)


def int4_checkpoint(method: str) -> Callable[[str, torch.dtype], Any]:
    """A checkpoint in the format of GPTQ or AWQ: 4 bits, groups of 64 inputs, zero points of 8; rounded to the nearest."""
    order = [0, 4, 1, 5, 2, 6, 3, 7] if method == "awq" else list(range(8))  # which nibble holds an output

    def packed(values: torch.Tensor, dim: int) -> torch.Tensor:
        """int32, eight of the values along a dimension in each."""
        eights = values.to(torch.int64).unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
        shifts = 4 * torch.tensor(order if dim == 1 else range(8))
        words = (eights << shifts).sum(-1)
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)

    def load(folder: str, dtype: torch.dtype) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tensors = {}
        for name, weight in model.state_dict().items():
            if not name.endswith("_proj.weight"):
                tensors[name] = weight
                continue
            inputs, stem = weight.shape[1], name.removesuffix("weight")
            groups = weight.t().reshape(inputs // 64, 64, -1)
            scales = groups.abs().amax(1).clamp(min=1e-6) / 7.5
            values = (groups / scales[:, None] + 8).round().clamp(0, 15).reshape(inputs, -1)
            zeros = torch.full_like(scales, 8 if method == "awq" else 7)  # GPTQ stores one less
            tensors |= {
                f"{stem}qweight": packed(values, 1 if method == "awq" else 0),
                f"{stem}qzeros": packed(zeros, 1),
                f"{stem}scales": scales.to(torch.float16),
            }
            if method == "gptq":
                tensors[f"{stem}g_idx"] = torch.arange(inputs, dtype=torch.int32) // 64
        more = {"version": "gemm", "zero_point": True} if method == "awq" else {"sym": True, "desc_act": False}
        return _from_tensors(model, tensors, {"quant_method": method, "bits": 4, "group_size": 64, **more}, dtype)

    return load


def _from_tensors(model: Any, tensors: dict[str, torch.Tensor], quantization: dict, dtype: torch.dtype) -> Any:
    """The model that transformers loads from a checkpoint with these tensors."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as to:
        model.config.quantization_config = quantization
        model.config.save_pretrained(to)
        own = {name: each.contiguous().clone() for name, each in tensors.items()}
        save_file(own, f"{to}/model.safetensors", metadata={"format": "pt"})
        return AutoModelForCausalLM.from_pretrained(to, dtype=dtype)


def mxfp4(folder: str, dtype: torch.dtype) -> Any:
    """A small random gpt-oss with experts in MXFP4 instead of the bundled model, which has none."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=256, num_hidden_layers=6, num_attention_heads=8, head_dim=64,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    model: Any = transformers.GptOssForCausalLM(config)
    tensors = {}
    for name, each in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = each.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            tensors |= {
                f"{name}_blocks": blocks,
                f"{name}_scales": torch.full(blocks.shape[:3], 122, dtype=torch.uint8),
            }
        else:
            tensors[name] = 4 * each if name.endswith("weight") and each.dim() == 2 else each
    return _from_tensors(model, tensors, {"quant_method": "mxfp4"}, dtype)


def gguf(folder: str, dtype: torch.dtype) -> Any:
    """A GGUF file in Q8_0."""
    import gguf

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    with tempfile.TemporaryDirectory() as to:
        writer = gguf.GGUFWriter(f"{to}/model.gguf", "llama")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_vocab_size(config.vocab_size)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        for name, weight in model.state_dict().items():
            if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp's order of rotary halves
                heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
                halves = weight.view(heads, 2, weight.shape[0] // heads // 2, -1)
                weight = halves.transpose(1, 2).reshape(weight.shape)
            quantized = (
                gguf.GGMLQuantizationType.Q8_0 if name.endswith("_proj.weight") else gguf.GGMLQuantizationType.F32
            )
            own = gguf.quants.quantize(weight.numpy(), quantized)
            writer.add_tensor(str(names.get_name(name, (".weight",))), own, raw_dtype=quantized)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return AutoModelForCausalLM.from_pretrained(to, gguf_file="model.gguf", dtype=dtype)


def lora(folder: str, dtype: torch.dtype) -> Any:
    """Unmerged, of rank 8, on all linear layers of the unquantized model."""
    import peft

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return peft.inject_adapter_in_model(
        peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights="gaussian"), model
    )


KINDS: dict[str, tuple[str, Callable[[str, torch.dtype], Any]]] = {  # name: library, how it is loaded
    "unquantized": ("torch", as_it_is),
    "bitsandbytes nf4": (
        "bitsandbytes",
        by(
            "BitsAndBytesConfig",
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=lambda dtype: dtype,
        ),
    ),
    "bitsandbytes int8": ("bitsandbytes", by("BitsAndBytesConfig", load_in_8bit=True)),
    "torchao int8": ("torchao", torchao("Int8WeightOnlyConfig")),
    "torchao int4": (
        "torchao",
        torchao("PrototypeInt4WeightOnlyConfig", "torchao.prototype.quantization.int4", group_size=32),
    ),
    "torchao fp8": ("torchao", torchao("Float8WeightOnlyConfig")),
    "torchao int8, dynamic": ("torchao", torchao("Int8DynamicActivationInt8WeightConfig")),
    "HQQ int4": ("hqq", hqq),
    "quanto int8": ("optimum.quanto", by("QuantoConfig", weights="int8")),
    "quanto int4": ("optimum.quanto", by("QuantoConfig", weights="int4")),
    "quanto fp8": ("optimum.quanto", by("QuantoConfig", weights="float8")),
    "GPTQ int4": ("gptqmodel", int4_checkpoint("gptq")),
    "AWQ int4": ("gptqmodel", int4_checkpoint("awq")),
    "compressed-tensors W4A16": ("compressed_tensors", compressed("W4A16", "pack-quantized")),
    "compressed-tensors W8A16": ("compressed_tensors", compressed("W8A16", "pack-quantized")),
    "compressed-tensors W8A8": ("compressed_tensors", compressed("W8A8", "int-quantized")),
    "compressed-tensors FP8": ("compressed_tensors", compressed("FP8", "float-quantized")),
    "compressed-tensors FP8 dynamic": ("compressed_tensors", compressed("FP8_DYNAMIC", "float-quantized")),
    "FP8 blocks": ("transformers", fp8_blocks),
    "MXFP4": ("transformers", mxfp4),
    "GGUF Q8_0": ("gguf", gguf),
    "LoRA": ("peft", lora),
}


TOO_SLOW = {"torchao int4, float32"}  # torch's product takes some 28 times as long as with plain weights


# ---- what is measured -----------------------------------------------------------------------------------------------


def path_of(model: Any) -> str:
    """What runs a decoding step of `none`."""
    target = get_decoder(model, parse_config(CONFIGS["none"])).target
    with target.active():
        runner: Any = target.native
        program = None if runner is None else runner._forward()
    path = "operators" if program is None else "native, layers called" if program.calls else "native"
    layer = next(each for name, each in model.named_modules() if name.endswith("q_proj"))
    weight = getattr(layer, "weight", None)
    whole = type(weight) is torch.nn.Parameter and weight.dtype == model.dtype
    return f"dequantized, {path}" if whole and getattr(model, "hf_quantizer", None) is not None else path


def measured(model: Any, tokenizer: Any, turns: int) -> dict[str, Any]:
    """Texts and times of one quantized model."""
    chats = [[{"role": "user", "content": each}] for each in prompts()[:: len(prompts()) // 5][:5]]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True, "padding": True}

    def call(size: int, config: dict | None) -> tuple[torch.Tensor, float]:
        inputs = tokenizer.apply_chat_template(chats[:size], **options)
        more = {} if config is None else {"speculative_config": config}
        began = time.process_time()
        out = model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
            pad_token_id=tokenizer.pad_token_id, **more,
        )  # fmt: skip
        return out, time.process_time() - began

    rows, equal, result = 0, 0, {}
    for size in BATCHES:
        plain = call(size, None)[0]
        for config in CONFIGS.values():
            equal += int((call(size, config)[0] == plain).all(1).sum())
            rows += size
        ratios: dict[str, list[float]] = {"none": [], "ngram": []}
        before = call(size, None)[1]
        for _ in range(turns):
            own = {name: call(size, CONFIGS[name])[1] for name in ratios}
            after = call(size, None)[1]
            for name, found in ratios.items():
                found.append(2 * own[name] / (before + after))
            before = after
        result[f"batch {size}"] = {name: round(statistics.median(found), 2) for name, found in ratios.items()}
    return {"equal": f"{equal}/{rows}", "over_plain": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="50m", choices=list(SIZES))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    model, tokenizer = larger(arguments.size)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        for kind in arguments.kinds:
            library, load = KINDS[kind]
            if importlib.util.find_spec(library.split(".")[0]) is None:
                print(f"{kind}: left out, {library} is not installed.", flush=True)
                continue
            for name in arguments.dtypes:
                if f"{kind}, {name}" in TOO_SLOW:
                    continue
                dtype = getattr(torch, name)
                target = load(folder, dtype).eval()
                found: dict[str, Any] = {"mebibytes": round(num_bytes(target) / 2**20)}
                try:
                    found |= measured(target, tokenizer, arguments.turns)
                    found |= {"path": path_of(target), "mebibytes after a call": round(num_bytes(target) / 2**20)}
                except UnsupportedModel as error:
                    found["path"] = f"refused: {error}"
                results[f"{kind}, {name}"] = {"library": f"{library} {_version(library)}"} | found
                print(f"{kind}, {name}: {json.dumps(found)}", flush=True)
                del target
                gc.collect()
                if arguments.output:
                    _write(arguments.output, results, arguments)


def _version(library: str) -> str:
    names = importlib.metadata.packages_distributions()[library.split(".")[0]]
    return importlib.metadata.version(names[0])


def _write(path: Path, results: dict[str, dict], arguments: argparse.Namespace) -> None:
    """Replace the results of these kinds in the file."""
    kept = json.loads(path.read_text())["results"] if path.exists() else {}
    order = [f"{kind}, {name}" for kind in KINDS for name in ("float32", "bfloat16")]
    found = dict(sorted((kept | results).items(), key=lambda item: order.index(item[0])))
    report = {"machine": machine(), "size": arguments.size, "new_tokens": NEW_TOKENS, "results": found}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
