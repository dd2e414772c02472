"""What the tests of training share: a tiny random target, a word tokenizer for it, and runs of a few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from oracle import EOS, VOCAB, tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_specdec.training import Batch, TrainingOptions, trainer_class
from hf_specdec.training.pipeline import Trained, train_head
from hf_specdec.training.target import TargetModel

CHAT = (
    "{% for m in messages %}{{ 'w05 ' if m.role == 'user' else 'w06 ' }}{{ m.content }}{{ ' w03 ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w06 ' }}{% endif %}"
)


def word_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """Words "w00" .. "w60" are the tokens 0 .. 60; w03 ends a turn, w05 and w06 begin the user's and the assistant's."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i:02d}": i for i in range(VOCAB)}, unk_token="w00"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=f"w{EOS:02d}", pad_token="w00", unk_token="w00"
    )
    fast.chat_template = CHAT if chat else None
    return fast


def words(ids) -> str:
    """The text of tokens."""
    return " ".join(f"w{int(i):02d}" for i in ids)


def target(**changes: Any) -> TargetModel:
    """A random Llama as training sees it."""
    return TargetModel(tiny_llama(**changes), word_tokenizer(), "tiny-random")


def random_text(count: int, seed: int = 0) -> list[int]:
    """Tokens that are no special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(7, VOCAB, (count,), generator=generator).tolist()


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A .jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def qa_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts with answers, ragged."""
    return [
        {
            "prompt": words(random_text(4 + i % 5, seed + i)),
            "completion": words(random_text(6 + i % 9, 1000 + seed + i)),
        }
        for i in range(count)
    ]


def ragged_batch(model: TargetModel, lengths=(13, 9, 5), prompt: int = 3, seed: int = 0) -> Batch:
    """Random texts whose first `prompt` tokens do not count, with all hidden states captured."""
    from hf_specdec.core.output import Taps

    width = max(lengths)
    input_ids, mask = (
        torch.zeros(len(lengths), width, dtype=torch.long),
        torch.zeros(len(lengths), width, dtype=torch.bool),
    )
    for row, length in enumerate(lengths):
        input_ids[row, :length] = torch.tensor(random_text(length, seed + row))
        mask[row, prompt:length] = True
    batch = Batch(input_ids, torch.tensor(lengths), mask)
    return model.capture(batch, Taps(last_hidden=True, layers=(1, 2)))


def trainer(method: str, model: TargetModel, seed: int = 0, **options: Any):
    """A trainer with its head built, weights shaken so that nothing is zero."""
    kind = trainer_class(method)
    made = kind(kind.options_class(**options), model)
    torch.manual_seed(seed)
    made.head = made.build(torch.ones(model.vocab_size, dtype=torch.long))
    with torch.no_grad():
        for parameter in made.head.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return made


def train(method: str, folder: Path, data: Path, model=None, **options: Any) -> Trained:
    """A whole run on the random target."""
    kind = trainer_class(method)
    arguments = {k: options.pop(k) for k in ("cache_dir", "form", "regeneration", "dtype", "say") if k in options}
    settings: TrainingOptions = kind.options_class(
        **{"max_steps": 4, "tokens_per_batch": 64, "log_every": 1, **options}
    )
    return train_head(
        method, model if model is not None else tiny_llama(), word_tokenizer(), data, folder, settings, target_name="tiny-random",
        quiet=True, **arguments,
    )  # fmt: skip
