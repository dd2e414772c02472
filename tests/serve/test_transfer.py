"""Prefill and decode apart: the text and the steps of one server, and every failure on the way."""

import asyncio
import ctypes
import json
import os
import subprocess
import sys
import time

import pytest
from cache_checks import check_blocks
from paths import ROOT

from hf_specdec import LLM, SamplingParams
from hf_specdec.serve import proxy
from hf_specdec.serve.transfer import Transfers
from hf_specdec.serve.transfer.nixl_link import NixlLink

METHODS = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "draft_model": {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "model": "tiny-eagle3"},
    "mtp": {"method": "mtp", "model": "tiny-mtp"},
    "int8": {"method": "eagle3", "model": "tiny-eagle3", "kv_cache_dtype": "int8"},
}
PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friends. One day"
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAMPLED = SamplingParams(temperature=1, seed=5, max_tokens=40)


class Exchange:
    """Links within one process, by copies of memory. Tests make them fail.

    `failure`: raised by `start` and, for the peer, a reason not to be told anything. `delay`: how often a transfer is not done yet.
    `damage`: the number of pieces that come. `running`: transfers that have begun and not ended.
    """

    def __init__(self):
        self.messages, self.running = {}, []
        self.reset()

    def reset(self):
        self.failure, self.delay, self.damage = None, 0, 0

    def link(self):
        return MemoryLink(self)


class MemoryLink:
    def __init__(self, exchange):
        self.exchange, self.name, self.moved, self.registered = exchange, str(id(self)), 0, 0
        exchange.messages[self.name] = []

    def register(self, pools):
        self.registered += 1
        return self.name

    def start(self, peer, pieces, message):
        if self.exchange.failure is not None:
            raise self.exchange.failure
        handle = [peer, pieces, message, self.exchange.delay]
        self.exchange.running.append(handle)
        return handle

    def is_done(self, handle):
        handle[3] -= 1
        if handle[3] > 0:
            return False
        self.copy(handle)
        return True

    def copy(self, handle):
        """The bytes come, whether anybody still waits for them or not."""
        peer, pieces, message, _ = handle
        self.exchange.running.remove(handle)
        for number, piece in enumerate(pieces):
            if self.exchange.damage and number >= self.exchange.damage:
                break  # half of it has come
            ctypes.memmove(piece.here, piece.there, piece.size)
            self.moved += piece.size
        if message:
            self.exchange.messages[peer].append(message)

    def drop(self, handle):
        return not any(each is handle for each in self.exchange.running)

    def tell(self, peer, message):
        if self.exchange.failure is not None:
            return False
        self.exchange.messages[peer].append(message)
        return True

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
        assert not transfers.producer.prompts and not transfers.consumer.pulling and not decoder.statistics
        for cache in transfers.pools.caches:
            assert not cache.tables
            check_blocks(cache.pool)
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
            each.engine.decoder.forget_prefixes()
            each.engine.transfers.producer.hold_seconds, each.engine.transfers.consumer.pull_seconds = 60.0, 20.0
            each.engine.scheduler.max_num_batched_tokens = 2048
        exchange.reset()
        return made[name]

    yield get
    for one, producer, consumer, _ in made.values():
        for each in (one, producer, consumer):
            each.close()


@pytest.mark.parametrize("name", METHODS)
def test_text_and_steps_are_those_of_one_server(pairs, name):
    one, producer, consumer, exchange = pairs(name)
    for params in (GREEDY, SAMPLED):
        one.engine.decoder.forget_prefixes()
        producer.engine.decoder.forget_prefixes()
        consumer.engine.decoder.forget_prefixes()
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
    link = consumer.engine.transfers.pools.link
    run(consumer, transfer=prefill(producer))
    whole, link.moved = link.moved, 0
    run(consumer, transfer=prefill(producer))
    assert 0 < link.moved <= whole / 2  # the last, unfinished block
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
    consumer.engine.transfers.consumer.pull_seconds = 0.3
    before = consumer.engine.transfers.statistics.recomputed
    params = prefill(producer)
    FAILURES[failure](exchange)
    one.engine.decoder.forget_prefixes()
    expected, found = run(one), run(consumer, transfer=params)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids and steps(found) == steps(expected)
    assert consumer.engine.transfers.statistics.recomputed == before + 1
    end_transfers(consumer, exchange)
    if failure == "peer gone":  # the message that the blocks are not needed did not come either
        producer.engine.transfers.producer.close()
    exchange.reset()
    assert_clean(producer, consumer)


