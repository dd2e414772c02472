"""Forward passes as one call of the native library: they compute what the model computes, and follow its changes."""

import gc
import inspect
import logging
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from families import make, make_for_pages
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import hf_specdec
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.core.output import Taps
from hf_specdec.core.rows import RowInput, groups_of
from hf_specdec.kernels.native import Operation, Rows, library
from hf_specdec.model.native import bind, check, program, tape
from hf_specdec.model.prepare import ModelOptions, prepare

pytestmark = pytest.mark.skipif(library() is None, reason="the native library is not compiled")
RUN = [
    "Cohere2", "GLM4", "GPT-2", "GPT-NeoX", "Gemma2", "Gemma3 text", "Granite", "Llama", "Mistral", "OLMo2", "OPT", "Phi3", "Qwen2",
    "Qwen3", "SmolLM3", "StarCoder2",
]  # fmt: skip
BY_TORCH = ["Qwen3-MoE", "gpt-oss"]


def steps(seed: int = 0) -> list[list[RowInput]]:
    """Rows of three texts: their beginnings, single tokens and chains, then trees; longer than the windows."""
    random = np.random.default_rng(seed)

    def ids(count):
        return random.integers(1, 128, count)

    visibility = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=bool)

    def tree(row, start):
        positions = start + np.array([0, 1, 1, 2])
        return RowInput(row, ids(4), start, positions, visibility, positions, logits=4)

    return [
        [RowInput(0, ids(19), 0), RowInput(1, ids(5), 0, logits=5), RowInput(2, ids(33), 0)],
        [RowInput(0, ids(1), 19), RowInput(1, ids(4), 5, logits=2), RowInput(2, ids(1), 33)],
        [RowInput(1, ids(1), 9)],
        [tree(0, 20), RowInput(1, ids(2), 10, logits=2), tree(2, 34)],
    ]


def outputs(packed, batches, num_steps=4, tapped=True):
    """The output of every step."""
    cache = packed.new_cache(num_blocks=40, block_size=4, share_prefixes=False)
    for row in range(3):
        cache.add(row)
    for size in (8, 24, 44):  # in turns, so that blocks are scattered
        for row in (2, 0, 1):
            cache.reserve(row, size if row != 1 else size // 2)
    found = []
    with torch.no_grad(), packed.active():
        for rows in batches[:num_steps]:
            found.append(packed.forward(rows, cache, tapped=tapped))
    return found


def is_close(found, wanted, dtype=torch.float32) -> bool:
    bound = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 0.12}[dtype]
    return bool((found.float() - wanted.float()).norm() <= bound * wanted.float().norm())


