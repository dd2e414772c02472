"""MTP modules in training: the unrolled loss by plain loops over the KV a real decode has, the folder, and what is drafted."""

import json

import families
import pytest
import torch
from helpers_trained_drafts import batch_of, check_drafts, export
from helpers_training import qa_rows, target, train, trainer, word_tokenizer, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import ragged, tiny_llama
from safetensors.torch import load_file

from hf_specdec import parse_config
from hf_specdec.training.mtp import steps_mask
from hf_specdec.training.target import TargetModel

STEPS = 3


class PlainDrafter:
    """One module decoding a text: a list of keys and values that grows by what is read, and is cut back to what was true."""

    def __init__(self, made, batch, row):
        self.w = {name: value.double() for name, value in made.head.state_dict().items()}
        self.embeddings = made.target.embed_tokens.weight.double()
        self.head = made.target.lm_head.weight.double()
        self.tokens = batch.input_ids[row].tolist()
        self.states = batch.last_hidden[row].double()
        self.keys_values = []

    def read(self, token, feature, position):
        """The module's output after its norm; its key and value are kept."""
        w, heads, kv_heads, d = self.w, 4, 2, 8

        def rms(x, name):
            return x / torch.sqrt((x * x).mean() + 1e-6) * w[name + ".weight"]

        def turned(x):
            angles = position * 10000.0 ** (-torch.arange(0, d, 2).double() / d)
            a, b = x[:, : d // 2], x[:, d // 2 :]
            return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

        pair = torch.cat([rms(self.embeddings[token], "enorm"), rms(feature, "hnorm")])
        x = w["eh_proj.weight"] @ pair
        y = rms(x, "layer.input_layernorm")
        q, k, v = ((w[f"layer.self_attn.{part}_proj.weight"] @ y).view(-1, d) for part in "qkv")
        self.keys_values.append((turned(k), v))
        q, joined = turned(q), []
        for head in range(heads):
            own = head // (heads // kv_heads)
            share = torch.softmax(torch.stack([q[head] @ key[own] for key, _ in self.keys_values]) / d**0.5, 0)
            joined.append(sum(s * value[own] for s, (_, value) in zip(share, self.keys_values, strict=True)))
        x = x + w["layer.self_attn.o_proj.weight"] @ torch.cat(joined)
        y = rms(x, "layer.post_attention_layernorm")
        gate = w["layer.mlp.gate_proj.weight"] @ y
        x = x + w["layer.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * (w["layer.mlp.up_proj.weight"] @ y))
        return rms(x, "norm")

    def log_probs(self, length):
        """{(t, k): log q [V]} of guess k at every t, as drafts of STEPS tokens that all turn out to be the text's."""
        out = {}
        for t in range(length - 1):
            state = self.read(self.tokens[t + 1], self.states[t], t)
            kept = len(self.keys_values)
            for k in range(STEPS):
                logits = self.head @ state
                out[t, k] = logits - torch.logsumexp(logits, 0)
                if t + 2 + k >= length:
                    break
                state = self.read(self.tokens[t + 2 + k], state, t + 1 + k)
            del self.keys_values[kept:]  # a round's drafts are overwritten by the next
        return out


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_loss_is_that_of_plain_loops(loss):
    model = target()
    made = trainer("mtp", model, num_steps=STEPS, num_draft_tokens=STEPS, loss=loss, step_decay=0.6)
    batch = batch_of(made, [list(range(7, 20)), list(range(30, 37))], prompt=3)
    weights = [1 / 1.96, 0.6 / 1.96, 0.36 / 1.96]
    total, count, right = 0.0, 0, [0] * STEPS
    guessed = {}
    for row, length in enumerate([13, 7]):
        plain = PlainDrafter(made, batch, row)
        for (t, k), q in plain.log_probs(length).items():
            guessed[row, t + 1, k] = int(q.argmax())
            if t + 2 + k >= length or t + 2 + k < 3:
                continue
            label = plain.tokens[t + 2 + k]
            p = torch.log_softmax(plain.head @ plain.states[t + 1 + k], 0)
            total += weights[k] * (float((p.exp() * (p - q)).sum()) if loss == "kl" else -float(q[label]))
            count += k == 0
            right[k] += int(q.argmax()) == (int(p.argmax()) if loss == "kl" else label)
    out = made.loss(batch)
    assert float(out.loss.detach()) == pytest.approx(total, rel=1e-4)
    assert float(out.weight) == count
    assert [float(out.metrics[f"accuracy_{k + 1}"][0]) for k in range(STEPS)] == right
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.head.parameters())
    with torch.no_grad():
        guesses = made.guesses(batch)
    guessed = {(row, anchor, k): token for (row, anchor, k), token in guessed.items() if 2 <= anchor < (12, 6)[row]}
    places = zip(guesses.rows.tolist(), guesses.anchors.tolist(), guesses.tokens.tolist(), strict=True)
    told = {(row, anchor, k): token for row, anchor, tokens in places for k, token in enumerate(tokens)}
    assert {key: told[key] for key in guessed} == guessed


def test_both_attentions_are_one():
    """Under masks, as layers with windows or soft caps are run, the unroll is what the fast attention makes of it."""
    model = target()
    made = trainer("mtp", model, num_steps=4)
    assert made.is_plain
    batch = batch_of(made, [list(range(7, 30)), list(range(30, 37))], prompt=3)
    found = []
    for plain, attention in ((True, "hf_specdec_unrolled"), (False, "sdpa"), (False, "eager")):
        made.is_plain, made.head.config._attn_implementation = plain, attention
        made.head.zero_grad()
        out = made.loss(batch)
        out.loss.backward()
        found.append([out.loss.detach(), *(p.grad.clone() for p in made.head.parameters())])
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, atol=1e-4, rtol=1e-4)