def end_transfers(consumer, exchange):
    """Let the bytes come that nobody waits for any more."""
    for handle in list(exchange.running):
        consumer.engine.transfers.pools.link.copy(handle)


def test_a_slow_consumer_finds_other_texts_in_the_blocks(pairs):
    """The producer has let go of the blocks, and another prompt has overwritten them."""
    one, producer, consumer, _ = pairs("eagle3")
    producer.engine.transfers.producer.hold_seconds = 0.05
    before = consumer.engine.transfers.statistics.recomputed
    params = prefill(producer)
    time.sleep(0.1)
    look(producer)
    assert not producer.engine.transfers.producer.prompts
    producer.engine.decoder.forget_prefixes()
    for number in range(6):
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
        assert consumer.engine.transfers.consumer.pulling
        consumer.engine.abort(request)
    assert not consumer.engine.has_work
    end_transfers(consumer, exchange)
    assert_clean(producer, consumer)


def test_blocks_stay_taken_until_a_stopped_transfer_has_ended(pairs):
    """Its bytes still come, and would land in another row's blocks."""
    one, producer, consumer, exchange = pairs("eagle3")
    consumer.engine.transfers.consumer.pull_seconds = 0.1
    params, exchange.delay = prefill(producer), 10**9
    run(consumer, transfer=params)  # has given up and read the prompt itself
    taken = {id(cache): [b for each, blocks in consumer.engine.transfers.consumer.stopped[0][1] if each is cache for b in blocks]
             for cache in consumer.engine.transfers.pools.caches}  # fmt: skip
    assert all(taken.values())
    other = "The dog and the cat went to the river to find something new to eat for dinner. They"
    consumer.engine.decoder.forget_prefixes()
    with consumer.engine.decoder.active():
        request = consumer.engine.add("y", other, consumer.tokenizer(other)["input_ids"], GREEDY)
        while not request.choices[0].output.token_ids:
            consumer.engine.step()
        tables = [
            cache.tables[request.choices[0].sequence.id].blocks for cache in consumer.engine.transfers.pools.caches
        ]
        for cache, blocks in zip(consumer.engine.transfers.pools.caches, tables, strict=True):
            assert not set(blocks) & set(taken[id(cache)])
        end_transfers(consumer, exchange)
        while consumer.engine.has_work:
            consumer.engine.step()
    assert request.choices[0].output.token_ids == run(one, prompt=other).outputs[0].token_ids
    assert not consumer.engine.transfers.consumer.stopped
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


# ---- prompts that are pulled while they are read --------------------------------------------------------------------

LONG = " ".join([PROMPT] * 4)
FEW = SamplingParams(temperature=0, max_tokens=8)
FEW_SAMPLED = SamplingParams(temperature=1, seed=5, max_tokens=8)


