"""Tokens per second of code edits with predicted outputs, over plain decoding and over n-grams.

    python benchmarks/predictions.py --data ../shared/data --output benchmarks/results/predictions-cpu.json

QuixBugs' programs: the prompt and the prediction are a program with a bug, and the answer is the fixed program ("fixes"), or that with one
of its names replaced everywhere ("renames"). The bundled model cannot fix programs, so a logits processor forces the answer; a step costs
what a step of the inflated model does. Ways take turns over the same programs; figures are sums of CPU time. Texts are compared.
"""

import argparse
import json
import platform
import re
import time
from collections import Counter
from pathlib import Path

import torch
import transformers
from loads import larger
from transformers import LogitsProcessorList

from hf_specdec.sampling.warpers import BeginningLogitsProcessor

NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}
WAYS = {
    "plain": ({"method": "none"}, False),
    "ngram, K = 5": ({**NGRAM, "num_speculative_tokens": 5}, False),
    "ngram, K = 16": ({**NGRAM, "num_speculative_tokens": 16}, False),
    "ngram, auto length": ({**NGRAM, "num_speculative_tokens": "auto"}, False),
    "prediction": ({"method": "none"}, True),
    "prediction, ngram, K = 5": ({**NGRAM, "num_speculative_tokens": 5}, True),
}


def renamed(program: str) -> str:
    """The program with its commonest local name replaced."""
    names = Counter(re.findall(r"\b([a-z]\w*)\b(?=\s*(?:=[^=]|,|\)))", program))
    name = names.most_common(1)[0][0]
    return re.sub(rf"\b{name}\b", f"{name}_before", program)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--size", default="100m")
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = larger(args.size)
    rows = [json.loads(line) for line in (args.data / "code_edit/quixbugs_python.jsonl").read_text().splitlines()]
    results = []
    for work, edit in (("fixes", str), ("renames", renamed)):
        tokens, seconds, steps, same = (dict.fromkeys(WAYS, 0.0) for _ in range(4))
        for i, row in enumerate(rows[: args.programs]):
            prompt = tokenizer(f"Edit this program.\n{row['buggy_program']}\n", return_tensors="pt")
            answer = tokenizer(edit(row["solution"]), add_special_tokens=False)["input_ids"]
            forced = BeginningLogitsProcessor(prompt.input_ids.shape[1], [[token] for token in answer], [])
            ways = list(WAYS.items())
            for way, (config, predicts) in ways[i % len(ways) :] + ways[: i % len(ways)]:
                if predicts:
                    config = {**config, "prediction": row["buggy_program"]}
                began = time.process_time()
                out = model.generate(
                    **prompt, max_new_tokens=len(answer), do_sample=False, logits_processor=LogitsProcessorList([forced]),
                    tokenizer=tokenizer, speculative_config=config, return_dict_in_generate=True,
                )  # fmt: skip
                seconds[way] += time.process_time() - began
                tokens[way] += len(answer)
                steps[way] += out.speculation.num_steps
                same[way] += out.sequences[0, prompt.input_ids.shape[1] :].tolist() == answer
        for way in WAYS:
            speed = tokens[way] / seconds[way]
            over = {other: speed * seconds[other] / tokens[other] for other in ("plain", "ngram, K = 5")}
            results.append(
                {
                    "work": work, "way": way, "tokens_per_second": speed, "tau": tokens[way] / steps[way],
                    "over_plain": over["plain"], "over_ngram": over["ngram, K = 5"], "tokens": int(tokens[way]),
                    "texts_equal": same[way] / args.programs,
                }
            )  # fmt: skip
            print(
                f"{work:8} {way:26} {speed:7.1f} tok/s  τ {results[-1]['tau']:5.2f}  {over['plain']:5.2f} × plain",
                flush=True,
            )
    if args.output is not None:
        machine = {"cpu": platform.processor(), "torch": torch.__version__, "transformers": transformers.__version__}
        args.output.write_text(json.dumps({"size": args.size, "machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
