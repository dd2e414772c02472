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
from hf_specdec.training.dflash import even_anchors, random_anchors
from hf_specdec.training.draft_layer import last_norm_scale, mask_token
from hf_specdec.training.options import LOSSES
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


@pytest.mark.parametrize(("loss", "decay"), [("kl", 4.0), ("ce", 1.5)])
def test_loss_is_that_of_plain_loops(loss, decay):
    model = target()
    made = trainer("dflash", model, **SHAPE, loss=loss, loss_decay=decay, num_anchors=50)
    batch = batch_of(made, [list(range(7, 20)), list(range(30, 39))], prompt=3)
    w = {name: value.double() for name, value in made.exported("original").tensors.items()}
    embeddings, head = model.embed_tokens.weight.double(), model.lm_head.weight.double()
    total, blocks, right = 0.0, 0, [0] * SLOTS
    scale = sum(2.718281828459045 ** (-(j - 1) / decay) for j in range(1, SLOTS))
    for row, length in enumerate([13, 9]):
        tokens = batch.input_ids[row].tolist()
        features = torch.cat([batch.layers[i][row].double() for i in (2, 1)], dim=-1)
        for anchor in range(2, length - 1):
            block = plain_block(w, embeddings, features, tokens, anchor)
            blocks += 1
            for j in range(1, SLOTS):
                if anchor + j >= length:
                    continue
                logits = head @ block[j]
                q = logits - torch.logsumexp(logits, 0)
                if loss == "kl":
                    states = model.model.model(batch.input_ids[row : row + 1, : anchor + j]).last_hidden_state
                    p = torch.log_softmax(head @ states[0, -1].double(), 0)
                    each, label = float((p.exp() * (p - q)).sum()), int(p.argmax())
                else:
                    each, label = -float(q[tokens[anchor + j]]), tokens[anchor + j]
                total += 2.718281828459045 ** (-(j - 1) / decay) / scale * each
                right[j] += int(logits.argmax()) == label
    out = made.loss(batch)
    assert float(out.loss.detach()) == pytest.approx(total, rel=1e-4)
    assert int(out.weight) == blocks
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


VARIANTS = {
    "dflash": {},
    "dspark": {"variant": "dspark", "head_rank": 6},
    "dspark, gated": {"variant": "dspark", "head_rank": 6, "markov_head_type": "gated"},
    "dspark, rnn": {"variant": "dspark", "head_rank": 6, "markov_head_type": "rnn"},
    "domino": {"variant": "domino", "head_rank": 7},
    "dflash2": {"variant": "dflash2", "head_rank": 6},
}


def logits_of(made):
    """The corrected logits of a draft's tokens, under teacher forcing, for `check_drafts`."""

    def at(batch, rows, anchors, step):
        hidden = made.block_hidden(batch, anchors[:, None])[:, 0]
        return list(made.logits(batch, rows, anchors, hidden))[step][-1]

    return at


@pytest.mark.parametrize("form", ["original", "speculators"])
@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_are_the_trained_drafters(tmp_path, name, form):
    made = trainer("dflash", target(), **SHAPE, **VARIANTS[name], num_anchors=64)
    folder = export(made, tmp_path / "head", form)
    check_drafts(made, folder, ragged([6, 11, 3]), logits_of(made))
    config = json.loads((folder / "config.json").read_text())
    own, most = config.get("dflash_config", config), made.num_guesses
    assert (own.get("projector_type", "dflash"), own["mask_token_id"]) == (name.split(",")[0], 2)
    assert most == SLOTS - (name in ("dflash", "dflash2"))
    if form == "original":
        assert own["target_layer_ids"] == [1, 0]
        assert (config["block_size"], config["num_target_layers"]) == (4, 3)
    else:
        assert config["aux_hidden_state_layer_ids"] == [2, 1]
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == most
        assert config["speculators_config"]["verifier"]["name_or_path"] == "tiny-random"


