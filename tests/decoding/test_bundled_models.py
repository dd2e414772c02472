"""The models that come with the package: they load, are small, share a tokenizer, and write text rather than loops."""

import json

import pytest
import torch
from paths import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

FOLDER = ROOT / "hf_specdec" / "bundled_models"
PARAMETERS = {"tiny": (6e6, 12e6), "tiny-draft": (0.5e6, 1e6)}
# Nats per token on PROBLEMS as measured when the files were made, plus 5 %.
LOSS_BOUND = {"tiny": 1.46, "tiny-draft": 2.10}
PROBLEMS = [
    (
        "Martha bakes 24 muffins in the morning and twice as many in the afternoon. How many muffins does she bake?",
        "In the afternoon, Martha bakes 24 * 2 = 48 muffins.\nIn total, she bakes 24 + 48 = 72 muffins.\n#### 72",
    ),
    (
        "A bus with 40 seats carries 30 people. If 12 people get off and 7 get on, how many seats are empty?",
        "After 12 people get off, there are 30 - 12 = 18 people.\nThen there are 18 + 7 = 25 people on the bus.\n"
        "So 40 - 25 = 15 seats are empty.\n#### 15",
    ),
    (
        "Oliver saves $5 every week. How much money does he have after 8 weeks if he spends $10 on a book?",
        "Oliver saves 5 * 8 = $40 in 8 weeks.\nAfter he buys the book, he has 40 - 10 = $30.\n#### 30",
    ),
]
TEXTS = [
    "Plain words, 12,345.67 and punctuation?!",
    "  leading and  double   spaces\n\n\ttabs\r\nline ends ",
    "naïve café – Grüße, 你好世界, здравствуйте, 👩‍👩‍👧 \u0000 \u200b",
    "def f(x):\n    return {'a': [x ** 2, *range(3)]}  # <|not special|>",
    "",
]


@pytest.fixture(scope="module", params=PARAMETERS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return AutoModelForCausalLM.from_pretrained(FOLDER / name).eval()


@pytest.fixture(scope="module")
def tokenizer(name):
    return AutoTokenizer.from_pretrained(FOLDER / name)


def test_size_and_dtype(name, model):
    least, most = PARAMETERS[name]
    assert isinstance(model, LlamaForCausalLM)
    assert least <= model.num_parameters() <= most
    assert model.dtype == torch.float32
    assert AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32).dtype == torch.float32
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_total_size_on_disk():
    files = [path for name in ("tiny", "tiny-draft") for path in (FOLDER / name).iterdir()]
    assert sum(path.stat().st_size for path in files) <= 20e6


def test_one_tokenizer():
    files = [(FOLDER / name / "tokenizer.json").read_text(encoding="utf-8") for name in PARAMETERS]
    assert files[0] == files[1]


def test_vocabulary_and_special_tokens(model, tokenizer):
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    assert tokenizer.eos_token == "<|end|>"
    ends = tokenizer.convert_tokens_to_ids(["<|end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == ends
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.pad_token_id not in ends
    assert not model.generation_config.do_sample


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template(tokenizer):
    messages = [{"role": "user", "content": "Hi there."}, {"role": "assistant", "content": "Hello."}]
    assert (
        tokenizer.apply_chat_template(messages, tokenize=False) == "<|user|>Hi there.<|end|><|assistant|>Hello.<|end|>"
    )
    opened = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert opened == "<|user|>Hi there.<|end|><|assistant|>"
    ids = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer(opened)["input_ids"]
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")


def test_prompts():
    rows = [json.loads(line) for line in (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    assert 30 <= len(rows) <= 60
    assert {row["task"] for row in rows} == {"math", "code", "story", "edit"}
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(set(row) == {"id", "task", "prompt"} and "<|" not in row["prompt"] for row in rows)


@torch.no_grad()
def test_loss_on_unseen_problems(name, model, tokenizer):
    total = count = 0
    for question, answer in PROBLEMS:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
        loss = model(input_ids=ids, labels=ids).loss.item()
        total += loss * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert total / count < LOSS_BOUND[name]


@torch.no_grad()
@pytest.mark.slow
def test_greedy_text_does_not_collapse():
    """Most held-out prompts get an answer of many distinct tokens, in which few groups of four tokens come again."""
    folder = FOLDER / "tiny"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()][::3]
    good = 0
    for row in rows:
        messages = [{"role": "user", "content": row["prompt"]}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**inputs, max_new_tokens=60)[0, inputs["input_ids"].shape[1] :].tolist()
        groups = [tuple(out[i : i + 4]) for i in range(len(out) - 3)]
        good += len(set(out)) >= 15 and len(set(groups)) >= 0.6 * len(groups)
    assert good >= 0.7 * len(rows)