@pytest.mark.parametrize("family", RUN)
def test_a_program_computes_what_the_model_computes(family):
    model = make_for_pages(family)
    native, plain = prepare(model), prepare(model, ModelOptions(native=False))
    assert plain.native is None and native.native is not None
    found, wanted = outputs(native, steps()), outputs(plain, steps())
    assert native.native.refused is None
    for ours, own in zip(found, wanted, strict=True):
        assert ours.logits.shape == own.logits.shape and ours.logits.dtype == torch.float32
        assert is_close(ours.logits, own.logits)
        assert torch.equal(ours.input_ids, own.input_ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Phi3", "GPT-2"])
def test_other_dtypes(family, dtype):
    model = make_for_pages(family).to(dtype)
    native, plain = prepare(model), prepare(model, ModelOptions(native=False, prepack_weights=False))
    found, wanted = outputs(native, steps()), outputs(plain, steps())
    assert native.native.refused is None
    assert all(is_close(ours.logits, own.logits, dtype) for ours, own in zip(found, wanted, strict=True))


@pytest.mark.parametrize("family", ["Llama", "Gemma3 text", "OPT"])
def test_tapped_states(family):
    model, taps = make(family), Taps(last_hidden=True, layers=(0, 2, 1), logits=True)
    native, plain = prepare(model, taps=taps), prepare(model, ModelOptions(native=False), taps=taps)
    found, wanted = outputs(native, steps()), outputs(plain, steps())
    assert native.native.refused is None
    for ours, own in zip(found, wanted, strict=True):
        assert is_close(ours.last_hidden, own.last_hidden) and ours.last_hidden.shape == own.last_hidden.shape
        assert list(ours.layers) == list(own.layers)
        assert all(is_close(ours.layers[i], own.layers[i]) for i in own.layers)
        assert is_close(ours.all_logits, own.all_logits) and ours.all_logits.shape == own.all_logits.shape
    for ours, without in zip(found, outputs(native, steps(), tapped=False), strict=True):
        assert torch.equal(ours.logits, without.logits) and without.last_hidden is without.all_logits is None
        assert not without.layers


@pytest.mark.parametrize("family", BY_TORCH)
def test_other_models_run_operator_by_operator(family):
    model = make(family)
    native, plain = prepare(model), prepare(model, ModelOptions(native=False))
    found, wanted = outputs(native, steps()), outputs(plain, steps())
    assert native.native.refused is not None
    assert all(is_close(ours.logits, own.logits) for ours, own in zip(found, wanted, strict=True))
    with (
        pytest.raises(UnsupportedModel, match="'native' cannot run"),
        prepare(model, ModelOptions(native=True)).active(),
    ):
        pass


def test_a_model_with_few_positions_runs_operator_by_operator():
    model = make("OPT", max_position_embeddings=24)
    native, plain = prepare(model), prepare(model, ModelOptions(native=False))
    rows = [[RowInput(0, np.arange(1, 12), 0)], [RowInput(0, np.array([7]), 11)]]
    found, wanted = outputs(native, rows, 2), outputs(plain, rows, 2)
    assert "positions" in native.native.refused
    assert all(is_close(ours.logits, own.logits) for ours, own in zip(found, wanted, strict=True))


@pytest.mark.parametrize("positions", [48, 100])
def test_a_table_of_positions_that_ends(positions):
    """GPT-J's rotary module looks its angles up (transformers 5.24): it has none after the model's last position."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": positions, "rotary_dim": 4, "vocab_size": 128}
    config = AutoConfig.for_model("gptj", **sizes, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(2, 12)[None]
    arguments = {"attention_mask": torch.ones_like(ids), "max_length": positions, "do_sample": False}
    ours = model.generate(ids, **arguments, speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    assert torch.equal(ours, model.generate(ids, **arguments))


def test_tables_reach_every_position_that_is_read(monkeypatch):
    """Token by token, so that a text's newest position is once the first that its tables lack."""
    monkeypatch.setattr(program, "_POSITIONS_AT_FIRST", 4)
    model = make_for_pages("Llama")
    native, plain = prepare(model), prepare(model, ModelOptions(native=False))
    ids = np.arange(1, 24)
    tokens = [[RowInput(row, ids[:1] + row, 0) for row in range(3)]]
    tokens += [[RowInput(0, ids[i : i + 1], i)] for i in range(1, 20)]
    found = outputs(native, tokens, len(tokens))
    for i, (ours, own) in enumerate(zip(found, outputs(plain, tokens, len(tokens)), strict=True)):
        assert is_close(ours.logits, own.logits), i


def test_early_exit_runs_the_first_layers():
    model = make("Llama")
    native, plain = prepare(model, num_layers=2), prepare(model, ModelOptions(native=False), num_layers=2)
    found, wanted = outputs(native, steps()), outputs(plain, steps())
    assert native.native.refused is None
    assert all(is_close(ours.logits, own.logits) for ours, own in zip(found, wanted, strict=True))


def in_place(model):
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1.7)


def by_numpy(model):
    model.model.layers[0].self_attn.v_proj.weight.detach().numpy()[:] *= 1.5


def by_another_tensor(model):
    layer = model.model.layers[2].self_attn.o_proj
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def by_a_setting(model):
    model.model.layers[0].self_attn.scaling *= 2


def by_the_angles(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def by_a_hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output * 1.5)


