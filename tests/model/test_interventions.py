"""Hooks, wrappers, adapters and patches that others put into a model: followed, or refused by name; never another text."""

import contextlib
import copy
import functools
import json
import pickle
import queue
import shutil

import pytest
import torch
from combinations import every_second
from families import make
from oracle import drafter_of, ragged, tiny_llama
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import hf_specdec
from hf_specdec import integration
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.model import structure

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture
def model():
    return tiny_llama()


def assert_same_text(model, config=NGRAM, lengths=(6, 3)):
    inputs = ragged(list(lengths))
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False, speculative_config=config), plain)


class Steered(nn.Module):
    """Adds a vector after a layer, but not to padding: to what follows the last position 0, as repeng's control vectors."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.vector = layer, torch.linspace(-2, 2, 64)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args, **kwargs):
        hidden = self.layer(*args, **kwargs)
        positions = kwargs["position_ids"]
        start = (positions == 0).cumsum(1).argmax(1, keepdim=True)
        mask = torch.arange(positions.shape[1])[None] >= start
        return hidden + self.vector[: hidden.shape[-1]].to(hidden) * mask[..., None]


@pytest.mark.parametrize("first", ["an ordinary call", "the wrapped model"])
def test_a_wrapper_that_sees_positions_is_refused_alone(model, first):
    other = copy.deepcopy(model)
    if first == "an ordinary call":
        assert_same_text(model)
    model.model.layers[1] = Steered(model.model.layers[1])
    with pytest.raises(UnsupportedModel, match="Steered"):
        model.generate(**ragged([6, 3]), max_new_tokens=4, speculative_config=NGRAM)
    assert_same_text(other)
    model.model.layers[1] = model.model.layers[1].layer
    assert_same_text(model)


def last_token(module, args, output):
    output = output.clone()
    output[:, -1] += 1
    return output


def single_tokens(module, args, output):
    return output if output.shape[1] > 1 else output + 1


def first_row(module, args, output):
    output = output.clone()
    output[0] += 1
    return output


def everything(module, args, output):
    return output + 1


@pytest.mark.parametrize("when", ["before the first call", "between two calls"])
@pytest.mark.parametrize("hook", [last_token, single_tokens, first_row, everything], ids=lambda hook: hook.__name__)
def test_hooks(model, hook, when):
    if when == "between two calls":
        assert_same_text(model)
    handle = model.model.layers[0].register_forward_hook(hook)
    if hook is everything:
        assert_same_text(model)
    else:
        with pytest.raises(UnsupportedModel, match="must not notice: a hook on LlamaDecoderLayer"):
            model.generate(**ragged([6, 3]), max_new_tokens=4, speculative_config=NGRAM)
    handle.remove()
    assert_same_text(model)
    assert_same_text(copy.deepcopy(model))


@contextlib.contextmanager
def hook_of_last_tokens(model):
    """Of all modules; it acts on the decoder's layers."""
    layer = type(model.model.layers[0])

    def hook(module, args, output):
        return last_token(module, args, output) if isinstance(module, layer) else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def rotary_by_place(model):
    """A function of transformers' module that looks at the last token."""

    def make(original):
        def rotary(q, k, *args, **kwargs):
            q, k = original(q, k, *args, **kwargs)
            return torch.cat([q[:, :, :-1], 2 * q[:, :, -1:]], dim=2), k

        return rotary

    with patched(modeling_llama, "apply_rotary_pos_emb", make):
        yield


@pytest.mark.parametrize("intervention", [hook_of_last_tokens, rotary_by_place])
def test_what_all_models_share(intervention):
    """A refusal lasts as long as its reason."""
    model = tiny_llama(intermediate_size=48 if intervention is hook_of_last_tokens else 40)
    if intervention is hook_of_last_tokens:
        assert_same_text(model)
    with intervention(model), pytest.raises(UnsupportedModel, match="does not compute the same logits"):
        model.generate(**ragged([6, 3]), max_new_tokens=4, speculative_config=NGRAM)
    assert_same_text(model)
    assert_same_text(copy.deepcopy(model))


