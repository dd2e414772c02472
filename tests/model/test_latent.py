"""Latent attention (MLA), and indexed attention, over pages: every model type writes plain `generate()`'s greedy text."""

import copy

import pytest
import torch
import transformers
from families import build, perturbed
from recurrent_families import WrongAt, WrongAtInTrees
from replayed_graphs import defined_attention, graphs_in_python  # noqa: F401
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import hf_specdec
from hf_specdec import integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.core.names import CACHE
from hf_specdec.decoding import SpeculativeDecoder
from hf_specdec.kernels.dispatch import VARIABLE
from hf_specdec.model import captures, latent
from hf_specdec.model.prepare import ModelOptions, prepare

pytestmark = pytest.mark.skipif(
    not hasattr(DeepseekV3Attention, "expand_kv"),
    reason="this transformers caches expanded keys, as in any other model",
)
NEW = 24
_MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "head_dim": 8,
}  # fmt: skip
_MOE = {
    "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES = {
    "deepseek_v2": {**_MLA, **_MOE},
    "deepseek_v3": {**_MLA, **_MOE, "q_lora_rank": None},
    "glm4_moe_lite": {**_MLA, **_MOE},
    "axk1": {**_MLA, **_MOE},
    "longcat_flash": {
        **_MLA, "num_layers": 2, "n_routed_experts": 4, "moe_topk": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32,
        "zero_expert_num": 1,
    },
    "minicpm3": _MLA,
    "youtu": {**_MLA, "rope_interleave": False},
}  # fmt: skip
# With fewer heads, or another seed, selections have ties, and plain generate() of a padded batch differs from that of its rows alone.
_INDEXED = {**_MLA, **_MOE, "index_n_heads": 32, "index_head_dim": 16, "index_topk": 8}
INDEXED = {
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "glm_moe_dsa, shared": {**_INDEXED, "indexer_types": ["full", "shared", "full"]},
    "axk2": _INDEXED,
    "hy_v4": _INDEXED,
}
SEEDS = {"deepseek_v32": 1, "glm_moe_dsa": 2, "glm_moe_dsa, shared": 2, "hy_v4": 3}
SHORT = ("deepseek_v3", "minicpm3", "glm_moe_dsa, shared")
ALL = [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in [*FAMILIES, *INDEXED]]
NGRAM, TREE = {"method": "ngram", "prompt_lookup_min": 1}, {"method": "draft_model", "branching_factors": [3, 2, 1]}
CHAIN = {"method": "draft_model", "num_speculative_tokens": 4}
METHODS = {
    "none": {"method": "none"}, "ngram": NGRAM, "chain": CHAIN, "tree": TREE,
    "prompts in parts, beside rows that decode": {**TREE, "prefill_chunk_size": 7, "block_size": 4},
    "rows that wait and are read again": {**CHAIN, "num_blocks": 16, "block_size": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name):
        model_type = name.partition(",")[0]
        if not hasattr(transformers.models, model_type):
            pytest.skip(f"this transformers has no {model_type}")
        if name not in made:
            model = build(model_type, SEEDS.get(name, 0), **{**FAMILIES, **INDEXED}[name])
            if name in INDEXED and "indexed_attention" not in model.config.layer_types:
                pytest.skip("this transformers has indexers of another kind, which are refused")
            made[name] = model, perturbed(model, 0.05)
        return made[name]

    yield get
    for model, _ in made.values():
        hf_specdec.release(model)


def batch(lengths=(17, 3, 9, 30, 1)):
    ids = torch.randint(1, 128, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(5))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, max(lengths) - length :] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, inputs, drafter=None, **options):
    if options.get("speculative_config", {}).get("method") == "draft_model":
        options["assistant_model"] = drafter
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, **options)


@pytest.fixture
def ways(monkeypatch):
    """Counts rows by the way their attention is computed."""
    found, absorbed = {"absorbed": 0, "expanded": 0}, latent._is_absorbed

    def counted(module, row, *num_keys):
        way = absorbed(module, row, *num_keys)
        found["absorbed" if way else "expanded"] += 1
        return way

    monkeypatch.setattr(latent, "_is_absorbed", counted)
    return found


@pytest.mark.parametrize("name", ALL)
def test_greedy_text_is_plain_text(name, models, ways, monkeypatch):
    model, drafter = models(name)
    inputs, preempted, preempt = batch(), [], SpeculativeDecoder.preempt
    monkeypatch.setattr(
        SpeculativeDecoder, "preempt", lambda decoder, seq: preempted.append(seq.num_generated) or preempt(decoder, seq)
    )
    expected = generate(model, inputs).sequences
    assert len(set(expected[0, -NEW:].tolist())) > NEW // 3  # the text does not loop
    one = {key: value[:1, 13:] for key, value in inputs.items()}
    for method, config in METHODS.items():
        out = generate(model, inputs, drafter, speculative_config=config)
        assert torch.equal(out.sequences, expected), method
        assert method not in ("chain", "tree") or 1.2 < out.speculation.mean_accepted_length < 4
        if method in ("ngram", "chain", "tree"):
            assert torch.equal(generate(model, one, drafter, speculative_config=config).sequences, expected[:1, 13:])
    assert max(preempted) > 0
    assert not prepare(model).gather and min(ways.values()) > 50


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("drafter", [WrongAt, WrongAtInTrees])
def test_rejections_at_every_position(name, drafter, models, monkeypatch):
    model, _ = models(name)
    inputs = batch()
    rows = [ids[kept.bool()][None] for ids, kept in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)]
    WrongAt.texts = [model.generate(row, max_new_tokens=NEW + 5, do_sample=False)[0].tolist() for row in rows]
    config = {"method": "ngram", "num_speculative_tokens": 3}
    decoder = SpeculativeDecoder(drafter(parse_config(config), prepare(model)))
    monkeypatch.setattr(integration, "get_decoder", lambda *_: decoder)
    out = generate(model, inputs, speculative_config=config)
    assert torch.equal(out.sequences, generate(model, inputs).sequences)
    depths = out.speculation.acceptance_per_position
    assert len(depths) == 3 and 0 < depths[2] < depths[0] < 1  # some rounds accept none, some all


