"""Draft heads in the native library: they compute what their modules compute, follow changes, and outlive nothing."""

import copy
import gc
import weakref

import pytest
import torch

import hf_specdec
from hf_specdec import integration
from hf_specdec.core.rows import groups_of
from hf_specdec.kernels.native import library
from hf_specdec.model.native import bind, program

pytestmark = pytest.mark.skipif(library() is None, reason="the native library is not compiled")

HEADS = {
    "eagle": {"method": "eagle", "model": "tiny-eagle"},
    "eagle3": {"method": "eagle3", "model": "tiny-eagle3"},
    "mtp": {"method": "mtp", "model": "tiny-mtp"},
}
TREE = {"top_k": 3, "total_tokens": 8, "num_speculative_tokens": 3}


@pytest.fixture
def prompts(tiny_tokenizer):
    """Two prompts of unlike lengths."""
    texts = ["Once upon a time there was a little dog", "Tom and Lily went to the"]
    return tiny_tokenizer(texts, return_tensors="pt", padding=True)


@pytest.fixture
def model(tiny_model):
    """The bundled model, whose decoders go after the test."""
    yield tiny_model
    hf_specdec.release(tiny_model)


def drafted(model, prompts, config):
    """Ids and τ of a greedy call."""
    out = model.generate(
        **prompts, do_sample=False, max_new_tokens=24, speculative_config=config, return_dict_in_generate=True
    )
    return out.sequences, out.speculation["mean_accepted_length"]


def head_of(model):
    """The head of the last call's drafter."""
    return integration.kept_decoders(model)[-1].generator.head


def error(found, wanted):
    """The relative distance of two tensors."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.fixture
def errors(monkeypatch):
    """By kind, the error of every native forward and of all native logits against the modules', operator by operator."""
    seen: dict[str, list[float]] = {"forward": [], "logits": []}
    run, apply = bind.NativeHead.run, bind.NativeHead.apply

    def running(self, head, rows, features, cache, reads=False):
        found = run(self, head, rows, features, cache, reads)
        if found is not None:
            batch = bind.PackedBatch.pack(rows, cache, head.device, gather=False)
            batch.with_native = False  # writes the same keys again
            wanted = (head.read_batch if reads else head.forward_batch)(batch, features=features)
            seen["forward"].append(error(found, wanted))
        return found

    def applying(self, function, called, hidden):
        found = apply(self, function, called, hidden)
        if self._current.get("rows") is not None:
            seen["logits"].append(error(found, function(hidden)))
        return found

    monkeypatch.setattr(bind.NativeHead, "run", running)
    monkeypatch.setattr(bind.NativeHead, "apply", applying)
    return seen


@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", list(HEADS))
def test_a_head_computes_what_its_modules_compute(model, prompts, errors, name, shape):
    """Texts, chains and trees of two rows; and the text is plain decoding's."""
    found, _ = drafted(model, prompts, {**HEADS[name], **shape})
    assert torch.equal(found, model.generate(**prompts, do_sample=False, max_new_tokens=24))
    assert head_of(model).native.refused == []
    for each in errors.values():
        assert len(each) > 5 and max(each) < 1e-5


@pytest.mark.parametrize("name", list(HEADS))
def test_more_tokens_than_one_call_takes(model, prompts, errors, monkeypatch, name):
    wanted, tau = drafted(model, prompts, HEADS[name])
    monkeypatch.setattr(bind, "groups_of", lambda rows, _: groups_of(rows, 5))
    found, same = drafted(model, prompts, HEADS[name])
    assert torch.equal(found, wanted) and same == tau
    for each in errors.values():
        assert len(each) > 5 and max(each) < 1e-5


def test_logits_of_more_rows_than_one_call_takes(model, prompts, errors):
    drafted(model, prompts, HEADS["eagle3"])
    decoder, before = integration.kept_decoders(model)[-1], len(errors["logits"])
    with decoder.active():
        decoder.generator.score(torch.randn(600, model.config.hidden_size))
    assert len(errors["logits"]) == before + 1 and max(errors["logits"]) < 1e-5


