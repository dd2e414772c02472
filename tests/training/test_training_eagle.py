"""Trainers of EAGLE-1 and EAGLE-3: what they compute in training is what is computed when drafting, and their losses are right."""

import json
import math
from functools import partial

import pytest
import torch
from helpers_eagle import PlainDrafter, PlainLayers, Script, hidden_states, recorded, rms
from helpers_eagle3 import Layout, PlainEagle3
from helpers_training import qa_rows, ragged_batch, random_text, target, train, trainer, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import VOCAB, ragged, tiny_llama
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import LogitsProcessorList

import hf_specdec
from hf_specdec.candidate_generators.eagle import EagleGenerator
from hf_specdec.candidate_generators.eagle3 import Eagle3Generator
from hf_specdec.training import Batch, TrainingError, losses, unrolled
from hf_specdec.training.dflash import DFlashOptions, layers_config
from hf_specdec.training.draft_layer import layer_config_for
from hf_specdec.training.draft_model import DraftModelOptions, draft_config
from hf_specdec.training.eagle3 import default_layers, most_frequent
from hf_specdec.training.export import export_head

STEPS = 4
KINDS = {
    "eagle": ("eagle", "original", {}),
    "eagle, the target's embeddings": ("eagle", "original", {"own_embeddings": False}),
    "eagle, two layers": ("eagle", "original", {"num_layers": 2, "intermediate_size": 20}),
    "eagle3": ("eagle3", "original", {}),
    "eagle3, part of the vocabulary": ("eagle3", "original", {"draft_vocab_size": 40}),
    "eagle3, norms": ("eagle3", "original", {"fc_norm": True, "norm_output": True, "feature_layers": "1,3"}),
    "eagle3, speculators": ("eagle3", "speculators", {"draft_vocab_size": 40, "num_layers": 2}),
    "eagle3, speculators, all tokens": ("eagle3", "speculators", {"norm_output": True}),
    "p-eagle": ("eagle3", "original", {"parallel": True, "num_layers": 2, "fc_norm": True, "mask_token_id": 2}),
    "p-eagle, speculators": ("eagle3", "speculators", {"parallel": True, "draft_vocab_size": 40, "mask_token_id": 2}),
}
GENERATORS = {"eagle": EagleGenerator, "eagle3": Eagle3Generator}


@pytest.fixture(scope="module")
def model():
    return target()


def export(made, folder, form=None):
    """The trainer's head on disk."""
    (folder / "training").mkdir(parents=True)
    facts = {"method": made.method, "target": made.target.name, "license": None, "data": "none", "num_samples": 0,
             "num_tokens": 0, "step": 0, "options": {}, "estimate": None}  # fmt: skip
    return str(export_head(made, folder, folder / "training", form, None, facts))


def batch_of(texts, model, taps, answers=None):
    """Texts as a batch, all of whose tokens count from position `answers` of each on."""
    input_ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    mask = torch.zeros(input_ids.shape, dtype=torch.bool)
    for row, text in enumerate(texts):
        input_ids[row, : len(text)] = torch.tensor(text)
        mask[row, (1 if answers is None else answers[row]) : len(text)] = True
    return model.capture(Batch(input_ids, torch.tensor([len(text) for text in texts]), mask), taps)


# ---- attention ------------------------------------------------------------------------------------------------------


