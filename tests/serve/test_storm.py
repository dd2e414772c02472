"""Storms: requests of every kind at random times, some cancelled. Each gets what it would get alone, and nothing stays."""

import json
import random
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cache_checks import check_blocks
from helpers_server import Process
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdec.serve import LLM, SamplingParams, StructuredOutputsParams

llguidance = pytest.importorskip("llguidance")

DRAFTERS = {
    "copy": {"method": "ngram", "num_speculative_tokens": 4},
    "chain": {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3},
    "tree": {"method": "eagle3", "model": "tiny-eagle3", "top_k": 3, "total_tokens": 8, "num_speculative_tokens": 3},
    "off": {"method": "none"},
}
CONFIGS = {
    **{name: {**config, "block_size": 4} for name, config in DRAFTERS.items()},
    "mixed": {"method": "per_request", "methods": DRAFTERS, "block_size": 4},
}
TEXTS = [
    "Once upon a time", "Tom and Lily went to the park. Tom and Lily", "The dog was happy. The dog was", "One day, a",
    "Once upon a time there was a little girl. Once upon a time there was a", "Lily",
]  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Lily"]}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS = [
    {"json": SCHEMA},
    {"regex": r"(Tom|Lily) (is|was) [a-z]{2,9}(, [a-z]{2,9})*\."},
    {"choice": ["the big dog", "the little cat", "the little bird"]},
    {"grammar": 'root ::= "yes" | "no" ws\nws ::= " because " [a-z ]{3,12} "."'},
]
PREDICTED = [
    None, None, '{"name": "Tom", "age": 3}', "Tom was happy. yes because the dog was", "the little cat", [13, 13, 13],
    " there was a little girl named Lily. She loved to play", " to the park. They saw a big dog.",
]  # fmt: skip
ALONE = {}  # what `generate()` wrote, by model, prompt and parameters


class Grammar(LogitsProcessor):
    """Masks by a grammar as its definition says: a new matcher reads the whole answer before every token."""

    def __init__(self, tokenizer, vocab_size, wanted, prompt_length, ends):
        from llguidance.hf import from_tokenizer

        self.tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends)
        self.grammar, self.prompt_length, self.ends = wanted.to_llguidance(), prompt_length, ends

    def __call__(self, input_ids, scores):
        matcher = llguidance.LLMatcher(self.tokenizer, self.grammar)
        assert matcher.consume_tokens(input_ids[0, self.prompt_length :].tolist())
        allowed = torch.zeros(scores.shape[1], dtype=torch.bool)
        if matcher.is_stopped():
            allowed[self.ends] = True
        else:
            bits = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed[[token for token in range(scores.shape[1]) if bits >> token & 1]] = True
        return scores.masked_fill(~allowed[None], float("-inf"))


def alone(model, tokenizer, ids, params):
    """What plain `generate()` writes after one prompt, without the end-of-sequence token."""
    changes_nothing = {"num_speculative_tokens": None, "drafter": None, "priority": 0, "prediction": None}
    key = (id(model), tuple(ids), repr(params.copy(**changes_nothing)))
    if key in ALONE:
        return ALONE[key]
    ends = model.generation_config.eos_token_id
    wanted, processors = params.structured_outputs, LogitsProcessorList()
    if wanted is not None:
        processors.append(Grammar(tokenizer, model.config.vocab_size, wanted, len(ids), ends))
    sampling = {"do_sample": True, "temperature": params.temperature, "top_k": 0} if params.do_sample else {}
    # A seed means something to our loop alone; greedy answers are compared with transformers' own loop.
    config = {"method": "none", "seed": params.seed} if params.do_sample else None
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=params.max_tokens,
        logits_processor=processors, speculative_config=config, **{"do_sample": False, **sampling},
    )  # fmt: skip
    ALONE[key] = without_end(out[0, len(ids) :].tolist(), ends)
    return ALONE[key]


def without_end(tokens, ends):
    return tokens[:-1] if tokens and tokens[-1] in ends else tokens


