"""Prefill and decode apart: the text and the steps of one server, and every failure on the way."""

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_specdec import LLM, SamplingParams
from hf_specdec.serve.transfer import Transfers

METHODS = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "draft_model": {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "model": "tiny-eagle3"},
    "mtp": {"method": "mtp", "model": "tiny-mtp"},
}
PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friends. One day"
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAMPLED = SamplingParams(temperature=1, seed=5, max_tokens=40)


class Exchange:
    """Links within one process, by copies of memory. Tests make them fail."""

    def __init__(self):
        self.messages, self.failure, self.delay, self.damage = {}, None, 0, 0

    def link(self):
        return MemoryLink(self)


class MemoryLink:
    def __init__(self, exchange):
        self.exchange, self.name, self.moved = exchange, str(id(self)), 0
        exchange.messages[self.name] = []

    def register(self, pools):
        return self.name

    def start(self, peer, pieces, message):
        if self.exchange.failure is not None:
            raise self.exchange.failure
        return [peer, pieces, message, self.exchange.delay]

    def is_done(self, handle):
        handle[3] -= 1
        if handle[3] > 0:
            return False
        peer, pieces, message, _ = handle
        for number, piece in enumerate(pieces):
            if self.exchange.damage and number >= self.exchange.damage:
                break  # half of it has come
            ctypes.memmove(piece.here, piece.there, piece.size)
            self.moved += piece.size
        self.exchange.messages[peer].append(message)
        return True

    def drop(self, handle):
        pass

    def tell(self, peer, message):
        self.exchange.messages.get(peer, []).append(message)

    def messages(self):
        found, self.exchange.messages[self.name] = self.exchange.messages[self.name], []
        return found


def engine(name, exchange=None, **seconds):
    llm = LLM("tiny", dtype="float32", speculative_config=METHODS[name], max_model_len=256, max_num_seqs=4,
              kv_cache_memory_bytes=16 << 20)  # fmt: skip
    if exchange is not None:
        llm.engine.transfers = Transfers(llm.engine.decoder, exchange.link(), **seconds)
    return llm


def run(llm, params=GREEDY, prompt=PROMPT, transfer=None):
    params = SamplingParams(**{**vars(params), "kv_transfer_params": transfer})
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output


def prefill(llm, params=GREEDY, prompt=PROMPT):
    answer = run(llm, SamplingParams(**{**vars(params), "max_tokens": 1}), prompt, {"do_remote_decode": True})
    return json.loads(json.dumps(answer.kv_transfer_params))  # as it comes over HTTP


def look(llm):
    with llm.engine.decoder.active():
        llm.engine.transfers.poll()


def steps(output):
    return output.speculation["num_steps"]


def assert_clean(*engines):
    for llm in engines:
        transfers, decoder = llm.engine.transfers, llm.engine.decoder
        look(llm)
        assert not transfers.held and not transfers.pulling and not decoder.statistics
        for cache in transfers.caches:
            assert not cache.tables
            cache.pool.check()
            assert cache.pool.num_used == 0


@pytest.fixture(scope="module")
def pairs():
    """Per method: a server that does everything, a producer, a consumer, and what is between them."""
    made = {}

    def get(name):
        if name not in made:
            exchange = Exchange()
            made[name] = engine(name), engine(name, exchange), engine(name, exchange), exchange
        _, producer, consumer, exchange = made[name]
        for each in (producer, consumer):
            each.engine.forget_prefixes()
            each.engine.transfers.hold_seconds, each.engine.transfers.pull_seconds = 60.0, 20.0
        exchange.failure, exchange.delay, exchange.damage = None, 0, 0
        return made[name]

    yield get
    for one, producer, consumer, _ in made.values():
        for each in (one, producer, consumer):
            each.close()


@pytest.mark.parametrize("name", METHODS)
def test_text_and_steps_are_those_of_one_server(pairs, name):
    one, producer, consumer, exchange = pairs(name)
    for params in (GREEDY, SAMPLED):
        one.engine.forget_prefixes()
        producer.engine.forget_prefixes()
        consumer.engine.forget_prefixes()
        before, exchange.delay = consumer.engine.transfers.statistics.pulled, 3
        expected = run(one, params)
        found = run(consumer, params, transfer=prefill(producer, params))
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        assert steps(found) == steps(expected)
        assert consumer.engine.transfers.statistics.pulled == before + 1
        assert found.num_cached_tokens == len(found.prompt_token_ids) - 1
    assert_clean(producer, consumer)


