"""Data: every format, where answers begin, what is held out, batches; answers written by the target."""

import json

import numpy as np
import pytest
import torch
from helpers_training import qa_rows, random_text, target, word_tokenizer, words, write_rows
from oracle import EOS, VOCAB

import hf_specdec
from hf_specdec.training import TrainingError
from hf_specdec.training.batch import BatchOrder, collate, in_order
from hf_specdec.training.data import encode, read_rows, split
from hf_specdec.training.regenerate import Regeneration, regenerate


def samples_of(tmp_path, rows, tokenizer=None, max_length=100, name="data.jsonl"):
    path = tmp_path / name
    if isinstance(rows, str):
        path.write_text(rows, encoding="utf-8")
    else:
        write_rows(path, rows)
    return encode(read_rows(path), tokenizer or word_tokenizer(), VOCAB, {EOS}, max_length)


def error_of(tmp_path, rows, **options):
    with pytest.raises(TrainingError) as caught:
        samples_of(tmp_path, rows, **options)
    return str(caught.value)


def counted(sample):
    """Tokens that count."""
    return sample.token_ids[sample.loss_mask].tolist()


# ---- formats --------------------------------------------------------------------------------------------------------


def test_conversations_count_in_the_answers_and_their_end(tmp_path):
    messages = [
        {"role": "user", "content": "w10 w11"},
        {"role": "assistant", "content": "w20 w21"},
        {"role": "user", "content": "w12"},
        {"role": "assistant", "content": "w22"},
    ]
    shared = [{"from": "human" if m["role"] == "user" else "gpt", "value": m["content"]} for m in messages]
    one, two = samples_of(tmp_path, [{"messages": messages, "task": "math"}, {"conversations": shared}])
    assert one.token_ids.tolist() == [5, 10, 11, EOS, 6, 20, 21, EOS, 5, 12, EOS, 6, 22, EOS]
    assert counted(one) == [20, 21, EOS, 22, EOS]
    assert two.token_ids.tolist() == one.token_ids.tolist()
    assert (one.task, two.task) == ("math", "")
    assert one.group == two.group


def test_templates_that_change_earlier_answers_give_a_text_per_answer(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'w05 ' if m.role == 'user' else 'w06 ' }}"
        "{% if m.role == 'user' or loop.last %}{{ m.content }}{% else %}w09{% endif %}{{ ' w03 ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'w06 ' }}{% endif %}"
    )
    messages = [{"role": r, "content": f"w{20 + i}"} for i, r in enumerate(("user", "assistant", "user", "assistant"))]
    one, two = samples_of(tmp_path, [{"messages": messages}], tokenizer)
    assert counted(one) == [21, EOS]
    assert two.token_ids.tolist() == [5, 20, EOS, 6, 9, EOS, 5, 22, EOS, 6, 23, EOS]
    assert counted(two) == [23, EOS]


