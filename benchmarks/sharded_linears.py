"""Linear layers of a model on two ranks, prepacked on each rank's shard and not: CPU time of a rank's thread, interleaved.

torchrun --nproc_per_node 2 benchmarks/sharded_linears.py --json benchmarks/results/sharded-linears-cpu.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed.configuration_utils import DistributedConfig

import hf_specdec  # noqa: F401  (generate() takes speculative_config)

SIZES: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8,
    "vocab_size": 8192, "max_position_embeddings": 512,
}  # fmt: skip
ROWS = 8


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(box[0])
    dist.barrier()
    size = dist.get_world_size()
    model: Any = AutoModelForCausalLM.from_pretrained(
        box[0], dtype=torch.float32, distributed_config=DistributedConfig(tp_size=size)
    ).eval()
    ids = torch.arange(ROWS * 16).view(ROWS, 16) * 7 % 8192
    texts, seconds = {}, {True: [], False: []}
    for number in range(args.rounds + 1):
        for prepacked in (True, False):
            config = {"method": "none", "prepack_weights": prepacked}
            began = time.thread_time()
            texts[prepacked] = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0, speculative_config=config
            )  # fmt: skip
            if number:
                seconds[prepacked].append(time.thread_time() - began)
    if dist.get_rank() == 0:
        median = {name: sorted(each)[len(each) // 2] for name, each in seconds.items()}
        report = {
            "ranks": size, "rows": ROWS, "sizes": SIZES, "seconds_prepacked": median[True], "seconds_plain": median[False],
            "ratio": median[False] / median[True], "equal_rows": int((texts[True] == texts[False]).all(1).sum()),
        }  # fmt: skip
        print(json.dumps(report))
        if args.json:
            Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
