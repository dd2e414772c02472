"""Evaluate with lm-evaluation-harness, with drafts: the same answers in fewer forward passes.

python examples/lm_eval_harness.py                                   # ten prompts of the bundled model
python examples/lm_eval_harness.py --model Qwen/Qwen3-0.6B --tasks gsm8k --limit 50 --speculative-config '{"method": "ngram"}'
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM

import hf_specdec


def bundled_task(folder: Path) -> dict:
    """A generation task from the prompts that come with the bundled model. They have no answers, so its score of 0 means nothing."""
    source = Path(hf_specdec.bundled("tiny")).parent / "prompts.jsonl"
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()][:10]
    data = folder / "prompts.json"
    data.write_text("\n".join(json.dumps({"prompt": row["prompt"], "answer": "."}) for row in rows), encoding="utf-8")
    return {
        "task": "bundled_prompts",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 48, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--speculative-config", type=json.loads, default={"method": "eagle3", "model": "tiny-eagle3"})
    args = parser.parse_args(argv)

    folder = hf_specdec.resolve_model(args.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm = HFLM(pretrained=folder, dtype="auto", device=device, batch_size=args.batch_size)
    lm.model.generation_config.speculative_config = (
        args.speculative_config
    )  # every generate() of the harness now drafts
    with tempfile.TemporaryDirectory() as folder:
        results = simple_evaluate(
            lm, tasks=args.tasks or [bundled_task(Path(folder))], limit=args.limit, bootstrap_iters=0
        )
    for task, values in results["results"].items():
        print(task, {name: float(value) for name, value in values.items() if isinstance(value, float)})
    return results


if __name__ == "__main__":
    main()
