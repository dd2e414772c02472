"""What 8-bit and 4-bit weights make of a forward: CPU time of a step of 1, 6 and 16 tokens and of a prompt, and bytes of weights.

    python recipes/tiny/inflate.py hf_specdec/bundled_models/tiny /tmp/300m --size 300m --dtype bfloat16
    python benchmarks/quantized.py /tmp/300m --repeats 9 --output benchmarks/results/quantized-cpu-bf16-319M.json

"As it is", "wint8" and "wint4" run in the native library, the others operator by operator. The ways take turns; each figure is the median
of its CPU times, each ratio to the first way the median of ratios within a turn.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hf_specdec.core.rows import RowInput
from hf_specdec.model.options.quantized import QuantizedLinears, num_bytes
from hf_specdec.model.packed_model import PackedModel
from hf_specdec.model.prepare import ModelOptions, prepare

OPERATORS = {"native": False, "prepack_weights": False}
WAYS = {
    "as it is": {},
    "as it is, operators": OPERATORS,
    "prepacked, operators": OPERATORS | {"prepack_weights": True},
    "wint8": {"quantization": "wint8"},
    "wint8 by torchao": OPERATORS | {"quantization": "wint8"},
    "wint4": {"quantization": "wint4"},
    "wint4 by torchao": OPERATORS | {"quantization": "wint4"},
}
CONTEXT = 64  # tokens
COUNTS = (1, 6, 16, 256)  # tokens of a forward


class Steps:
    """Forwards behind one context that is read once."""

    def __init__(self, packed: PackedModel):
        self.packed, self.ids = packed, np.arange(CONTEXT + COUNTS[-1]) % 1000 + 5
        self.cache = packed.new_cache(num_blocks=(CONTEXT + COUNTS[-1]) // 16 + 1, block_size=16)
        self.cache.add(0)
        self.cache.reserve(0, CONTEXT + COUNTS[-1])
        with packed.active(), torch.no_grad():
            packed.forward([RowInput(0, self.ids[:CONTEXT], 0)], self.cache)

    def seconds(self, count: int) -> float:
        """CPU time of one forward of `count` tokens behind the context."""
        row = RowInput(0, self.ids[CONTEXT : CONTEXT + count], CONTEXT, logits=count)
        with self.packed.active(), torch.no_grad():
            begun = time.process_time()
            self.packed.forward([row], self.cache)
            return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()
    models = {way: prepare(model, ModelOptions(**WAYS[way])) for way in arguments.ways}
    times = {(way, count): [] for way in models for count in COUNTS}
    steps = {way: Steps(packed) for way, packed in models.items()}
    for turn in range(arguments.repeats + 1):
        for (way, count), spent in times.items():
            seconds = steps[way].seconds(count)
            if turn:  # the first warms up
                spent.append(seconds)
    base = arguments.ways[0]
    result = {
        "machine": platform.processor() or platform.machine(), "torch": torch.__version__, "dtype": arguments.dtype,
        "repeats": arguments.repeats, "threads": 1, "context": CONTEXT, "mebibytes": {}, "milliseconds": {}, "ratio": {},
    }  # fmt: skip
    for way, packed in models.items():
        quantized = [each for each in packed.active_options if isinstance(each, QuantizedLinears)]
        weights = num_bytes(model) if not quantized else quantized[0].bytes_after
        result["mebibytes"][way] = round(weights / 2**20, 1)
        for count in COUNTS:
            own = times[way, count]
            ratios = [a / b for a, b in zip(own, times[base, count], strict=True)]
            result["milliseconds"][f"{way}, {count}"] = round(1e3 * statistics.median(own), 1)
            result["ratio"][f"{way}, {count}"] = round(statistics.median(ratios), 2)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
