"""What the deterministic mode costs on a CPU: tokens per second of CPU time with and without it, at batch 1.

    python benchmarks/deterministic.py [MODEL] [--dtype bfloat16] [--threads 1] [--new-tokens 32] [--json FILE]

Without MODEL: the bundled target, and made bigger without changing its function (recipes/tiny/inflate.py). Methods and modes take
turns in one run; of each the best repeat counts. CPU time, so that other programs on the machine do not.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_specdec
from hf_specdec.inflation import DIMENSIONS, PRESETS, inflate

METHODS = {
    "plain": {"method": "none"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
}
PROMPT = "Write the numbers from one to ten, and write them again. one two three four five six seven eight nine ten, one two three"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="bundled name, folder or Hub id")
    parser.add_argument("--sizes", nargs="*", default=["300m"], help="presets of recipes/tiny/inflate.py")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for size in [None] if args.model else [None, *args.sizes]:
        model, tokenizer = load(args.model or "tiny", size, getattr(torch, args.dtype))
        parameters = sum(p.numel() for p in model.parameters())
        results += measure(model, tokenizer, parameters, args.new_tokens, args.repeats)
    if args.json is not None:
        about = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": platform.processor() or platform.machine(),
        }
        command = " ".join(["python", *sys.argv])
        args.json.write_text(
            json.dumps({"command": command, **about, "dtype": args.dtype, "results": results}, indent=1) + "\n"
        )


def load(
    name: str, size: str | None, dtype: torch.dtype
) -> tuple[PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    path = hf_specdec.resolve_model(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    if size is not None:
        model = inflate(model, **dict(zip(DIMENSIONS, PRESETS[size], strict=True)), dtype=dtype)
    return model, AutoTokenizer.from_pretrained(path)


def measure(model, tokenizer, parameters: int, new_tokens: int, repeats: int) -> list[dict]:
    """Tokens per CPU second of each method without and with the mode, printed and returned."""
    encoded = tokenizer(PROMPT, return_tensors="pt")
    seconds = {(method, mode): [] for method in METHODS for mode in (False, True)}
    texts = {}
    for repeat in range(repeats + 1):
        for (method, mode), times in seconds.items():
            config = {**METHODS[method], "deterministic": mode}
            begin = time.process_time()
            texts[method, mode] = model.generate(
                **encoded,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                speculative_config=config,
            ).tolist()
            if repeat:  # the first makes the decoder
                times.append(time.process_time() - begin)
    results = []
    for method in METHODS:
        plain, with_mode = (new_tokens / min(seconds[method, mode]) for mode in (False, True))
        results.append({
            "parameters": parameters, "method": method, "tokens per CPU second": plain, "deterministic": with_mode,
            "ratio": with_mode / plain, "text is the mode's plain text": texts[method, True] == texts["plain", True],
        })  # fmt: skip
        print(json.dumps(results[-1]), flush=True)
    hf_specdec.release(model)
    return results


if __name__ == "__main__":
    main()
