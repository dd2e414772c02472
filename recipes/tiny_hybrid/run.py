"""Make the tiny hybrid with one command: `python -m recipes.tiny_hybrid.run`. Stopped and run again, it goes on."""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hf_specdec.bundled import bundled

from ..tiny.batches import TokenStore, write_store
from ..tiny.checkpoint import load_checkpoint
from ..tiny.data import load_documents
from ..tiny.evaluate import held_out_losses
from ..tiny.export import export_model, load_exported, table
from ..tiny.run import LOSS_DOCUMENTS, SHARED
from ..tiny.stories import write_stories
from .mtp import OPTIONS, join, train_mtp, write_answers
from .target import make_model, train_target

HERE = Path(__file__).resolve().parent
NAME = "tiny-hybrid"


def prepare(data: Path, story_model: Path, work: Path, tokenizer) -> None:
    """Tokenise the texts of the tiny family into `work`, once, with the family's tokenizer."""
    work.mkdir(parents=True, exist_ok=True)
    stories = work / "more_stories.jsonl"
    if story_model.is_dir() and not stories.exists():
        write_stories(story_model, stories)
    if not (work / "held_out.npz").exists():
        train, held_out = load_documents(data, stories)
        write_store(work / "train.npz", train, tokenizer)
        write_store(work / "held_out.npz", held_out, tokenizer)


def export_target(work: Path, tokenizer) -> Path:
    """The trained target without its MTP layer, as a folder that loads."""
    model = make_model(tokenizer, seed=0)
    load_checkpoint(work / "target.pt", model, [])
    export_model(model, tokenizer, work / NAME)
    return work / NAME


def ship(target: Path, layer: Path, work: Path, output: Path) -> None:
    """Join target and layer in `output`, measure the file, and write its card."""
    shutil.rmtree(output / NAME, ignore_errors=True)
    shutil.copytree(target, output / NAME)
    join(output / NAME, layer)
    model = load_exported(output / NAME)
    losses = held_out_losses(model, TokenStore(work / "held_out.npz"), LOSS_DOCUMENTS)
    c = model.config
    weights = output / NAME / "model.safetensors"
    shape = (
        c.hidden_size,
        c.num_hidden_layers,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        c.intermediate_size,
    )
    card = (HERE / "card.md").read_text().format(
        linear=c.layer_types.count("linear_attention"), full=c.layer_types.count("full_attention"),
        parameters=model.num_parameters(), shape=" / ".join(map(str, shape)), vocabulary=c.vocab_size,
        mtp=sum(tensor.numel() for name, tensor in load_file(weights).items() if name.startswith("mtp.")),
        tokens=load_checkpoint(work / "target.pt", model, [])["tokens"], context=c.max_position_embeddings,
        state=f"{c.linear_num_value_heads} heads with states of {c.linear_key_head_dim} × {c.linear_value_head_dim}",
        megabytes=weights.stat().st_size / 1e6, steps=OPTIONS.num_steps, limit=LOSS_DOCUMENTS,
        losses=table(losses, "source"),
    )  # fmt: skip
    (output / NAME / "README.md").write_text(card)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=SHARED / "data", help="folder with the texts")
    parser.add_argument(
        "--story-model", type=Path, default=SHARED / "models" / "stories260K", help="writes more stories"
    )
    parser.add_argument("--work", type=Path, default=HERE / "work", help="folder for tokens and checkpoints")
    parser.add_argument("--log", type=Path, default=HERE / "log", help="folder for the logs")
    parser.add_argument(
        "--output", type=Path, default=HERE.parents[1] / "hf_specdec" / "bundled_models", help="the model goes here"
    )
    parser.add_argument("--tokens", type=float, default=9e6, help="token budget of the target")
    parser.add_argument("--decay", type=float, default=0.5, help="share of the budget in which the rate falls to zero")
    parser.add_argument("--answers", type=int, default=2048, help="answers that the MTP layer learns from")
    parser.add_argument("--mtp-steps", type=int, default=800, help="steps of its training")
    a = parser.parse_args()

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(bundled("tiny"), padding_side="left")
    prepare(a.data, a.story_model, a.work, tokenizer)
    train_target(a.work, a.log / "target.jsonl", tokenizer, int(a.tokens), a.decay)
    target = export_target(a.work, tokenizer)
    answers = write_answers(target, a.data, a.work, a.answers)
    layer = train_mtp(target, answers, a.work / "mtp", a.mtp_steps)
    a.log.mkdir(parents=True, exist_ok=True)
    shutil.copy(layer / "training" / "log.jsonl", a.log / "mtp.jsonl")
    ship(target, layer, a.work, a.output)


if __name__ == "__main__":
    main()