def test_only_missing_blocks_move(pairs):
    _, producer, consumer, _ = pairs("eagle3")
    link = consumer.engine.transfers.link
    run(consumer, transfer=prefill(producer))
    whole, link.moved = link.moved, 0
    run(consumer, transfer=prefill(producer))
    assert 0 < link.moved < whole / 2  # the last, unfinished block
    assert_clean(producer, consumer)


FAILURES = {
    "peer gone": lambda exchange: setattr(exchange, "failure", ConnectionError("gone")),
    "half transfer": lambda exchange: setattr(exchange, "damage", 3),
    "never ends": lambda exchange: setattr(exchange, "delay", 10**9),
}


@pytest.mark.parametrize("name", ["none", "eagle3"])
@pytest.mark.parametrize("failure", FAILURES)
def test_failures_end_in_reading_the_prompt_again(pairs, name, failure):
    one, producer, consumer, exchange = pairs(name)
    consumer.engine.transfers.pull_seconds = 0.3
    before = consumer.engine.transfers.statistics.recomputed
    params = prefill(producer)
    FAILURES[failure](exchange)
    one.engine.forget_prefixes()
    expected, found = run(one), run(consumer, transfer=params)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids and steps(found) == steps(expected)
    assert consumer.engine.transfers.statistics.recomputed == before + 1
    assert_clean(producer, consumer)


def test_a_slow_consumer_finds_other_texts_in_the_blocks(pairs):
    """The producer has let go of the blocks, and another prompt has overwritten them."""
    one, producer, consumer, _ = pairs("eagle3")
    producer.engine.transfers.hold_seconds = 0.05
    before = consumer.engine.transfers.statistics.recomputed
    params = prefill(producer)
    time.sleep(0.1)
    look(producer)
    assert not producer.engine.transfers.held
    producer.engine.forget_prefixes()
    for number in range(20):
        run(
            producer,
            prompt=f"{number}: The dog and the cat went to the river to find something new to eat for dinner. They",
        )
    found = run(consumer, transfer=params)
    assert found.outputs[0].token_ids == run(one).outputs[0].token_ids
    assert consumer.engine.transfers.statistics.recomputed == before + 1
    assert producer.engine.transfers.statistics.expired >= 1
    assert_clean(producer, consumer)


def test_a_request_that_is_cancelled_while_its_keys_come(pairs):
    _, producer, consumer, exchange = pairs("eagle3")
    params, exchange.delay = prefill(producer), 10**9
    ids = consumer.tokenizer(PROMPT)["input_ids"]
    request = consumer.engine.add("x", PROMPT, ids, SamplingParams(max_tokens=4, kv_transfer_params=params))
    with consumer.engine.decoder.active():
        consumer.engine.step()
        assert consumer.engine.transfers.pulling
        consumer.engine.abort(request)
    assert not consumer.engine.has_work
    assert_clean(producer, consumer)


def test_unlike_servers_and_prompts_are_refused(pairs):
    _, producer, consumer, _ = pairs("none")
    _, _, other, _ = pairs("eagle3")
    params = prefill(producer)
    for llm, transfer, prompt, message in (
        (other, params, PROMPT, "another model, precision, block size or method"),
        (consumer, params, PROMPT + " x", "another prompt"),
        (consumer, {"do_remote_prefill": True}, PROMPT, "lacks 'fingerprint'"),
    ):
        with pytest.raises(ValueError, match=message):
            run(llm, prompt=prompt, transfer=transfer)
    assert run(consumer, transfer=params).outputs[0].token_ids
    assert_clean(producer, consumer, other)
    plain = engine("none")
    with pytest.raises(ValueError, match="kv_transfer_config"):
        run(plain, transfer=params)
    plain.close()


def test_methods_whose_state_cannot_be_moved_are_refused():
    llm = LLM("tiny", dtype="float32", speculative_config={"method": "dflash", "model": "tiny-dflash"}, max_model_len=128,
              kv_cache_memory_bytes=8 << 20)  # fmt: skip
    with pytest.raises(ValueError, match="'dflash' keeps of a prompt cannot be moved"):
        Transfers(llm.engine.decoder, Exchange().link())
    llm.close()


# ---- NIXL, between processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_between_two_processes_by_nixl():
    pytest.importorskip("nixl")
    script = Path(__file__).parents[1] / "benchmarks" / "prefill_decode.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[1])}
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--json", "-"], env=environment, capture_output=True, text=True, timeout=600
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout[done.stdout.index("{") :])
    assert set(report["methods"]) == set(METHODS)
    for name, each in report["methods"].items():
        assert each["equal"] and each["steps"] == each["steps_of_one"] and each["pulled"] and not each["recomputed"], (
            name
        )
    assert report["killed"]["equal"] and report["killed"]["recomputed"] == 1
