"""Bad EAGLE-3 checkpoints: one clear error each, and nothing half-loaded."""

import json

import pytest
import torch
from helpers_drafters import assert_refused
from helpers_eagle import save_checkpoint, weights
from helpers_eagle3 import AUX, DRAFT_IDS, LAYOUTS, table_tensors, write
from oracle import VOCAB, ragged, tiny_llama

import hf_specdec


def unmapped(tensors):
    """Without a draft vocabulary."""
    del tensors["d2t"], tensors["t2d"]


BAD = {
    "missing tensor": ("yuhuili", lambda t, c: t.pop("midlayer.hidden_norm.weight"), "in no known format|not 'eagle3'"),
    "missing norm": ("yuhuili", lambda t, c: t.pop("norm.weight"), r"missing norm\.weight"),
    "extra tensor": ("yuhuili", lambda t, c: t.update({"midlayer.mlp.up.weight": torch.zeros(2)}), r"unused midlayer\.mlp\.up\."),
    "wrong shape": ("yuhuili", lambda t, c: c.update(intermediate_size=64), r"midlayer\.mlp.* has shape \[48, 32\].*\[64, 32\]"),
    "another width": ("yuhuili", lambda t, c: c.update(target_hidden_size=64), r"width 64; the target's have 32"),
    "other layers": ("yuhuili", lambda t, c: c.update({AUX: [2, 16, 29]}), r"\[2, 16, 29\].*the target has 3 layers"),
    "layer ids": ("yuhuili", lambda t, c: c.update({AUX: "1,2"}), r"'1,2'; it must be a list of layers"),
    "number of states": ("yuhuili", lambda t, c: c.update({AUX: [1, 2]}), r"fc reads 96 numbers.*2 × 32"),
    "d2t of ids": (
        "yuhuili", lambda t, c: t.update(d2t=torch.tensor(DRAFT_IDS)), r"d2t names tokens 0 to \d+, the target has 61.*holds ids where",
    ),
    "d2t out of range": ("yuhuili", lambda t, c: t.update(d2t=t["d2t"] + 60), r"d2t names tokens 60 to"),
    "d2t twice": ("yuhuili", lambda t, c: t.update(d2t=t["d2t"] * 0 - torch.arange(40)), "names a token of the target twice"),
    "d2t length": ("yuhuili", lambda t, c: t.update(d2t=t["d2t"][:-1]), r"d2t has shape \[39\] for a draft vocabulary of 40"),
    "head without d2t": ("yuhuili", lambda t, c: t.pop("d2t"), "draft_vocab_size 40 and no table d2t"),
    "another vocabulary": ("yuhuili", lambda t, c: t.update(t2d=torch.zeros(8, dtype=torch.bool)), "vocabulary of 8 tokens"),
    "both norms": ("yuhuili", lambda t, c: c.update(fc_norm=True, norm_before_fc=True), "fc_norm = true, but the file has no fc_norm"),
    "norm contradicts": ("yuhuili", lambda t, c: c.update(fc_norm=True), r"fc_norm = true, but the file has no fc_norm\.0\."),
    "bias contradicts": ("qkv bias", lambda t, c: c.update(attention_bias=False), r"attention_bias = false, but the file has"),
    "no mask_hidden": ("p-eagle", lambda t, c: t.pop("mask_hidden"), "parallel_drafting = true, but the file has no mask_hidden"),
    "not parallel": ("p-eagle", lambda t, c: c.update(parallel_drafting=False), "parallel_drafting = false, but the file has"),
    "no mask token": ("p-eagle", lambda t, c: c.pop("pard_token"), "names no mask token: give 'mask_token_id' in speculative_config"),
    "t2d of others": (
        "yuhuili", lambda t, c: t.update(t2d=t["t2d"].roll(1)), "t2d and d2t name different tokens: 40 and 40 of them",
    ),
    "larger vocabulary": (
        "full vocabulary",
        lambda t, c: unmapped(t) or t.update({"lm_head.weight": torch.zeros(800, 32)}) or c.update(vocab_size=800, draft_vocab_size=800),
        "vocabulary of 800 tokens; the target has 61",
    ),
    "embeddings of a larger vocabulary": (
        "full vocabulary",
        lambda t, c: unmapped(t) or t.update({"embed_tokens.weight": torch.zeros(800, 32)}),
        "vocabulary of 800 tokens; the target has 61",
    ),
    "latent, a rank": ("latent", lambda t, c: c.update(kv_lora_rank=13), r"kv_a_layernorm\.weight has shape \[12\].* \[13\]"),
    "latent, halves": ("latent", lambda t, c: c.update(rope_interleave=False), "rope_interleave = False; only True is supported"),
    "latent, windows": ("latent", lambda t, c: c.update(layer_types=["sliding_attention"]), "has layer_types with windows"),
    "latent keys in another file": ("yuhuili", lambda t, c: c.update(rope_interleave=True), "rope_interleave = True; only False"),
    "Gemma 4, shared keys": ("DeepSpec, Gemma 4", lambda t, c: c.update(num_kv_shared_layers=1), "num_kv_shared_layers = 1; only 0"),
    "Gemma 4, a norm": (
        "DeepSpec, Gemma 4", lambda t, c: unmapped(t) or t.pop("layers.1.hidden_norm.weight"), r"missing layers\.1\.hidden_norm\.weight",
    ),
    "another's cap": ("yuhuili", lambda t, c: c.update(final_logit_softcapping=3.0), "final_logit_softcapping = 3.0, which"),
    "no heads": ("yuhuili", lambda t, c: c.update(num_attention_heads=0), "num_attention_heads = 0; it must be an integer of at least 1"),
    "no layers": ("yuhuili", lambda t, c: c.update(num_hidden_layers=0), "num_hidden_layers = 0; it must be an integer of at least 1"),
    "many layers": ("yuhuili", lambda t, c: c.update(num_hidden_layers=10**12), r"num_hidden_layers = 1000000000000, but the file.* of 1"),
    "activation": ("yuhuili", lambda t, c: c.update(hidden_act="sliu"), r"hidden_act = 'sliu' \(did you mean 'silu'"),
    "list of activations": ("yuhuili", lambda t, c: c.update(hidden_act=["silu"]), r"hidden_act = \['silu'\]; it must be a name"),
    "number of architectures": ("yuhuili", lambda t, c: c.update(architectures=3), "architectures = 3; it must be a list of names"),
    "kinds of layers": ("yuhuili", lambda t, c: c.update(layer_types=3), "layer_types = 3; it must be a list of names"),
    "kinds of nested layers": (
        "speculators", lambda t, c: c["transformer_layer_config"].update(layer_types=3), "layer_types = 3; it must be a list of names",
    ),
    "draft vocabulary": ("yuhuili", lambda t, c: c.update(draft_vocab_size="x"), "draft_vocab_size = 'x'; it must be an integer"),
    "width of the MLP": ("yuhuili", lambda t, c: c.update(intermediate_size="x"), "intermediate_size = 'x'; it must be an integer"),
    "scalar for a head": ("yuhuili", lambda t, c: t.update({"lm_head.weight": torch.tensor(1.0)}), r"shape \[\]; it must be a matrix"),
    "scale": ("yuhuili", lambda t, c: c.update(logit_scale="big"), "logit_scale = 'big'; it must be a number"),
    "flat queries": (
        "yuhuili",
        lambda t, c: t.update({"midlayer.self_attn.q_proj.weight": torch.zeros(32)}),
        r"q_proj.weight has shape \[32\]",
    ),
    "mask token": ("p-eagle", lambda t, c: c.update(pard_token=VOCAB), "mask token 61 is not among the 61 tokens"),
    "peagle": ("speculators, p-eagle", lambda t, c: t.pop("mask_hidden"), "without mask_hidden"),
    "unused fc": ("yuhuili", lambda t, c: c.update(eagle_config={"use_aux_hidden_state": False}), r"unused fc\.weight"),
    "proposal": (
        "speculators", lambda t, c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=0),
        r"speculative_tokens is 0",
    ),
    "verifier": ("speculators", lambda t, c: c.update(target_hidden_size=64), "was trained for 'some/Target-8B'"),
    "layer config": ("speculators", lambda t, c: c.update(transformer_layer_config=[1]), "transformer_layer_config.*not an object"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints(tmp_path, case):
    name, change, message = BAD[case]
    layout = LAYOUTS[name]
    tensors = {
        key.replace("layers.0.", layout.prefix): value for key, value in weights(layout.shapes).items()
    } | table_tensors()
    config = json.loads(json.dumps(layout.config))
    change(tensors, config)
    folder = save_checkpoint(tmp_path, tensors, config)
    target = tiny_llama(vocab_size=1061) if case == "another vocabulary" else tiny_llama()
    assert_refused(target, {"method": "eagle3", "model": folder}, message)


def test_parallel_drafting_is_the_checkpoints_to_say(tmp_path):
    model = tiny_llama()
    for name, said in ("p-eagle", False), ("yuhuili", True):
        config = {"method": "eagle3", "model": write(tmp_path / name, name)[1]}
        with pytest.raises(hf_specdec.SpeculativeConfigError, match=r"'parallel_drafting'.*leave it out"):
            model.generate(**ragged([5]), max_new_tokens=4, speculative_config={**config, "parallel_drafting": said})
        model.generate(**ragged([5]), max_new_tokens=4, speculative_config={**config, "parallel_drafting": not said})
