"""Words per second of encoder-decoder models: 16 corrections, and 16 recordings that Whisper transcribes.

    python -m recipes.corrector.run /tmp/corrector --data ../shared/data
    python benchmarks/encoder_decoder.py /tmp/corrector --output benchmarks/results/encoder-decoder-cpu.json

The corrector is trained, so what drafts get accepted is real; once more its decoder is inflated to 34 M parameters, with the same text.
The Whispers have random weights at the sizes of -tiny and -small. A logits processor forces texts of this repository's pages, a token for
a word, so n-grams get accepted as in such texts. "Right drafter": a decoder of two layers, whose text the processor forces, too, so every
draft is accepted: the most that a distilled drafter can gain. Whisper's encoder has run before. Ways take turns; figures are medians of CPU
time, and texts are compared.
"""

import argparse
import copy
import json
import platform
import re
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationMixin,
    LogitsProcessor,
    WhisperConfig,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutput

import hf_specdec  # noqa: F401 (gives generate() its argument)

ROOT = Path(__file__).resolve().parents[1]
ROWS, WORDS, DRAFT = 16, 32, 5
SIZES = {"tiny": (384, 4, 6), "small": (768, 12, 12)}  # width, layers, heads
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFT, "prompt_lookup_min": 2, "prompt_lookup_max": 3}


class Forced(LogitsProcessor):
    """The text of a row is a known one, whatever the scores are. Rows are told apart by their first tokens, which differ."""

    keeps_state = False

    def __init__(self, texts: dict[int, list[int]], num_before: int):
        self.texts, self.num_before = texts, num_before

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -1e4)
        for row, ids in enumerate(input_ids.tolist()):
            text = self.texts[ids[self.num_before - 1]]
            at = len(ids) - self.num_before
            forced[row, text[at] if at < len(text) else 0] = 0.0
        return forced


class Work:
    """16 rows for a model. `inputs`: of a batch; `own`: of its rows one by one; `options`: of every call."""

    def __init__(self, model, inputs: dict, own: list[dict], options: dict, words, assistant=None):
        self.model, self.inputs, self.own, self.options, self.words, self.assistant = (
            model,
            inputs,
            own,
            options,
            words,
            assistant,
        )

    def ways(self) -> dict:
        """Name → function that writes all rows' texts."""
        found = {
            "transformers, batch": self.batch,
            "transformers, one by one, n-gram": partial(
                self.one_by_one, prompt_lookup_num_tokens=DRAFT, max_matching_ngram_size=3
            ),
            "ours, plain": partial(self.batch, speculative_config={"method": "none"}),
            "ours, n-gram": partial(self.batch, speculative_config=NGRAM),
            "ours, n-gram, automatic length": partial(
                self.batch, speculative_config={**NGRAM, "num_speculative_tokens": "auto"}
            ),
            "ours, one by one, n-gram": partial(self.one_by_one, speculative_config=NGRAM),
        }
        if self.assistant is not None:
            assistant = copy.deepcopy(self.assistant)
            assistant.generation_config.num_assistant_tokens = DRAFT
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
            draft = {"method": "draft_model", "num_speculative_tokens": DRAFT}
            found["transformers, one by one, right drafter"] = partial(self.one_by_one, assistant_model=assistant)
            found["ours, right drafter"] = partial(self.batch, speculative_config=draft, assistant_model=self.assistant)
        return found

    def batch(self, **more) -> list[list[int]]:
        return self.texts(self.inputs, **more)

    def one_by_one(self, **more) -> list[list[int]]:
        return [text for own in self.own for text in self.texts(own, **more)]

    def texts(self, inputs: dict, **more) -> list[list[int]]:
        """Ids of every row, without what ends and fills it. Sets `accepted` for our ways."""
        generator: Any = GenerationMixin  # Whisper's own method would cut windows
        options = {**self.options, **more, "return_dict_in_generate": True}
        output = generator.generate(self.model, **copy.deepcopy(inputs), **options)
        self.accepted = getattr(getattr(output, "speculation", None), "mean_accepted_length", None)
        ends = {self.model.config.pad_token_id, self.model.config.eos_token_id}
        return [[token for token in row if token not in ends] for row in output.sequences.tolist()]