class Overlap:
    """A producer that reads a prompt in chunks of 32 tokens, and a consumer that pulls them."""

    def __init__(self, pair, params=FEW, chunk=32):
        self.one, self.producer, self.consumer, self.exchange = pair
        self.producer.engine.scheduler.max_num_batched_tokens = chunk
        self.params, self.ids = params, self.producer.tokenizer(LONG)["input_ids"]
        asked = {"do_remote_decode": True, "in_chunks": True}
        self.read = self.producer.engine.add(
            "p", LONG, self.ids, SamplingParams(**{**vars(params), "max_tokens": 1, "kv_transfer_params": asked})
        )
        while self.read.announcement is None:
            self.step(self.producer)
        announced = json.loads(json.dumps(self.read.announcement))
        assert "remote_blocks" not in announced and not self.read.finished
        self.written = self.consumer.engine.add(
            "c", LONG, self.ids, SamplingParams(**{**vars(params), "kv_transfer_params": announced})
        )
        self.before = dict(vars(self.consumer.engine.transfers.statistics))

    def step(self, *engines):
        for llm in engines:
            with llm.engine.decoder.active():
                llm.engine.step()

    def counts(self):
        return {key: value - self.before[key] for key, value in vars(self.consumer.engine.transfers.statistics).items()}

    def finish(self, timeout=30):
        """Let both engines run until the consumer has its text. Returns it and the number of steps."""
        until = time.monotonic() + timeout
        while not self.written.finished:
            assert time.monotonic() < until, "it hangs"
            self.step(self.producer, self.consumer)
        return self.result()

    def result(self):
        output = self.written.result()
        return output.outputs[0].token_ids, steps(output)

    def of_one(self):
        self.one.engine.decoder.forget_prefixes()
        output = run(self.one, self.params, LONG)
        return output.outputs[0].token_ids, steps(output)


