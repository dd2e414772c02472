"""Tokenised documents on disk and the batches drawn from them; a batch depends on (seed, step) alone."""

import json
import os
from pathlib import Path

import numpy as np
import torch

from .data import load_documents
from .tokenizer import END_OF_TEXT, train_tokenizer

# Share of the training tokens by source.
MIX = {
    "gsm8k": 0.37,
    "more_stories": 0.12,
    "stories_chat": 0.05,
    "stories": 0.02,
    "mbpp": 0.12,
    "edit": 0.18,
    "stdlib_chat": 0.07,
    "stdlib": 0.06,
    "shakespeare": 0.01,
}
CHAT_SOURCES = ("gsm8k", "more_stories", "mbpp", "edit")


class TokenStore:
    """Documents of one part (`train` or `held_out`) by source: flat token arrays with offsets."""

    def __init__(self, path: Path):
        arrays = np.load(path)
        self.sources = sorted({name.split("/")[0] for name in arrays.files})
        self.tokens = {s: arrays[f"{s}/tokens"].astype(np.int64) for s in self.sources}
        self.offsets = {s: arrays[f"{s}/offsets"] for s in self.sources}

    def document(self, source: str, index: int) -> np.ndarray:
        """Token ids of one document, `<|endoftext|>` at its end."""
        offsets = self.offsets[source]
        return self.tokens[source][offsets[index] : offsets[index + 1]]

    def __len__(self) -> int:
        return sum(len(tokens) for tokens in self.tokens.values())


def write_rows(path: Path, rows: dict[str, list[list[int]]]) -> None:
    """Write token rows by source as a file for `TokenStore`, whole or not at all."""
    arrays = {}
    for source, ids in rows.items():
        arrays[f"{source}/tokens"] = np.concatenate([np.array(row, dtype=np.uint16) for row in ids])
        arrays[f"{source}/offsets"] = np.cumsum([0] + [len(row) for row in ids])
    with path.with_suffix(".partial").open("wb") as file:
        np.savez(file, **arrays)
    os.replace(path.with_suffix(".partial"), path)


def write_store(path: Path, documents: dict[str, list[str]], tokenizer) -> None:
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    write_rows(
        path, {source: [[*ids, end] for ids in tokenizer(texts)["input_ids"]] for source, texts in documents.items()}
    )


def prepare(data: Path, work: Path) -> None:
    """Train the tokenizer and tokenise everything into `work`, once."""
    if (work / "held_out.npz").exists():
        return
    work.mkdir(parents=True, exist_ok=True)
    train, held_out = load_documents(data, work / "more_stories.jsonl")
    sample = [text for source in ("gsm8k", "mbpp", "stdlib_chat") for text in train[source]]
    sample += train["stories"] * 6 + train["stdlib"][::4] + train["shakespeare"][::8]
    tokenizer = train_tokenizer(sample, work / "tokenizer")
    write_store(work / "train.npz", train, tokenizer)
    write_store(work / "held_out.npz", held_out, tokenizer)
    counts = {source: [len(texts), sum(map(len, texts))] for source, texts in train.items()}
    (work / "sources.json").write_text(json.dumps(counts, indent=1))


def packed_batch(
    store: TokenStore, mix: dict[str, float], rows: int, length: int, seed: int, step: int
) -> torch.Tensor:
    """Token ids [rows, length + 1]: whole documents drawn by `mix` (token share by source), a row's last one cut."""
    rng = np.random.default_rng((seed, step))
    mix = {source: share for source, share in mix.items() if source in store.sources}
    mean_length = {s: len(store.tokens[s]) / (len(store.offsets[s]) - 1) for s in mix}
    chance = np.array([mix[s] / mean_length[s] for s in mix])
    chance /= chance.sum()
    batch = np.empty((rows, length + 1), dtype=np.int64)
    for row in batch:
        filled = 0
        while filled < len(row):
            source = list(mix)[rng.choice(len(chance), p=chance)]
            document = store.document(source, rng.integers(len(store.offsets[source]) - 1))
            taken = document[: len(row) - filled]
            row[filled : filled + len(taken)] = taken
            filled += len(taken)
    return torch.from_numpy(batch)


def held_out_documents(store: TokenStore, source: str, limit: int, length: int) -> list[torch.Tensor]:
    """The first `limit` documents of a source, each alone, cut to `length` tokens: a list of [1, n]."""
    count = min(limit, len(store.offsets[source]) - 1)
    return [torch.from_numpy(store.document(source, i)[:length])[None] for i in range(count)]