def corrections(folder: Path, ffn_dim: int = 0) -> Work:
    """`ffn_dim`: inflate the decoder to this width of its feed-forward layers, whose new units change nothing; 0: do not."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    for layer in model.model.decoder.layers if ffn_dim else ():
        wide, narrow = torch.nn.Linear(layer.fc1.in_features, ffn_dim), torch.nn.Linear(ffn_dim, layer.fc2.out_features)
        torch.nn.init.zeros_(narrow.weight)
        with torch.no_grad():
            for new, old in ((wide, layer.fc1), (narrow, layer.fc2)):
                new.weight[: old.out_features, : old.in_features] = old.weight
                new.bias[: old.out_features] = old.bias
        layer.fc1, layer.fc2 = wide, narrow
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()][:ROWS]
    texts = [row["text"] + tokenizer.eos_token for row in rows]
    batch = dict(tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False))
    own = [dict(tokenizer(text, return_tensors="pt", return_token_type_ids=False)) for text in texts]
    options = {"max_new_tokens": 64, "do_sample": False, "num_beams": 1}
    return Work(
        model, batch, own, options, lambda texts: len(tokenizer.decode([t for text in texts for t in text]).split())
    )


def recordings(size: str) -> Work:
    width, layers, heads = SIZES[size]
    torch.manual_seed(0)
    sides: Any = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", layers), ("ffn_dim", 4 * width), ("attention_heads", heads))
    }
    model: Any = WhisperForConditionalGeneration(
        WhisperConfig(d_model=width, **sides, suppress_tokens=None, begin_suppress_tokens=None)
    ).eval()
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    drafter = WhisperForCausalLM(WhisperConfig(d_model=width, **{**sides, "decoder_layers": 2})).eval()
    words = " ".join(page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/*.md")))
    ids, parts = {}, re.findall(r"[A-Za-z]+|[^\sA-Za-z]", words)
    known = [ids.setdefault(word, 100 + len(ids)) for word in parts]
    step = len(known) // ROWS
    starts = [50_000 + row for row in range(ROWS)]
    texts = {start: known[row * step :][:WORDS] for row, start in enumerate(starts)}
    states = torch.randn(ROWS, model.config.max_source_positions, width)
    begin = model.config.decoder_start_token_id

    def given(rows: slice) -> dict:
        prompts = torch.tensor([[begin, start] for start in starts[rows]])
        return {
            "input_features": torch.zeros(len(prompts), 80, 3000),
            "encoder_outputs": BaseModelOutput(states[rows]),
            "decoder_input_ids": prompts,
        }

    options = {
        "max_new_tokens": WORDS, "do_sample": False, "num_beams": 1, "logits_processor": [Forced(texts, 2)],
    }  # fmt: skip
    own = [given(slice(row, row + 1)) for row in range(ROWS)]
    return Work(model, given(slice(None)), own, options, lambda texts: ROWS * WORDS, drafter)


def measure(work: Work, repeats: int, names: list[str] | None) -> list[dict]:
    """Words per second of CPU time, by way, and whether the texts are those of the first way."""
    seconds: dict[str, list[float]] = {}
    written: dict[str, bool] = {}
    accepted: dict[str, float | None] = {}
    expected, ways = None, {name: way for name, way in work.ways().items() if not names or name in names}
    with torch.inference_mode():
        for way in ways.values() if repeats > 1 else ():  # what is made once is made here
            way(max_new_tokens=4)
        for _ in range(repeats):
            for name, way in ways.items():
                began = time.process_time()
                texts = way()
                seconds.setdefault(name, []).append(time.process_time() - began)
                accepted[name] = work.accepted
                expected = expected or texts
                written[name] = texts == expected
                print(f"{name}: {seconds[name][-1]:.2f} s, equal {written[name]}", flush=True)
    words, plain = work.words(expected), statistics.median(next(iter(seconds.values())))
    return [
        {
            "name": name,
            "words_per_second": words / statistics.median(own),
            "over_batch": plain / statistics.median(own),
            "accepted_length": accepted[name],
            "equal": written[name],
        }
        for name, own in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corrector", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", help="only these; the file keeps the others' results")
    parser.add_argument("--ways", nargs="+", help="only these ways, of which the first is transformers' batch")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        "command": "python benchmarks/encoder_decoder.py /tmp/corrector",
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "tasks": {},
    }
    kept = json.loads(args.output.read_text(encoding="utf-8")) if args.output and args.output.exists() else report
    makers = {"corrections": lambda: corrections(args.corrector)}
    makers["corrections, inflated"] = lambda: corrections(args.corrector, 65536)
    makers |= {f"whisper-{size}": partial(recordings, size) for size in SIZES}
    for name in args.tasks or makers:
        print(name, flush=True)
        kept["tasks"][name] = {"repeats": args.repeats, "rows": measure(makers[name](), args.repeats, args.ways)}
        if args.output:
            args.output.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
