"""Make a checkpoint bigger without changing its function, to give real text the cost of a real model.

    python recipes/tiny/inflate.py SRC DST --size 300m
    python recipes/tiny/inflate.py SRC DST --hidden-size 2048 --num-hidden-layers 24 --dtype bfloat16

What grows and how: `hf_specdec/inflation/tensors.py`, inflate_states.py. Draft heads: inflate_head.py.
"""

import argparse
from pathlib import Path

import torch
from inflate_states import STATE_DIMENSIONS, HybridInflation
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.inflation import DIMENSIONS, PRESETS, inflate
from hf_specdec.inflation.tensors import Inflation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="checkpoint folder or Hub name")
    parser.add_argument("destination", type=Path, help="folder to write")
    parser.add_argument("--size", choices=PRESETS, help="8b has the shape of Llama-3.1-8B but for its vocabulary")
    for name in DIMENSIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="overrides --size")
    for name in STATE_DIMENSIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="of Qwen3.5's recurrent layers")
    parser.add_argument("--vocab-size", type=int, help="new tokens are never chosen; needs a larger hidden size")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the source's")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    sizes = dict(zip(DIMENSIONS, PRESETS[arguments.size], strict=True)) if arguments.size else {}
    sizes |= {name: size for name in (*DIMENSIONS, *STATE_DIMENSIONS) if (size := getattr(arguments, name))}
    source = AutoModelForCausalLM.from_pretrained(arguments.source, dtype="auto")
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    try:
        kind = HybridInflation if type(source).__name__ in HybridInflation.architectures else Inflation
        big = inflate(source, **sizes, vocab_size=arguments.vocab_size, dtype=dtype, seed=arguments.seed, kind=kind)
    except ValueError as error:
        parser.error(str(error))
    big.save_pretrained(arguments.destination)
    AutoTokenizer.from_pretrained(arguments.source).save_pretrained(arguments.destination)
    print(f"{arguments.destination}: {big.num_parameters():,} parameters in {big.dtype}")


if __name__ == "__main__":
    main()