@given(st.integers(1, 9), st.integers(0, 4), st.none() | st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_mask_is_the_cache_of_a_decode(length, step, window):
    """A draft from t: the text's rows 0 .. t are read, then a row per step, each behind the one before."""
    mask = steps_mask(length, step, window, torch.device("cpu"))
    for t in range(length):
        cache = [(0, row, row) for row in range(t + 1)] + [(j, t, t + j) for j in range(1, step + 1)]
        position = t + step
        seen = {(j, row) for j, row, at in cache if window is None or position - at < window}
        assert {(int(i) // length, int(i) % length) for i in mask[t].nonzero()} == seen


def logits_of(made):
    def at(batch, rows, anchors, step):
        return made.head.logits(made.unrolled(batch, step + 1)[step])[rows, anchors - 1]

    return at


@pytest.mark.parametrize("form", ["original", "speculators"])
def test_drafts_are_the_trained_modules(tmp_path, form):
    made = trainer("mtp", target(), num_steps=STEPS, num_draft_tokens=4)
    folder = export(made, tmp_path / "head", form)
    check_drafts(made, folder, ragged([6, 11, 3]), logits_of(made), length=4 if form == "original" else None)
    names, config = set(load_file(folder / "model.safetensors")), json.loads((folder / "config.json").read_text())
    if form == "original":
        assert {"model.layers.3.eh_proj.weight", "model.layers.3.shared_head.norm.weight"} < names
        assert {"model.layers.3.self_attn.q_proj.weight", "model.layers.3.enorm.weight"} < names
        assert (config["num_nextn_predict_layers"], config["num_hidden_layers"]) == (1, 3)
    else:
        assert {"mtp_layers.0.input_proj.weight", "mtp_layers.0.final_layernorm.weight"} < names
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
        assert config["transformer_layer_config"]["num_hidden_layers"] == 1


@pytest.mark.parametrize("family", ["Mistral", "Qwen3-MoE", "Gemma2", "DeepSeek-V3", "Granite"])
def test_layers_of_other_families(tmp_path, family):
    """Windows, experts, soft-capped and latent attention, scaled embeddings: drafts are the trained module's there too."""
    base = families.make(family)
    if family == "Gemma2":  # its sdpa leaves the soft caps out
        base.set_attn_implementation("eager")
    model = TargetModel(base, word_tokenizer(), family)
    made = trainer("mtp", model, num_draft_tokens=3)
    batch = batch_of(made, [list(range(7, 40))], prompt=3)
    out = made.loss(batch)
    assert torch.isfinite(out.loss)
    folder = export(made, tmp_path / "head")
    # Granite multiplies what its layers add: over six pairs of prompts the largest error was 8e-4, the others' 1e-4.
    atol = 3e-3 if family == "Granite" else 2e-4
    check_drafts(made, folder, ragged([6, 16]), logits_of(made), length=3, atol=atol)


def test_begins_with_the_targets_layer():
    model = target()
    kind = trainer("mtp", model).__class__
    for copied in (True, False):
        made = kind(kind.options_class(copy_layer=copied), model)
        head = made.build(torch.ones(61, dtype=torch.long))
        theirs, own = model.model.model.layers[-1].state_dict(), head.layer.state_dict()
        matrices = [name for name in own if own[name].dim() > 1]
        assert all(torch.equal(own[name], theirs[name]) == copied for name in matrices)
        assert all(p.requires_grad and p.dtype == torch.float32 for p in head.parameters())
        assert {p.data_ptr() for p in head.parameters()}.isdisjoint(p.data_ptr() for p in model.model.parameters())


def test_bfloat16_target():
    model = target()
    model.model.to(torch.bfloat16)
    made = trainer("mtp", model)
    batch = batch_of(made, [list(range(7, 20))], prompt=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = made.loss(batch)
    out.loss.backward()
    assert all(p.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in made.head.parameters())


def test_run(tmp_path):
    data = write_rows(tmp_path / "data.jsonl", qa_rows(12))
    trained = train("mtp", tmp_path / "out", data, num_steps=2)
    assert parse_config({"model": str(trained.folder)}).method == "mtp"
    out = tiny_llama().generate(**ragged([5]), max_new_tokens=8, speculative_config={"model": str(trained.folder)})
    assert torch.equal(out, tiny_llama().generate(**ragged([5]), max_new_tokens=8))
