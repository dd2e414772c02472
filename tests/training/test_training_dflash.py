"""DFlash drafters in training: the loss at every anchor by plain loops, the folder, and what is drafted with it."""

import json
import logging

import families
import pytest
import torch
from helpers_trained_drafts import batch_of, check_drafts, export
from helpers_training import qa_rows, target, train, trainer, word_tokenizer, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import ragged

from hf_specdec import parse_config
from hf_specdec.training import TrainingError
from hf_specdec.training.dflash import even_anchors, mask_token, random_anchors
from hf_specdec.training.draft_layer import last_norm_scale
from hf_specdec.training.target import TargetModel

SHAPE = {"num_layers": 2, "block_size": 4, "intermediate_size": 24, "mask_token_id": 2, "target_layers": "1,0"}
MASK, SLOTS, THETA = 2, 4, 10000.0


def plain_block(w, embeddings, features, tokens, anchor):
    """Final hidden states [SLOTS, H] of the block behind tokens[: anchor + 1], one slot and head after another, in float64."""
    heads, kv_heads, d = 4, 2, 8

    def rms(x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w[name + ".weight"]

    def turned(x, position):
        angles = position * THETA ** (-torch.arange(0, d, 2).double() / d)
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)

    def key_value(x, position, p):
        k = rms((w[p + "k_proj.weight"] @ x).view(kv_heads, d), p + "k_norm")
        return turned(k, position), (w[p + "v_proj.weight"] @ x).view(kv_heads, d)

    context = [rms(w["fc.weight"] @ features[t], "hidden_norm") for t in range(anchor)]
    x = [embeddings[tokens[anchor]]] + [embeddings[MASK]] * (SLOTS - 1)
    for i in range(2):
        p = f"layers.{i}.self_attn."
        y = [rms(each, f"layers.{i}.input_layernorm") for each in x]
        pairs = [key_value(c, t, p) for t, c in enumerate(context)]
        pairs += [key_value(each, anchor + j, p) for j, each in enumerate(y)]
        new = []
        for j in range(SLOTS):
            q = turned(rms((w[p + "q_proj.weight"] @ y[j]).view(heads, d), p + "q_norm"), anchor + j)
            joined = []
            for head in range(heads):
                own = head // (heads // kv_heads)
                share = torch.softmax(torch.stack([q[head] @ k[own] for k, _ in pairs]) / d**0.5, 0)
                joined.append(sum(s * v[own] for s, (_, v) in zip(share, pairs, strict=True)))
            h = x[j] + w[p + "o_proj.weight"] @ torch.cat(joined)
            z = rms(h, f"layers.{i}.post_attention_layernorm")
            gate = w[f"layers.{i}.mlp.gate_proj.weight"] @ z
            up = w[f"layers.{i}.mlp.up_proj.weight"] @ z
            new.append(h + w[f"layers.{i}.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up))
        x = new
    return torch.stack([rms(each, "norm") for each in x])


@pytest.mark.parametrize(("objective", "decay"), [("kl", 4.0), ("ce", 1.5)])
def test_loss_is_that_of_plain_loops(objective, decay):
    model = target()
    made = trainer("dflash", model, **SHAPE, objective=objective, loss_decay=decay, num_anchors=50)
    batch = batch_of(made, [list(range(7, 20)), list(range(30, 39))], prompt=3)
    w = {name: value.double() for name, value in made.exported("original").tensors.items()}
    embeddings, head = model.embed_tokens.weight.double(), model.lm_head.weight.double()
    total, weight, right = 0.0, 0.0, [0] * SLOTS
    for row, length in enumerate([13, 9]):
        tokens = batch.input_ids[row].tolist()
        features = torch.cat([batch.layers[i][row].double() for i in (2, 1)], dim=-1)
        for anchor in range(2, length - 1):
            block = plain_block(w, embeddings, features, tokens, anchor)
            for j in range(1, SLOTS):
                if anchor + j >= length:
                    continue
                logits = head @ block[j]
                q = logits - torch.logsumexp(logits, 0)
                if objective == "kl":
                    states = model.model.model(batch.input_ids[row : row + 1, : anchor + j]).last_hidden_state
                    p = torch.log_softmax(head @ states[0, -1].double(), 0)
                    each = float((p.exp() * (p - q)).sum())
                else:
                    each = -float(q[tokens[anchor + j]])
                total += 2.718281828459045 ** (-(j - 1) / decay) * each
                weight += 2.718281828459045 ** (-(j - 1) / decay)
                right[j] += int(logits.argmax()) == tokens[anchor + j]
    out = made.loss(batch)
    assert float(out.loss.detach()) == pytest.approx(total, rel=1e-4)
    assert float(out.weight) == pytest.approx(weight, rel=1e-5)
    assert [float(out.metrics[f"accuracy_{j}"][0]) for j in range(1, SLOTS)] == right[1:]
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.head.parameters())


def test_blocks_do_not_see_each_other():
    """Alone, among others and among so many that they are spread over rows, a block is the same."""
    made = trainer("dflash", target(), **SHAPE)
    batch = batch_of(made, [list(range(7, 57)), list(range(8, 58))])
    with torch.no_grad():
        many = made.block_hidden(batch, torch.arange(1, 42).repeat(2, 1))
        for anchor in (1, 20, 41):
            alone = made.block_hidden(batch, torch.full((2, 1), anchor))
            torch.testing.assert_close(many[:, anchor - 1], alone[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["original", "speculators"])
def test_drafts_are_the_trained_drafters(tmp_path, form):
    made = trainer("dflash", target(), **SHAPE, num_anchors=64)
    folder = export(made, tmp_path / "head", form)

    def logits_of(batch, rows, anchors, step):
        hidden = made.block_hidden(batch, anchors[:, None])[:, 0, 1 + step]
        return made.lm_head(hidden)

    check_drafts(made, folder, ragged([6, 11, 3]), logits_of)
    config = json.loads((folder / "config.json").read_text())
    if form == "original":
        assert config["dflash_config"] == {"mask_token_id": 2, "target_layer_ids": [1, 0]}
        assert (config["block_size"], config["num_target_layers"]) == (4, 3)
    else:
        assert config["aux_hidden_state_layer_ids"] == [2, 1]
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
        assert config["speculators_config"]["verifier"]["name_or_path"] == "tiny-random"


def test_bfloat16_target(tmp_path):
    model = target()
    model.model.to(torch.bfloat16)
    made = trainer("dflash", model, **SHAPE)
    batch = batch_of(made, [list(range(7, 20))], prompt=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = made.loss(batch)
    out.loss.backward()
    assert all(p.dtype == torch.float32 and torch.isfinite(p.grad).all() for p in made.head.parameters())


def test_run(tmp_path):
    data = write_rows(tmp_path / "data.jsonl", qa_rows(12))
    trained = train("dflash", tmp_path / "out", data, **SHAPE)
    assert parse_config({"model": str(trained.folder)}).method == "dflash"
    assert len(trained.estimate.acceptance) == 3


# ---- anchors --------------------------------------------------------------------------------------------------------

masks = st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=4)


@given(masks, st.integers(1, 15), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_anchors_are_distinct_and_valid(rows, count, seed):
    torch.manual_seed(seed)
    valid = torch.tensor(rows)
    for choose in (random_anchors, even_anchors):
        anchors, chosen = choose(valid, count)
        assert anchors.shape[1] <= count
        for row, own, taken in zip(rows, anchors.tolist(), chosen.tolist(), strict=True):
            places = [place for place, is_one in zip(own, taken, strict=True) if is_one]
            assert len(set(places)) == len(places) == min(count, sum(row))
            assert all(row[place] for place in places)


def test_random_anchors_are_uniform():
    torch.manual_seed(0)
    valid = torch.ones(20000, 10, dtype=torch.bool)
    counts = torch.bincount(random_anchors(valid, 3)[0].flatten(), minlength=10).double()
    expected = 20000 * 3 / 10
    # Chi-square, 9 degrees of freedom, 0.1 % point; a tenth of the anchors moved from one place to another exceeds it.
    assert float(((counts - expected) ** 2 / expected).sum()) < 27.9
    moved = counts + torch.tensor([600.0, -600] + [0] * 8)
    assert float(((moved - expected) ** 2 / expected).sum()) > 27.9


def test_even_anchors_spread():
    anchors, _ = even_anchors(torch.ones(1, 100, dtype=torch.bool), 10)
    assert set(anchors[0].sort().values.diff().tolist()) == {10}


# ---- options --------------------------------------------------------------------------------------------------------


def test_mask_token(caplog):
    model, none = target(), torch.zeros(61, dtype=torch.long)
    kind = trainer("dflash", model, **SHAPE).options.__class__
    with caplog.at_level(logging.INFO, logger="hf_specdec.training.dflash"):
        assert mask_token(kind(), model, none) == 0  # the padding token: w03 ends answers, every id has a token
    assert "padding token, id 0" in caplog.text
    used = none.clone()
    used[0] = 1
    with pytest.raises(TrainingError, match="--mask-token-id"):
        mask_token(kind(), model, used)
    assert mask_token(kind(mask_token_id=9), model, used) == 9
    with pytest.raises(TrainingError, match="61 tokens"):
        mask_token(kind(mask_token_id=61), model, none)
    padded = target(vocab_size=64)
    assert mask_token(kind(), padded, torch.zeros(64, dtype=torch.long)) == 61  # the first embedding that no token has
    model.tokenizer.mask_token = "w09"
    assert mask_token(kind(), model, none) == 9


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "OPT"])
def test_last_norm_begins_as_the_targets(family):
    """Gemma's norms multiply by one more than their weight; OPT's are no RMS norms."""
    base = families.make(family)
    scale = last_norm_scale(TargetModel(base, word_tokenizer(), family))
    expected = {
        "Llama": lambda: base.model.norm.weight,
        "Gemma2": lambda: 1 + base.model.norm.weight,
        "OPT": lambda: torch.ones(48),
    }
    torch.testing.assert_close(scale, expected[family]().detach())


@pytest.mark.parametrize("layers", ["2", "0,0", "a", ",", "-1,1", "0,7"])
def test_layers_that_are_none(layers):
    with pytest.raises(TrainingError, match="different numbers from 0 to 1"):
        trainer("dflash", target(), **{**SHAPE, "target_layers": layers})


@pytest.mark.parametrize(
    ("count", "total", "expected"), [(3, 7, [1, 3, 5]), (5, 36, [1, 9, 18, 26, 34]), (1, 7, [5]), (3, 3, [1])]
)
def test_default_layers(count, total, expected):
    made = trainer("dflash", target(num_hidden_layers=total), num_layers=count, mask_token_id=2)
    assert made.target_layers == expected
    assert made.taps.layers == tuple(i + 1 for i in expected)
