"""Hydra and Hydra++ heads: the numbers they draft with, the prefix layer's cache, losslessness, and files that do not fit."""

import copy
import json

import pytest
import torch
from combinations import covering
from families import make
from helpers_drafters import (
    RAGGED,
    assert_drafts_in_transformers_own_loop,
    assert_forced,
    assert_four_heads_bound_the_length,
    assert_lossless,
    assert_nothing_left,
    assert_refused,
    deepest_drafts,
    forced,
    kept_proposals,
    run_limited_and_preempted,
)
from helpers_eagle import (
    INNER,
    PlainDrafter,
    PlainLayers,
    check_against,
    layer_shapes,
    recorded,
    rms,
    scripted,
    weights,
)
from helpers_speculators import DraftRecorder, TrueHidden
from oracle import VOCAB, assert_clean, ragged, tiny_llama
from scheduling import make_decoder
from transformers import AutoModelForCausalLM, Qwen2Config

from hf_specdec import SpeculativeConfigError, integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.candidate_generators.hydra import HydraPrefixGenerator

HIDDEN = 32
SHAPES = {
    "chain": {},
    "static": {"speculative_token_tree": "medusa_mc_sim_7b_63"},
    "dynamic": {"top_k": 3, "total_tokens": 12},
}


pytestmark = pytest.mark.usefixtures("forget_decoders")


# ---- files ----------------------------------------------------------------------------------------------------------


def mlp_shapes(num_heads, places, lm_head, grounded, hidden, vocab):
    shapes = {}
    for i in range(num_heads):
        width = (i + 2) * hidden if grounded else hidden
        for place in places:
            first = place == places[0]
            shapes[f"hydra_mlp.{i}.{place}.linear.weight"] = (hidden, width if first else hidden)
            shapes[f"hydra_mlp.{i}.{place}.linear.bias"] = (hidden,)
        if grounded:
            shapes[f"hydra_mlp.{i}.{places[0]}.res_connection.weight"] = (hidden, width)
            shapes[f"hydra_mlp.{i}.{places[0]}.res_connection.bias"] = (hidden,)
        shapes |= {lm_head.format(i) + ".weight": (vocab, hidden), lm_head.format(i) + ".bias": (vocab,)}
    return shapes


def hydra(
    num_heads=4, blocks=1, grounded=True, prefix=False, shared=True, hidden=HIDDEN, vocab=VOCAB, width=8, qkv_bias=False
):
    """Tensors of Hydra heads; `shared`: blocks after the first (grounded) or all are one module, as the original has them."""
    places = list(range(1, 2 * blocks, 2)) if prefix else list(range(blocks))
    shapes = mlp_shapes(
        num_heads, places, "hydra_lm_head.{}.1" if prefix else "hydra_lm_head.{}", grounded, hidden, vocab
    )
    tensors = weights(shapes)
    for name in list(tensors):
        parts = name.split(".")
        repeated = places[1:] if grounded else places
        if shared and parts[0] == "hydra_mlp" and int(parts[2]) in repeated:
            tensors[name] = tensors[".".join([*parts[:2], str(repeated[0]), *parts[3:]])]
    if prefix:
        layer = layer_shapes("prefix_embeding_layer.layers.0.", hidden, qkv_bias, hidden, width)
        layer |= {
            f"prefix_embeding_layer.{name}": (hidden,) for name in ("norm.weight", "layers.0.input_layernorm.weight")
        }
        layer["prefix_embeding_layer.embed_tokens.weight"] = (vocab, hidden)
        tensors |= weights(layer, seed=1)
    return tensors