@pytest.mark.long
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa, shared"])
def test_index_keys_matter_and_leave_with_the_others(name, models):
    """Texts are longer than what a token attends to. Caches of transformers get the indexer's keys, and give them; so do prompts of
    embeddings, whose rows must keep theirs when they wait."""
    model, drafter = models(name)
    model_type, inputs = name.partition(",")[0], batch((30, 12))
    expected = generate(model, inputs).sequences
    dense = build(model_type, SEEDS[name], **{**INDEXED[name], "index_topk": 200})
    assert not torch.equal(expected, generate(dense, inputs).sequences)
    first = generate(model, {"input_ids": inputs["input_ids"][:1]}, speculative_config=NGRAM)
    further = {"input_ids": first.sequences}
    after = generate(model, further).sequences
    assert torch.equal(generate(model, further, **{CACHE: copy.deepcopy(first[CACHE])}).sequences, after)
    assert torch.equal(generate(model, further, **{CACHE: first[CACHE]}, speculative_config=NGRAM).sequences, after)
    own = generate(model, {"input_ids": inputs["input_ids"][:1]})
    assert torch.equal(generate(model, further, **{CACHE: own[CACHE]}, speculative_config=NGRAM).sequences, after)
    twice = {
        key: torch.cat([value, value]) for key, value in inputs.items()
    }  # rows that share blocks as these are written
    shared = generate(model, twice, speculative_config={**NGRAM, "block_size": 4, "prefill_chunk_size": 12}).sequences
    assert torch.equal(shared, torch.cat([expected, expected]))
    embedded = {
        "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
    }
    waiting = {**CHAIN, "num_blocks": 16, "block_size": 4}
    out = generate(model, embedded, drafter, speculative_config=waiting | {"method": "ngram"}).sequences
    assert torch.equal(out, expected[:, 30:])


def test_what_indexers_cannot_do(models):
    model, _ = models("deepseek_v32")
    with pytest.raises(UnsupportedModel, match="indexers"):
        prepare(model, ModelOptions(deterministic=True))
    assert "its indexers select keys row by row" in captures.capture_obstacle(prepare(model))
    with pytest.raises(UnsupportedModel, match="that caches whole keys"):
        prepare(model, ModelOptions(compile=True))


class _Halved(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


@pytest.mark.parametrize("reason", ["hooked", "adapted", "by the definition"])
def test_layers_that_cannot_be_absorbed(reason, ways, monkeypatch):
    """A weight that is not all of its layer: keys are expanded row by row. And attention without the native library."""
    model = build("deepseek_v3", **FAMILIES["deepseek_v3"])
    monkeypatch.setenv(VARIABLE, "reference")
    for layer in model.model.layers:
        linear = layer.self_attn.kv_b_proj
        if reason == "hooked":
            linear.register_forward_hook(lambda module, args, out: out / 2)
        elif reason == "adapted":
            linear.__class__ = _Halved
    out = generate(model, batch(), speculative_config={"method": "token_recycling"})
    assert torch.equal(out.sequences, generate(model, batch()).sequences)
    assert bool(ways["absorbed"]) == (reason == "by the definition") and not prepare(model).gather


def test_graphs_need_absorbed_products(graphs_in_python, defined_attention, caplog):  # noqa: F811
    model = build("deepseek_v3", **FAMILIES["deepseek_v3"])
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = _Halved
    out = generate(model, batch(), speculative_config={**NGRAM, "cuda_graphs": True})
    assert torch.equal(out.sequences, generate(model, batch()).sequences)
    assert "runs without CUDA graphs: its kv_b_proj is no plain linear layer" in caplog.text
    with pytest.raises(UnsupportedModel, match="its kv_b_proj is no plain linear layer"):
        prepare(model, ModelOptions(deterministic=True))


def test_memory_is_that_of_the_latents(models):
    """One pool, counted once; caches of transformers hold the same, and can be continued."""
    model, _ = models("deepseek_v3")
    packed = prepare(model)
    assert packed.bytes_per_token() == 3 * (16 + 8) * 4
    ids = batch((12,))["input_ids"]
    first = generate(model, {"input_ids": ids}, speculative_config=NGRAM)
    cache = first[CACHE]
    assert [tuple(each.keys.shape) for each in cache.layers] == [(1, 1, 12 + NEW - 1, 16)] * 3
    more = generate(model, {"input_ids": first.sequences}, **{CACHE: cache}, speculative_config=NGRAM)
    assert torch.equal(more.sequences, generate(model, {"input_ids": first.sequences}).sequences)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_deterministic(dtype, models):
    """The self-test of this mode compares bits."""
    model = build("deepseek_v3", **FAMILIES["deepseek_v3"]).to(dtype)
    inputs, texts = batch(), []
    for config in (NGRAM, METHODS["none"], {**NGRAM, "prefill_chunk_size": 5, "block_size": 4}):
        texts.append(generate(model, inputs, speculative_config={**config, "deterministic": True}).sequences)
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    assert not prepare(model, ModelOptions(deterministic=True)).gather
