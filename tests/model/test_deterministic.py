"""`"deterministic": true`: logits are the same bits token by token, together, in a tree, in chunks and beside other rows."""

import threading
import time

import families
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import bundled_prompts, load_bundled
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

import hf_specdec
from hf_specdec import DrafterContext, SpeculativeConfigError, integration
from hf_specdec.core.dispatch_mode import ExclusiveMode
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.core.rows import RowInput
from hf_specdec.kernels import invariant
from hf_specdec.kernels.invariant import reference as ops
from hf_specdec.model import prepare as preparing
from hf_specdec.model.architectures import reads_pages
from hf_specdec.model.native.trace import TapeRecorder
from hf_specdec.model.options.invariant_ops import InvariantOps
from hf_specdec.model.packed_model import PackedModel
from hf_specdec.model.prepare import ModelOptions, prepare
from hf_specdec.model.row_descriptions import describe_lines

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LENGTH = 31


# ---- a model's logits -----------------------------------------------------------------------------------------------


def make(name: str, dtype: torch.dtype):
    model = load_bundled("tiny") if name == "tiny" else families.make(name)
    return model.to(dtype)


def texts(packed: PackedModel, count: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(1, packed.vocab_size, (count, LENGTH + 1))


def start(packed: PackedModel, rows: int, block_size: int = 16):
    cache = packed.new_cache(64, block_size, share_prefixes=False)
    for row in range(rows):
        cache.add(row)
    return cache


def feed(packed, cache, row: int, tokens, chunks) -> torch.Tensor:
    """Logits [n, V] of a text read in chunks of these sizes."""
    out, first = [], cache.tables[row].length
    cache.reserve(row, len(tokens))
    for size in chunks:
        logits = packed.forward([RowInput(row, tokens[first : first + size], first, logits=size)], cache).logits
        out.append(logits.clone())
        first += size
    cache.tables[row].length = first
    return torch.cat(out)


def ways(packed: PackedModel) -> dict[str, torch.Tensor]:
    """Logits of the same text [31, V], computed in many ways."""
    text, other, third = texts(packed)
    tokens = text[:LENGTH]
    found = {"one by one": feed(packed, start(packed, 1), 0, tokens, [1] * LENGTH)}
    found["K + 1"] = feed(packed, start(packed, 1), 0, tokens, [1] + [6] * 5)
    found["chunks"] = feed(packed, start(packed, 1, block_size=3), 0, tokens, [17, 2, 9, 3])
    found["at once"] = feed(packed, start(packed, 1), 0, tokens, [LENGTH])
    # Beside ragged rows, which come and go and stand before and behind it, in blocks that are scattered.
    cache = start(packed, 3, block_size=2)
    parts, first = [], 0
    for size, before, behind in ((5, 3, 0), (6, 0, 11), (1, 9, 1), (6, 2, 2), (13, 1, 7)):
        rows = [(1, other, before), (0, text, size), (2, third, behind)]
        inputs = []
        for row, line, count in rows:
            if count:
                begin = cache.tables[row].length
                cache.reserve(row, begin + count)
                inputs.append(RowInput(row, line[begin : begin + count], begin, logits=count))
                cache.tables[row].length = begin + count
        parts.append(packed.forward(inputs, cache).logits[before : before + size].clone())
        first += size
    assert first == LENGTH
    found["beside others"] = torch.cat(parts)
    found["as a path of a tree"] = through_trees(packed, text, other)
    return found


def through_trees(packed, text, wrong) -> torch.Tensor:
    """Five tokens of the text at a time as a path of a tree of eleven nodes, wrong siblings between them."""
    cache = start(packed, 2)
    feed(packed, cache, 1, wrong[:4], [4])
    parts = [feed(packed, cache, 0, text[:1], [1])]
    parents = np.array([-1, -1, 0, 1, 1, 4, 4, 5, 6, 6, 9])  # the text is the path 1, 4, 6, 9, 10
    path = [1, 4, 6, 9, 10]
    while (first := cache.tables[0].length) < LENGTH:
        tokens = wrong[: len(parents)].copy()
        tokens[path] = text[first : first + 5]
        visibility = np.eye(len(parents), dtype=bool)
        depth = np.zeros(len(parents), dtype=int)
        for node, parent in enumerate(parents):
            if parent >= 0:
                visibility[node] |= visibility[parent]
                depth[node] = depth[parent] + 1
        cache.reserve(0, first + len(parents))
        row = RowInput(0, tokens, first, first + depth, visibility, first + depth, logits=len(parents))
        beside = RowInput(1, wrong[4:6], 4, logits=2)
        cache.reserve(1, 6)
        parts.append(packed.forward([beside, row], cache).logits[2:][path].clone())
        cache.commit([(0, first, path)])
    return torch.cat(parts)


_SLOW = [
    pytest.param(*case, marks=pytest.mark.slow) for case in (("Mistral", "bf16"), ("Gemma2", "bf16"), ("tiny", "fp32"))
]
CASES = [("tiny", "bf16"), ("gpt-oss", "bf16"), ("Qwen3-MoE", "fp32"), ("GPT-2", "fp16"), *_SLOW]


@torch.no_grad()
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_logits_do_not_depend_on_the_batch(name, dtype):
    overrides = {"attn_implementation": "eager"} if name == "Gemma2" else {}
    model = make(name, DTYPES[dtype])
    if overrides:
        model.set_attn_implementation("eager")
    packed = prepare(model, ModelOptions(deterministic=True))
    with packed.active():
        found = ways(packed)
    expected = found.pop("one by one")
    assert expected.isfinite().all()
    for way, logits in found.items():
        differing = (logits != expected).any(1).nonzero()[:, 0].tolist()
        assert not differing, f"{way}: tokens {differing}"


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_without_the_mode_they_do(dtype):
    """Or the test above would show nothing. (The native library's sums do not depend on the batch either.)"""
    packed = prepare(make("tiny", DTYPES[dtype]), ModelOptions(native=False))
    with packed.active():
        found = ways(packed)
    expected = found.pop("one by one")
    assert not all(torch.equal(logits, expected) for logits in found.values())


@torch.no_grad()
@pytest.mark.parametrize("name", ["Mistral", "Gemma2", "gpt-oss", "GPT-2", "OLMo2"])
def test_the_mode_only_rounds_otherwise(name):
    model = families.make(name)
    if not reads_pages(model):
        pytest.skip("gathers keys here: transformers 5.17 runs Gemma 2 without its soft-capping")
    found = []
    for deterministic in (False, True):
        packed = prepare(model, ModelOptions(deterministic=deterministic))
        with packed.active():
            found.append(feed(packed, start(packed, 1), 0, texts(packed)[0][:LENGTH], [20, 11]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_other_threads_and_other_models_run_as_ever():
    model = families.make("Llama")
    packed = prepare(model, ModelOptions(deterministic=True))
    seen = []

    def look():
        seen.append(torch.utils._python_dispatch._get_current_dispatch_mode())

    def here_and_elsewhere(module, args, output):
        run_in_a_thread(look)
        look()

    handle = model.lm_head.register_forward_hook(here_and_elsewhere)
    with packed.active():
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        feed(packed, start(packed, 1), 0, texts(packed)[0], [3])
    handle.remove()
    assert seen[0] is None and isinstance(seen[1], InvariantOps)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def run_in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


# ---- generate() -----------------------------------------------------------------------------------------------------

METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "draft_model": {"method": "draft_model", "model": "tiny-draft"},
    "early exit": {"method": "draft_model", "early_exit": 5},
    "eagle3 tree": {"method": "eagle3", "model": "tiny-eagle3", "top_k": 3, "total_tokens": 10, "depth": 4},
}
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def bf16(tiny_tokenizer):
    """The bundled target in bfloat16, and four prompts."""
    model = load_bundled("tiny").to(torch.bfloat16)
    yield model, bundled_prompts(tiny_tokenizer, 4)
    hf_specdec.release(model)


@pytest.fixture(scope="module")
def plain(bf16, tiny_tokenizer):
    """The prompts' plain texts."""
    model, prompts = bf16
    return decode(model, tiny_tokenizer, prompts, {"method": "none"}, batch=2)[0]


def decode(model, tokenizer, prompts, config, batch: int, **arguments):
    """The texts, and the last call's statistics."""
    rows, tau = [], 0.0
    for first in range(0, len(prompts), batch):
        encoded = tokenizer(prompts[first : first + batch], return_tensors="pt", padding=True, add_special_tokens=False)
        out = model.generate(
            **encoded, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, return_dict_in_generate=True,
            speculative_config={**config, "deterministic": True}, **{"do_sample": False, **arguments},
        )  # fmt: skip
        rows += out.sequences[:, encoded.input_ids.shape[1] :].tolist()
        tau = max(tau, out.speculation["num_accepted_tokens"])
    return rows, tau


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "batch"),
    [pytest.param(name, 4, marks=pytest.mark.slow if name in ("eagle3 tree", "early exit") else ()) for name in METHODS]
    + [pytest.param(name, 1, marks=pytest.mark.slow if name != "eagle3 tree" else ()) for name in METHODS],
)
def test_greedy_bf16_text_is_that_of_plain_decoding(bf16, plain, tiny_tokenizer, name, batch):
    model, prompts = bf16
    few = prompts[: 2 if batch == 1 else 4]
    rows, accepted = decode(model, tiny_tokenizer, few, METHODS[name], batch)
    assert rows == plain[: len(few)]
    assert all(len(row) == NEW_TOKENS for row in rows) and accepted > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "whole",
    [
        {"method": "hybrid", "first": METHODS["ngram"], "second": METHODS["early exit"]},
        {"method": "per_request", "methods": [METHODS["early exit"]]},
        {"method": "auto", "methods": [METHODS["early exit"]], "memory": False},
    ],
    ids=lambda whole: whole["method"],
)
def test_a_part_that_exits_early_leaves_the_targets_layers_as_they_are(bf16, plain, tiny_tokenizer, whole):
    """Without the native library, drafters pack their weights. These layers are the target's, too."""
    model, prompts = bf16
    rows, accepted = decode(model, tiny_tokenizer, prompts[:1], {**whole, "native": False}, 1)
    assert rows == plain[:1] and accepted > 0


