"""DFlash, DSpark and Domino checkpoints with random weights, and what they compute, written plainly in float64."""

import copy
import json
import os
from dataclasses import dataclass

import torch
from safetensors.torch import save_file
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdec.candidate_generators import parse_config
from hf_specdec.integration import get_decoder

MASK, THETA, EPS = 5, 700.0, 1e-5


@dataclass
class Made:
    """A checkpoint on disk: its folder, the options it was made with, and its tensors in float64."""

    folder: str
    options: dict
    weights: dict


def make(folder, target, style="own", head=None, seed=0, **options):
    """Write a checkpoint for a target. Styles: "own" (z-lab, SpecForge), "speculators". Heads: "dspark", "domino", "dflash2" or none."""
    o = {
        "layers": 2, "block": 6, "taps": (1, 2), "bias": False, "layer_types": None, "window": None, "causal": False,
        "block_inside": False, "non_causal_window": False, "from_anchor": head in ("dspark", "domino"), "draft_ids": None,
        "own_embeddings": False, "own_head": False, "rank": 6, "markov": "vanilla", "confidence": True,
        "confidence_markov": True, "pure": 1, "prefix": "", "heads": (4, 2, 8), "extra": {}, "name_taps": True,
        "conv_group": 8, "taps_of_conv": 2, "top_k": 5,
        "embedding_scale": 1.0, "multiplier": 1.0, "softcap": None, "eps": EPS, "theta": THETA, "stretch": 1.0, "mask": MASK,
        "gemma": False, "shared_values": True, "rotated": 1.0, "sinks": False, "value_scale": 1.0, "mask_row": None,
        "kind": None, "target_keys": True, "head_rows": False,
    } | options  # fmt: skip
    assert not set(options) - set(o), options
    h, v = target.config.hidden_size, target.config.vocab_size
    heads, kv_heads, d = o["heads"]
    vd = v if o["draft_ids"] is None else len(o["draft_ids"])
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape, scale=0.3):
        return scale * torch.randn(*shape, generator=generator)

    is_flare = o["kind"] == "dflare"
    w = {"norm.weight": 1 + rand(h)}
    if is_flare:
        w["fusion_weights"] = rand(o["layers"], len(o["taps"]), scale=2)
        w |= {f"fusion_norms.{i}.weight": 1 + rand(h) for i in range(o["layers"])}
    else:
        w |= {"fc.weight": rand(h, len(o["taps"]) * h), "hidden_norm.weight": 1 + rand(h)}
    for i in range(o["layers"]):
        sizes = {
            "q_proj": (heads * d, h),
            "k_proj": (kv_heads * d, h),
            "v_proj": (kv_heads * d, h),
            "o_proj": (h, heads * d),
        }
        if is_flare and o["target_keys"]:
            sizes |= {"k_proj_target": (kv_heads * d, h), "v_proj_target": (kv_heads * d, h)}
        for name, shape in sizes.items():
            w[f"layers.{i}.self_attn.{name}.weight"] = rand(*shape)
            if o["bias"]:
                w[f"layers.{i}.self_attn.{name}.bias"] = rand(shape[0])
        for name in ("q", "k"):
            w[f"layers.{i}.self_attn.{name}_norm.weight"] = 1 + rand(d)
        for name, shape in {"gate": (48, h), "up": (48, h), "down": (h, 48)}.items():
            w[f"layers.{i}.mlp.{name}_proj.weight"] = rand(*shape)
        if o["sinks"]:
            w[f"layers.{i}.self_attn.attention_sink_bias"] = rand(heads, scale=2)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if o["gemma"]:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            w[f"layers.{i}.layer_scalar"] = 1 + rand(1)
            if o["shared_values"]:
                del w[f"layers.{i}.self_attn.v_proj.weight"]
        for name in norms:
            w[f"layers.{i}.{name}.weight"] = 1 + rand(h)
    if o["own_embeddings"]:
        w["embed_tokens.weight"] = rand(v, h)
    if o["own_head"] or (o["draft_ids"] is not None and not o["head_rows"]):
        w["lm_head.weight"] = rand(vd, h)
    if o["draft_ids"] is not None:
        ids = torch.tensor(o["draft_ids"])
        w["d2t"] = ids - torch.arange(vd)
        w["t2d"] = torch.zeros(v, dtype=torch.bool).index_fill_(0, ids, True)
    p = o["prefix"]
    if head == "dspark":
        r = o["rank"]
        if r:
            w |= {
                p + "markov_head.markov_w1.weight": rand(v, r, scale=1),
                p + "markov_head.markov_w2.weight": rand(vd, r, scale=1),
            }
        if r and o["markov"] == "gated":
            w |= {p + "markov_head.gate_proj.weight": rand(r, h + r), p + "markov_head.gate_proj.bias": rand(r)}
        if r and o["markov"] == "rnn":
            w |= {
                p + "markov_head.joint_proj.weight": rand(3 * r, 2 * r + h),
                p + "markov_head.joint_proj.bias": rand(3 * r),
            }
        if o["confidence"]:
            size = h + (r if o["confidence_markov"] else 0)
            w |= {p + "confidence_head.proj.weight": rand(1, size), p + "confidence_head.proj.bias": rand(1)}
    if head == "domino":
        w |= {
            p + "prefix_gru.weight_ih_l0": rand(3 * 10, h), p + "prefix_gru.weight_hh_l0": rand(3 * 10, 10),
            p + "embed_proj.0.weight": rand(7, h + 10), p + "embed_proj.2.weight": rand(v, 7, scale=1),
        }  # fmt: skip
    if head == "dflash2":
        for i in range(o["layers"]):
            for name in ("attention_conv", "mlp_conv"):
                taps = o["taps_of_conv"]
                w[f"layers.{i}.{name}.base_kernel"] = rand(2, taps, h, scale=0.5)
                w[f"layers.{i}.{name}.kernel_projection.weight"] = rand(2 * taps * (h // o["conv_group"]), h, scale=0.1)
        for name in ("predecessor", "successor"):
            w[f"candidate_selector.{name}_codebook"] = rand(v, o["rank"], scale=1)
        w["candidate_selector.hidden_projection.weight"] = rand(o["rank"], h)
    second = {
        "conv_kernel_size": o["taps_of_conv"], "conv_group_size": o["conv_group"], "selector_rank": o["rank"],
        "selector_top_k": o["top_k"],
    }  # fmt: skip
    layer_keys = {
        "model_type": "qwen3", "hidden_size": h, "intermediate_size": 48, "num_hidden_layers": o["layers"],
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": d, "hidden_act": "silu", "vocab_size": v,
        "rms_norm_eps": EPS, "rope_theta": THETA, "attention_bias": o["bias"], "max_position_embeddings": 512,
        "layer_types": o["layer_types"] or ["full_attention"] * o["layers"],
        "use_sliding_window": o["window"] is not None, "sliding_window": o["window"],
        **({"partial_rotary_factor": o["rotated"]} if o["rotated"] < 1 else {}),
    }  # fmt: skip
    spark = {
        "markov_rank": o["rank"], "markov_head_type": o["markov"], "enable_confidence_head": o["confidence"],
        "confidence_head_with_markov": o["confidence_markov"],
    }  # fmt: skip
    if o["gemma"]:  # DeepSpec's: the target's configuration, with the drafter's keys at the top level
        config = gemma_config(target, heads, kv_heads, d, o) | {
            "architectures": ["Gemma4DSparkModel"], "block_size": o["block"], "mask_token_id": MASK, "num_anchors": 512,
            "target_layer_ids": [i - 1 for i in o["taps"]], "num_target_layers": target.config.num_hidden_layers,
            **({key: value for key, value in spark.items() if value} if head else {"markov_rank": 0, "enable_confidence_head": False}),
        }  # fmt: skip
    elif style == "own":
        own = {"mask_token_id": MASK}
        if o["name_taps"]:
            own["target_layer_ids"] = [i - 1 for i in o["taps"]]
        if o["causal"]:
            own["causal"] = True
        if head == "dspark":
            own |= spark | {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
        if head == "domino":
            own |= {"projector_type": "domino", "emb_dim": 7, "gru_hidden_dim": 10, "pure_draft_prefix_len": o["pure"]}
            own |= {"shift_label": o["from_anchor"]}
        if head == "dflash2":
            own |= second
        name = {None: "DFlash", "dspark": "DSpark", "domino": "Domino", "dflash2": "DFlash2"}[head]
        config = layer_keys | {
            "architectures": [f"{name}DraftModel"], "auto_map": {"AutoModel": f"{name.lower()}.{name}DraftModel"},
            "num_target_layers": target.config.num_hidden_layers, "dflash_config": own, "dtype": "float32",
        }  # fmt: skip
        (own if o["block_inside"] else config)["block_size"] = o["block"]
    else:
        kind = o["kind"] or ("dflash" if head in (None, "domino") else head)
        names = {
            "dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator", "dflash2": "DFlash2DraftModel", "dflare": "DFlareSpeculator",
            "pard2": "Pard2DraftModel",
        }  # fmt: skip
        config = {
            "speculators_model_type": kind, "speculators_version": "0.9.0", "draft_vocab_size": vd, "block_size": o["block"],
            "architectures": [names[kind]],
            "aux_hidden_state_layer_ids": list(o["taps"]), "mask_token_id": MASK, "tie_word_embeddings": False,
            "sample_from_anchor": o["from_anchor"], "sliding_window_non_causal": o["non_causal_window"],
            "transformer_layer_config": layer_keys, "dtype": "float32",
            "speculators_config": {
                "algorithm": kind, "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": o["block"] - (not o["from_anchor"])}],
                "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
            },
        }  # fmt: skip
        domino = {
            "projector_type": "domino", "emb_dim": 7, "gru_hidden_dim": 10, "pure_draft_prefix_len": o["pure"], "lambda_base_start": 1.0,
            "lambda_base_decay_ratio": 1.0, "auf": False, "shift_label": None,
        }  # fmt: skip
        config |= {"dspark": spark, "dflash2": second, "domino": domino}.get(head, {})
        flare = {
            "use_heterogeneous_kv": o["target_keys"],
            "progressive_gamma": True,
            "gamma_start": 4.5,
            "gamma_max": 10.5,
        }
        config |= {
            "dflare": flare, "pard2": {"ce_alpha": 0.1, "kd_alpha": 1.0, "kd_temperature": 1.0, "target_feat_dropout": 0.1},
        }.get(o["kind"], {})  # fmt: skip
    os.makedirs(folder, exist_ok=True)
    save_file({k: t.contiguous() for k, t in w.items()}, os.path.join(folder, "model.safetensors"))
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(config | o["extra"], f)
    plain = {k.removeprefix(p) if p else k: t.double() if t.is_floating_point() else t for k, t in w.items()}
    return Made(str(folder), o | {"style": style, "head": head}, plain)


def gemma_config(target, heads, kv_heads, width, options):
    """The keys of Gemma 4's layers; those of the target's sliding layers, and of what drafters have not, differ."""
    global_kv, local_kv = (kv_heads, 2 * kv_heads) if options["shared_values"] else (None, kv_heads)
    return {
        "model_type": "gemma4_text", "hidden_size": target.config.hidden_size, "intermediate_size": 48, "head_dim": width // 2,
        "global_head_dim": width, "num_attention_heads": heads, "num_key_value_heads": local_kv, "num_global_key_value_heads": global_kv,
        "num_hidden_layers": options["layers"], "layer_types": ["full_attention"] * options["layers"], "sliding_window": 4,
        "attention_k_eq_v": options["shared_values"], "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": EPS,
        "vocab_size": target.config.vocab_size, "max_position_embeddings": 512, "final_logit_softcapping": options["softcap"],
        "target_model_type": "gemma4", "target_text_model_type": "gemma4_text", "enable_moe_block": False,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "attention_bias": False,
        "vocab_size_per_layer_input": 9, "use_bidirectional_attention": "vision", "tie_word_embeddings": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": THETA},
        },
    }  # fmt: skip