def draft_mask(length: int, steps: int) -> torch.Tensor:
    """bool [length, length * steps]: what a query of the last step sees, were all keys in one row."""
    seen = torch.zeros(length, length * steps, dtype=torch.bool)
    for t in range(length):
        seen[t, : t + 1] = True
        for step in range(1, steps):
            seen[t, length * step + t] = True
    return seen


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from([(1, 1), (2, 1), (2, 3)]), st.integers(0, 10**6))
def test_attention_is_that_of_a_mask(length, steps, heads, seed):
    """Values and all gradients, against one softmax over all keys under the mask, in float64."""
    torch.manual_seed(seed)
    kv_heads, group = heads

    def states(count):
        return torch.randn(2, count, length, 4, dtype=torch.float64, requires_grad=True)

    query, keys, values = (
        states(kv_heads * group),
        [states(kv_heads) for _ in range(steps)],
        [states(kv_heads) for _ in range(steps)],
    )
    if steps == 1:
        found = unrolled.attend(query, keys[0], values[0], 0.7)
    else:
        found = unrolled.attend_merged(query, unrolled.LayerSteps(keys[0], values[0], keys[1:], values[1:]), 0.7)
    all_keys, all_values = (torch.cat(each, dim=2).repeat_interleave(group, dim=1) for each in (keys, values))
    scores = (0.7 * query @ all_keys.transpose(-1, -2)).masked_fill(~draft_mask(length, steps), float("-inf"))
    expected = scores.softmax(-1) @ all_values
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
    weight, leaves = torch.randn_like(found), [query, *keys, *values]
    for gradient, wanted in zip(
        torch.autograd.grad((found * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(gradient, wanted, atol=1e-11, rtol=1e-9)


def outputs_of(made, batch, steps):
    """The head's output at every step, under teacher forcing."""
    if made.method == "eagle3":
        return made.unrolled(batch, steps)
    return unrolled.unroll(made.head, batch, batch.hidden(), steps)


@pytest.mark.parametrize("kind", KINDS)
def test_training_computes_what_drafting_does(tmp_path, model, kind):
    """An exported head drafts with the logits training gives at the same step, after the same tokens; over rounds with
    none, some and all drafts accepted. Its drafts are the trainer's guesses."""
    method, form, options = KINDS[kind]
    made = trainer(method, model, **options)
    folder = export(made, tmp_path / "head", form)
    config = hf_specdec.parse_config({"model": folder, "num_speculative_tokens": STEPS})
    assert config.method == method
    with recorded(GENERATORS[method]) as recording:
        script = LogitsProcessorList([Script(list(range(7, 30)))])
        model.model.generate(
            **ragged([6, 11, 2]), max_new_tokens=18, logits_processor=script, speculative_config=config
        )
    assert len(set(recording.emitted())) > 2
    assert {len(path) for _, path, _ in recording.logits} == set(range(STEPS))

    texts = [text + path for text, path, _ in recording.logits]
    batch = batch_of(texts, model, made.taps)
    rows = torch.arange(len(texts))
    columns = torch.tensor([len(text) - 2 for text, _, _ in recording.logits])
    steps = [len(path) for _, path, _ in recording.logits]
    with torch.no_grad():
        outputs = list(outputs_of(made, batch, STEPS))
        logits_of = partial(made.head.logits, lm_head=made.head.lm_head) if method == "eagle3" else model.logits
        found = torch.stack([logits_of(output[rows, columns]) for output in outputs])
    expected = torch.stack([logits for _, _, logits in recording.logits])
    torch.testing.assert_close(found[steps, rows], expected, atol=1e-4, rtol=1e-4)

    with recorded(GENERATORS[method]) as recording:  # the script speaks to the drafter too: without it
        model.model.generate(**ragged([6, 11, 2]), max_new_tokens=10, speculative_config=config)
    chains = [
        (text, trees.tokens[row, :STEPS].tolist())
        for texts, trees in recording.trees
        for row, text in enumerate(texts)
        if trees.lengths[row] == STEPS
    ]
    assert len(chains) > 10
    made.num_guesses = STEPS
    made.head.eval()  # as in the estimate: no noise
    batch = batch_of([[*text, *chain] for text, chain in chains], model, made.taps, [len(text) for text, _ in chains])
    with torch.no_grad():
        guesses = made.guesses(batch)
    for row, (text, chain) in enumerate(chains):
        (place,) = ((guesses.rows == row) & (guesses.anchors == len(text) - 1)).nonzero()
        assert guesses.tokens[place[0]].tolist() == chain


# ---- P-EAGLE's sampling ------------------------------------------------------------------------------------------------


def test_p_eagle_is_trained_at_fewer_places_at_later_steps(model):
    """Of the columns that guess, step s runs ceil(n ratio^s), some of those that step s - 1 runs; what stays has the weight of what is
    left out, and costs less memory and arithmetic. At a ratio of 1 nothing changes."""
    options = {"parallel": True, "num_layers": 2, "mask_token_id": 2, "num_steps": STEPS}
    lengths, ran, losses_at = (90, 60, 41), {}, {}
    for ratio in (None, 1.0, 0.9999, 0.5):
        made = trainer("eagle3", model, **options, **({} if ratio is None else {"down_sample_ratio": ratio}))
        batch, kept = model.capture(ragged_batch(model, lengths, prompt=1), made.taps), [0]
        columns = ran.setdefault(ratio, [])
        made.head.register_forward_pre_hook(lambda _, args, columns=columns: columns.append(args[2]))
        torch.manual_seed(3)

        def keep(tensor, kept=kept):
            kept[0] += tensor.nbytes
            return tensor

        with FlopCounterMode(display=False) as flops, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = made.loss(batch)
        out.loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in made.head.parameters() if p.grad is not None])
        counts = [int(weight) for _, weight in out.metrics.values()]
        losses_at[ratio] = out.loss.detach(), gradient, counts, flops.get_total_flops(), kept[0]
    assert all(torch.equal(a, b) for a, b in zip(losses_at[None][:2], losses_at[1.0][:2], strict=True))
    for all_of_them, nearly_all in zip(losses_at[1.0][:2], losses_at[0.9999][:2], strict=True):
        torch.testing.assert_close(nearly_all, all_of_them, rtol=1e-4, atol=1e-3)
    assert losses_at[0.9999][2] == losses_at[1.0][2]
    guessing = [length - 2 for length in lengths]  # the last token is guessed from the column two before it
    for step in range(1, STEPS):
        columns = ran[0.5][step] - step
        stated = [math.ceil(count * 0.5**step) for count in guessing]
        assert columns.shape == (3, max(stated)) and set(columns[0].tolist()) <= set(
            (ran[0.5][step - 1] - step + 1)[0].tolist()
        )
        assert (
            sum(stated) - 3 * step <= losses_at[0.5][2][step] <= sum(stated)
        )  # the last columns have no label at later steps
    assert losses_at[0.5][3] < 0.6 * losses_at[1.0][3] and losses_at[0.5][4] < 0.7 * losses_at[1.0][4]
    with torch.no_grad():
        mean = torch.stack([made.loss(batch).loss for _ in range(60)]).mean()
    torch.testing.assert_close(mean, losses_at[1.0][0], rtol=0.02, atol=0.0)


# ---- losses ---------------------------------------------------------------------------------------------------------


class PlainEagle(PlainDrafter):
    """fc([embedding; feature]) and one layer without a norm before attention."""

    def __init__(self, tensors, model, **options):
        super().__init__()
        self.layers = PlainLayers(tensors, **options)
        self.table = model.get_input_embeddings().weight.detach().double()
        self.head = model.get_output_embeddings().weight.detach().double()

    def feature(self, states, p):
        return states[-2][p]

    def row(self, state, token, feature, position):
        x = self.layers.linear(torch.cat([self.table[token], feature]), "fc")
        return self.layers.ordinary_layer(0, x, position, state)

    def logits(self, out):
        return self.head @ out


def guessed(batch, num_steps):
    """(step, text, path, u) of all that is trained: after the text and the path the head guesses token u + 1, which counts."""
    for ids, length, counts in zip(
        batch.input_ids.tolist(), batch.lengths.tolist(), batch.loss_mask.tolist(), strict=True
    ):
        for step in range(num_steps):
            for u in range(1 + step, length - 1):
                if counts[u + 1]:
                    yield step, tuple(ids[: u - step + 1]), tuple(ids[u - step + 1 : u + 1]), u, tuple(ids[:length])


def states_of(batch, model):
    texts = {tuple(ids[:length]) for ids, length in zip(batch.input_ids.tolist(), batch.lengths.tolist(), strict=True)}
    return hidden_states(model, texts)


@pytest.mark.parametrize(("size", "feature_weight"), [(None, 0.0), (25, 0.0), (None, 0.7), (25, 0.7)])
def test_eagle3_loss_is_a_plain_implementations(model, size, feature_weight):
    """sum over steps of 0.8^s (KL to the target's distribution on the draft vocabulary, renormalised + a SmoothL1(features)), where the
    target's own choice is in it; also accuracies and the number of positions."""
    made = trainer("eagle3", model, num_steps=STEPS, draft_vocab_size=size, feature_weight=feature_weight)
    batch = model.capture(ragged_batch(model), made.taps)
    out = made.loss(batch)

    ids = torch.arange(VOCAB) if made.draft_ids is None else made.draft_ids
    layout = Layout({}, states=made.taps.layers)
    layout.plain["theta"] = made.config.rope_parameters["rope_theta"]
    plain, states = PlainEagle3(made.head.state_dict(), model.model, layout), states_of(batch, model.model)
    lm_head = model.lm_head.weight.double()
    loss, right, count = 0.0, [0] * STEPS, [0] * STEPS
    for step, text, path, u, whole in guessed(batch, STEPS):
        scores = lm_head @ states[whole][-2][u]
        if int(scores.argmax()) not in ids.tolist():
            continue
        probs = torch.softmax(scores[ids], 0)
        logits = plain.draft_logits(text, path, states[whole])
        loss += 0.8**step * float((probs * (probs.log() - torch.log_softmax(logits, 0))).sum())
        output = plain.follow(text, path, states[whole])[1]
        away = (rms(output, made.head.norm.weight.detach().double()) - states[whole][-2][u]).abs()
        loss += 0.8**step * feature_weight * float(torch.where(away < 1, 0.5 * away**2, away - 0.5).mean())
        right[step] += int(logits.argmax()) == int(probs.argmax())
        count[step] += 1
    assert float(out.loss.detach()) == pytest.approx(loss, rel=1e-5)
    assert int(out.weight) == count[0] > 5
    for step in range(STEPS):
        assert [int(each) for each in out.metrics[f"accuracy_{step + 1}"]] == [right[step], count[step]]
    if size:
        assert count[0] < len([step for step, *_ in guessed(batch, 1)])  # some choices are outside


def test_eagle_loss_is_a_plain_implementations(model):
    """sum over steps of decay^s (a SmoothL1(features) + b KL to the target's distribution)."""
    made = trainer("eagle", model, num_steps=3, step_decay=0.7, feature_weight=0.9, token_weight=0.3, feature_noise=0.0)
    batch = ragged_batch(model)
    out = made.loss(batch)
    plain = PlainEagle(made.head.state_dict(), model.model, theta=made.config.rope_parameters["rope_theta"])
    states, loss, count = states_of(batch, model.model), 0.0, 0
    for step, text, path, u, whole in guessed(batch, 3):
        wanted, output = states[whole][-2][u], plain.follow(text, path, states[whole])[1]
        away = (output - wanted).abs()
        feature = float(torch.where(away < 1, 0.5 * away**2, away - 0.5).mean())
        probs = torch.softmax(plain.head @ wanted, 0)
        away = probs.log() - torch.log_softmax(plain.logits(output), 0)
        loss += 0.7**step * (0.9 * feature + 0.3 * float((probs * away).sum()))
        count += step == 0
    assert float(out.loss.detach()) == pytest.approx(loss, rel=1e-5)
    assert int(out.weight) == count > 10


def test_noise_has_the_stated_width(model):
    """Uniform around zero; half as wide on a text of 1024 tokens; none in the estimate."""
    made = trainer("eagle", model, feature_noise=0.4)
    noise = made.noisy(torch.zeros(2, 1024, 32), torch.tensor([100, 1024]))
    for row, width in ((0, 0.4), (1, 0.2)):
        assert noise[row].abs().max() <= width / 2 and noise[row].mean().abs() < 0.01 * width
        assert noise[row].std().item() == pytest.approx(width / 12**0.5, rel=0.02)
    batch = ragged_batch(model)
    assert made.loss(batch).loss != made.loss(batch).loss
    made.head.eval()
    assert torch.equal(made.guesses(batch).tokens, made.guesses(batch).tokens)


@pytest.mark.parametrize(
    ("method", "more"),
    [("eagle", {"feature_noise": 0.0, "loss": "ce"}), ("eagle3", {"draft_vocab_size": 40, "loss": "lk"})],
)
def test_loss_in_parts_is_the_same(model, monkeypatch, method, more):
    """With logits computed anew in the backward pass: same loss and gradients."""
    made = trainer(method, model, **more)
    batch, found = model.capture(ragged_batch(model), made.taps), []
    for kept in (2**26, 200):
        monkeypatch.setattr(losses, "_LOGITS_KEPT", kept)
        monkeypatch.setattr("hf_specdec.training.target._LOGITS_AT_ONCE", kept)
        out = made.loss(batch)
        found.append([out.loss, *torch.autograd.grad(out.loss, list(made.head.parameters()))])
        tokens = made.guesses(batch).tokens
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-4)
        assert whole.abs().max() > 0
    assert tokens.shape == (len(list(guessed(batch, 1))), 5)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_padding_and_prompts_do_not_count(model, method):
    """What stands behind a row's end changes nothing."""
    made = trainer(method, model, **({"feature_noise": 0.0} if method == "eagle" else {}))
    batch = ragged_batch(model)
    other = Batch(torch.where(batch.present, batch.input_ids, 9), batch.lengths, batch.loss_mask)
    first, second = (made.loss(model.capture(each, made.taps)).loss for each in (batch, other))
    torch.testing.assert_close(first, second)
    shorter = Batch(batch.input_ids, batch.lengths, batch.loss_mask & (torch.arange(13) > 8))
    assert made.loss(model.capture(shorter, made.taps)).weight < made.loss(model.capture(batch, made.taps)).weight