@pytest.mark.parametrize("deterministic", [True, False])
def test_on_gpus_a_drafter_that_exits_early_does_not_replace_the_targets_linears(monkeypatch, deterministic):
    """In captured forwards, few rows take a kernel of our own, which the mode does not see and which adds in another order."""
    replaced = []
    monkeypatch.setattr(preparing, "uses_graphs", lambda wanted, packed: True)
    monkeypatch.setattr(preparing, "few_row_linears", lambda model, **options: replaced.append(model))
    model = families.make("Llama")
    config = hf_specdec.parse_config({"method": "draft_model", "early_exit": 1, "deterministic": deterministic})
    integration.generator_for(model, config, DrafterContext())
    assert replaced == ([] if deterministic else [model, model])  # the target's, and the drafter's


def test_it_costs_no_trace_of_the_model(bf16, tiny_tokenizer):
    """After the call, the model's own forward is the one it had."""
    model, prompts = bf16
    ids = tiny_tokenizer(prompts[0], return_tensors="pt").input_ids
    with torch.no_grad():
        before = model(ids).logits
        decode(model, tiny_tokenizer, prompts[:1], {"method": "none"}, 1)
        assert torch.equal(model(ids).logits, before)


# ---- the operations -------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40), width=st.integers(1, 200), outputs=st.integers(1, 100), biased=st.booleans(),
    transposed=st.booleans(), dtype=st.sampled_from(list(DTYPES)), seed=st.integers(0, 99),
)  # fmt: skip
def test_linear(rows, width, outputs, biased, transposed, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[dtype]
    x = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(width, outputs, generator=generator).to(dtype)
    weight = weight.t().contiguous().t() if transposed else weight
    bias = torch.randn(outputs, generator=generator).to(dtype) if biased else None
    out = ops.linear(x, weight, bias)
    exact = x.double() @ weight.double() + (0 if bias is None else bias.double())
    torch.testing.assert_close(
        out.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps * max(width, 4)
    )
    first = int(torch.randint(rows, (1,), generator=generator))
    last = int(torch.randint(first, rows, (1,), generator=generator)) + 1
    assert torch.equal(ops.linear(x[first:last], weight, bias), out[first:last])


def test_where_rows_of_a_block_differ_each_is_computed_alone(monkeypatch):
    """A library whose blocks depend on the place of a row."""
    calls = []

    def product(x, weight, bias):
        calls.append(x.shape[0])
        return (x @ weight) * (1 + torch.arange(x.shape[0])[:, None])

    monkeypatch.setattr(ops, "_keeps_rows_apart", {})
    monkeypatch.setattr(ops, "_product", product)
    x, weight = torch.randn(3, 4), torch.randn(4, 5)
    out = ops.linear(x, weight)
    assert torch.equal(out, torch.cat([row[None] @ weight for row in x])) and calls[-3:] == [1, 1, 1]


def serial(x, weight, order):
    """x [M, K] @ weight [K, N] in float32, the products added in an order."""
    out = torch.zeros(x.shape[0], weight.shape[1])
    for k in order:
        out = out + x[:, k, None].float() * weight[None, k].float()
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "outputs"), [(3, 1), (4, 1), (5, 2), (7, 1), (64, 1), (33, 17)])
def test_the_check_of_a_block_sees_another_order_of_the_sum(monkeypatch, width, outputs, dtype):
    """However few terms and outputs: a library that adds the last row's terms backwards."""

    def product(x, weight, bias):
        out = serial(x, weight, range(width))
        if x.shape[0] > 1:
            out[-1:] = serial(x[-1:], weight, reversed(range(width)))
        return out.to(x.dtype)

    x, weight = torch.randn(3, width).to(DTYPES[dtype]), torch.randn(width, outputs).to(DTYPES[dtype])
    monkeypatch.setattr(ops, "_keeps_rows_apart", {})
    monkeypatch.setattr(ops, "_product", product)
    ops.linear(x, weight)
    assert list(ops._keeps_rows_apart.values()) == [False]