def write(folder, tensors, **config):
    """hydra_lm_head.pt and config.json, as the original trainer leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = any(name.startswith("prefix") for name in tensors)
    stated = {
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "hydra_num_heads": 4, "hydra_num_layers": 1,
        "hydra_head_arch": "prefix-mlp" if prefix else "mlp", "hidden_state_offset": 0, **config,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({k: v for k, v in stated.items() if v is not None}))
    torch.save(tensors, folder / "hydra_lm_head.pt")
    return {"method": "hydra", "model": str(folder)}


def heads_reference(tensors, model, hidden, tokens):
    """Logits [V] after `tokens` (the newest, then drafted ones) from the hidden state or prefix embedding [H]."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    table, i = model.get_input_embeddings().weight.detach().double(), len(tokens) - 1
    places = sorted({int(name.split(".")[2]) for name in w if name.startswith(f"hydra_mlp.{i}.")})
    name = f"hydra_mlp.{i}.{places[0]}.linear.weight"
    x = (
        hidden.double()
        if w[name].shape[1] == len(hidden)
        else torch.cat([hidden.double(), *(table[t] for t in tokens)])
    )
    for place in places:
        block = f"hydra_mlp.{i}.{place}."
        y = w[block + "linear.weight"] @ x + w[block + "linear.bias"]
        if block + "res_connection.weight" in w:
            x = w[block + "res_connection.weight"] @ x + w[block + "res_connection.bias"]
        x = x + y * torch.sigmoid(y)
    head = f"hydra_lm_head.{i}." + ("1." if f"hydra_lm_head.{i}.1.weight" in w else "")
    return w[head + "weight"] @ x + w[head + "bias"]


class PlainPrefix(PlainDrafter):
    """Hydra++: one decoder layer and a norm over the target's hidden states; position p stands at p."""

    def __init__(self, tensors, model, **options):
        super().__init__()
        self.tensors, self.model = tensors, model
        prefix = "prefix_embeding_layer."
        self.layers = PlainLayers(
            {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}, **options
        )

    def feature(self, states, p):
        return states[-2][p]

    def row(self, state, token, feature, position):
        x = self.layers.ordinary_layer(0, feature, position, state)
        return rms(x, self.layers.w["norm.weight"], self.model.config.rms_norm_eps)

    def draft_logits(self, text, path, states):
        return heads_reference(self.tensors, self.model, self.read(text, states)[1], [text[-1], *path])


# ---- numerics -------------------------------------------------------------------------------------------------------

PLAIN = {
    "one layer": (dict(), {}, "chain"),
    "one layer, tree": (dict(), {"grounded_heads": True}, "static"),
    "three layers, shared": (dict(blocks=3, num_heads=3), {}, "dynamic"),
    "three layers, apart": (dict(blocks=3, num_heads=3, shared=False), {}, "chain"),
    "ungrounded": (dict(grounded=False, blocks=2), {"grounded_heads": False}, "static"),
    "one head": (dict(num_heads=1), {}, "chain"),
    "no config": (dict(num_heads=2), {"hydra_head_arch": None, "hidden_state_offset": None}, "chain"),
}


@pytest.mark.parametrize("layout", PLAIN)
def test_logits_are_the_formula_s(tmp_path, model, layout):
    """Over rounds in which none, some and all drafts are accepted; trees: nodes read their own paths."""
    options, stated, shape = PLAIN[layout]
    tensors = hydra(**options)
    depth = options.get("num_heads", 4)
    config = write(tmp_path, tensors, **stated) | SHAPES[shape]
    if shape == "chain":
        config |= forced(depth)
    recorder = DraftRecorder(integration.get_decoder(model, parse_config(config)).generator)
    output = model.generate(**RAGGED, max_new_tokens=16, speculative_config=config, return_dict_in_generate=True)
    if shape == "chain":
        assert_forced(output, recorder, depth)
    assert {len(path) for _, path, _ in recorder.seen} == set(range(depth))
    true = TrueHidden(model)
    for text, path, logits in recorder.seen:
        expected = heads_reference(tensors, model, true(text[:-1]), [text[-1], *path])
        torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=1e-4)
    head = integration.kept_decoders(model)[-1].generator.heads.heads[-1]
    if options.get("blocks", 1) > 1:
        last, before = head.blocks[-1], head.blocks[-2]
        assert (last is before) == options.get("shared", True)
    assert_clean(model)