# ---- initial weights and options ------------------------------------------------------------------------------------


def test_draft_vocabulary_is_the_most_frequent(model, tmp_path):
    """Sorted by id; d2t are offsets, t2d marks the same tokens."""
    assert most_frequent(torch.tensor([3, 9, 0, 9, 3, 5]), 4).tolist() == [0, 1, 3, 5]
    made = trainer("eagle3", model, draft_vocab_size=11)
    counts = torch.randint(0, 5, (VOCAB,), generator=torch.Generator().manual_seed(0))
    made.head = made.build(counts)
    chosen = set(made.draft_ids.tolist())
    assert len(chosen) == 11 and made.draft_ids.tolist() == sorted(chosen)
    assert min(counts[i] for i in chosen) >= max(counts[i] for i in range(VOCAB) if i not in chosen)
    torch.testing.assert_close(made.head.lm_head.weight, model.lm_head.weight[made.draft_ids])
    tensors = load_file(export(made, tmp_path / "head") + "/model.safetensors")
    assert (torch.arange(11) + tensors["d2t"]).tolist() == sorted(chosen)
    assert tensors["t2d"].nonzero().flatten().tolist() == sorted(chosen)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool


def test_attention_begins_at_the_own_token(model):
    """By the embedding halves of queries and keys, a token scores highest with itself, in every head."""
    made = trainer("eagle3", model)
    torch.manual_seed(0)
    attention = made.build(torch.ones(VOCAB)).layers[0].self_attn
    embedded = torch.nn.functional.normalize(model.embed_tokens.weight, dim=-1) * 32**0.5
    both = torch.cat([embedded, torch.zeros_like(embedded)], dim=-1)
    query = attention.q_proj(both).view(VOCAB, 4, 8)
    key = attention.k_proj(both).view(VOCAB, 2, 8).repeat_interleave(2, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * attention.scaling
    own = scores.diagonal(dim1=1, dim2=2)
    assert (own.mean(1) > scores.mean((1, 2)) + 2).all()
    assert (own >= scores.quantile(0.9, dim=2)).float().mean() > 0.8


def test_the_head_begins_as_the_deepest_state_read(model):
    """Before training fc passes the last of its states on, and norm and lm_head are the target's."""
    made = trainer("eagle3", model)
    torch.manual_seed(0)
    head = made.build(torch.ones(VOCAB))
    deep, none = torch.randn(3, 32), torch.zeros(3, 32)
    assert torch.cosine_similarity(head.fuse(torch.cat([none, none, deep], dim=-1)), deep, dim=-1).min() > 0.8
    assert torch.allclose(head.norm.weight, model.model.model.norm.weight)
    assert torch.equal(head.lm_head.weight, model.lm_head.weight)


def test_nothing_that_counts_is_no_error(model):
    """A batch of prompts only: a loss of zero, no guesses."""
    batch = ragged_batch(model, prompt=13)
    for method in ("eagle", "eagle3"):
        for size in (None, 25) if method == "eagle3" else (0,):
            made = trainer(method, model, **({"draft_vocab_size": size} if size != 0 else {}))
            features = model.capture(batch, made.taps)
            out = made.loss(features)
            out.loss.backward()
            assert float(out.loss.detach()) == 0 == int(out.weight)
            assert made.guesses(features).tokens.shape == (0, 5)


def test_whole_vocabulary_up_to_8192(model):
    assert trainer("eagle3", model).draft_ids is None
    assert trainer("eagle3", model, draft_vocab_size=VOCAB).draft_ids is None
    large = target(vocab_size=8200)
    assert trainer("eagle3", large).draft_ids is None  # 32000 would be more than all
    assert trainer("eagle3", large, draft_vocab_size=8199).head.lm_head.out_features == 8199


def test_layers_that_are_read():
    """The published ones of deep targets; distinct ones, with one near the end, of shallow ones."""
    assert default_layers(32) == (2, 16, 29) and default_layers(12) == (2, 6, 9)
    assert default_layers(7) == (2, 4, 6)
    for depth in range(2, 12):
        layers = default_layers(depth)
        assert len(set(layers)) == 3 and list(layers) == sorted(layers) and layers[0] >= 0 and layers[-1] <= depth
    assert default_layers(1) == (0, 1)


@pytest.mark.parametrize("given", ["1,9", "1,1,2", "a,b", "", "-1,2", "1;2"])
def test_bad_layers_are_one_clear_error(model, given):
    with pytest.raises(TrainingError, match="--feature-layers"):
        trainer("eagle3", model, feature_layers=given)


def test_layers_are_shaped_like_the_targets():
    """Width, heads and base frequency; other families' settings fall back to Llama's."""
    config = layer_config_for(
        target(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}), None, 1
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size) == (
        4,
        2,
        8,
        64,
    )
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