def test_nothing_counts_after_an_end_token(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("' w03 '", "' w03 w08 '")
    (sample,) = samples_of(tmp_path, [{"prompt": "w10", "completion": "w20"}], tokenizer)
    assert sample.token_ids.tolist()[-2:] == [EOS, 8]
    assert counted(sample) == [20, EOS]


def test_prompts_and_completions_without_a_template(tmp_path):
    (sample,) = samples_of(tmp_path, [{"prompt": "w10 w11", "completion": " w20 w21"}], word_tokenizer(chat=False))
    assert sample.token_ids.tolist() == [10, 11, 20, 21]
    assert counted(sample) == [20, 21]


def test_plain_text_counts_everywhere_and_is_cut(tmp_path):
    ids = random_text(23)
    for name, rows in (("data.txt", words(ids)), ("data.jsonl", [{"text": words(ids)}])):
        found = samples_of(tmp_path, rows, max_length=10, name=name)
        assert [len(sample) for sample in found] == [10, 10, 3]
        assert np.concatenate([sample.token_ids for sample in found]).tolist() == ids
        assert all(sample.loss_mask.all() for sample in found)


def test_long_conversations_are_cut_and_left_out_if_no_answer_is_left(tmp_path):
    rows = [
        {"prompt": words(random_text(3)), "completion": words(random_text(30))},
        {"prompt": words(random_text(30)), "completion": "w20"},
    ]
    (sample,) = samples_of(tmp_path, rows, max_length=12)
    assert len(sample) == 12
    assert len(counted(sample)) == 12 - 6
    assert "raise --max-length" in error_of(tmp_path, rows[1:], max_length=12)


def test_bad_data_is_one_clear_error_with_its_line(tmp_path):
    def line(rows, **options):
        return error_of(tmp_path, rows, **options).replace(str(tmp_path), "")

    assert line('{"text": "w01"}\nnonsense').startswith("/data.jsonl:2: not JSON")
    assert line("[1]").startswith("/data.jsonl:1: expected a JSON object")
    assert "nothing in it" in line(" \n")
    assert "none of" in line([{"words": "w01"}])
    assert "a prompt without an answer; --regenerate" in line([{"prompt": "w01"}])
    assert "without an answer of the assistant" in line([{"messages": [{"role": "user", "content": "w01"}]}])
    assert "not a list of messages" in line([{"messages": "w01"}])
    assert "a message needs text" in line([{"messages": [{"role": "user"}]}])
    assert "no chat template" in line([{"messages": [{"role": "user", "content": "w01"}, {"role": "assistant", "content": "w02"}]}],
                                      tokenizer=word_tokenizer(chat=False))  # fmt: skip
    assert "not text" in line([{"prompt": 1, "completion": "w01"}])
    assert "made for another model" in line([{"prompt_ids": [1], "answer_ids": [VOCAB]}])
    assert "not a list of token ids" in line([{"prompt_ids": [1], "answer_ids": "w01"}])
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    assert "no system messages" in line([{"prompt": "w01", "completion": "w02"}], tokenizer=tokenizer)
    with pytest.raises(TrainingError, match="no such file"):
        read_rows(tmp_path / "none.jsonl")
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(TrainingError, match="not UTF-8"):
        read_rows(tmp_path / "latin.txt")


# ---- held out, batches ----------------------------------------------------------------------------------------------


def test_the_split_depends_on_seed_and_sample_alone(tmp_path):
    samples = samples_of(tmp_path, qa_rows(200))
    training, held = split(samples, 0.2, seed=0)
    assert len(training) + len(held) == 200
    assert 20 <= len(held) <= 60
    again = split(samples[::-1], 0.2, seed=0)[1]
    assert {s.group for s in again} == {s.group for s in held} != {s.group for s in split(samples, 0.2, seed=1)[1]}
    assert split(samples, 0.0, seed=0) == (samples, [])
    twice = samples + samples
    training, held = split(twice, 0.1, seed=0)
    assert not {s.group for s in training} & {s.group for s in held}
    assert [len(part) for part in split(samples[:2], 0.01, seed=0)] == [1, 1]
    with pytest.raises(TrainingError, match="single sample"):
        split(samples[:1], 0.1, seed=0)


def test_batches_hold_every_sample_once_an_epoch_and_fit(tmp_path):
    lengths = np.random.default_rng(0).integers(3, 60, 500).tolist()
    order = BatchOrder(lengths, tokens_per_batch=128, per_step=1, seed=5)
    for epoch in (0, 1):
        found = [part for step in order.epoch(epoch) for part in step]
        assert sorted(np.concatenate(found).tolist()) == list(range(500))
        sizes = [(len(part), max(lengths[i] for i in part)) for part in found]
        assert all(count * longest <= 128 for count, longest in sizes)
        padded = sum(count * longest for count, longest in sizes)
        assert sum(lengths) / padded > 0.9
    first, second = order.epoch(0), order.epoch(1)
    assert [p.tolist() for s in first for p in s] != [p.tolist() for s in second for p in s]


def test_the_order_can_be_entered_anywhere():
    order = BatchOrder([7, 5, 9, 4, 8, 6], tokens_per_batch=18, per_step=2, seed=0)
    steps = order.steps(0)
    told = [[part.tolist() for part in next(steps)] for _ in range(12)]
    for first in range(8):
        later = order.steps(first)
        assert [[part.tolist() for part in next(later)] for _ in range(3)] == told[first : first + 3]
    assert all(len(step) == 2 for step in told)
    assert order.num_steps(2) == len(order.epoch(0)) + len(order.epoch(1))


def test_less_data_than_a_step_is_seen_several_times():
    order = BatchOrder([5], tokens_per_batch=8, per_step=4, seed=0)
    assert [[part.tolist() for part in step] for step in order.epoch(0)] == [[[0]] * 4]


def test_collate_pads_on_the_right(tmp_path):
    samples = samples_of(tmp_path, qa_rows(5))
    batch = collate(samples)
    for row, sample in enumerate(samples):
        assert batch.input_ids[row, : len(sample)].tolist() == sample.token_ids.tolist()
        assert batch.loss_mask[row].sum() == sample.loss_mask.sum()
        assert batch.present[row].sum() == len(sample)
    assert sum(len(part) for part in in_order(samples, 32)) == 5


# ---- answers by the target ------------------------------------------------------------------------------------------

SHORT = {"max_new_tokens": 8, "batch_size": 3}


def answers(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def plain_answer(model, ids, max_new_tokens=8, **sampling):
    out = model.model.generate(
        torch.tensor([ids]), max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=EOS, pad_token_id=0
    )
    new = out[0, len(ids) :].tolist()
    return new[: new.index(EOS) + 1] if EOS in new else new


def test_regenerated_answers_are_plain_greedy_ones(tmp_path):
    model = target()
    rows = read_rows(write_rows(tmp_path / "data.jsonl", qa_rows(7)))
    path = regenerate(model, rows, tmp_path / "answers.jsonl", Regeneration(**SHORT), quiet=True)
    found = answers(path)
    assert [row["source"] for row in found] == list(range(7))
    for row, source in zip(found, rows, strict=True):
        prompt = [5, *(int(w[1:]) for w in source["prompt"].split()), EOS, 6]
        assert row["prompt_ids"] == prompt
        assert row["answer_ids"] == plain_answer(model, prompt)
    samples = encode(read_rows(path), model.tokenizer, VOCAB, {EOS}, 100)
    assert [counted(sample) for sample in samples] == [row["answer_ids"] for row in found]
    assert [sample.token_ids.tolist() for sample in samples] == [row["prompt_ids"] + row["answer_ids"] for row in found]


def test_conversations_are_answered_turn_by_turn(tmp_path):
    model = target()
    said = [
        {"role": "user", "content": "w10 w11"},
        {"role": "assistant", "content": "w20"},
        {"role": "user", "content": "w12"},
    ]
    rows = read_rows(write_rows(tmp_path / "data.jsonl", [{"messages": said}, {"messages": said[:1]}]))
    path = regenerate(model, rows, tmp_path / "answers.jsonl", Regeneration(**SHORT), quiet=True)
    one, two, three = answers(path)
    assert (one["source"], two["source"], three["source"]) == (0, 0, 1)
    assert one["answer_ids"] == plain_answer(model, [5, 10, 11, EOS, 6]) == three["answer_ids"]
    before = [i for i in one["answer_ids"] if i not in (0, EOS)]
    assert two["prompt_ids"] == [5, 10, 11, EOS, 6, *before, EOS, 5, 12, EOS, 6]
    assert two["answer_ids"] == plain_answer(model, two["prompt_ids"])
    assert one["group"] == two["group"] == three["group"]


def test_plain_text_is_gone_on_with(tmp_path):
    model = target()
    (tmp_path / "data.txt").write_text(words(random_text(50)))
    settings = Regeneration(**SHORT, prompt_tokens=6)
    path = regenerate(model, read_rows(tmp_path / "data.txt"), tmp_path / "answers.jsonl", settings, quiet=True)
    for i, row in enumerate(answers(path)):
        assert row["prompt_ids"] == random_text(50)[14 * i : 14 * i + 6]
        assert row["answer_ids"] == plain_answer(model, row["prompt_ids"])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_unfinished_file_is_gone_on_with(tmp_path, monkeypatch, temperature):
    from hf_specdec.training import regenerate as module

    model = target()
    rows = read_rows(write_rows(tmp_path / "data.jsonl", qa_rows(4) + qa_rows(4)))
    settings = Regeneration(**SHORT, temperature=temperature, seed=7)
    whole = regenerate(model, rows, tmp_path / "whole.jsonl", settings, quiet=True).read_bytes()
    answer, calls = module._answer, []

    def stopping(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answer(*args)

    monkeypatch.setattr(module, "_answer", stopping)
    path = tmp_path / "parts.jsonl"
    with pytest.raises(KeyboardInterrupt):
        regenerate(model, rows, path, settings, quiet=True)
    assert len(answers(path)) == 6
    with open(path, "a") as file:  # killed while writing
        file.write('{"source": 6, "prom')
    regenerate(model, rows, path, settings, quiet=True)
    assert path.read_bytes() == whole
    assert len(calls) == 4
    regenerate(model, rows, path, settings, quiet=True)
    assert len(calls) == 4  # it was whole
    with pytest.raises(TrainingError, match=r"other settings \(temperature\)"):
        regenerate(model, rows, path, Regeneration(**SHORT, temperature=0.5, seed=7), quiet=True)
    with pytest.raises(TrainingError, match="not from --regenerate"):
        regenerate(model, rows, tmp_path / "data.jsonl", settings, quiet=True)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_do_not_depend_on_the_batch(tmp_path, temperature):
    """Although one prompt leaves less room than the others, and one occurs twice."""
    model = target(max_position_embeddings=64)
    lengths = (3, 40, 3, 60, 7)
    rows = [{"prompt": words(random_text(length, seed=length))} for length in lengths]
    read, found = read_rows(write_rows(tmp_path / "data.jsonl", rows)), []
    for size in (1, 2, 5):
        settings = Regeneration(max_new_tokens=40, batch_size=size, temperature=temperature)
        path = regenerate(model, read, tmp_path / f"{size}.jsonl", settings, quiet=True)
        found.append([row["answer_ids"] for row in answers(path)])
    assert found[0] == found[1] == found[2] and max(map(len, found[0])) > 64 - 44
    assert (found[0][0] == found[0][2]) == (not temperature)


def test_prompts_without_room_are_left_out(tmp_path):
    model = target(max_position_embeddings=32)
    rows = [{"prompt": words(random_text(5))}, {"prompt": words(random_text(28))}]
    read = read_rows(write_rows(tmp_path / "data.jsonl", rows))
    path = regenerate(model, read, tmp_path / "answers.jsonl", Regeneration(max_new_tokens=100), quiet=True)
    assert [row["source"] for row in answers(path)] == [0]
    assert len(answers(path)[0]["prompt_ids"] + answers(path)[0]["answer_ids"]) <= 32
    with pytest.raises(TrainingError, match="room for an answer"):
        regenerate(model, read[1:], tmp_path / "none.jsonl", Regeneration(), quiet=True)


def test_answers_need_the_plugin(tmp_path):
    hf_specdec.uninstall()
    try:
        with pytest.raises(TrainingError, match="install"):
            regenerate(None, [], tmp_path / "answers.jsonl", Regeneration())
    finally:
        hf_specdec.install()