@pytest.mark.parametrize("name", ["dflash", "domino", "dflash2"])
def test_targets_that_scale_embeddings_and_cap_logits(tmp_path, name):
    made = trainer(
        "dflash", TargetModel(families.make("Gemma2"), word_tokenizer(), "Gemma2"), **SHAPE, **VARIANTS[name]
    )
    check_drafts(made, export(made, tmp_path / "head"), ragged([6, 11, 3]), logits_of(made))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["dspark", "domino", "dflash2"])
def test_heads_learn(name, loss):
    """The loss falls and the gradient reaches every weight; what corrects the logits and the convolutions begin by doing nothing."""
    made = trainer("dflash", target(), **SHAPE, **VARIANTS[name], loss=loss, num_anchors=50)
    batch = batch_of(made, [list(range(7, 20)), list(range(30, 39))], prompt=3)
    made.head = made.build(torch.ones(61))
    rows, anchors = torch.tensor([0, 1]), torch.tensor([4, 5])
    with torch.no_grad():
        for _, _, base, logits in made.logits(batch, rows, anchors, made.block_hidden(batch, anchors[:, None])[:, 0]):
            assert torch.equal(base.where(logits > -torch.inf, logits), logits)
    optimizer, found = torch.optim.AdamW(made.head.parameters(), lr=3e-3), []
    for step in range(12):
        made.progress = step / 12
        torch.manual_seed(0)
        out = made.loss(batch)
        found.append(float(out.loss.detach() / out.weight))
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    assert found[-1] < 0.9 * found[0]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.head.parameters())


def test_confidence_learns_the_acceptance():
    """DSpark's loss is the tokens' plus the cross-entropy of sum min(p, q), which is what its confidence tends to."""
    made = trainer("dflash", target(), **SHAPE, **VARIANTS["dspark"], num_anchors=50)
    batch = batch_of(made, [list(range(7, 20)), list(range(30, 39))], prompt=3)
    with torch.no_grad():
        hidden = made.block_hidden(batch, torch.tensor([[4], [4]]))[:, 0]
        depths = made._depths(batch, torch.tensor([0, 1]), torch.tensor([4, 4]), hidden)
        slots = made.logits(batch, torch.tensor([0, 1]), torch.tensor([4, 4]), hidden)
        for k, ((_, losses, added, _), (slot, before, _, logits)) in enumerate(zip(depths, slots, strict=True)):
            teacher = torch.softmax(batch.last_hidden[:, 4 + k] @ made.target.lm_head.weight.T, -1)[: len(losses)]
            rate = torch.minimum(torch.softmax(logits, -1), teacher).sum(-1)
            sure = made.head.confidence_head(torch.cat([slot, made.head.markov_head.markov_w1(before)], -1))
            expected = -(rate * sure + (1 - rate) * torch.log(1 - sure.exp()))
            torch.testing.assert_close(added - losses, expected, atol=1e-5, rtol=1e-4)


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
    with caplog.at_level(logging.INFO, logger="hf_specdec.training.draft_layer"):
        assert mask_token(None, model, none) == 0  # the padding token: w03 ends answers, every id has a token
    assert "padding token, id 0" in caplog.text
    used = none.clone()
    used[0] = 1
    with pytest.raises(TrainingError, match="--mask-token-id"):
        mask_token(None, model, used)
    assert mask_token(9, model, used) == 9
    with pytest.raises(TrainingError, match="61 tokens"):
        mask_token(61, model, none)
    padded = target(vocab_size=64)
    assert mask_token(None, padded, torch.zeros(64, dtype=torch.long)) == 61  # the first embedding that no token has
    model.tokenizer.mask_token = "w09"
    assert mask_token(None, model, none) == 9


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


@pytest.mark.parametrize(
    ("method", "given", "says"),
    [
        ("dflash", {"head_rank": 8}, "--head-rank is for the other variants"),
        ("dflash", {"variant": "domino", "markov_head_type": "rnn"}, "--markov-head-type is for --variant dspark"),
        ("eagle3", {"mask_token_id": 2}, "--mask-token-id is for --parallel"),
        ("eagle3", {"down_sample_ratio": 0.7}, "--down-sample-ratio is for --parallel"),
    ],
)
def test_options_of_other_variants_are_refused(method, given, says):
    with pytest.raises(TrainingError, match=says):
        trainer(method, target(), **given)


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
