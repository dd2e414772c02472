"""EAGLE-1/2 heads: every layout against a plain float64 head, over rounds with none, some and all drafts accepted."""

import json

import pytest
import torch
from combinations import covering
from families import make
from helpers_drafters import (
    assert_lossless,
    assert_nothing_left,
    assert_refused,
    deepest_drafts,
    run_limited_and_preempted,
)
from helpers_eagle import (
    EPS,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    PlainDrafter,
    PlainLayers,
    Script,
    check_against,
    layer_shapes,
    recorded,
    rms,
    save_checkpoint,
    scripted,
    weights,
)
from oracle import VOCAB, assert_clean, ragged, tiny_llama
from scheduling import make_decoder

import hf_specdec
from hf_specdec import integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.candidate_generators.eagle import EagleGenerator

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1, "hidden_act": "silu",
    "rms_norm_eps": EPS, "max_position_embeddings": 12, "vocab_size": VOCAB, "tie_word_embeddings": False,
}  # fmt: skip
BASE = {"embed_tokens.weight": (VOCAB, HIDDEN), "fc.weight": (HIDDEN, 2 * HIDDEN), **layer_shapes("layers.0.")}
SHAPES = {
    "chain": {"num_speculative_tokens": 4},
    "static": {"speculative_token_tree": "eagle_mc_sim_7b_63"},
    "dynamic": {"top_k": 3, "total_tokens": 12, "depth": 4},
}


class PlainEagle(PlainDrafter):
    """fc([embedding; feature]) and layers; norms where the tensors have them."""

    def __init__(self, tensors, model, **options):
        super().__init__()
        self.layers = PlainLayers(tensors, **options)
        w = self.w = self.layers.w
        self.table = w.get("embed_tokens.weight", model.get_input_embeddings().weight.detach().double())
        self.head = w.get("lm_head.weight", model.get_output_embeddings().weight.detach().double())

    def feature(self, states, p):
        return states[-2][p]

    def normed(self, x, name):
        return rms(x, self.w[name]) if name in self.w else x

    def row(self, state, token, feature, position):
        both = torch.cat([self.normed(self.table[token], "enorm.weight"), self.normed(feature, "hnorm.weight")])
        x = self.layers.linear(both, "fc")
        for i in range(self.layers.num_layers):
            x = self.layers.ordinary_layer(i, x, position, state)
        return self.normed(x, "norm.weight")

    def logits(self, out):
        return self.head @ out


def speculators_config(**changes):
    layers = {k: v for k, v in CONFIG.items() if k != "architectures"}
    return {
        "architectures": ["EagleSpeculator"], "speculators_model_type": "eagle", "speculators_version": "0.1.0",
        "transformer_layer_architecture": "LlamaDecoderLayer", "transformer_layer_config": layers, "layernorms": False,
        "fusion_bias": False,
        "speculators_config": {
            "algorithm": "eagle", "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": "some/Target-8B", "architectures": ["LlamaForCausalLM"]},
        },
        **changes,
    }  # fmt: skip


def in_speculators(name: str) -> str:
    renamed = {
        "fc.": "fusion_fc.",
        "layers.0.": "transformer.",
        "enorm.": "embedding_layernorm.",
        "norm.": "pre_lm_head_layernorm.",
    }
    for old, new in renamed.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name


