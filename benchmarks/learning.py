"""A head that learns while it serves: tokens per step over 500 requests, with a change of domain and a kill in the middle.

    python benchmarks/learning.py --size bundled --share 0.3 --json benchmarks/results/learning-cpu.json
    python scripts/learning_plot.py benchmarks/results/learning-cpu.json docs/figures/learning.svg

The target is the bundled model inflated. Requests come one by one, all different: the first half of them of one domain, the second
of another. Each series is a head with another beginning, and learns in a process of its own, which is killed (SIGKILL) at a quarter
of the requests; a second process goes on from the head's folder. `none` is a head that begins knowing nothing; `weak` has learnt from
300 stories before, a third domain, and `weak, frozen` is the same head, which does not learn.

A run adds its series to those of the file, if it was written with the same options, so that they can run apart.
Kept per request: new tokens, steps, CPU seconds of the call, seconds and steps of learning so far, weights put in place so far
(the second process counts seconds anew).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
WEAK_SHARE = 0.5  # of the time in which the weak head learns


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="50m", help="of the target, in loads.py (default: %(default)s)")
    parser.add_argument("--method", default="mlp_speculator", choices=["mlp_speculator", "eagle3"])
    parser.add_argument("--tokens-per-draft", type=int, default=3)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--domains", nargs=2, default=["edit", "math"])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--stories", type=int, default=300, help="that the weak head learns from")
    parser.add_argument("--share", type=float, default=0.03, help="learn_share (default: %(default)s)")
    parser.add_argument("--series", nargs="+", default=["none", "weak", "weak, frozen"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", metavar="JOB", help=argparse.SUPPRESS)  # what a process of a series is started with
    return parser.parse_args()


def serve(job: dict[str, Any]) -> None:
    """Answer the job's requests one by one; a line of JSON for each, as soon as it is answered."""
    import torch
    from loads import larger

    torch.set_num_threads(1)
    model, tokenizer = larger(job["size"])
    for text in job["prompts"]:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        began = time.process_time()
        out = model.generate(
            **inputs, max_new_tokens=job["new_tokens"], do_sample=False, return_dict_in_generate=True,
            pad_token_id=tokenizer.pad_token_id, speculative_config=job["config"],
        )  # fmt: skip
        learnt = out.speculation.get("learning") or {}
        row = {
            "tokens": out.speculation.num_new_tokens, "steps": out.speculation.num_steps,
            "seconds": round(time.process_time() - began, 4), "learning_seconds": learnt.get("seconds", 0.0),
            "training_steps": learnt.get("steps", 0),
            "swaps": learnt.get("swaps", 0),
        }  # fmt: skip
        print(json.dumps(row), flush=True)


def process(job: dict[str, Any], kill_after: int | None = None) -> list[dict[str, Any]]:
    """A process that answers the job's requests; killed after so many of them.

    Raises:
        RuntimeError: it ended before it had answered all.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(job, file)
        file.flush()
        worker = subprocess.Popen(
            [sys.executable, __file__, "--serve", file.name], stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        assert worker.stdout is not None
        rows = []
        for line in worker.stdout:
            rows.append(json.loads(line))
            if len(rows) == kill_after:
                worker.send_signal(signal.SIGKILL)
                break
        worker.stdout.close()
        code = worker.wait()
    if len(rows) < (kill_after or len(job["prompts"])):
        raise RuntimeError(f"The process ended with {code} after {len(rows)} requests.")
    return rows


def series(name: str, options: argparse.Namespace, weak: Path, folder: Path) -> list[dict[str, Any]]:
    """All requests with a head that begins as the name says."""
    from requests_of import requests

    half = options.requests // 2
    texts = [text for domain in options.domains for text in requests(domain, half)]
    config: dict[str, Any] = {"method": options.method, "num_speculative_tokens": options.tokens_per_draft}
    if name == "weak, frozen":
        config["model"] = str(weak)
    else:
        config |= {"learn": str(folder), "learn_share": options.share}
        if name == "weak":
            config["model"] = str(weak)
    common = {"size": options.size, "new_tokens": options.new_tokens, "config": config}
    cut = options.requests // 4
    first = process({**common, "prompts": texts}, kill_after=cut)
    return first + process({**common, "prompts": texts[cut:]})


def summary(rows: list[dict[str, Any]]) -> str:
    """Tokens per step of each eighth of the requests, and what learning cost."""
    eighth = max(1, len(rows) // 8)
    parts = [rows[at : at + eighth] for at in range(0, len(rows), eighth)][:8]
    taus = " ".join(f"{sum(r['tokens'] for r in part) / sum(r['steps'] for r in part):.2f}" for part in parts)
    cut = len(rows) // 4
    learning = rows[cut - 1]["learning_seconds"] + rows[-1]["learning_seconds"]
    seconds = sum(row["seconds"] for row in rows)
    tokens = sum(row["tokens"] for row in rows)
    return f"tau {taus}; {tokens / seconds:.1f} tokens/s; learning {learning:.1f} of {seconds:.0f} s ({learning / seconds:.1%})"


def main() -> None:
    """Measure, print, keep."""
    options = parse()
    if options.serve:
        serve(json.loads(Path(options.serve).read_text(encoding="utf-8")))
        return
    from decode import machine
    from requests_of import requests

    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        weak = Path(folder) / "weak"
        if any(name.startswith("weak") for name in options.series):
            config = {"method": options.method, "num_speculative_tokens": options.tokens_per_draft}
            stories = {
                "size": options.size,
                "new_tokens": options.new_tokens,
                "prompts": requests("story", options.stories),
                "config": {**config, "learn": str(weak), "learn_share": WEAK_SHARE},
            }
            process(stories)
            shutil.rmtree(weak / "learning")
        for name in options.series:
            found[name] = series(name, options, weak, Path(folder) / "learning" / name)
            print(f"{name:13} {summary(found[name])}", flush=True)
    if options.json:
        kept = {key: value for key, value in vars(options).items() if key not in ("json", "serve", "series")}
        report = {"options": kept, "machine": machine(), "series": {}}
        if options.json.is_file():
            before = json.loads(options.json.read_text(encoding="utf-8"))
            if before["options"] == kept:
                report["series"] = before["series"]
        for name, rows in found.items():
            report["series"][name] = {key: [row[key] for row in rows] for key in rows[0]}
        options.json.write_text(json.dumps(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