def test_blocks_are_checked_for_every_alignment_of_the_weights(monkeypatch):
    """Weights mapped from a file begin anywhere."""
    monkeypatch.setattr(ops, "_keeps_rows_apart", {})
    seen = []
    original = ops._product
    monkeypatch.setattr(
        ops, "_product", lambda x, weight, bias: (seen.append(weight.data_ptr() % 64), original(x, weight, bias))[1]
    )
    memory = torch.randn(5 * 7 + 16)
    for begin in range(0, 16, 5):
        weight = memory[begin : begin + 35].view(5, 7)
        seen.clear()
        ops.linear(torch.randn(2, 5), weight)
        assert set(seen) == {weight.data_ptr() % 64}
    assert len(ops._keeps_rows_apart) == 4


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=st.integers(1, 9), width=st.integers(1, 300), dtype=st.sampled_from(list(DTYPES)), seed=st.integers(0, 99))
def test_row_reductions(rows, width, dtype, seed):
    dtype = DTYPES[dtype]
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    weight, bias = torch.rand(width).to(dtype), torch.rand(width).to(dtype)
    pairs = {
        "mean": (invariant.mean_last, lambda t: t.mean(-1)),
        "variance": (invariant.variance_last, lambda t: t.var(-1, correction=0)),
        "softmax": (ops.softmax_last, lambda t: t.softmax(-1)),
        "log_softmax": (ops.log_softmax_last, lambda t: t.log_softmax(-1)),
        "layer_norm": (lambda t: invariant.layer_norm(t, weight, bias, 1e-5)[0],
                       lambda t: torch.nn.functional.layer_norm(t, (width,), weight.to(t.dtype), bias.to(t.dtype), 1e-5)),
        "rms_norm": (lambda t: invariant.rms_norm(t, weight, 1e-5)[0],
                     lambda t: torch.nn.functional.rms_norm(t, (width,), weight.to(t.dtype), 1e-5)),
    }  # fmt: skip
    for name, (ours, theirs) in pairs.items():
        out = ours(x)
        tolerance = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            out.double(),
            theirs(x.double()),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m: name + m,  # noqa: B023
        )
        assert all(torch.equal(ours(x[i : i + 1])[0], out[i]) for i in range(rows)), name


FUNCTIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "sigmoid": torch.sigmoid,
    "rsqrt": torch.rsqrt,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_elements(name, dtype):
    function = FUNCTIONS[name]
    x = torch.rand(3000).to(DTYPES[dtype]) + 0.1
    whole = ops.elementwise(function, x)
    torch.testing.assert_close(whole, function(x))
    for size in (1, 7, 50):
        assert torch.equal(torch.cat([ops.elementwise(function, part) for part in x.split(size)]), whole)
    has_vectors = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    if (name, dtype) == ("silu", "fp32") and has_vectors:  # what this is for
        assert not torch.equal(torch.cat([function(part) for part in x.split(7)]), whole)


def test_the_mode_computes_what_torch_computes():
    """Every operation that is replaced, in the shapes that models use it in."""
    x, y = torch.randn(2, 5, 12), torch.randn(2, 12, 7)
    cases = {
        "linear": lambda: torch.nn.functional.linear(x, y[0].t(), torch.arange(7.0)),
        "matmul": lambda: x @ y,
        "baddbmm": lambda: torch.baddbmm(x[:, :, :7], x, y, beta=0.5, alpha=2.0),
        "addmm": lambda: torch.addmm(x[0, :, :7], x[0], y[0], beta=0.5, alpha=2.0),
        "mv": lambda: x @ y[0, :, 0],
        "outer": lambda: x[:, :, :1] @ y[:, :1],
        "sum": lambda: x.sum(1),
        "sum of all": lambda: x.sum(),
        "sum of two": lambda: x.sum((0, 2), keepdim=True),
        "mean": lambda: x.mean((-2, -1)),
        "std": lambda: x.std(-1, keepdim=True),
        "var_mean": lambda: torch.stack(torch.var_mean(x, -1)),
        "norm": lambda: torch.nn.functional.normalize(x, dim=-1),
        "softmax": lambda: x.softmax(1),
        "softmax of halves": lambda: torch.softmax(x.bfloat16(), -1, dtype=torch.float32),
        "log_softmax": lambda: x.log_softmax(-1),
        "layer_norm": lambda: torch.nn.functional.layer_norm(x, (5, 12)),
        "rms_norm": lambda: torch.nn.functional.rms_norm(x, (12,), torch.arange(12.0)),
        "add with a factor": lambda: torch.add(x, x, alpha=0.3),
        "in place": lambda: x.clone().sigmoid_(),
        "pow": lambda: x.abs().pow(-0.5),
    }
    for inference in (False, True):
        for name, compute in cases.items():
            with torch.inference_mode(inference):
                expected = compute()
                with InvariantOps("a test"):
                    torch.testing.assert_close(compute(), expected, msg=lambda m: name + ": " + m)  # noqa: B023