def random_params(rng, drafters):
    """Any method, length, priority and seed, with a grammar or a prediction or without."""
    wanted, length = rng.choice([None, None, *GRAMMARS]), rng.choice([None, None, 0, 2])
    return SamplingParams(
        temperature=rng.choice([0, 0.8]), seed=rng.randint(0, 9), max_tokens=rng.randint(1, 24 if wanted is None else 40),
        priority=rng.randint(-1, 1), num_speculative_tokens=length,
        prediction=None if length == 0 else rng.choice(PREDICTED),
        drafter=rng.choice([None, *drafters]), structured_outputs=wanted and StructuredOutputsParams(**wanted),
    )  # fmt: skip


def storm(llm, count, seed):
    """[(ids, params, output)] of the requests that were not cancelled."""
    rng = random.Random(seed)
    engine, alive, done, number = llm.engine, {}, [], 0
    drafters = getattr(engine.decoder.config, "methods", {})
    arrivals = sorted(rng.randint(0, count) for _ in range(count))
    with engine.decoder.active():
        for step in range(10**6):
            while arrivals and arrivals[0] <= step:
                arrivals.pop(0)
                ids = llm.tokenizer(rng.choice(TEXTS))["input_ids"][: rng.randint(1, 30)]
                request = engine.add(str(number), None, ids, random_params(rng, drafters))
                alive[request.id], number = request, number + 1
            engine.step()
            if rng.random() < 0.08 and alive:
                engine.abort(alive[rng.choice(sorted(alive))])
            for name in [name for name, request in alive.items() if request.finished]:
                request = alive.pop(name)
                assert request.error is None
                if request.choices[0].output.finish_reason != "abort":
                    done.append((request.prompt_token_ids, request.params, request.choices[0].output))
            if not arrivals and not engine.has_work:
                break
    return done


def check_text(params, output):
    """A text that is complete is what its grammar describes."""
    wanted = params.structured_outputs
    if wanted is None or output.finish_reason != "stop":
        return
    if wanted.json is not None:
        assert set(json.loads(output.text)) == set(SCHEMA["required"])
    elif wanted.choice is not None:
        assert output.text in wanted.choice
    else:
        assert re.fullmatch(wanted.regex or r"yes|no because [a-z ]{3,12}\.", output.text), output.text


def held():
    """Threads and open files of this process."""
    return set(threading.enumerate()), len(list(Path("/proc/self/fd").iterdir()))


def more_than(before):
    """Whether threads or files are held that were not; some that earlier tests held may have gone."""
    threads, files = held()
    return bool(threads - before[0]) or files > before[1]


def weather(model, tokenizer, config, count, seed, **limits):
    """A storm, its answers compared one by one; then the books are checked and the engine is closed."""
    before = held()
    llm = LLM(model, tokenizer, config, max_model_len=256, **limits)
    done = storm(llm, count, seed)
    constrained = [params for _, params, _ in done if params.structured_outputs is not None]
    assert len(done) > count // 2 and len(constrained) > count // 5 and llm.engine.scheduler.num_preemptions > 0
    for ids, params, output in done:
        written = without_end(output.token_ids, model.generation_config.eos_token_id)
        assert written == alone(model, tokenizer, ids, params), params
        check_text(params, output)
    decoder = llm.engine.decoder
    check_blocks(decoder.cache.pool)
    assert decoder.cache.pool.num_used == 0 and not llm.engine._choices
    assert not decoder.statistics and not decoder.cache.tables
    llm.close()
    deadline = time.monotonic() + 10
    while more_than(before) and time.monotonic() < deadline:  # the thread that compiles ends in its own time
        time.sleep(0.05)
    assert not more_than(before), (held(), before)