PREFIX = {
    "four layers": (dict(blocks=4), "chain"),
    "one layer": (dict(), "static"),
    "ungrounded": (dict(grounded=False, blocks=2), "dynamic"),
    "blocks apart": (dict(blocks=3, shared=False), "dynamic"),
    "four layers, tree": (dict(blocks=4), "static"),
}


@pytest.mark.parametrize("layout", PREFIX)
def test_prefix_layer_and_its_cache(tmp_path, model, layout):
    """Draft logits of every node, and the cache after every round, batch 4 ragged."""
    options, shape = PREFIX[layout]
    tensors = hydra(prefix=True, **options)
    config = write(tmp_path, tensors) | SHAPES[shape]
    script = scripted()
    with recorded(HydraPrefixGenerator) as recording:
        model.generate(**RAGGED, max_new_tokens=20, logits_processor=script, speculative_config=config)
    assert {len(path) for _, path, _ in recording.logits} == {0, 1, 2, 3}
    check_against(PlainPrefix(tensors, model), recording, model)
    emitted = recording.emitted()
    assert min(emitted) == 1 and max(emitted) == 5 and len(set(emitted)) > 2, emitted
    assert_clean(model)


def test_the_formula_is_not_another(tmp_path, model):
    """The check above sees another rotation, features one place off, and a missing norm."""
    tensors = hydra(prefix=True)
    with recorded(HydraPrefixGenerator) as recording:
        model.generate(**RAGGED, max_new_tokens=6, speculative_config=write(tmp_path, tensors))
    shifted, unnormed = PlainPrefix(tensors, model), PlainPrefix(tensors, model)
    shifted.feature = lambda states, p: states[-2][max(p - 1, 0)]
    unnormed.layers.w["norm.weight"] = torch.ones(HIDDEN)
    check_against(PlainPrefix(tensors, model), recording, model)
    for wrong in (PlainPrefix(tensors, model, theta=5e5), shifted, unnormed):
        with pytest.raises(AssertionError):
            check_against(wrong, recording, model)


def test_prepacked_weights_draft_the_same(tmp_path):
    """Heads large enough to be prepacked on a CPU, with the prefix layer."""
    target = tiny_llama(vocab_size=12000)
    tensors = hydra(num_heads=2, prefix=True, vocab=12000)
    config = write(tmp_path, tensors) | {"prepack_weights": True}
    with recorded(HydraPrefixGenerator) as recording:
        target.generate(**RAGGED, max_new_tokens=4, speculative_config=config)
    check_against(PlainPrefix(tensors, target), recording, target)


def test_prefix_layer_with_qwen2_s_biases(tmp_path):
    target = tiny_llama()
    torch.manual_seed(1)
    settings = {k: getattr(target.config, k) for k in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "initializer_range", "pad_token_id",
    )}  # fmt: skip
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    target = AutoModelForCausalLM.from_config(Qwen2Config(**settings), dtype=torch.float32).eval()
    target.generation_config.eos_token_id = None
    tensors = hydra(prefix=True, qkv_bias=True)
    config = write(tmp_path, tensors)
    with recorded(HydraPrefixGenerator) as recording:
        target.generate(**RAGGED, max_new_tokens=12, speculative_config=config)
    # Both sides read float32 features, summed in different orders.
    check_against(PlainPrefix(tensors, target, theta=500.0), recording, target, tolerance=3e-4)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("shape", ["chain", "dynamic"])
def test_rows_with_their_own_limits_that_are_preempted(tmp_path, model, shape, prefix):
    """Rows limited to 0, 1, 2 and all drafts, small prompt chunks, each row preempted once: the text stays plain."""
    decoder = make_decoder(model, write(tmp_path, hydra(prefix=prefix)) | SHAPES[shape] | {"prefill_chunk_size": 3})
    recorder = DraftRecorder(decoder.generator)
    rows = run_limited_and_preempted(decoder, model, RAGGED, 14)
    assert deepest_drafts(rows, ((text, len(path) + 1) for text, path, _ in recorder.seen)) == [0, 1, 2, 4]
    assert_nothing_left(decoder, rows)


