"""Losses and guesses against plain float64 loops that share no code with the trainers; the estimate of τ likewise."""

import math

import pytest
import torch
from helpers_training import ragged_batch, target, trainer

from hf_specdec.training import Batch, Guesses, every_anchor, losses
from hf_specdec.training.base import Estimate, judge

HEADS = 3


def weights(made):
    return {name: tensor.detach().double() for name, tensor in made.head.state_dict().items()}


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - shifted.exp().sum().log()


def silu(x):
    return x / (1 + torch.exp(-x))


def positions(batch):
    """(row, t, k, label) of everything that counts, from the definition: head k at t guesses token t + 2 + k."""
    for row in range(len(batch.lengths)):
        for t in range(int(batch.lengths[row])):
            for k in range(HEADS):
                place = t + 2 + k
                if place < int(batch.lengths[row]) and batch.loss_mask[row, place]:
                    yield row, t, k, int(batch.input_ids[row, place])


def teacher_of(model, batch, row, t, k):
    """log p of the target for the token at t + 2 + k."""
    return log_softmax(model.lm_head.weight.double() @ batch.last_hidden[row, t + 1 + k].double())


def divergence(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum()


def check(made, batch, logits_of, loss_of):
    """The trainer's loss, accuracies and guesses against `logits_of(row, t, k)` and `loss_of(log q, row, t, k, label)`."""
    total, weight, right, seen = 0.0, 0, [0] * HEADS, [0] * HEADS
    for row, t, k, label in positions(batch):
        logits = logits_of(row, t, k)
        total += float(loss_of(log_softmax(logits), row, t, k, label))
        weight += k == 0
        if made.options.loss in losses.TAUGHT:
            label = int(teacher_of(made.target, batch, row, t, k).argmax())
        right[k] += int(logits.argmax()) == label
        seen[k] += 1
    out = made.loss(batch)
    assert float(out.loss.detach()) == pytest.approx(total, rel=1e-4)
    assert float(out.weight) == weight
    for k in range(HEADS):
        assert [float(x) for x in out.metrics[f"accuracy_{k + 1}"]] == [right[k], seen[k]]
    with torch.no_grad():
        guesses = made.guesses(batch)
    told = {(int(r), int(a)): g.tolist() for r, a, g in zip(guesses.rows, guesses.anchors, guesses.tokens, strict=True)}
    assert told.keys() >= {(row, t + 1) for row, t, k, _ in positions(batch) if k == 0}
    for row, t, k, _ in positions(batch):
        if (row, t + 1) in told:  # only drafts whose first token counts are compared with the target
            assert told[row, t + 1][k] == int(logits_of(row, t, k).argmax())
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in made.head.parameters() if p.requires_grad)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
def test_medusa(own, layers):
    model = target()
    batch = ragged_batch(model)
    made = trainer("medusa", model, num_heads=HEADS, num_layers=layers, own_lm_head=own)
    w = weights(made)
    shared = model.lm_head.weight.double()

    def logits_of(row, t, k):
        u = batch.last_hidden[row, t].double()
        for j in range(layers):
            u = u + silu(w[f"blocks.{k}.layers.{j}.weight"] @ u + w[f"blocks.{k}.layers.{j}.bias"])
        return (w[f"lm_heads.{k}.weight"] if own else shared) @ u

    check(made, batch, logits_of, lambda log_q, row, t, k, label: -(0.8**k) * log_q[label])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_mlp_speculator(tied, scaled, loss):
    model = target()
    batch = ragged_batch(model)
    inner = 24
    made = trainer(
        "mlp_speculator",
        model,
        num_heads=HEADS,
        inner_dim=inner,
        tie_weights=tied,
        scale_input=scaled,
        loss=loss,
    )
    w = weights(made)
    state_weight = 0.5 ** (0.5 / HEADS)
    emb_weight = math.sqrt((1 - state_weight**2) * inner / 2)

    def rms(x):
        return x / torch.sqrt((x * x).mean() + 1e-6)

    def logits_of(row, t, k):
        s = batch.last_hidden[row, t].double()
        s = rms(s) / math.sqrt(2) if scaled else s
        logits = None
        for i in range(k + 1):
            own, proj = (0, min(i, 1)) if tied else (i, i)
            token = int(batch.input_ids[row, t + 1 + i])
            z = w[f"proj.{proj}.weight"] @ s + emb_weight / state_weight * w[f"emb.{own}.weight"][token]
            z = rms(z) * w[f"ln.{own}.weight"] + w[f"ln.{own}.bias"]
            s = z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
            logits = w[f"head.{own}.weight"] @ s
        return logits

    def loss_of(log_q, row, t, k, label):
        return -log_q[label] if loss == "ce" else divergence(teacher_of(model, batch, row, t, k), log_q)

    check(made, batch, logits_of, loss_of)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("loss", "decay"), [("kl", 1.0), ("ce", 0.8)])