@pytest.mark.parametrize("kind", ["hook", "wrapper"])
def test_a_vector_that_is_set_later(model, kind):
    """The modules and hooks stay the same."""
    vector = torch.zeros(32)

    def add(module, args, output):
        output = output.clone()
        output[:, -1] += vector
        return output

    if kind == "hook":
        model.model.layers[1].register_forward_hook(add)
    else:
        original = model.model.layers[1].forward
        model.model.layers[1].forward = lambda *args, **kwargs: add(None, None, original(*args, **kwargs))
    assert_same_text(model)
    vector.fill_(2.0)
    with pytest.raises(UnsupportedModel, match="must not notice"):
        model.generate(**ragged([6, 3]), max_new_tokens=4, speculative_config=NGRAM)
    vector.zero_()
    assert_same_text(model)


def test_decoders_for_hooks_that_are_gone_are_freed(model):
    assert_same_text(model)
    for _ in range(4):
        handle = model.model.layers[0].register_forward_hook(everything)
        assert_same_text(model)
        handle.remove()
    assert_same_text(model)
    assert len(integration.kept_decoders(model)) == 1 + 1


@pytest.mark.long
def test_wrappers_of_libraries_are_no_interventions(model):
    """They are many, and the self-test would run at each call."""
    hooks = pytest.importorskip("accelerate.hooks")
    for module in list(model.modules()):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook())
    model.model.layers[0].forward = torch.compile(model.model.layers[0].forward, backend="eager")
    assert_same_text(model)
    assert not structure.interventions(model)

    class Mine(hooks.ModelHook):
        def post_forward(self, module, output):
            return last_token(module, (), output)

    hooks.add_hook_to_module(model.model.layers[1], Mine(), append=True)
    with pytest.raises(UnsupportedModel, match="a forward of its own on LlamaDecoderLayer"):
        model.generate(**ragged([6, 3]), max_new_tokens=4, speculative_config=NGRAM)


@pytest.mark.parametrize("config", [NGRAM, {"method": "none", "target_quantization": "wint8"}], ids=["ngram", "wint8"])
def test_copies_that_a_callback_makes(config):
    """While a decoder runs: copies, pickles and models with the same configuration are as if none ran."""
    if "target_quantization" in config:
        pytest.importorskip("torchao")
    model, made = tiny_llama(attn_implementation="eager"), []

    def criterion(ids, scores, **kwargs):
        if not made:
            made.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model))])
            type(model)(model.config)
        return torch.zeros(len(ids), dtype=torch.bool)

    inputs = ragged([6, 3])
    plain = model.generate(**inputs, max_new_tokens=12)
    criteria = StoppingCriteriaList([criterion])
    model.generate(**inputs, max_new_tokens=3, speculative_config=config, stopping_criteria=criteria)
    for each in (model, *made):
        assert type(each.config) is LlamaConfig and each.config._attn_implementation == "eager"
        assert {type(module._parameters) for module in each.modules()} == {dict}
        assert torch.equal(each.generate(**inputs, max_new_tokens=12), plain)


def test_the_forward_of_another_object(model):
    """It takes `*args, **kwargs`, and the forward behind it counts positions by itself if it is given none."""
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)
    assert_same_text(model)
    model.forward = lambda *args, **kwargs: original(*args, **{**kwargs, "position_ids": None})
    with pytest.raises(UnsupportedModel, match="a forward of its own on LlamaForCausalLM"):
        model.generate(**ragged([6, 3]), max_new_tokens=4, speculative_config=NGRAM)


def test_a_model_that_lost_layers(tiny_model):
    """After a call with a head that reads all of them."""
    model, config = copy.deepcopy(tiny_model), {"method": "eagle3", "model": "tiny-eagle3"}
    assert_same_text(model, config)
    del model.model.layers[2:]
    model.config.num_hidden_layers = 2
    with pytest.raises(ValueError, match=r"after layer \d of the target, which has 2 layers"):
        model.generate(**ragged([6, 3]), max_new_tokens=4, speculative_config=config)
    assert_same_text(model)