# ---- losslessness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "prefix", "shape"),
    covering([("Llama", True), ("Mistral", True), ("Gemma2", False), ("GPT-2", False)], ["chain", "static"]),
)
def test_lossless(tmp_path, family, prefix, shape):
    """Greedy: plain generate()'s text. Coupled sampling: the text the seed gives without speculation."""
    target = make(family)
    vocab = target.config.vocab_size
    config = write(tmp_path, hydra(hidden=48, vocab=vocab, prefix=prefix, width=12)) | SHAPES[shape]
    assert_lossless(target, config, lengths=((7,), (6, 13, 2, 9)), temperature=0.9, top_p=0.95)


@pytest.mark.parametrize("prefix", [False, True])
def test_rejection_knows_the_true_draft_probabilities(tmp_path, model, prefix):
    config = write(tmp_path, hydra(prefix=prefix))
    config |= {"rejection_sample_method": "rejection", "draft_sample_method": "probabilistic", "seed": 1}
    generator = integration.get_decoder(model, parse_config(config)).generator
    recorder = DraftRecorder(generator)
    drafts = kept_proposals(generator)
    model.generate(**RAGGED, max_new_tokens=6, do_sample=True, temperature=0.7, top_k=0, speculative_config=config)
    trees = next(trees for trees in drafts if any(trees.lengths))
    for depth in range(4):
        logits = torch.stack([row for _, path, row in recorder.seen if len(path) == depth][:4])
        torch.testing.assert_close(trees.probs[:, depth], torch.softmax(logits / 0.7, -1))


@pytest.mark.parametrize("prefix", [False, True])
def test_in_transformers_own_loop(tmp_path, model, prefix):
    assert_drafts_in_transformers_own_loop(model, write(tmp_path, hydra(prefix=prefix)))


@pytest.mark.parametrize("prefix", [False, True])
def test_bfloat16_target(tmp_path, prefix):
    target = tiny_llama().to(torch.bfloat16)
    config = write(tmp_path, hydra(prefix=prefix))
    output = target.generate(**RAGGED, max_new_tokens=8, speculative_config=config, return_dict_in_generate=True)
    assert output.speculation.num_draft_tokens > 0
    (decoder,) = integration.kept_decoders(target)
    assert {weight.dtype for weight in decoder.generator.heads.parameters()} == {torch.bfloat16}


# ---- configuration, method ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [False, True])
def test_draft_length_and_method(tmp_path, model, prefix):
    base = write(tmp_path, hydra(prefix=prefix))
    assert parse_config({"model": base["model"]}).method == "hydra"
    assert_four_heads_bound_the_length(model, base)


def test_the_target_s_embeddings_stay_its_own(tmp_path, model):
    for prefix in (False, True):
        generator = integration.get_decoder(
            model, parse_config(write(tmp_path / str(prefix), hydra(prefix=prefix)))
        ).generator
        assert model.get_input_embeddings().weight.requires_grad
        own = {id(parameter) for parameter in generator.heads.parameters()}
        assert id(model.get_input_embeddings().weight) not in own


# ---- bad checkpoints ------------------------------------------------------------------------------------------------