def test_the_rotary_base_of_layers_of_several_kinds():
    """Every new drafter gets that of the first kind."""
    made = target()
    made.config.rope_parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    shapes = (
        layer_config_for(made, None, 1),
        draft_config(DraftModelOptions(), made),
        layers_config(DFlashOptions(), made),
    )
    assert [each.rope_parameters["rope_theta"] for each in shapes] == [5e5] * 3


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_fewer_key_value_heads(model, heads):
    attention = trainer("eagle3", model, num_key_value_heads=heads).head.layers[0].self_attn
    assert attention.k_proj.out_features == attention.v_proj.out_features == heads * 8


def test_key_value_heads_that_cannot_be_shared(model):
    with pytest.raises(
        TrainingError, match="--num-key-value-heads must divide the target's 4 attention heads, not be 3"
    ):
        trainer("eagle3", model, num_key_value_heads=3)


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "more"), [("eagle", {}), ("eagle3", {}), ("eagle3", {"parallel": True, "num_layers": 2})]
)
def test_training_learns(tmp_path, method, more):
    """A few steps on answers that can be learnt; every parameter moves; the exported head loads and drafts."""
    pytest.importorskip("matplotlib")
    rows = write_rows(tmp_path / "data.jsonl", qa_rows(24))
    options = {"max_steps": 25, "learning_rate": 1e-2, "tokens_per_batch": 400, "bf16": True, **more}
    trained = train(method, tmp_path / "head", rows, **options)
    log = [json.loads(line) for line in (tmp_path / "head/training/log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    accuracy = [entry["accuracy_1"] for entry in log if "loss" in entry]
    assert accuracy[-1] > accuracy[0]
    model = tiny_llama()
    inputs = ragged([6, 9])
    plain = model.generate(**inputs, max_new_tokens=8)
    assert torch.equal(
        model.generate(**inputs, max_new_tokens=8, speculative_config={"model": str(trained.folder)}), plain
    )


@pytest.mark.parametrize("kind", ["eagle3, speculators", "eagle3, speculators, all tokens"])
def test_speculators_reads_the_export(tmp_path, model, kind):
    """The speculators package computes the logits we do, at every step of a greedy draft under teacher forcing."""
    speculators = pytest.importorskip("speculators")
    method, form, options = KINDS[kind]
    made = trainer(method, model, **options)
    folder = export(made, tmp_path / "head", form)
    model.model.save_pretrained(tmp_path / "target")
    config_file = tmp_path / "head/config.json"
    config = json.loads(config_file.read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(tmp_path / "target")
    config["transformer_layer_config"]["_attn_implementation"] = "eager"
    config_file.write_text(json.dumps(config))
    theirs = speculators.SpeculatorModel.from_pretrained(folder, dtype=torch.float32).eval()
    text = random_text(12)
    batch, logits = batch_of([text], model, made.taps), []
    theirs.lm_head.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    aux = torch.cat([batch.layers[i] for i in made.taps.layers], dim=-1)
    ids = torch.tensor([[*text[1:], 0]])
    with torch.no_grad():
        theirs(aux, ids, torch.zeros_like(ids), position_ids=torch.arange(12)[None], ttt_steps=3)
        outputs = list(made.unrolled(batch, 3))
        for step, output in enumerate(outputs):
            torch.testing.assert_close(
                logits[step][: 11 - step],
                made.head.logits(output[0], made.head.lm_head)[: 11 - step],
                atol=1e-4,
                rtol=1e-4,
            )