NORM = (HIDDEN,)
SECOND_LAYER = {**layer_shapes("layers.1."), "layers.1.input_layernorm.weight": NORM}
NO_EMBEDDINGS = {name: shape for name, shape in BASE.items() if name != "embed_tokens.weight"}
# layout → (shapes by the plain head's names, config, file's name of a tensor, file, options of the plain head)
LAYOUTS = {
    "vicuna": ({**BASE, "fc.bias": NORM}, CONFIG, None, "pytorch_model.bin", {}),
    "llama3": (BASE, {**CONFIG, "bias": False, "rope_theta": 5e5}, None, "model.safetensors", {"theta": 5e5}),
    "qwen2": (
        {**BASE, "fc.bias": NORM, **layer_shapes("layers.0.", qkv_bias=True)},
        {**CONFIG, "model_type": "qwen2", "qkv_bias": True, "bias": True, "sliding_window": 4, "use_sliding_window": False},
        None, "model.safetensors", {},
    ),
    "mixtral": ({**BASE, "fc.bias": NORM}, {**CONFIG, "model_type": "mixtral", "rope_theta": 1e6}, None,
                "model.safetensors", {"theta": 1e6}),
    "two layers": ({**BASE, **SECOND_LAYER}, {**CONFIG, "num_hidden_layers": 2}, None, "model.safetensors", {"num_layers": 2}),
    "own head": ({**BASE, "lm_head.weight": (VOCAB, HIDDEN)}, CONFIG, "model.{}".format, "model.safetensors", {}),
    "target's embeddings": (NO_EMBEDDINGS, CONFIG, None, "model.safetensors", {}),
    "para norm": (
        {**BASE, "enorm.weight": NORM, "hnorm.weight": NORM}, {**CONFIG, "add_para_norm": True}, None, "model.safetensors", {},
    ),
    "all norms": (
        {**BASE, "layers.0.input_layernorm.weight": NORM, "norm.weight": NORM}, CONFIG, None, "model.safetensors", {},
    ),
    "speculators": (BASE, speculators_config(), in_speculators, "model.safetensors", {}),
    "speculators layernorms": (
        {**NO_EMBEDDINGS, "fc.bias": NORM, "enorm.weight": NORM, "norm.weight": NORM, "layers.0.input_layernorm.weight": NORM},
        speculators_config(layernorms=True, fusion_bias=True), in_speculators, "model.safetensors", {},
    ),
}  # fmt: skip
CASES = [
    *((name, list(SHAPES)[i % 3]) for i, name in enumerate(LAYOUTS)),
    ("vicuna", "static"), ("vicuna", "dynamic"), ("two layers", "dynamic"),
]  # fmt: skip


def write(folder, layout: str, **config):
    shapes, own_config, rename, file, _ = LAYOUTS[layout]
    tensors = weights(shapes)
    named = {rename(name) if rename else name: tensor for name, tensor in tensors.items()}
    return tensors, save_checkpoint(folder, named, {**own_config, **config}, file)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return write(tmp_path_factory.mktemp("eagle"), "vicuna")[1]


@pytest.mark.parametrize(("layout", "shape"), CASES)
def test_numerics_and_cache(tmp_path, model, layout, shape):
    """Draft logits of every node, and the cache after every round, batch 4 ragged; texts outgrow the head's 12 positions."""
    tensors, folder = write(tmp_path, layout)
    script = scripted()
    with recorded(EagleGenerator) as recording:
        model.generate(
            **ragged([6, 13, 2, 9]), max_new_tokens=20, logits_processor=script,
            speculative_config={"method": "eagle", "model": folder, **SHAPES[shape]},
        )  # fmt: skip
    check_against(PlainEagle(tensors, model, **LAYOUTS[layout][4]), recording, model)
    emitted = recording.emitted()
    assert min(emitted) == 1 and max(emitted) == (6 if shape == "static" else 5) and len(set(emitted)) > 2, emitted
    assert_clean(model)


@pytest.mark.parametrize(("family", "shape"), covering(["Llama", "Gemma2", "Qwen3"], list(SHAPES)))
def test_output_is_the_targets_own(tmp_path, family, shape):
    """Greedy tokens equal plain generate()'s; sampled ones equal those without speculation under the same seed."""
    target = make(family)
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    shapes = {"fc.weight": (hidden, 2 * hidden), **layer_shapes("layers.0.", hidden, hidden=hidden, width=12)}
    config = {**CONFIG, "hidden_size": hidden, "vocab_size": vocab}
    config = {"method": "eagle", "model": save_checkpoint(tmp_path, weights(shapes), config), **SHAPES[shape]}
    assert_lossless(target, config, temperature=0.8)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_with_their_own_limits_that_are_preempted(model, head, shape):
    """Rows limited to 0, 1, 2 and all drafts, small prompt chunks, each row preempted once: the text stays plain."""
    decoder = make_decoder(model, {"method": "eagle", "model": head, "prefill_chunk_size": 3, **SHAPES[shape]})
    with recorded(EagleGenerator) as recording:
        rows = run_limited_and_preempted(decoder, model, ragged([6, 13, 2, 9]), 14)
    *limited, free = deepest_drafts(rows, ((text, len(path) + 1) for text, path, _ in recording.logits))
    assert limited == [0, 1, 2] and free >= 4
    assert_nothing_left(decoder, rows)