# ---- adapters -------------------------------------------------------------------------------------------------------


def with_adapters(model, **alora):
    peft = pytest.importorskip("peft")

    def adapter(seed, **more):
        torch.manual_seed(seed)
        return peft.LoraConfig(
            r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **more
        )

    found = peft.get_peft_model(model, adapter(1, **alora), "first").eval()
    found.add_adapter("second", adapter(2))
    return found


def test_adapters_that_are_switched(model):
    """One after another, disabled, merged; a kept decoder serves the adapter that it was made for."""
    found = with_adapters(model)
    for name in ("first", "second", "first"):
        found.set_adapter(name)
        assert_same_text(found)
    with found.disable_adapter():
        assert_same_text(found)
    assert_same_text(found)
    found.merge_adapter()
    assert_same_text(found)


def test_a_hook_without_a_module(model):
    """A partial of a builtin method: PEFT's hooks are partials, too."""
    model.model.layers[0].register_forward_pre_hook(functools.partial(queue.SimpleQueue().put))
    assert_same_text(model)


@pytest.mark.parametrize("first", [True, False], ids=["after an ordinary call", "at once"])
def test_adapters_by_token_are_named(model, first):
    inputs = ragged([6, 3])
    found = with_adapters(model, alora_invocation_tokens=inputs["input_ids"][0, -3:-1].tolist())
    if first:
        found.set_adapter("second")
        assert_same_text(found)
    found.set_adapter("first")
    with pytest.raises(UnsupportedModel, match="aLoRA"):
        found.generate(**inputs, max_new_tokens=4, speculative_config=NGRAM)
    assert not any(module._forward_pre_hooks for module in model.modules())
    found.set_adapter("second")
    assert_same_text(found)


# ---- methods of generate() that a class overrides -------------------------------------------------------------------


def changed_ids(prepare, self, input_ids, **kwargs):
    return prepare(self, torch.where(input_ids == input_ids[:, -1:], 5, input_ids), **kwargs)


def changed_mask(prepare, self, input_ids, attention_mask=None, **kwargs):
    return prepare(self, input_ids, attention_mask=attention_mask.flip(1), **kwargs)


def embedded(prepare, self, input_ids, **kwargs):
    found = prepare(self, input_ids, **kwargs)
    return {**found, "input_ids": None, "inputs_embeds": self.get_input_embeddings()(found["input_ids"]) + 1}


def with_more(prepare, self, input_ids, **kwargs):
    return {**prepare(self, input_ids, **kwargs), "output_router_logits": True}


def other_positions(prepare, self, input_ids, **kwargs):
    found = prepare(self, input_ids, **kwargs)
    return {**found, "position_ids": torch.zeros_like(found["input_ids"])}


def after_the_first(prepare, self, input_ids, is_first_iteration=False, **kwargs):
    ids = input_ids if is_first_iteration else input_ids.flip(1)
    return prepare(self, ids, is_first_iteration=is_first_iteration, **kwargs)


def unchanged(prepare, self, input_ids, **kwargs):
    return prepare(self, input_ids, **kwargs)


@pytest.mark.parametrize("on", ["class", "instance"])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (changed_ids, "input_ids"), (changed_mask, "attention_mask"), (embedded, "inputs_embeds"), (with_more, "output_router_logits"),
        (other_positions, "position_ids"), (after_the_first, "input_ids"), (unchanged, None),
    ],
)  # fmt: skip
def test_prepared_inputs(model, change, name, on):
    original = type(model).prepare_inputs_for_generation

    def prepare(self, input_ids, **kwargs):
        return change(original, self, input_ids, **kwargs)

    if on == "class":
        model.__class__ = type("Overriding", (type(model),), {"prepare_inputs_for_generation": prepare})
    else:
        model.prepare_inputs_for_generation = prepare.__get__(model)
    if name is None:
        return assert_same_text(model)
    with pytest.raises(UnsupportedModel, match=rf"prepare_inputs_for_generation of .* changes {name}"):
        model.generate(**ragged([6, 3]), max_new_tokens=4, speculative_config=NGRAM)
    return None


