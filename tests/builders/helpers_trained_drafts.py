"""Trained heads written to disk, and what the generator drafts with them against what the trainer says of the same texts."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers_dflash import Watched

from hf_specdec import parse_config
from hf_specdec.training import Batch, HeadTrainer
from hf_specdec.training.export import export_head


def export(made: HeadTrainer, folder: Path, form: str | None = None) -> Path:
    """The head as `hf-specdec train` writes it, in float32."""
    facts = {
        "method": made.method, "target": "tiny-random", "license": None, "data": "none", "num_samples": 1, "num_tokens": 1,
        "step": 1, "options": made.options.to_dict(), "estimate": None,
    }  # fmt: skip
    (folder / "training").mkdir(parents=True)
    return export_head(made, folder, folder / "training", form, torch.float32, facts)


def batch_of(made: HeadTrainer, texts: list[list[int]], prompt: int = 0) -> Batch:
    """Texts padded on the right, with what the trainer reads of the target."""
    lengths = torch.tensor([len(text) for text in texts])
    input_ids = torch.zeros(len(texts), int(lengths.max()), dtype=torch.long)
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, text in enumerate(texts):
        input_ids[row, : len(text)] = torch.tensor(text)
        mask[row, prompt : len(text)] = True
    return made.target.capture(Batch(input_ids, lengths, mask), made.taps)


def check_drafts(
    made: HeadTrainer,
    folder: Path,
    inputs: dict[str, torch.Tensor],
    logits_of,
    length: int | None = None,
    atol: float = 2e-4,
) -> None:
    """The generator's logits and choices at every step of every draft are the trainer's, teacher-forced with the draft.

    Args:
        logits_of: (batch, rows, anchors, step) to the trainer's logits [n, V] there.
        length: of the drafts, where it is not the checkpoint's own.
        atol: what float32 rounding may do to a logit; their spread is about 2.
    """
    config = {"model": str(folder), **({} if length is None else {"num_speculative_tokens": length})}
    assert parse_config(config).method == made.method
    watched = Watched(made.target.model, config)
    watched.run(inputs, max_new_tokens=16)
    most = length or made.num_guesses
    assert {0, most} <= set(watched.accepted), watched.accepted  # some drafts were wrong at once, some right to the end
    assert {len(path) for _, path, _ in watched.records} == set(range(most))
    made.head.eval()
    for step in range(most):
        records = [record for record in watched.records if len(record[1]) == step]
        # Something follows, so that every place is one that the trainer looks at.
        batch = batch_of(made, [[*text, *path, 7, *[8] * most] for text, path, _ in records])
        rows, anchors = torch.arange(len(records)), torch.tensor([len(text) - 1 for text, _, _ in records])
        found = torch.stack([logits for _, _, logits in records])[:, : made.target.vocab_size].float()
        with torch.no_grad():
            expected = logits_of(batch, rows, anchors, step)
            guesses = made.guesses(batch)
        torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4)
        places = zip(guesses.rows.tolist(), guesses.anchors.tolist(), guesses.tokens.tolist(), strict=True)
        told = {(row, anchor): tokens for row, anchor, tokens in places}
        best = found.topk(2).values
        for row, (anchor, logits) in enumerate(zip(anchors.tolist(), found, strict=True)):
            if best[row, 0] - best[row, 1] > 1e-3:
                assert told[row, anchor][step] == int(logits.argmax())
