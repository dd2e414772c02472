"""Make an EAGLE-3 head bigger without changing what it drafts, for a target that inflate.py has made bigger.

    python recipes/tiny/inflate_head.py HEAD SOURCE TARGET DST

HEAD drafts for SOURCE, TARGET is SOURCE inflated; DST drafts for TARGET what HEAD drafts for SOURCE, at the cost of a head
of TARGET's sizes. The draft vocabulary stays as it is.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig

from hf_specdec.inflation import inflate_eagle3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("head", "source", "target", "destination"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    arguments = parser.parse_args()
    configs = [AutoConfig.from_pretrained(arguments.source), AutoConfig.from_pretrained(arguments.target)]
    try:
        inflate_eagle3(arguments.head, *configs, arguments.destination, getattr(torch, arguments.dtype))
    except ValueError as error:
        parser.error(str(error))
    print(f"{arguments.destination}: an EAGLE-3 head for {arguments.target}")


if __name__ == "__main__":
    main()