def test_the_comparison_would_see_a_difference(model, prompts, errors, monkeypatch):
    drafted(model, prompts, HEADS["eagle3"])
    errors["forward"].clear()
    call = program.Program._call
    monkeypatch.setattr(
        program.Program, "_call", lambda self, inputs, x, *more: call(self, inputs, x if x is None else x * 1.01, *more)
    )
    drafted(model, prompts, HEADS["eagle3"])
    assert max(errors["forward"]) > 1e-4


@pytest.mark.parametrize("name", list(HEADS))
def test_acceptance_is_that_of_the_operators(model, prompts, name):
    found, tau = drafted(model, prompts, HEADS[name])
    without, plain_tau = drafted(model, prompts, {**HEADS[name], "native": False})
    assert head_of(model).native is None
    assert torch.equal(found, without) and tau == pytest.approx(plain_tau, rel=0.05)


def test_changed_weights_take_effect(model, prompts, errors):
    """Writes that leave no trace, in place and through `.data`; then parameters that are replaced."""
    drafted(model, prompts, HEADS["eagle3"])
    head = head_of(model)
    layer = head.module.layers[0].mlp.down_proj
    before = layer.weight
    try:
        with torch.no_grad():
            layer.weight.data.mul_(0.5)
        for change in (lambda: None, lambda: setattr(layer, "weight", torch.nn.Parameter(before.detach() * 3))):
            change()
            errors["forward"].clear()
            drafted(model, prompts, HEADS["eagle3"])
            assert len(errors["forward"]) > 3 and max(errors["forward"]) < 1e-5
    finally:
        before.data.mul_(2)
        layer.weight = before


def test_a_hooked_layer_is_left_to_torch(model, prompts, errors):
    """The program does not know what the hook does; when it has gone, the program runs again."""
    drafted(model, prompts, HEADS["eagle3"])
    head = head_of(model)
    handle = head.module.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2)
    errors["forward"].clear()
    drafted(model, prompts, HEADS["eagle3"])
    assert errors["forward"] == [] and "hooked" in head.native.refused[0]
    handle.remove()
    drafted(model, prompts, HEADS["eagle3"])
    assert len(errors["forward"]) > 3 and head.native.refused == []


def test_a_refused_head_uses_its_packed_weights(model, prompts):
    """`otherwise` is entered once, and left with the context."""
    drafted(model, prompts, HEADS["eagle3"])
    head = head_of(model)
    handle = head.module.layers[0].mlp.register_forward_hook(lambda module, args, out: out)
    entered, active = [], head.linears.active

    def counted():
        entered.append(1)
        return active()

    head.native._otherwise = copy.copy(head.linears)
    head.native._otherwise.active = counted
    drafted(model, prompts, HEADS["eagle3"])
    handle.remove()
    assert entered == [1]
    assert "forward" not in vars(head.module.layers[0].mlp.down_proj)


def test_nothing_outlives_its_decoder(model, prompts):
    """Without the garbage collector."""
    drafted(model, prompts, HEADS["mtp"])
    gc.collect()
    gc.disable()
    try:
        decoder = integration.kept_decoders(model)[-1]
        alive = [weakref.ref(each) for each in (decoder.generator, decoder.generator.head.native)]
        del decoder
        hf_specdec.release(model)
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


def test_small_programs_take_few_threads(model, prompts, monkeypatch):
    """A thread for every 2 MiB of weights: more cost more at the barriers than they save."""
    given = []

    class Counting:
        def __getattr__(self, name):
            return getattr(library(), name)

        def specdec_run(self, ops, count, slots, inputs, threads):
            given.append(threads)
            return library().specdec_run(ops, count, slots, inputs, 1)

    monkeypatch.setattr(program, "library", Counting)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    drafted(model, prompts, HEADS["eagle3"])
    assert given and max(given) <= sum(each.nbytes for each in model.parameters()) // (2 << 20) < 64
