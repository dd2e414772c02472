"""Make the whole tiny family with one command: `python -m recipes.tiny.run`. Stopped and run again, it goes on."""

import argparse
import json
import platform
from pathlib import Path

from transformers import AutoTokenizer

from .batches import TokenStore, prepare
from .checkpoint import load_checkpoint
from .data import MBPP_HELD_OUT
from .distill import distill_draft, sample_target_text
from .evaluate import draw_loss_curves, held_out_losses, measure_pair
from .export import export_model, load_exported, table, write_card
from .prompts import held_out_prompts, write_prompts
from .stories import write_stories
from .train import DRAFT_SHAPE, TARGET_SHAPE, make_model, train_target

HERE = Path(__file__).resolve().parent
SHARED = HERE.parents[2] / "shared"
LOSS_DOCUMENTS = 100


def export_family(data: Path, work: Path, output: Path, log: Path) -> None:
    """Export both checkpoints, measure what was written, and keep the numbers in the cards and in `log/report.json`."""
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    tokens = {}
    for name, shape, folder in (("target", TARGET_SHAPE, "tiny"), ("draft", DRAFT_SHAPE, "tiny-draft")):
        model = make_model(shape, tokenizer, seed=0)
        tokens[name] = load_checkpoint(work / f"{name}.pt", model, [])["tokens"]
        export_model(model, tokenizer, output / folder)
    prompts = held_out_prompts(data)
    write_prompts(output / "prompts.jsonl", prompts)
    target, draft = load_exported(output / "tiny"), load_exported(output / "tiny-draft")
    held_out = TokenStore(work / "held_out.npz")
    report = measure_pair(target, draft, tokenizer, prompts)
    report["held_out"] = {
        n: held_out_losses(m, held_out, LOSS_DOCUMENTS) for n, m in (("target", target), ("draft", draft))
    }
    report["tokens"] = tokens
    log.mkdir(parents=True, exist_ok=True)
    (log / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    pair = "Tokens per target forward of the pair (greedy, 5 draft tokens, 128 new tokens, `prompts.jsonl`):\n\n"
    pair += table(report["tau"], "task")
    what = {
        "target": "A very small language model that writes sums, stories and Python.",
        "draft": "The drafter of `tiny`: same tokenizer, distilled from it (KL; half of its text is by the target).",
    }
    for name, model, folder in (("target", target, "tiny"), ("draft", draft, "tiny-draft")):
        write_card(
            model,
            output / folder,
            title=folder,
            what=what[name],
            tokens=tokens[name],
            mbpp_held_out=MBPP_HELD_OUT,
            python=platform.python_version(),
            limit=LOSS_DOCUMENTS,
            losses=table(report["held_out"][name], "source"),
            pair=pair,
        )
    draw_loss_curves(log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=SHARED / "data", help="folder with the texts")
    parser.add_argument(
        "--story-model", type=Path, default=SHARED / "models" / "stories260K", help="writes more stories"
    )
    parser.add_argument("--work", type=Path, default=HERE / "work", help="folder for tokens and checkpoints")
    parser.add_argument(
        "--log", type=Path, default=HERE / "log", help="folder for the logs, the report and the loss curve"
    )
    parser.add_argument(
        "--output", type=Path, default=HERE.parents[1] / "hf_specdec" / "bundled_models", help="models go here"
    )
    parser.add_argument("--stage", choices=("all", "target", "draft", "export"), default="all", help="do one part only")
    parser.add_argument("--tokens", type=float, default=15e6, help="token budget of the target")
    parser.add_argument("--draft-tokens", type=float, default=8e6, help="token budget of the draft")
    parser.add_argument("--decay", type=float, default=0.5, help="share of a budget in which the rate falls to zero")
    parser.add_argument(
        "--sample-rounds", type=int, default=24, help="batches of 64 answers the target writes for the draft"
    )
    a = parser.parse_args()

    if a.story_model.is_dir() and not (a.work / "more_stories.jsonl").exists():
        a.work.mkdir(parents=True, exist_ok=True)
        write_stories(a.story_model, a.work / "more_stories.jsonl")
    prepare(a.data, a.work)
    tokenizer = AutoTokenizer.from_pretrained(a.work / "tokenizer")
    if a.stage in ("all", "target"):
        train_target(a.work, a.log / "target.jsonl", tokenizer, int(a.tokens), a.decay)
    if a.stage in ("all", "draft"):
        target = make_model(TARGET_SHAPE, tokenizer, seed=0)
        load_checkpoint(a.work / "target.pt", target, [])
        target.eval()
        sample_target_text(target, tokenizer, TokenStore(a.work / "train.npz"), a.work / "sampled.npz", a.sample_rounds)
        distill_draft(target, a.work, a.log / "draft.jsonl", tokenizer, int(a.draft_tokens), a.decay)
    if a.stage in ("all", "export"):
        export_family(a.data, a.work, a.output, a.log)


if __name__ == "__main__":
    main()