LAYER = "prefix_embeding_layer.layers.0."
# case → (options of the heads, change of tensors and config.json, message)
BAD = {
    "cross-attn": ({}, lambda t, c: c.update(hydra_head_arch="cross-attn"), "hydra_head_arch = 'cross-attn'; it must be 'mlp' or"),
    "eagle-attn": (dict(prefix=True), lambda t, c: c.update(hydra_head_arch="eagle-attn"), "hydra_head_arch = 'eagle-attn'; it must be"),
    "no prefix": ({}, lambda t, c: c.update(hydra_head_arch="prefix-mlp"), "'prefix-mlp' and tensors of 'mlp'"),
    "offset": ({}, lambda t, c: c.update(hidden_state_offset=1), "hidden_state_offset"),
    "grounded": ({}, lambda t, c: c.update(grounded_heads=False), "grounded_heads = False, but the first head reads width 64"),
    "missing block": (dict(blocks=2), lambda t, c: t.pop("hydra_mlp.1.1.linear.weight"), r"missing heads\.1\.blocks\.1\.linear"),
    "missing first": ({}, lambda t, c: t.pop("hydra_mlp.0.0.linear.weight"), r"has no hydra_mlp\.0\.0\.linear\.weight"),
    "missing head": ({}, lambda t, c: t.pop("hydra_lm_head.0.weight"), r"has no hydra_lm_head\.0\.weight"),
    "missing head 2": ({}, lambda t, c: t.pop("hydra_lm_head.2.bias"), r"missing heads\.2\.lm_head\.bias"),
    "missing residual": (
        {}, lambda t, c: t.pop("hydra_mlp.3.0.res_connection.bias"), r"missing heads\.3\.blocks\.0\.res_connection\.bias",
    ),
    "extra": ({}, lambda t, c: t.update({"hydra_mlp.0.0.norm.weight": torch.zeros(3)}), r"unused hydra_mlp\.0\.0\.norm\.weight"),
    "extra head": ({}, lambda t, c: t.update({"hydra_lm_head.4.weight": torch.zeros(3)}), r"unused hydra_lm_head\.4\.weight"),
    "wrong shape": (
        {}, lambda t, c: t.update({"hydra_mlp.2.0.linear.weight": torch.zeros(32, 96)}), r"hydra_mlp\.2\.0.* has shape \[32, 96\]",
    ),
    "two spellings": (
        dict(prefix=True), lambda t, c: t.update({"prefix_embedding_layer.norm.weight": torch.zeros(32)}), "are the same tensor",
    ),
    "missing norm": (
        dict(prefix=True), lambda t, c: t.pop("prefix_embeding_layer.norm.weight"), r"missing prefix\.norm\.weight",
    ),
    "missing gate": (dict(prefix=True), lambda t, c: t.pop(LAYER + "mlp.gate_proj.weight"), r"has no prefix_embeding_layer.*gate"),
    "second layer": (
        dict(prefix=True), lambda t, c: t.update({LAYER.replace("0", "1") + "mlp.up_proj.weight": torch.zeros(INNER, 32)}),
        r"unused prefix_embeding_layer\.layers\.1",
    ),
    "wrong layer": (dict(prefix=True, width=16), lambda t, c: t.update({LAYER + "self_attn.k_proj.weight": torch.zeros(16, 32)}),
                    r"k_proj\.weight has shape \[16, 32\].*\[32, 32\]"),
    "another width": (dict(hidden=40), lambda t, c: None, "width 40; the target's have 32"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints(tmp_path, model, case):
    options, change, message = BAD[case]
    tensors, stated = dict(hydra(**options)), {}
    change(tensors, stated)
    if any(name.startswith("prefix") for name in tensors):
        stated.setdefault("hydra_head_arch", "prefix-mlp")
    assert_refused(model, write(tmp_path, tensors, **copy.deepcopy(stated)), message)


def test_other_targets(tmp_path):
    assert_refused(
        tiny_llama(vocab_size=1061), write(tmp_path, hydra()), "vocabulary of 61 tokens; the target has 1061"
    )
    gemma = make("Gemma2")
    vocab = gemma.config.vocab_size
    config = write(tmp_path, hydra(hidden=48, vocab=vocab, prefix=True, width=12))
    with pytest.raises(SpeculativeConfigError, match="a target like Llama; this one's model_type is 'gemma2'"):
        gemma.generate(**ragged([5], vocab_size=vocab), max_new_tokens=3, speculative_config=config)


def test_other_files(tmp_path, model):
    assert_refused(model, {"method": "hydra"}, "'model'.* is missing")
    medusa = tmp_path / "medusa"
    medusa.mkdir()
    torch.save({"0.0.linear.weight": torch.zeros(32, 32)}, medusa / "medusa_lm_head.pt")
    assert_refused(model, {"method": "hydra", "model": str(medusa)}, "is a head for method 'medusa'.*not 'hydra'")