# ---- what it refuses ------------------------------------------------------------------------------------------------


def test_an_unknown_operation_is_one_clear_error():
    with InvariantOps("Somebody's model"), pytest.raises(UnsupportedModel, match=r"Somebody's model uses aten\.cumsum"):
        torch.rand(3, 4).cumsum(0)


@pytest.mark.parametrize("name", ["Falcon", "BLOOM", "StableLM"])
def test_models_that_gather_keys_are_refused(name):
    with pytest.raises(ValueError, match="'deterministic' needs a model whose attention can be replaced"):
        prepare(families.make(name), ModelOptions(deterministic=True))


def test_a_model_that_mixes_tokens_is_refused():
    """Here by less than the check of every model can see."""
    model = families.make("Llama")

    def mixes(module, args, output):
        return output * (1 + 2.0**-20 * output.shape[1])

    prepare(model)
    model.model.norm.register_forward_hook(mixes)
    model.config.tag = "mixes"  # checks are remembered by configuration
    with pytest.raises(UnsupportedModel, match=r"computes other logits for \d+ of 13 tokens together than one by one"):
        prepare(model, ModelOptions(deterministic=True))


@pytest.mark.parametrize("key", ["prepack_weights", "compile"])
def test_keys_that_do_not_fit(tiny_model, key):
    config = {"method": "ngram", "deterministic": True, key: True}
    with pytest.raises(SpeculativeConfigError, match=rf"{key}.*cannot be combined with 'deterministic'"):
        tiny_model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, speculative_config=config)


def test_positions_must_count_what_a_token_sees():
    packed = prepare(families.make("Llama"))
    cache = start(packed, 1)
    cache.reserve(0, 4)
    with pytest.raises(ValueError, match="position must be the number of tokens before it"):
        describe_lines([RowInput(0, np.arange(3), 0, positions=np.array([0, 1, 5]))], cache)


def test_modes_of_two_threads_leave_nothing_behind():
    """torch's notes on active modes are global: overlapping modes would leave them set, and torch.compile would compile at every call."""
    entered, left = threading.Event(), threading.Event()

    def first():
        with InvariantOps("first"):
            entered.set()
            left.wait(timeout=0.3)  # time for the second to enter, if it can

    def second():
        entered.wait()
        with InvariantOps("second"):
            left.set()
            time.sleep(0.3)  # time for the first to leave

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert not any(thread.is_alive() for thread in threads) and not is_in_torch_dispatch_mode()
    assert issubclass(TapeRecorder, ExclusiveMode), "as the mode above"