def test_hydra(layers, loss, decay):
    model = target()
    batch = ragged_batch(model)
    made = trainer(
        "hydra",
        model,
        num_heads=HEADS,
        num_layers=layers,
        loss=loss,
        head_decay=decay,
    )
    w = weights(made)
    embeddings = model.embed_tokens.weight.double()

    def logits_of(row, t, k):
        tokens = batch.input_ids[row, t + 1 : t + 2 + k]
        x = torch.cat([batch.last_hidden[row, t].double(), *embeddings[tokens]])
        name = f"heads.{k}.blocks.0"
        residual = w[f"{name}.res_connection.weight"] @ x + w[f"{name}.res_connection.bias"]
        x = residual + silu(w[f"{name}.linear.weight"] @ x + w[f"{name}.linear.bias"])
        for j in range(1, layers):
            x = x + silu(w[f"heads.{k}.blocks.{j}.linear.weight"] @ x + w[f"heads.{k}.blocks.{j}.linear.bias"])
        return w[f"heads.{k}.lm_head.weight"] @ x + w[f"heads.{k}.lm_head.bias"]

    def loss_of(log_q, row, t, k, label):
        return decay**k * (-log_q[label] if loss == "ce" else divergence(teacher_of(model, batch, row, t, k), log_q))

    check(made, batch, logits_of, loss_of)


def test_hydra_plus_plus_reads_the_prefix_layer():
    """The prefix layer's outputs are those of transformers' layer on each text alone, unpadded."""
    model = target()
    batch = ragged_batch(model)
    made = trainer("hydra", model, num_heads=HEADS, prefix_layer=True)
    prefix = made.head.prefix
    states = made._states(batch)
    for row, length in enumerate(batch.lengths.tolist()):
        alone = prefix(batch.last_hidden[row : row + 1, :length], torch.arange(length)[None], attention_mask=None)
        assert torch.allclose(states[row, :length], alone[0], atol=1e-5)
    first = prefix(batch.last_hidden[:1, :4], torch.arange(4)[None], attention_mask=None)
    assert torch.allclose(states[0, :4], first[0], atol=1e-5)  # causal
    assert float(made.loss(batch).loss.detach()) > 0


def test_heads_begin_as_the_target():
    """Medusa's and Hydra's heads say, before the first step, what the target says next."""
    model = target()
    batch = ragged_batch(model)
    for method in ("medusa", "hydra"):
        made = trainer(method, model, num_heads=HEADS)
        made.head = made.build(torch.ones(model.vocab_size, dtype=torch.long))  # unshaken
        guesses = made.guesses(batch)
        choices = model.choices(batch)[guesses.rows, guesses.anchors - 1]  # from the hidden state that the heads read
        assert len(choices) > HEADS and all(torch.equal(guesses.tokens[:, k], choices) for k in range(HEADS))


@pytest.mark.parametrize("asked", [True, False])
def test_mlp_speculator_begins_with_the_authors_scale(caplog, asked):
    """So does one that is wider than the target, whatever `from_target` says; the log says so."""
    made = trainer("mlp_speculator", target(), num_heads=HEADS, inner_dim=64, from_target=asked)
    made.head = made.build(torch.ones(61, dtype=torch.long))
    assert ("--inner-dim 64" in caplog.text) == asked
    for each in (*made.head.emb, *made.head.proj, *made.head.head):
        assert float(each.weight.detach().std()) == pytest.approx(1 / 8, rel=0.05)


def test_mlp_speculator_begins_as_the_target_along_its_main_directions():
    """At full width nothing of the target's head is lost; at less, the rest is the best of that rank."""
    model = target()
    head = model.lm_head.weight.double()
    for inner in (model.hidden_size, 12):
        made = trainer("mlp_speculator", model, num_heads=HEADS, inner_dim=inner, tie_weights=True)
        made.head = made.build(torch.ones(61, dtype=torch.long))
        w = weights(made)
        got = w["head.0.weight"] @ w["proj.0.weight"]
        u, s, v = torch.linalg.svd(head, full_matrices=False)
        torch.testing.assert_close(got, (u[:, :inner] * s[:inner]) @ v[:inner], atol=1e-4, rtol=1e-4)
        assert float(w["emb.0.weight"].square().mean()) == pytest.approx(1 / inner, rel=1e-4)
    made = trainer("mlp_speculator", model, num_heads=HEADS, inner_dim=model.hidden_size, from_target=False)
    made.head = made.build(torch.ones(61, dtype=torch.long))
    w = weights(made)
    assert not torch.allclose(w["head.0.weight"] @ w["proj.0.weight"], head, atol=0.1)


# ---- losses ---------------------------------------------------------------------------------------------------------


