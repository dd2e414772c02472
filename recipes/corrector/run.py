"""Make a small corrector of spelling, an encoder-decoder model: `python -m recipes.corrector.run /tmp/corrector --data ../shared/data`.

A BART of 2 M parameters learns to undo typing errors that are made up. It copies most words, as real correctors do, so it shows how many
tokens look-ups in the encoder's input get accepted. A run takes 15 minutes on one thread.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

PAD, END = 0, 1
IGNORED = -100
LONGEST, WORDS = 64, 20  # most tokens and words of a text
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def passages(data: Path) -> list[str]:
    """Texts of at most 20 words: children's stories, and questions of arithmetic."""
    stories = (data / "text" / "tinystories_sample.txt").read_text(encoding="utf-8").split("<|endoftext|>")
    questions = (data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [" ".join(text.split()) for text in [*stories, *(json.loads(line)["question"] for line in questions)]]
    words = [text.split() for text in texts]
    parts = [" ".join(own[i : i + WORDS]) for own in words for i in range(0, len(own), WORDS)]
    return [part for part in parts if len(part.split()) > WORDS // 2]


def corrupted(text: str, share: float, draw: random.Random) -> str:
    """The text with one typing error in a share of its longer words."""
    return " ".join(_typo(word, draw) if len(word) > 3 and draw.random() < share else word for word in text.split())


def _typo(word: str, draw: random.Random) -> str:
    at = draw.randrange(len(word) - 1)
    before, here, after = word[:at], word[at], word[at + 1 :]
    kinds = (
        after[0] + here + after[1:],
        after,
        here + here + after,
        draw.choice(LETTERS) + after,
    )  # swapped, lost, doubled, wrong
    return before + draw.choice(kinds)


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 2000 tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=2000, special_tokens=["<pad>", "</s>"], show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>")


def make_model(size: int) -> BartForConditionalGeneration:
    torch.manual_seed(0)
    sides: Any = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 2), ("ffn_dim", 384), ("attention_heads", 4))
    }
    config = BartConfig(
        vocab_size=size, d_model=128, max_position_embeddings=LONGEST + 8, pad_token_id=PAD, bos_token_id=END, eos_token_id=END,
        decoder_start_token_id=END, forced_eos_token_id=None, dropout=0.0, **sides,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


def train(
    model: BartForConditionalGeneration, tokenizer, texts: list[str], minutes: float, rows: int = 24, steps: int = 3000
) -> None:
    """Learn to restore texts, until the steps or the minutes of CPU time are over."""
    draw, began, losses = random.Random(0), time.process_time(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(steps):
        done = max(step / steps, (time.process_time() - began) / (60 * minutes))
        if done >= 1:
            break
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (step + 1) / 200, 0.02 + 2 * (1 - done))
        own = [draw.choice(texts) for _ in range(rows)]
        pairs = [(corrupted(text, draw.choice((0.05, 0.1, 0.2)), draw), text) for text in own]
        read, written = (
            [torch.tensor([*tokenizer(text)["input_ids"][:LONGEST], END]) for text in side]
            for side in zip(*pairs, strict=True)
        )
        inputs = pad_sequence(read, batch_first=True, padding_value=PAD)
        labels = pad_sequence(written, batch_first=True, padding_value=IGNORED)
        loss = model(input_ids=inputs, attention_mask=(inputs != PAD).long(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if not (step + 1) % 100:
            print(
                f"step {step + 1}, {time.process_time() - began:.0f} s: loss {sum(losses[-100:]) / 100:.3f}", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the folder with text/ and gsm8k/")
    parser.add_argument("--minutes", type=float, default=15, help="of CPU time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    texts = passages(args.data)
    random.Random(0).shuffle(texts)
    held_out, texts = texts[:64], texts[64:]
    tokenizer = make_tokenizer(texts)
    model = make_model(len(tokenizer))
    print(f"{len(texts)} texts, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", flush=True)
    train(model, tokenizer, texts, args.minutes)
    model.eval().save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    draw = random.Random(1)
    rows = [{"text": corrupted(text, 0.1, draw), "right": text} for text in held_out]
    (args.output / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    read = tokenizer(rows[0]["text"] + "</s>", return_tensors="pt")["input_ids"]
    print(
        rows[0]["text"],
        tokenizer.decode(model.generate(read, max_new_tokens=LONGEST)[0], skip_special_tokens=True),
        sep="\n",
    )


if __name__ == "__main__":
    main()