@pytest.mark.parametrize("name", METHODS)
def test_chunks_are_pulled_while_the_next_ones_are_read(pairs, name):
    pair = pairs(name)
    for params in (FEW, FEW_SAMPLED):
        pair[1].engine.decoder.forget_prefixes()
        pair[2].engine.decoder.forget_prefixes()
        both = Overlap(pair, params)
        link, size = both.consumer.engine.transfers.pools.link, both.consumer.engine.transfers.pools.block_size
        before, link.moved = link.moved, 0
        while not both.read.finished:
            moved = link.moved
            both.step(both.producer, both.consumer, both.consumer)
        left = both.consumer.engine.transfers.statistics.bytes - both.before["bytes"] - moved
        assert both.finish() == both.of_one()
        counts = both.counts()
        assert (counts["pulled"], counts["recomputed"]) == (1, 0) and counts["bytes"] == link.moved
        blocks = -(-(len(both.ids) - 1) // size)
        # the last chunk and the one before it, whose transfer may still run
        assert moved >= link.moved * (1 - (2 * 32 / size + 1) / blocks) and left + moved <= link.moved
        assert both.written.num_cached_tokens == len(both.ids) - 1
        assert link.registered == 1 == both.producer.engine.transfers.pools.link.registered
        link.moved += before
        assert_clean(both.producer, both.consumer)


def test_only_missing_chunks_move(pairs):
    pair = pairs("eagle3")
    run(pair[2], prompt=LONG[: len(LONG) // 2])
    both = Overlap(pair)
    link = both.consumer.engine.transfers.pools.link
    moved = link.moved
    assert both.finish()[0] == both.of_one()[0]
    missing = link.moved - moved
    pair[1].engine.decoder.forget_prefixes()
    pair[2].engine.decoder.forget_prefixes()
    moved = link.moved
    Overlap(pair).finish()
    assert 0 < missing < 0.7 * (link.moved - moved)
    assert_clean(*pair[1:3])


def lose_a_message(both):
    """The producer's next offer is lost; the consumer asks again."""
    both.step(both.consumer, both.producer)
    both.exchange.messages[both.consumer.engine.transfers.pools.link.name].clear()


def abort_at_the_producer(both):
    both.producer.engine.abort(both.read)


def producer_is_gone(both):
    both.exchange.failure = ConnectionError("gone")
    both.producer.engine.abort(both.read)


def half_of_a_chunk(both):
    both.exchange.damage = 1


def never_ends(both):
    both.consumer.engine.transfers.consumer.pull_seconds = both.consumer.engine.transfers.consumer.pulling[0].until = (
        0.2
    )
    both.exchange.delay = 10**9


def overwritten(both):
    """The producer takes the row's blocks and others overwrite them, before the consumer has read its offer."""
    both.step(both.consumer, both.producer)
    scheduler, caches = both.producer.engine.scheduler, both.producer.engine.transfers.pools.caches
    scheduler.preempt(scheduler.running[0])
    both.producer.engine.decoder.forget_prefixes()
    for cache in caches:
        for layer in cache.layers:
            layer.keys.fill_(7)
            layer.values.fill_(7)


IN_THE_MIDDLE = {
    "lost message": (lose_a_message, "pulled"),
    "aborted there": (abort_at_the_producer, "recomputed"),
    "gone": (producer_is_gone, "recomputed"),
    "half": (half_of_a_chunk, "recomputed"),
    "never ends": (never_ends, "recomputed"),
    "overwritten": (overwritten, "recomputed"),
}


@pytest.mark.parametrize("name", ["none", "eagle3"])
@pytest.mark.parametrize("failure", IN_THE_MIDDLE)
def test_failures_in_the_middle_of_a_prompt(pairs, name, failure):
    both = Overlap(pairs(name))
    both.step(both.consumer, both.producer, both.consumer, both.consumer)
    assert not both.read.finished and both.consumer.engine.transfers.consumer.pulling[0].have
    fail, outcome = IN_THE_MIDDLE[failure]
    fail(both)
    assert both.finish() == both.of_one()
    counts = both.counts()
    assert counts[outcome] == 1 and counts["pulled"] + counts["recomputed"] == 1
    both.exchange.reset()
    end_transfers(both.consumer, both.exchange)
    while both.producer.engine.has_work:  # also if it was not told that nobody waits any more
        both.step(both.producer)
    both.producer.engine.transfers.producer.close()
    assert_clean(both.producer, both.consumer)


@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_a_prompt_that_is_preempted_in_the_middle(pairs, name):
    """What has come stays; the rest is offered again once it has been read again, wherever that is."""
    both = Overlap(pairs(name))
    both.step(both.consumer, both.producer, both.consumer, both.consumer)
    pull = both.consumer.engine.transfers.consumer.pulling[0]
    assert pull.have and pull.handle is None
    scheduler, caches = both.producer.engine.scheduler, both.producer.engine.transfers.pools.caches
    scheduler.preempt(scheduler.running[0])
    both.producer.engine.decoder.forget_prefixes()
    for cache in caches:
        for layer in cache.layers:
            layer.keys.fill_(7)
            layer.values.fill_(7)
    # the blocks at the beginning go to another row
    cache = caches[0]
    cache.add(-5)
    cache.reserve(-5, 3 * cache.block_size)
    assert both.finish() == both.of_one()
    cache.remove(-5)
    assert (both.counts()["pulled"], both.counts()["recomputed"]) == (1, 0)
    assert_clean(both.producer, both.consumer)


def test_a_consumer_that_gives_up_ends_the_reading(pairs):
    both = Overlap(pairs("eagle3"))
    both.step(both.consumer, both.producer)
    both.consumer.engine.abort(both.written)
    both.step(both.producer)
    assert both.read.finished and both.read.choices[0].output.finish_reason == "abort"
    assert not both.producer.engine.has_work
    end_transfers(both.consumer, both.exchange)
    assert_clean(both.producer, both.consumer)


def test_a_consumer_that_asks_when_the_prompt_has_been_read_or_freed(pairs):
    for is_freed in (False, True):
        pair = pairs("eagle3")
        both = Overlap(pair)
        while not both.read.finished:
            both.step(both.producer)
        if is_freed:
            both.producer.engine.transfers.producer.close()
        assert both.finish() == both.of_one()
        assert both.counts()["recomputed"] == is_freed
        assert_clean(both.producer, both.consumer)


def test_messages_that_make_no_sense_are_ignored(pairs):
    both = Overlap(pairs("none"))
    both.step(both.consumer)
    key, name = both.read.choices[0].sequence.id, both.consumer.engine.transfers.consumer.pulling[0].name
    assert str(key) in name
    for message in (
        "",
        "[]",
        "{",
        "[" * 100_000,
        '{"want": "x"}',
        '{"done": "x"}',
        '{"gone": "x"}',
        '{"want": 3, "from": 1, "first": "a"}',
        '{"done": ["x"]}',
        '{"offer": "x", "first": "a", "blocks": [], "digests": []}',
        '{"something": "else"}',
    ):
        both.exchange.messages[both.producer.engine.transfers.pools.link.name].append(message)
    assert both.finish() == both.of_one() and both.counts()["pulled"] == 1
    again = Overlap(pairs("none"))
    again.step(again.consumer)
    pull = again.consumer.engine.transfers.consumer.pulling[0]
    bad = {"offer": pull.name, "first": 0, "blocks": [["a"]], "digests": [["x"]]}
    again.exchange.messages[again.consumer.engine.transfers.pools.link.name].append(json.dumps(bad))
    assert again.finish() == again.of_one()
    assert again.counts()["recomputed"] == 1
    assert_clean(both.producer, both.consumer)


def test_an_error_of_ours_is_no_malformed_message(pairs, monkeypatch):
    _, producer, _, exchange = pairs("none")
    transfers = producer.engine.transfers

    def broken(name):
        raise ValueError("a bug of ours")

    monkeypatch.setattr(transfers.producer, "done", broken)
    exchange.messages[transfers.pools.link.name].append('{"done": "x"}')
    with pytest.raises(ValueError, match="a bug of ours"):
        look(producer)


def test_bytes_that_are_no_text_are_a_malformed_message():
    class Agent:
        def get_new_notifs(self):
            return {"peer": [b"\xff", b"{}"]}

    link = object.__new__(NixlLink)
    link.agent = Agent()
    assert link.messages() == ["\ufffd", "{}"]


@pytest.mark.parametrize("outcome", ["ERR", RuntimeError("NIXL_ERR_BACKEND"), "PROC"])
def test_a_nixl_transfer_that_does_not_begin_is_released(outcome):
    class Agent:
        released = ()

        def get_xfer_descs(self, pieces, kind):
            return pieces

        def initialize_xfer(self, *arguments):
            return "handle"

        def transfer(self, handle):
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        def release_xfer_handle(self, handle):
            self.released += (handle,)

    link = object.__new__(NixlLink)
    link.agent, link.kind, link._peers = Agent(), "DRAM", {"peer": "name"}
    if outcome == "PROC":
        assert link.start("peer", [], "") == "handle" and not link.agent.released
    else:
        with pytest.raises(ConnectionError):
            link.start("peer", [], "")
        assert link.agent.released == ("handle",) and not link._peers


# ---- the proxy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_what_the_proxy_sends_to_the_prefill_server(monkeypatch, scheme):
    """One token, whatever the client wants of the answer; https where the URL says so."""
    sent = []

    class Connection:
        def __init__(self, host, port, timeout):
            sent.append((host, port))

        def request(self, method, path, body, headers):
            sent.append(json.loads(body))

        def getresponse(self):
            raise ConnectionRefusedError("nobody listens")

    wanted, other = ("HTTPSConnection", "HTTPConnection")[:: 1 if scheme == "https" else -1]
    monkeypatch.setattr(proxy.http.client, wanted, Connection)
    monkeypatch.setattr(proxy.http.client, other, None)
    body = {"prompt": "x", "min_tokens": 8, "max_tokens": 9, "temperature": 0}
    assert proxy._prefill(f"{scheme}://server:81", "/v1/completions", body, {}) is None
    assert sent[0] == ("server", 81)
    assert sent[1].pop("kv_transfer_params") and sent[1].pop("stream")
    assert sent[1] == {"prompt": "x", "max_tokens": 1, "temperature": 0}


# ---- NIXL, between processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_between_two_processes_by_nixl():
    pytest.importorskip("nixl")
    script = ROOT / "benchmarks" / "prefill_decode.py"
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


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_the_proxy_refuses_what_is_no_json_object(body):
    sent = []

    async def receive():
        return {"type": "http.request", "body": body}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    asyncio.run(proxy.make_app(["http://127.0.0.1:9"], ["http://127.0.0.1:9"])(scope, receive, send))
    assert sent[0]["status"] == 400 and b"not a JSON object" in sent[1]["body"]