def by_a_wrapper(model):
    layer = model.model.layers[1].mlp
    own = layer.forward
    layer.forward = lambda x: own(x) * 1.5


def by_another_module(model):
    class Doubled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) * 2

    model.model.layers[1].mlp.down_proj = Doubled(model.model.layers[1].mlp.down_proj)


def by_an_activation(model):
    model.model.layers[1].mlp.act_fn = nn.ReLU()


CHANGES = [
    in_place, by_numpy, by_another_tensor, by_a_setting, by_the_angles, by_a_hook, by_a_wrapper, by_another_module, by_an_activation,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_model_take_effect(change):
    model = make("Llama")
    native = prepare(model)
    before = outputs(native, steps())
    assert native.native.refused is None
    change(model)
    wanted = outputs(prepare(model, ModelOptions(native=False, prepack_weights=False)), steps())
    found = outputs(native, steps())
    assert not is_close(before[1].logits, wanted[1].logits)
    for ours, own in zip(found, wanted, strict=True):
        assert is_close(ours.logits, own.logits)


def test_a_write_during_a_call_takes_effect():
    model, batches = make("Llama"), steps()
    wanted = outputs(prepare(make("Llama"), ModelOptions(native=False)), batches)
    native = prepare(model)
    cache = native.new_cache(num_blocks=40, block_size=4, share_prefixes=False)
    for row in range(3):
        cache.add(row)
        cache.reserve(row, 44)
    with torch.no_grad(), native.active():
        first = native.forward(batches[0], cache).logits
        model.lm_head.weight.data.mul_(2)
        second = native.forward(batches[1], cache).logits
    assert is_close(first, wanted[0].logits) and is_close(second, 2 * wanted[1].logits)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_adapters(dora, caplog):
    """LoRA is part of the program; DoRA, which is not lowered, is called between its parts. Both as their settings are at the time."""
    peft = pytest.importorskip("peft")
    model = make("Llama")
    native = prepare(model)
    outputs(native, steps(), 1)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, use_dora=dora)
    adapted = peft.inject_adapter_in_model(config, model).eval()
    with caplog.at_level(logging.INFO, logger="hf_specdec.model.native"):
        outputs(native, steps(), 1)
    assert native.native.refused is None
    assert ("which calls its 6 layers of Linear (peft)" in caplog.text) == dora
    operators = prepare(adapted, ModelOptions(native=False))
    layer = adapted.model.layers[2].mlp.down_proj
    changes = (
        None,
        lambda: layer.scale_layer(3),
        lambda: layer.enable_adapters(False),
        lambda: layer.enable_adapters(True),
    )
    for change in changes:
        if change is not None:
            change()
        found, wanted = outputs(native, steps()), outputs(operators, steps())
        assert all(is_close(ours.logits, own.logits) for ours, own in zip(found, wanted, strict=True))


def test_wrapped_layers_are_called():
    """With ids or hidden states, one copy of which a wrapper may keep; what they do may change from call to call."""
    model, factors, seen = make("Llama"), [1.0], []
    for each in (model.model.embed_tokens, model.model.layers[1].mlp.up_proj, model.model.norm, model.lm_head):

        def wrapped(x, own=each.forward):
            seen.append((x, x.clone()))
            return own(x) * factors[-1]

        each.forward = wrapped
    native, operators = prepare(model), prepare(model, ModelOptions(native=False))
    for factor in (1.0, 1.5):
        factors.append(factor)
        found = outputs(native, steps())
        assert native.native.refused is None and len(seen) > 4
        assert all(torch.equal(*pair) for pair in seen)
        seen.clear()
        for ours, own in zip(found, outputs(operators, steps()), strict=True):
            assert is_close(ours.logits, own.logits)


def test_an_id_outside_the_vocabulary_is_an_error():
    native = prepare(make("Llama"))
    with pytest.raises(IndexError, match="no embedding"):
        outputs(native, [[RowInput(0, np.array([5, 128]), 0)]], 1)


