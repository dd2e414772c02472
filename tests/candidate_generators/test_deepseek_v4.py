"""DeepSeek-V4's own DSpark: draft logits are those of its formula, written plainly in float64; files as they are published; refusals."""

import json

import pytest
import torch
import transformers
from families import VOCAB, deepseek_v4
from helpers_dflash import Watched
from safetensors.torch import save_file
from torch.nn.functional import sigmoid, silu

import hf_specdec
from hf_specdec.candidate_generators.checkpoints.files import CheckpointError

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "DeepseekV4ForCausalLM"), reason="this transformers has no DeepSeek-V4"
)
H, HEADS, D, ROTARY, Q_RANK, GROUPS, O_RANK, INNER, EXPERTS, STREAMS, WINDOW = 48, 4, 16, 8, 24, 2, 16, 64, 4, 2, 12
STAGES, BLOCK, NOISE, LAYERS, RANK = 2, 4, 5, [0, 2], 6
KEYS = {
    "dspark_block_size": BLOCK, "dspark_noise_token_id": NOISE, "dspark_target_layer_ids": LAYERS, "dspark_markov_rank": RANK,
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    model = deepseek_v4()
    yield model
    hf_specdec.release(model)


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape, scale=0.3):
        return scale * torch.randn(*shape, generator=generator)

    w = {"mtp.0.main_proj.weight": rand(H, len(LAYERS) * H), "mtp.0.main_norm.weight": 1 + rand(H)}
    for i in range(STAGES):
        a, f = f"mtp.{i}.attn.", f"mtp.{i}.ffn."
        w |= {
            a + "wq_a.weight": rand(Q_RANK, H), a + "q_norm.weight": 1 + rand(Q_RANK), a + "wq_b.weight": rand(HEADS * D, Q_RANK),
            a + "wkv.weight": rand(D, H), a + "kv_norm.weight": 1 + rand(D), a + "attn_sink": rand(HEADS, scale=2),
            a + "wo_a.weight": rand(GROUPS * O_RANK, HEADS * D // GROUPS), a + "wo_b.weight": rand(H, GROUPS * O_RANK),
            f + "gate.weight": rand(EXPERTS, H), f + "gate.bias": rand(EXPERTS),
            f"mtp.{i}.attn_norm.weight": 1 + rand(H), f"mtp.{i}.ffn_norm.weight": 1 + rand(H),
        }  # fmt: skip
        for name in [f"experts.{e}" for e in range(EXPERTS)] + ["shared_experts"]:
            w |= {f"{f}{name}.w{k}.weight": rand(*((H, INNER) if k == 2 else (INNER, H))) for k in (1, 2, 3)}
        for part in ("attn", "ffn"):
            mixes = (2 + STREAMS) * STREAMS
            w |= {f"mtp.{i}.hc_{part}_fn": rand(mixes, STREAMS * H), f"mtp.{i}.hc_{part}_base": rand(mixes)}
            w[f"mtp.{i}.hc_{part}_scale"] = 1 + rand(3)
    last = f"mtp.{STAGES - 1}."
    return w | {
        last + "norm.weight": 1 + rand(H), last + "hc_head_fn": rand(STREAMS, STREAMS * H), last + "hc_head_base": rand(STREAMS),
        last + "hc_head_scale": 1 + rand(1), last + "markov_head.markov_w1.weight": rand(VOCAB, RANK, scale=1),
        last + "markov_head.markov_w2.weight": rand(VOCAB, RANK, scale=1), last + "confidence_head.proj.weight": rand(1, H + RANK),
    }  # fmt: skip


def write(folder, target, stored, **config):
    """A checkpoint beside what its target's own has."""
    save_file({**stored, "layers.0.attn.wkv.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    own = {key: value for key, value in {**target.config.to_dict(), **KEYS, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(own))
    return str(folder)


class Formula:
    """What the files compute, in float64."""

    def __init__(self, target, stored):
        self.target, self.c = target, target.config
        self.w = {name: value.double() for name, value in stored.items()}

    def normed(self, x, weight=None):
        x = x / (x.pow(2).mean(-1, keepdim=True) + self.c.rms_norm_eps).sqrt()
        return x if weight is None else x * self.w[weight]

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T

    def turned(self, x, positions, way=1):
        """Pairs of the last dimensions of x [n, .., D]."""
        theta = self.c.rope_theta ** (-torch.arange(0, ROTARY, 2).double() / ROTARY)
        angles = (positions[:, None].double() * theta).view(len(x), *[1] * (x.dim() - 2), -1)
        real, imaginary = x[..., -ROTARY::2], x[..., -ROTARY + 1 :: 2]
        pairs = torch.stack([
            real * angles.cos() - way * imaginary * angles.sin(), imaginary * angles.cos() + way * real * angles.sin(),
        ], dim=-1)  # fmt: skip
        return torch.cat([x[..., :-ROTARY], pairs.flatten(-2)], dim=-1)

    def mixes(self, streams, name):
        """Collapsed streams [n, H], and how to expand: [n, S], [n, S, S]."""
        flat = self.normed(streams.flatten(1)) @ self.w[f"{name}_fn"].T
        base, scale, eps = self.w[f"{name}_base"], self.w[f"{name}_scale"], self.c.hc_eps
        pre = sigmoid(flat[:, :STREAMS] * scale[0] + base[:STREAMS]) + eps
        post = 2 * sigmoid(flat[:, STREAMS : 2 * STREAMS] * scale[1] + base[STREAMS : 2 * STREAMS])
        comb = (flat[:, 2 * STREAMS :] * scale[2] + base[2 * STREAMS :]).view(-1, STREAMS, STREAMS).softmax(-1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.c.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return (pre[:, :, None] * streams).sum(1), post, comb

    def keys(self, x, positions, stage):
        name = f"mtp.{stage}.attn."
        return self.turned(self.normed(self.linear(x, name + "wkv"), name + "kv_norm.weight"), positions)

    def attention(self, x, context, anchor, stage):
        name, own = f"mtp.{stage}.attn.", torch.arange(anchor, anchor + len(x))
        keys = torch.cat([
            self.keys(context, torch.arange(anchor), stage)[max(anchor - WINDOW, 0) :], self.keys(x, own, stage),
        ])  # fmt: skip
        latent = self.normed(self.linear(x, name + "wq_a"), name + "q_norm.weight")
        query = self.turned(self.normed(self.linear(latent, name + "wq_b").view(len(x), HEADS, D)), own)
        weights = (torch.einsum("qhd,kd->qhk", query, keys) / D**0.5).exp()
        out = weights @ keys / (weights.sum(-1) + self.w[name + "attn_sink"].exp())[..., None]
        out = self.turned(out, own, way=-1).view(len(x), GROUPS, -1)
        grouped = torch.einsum("ngd,grd->ngr", out, self.w[name + "wo_a.weight"].view(GROUPS, O_RANK, -1))
        return self.linear(grouped.flatten(1), name + "wo_b")

    def expert(self, x, name):
        limit = self.c.swiglu_limit
        gate, up = self.linear(x, name + ".w1").clamp(max=limit), self.linear(x, name + ".w3").clamp(-limit, limit)
        return self.linear(silu(gate) * up, name + ".w2")

    def experts(self, x, stage):
        name, out = f"mtp.{stage}.ffn.", []
        scores = torch.nn.functional.softplus(self.linear(x, name + "gate")).sqrt()
        for token, own in zip(x, scores, strict=True):
            chosen = (own + self.w[name + "gate.bias"]).topk(self.c.num_experts_per_tok).indices.tolist()
            parts = [self.expert(token[None], f"{name}experts.{e}")[0] * own[e] / own[chosen].sum() for e in chosen]
            out.append(sum(parts) * self.c.routed_scaling_factor)
        return torch.stack(out) + self.expert(x, name + "shared_experts")

    @torch.no_grad()
    def block(self, text, slots=BLOCK):
        """Hidden states [slots, H], without a norm, of the block after a text whose last token is the anchor."""
        states, handles = {}, []
        for index in LAYERS:
            hook = self.target.model.layers[index].register_forward_hook(
                lambda module, args, out, index=index: states.update({index: out[0].mean(1).double()})
            )
            handles.append(hook)
        self.target(torch.tensor([text[:-1]]), use_cache=False)
        for handle in handles:
            handle.remove()
        context = self.normed(
            self.linear(torch.cat([states[i] for i in LAYERS], 1), "mtp.0.main_proj"), "mtp.0.main_norm.weight"
        )
        table, anchor = self.target.model.embed_tokens.weight.double(), len(text) - 1
        streams = table[[text[-1], *[NOISE] * (slots - 1)]][:, None].expand(-1, STREAMS, -1)
        for stage in range(STAGES):
            for part in ("attn", "ffn"):
                x, post, comb = self.mixes(streams, f"mtp.{stage}.hc_{part}")
                x = self.normed(x, f"mtp.{stage}.{part}_norm.weight")
                x = self.attention(x, context, anchor, stage) if part == "attn" else self.experts(x, stage)
                streams = post[:, :, None] * x[:, None] + torch.einsum("njk,njd->nkd", comb, streams)
        name = f"mtp.{STAGES - 1}.hc_head"
        mix = self.normed(streams.flatten(1)) @ self.w[f"{name}_fn"].T
        pre = sigmoid(mix * self.w[f"{name}_scale"] + self.w[f"{name}_base"]) + self.c.hc_eps
        return (pre[:, :, None] * streams).sum(1)

    @torch.no_grad()
    def logits(self, hidden, previous):
        """Logits [V] of a slot after the token `previous`, and the logit of its confidence."""
        last = f"mtp.{STAGES - 1}."
        latent = self.w[last + "markov_head.markov_w1.weight"][previous]
        logits = self.normed(hidden, last + "norm.weight") @ self.target.lm_head.weight.double().T
        confidence = self.w[last + "confidence_head.proj.weight"][0] @ torch.cat([hidden, latent])
        return logits + self.w[last + "markov_head.markov_w2.weight"] @ latent, confidence


def inputs(lengths=(15, 4)):
    ids = torch.randint(6, VOCAB, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_it_drafts_what_its_formula_says(target, tmp_path, shape):
    """Rounds accept none, some and all drafts; texts are longer than the window."""
    stored = tensors()
    config, slots = ({}, BLOCK) if shape == "chain" else ({"branching_factors": [2, 2, 1]}, 3)
    watched = Watched(target, {"method": "dflash", "model": write(tmp_path, target, stored), **config})
    watched.run(inputs(), 20)
    formula, blocks = Formula(target, stored), {}
    for text, path, logits in watched.records:
        if tuple(text) not in blocks:
            blocks[tuple(text)] = formula.block(text, slots)
        expected, _ = formula.logits(blocks[tuple(text)][len(path)], [text[-1], *path][-1])
        torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=1e-4)
    assert 0 in watched.accepted and max(watched.accepted) >= 3
    assert max(len(text) for text, _, _ in watched.records) > 2 * WINDOW


def test_confidence_ends_drafts(target, tmp_path):
    stored, threshold = tensors(), 0.3
    config = {"method": "dflash", "model": write(tmp_path, target, stored), "draft_confidence_threshold": threshold}
    watched = Watched(target, config)
    lengths = {}
    propose = watched.generator.propose

    def proposed(sequences, limits):
        trees = propose(sequences, limits)
        for row, seq in enumerate(sequences):
            drafted = trees.tokens[row, : trees.lengths[row]].tolist()
            lengths[tuple(seq.tokens)] = limits[row], drafted
        return trees

    watched.generator.propose = proposed
    watched.run(inputs((15,)), 20)
    formula = Formula(target, stored)
    for text, (limit, drafted) in lengths.items():
        block, survival, expected = formula.block(list(text)), 1.0, 0
        for slot, previous in enumerate([text[-1], *drafted][:limit]):
            survival *= float(sigmoid(formula.logits(block[slot], previous)[1]))
            if survival < threshold:
                break
            expected += 1
        assert len(drafted) == expected
    assert len({len(drafted) for _, drafted in lengths.values()}) > 1


def test_its_linear_layers_are_quantized_and_the_targets_are_not(target, tmp_path):
    pytest.importorskip("torchao")
    config = {"method": "dflash", "model": write(tmp_path, target, tensors())}
    quantized, plain = (Watched(target, {**config, **more}).generator for more in ({"quantization": "wint8"}, {}))
    of_stage, of_target = quantized.block.module.layers[0].self_attn.q_b_proj.weight, target.lm_head.weight
    assert [type(weight) is torch.nn.Parameter for weight in (of_stage, of_target)] == [False, True]
    assert type(plain.block.module.layers[0].self_attn.q_b_proj.weight) is torch.nn.Parameter


def test_published_weights_are_quantized(target, tmp_path):
    """Experts in float4 with a factor for 32 columns, other matrices in float8 with one for each block, factors in e8m0."""
    codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    plain, stored = tensors(), {}
    for name, value in plain.items():
        if not name.endswith(("w1.weight", "w3.weight", "wq_a.weight")):
            stored[name] = value
            continue
        scale, module = torch.full((1, 1), 0.25), name.removesuffix("weight")
        if "experts" in name and "shared" not in name:
            index = ((value.abs() / 0.25)[..., None] - codes).abs().argmin(-1)
            plain[name] = codes[index] * value.sign() * 0.25
            nibbles = (index + 8 * (value < 0)).to(torch.uint8)
            stored[name] = (nibbles[:, ::2] + 16 * nibbles[:, 1::2]).view(torch.int8)
            scale = torch.full((len(value), -(-value.shape[1] // 32)), 0.25)
        else:
            stored[name] = (value / 0.25).to(torch.float8_e4m3fn)
            plain[name] = stored[name].float() * 0.25
        stored[f"{module}scale"] = scale.to(torch.float8_e8m0fnu)
    (tmp_path / "plain").mkdir()
    (tmp_path / "stored").mkdir()
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    records = []
    for folder, own, config in (("plain", plain, {}), ("stored", stored, {"quantization_config": quantization})):
        watched = Watched(target, {"method": "dflash", "model": write(tmp_path / folder, target, own, **config)})
        watched.run(inputs((15,)), 8)
        records.append(watched.records)
    assert records[0]
    for (_, _, one), (_, _, other) in zip(*records, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


# case → keys of config.json, tensors that are added or (None) removed, message
BAD = {
    "DeepSeek-V4.1": ({"dspark_n_routed_experts": 128}, {}, "dspark_n_routed_experts = 128, which DeepSeek-V4's DSpark does not have"),
    "no block": ({"dspark_block_size": None}, {}, "needs an integer of at least 1 as dspark_block_size"),
    "another target": ({"dspark_target_layer_ids": [40]}, {}, r"reads layers \[40\] of its target, which has 3"),
    "a stage is missing": ({}, {"mtp.3.attn.wkv.weight": torch.zeros(D, H)}, "tensors of stage 3 and none of stage 2"),
    "names of V4.1": (
        {}, {"mtp.1.markov_head.markov_w1.weight": None, "mtp.1.markov_head.embed": torch.zeros(VOCAB, RANK)},
        "missing markov_head.markov_w1.weight; unused mtp.1.markov_head.embed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_no_published_file_has_is_refused(target, tmp_path, case):
    config, changes, message = BAD[case]
    stored = {name: value for name, value in {**tensors(), **changes}.items() if value is not None}
    folder = write(tmp_path, target, stored, **config)
    with pytest.raises(CheckpointError, match=message):
        target.generate(**inputs(), max_new_tokens=2, speculative_config={"model": folder})