def test_a_decoding_loop_of_the_models_own(model):
    model.__class__ = type("Sampling", (type(model),), {"_sample": lambda self, *args, **kwargs: None})
    with pytest.raises(UnsupportedModel, match="overrides _sample"):
        model.generate(**ragged([6, 3]), max_new_tokens=4, speculative_config=NGRAM)


# ---- what a program of the native library assumes -----------------------------------------------------------------------


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is nn.functional.silu else out


class DoublingBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.silu.default else out


@contextlib.contextmanager
def hook_of_all_modules():
    def double(module, args, output):
        return output * 2 if type(module).__name__ == "LlamaMLP" else output

    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        yield
    finally:
        handle.remove()


SCALE = 1.0


@contextlib.contextmanager
def patched(owner, name, make):
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def scaled_by_a_global(original):
    return lambda self, hidden: original(self, hidden) * SCALE


def doubled(original):
    return lambda *args, **kwargs: original(*args, **kwargs) * 2


def swapped(original):
    def rotary(q, k, cos, sin, *args, **kwargs):
        return original(q, k, sin, cos, *args, **kwargs)

    return rotary


@contextlib.contextmanager
def attention_registered_anew():
    """Under the name that the model's configuration has."""
    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def flat(*args, **kwargs):
        return original(*args, **{**kwargs, "scaling": 1e-3})

    AttentionInterface.register("sdpa", flat)
    try:
        yield
    finally:
        AttentionInterface.register("sdpa", original)


def tenfold_for_norms(original):
    def attribute(self, name):
        found = original(self, name)
        return found * torch.arange(32) if name == "weight" and "Norm" in type(self).__name__ else found

    return attribute


INTERVENTIONS = {
    "a function mode": Doubling,
    "a dispatch mode": DoublingBelow,
    "a hook of all modules": hook_of_all_modules,
    "a class patch": lambda: patched(modeling_llama.LlamaMLP, "forward", doubled),
    "a function of the model's module": lambda: patched(modeling_llama, "apply_rotary_pos_emb", swapped),
    "a function of torch": lambda: patched(nn.functional, "silu", doubled),
    "a function of torch in a later function of its file": lambda: patched(torch, "rsqrt", doubled),
    "the call of a class": lambda: patched(modeling_llama.LlamaMLP, "__call__", doubled),
    "the call of a base class": lambda: patched(GradientCheckpointingLayer, "__call__", doubled),
    "attributes of modules": lambda: patched(nn.Module, "__getattr__", tenfold_for_norms),
    "attention under the same name": attention_registered_anew,
    "a method of tensors": lambda: patched(torch.Tensor, "pow", doubled),
}


@pytest.mark.parametrize("what", every_second(INTERVENTIONS))
def test_a_program_is_not_used_where_others_intervene(model, what):
    """Before and after it, and in the first call of a model, too."""
    fresh, plain = copy.deepcopy(model), model.generate(**ragged([6, 3]), max_new_tokens=12)
    assert_same_text(model)
    with INTERVENTIONS[what]():
        assert not torch.equal(model.generate(**ragged([6, 3]), max_new_tokens=12), plain), "it changes nothing"
        assert_same_text(model)
        assert_same_text(fresh)
    assert_same_text(model)
    assert_same_text(fresh)
    assert integration.kept_decoders(model)[-1].target.native.refused is None