def test_threads_compute_the_same_bits(monkeypatch):
    monkeypatch.setattr(program, "_BYTES_PER_THREAD", 1)
    native, threads = prepare(make("Qwen3")), torch.get_num_threads()
    alone = outputs(native, steps())
    torch.set_num_threads(3)
    try:
        for _ in range(5):
            for ours, own in zip(outputs(native, steps()), alone, strict=True):
                assert torch.equal(ours.logits, own.logits)
    finally:
        torch.set_num_threads(threads)


def test_logits_do_not_depend_on_the_batch():
    native = prepare(make("Llama"))
    together = outputs(native, steps())[0].logits
    alone = outputs(native, [[row] for row in steps()[0]], 3)
    assert torch.equal(torch.cat([each.logits for each in alone]), together)


@pytest.mark.parametrize("most", [4, 16, 40])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_a_longer_forward_is_several_calls_with_the_same_bits(family, most, monkeypatch):
    """Texts are divided, trees are not."""
    taps = Taps(last_hidden=True, layers=(1,), logits=True)
    native = prepare(make(family), taps=taps)
    wanted, calls, run = outputs(native, steps()), [], program.Program.run
    monkeypatch.setattr(bind, "groups_of", lambda rows, _: groups_of(rows, most))
    monkeypatch.setattr(program.Program, "run", lambda *args: calls.append(args[1].starts[-1]) or run(*args))
    found = outputs(native, steps())
    assert max(calls) == most and sum(calls) == sum(row.num_tokens for rows in steps() for row in rows)
    for ours, own in zip(found, wanted, strict=True):
        assert torch.equal(ours.input_ids, own.input_ids) and torch.equal(ours.logits, own.logits)
        assert torch.equal(ours.last_hidden, own.last_hidden) and torch.equal(ours.layers[1], own.layers[1])
        assert torch.equal(ours.all_logits, own.all_logits)


def test_a_tree_that_no_call_takes_is_computed_operator_by_operator(monkeypatch):
    native = prepare(make("Llama"))
    wanted = outputs(native, steps())
    with native.active():
        monkeypatch.setattr(native.native._forward(), "most_tokens", 3)
    found = outputs(native, steps())
    assert all(is_close(ours.logits, own.logits) for ours, own in zip(found, wanted, strict=True))
    assert not torch.equal(found[-1].logits, wanted[-1].logits)


def test_key_is_checked_against_others():
    model = make("Llama")
    for options in (ModelOptions(native=True, deterministic=True), ModelOptions(native=True, prepack_weights=True)):
        with pytest.raises(UnsupportedModel, match="'native' cannot run"):
            prepare(model, options)


def test_hidden_states_once_asked_for_do_not_slow_later_calls():
    """transformers leaves its recording hooks on the model for good; they do nothing unless hidden states are wanted."""
    model = make_for_pages("Llama")
    inputs, none = (
        {"input_ids": torch.tensor([[5, 6, 7, 8]]), "max_new_tokens": 6, "do_sample": False},
        {"method": "none"},
    )
    model.generate(**inputs, speculative_config=none)
    decoder = hf_specdec.integration.kept_decoders(model)[-1]
    assert decoder.target.native.refused is None
    wanted = model.generate(**inputs, output_hidden_states=True, return_dict_in_generate=True)
    assert any(module._forward_hooks for module in model.modules()), "then this test shows nothing"
    assert torch.equal(model.generate(**inputs, speculative_config=none), wanted.sequences)
    with decoder.target.active():
        assert decoder.target.most_tokens_of_one_call and decoder.target.native.refused is None
    out = model.generate(**inputs, speculative_config=none, output_hidden_states=True, return_dict_in_generate=True)
    for ours, theirs in zip(out.hidden_states, wanted.hidden_states, strict=True):
        assert all(is_close(a, b) for a, b in zip(ours, theirs, strict=True))
    model.model.layers[0].register_forward_hook(lambda module, args, output: None)
    model.generate(**inputs, speculative_config=none)
    assert "hooked" in hf_specdec.integration.kept_decoders(model)[-1].target.native.refused