def test_lk_is_its_formula():
    """s KL + (1 - s) TV with s = exp(-3 (1 - TV)), TV half the L1 distance; and the gradient that this has for a fixed s."""
    torch.manual_seed(0)
    logits, teacher = torch.randn(5, 9, dtype=torch.float64, requires_grad=True), torch.randn(5, 9).double().softmax(-1)
    q = logits.softmax(-1)
    distance = 0.5 * (q - teacher).abs().sum(-1)
    share = torch.exp(-3 * (1 - distance.detach()))
    expected = share * (teacher * (teacher / q).log()).sum(-1) + (1 - share) * distance
    found = losses.token_loss("lk", logits, torch.zeros(5, dtype=torch.long), teacher)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (found, expected))
    )
    torch.testing.assert_close(losses.acceptance(logits, teacher), 1 - distance)


@pytest.mark.parametrize("loss", ["ce", "dpace"])
def test_depths_are_weighted(loss):
    """Fixed weights; or D-PACE's, a sum over depths k >= j of products of 0.5 + 0.5 q, for drafts some of whose tokens do not count."""
    torch.manual_seed(0)
    found = {(0, 0): 0.3, (0, 1): 1.2, (0, 2): 0.1, (1, 0): 2.0, (1, 2): 0.7, (3, 0): 0.4}
    depths = []
    for k in range(3):
        drafts = [draft for draft, depth in found if depth == k]
        nats = torch.tensor([found[draft, k] for draft in drafts], requires_grad=True)
        depths.append((torch.tensor(drafts), nats, 2 * nats, torch.ones(len(drafts), dtype=torch.bool)))
    weights, expected = [1.0, 0.5, 0.25], {}
    for draft, j in found:
        prefix, expected[draft, j] = 1.0, 0.0
        for k in range(3):
            if (draft, k) in found:
                prefix *= 0.5 + 0.5 * math.exp(-found[draft, k])
                expected[draft, j] += prefix if k >= j else 0.0
        if loss == "ce":
            expected[draft, j] = weights[j]
    out = losses.draft_loss(loss, weights, 4, iter(depths))
    assert float(out.loss.detach()) == pytest.approx(sum(2 * nats * expected[key] for key, nats in found.items()))
    assert int(out.weight) == 3 and [int(out.metrics[f"accuracy_{k}"][1]) for k in (1, 2, 3)] == [3, 1, 2]
    out.loss.backward()
    for k, (drafts, nats, *_) in enumerate(depths):
        assert nats.grad.tolist() == pytest.approx([2 * expected[draft, k] for draft in drafts.tolist()])


# ---- the target -----------------------------------------------------------------------------------------------------


def test_captured_states_are_the_model_s_own():
    """Ragged rows padded on the right give each text's own hidden states, indexed as transformers does."""
    model = target()
    batch = ragged_batch(model)
    for row, length in enumerate(batch.lengths.tolist()):
        out = model.model(batch.input_ids[row : row + 1, :length], output_hidden_states=True)
        for index in (1, 2):
            assert torch.allclose(batch.layers[index][row, :length], out.hidden_states[index][0], atol=1e-5)
        assert torch.allclose(batch.last_hidden[row, :length], out.hidden_states[-1][0], atol=1e-5)
        assert torch.allclose(model.logits(batch.last_hidden[row, :length]), out.logits[0], atol=1e-4)
        assert torch.equal(model.choices(batch)[row, :length], out.logits[0].argmax(-1))


# ---- the estimate ---------------------------------------------------------------------------------------------------


def test_estimate_by_hand():
    """One text of 8 tokens, the last 5 count; two anchors with drafts of three."""
    batch = Batch(torch.zeros(1, 8, dtype=torch.long), torch.tensor([8]), torch.tensor([[False] * 3 + [True] * 5]))
    choices = torch.arange(8)[None] * 10  # the target's choice after position p is 10 p
    tokens = torch.tensor([[30, 40, 99], [50, 99, 70], [70, 1, 1], [0, 10, 20]])
    guesses = Guesses(tokens, torch.zeros(4, dtype=torch.long), torch.tensor([3, 5, 7, 0]))
    accepted, offered = judge(guesses, choices, batch)
    # anchor 3: right, right, wrong; 5: right, wrong (70 would follow a wrong one; and 8 is behind the end); 7: nothing
    # follows; 0: its first two guesses are for tokens of the prompt, so only the third counts, after uncounted ones: not judged.
    assert accepted.tolist() == [2, 1, 0]
    assert offered.tolist() == [2, 2, 1]
    estimate = Estimate.of(accepted, offered)
    assert estimate.acceptance == [1.0, 0.5, 0.0]
    assert estimate.tau == 1 + 1 + 0.5


def test_estimate_of_a_perfect_drafter_is_its_length():
    model = target()
    batch = ragged_batch(model, prompt=1)
    choices = model.choices(batch)
    perfect = torch.stack([Batch.ahead(choices, 1 + k) for k in range(HEADS)], dim=-1)
    accepted, offered = judge(every_anchor(perfect), choices, batch)
    assert Estimate.of(accepted, offered).tau == 1 + HEADS
    assert offered[0] == sum(length - 2 for length in batch.lengths.tolist())