def gelu_tanh(x):
    return x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


class Reference:
    """The drafter's formulas, one sequence at a time, from the whole text each time, in float64."""

    def __init__(self, target, made):
        self.w, self.o, self.known = made.weights, made.options, {}
        self.target = copy.deepcopy(target).double()
        self.embeddings = self.w.get("embed_tokens.weight", self.target.get_input_embeddings().weight.detach())
        head = self.target.get_output_embeddings().weight.detach()
        self.head = self.w.get("lm_head.weight", head[made.options["draft_ids"]] if made.options["head_rows"] else head)

    def norm(self, x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + self.o["eps"]).sqrt() * self.w[name + ".weight"]

    def linear(self, x, name):
        return x @ self.w[name + ".weight"].T + self.w.get(name + ".bias", 0)

    def rotate(self, x, positions):
        """x [n, heads, d]: pairs (i, i + d/2) turned by position / THETA ** (2 i / d), of the dimensions that are rotated."""
        d = int(x.shape[2] * self.o["rotated"])
        x, still = x[..., :d], x[..., d:]
        angle = (
            positions[:, None].double() / self.o["theta"] ** (torch.arange(0, d, 2).double() / d) / self.o["stretch"]
        )
        if self.o["gemma"]:
            angle[:, int(0.25 * d // 2) :] = 0
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, still], dim=-1)

    def convolved(self, u, kernels, side):
        """Each slot's values [slots, H] mixed with those of the slots before it, channel by channel; `kernels`: see `kernels`."""
        if kernels is None:
            return u
        out = torch.zeros_like(u)
        for slot in range(len(u)):
            for tap in range(min(kernels.shape[2], slot + 1)):
                out[slot] += kernels[slot, side, tap] * u[slot - tap]
        return out

    def kernels(self, x, name):
        """[slots, 2, taps, H] of a sublayer's convolutions, from its input; None if it has none."""
        base = self.w.get(f"{name}.base_kernel")
        if base is None:
            return None
        delta = self.linear(x, f"{name}.kernel_projection").view(len(x), 2, base.shape[1], -1)
        group = self.o["conv_group"]
        return torch.stack([base[:, :, c] + delta[:, :, :, c // group] for c in range(base.shape[2])], dim=-1)

    @torch.no_grad()
    def context(self, text):
        """[n - 1, H]: what the drafter reads of all tokens but the last; [layers, n - 1, H] if a layer has its weighted sum."""
        states = self.known.get(tuple(text))
        if states is None:
            states = self.target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
            self.known[tuple(text)] = states
        read = [states[i][0] for i in self.o["taps"]]
        if self.o["kind"] == "dflare":
            sums = []
            for i in range(self.o["layers"]):
                exp = self.w["fusion_weights"][i].exp()
                total = sum(a * x for a, x in zip(exp / exp.sum(), read, strict=True))
                sums.append(self.norm(total, f"fusion_norms.{i}"))
            return torch.stack(sums)
        features = torch.cat(read, dim=-1)
        return self.norm(self.linear(features, "fc"), "hidden_norm")

    def keys_values(self, x, layer, positions, of_context=True):
        d, p = self.o["heads"][2], f"layers.{layer}.self_attn."
        x = x[layer] if x.dim() == 3 else x
        end = "_proj_target" if of_context and p + "k_proj_target.weight" in self.w else "_proj"
        keys = self.linear(x, f"{p}k{end}").view(len(x), -1, d)
        values = self.linear(x, f"{p}v{end}").view(len(x), -1, d) if p + "v_proj.weight" in self.w else keys
        if self.o["gemma"]:
            values = values / (values.pow(2).mean(-1, keepdim=True) + self.o["eps"]).sqrt()
        return self.rotate(self.norm(keys, p + "k_norm"), positions), values

    def sees(self, layer, query, key, anchor):
        """Whether slot `query` sees `key`; both are positions, those from the anchor on are the block's."""
        kinds = self.o["layer_types"] or ["full_attention"] * self.o["layers"]
        sliding = kinds[layer] == "sliding_attention"
        if key >= anchor:
            causal = (not self.o["non_causal_window"]) if sliding else self.o["causal"]
            return key <= query or not causal
        if not sliding:
            return True
        if self.o["style"] == "speculators":
            return key >= anchor - self.o["window"]
        return query - key < self.o["window"]

    def block(self, text, slots):
        """Final hidden states [slots, H] of the block behind a text."""
        (heads, kv_heads, d), gemma = self.o["heads"], self.o["gemma"]
        context, anchor = self.context(text), len(text) - 1
        x = self.embeddings[torch.tensor([text[-1]] + [self.o["mask"]] * (slots - 1))] * self.o["embedding_scale"]
        if self.o["mask_row"] is not None:
            x[1:] = self.o["mask_row"] * self.o["embedding_scale"]
        positions = torch.arange(anchor, anchor + slots)
        for i in range(self.o["layers"]):
            y, p = self.norm(x, f"layers.{i}.input_layernorm"), f"layers.{i}.self_attn."
            mixed = self.kernels(y, f"layers.{i}.attention_conv")
            y = self.convolved(y, mixed, 0)
            old_k, old_v = self.keys_values(context, i, torch.arange(anchor))
            new_k, new_v = self.keys_values(y, i, positions, of_context=False)
            k, v = torch.cat([old_k, new_k]), torch.cat([old_v, new_v])
            q = self.rotate(self.norm(self.linear(y, p + "q_proj").view(slots, heads, d), p + "q_norm"), positions)
            out = torch.zeros(slots, heads, d).double()
            for s in range(slots):
                seen = [j for j in range(len(k)) if self.sees(i, anchor + s, j, anchor)]
                for a in range(heads):
                    b = a // (heads // kv_heads)
                    scores = k[seen, b] @ q[s, a] / (1 if gemma else d**0.5)
                    sink = self.w[p + "attention_sink_bias"][a].exp() if self.o["sinks"] else 0
                    weights = scores.exp() / (scores.exp().sum() + sink)
                    out[s, a] = weights @ v[seen, b] * self.o["value_scale"]
            y = self.linear(out.flatten(1), p + "o_proj")
            y = self.norm(y, f"layers.{i}.post_attention_layernorm") if gemma else y
            x = x + self.convolved(y, mixed, 1)
            before = "pre_feedforward" if gemma else "post_attention"
            y, p = self.norm(x, f"layers.{i}.{before}_layernorm"), f"layers.{i}.mlp."
            mixed = self.kernels(y, f"layers.{i}.mlp_conv")
            y = self.convolved(y, mixed, 0)
            gate = self.linear(y, p + "gate_proj")
            act = gelu_tanh(gate) if gemma else gate * torch.sigmoid(gate)
            y = self.linear(act * self.linear(y, p + "up_proj"), p + "down_proj")
            y = self.norm(y, f"layers.{i}.post_feedforward_layernorm") if gemma else y
            x = x + self.convolved(y, mixed, 1)
            x = x * self.w[f"layers.{i}.layer_scalar"] if gemma else x
        return self.norm(x, "norm")

    def logits(self, block, text, path):
        """Logits [Vd] of what follows `path` behind the text, given `block(text, ..)`; and the confidence there, if any."""
        o, w = self.o, self.w
        first, depth = (0 if o["from_anchor"] else 1), len(path) + 1
        hidden, before = block[first + depth - 1], [text[-1], *path]
        logits, cap = o["multiplier"] * hidden @ self.head.T, o["softcap"]
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        previous = before[-1]
        if o["head"] == "dflash2":
            chosen = sorted(range(len(logits)), key=lambda b: -float(logits[b]))[: o["top_k"]]
            a, p = (
                w["candidate_selector.predecessor_codebook"][previous],
                self.linear(hidden, "candidate_selector.hidden_projection"),
            )
            pairs = {
                b: float(logits[b]) + float((a * p * w["candidate_selector.successor_codebook"][b]).sum())
                for b in chosen
            }
            logits = torch.tensor([pairs.get(b, float("-inf")) for b in range(len(logits))], dtype=torch.float64)
        if o["head"] == "dspark" and o["rank"]:
            e = w["markov_head.markov_w1.weight"]
            latent = e[previous]
            if o["markov"] == "gated":
                latent = latent * torch.sigmoid(self.linear(torch.cat([hidden, latent]), "markov_head.gate_proj"))
            if o["markov"] == "rnn":
                steps = [(first + i, token) for i, token in enumerate(before)]
                if first and o["style"] == "speculators":
                    steps.insert(0, (0, text[-1]))
                state = torch.zeros(o["rank"]).double()
                for slot, token in steps:
                    z = self.linear(torch.cat([state, e[token], block[slot]]), "markov_head.joint_proj")
                    g, c, latent = z.split(o["rank"])
                    state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
                latent = torch.tanh(latent)
            logits = logits + w["markov_head.markov_w2.weight"] @ latent
        if o["head"] == "domino" and depth > o["pure"]:
            state = torch.zeros(10).double()
            for token in before:
                i_r, i_z, i_n = (
                    w["prefix_gru.weight_ih_l0"] @ self.embeddings[token] * self.o["embedding_scale"]
                ).split(10)
                h_r, h_z, h_n = (w["prefix_gru.weight_hh_l0"] @ state).split(10)
                z = torch.sigmoid(i_z + h_z)
                state = (1 - z) * torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n) + z * state
            y = w["embed_proj.0.weight"] @ torch.cat([hidden, state])
            logits = logits + w["embed_proj.2.weight"] @ (y * torch.sigmoid(y))
        confidence = None
        if o["head"] == "dspark" and o["confidence"]:
            read = (
                torch.cat([hidden, w["markov_head.markov_w1.weight"][previous]]) if o["confidence_markov"] else hidden
            )
            confidence = torch.sigmoid(self.linear(read, "confidence_head.proj"))[0]
        return logits, confidence


_CHOICES = []  # of each `Forced`: a processor that is seen to hold what changes is taken to keep state, and gets no drafts


class Forced(LogitsProcessor):
    """Makes the target's choice at some prefixes, so that tests decide how much of a draft is accepted."""

    def __init__(self):
        self.number = len(_CHOICES)
        _CHOICES.append({})

    @property
    def choices(self):
        """By prefix."""
        return _CHOICES[self.number]

    def __call__(self, input_ids, scores):
        for row, ids in enumerate(input_ids.tolist()):
            while ids and ids[0] == 0:
                ids = ids[1:]
            choice = self.choices.get(tuple(ids))
            if choice is not None:
                scores[row] = float("-inf")
                scores[row, choice] = 0.0
        return scores


class Watched:
    """A generation whose drafts are accepted to the extent the test says, and whose every draft logit is recorded.

    Attributes:
        records: (text, path, logits [Vd]) of every node that was drafted from.
        accepted: how many drafted tokens each row of each round accepted.
        rounds: called with the generator and its sequences after each text was read.
    """

    def __init__(self, target, config, on_read=None):
        self.target, self.config = target, config
        self.generator = get_decoder(target, parse_config(config)).generator
        self.records, self.accepted, self.turn, self.forced = [], [], 0, Forced()
        generator, on_read = self.generator, on_read or (lambda generator, sequences: None)
        propose, root, expand, observe = (
            generator.propose, generator.root_logits, generator.expand, generator.observe,
        )  # fmt: skip

        def watched_root(sequences, limits):
            logits = root(sequences, limits)
            on_read(generator, sequences)
            for seq, own in zip(sequences, logits, strict=True):
                self.records.append((list(seq.tokens), [], own.clone()))
            return logits

        def watched_expand(level):
            logits = expand(level)
            paths = {}
            for at, row in enumerate(level.rows):
                before = self.paths.get(row, [[]])
                pairs = zip(level.parents[at].tolist(), level.tokens[at].tolist(), strict=True)
                paths[row] = [[*before[parent], token] for parent, token in pairs]
                for node, path in enumerate(paths[row]):
                    own = logits[at, node if logits.shape[1] > 1 else 0]
                    self.records.append((list(self.sequences[row].tokens), path, own.clone()))
            self.paths = paths
            return logits

        def watched_propose(sequences, limits):
            self.sequences, self.paths = sequences, {}
            trees = propose(sequences, limits)
            for row, seq in enumerate(sequences):
                self._choose(seq.tokens, trees, row)
            return trees

        def watched_observe(outcome):
            self.accepted += [len(path) for path in outcome.accepted]
            observe(outcome)

        generator.propose, generator.root_logits = watched_propose, watched_root
        generator.expand, generator.observe = watched_expand, watched_observe

    def _choose(self, text, trees, row):
        """Force the target along some path of the draft, one token more each time, and off the tree behind it."""
        tokens = trees.tokens[row, : trees.lengths[row]].tolist()
        parents = list(range(-1, len(tokens) - 1)) if trees.parents is None else trees.parents[row].tolist()
        node, path, wanted = -1, [], self.turn % 9
        self.turn += 4
        while True:
            children = [i for i in range(len(tokens)) if parents[i] == node]
            if not children or len(path) == wanted:
                taken = {tokens[i] for i in children}
                other = next(t for t in range(7 + self.turn % 11, 60) if t not in taken)
                self.forced.choices[tuple(text + path)] = other
                return
            node = children[self.turn % len(children)]
            self.forced.choices[tuple(text + path)] = tokens[node]
            path.append(tokens[node])

    def run(self, inputs, max_new_tokens=24):
        """Generate greedily under the forced choices."""
        self.target.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, speculative_config=self.config,
            logits_processor=LogitsProcessorList([self.forced]),
        )  # fmt: skip


def compare(target, made, config, inputs, slots, tolerance=1e-4, max_new_tokens=24):
    """Run a watched generation; compare every draft logit, and the cache after every reading, with the reference.

    Returns: how many drafted tokens were accepted, per row and round.
    """
    reference, contexts = Reference(target, made), {}

    def check_cache(generator, sequences):
        for seq in sequences:
            context = contexts.setdefault(tuple(seq.tokens), reference.context(seq.tokens))
            for layer in range(made.options["layers"]):
                got = generator.cache.read(seq.id)[layer]
                expected = reference.keys_values(context, layer, torch.arange(context.shape[-2]))
                for a, b in zip(got, expected, strict=True):
                    if made.options["rotated"] < 1:  # keys are kept in another order of dimensions
                        a, b = a.sort().values, b.sort().values
                    torch.testing.assert_close(a.double(), b, atol=tolerance, rtol=tolerance)

    watched = Watched(target, {"method": "dflash", "model": made.folder, **config}, check_cache)
    watched.run(inputs, max_new_tokens)
    blocks = {}
    assert watched.records
    for text, path, logits in watched.records:
        if tuple(text) not in blocks:
            blocks[tuple(text)] = reference.block(text, slots)
        expected, _ = reference.logits(blocks[tuple(text)], text, path)
        torch.testing.assert_close(logits.double(), expected, atol=tolerance, rtol=tolerance)
    return watched.accepted