def test_a_target_in_bfloat16(head):
    target = tiny_llama().to(torch.bfloat16)
    inputs = ragged([6, 13])
    output = target.generate(
        **inputs, max_new_tokens=8, speculative_config={"method": "eagle", "model": head}, return_dict_in_generate=True
    )
    assert output.speculation.num_draft_tokens > 0
    (decoder,) = integration.kept_decoders(target)
    assert decoder.generator.head.dtype == torch.bfloat16
    assert decoder.generator.cache.num_bytes == 0, "released"


def test_loading_leaves_the_target_as_it_was(tmp_path):
    """Shared embeddings stay the target's: trainable, in training mode, and not among the head's parameters."""
    target = tiny_llama()
    _, folder = write(tmp_path, "target's embeddings")
    target.get_input_embeddings().train()
    decoder = make_decoder(target, {"method": "eagle", "model": folder})
    assert target.get_input_embeddings().weight.requires_grad and target.get_input_embeddings().training
    own = {id(parameter) for parameter in decoder.generator.head.module.parameters()}
    assert id(target.get_input_embeddings().weight) not in own


def test_tokens_beyond_the_heads_own_table(tmp_path, model):
    """The target's vocabulary is padded further than the head's: its padding tokens are read as the head's last one."""
    shapes = {**BASE, "embed_tokens.weight": (VOCAB - 5, HIDDEN), "lm_head.weight": (VOCAB - 5, HIDDEN)}
    folder = save_checkpoint(tmp_path, weights(shapes), {**CONFIG, "vocab_size": VOCAB - 5})
    inputs = ragged([9])
    inputs["input_ids"][0, -3:] = torch.tensor([VOCAB - 1, VOCAB - 5, VOCAB - 6])
    config = {"method": "eagle", "model": folder}
    with recorded(EagleGenerator) as recording:
        output = model.generate(
            **inputs, max_new_tokens=10, speculative_config=config, logits_processor=[Script([VOCAB - 1])]
        )
    assert torch.equal(output, model.generate(**inputs, max_new_tokens=10, logits_processor=[Script([VOCAB - 1])]))
    assert all(logits.shape == (VOCAB - 5,) for _, _, logits in recording.logits) and recording.logits


# ---- draft length ---------------------------------------------------------------------------------------------------


def drafted(model, config) -> int:
    with recorded(EagleGenerator) as recording:
        model.generate(**ragged([6]), max_new_tokens=12, speculative_config=config)
    return 1 + max(len(path) for _, path, _ in recording.logits)


def test_draft_length_is_the_checkpoints_unless_given(tmp_path, model):
    _, folder = write(tmp_path, "speculators")
    config = {"method": "eagle", "model": folder}
    assert drafted(model, config) == 3
    assert drafted(model, config) == 3, "a decoder kept from the first call"
    assert drafted(model, {**config, "num_speculative_tokens": 5}) == 5, "what happens to be the method's default"
    assert drafted(model, {**config, "branching_factors": [2, 1]}) == 2
    assert drafted(model, {**config, "top_k": 2}) == 3
    given = parse_config({**config, "num_speculative_tokens": 5})
    assert parse_config(given.to_json()).length_given and not parse_config(parse_config(config).to_json()).length_given
    decoder = make_decoder(model, config)
    assert decoder.config.num_speculative_tokens == decoder.generator.max_draft_nodes == 3


def test_method_is_inferred(tmp_path, model):
    for layout in LAYOUTS:
        _, folder = write(tmp_path / layout.replace(" ", "-"), layout)
        assert parse_config({"model": folder}).method == "eagle", layout


