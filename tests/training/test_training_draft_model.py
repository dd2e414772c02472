"""Draft models distilled from the target: the loss, the beginning, the folder, and what is drafted with it."""

import pytest
import torch
from helpers_trained_drafts import batch_of, check_drafts, export
from helpers_training import qa_rows, target, train, trainer, write_rows
from oracle import ragged
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdec.training import TrainingError
from hf_specdec.training.draft_model import main_directions


def made_for(model, **options):
    return trainer("draft_model", model, width=16, num_heads=2, intermediate_size=24, **options)


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_loss_is_that_of_plain_loops(loss):
    model = target()
    made = made_for(model, loss=loss)
    batch = batch_of(made, [list(range(7, 20)), list(range(30, 37))], prompt=3)
    w = {name: value.double() for name, value in made.head.state_dict().items()}
    big = model.lm_head.weight.double()
    total, count = 0.0, 0
    for row, length in enumerate([13, 7]):
        states = plain_llama(w, batch.input_ids[row, :length].tolist(), layers=2, heads=2, kv_heads=1)
        for t in range(2, length - 1):  # x_{t + 1} is the answer's
            q = log_softmax(w["model.embed_tokens.weight"] @ states[t])
            p = log_softmax(big @ batch.last_hidden[row, t].double())
            label = int(batch.input_ids[row, t + 1])
            total += float((p.exp() * (p - q)).sum()) if loss == "kl" else -float(q[label])
            count += 1
    out = made.loss(batch)
    assert float(out.loss.detach()) == pytest.approx(total, rel=1e-5)
    assert float(out.weight) == count
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.head.parameters())


def test_drafts_are_the_trained_models(tmp_path):
    model = target()
    made = made_for(model, num_draft_tokens=4)
    folder = export(made, tmp_path / "head")

    def logits_of(batch, rows, anchors, step):
        return made.head(input_ids=batch.input_ids).logits[rows, anchors + step]

    check_drafts(made, folder, ragged([6, 11, 3]), logits_of, length=4)


def test_run_leaves_a_model_for_transformers(tmp_path):
    data = write_rows(tmp_path / "data.jsonl", qa_rows(12))
    folder = train("draft_model", tmp_path / "out", data, width=16, num_heads=2).folder
    draft = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert draft.config.hidden_size == 16 and draft.config.tie_word_embeddings
    assert tokenizer.get_vocab() == target().tokenizer.get_vocab()
    assert draft.generation_config.pad_token_id == 0
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_embeddings_begin_with_most_of_the_targets():
    table = torch.randn(50, 12) * torch.tensor([9.0, 5, 3] + [0.01] * 9)
    rotated = table @ torch.linalg.qr(torch.randn(12, 12)).Q
    projected = rotated @ main_directions(rotated, 3).T
    torch.testing.assert_close(projected @ projected.T, table @ table.T, atol=0.05, rtol=0.01)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"width": 64}, "more than the target's 32"), ({"width": 16, "num_heads": 3}, "does not divide"),
     ({"width": 6, "num_heads": 2}, "does not divide"), ({"width": 16, "num_heads": 4, "num_kv_heads": 3}, "does not divide")],
)  # fmt: skip
def test_shapes_that_are_none(options, says):
    with pytest.raises(TrainingError, match=says):
        trainer("draft_model", target(), **options)


# ---- plain ----------------------------------------------------------------------------------------------------------


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - shifted.exp().sum().log()


def plain_llama(w, tokens, layers, heads, kv_heads):
    """Final hidden states after the norm, one token after another, with lists of keys and values."""
    width = w["model.embed_tokens.weight"].shape[1]
    d = width // heads

    def rms(x, name):
        return x / torch.sqrt((x * x).mean() + 1e-6) * w[name + ".weight"]

    def turned(x, position):  # one head
        angles = position * 10000.0 ** (-torch.arange(0, d, 2).double() / d)
        a, b = x[: d // 2], x[d // 2 :]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])

    keys, values, out = [[] for _ in range(layers)], [[] for _ in range(layers)], []
    for position, token in enumerate(tokens):
        x = w["model.embed_tokens.weight"][token]
        for i in range(layers):
            p = f"model.layers.{i}."
            y = rms(x, p + "input_layernorm")
            q, k, v = ((w[f"{p}self_attn.{part}_proj.weight"] @ y).split(d) for part in "qkv")
            keys[i].append([turned(each, position) for each in k])
            values[i].append(v)
            joined = []
            for head in range(heads):
                own = head // (heads // kv_heads)
                scores = torch.stack([turned(q[head], position) @ each[own] for each in keys[i]]) / d**0.5
                share = log_softmax(scores).exp()
                joined.append(sum(s * each[own] for s, each in zip(share, values[i], strict=True)))
            x = x + w[p + "self_attn.o_proj.weight"] @ torch.cat(joined)
            y = rms(x, p + "post_attention_layernorm")
            gate = w[p + "mlp.gate_proj.weight"] @ y
            gate = gate / (1 + torch.exp(-gate))
            x = x + w[p + "mlp.down_proj.weight"] @ (gate * (w[p + "mlp.up_proj.weight"] @ y))
        out.append(rms(x, "model.norm"))
    return out