def test_a_patch_that_reads_a_number(model, monkeypatch):
    """A program would keep the number that it saw."""
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", scaled_by_a_global(modeling_llama.LlamaMLP.forward))
    for scale in (1.0, 3.0, -2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        assert_same_text(model)
    assert "scaled_by_a_global" in integration.kept_decoders(model)[-1].target.native.refused


def test_an_unchanged_model_keeps_its_program(model, monkeypatch):
    from hf_specdec.model.native import program_cache

    made, build = [], program_cache.build
    monkeypatch.setattr(program_cache, "build", lambda *args: made.append(args) or build(*args))
    for _ in range(3):
        with torch.device("cpu"):
            assert_same_text(model)
    assert len(made) == 1


# ---- code of the user's for prefixes that plain decoding never reaches --------------------------------------------------


class Trie:
    """Answers of a fixed set. Asked for a prefix of none, it raises, as lookups without a default do."""

    def __init__(self, prompt_length, answers):
        self.start, self.after = prompt_length, {}
        for answer in answers:
            for i, token in enumerate(answer):
                self.after.setdefault(tuple(answer[:i]), set()).add(token)

    def __call__(self, row, ids):
        return sorted(self.after[tuple(ids.tolist()[self.start :])])


class TrieProcessor(LogitsProcessor):
    """The same for whole batches."""

    keeps_state = False

    def __init__(self, trie):
        self.trie = trie

    def __call__(self, ids, scores):
        for row in range(len(ids)):
            wanted = torch.full_like(scores[row], -torch.inf)
            allowed = self.trie(row, ids[row])
            wanted[allowed] = scores[row, allowed]
            scores[row] = wanted
        return scores


ANSWERS = [[7, 8, 9, 7, 8, 9, 3], [7, 8, 11, 7, 8, 11, 3], [7, 12, 3], [20, 21, 22, 20, 21, 22, 20, 3]]
DRAFTS = {
    "ngram": NGRAM,
    "chain": {"method": "draft_model", "num_speculative_tokens": 5},
    "tree": {"method": "draft_model", "branching_factors": [3, 2, 1]},
    "rejection": {"method": "draft_model", "num_speculative_tokens": 4, "rejection_sample_method": "rejection"},
}


@pytest.mark.parametrize("kind", ["function", "processor"])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_a_strict_trie(model, drafts, kind):
    """It raises for what is not below it, and after the end of an answer."""
    inputs = {"input_ids": torch.tensor([[5, 7, 8, 9, 6]])}
    trie = Trie(5, ANSWERS)
    trie.keeps_state = False
    if kind == "function":
        more = {"prefix_allowed_tokens_fn": trie}
    else:
        more = {"logits_processor": LogitsProcessorList([TrieProcessor(trie)])}
    more |= {"max_new_tokens": 12, "eos_token_id": 3, "do_sample": drafts == "rejection"}
    assistant = {} if drafts == "ngram" else {"assistant_model": drafter_of(model, 0.5)}
    plain = model.generate(**inputs, **more)
    for _ in range(6):
        found = model.generate(**inputs, **more, **assistant, speculative_config=DRAFTS[drafts])
        assert drafts == "rejection" or torch.equal(found, plain)
        assert found[0, 5:].tolist() in ANSWERS


def test_what_raises_on_the_way_of_plain_decoding_is_raised(model):
    inputs = {"input_ids": torch.tensor([[5, 7, 8, 9, 6]])}
    trie = Trie(5, [answer[:-1] for answer in ANSWERS])
    trie.keeps_state = False
    for config in (None, NGRAM):
        more = {} if config is None else {"speculative_config": config}
        with pytest.raises(KeyError):
            model.generate(**inputs, max_new_tokens=12, prefix_allowed_tokens_fn=trie, **more)


@pytest.mark.parametrize("lengths", [(16, 7), (40, 15)])
def test_prompts_beyond_the_positions_of_a_rotary_model(lengths):
    """Plain `generate()` runs them; a position embedding would end."""
    model = tiny_llama(max_position_embeddings=16)
    assert_same_text(model, lengths=lengths)
    for config in ({"method": "none"}, {"method": "draft_model", "early_exit": 1}):
        assert_same_text(model, config, lengths)


def test_prompts_beyond_a_table_of_positions():
    model = make("GPT-2")
    with pytest.raises(ValueError, match=r"The prompt has 300 tokens; GPT2LMHeadModel has 256 positions\. Shorten"):
        model.generate(torch.full((1, 300), 5), max_new_tokens=4, speculative_config=NGRAM)


# ---- code of a model's repository ---------------------------------------------------------------------------------------


def with_code(folder, source):
    """A copy of a model's folder whose classes are in files beside the weights."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "x_model", "auto_map": classes}))
    (folder / "configuration_x.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass XConfig(LlamaConfig):\n    model_type = 'x_model'\n"
    )
    (folder / "modeling_x.py").write_text(
        "from transformers import LlamaForCausalLM\n\nfrom .configuration_x import XConfig\n\n\n"
        "class XForCausalLM(LlamaForCausalLM):\n    config_class = XConfig\n"
    )
    return folder


@pytest.mark.long
def test_code_that_the_user_trusted_is_not_asked_about_again(tmp_path, monkeypatch):
    """A drafter of a kind that transformers knows runs transformers' code all the same."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    target, draft = (with_code(tmp_path / name, hf_specdec.bundled(name)) for name in ("tiny", "tiny-draft"))
    model = AutoModelForCausalLM.from_pretrained(target, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    for config in (
        {"method": "eagle3", "model": "tiny-eagle3"},
        {"method": "draft_model", "model": str(draft)},
        {"method": "draft_model", "model": "tiny-draft"},
    ):
        assert_same_text(model, config)
    known = json.loads((draft / "config.json").read_text()) | {"model_type": "llama"}
    (draft / "config.json").write_text(json.dumps(known))
    hf_specdec.release(model)
    assert_same_text(model, {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2})
    (head,) = [decoder.generator.drafter.model for decoder in integration.kept_decoders(model)]
    assert type(head).__module__.startswith("transformers.models.llama")


@pytest.mark.parametrize("config", [NGRAM, {"method": "eagle3", "model": "tiny-eagle3"}])
def test_activations_that_are_quantized_together_are_named(tiny_model, config):
    quantized = torch.ao.quantization.quantize_dynamic(tiny_model, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedModel, match=r"Linear \(torch\) of LlamaForCausalLM rounds its inputs by all"):
        quantized.generate(**ragged([6, 3]), max_new_tokens=4, speculative_config=config)


class Rounded(nn.Linear):
    """A linear layer that reads 8-bit numbers, in steps of each token's largest number."""

    def forward(self, x):
        step = x.abs().amax(-1, keepdim=True) / 127
        return super().forward((x / step).round() * step)


class RoundedTogether(nn.Linear):
    """The same, in steps of the largest number of all tokens."""

    def forward(self, x):
        step = x.abs().max() / 127
        return super().forward((x / step).round() * step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Rounded, RoundedTogether])
def test_layers_that_round_what_they_read(kind, dtype, caplog):
    """Alone: a warning in float32. By what else is in a forward: no text of its own in float32, and a warning in low precision."""
    model = tiny_llama(0).to(dtype)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj"):
            setattr(layer.mlp, name, adopted(kind, getattr(layer.mlp, name)))
    model.hf_quantizer = object()  # as of models that transformers has loaded quantized
    call = dict(max_new_tokens=6, speculative_config=NGRAM)
    if kind is RoundedTogether and dtype == torch.float32:
        with pytest.raises(
            UnsupportedModel,
            match=r"RoundedTogether \(test_interventions\) of LlamaForCausalLM rounds its inputs by all",
        ):
            model.generate(**ragged([6, 3]), **call)
        return
    assert model.generate(**ragged([6, 3]), **call).shape == (2, 12)
    model.generate(**ragged([6, 3]), **call)
    told = [record.message for record in caplog.records if "rounds its inputs" in record.message]
    assert len(told) == (kind is RoundedTogether or dtype == torch.float32)
    assert all(("may depend on drafts" in message) == (kind is RoundedTogether) for message in told)


def adopted(kind, linear):
    """A layer of this kind with the weights of another."""
    layer = kind(linear.in_features, linear.out_features, bias=linear.bias is not None, dtype=linear.weight.dtype)
    layer.load_state_dict(linear.state_dict())
    return layer