# ---- bad checkpoints ------------------------------------------------------------------------------------------------

BAD = {
    "missing tensor": (lambda t, c: t.pop("layers.0.mlp.up_proj.weight"), r"missing layers\.0\.mlp\.up_proj\.weight"),
    "extra tensor": (lambda t, c: t.update({"layers.0.mlp.up.weight": torch.zeros(2)}), r"unused layers\.0\.mlp\.up\.weight"),
    "wrong shape": (lambda t, c: c.update(intermediate_size=64), r"gate_proj\.weight has shape \[48, 32\].*\[64, 32\]"),
    "another target's width": (lambda t, c: c.update(hidden_size=64), r"hidden states of width 64; the target's have 32"),
    "another target's vocabulary": (
        lambda t, c: t.update({"embed_tokens.weight": torch.zeros(7, HIDDEN)}), r"vocabulary of 7 tokens; the target has 1061",
    ),
    "missing layer": (lambda t, c: c.update(num_hidden_layers=2), "num_hidden_layers = 2, but the file has tensors of 1"),
    "bias contradicts": (lambda t, c: c.update(bias=False), r"says bias = false, but the file has fc\.bias"),
    "qkv_bias contradicts": (lambda t, c: c.update(qkv_bias=True), r"qkv_bias = true, but the file has no layers\.0.*q_proj\.bias"),
    "rope": (lambda t, c: c.update(rope_scaling={"type": "bogus", "factor": 2.0}), r"rotary parameters .*bogus.* cannot be used"),
    "config": (lambda t, c: c.update(num_attention_heads="four"), "num_attention_heads = 'four'; it must be an integer"),
    "two names": (lambda t, c: t.update({"model.fc.bias": torch.zeros(HIDDEN)}), r"both '.*fc\.bias' and '.*fc\.bias'"),
    "windows": (
        lambda t, c: c.update(layer_types=["chunked_attention"]), r"layer_types \['chunked_attention'\].*cannot be run",
    ),
    "rope by kind": (
        lambda t, c: c.update(rope_parameters={"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}),
        r"rope_parameters .* are not one set",
    ),
    "section": (lambda t, c: c.update(eagle_config=[1]), r"eagle_config in its config.json is not an object"),
    "odd rotation": (lambda t, c: c.update(partial_rotary_factor=0.4), r"rotates 3 of a head's 8 dimensions \(partial_rotary_factor"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints(tmp_path, model, case):
    change, message = BAD[case]
    shapes, config, _, _, _ = LAYOUTS["vicuna"]
    tensors, config = weights(shapes), json.loads(json.dumps(config))
    change(tensors, config)
    folder = save_checkpoint(tmp_path, tensors, config)
    target = tiny_llama(vocab_size=1061) if "vocabulary" in case else model
    hf_specdec.release(target)
    assert_refused(target, {"method": "eagle", "model": folder}, message)


def test_the_error_names_the_target_the_head_is_for(tmp_path):
    _, folder = write(tmp_path, "speculators")
    other = tiny_llama(hidden_size=64)
    with pytest.raises(
        hf_specdec.SpeculativeConfigError, match=r"width 32; the target's have 64.*trained for 'some/Target-8B'"
    ):
        other.generate(**ragged([5]), max_new_tokens=4, speculative_config={"method": "eagle", "model": folder})


def test_no_model_and_another_methods_head(tmp_path, model):
    call = {**ragged([5]), "max_new_tokens": 4}
    with pytest.raises(hf_specdec.SpeculativeConfigError, match=r"'model'.*is missing"):
        model.generate(**call, speculative_config={"method": "eagle"})
    shapes = {"midlayer.hidden_norm.weight": NORM, **layer_shapes("midlayer.", 2 * HIDDEN)}
    folder = save_checkpoint(tmp_path, weights(shapes), CONFIG)
    with pytest.raises(hf_specdec.SpeculativeConfigError, match=r"is a head for method 'eagle3'.*not 'eagle'"):
        model.generate(**call, speculative_config={"method": "eagle", "model": folder})