def test_a_recorded_model_goes_with_its_last_reference():
    """Without the garbage collector: what recorded it keeps neither its weights nor itself alive."""
    model = make("Llama")
    native = prepare(model)
    outputs(native, steps())
    assert native.native.refused is None
    alive = [weakref.ref(each) for each in (model, model.lm_head, native, native.native)]
    gc.collect()
    gc.disable()
    try:
        del model, native
        assert [each() for each in alive] == [None] * 4
    finally:
        gc.enable()


def test_a_collection_while_a_forward_is_recorded_is_no_part_of_it():
    """Python calls `gc.callbacks` from wherever it happens to be."""

    def callback(phase, info):
        pass

    before = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1)
    try:
        native = prepare(make("Llama"))
        outputs(native, steps())
    finally:
        gc.callbacks.remove(callback)
        gc.set_threshold(*before)
    assert native.native.refused is None and gc.isenabled()


class ListHandler(logging.Handler):
    """A handler of no known library."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def test_a_log_line_while_a_forward_is_recorded_is_no_part_of_it():
    logger, handler = logging.getLogger("hf_specdec"), ListHandler()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        outputs(prepare(make("Llama")), steps())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert any("runs in the native library" in line for line in handler.lines), handler.lines


def test_a_forward_elsewhere_while_one_is_recorded(monkeypatch):
    """Another thread is inside the model's rotary module, where its operators are not recorded; those of this thread are."""
    model = make("Llama")
    code = inspect.unwrap(type(model.model.rotary_emb).forward).__code__
    inside, recorded = threading.Event(), threading.Event()

    def wait_inside(frame, event, arg):
        if event == "call" and frame.f_code is code:
            inside.set()
            recorded.wait(30)

    def plainly():
        sys.setprofile(wait_inside)
        model(torch.ones(1, 3, dtype=torch.long))

    thread = threading.Thread(target=plainly)
    enter = check.CalledCode.__enter__

    def begin(self):
        thread.start()
        assert inside.wait(30)
        return enter(self)

    monkeypatch.setattr(check.CalledCode, "__enter__", begin)
    native = prepare(model)
    outputs(native, steps(), 1)
    recorded.set()
    thread.join()
    assert native.native.refused is None


def test_threads_wait_where_they_read_or_overwrite_what_others_compute():
    """Row by row in one layout nobody waits; a product, attention, a selection, and other registers in the same memory do."""
    x, y, z, weight = (tape.Register(torch.float32, size) for size in (8, 8, 4, 32))

    def step(operation, out=None, *inputs, rows=Rows.TOKENS):
        places = [None if at is None else tape.Place(at, 0, at.elements) for at in (out, *inputs)]
        return tape.TapeStep(operation, rows, (1, 1, 1), *places)

    def waits(*steps, same=()):
        memory = {id(register): number for number, register in enumerate((x, y, z, weight), 1)}
        memory |= {id(register): 1 for register in same}
        return program._waits(list(steps), memory)

    by_rows, product = step(Operation.ELEMENTWISE, y, x), step(Operation.LINEAR, x, y, weight)
    assert waits(step(Operation.EMBED, x, weight), by_rows, step(Operation.ELEMENTWISE, x, y)) == [False] * 3
    assert waits(product, by_rows, product) == [False, True, True]
    assert waits(product, step(Operation.LINEAR, z, y, weight)) == [False, False]
    assert waits(by_rows, step(Operation.SELECT, z, y, rows=Rows.SELECTED)) == [False, True]
    assert waits(step(Operation.ELEMENTWISE, x, rows=Rows.ONE), by_rows) == [False, True]
    assert waits(step(Operation.ELEMENTWISE, y, z), by_rows) == [False, False]
    assert waits(by_rows, step(Operation.ELEMENTWISE, z, y), same=(x, z)) == [False, True]
    write, attend = step(Operation.WRITE, None, x, y), step(Operation.ATTEND, z, x)
    assert waits(write, write, attend, write) == [False, False, True, True]