@pytest.mark.parametrize("name", ["copy", "tree", "mixed"])
def test_a_storm_of_requests(tiny_model, tiny_tokenizer, name):
    config = {**CONFIGS[name], "num_blocks": 12}
    weather(tiny_model, tiny_tokenizer, config, 24, 0, max_num_batched_tokens=40, max_num_seqs=6)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_long_storm_of_requests(tiny_model, tiny_tokenizer, name):
    config = {**CONFIGS[name], "num_blocks": 28}
    weather(tiny_model, tiny_tokenizer, config, 500, 1, max_num_batched_tokens=64, max_num_seqs=12)


def as_body(ids, params, stream):
    """The same request over HTTP."""
    wanted = params.structured_outputs
    names = ("temperature", "seed", "max_tokens", "priority")
    speculation = {"method": params.drafter, "num_speculative_tokens": params.num_speculative_tokens}
    body = {"prompt": ids, "return_token_ids": True, "stream": stream, "speculative_config": speculation}
    constrained = {} if wanted is None else {"structured_outputs": {k: v for k, v in vars(wanted).items() if v}}
    if isinstance(params.prediction, str):
        constrained["prediction"] = {"type": "content", "content": params.prediction}
    return json.dumps({**body, **{name: getattr(params, name) for name in names}, **constrained}).encode()


def ask(server, ids, params, kind, wait):
    """Token ids of the answer; None if the client leaves before its end."""
    time.sleep(wait)
    body = as_body(ids, params, stream=kind != "whole")
    if kind == "leaves":
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
            sock.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
            sock.recv(500)
        return None
    if kind == "whole":
        return server.post("/v1/completions", body)[2]["choices"][0]["token_ids"]
    frames = server.streamed("/v1/completions", json.loads(body))
    return [token for frame in frames for token in frame["choices"][0]["token_ids"]]


def held_by(server):
    """(threads, open files and sockets) of a server's two processes, and the engine's rows and blocks."""
    folders, metrics = [Path(f"/proc/{pid}") for pid in (server.process.pid, server.engine())], server.metrics()
    names = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
    held = [len(list((folder / each).iterdir())) for folder in folders for each in ("task", "fd")]
    return *held, [metrics[f"hf_specdec_{name}"] for name in names]


@pytest.mark.slow
def test_a_long_storm_over_http(tiny_model, tiny_tokenizer):
    """500 requests of 24 clients, whole and streamed; every tenth client leaves in the middle."""
    pytest.importorskip("uvicorn")
    config, rng = {**CONFIGS["mixed"], "num_blocks": 40}, random.Random(2)
    flags = ["--max-model-len", "256", "--max-num-seqs", "12", "--max-num-batched-tokens", "64"]
    with Process.running("--speculative-config", json.dumps(config), *flags) as server:
        requests = []
        for _ in range(500):
            ids = tiny_tokenizer(rng.choice(TEXTS))["input_ids"][: rng.randint(1, 30)]
            kind = rng.choice(["whole"] * 5 + ["streamed"] * 4 + ["leaves"])
            requests.append((ids, random_params(rng, DRAFTERS), kind, rng.expovariate(10)))

        def asked(some):
            with ThreadPoolExecutor(24) as clients:
                return list(clients.map(lambda each: ask(server, *each), some))

        asked(requests[:100])  # fills what is filled once: grammars, threads of the event loop
        time.sleep(2)
        before = held_by(server)
        answers = asked(requests)
        for (ids, params, *_), answer in zip(requests, answers, strict=True):
            if answer is not None:
                ends = tiny_model.generation_config.eos_token_id
                assert without_end(answer, ends) == alone(tiny_model, tiny_tokenizer, ids, params), params
        deadline = time.monotonic() + 40
        # Asking is a connection of its own, which may still be open when it is counted.
        while (held := held_by(server))[1:] != before[1:] and time.monotonic() < deadline:
            time.sleep(0.5)
        assert held[1:] == before[1:] and before[-1] == [0, 0, 0]
        assert held[0] <= before[0] + 4  # pools of the event loop may have grown; a thread for every request would show
        assert server.metrics()["hf_specdec_preemptions_total"] > 0
