"""Calls of all shapes, one after the other: memory, threads and open files stay what they were."""

import gc
import itertools
import mmap
import os
import random
import threading

import pytest
from oracle import drafter_of, ragged, tiny_llama
from test_memory import MEBI, resident

import hf_specdec
from hf_specdec.cache import PagedStaticCache

MOST_GROWTH = 6 * MEBI  # malloc's own ups and downs between calls of many shapes take 1 to 3


@pytest.fixture
def model():
    made = tiny_llama()
    yield made
    hf_specdec.release(made)


def calls(model, drafter_path):
    """Without end: batches, lengths, methods, seeds, fresh assistant models."""
    rng = random.Random(0)
    configs = [
        {"method": "none"},
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        {"method": "token_recycling"},
        {"method": "lookahead"},
        {"method": "draft_model"},
        {"method": "draft_model", "model": drafter_path, "branching_factors": [3, 2, 1]},
        {"method": "draft_model", "model": drafter_path, "top_k": 3, "total_tokens": 12},
    ]
    for count in itertools.count():
        config = dict(configs[count % len(configs)])
        config |= {"block_size": rng.choice([4, 16]), "prefill_chunk_size": rng.choice([8, 2048])}
        config |= rng.choice([{}, {"num_blocks": 60}, {"draft_length": "auto"}])
        given = (
            {"assistant_model": drafter_of(model)}
            if config == {**config, "method": "draft_model"} and "model" not in config
            else {}
        )
        sampled = {"do_sample": True, "temperature": 0.8} if rng.random() < 0.5 else {"do_sample": False}
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 5))]

        def call(config=config, given=given, sampled=sampled, lengths=lengths, seed=count):
            model.generate(
                **ragged(lengths, seed=seed), max_new_tokens=rng.randint(1, 20), **sampled, **given,
                speculative_config={**config, "seed": seed},
            )  # fmt: skip

        yield call


def growth(model, drafter_path, warm: int, count: int) -> int:
    """Bytes that `count` calls leave behind after the first `warm`; threads and descriptors are none."""

    def state():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task"))

    every = calls(model, drafter_path)
    for call in itertools.islice(every, warm):
        call()
    before, bytes_before = state(), resident()
    for call in itertools.islice(every, count):
        call()
    assert state() == before
    return resident() - bytes_before


@pytest.fixture
def drafter_path(model, tmp_path):
    drafter_of(model).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.long
def test_calls_leave_nothing(model, drafter_path):
    assert growth(model, drafter_path, 14, 28) < MOST_GROWTH


@pytest.mark.slow
def test_three_hundred_calls_leave_nothing(model, drafter_path):
    assert growth(model, drafter_path, 60, 300) < MOST_GROWTH


@pytest.mark.long
def test_a_leak_would_be_seen(model, drafter_path, monkeypatch):
    """A mebibyte a pool is, in pages of its own: malloc might take it from what earlier calls freed."""
    leaked, init = [], PagedStaticCache.__init__

    def leaking(self, *args, **kwargs):
        init(self, *args, **kwargs)
        pages = mmap.mmap(-1, MEBI)
        pages.write(bytes(MEBI))
        leaked.append(pages)

    monkeypatch.setattr(PagedStaticCache, "__init__", leaking)
    assert growth(model, drafter_path, 7, 14) > MOST_GROWTH
    assert len(leaked) > 40
    for pages in leaked:
        pages.close()
