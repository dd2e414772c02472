"""Heads that their authors' code made and saved draft as that code does.

It needs the authors' repositories: `scripts/format_differences.py` fetches the commits it names, and runs this file.
"""

import importlib
import itertools
import os
from types import SimpleNamespace

import pytest
import torch
from helpers_dflash import gemma_config
from helpers_eagle import hidden_states, scripted
from helpers_eagle3 import SCRIPT
from helpers_speculators import mlp_checkpoint, recorded
from oracle import VOCAB, ragged, tiny_llama
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaConfig, Qwen3Config

REFERENCES = os.environ.get("HF_SPECDEC_REFERENCES")
pytestmark = pytest.mark.skipif(not REFERENCES, reason="HF_SPECDEC_REFERENCES names no folder of checkouts")
BLOCK, MASK = 6, 5


@pytest.fixture(autouse=True)
def references(monkeypatch):
    """The repositories' packages can be imported, and run uncompiled."""
    for folder in ("site", "SpecForge", "DeepSpec", "dflash", "EAGLE", "fms-extras"):
        monkeypatch.syspath_prepend(os.path.join(str(REFERENCES), folder))
    with torch._dynamo.config.patch(disable=True):
        yield


def layers_config(kind=Qwen3Config, **changes):
    settings = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}, "layer_types": ["full_attention"] * 2, "pad_token_id": 0,
    }  # fmt: skip
    config = kind(**(settings | changes))
    config._attn_implementation = "eager"
    return config


@torch.no_grad()
def randomized(module, seed=0):
    """Distinct weights everywhere, so that none can be left out unseen."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.float().eval().named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 1 if "embed" in name or "markov" in name or "codebook" in name else 0.8 / parameter.shape[-1] ** 0.5
        parameter.copy_(1 + 0.3 * noise if "norm" in name and parameter.ndim == 1 else noise * scale)
    return module


def check(target, folder, expected, depth=BLOCK - 1, tree=False, **config):
    """Every draft logit of a generation, over rounds of accepted and rejected drafts, equals `expected(text, path, states)` [V]."""
    shape = {"branching_factors": [2, 2] + [1] * (depth - 2)} if tree else {"num_speculative_tokens": depth}
    config = {"model": str(folder), **shape, **config}
    recorder = recorded(target, config)
    target.generate(**ragged([9, 4]), max_new_tokens=20, logits_processor=scripted(SCRIPT), speculative_config=config)
    states = hidden_states(target, {tuple(text) for text, _, _ in recorder.seen})
    for text, path, logits in recorder.seen:
        with torch.no_grad():
            wanted = expected(text, path, [state[: len(text)].float() for state in states[tuple(text)]])
        largest = float(wanted[wanted > -torch.inf].abs().max())
        torch.testing.assert_close(logits, wanted, atol=2e-5 * max(5.0, largest), rtol=0)
    assert max(len(path) for _, path, _ in recorder.seen) == depth - 1
    lengths = sorted(len(text) for text, path, _ in recorder.seen if not path)
    assert len({after - before for before, after in itertools.pairwise(lengths)}) > 2, (
        "drafts were accepted to unlike extents"
    )


# ---- drafters of blocks ---------------------------------------------------------------------------------------------


def block(text):
    return torch.tensor([[text[-1]] + [MASK] * (BLOCK - 1)])


def taps(states, layers):
    """[1, n - 1, H * layers] of a text's tokens but the last."""
    return torch.cat([states[i][:-1] for i in layers], dim=-1)[None]


DFLASH = {
    "z-lab DFlash": ("dflash.model", "DFlashDraftModel", {}),
    "SpecForge DFlash": ("specforge.modeling.draft.dflash", "DFlashDraftModel", {}),
    "SpecForge Domino": (
        "specforge.modeling.draft.domino", "DominoDraftModel",
        {"projector_type": "domino", "emb_dim": 7, "gru_hidden_dim": 10, "pure_draft_prefix_len": 1, "shift_label": False},
    ),
    "SpecForge Domino, shifted": (
        "specforge.modeling.draft.domino", "DominoDraftModel",
        {"projector_type": "domino", "emb_dim": 7, "gru_hidden_dim": 10, "pure_draft_prefix_len": 1, "shift_label": True},
    ),
    **{
        f"SpecForge DSpark, {kind}": (
            "specforge.modeling.draft.dspark", "DSparkDraftModel",
            {
                "projector_type": "dspark", "markov_rank": 6, "markov_head_type": kind, "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            },
        )
        for kind in ("vanilla", "gated", "rnn")
    },
}  # fmt: skip


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("name", DFLASH)
def test_dflash_and_its_relatives(tmp_path, name, tree):
    target = tiny_llama(0)
    module, cls, own = DFLASH[name]
    config = layers_config(
        block_size=BLOCK, num_target_layers=3, dflash_config={"mask_token_id": MASK, "target_layer_ids": [0, 1], **own}
    )
    author = randomized(getattr(importlib.import_module(module), cls)(config))
    author.save_pretrained(tmp_path)
    anchor_first = own.get("shift_label", "markov_rank" in own)

    def expected(text, path, states):
        positions = torch.arange(len(text) + BLOCK - 1)[None]
        embed, head = target.get_input_embeddings(), target.get_output_embeddings()
        hidden = author(
            position_ids=positions,
            noise_embedding=embed(block(text)),
            target_hidden=taps(states, (1, 2)),
            is_causal=False,
        )
        slot = len(path) + (not anchor_first)
        known = torch.tensor([[text[-1], *path] + [MASK] * BLOCK])[:, :BLOCK]
        if "gru_hidden_dim" in own:
            inputs = {"prev_token_embeddings": embed(known)[:, None]}
            return author.apply_logits_head(head(hidden)[:, None], hidden_states=hidden[:, None], **inputs)[0, 0, slot]
        if "markov_rank" in own:
            return author.apply_logits_head(head(hidden), prev_token_ids=known, hidden_states=hidden)[0, slot]
        return head(hidden)[0, slot]

    check(target, tmp_path, expected, BLOCK - (not anchor_first), tree)


def gemma_layers(**changes):
    """Gemma 4's configuration as DeepSpec copies it, and its rotary embedding, which had another constructor then."""
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    class Rotary(Gemma4TextRotaryEmbedding):
        def __init__(self, config, layer_type):
            super().__init__(config)

    options = {"layers": 2, "shared_values": True, "softcap": 3.0}
    keys = gemma_config(tiny_llama(0), 4, 1, 16, options) | {"pad_token_id": 0} | changes
    config = Gemma4TextConfig(**keys)
    config.num_global_key_value_heads, config.global_head_dim = 1, 16
    config._attn_implementation = "eager"
    return config, Rotary


def of_deepspec(package, name, family, folder, monkeypatch, own):
    """A random head of DeepSpec, saved."""
    modeling = importlib.import_module(f"deepspec.modeling.{package}.{family}.modeling")
    if family == "gemma4":
        config, rotary = gemma_layers(**own)
        monkeypatch.setattr(modeling, "Gemma4TextRotaryEmbedding", rotary)
    else:
        config = layers_config(**own)
    author = randomized(getattr(modeling, family.title() + name)(config))
    author.save_pretrained(folder)
    return author


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
@pytest.mark.parametrize("kind", [None, "vanilla", "gated", "rnn"])
def test_dspark_of_deepspec(tmp_path, monkeypatch, kind, family):
    target = tiny_llama(0)
    own = (
        {"markov_rank": 6, "markov_head_type": kind, "confidence_head_with_markov": True}
        if kind
        else {"markov_rank": 0}
    )
    own |= {
        "block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [-1, 1], "num_anchors": 4, "num_target_layers": 3,
        "enable_confidence_head": kind is not None,
    }  # fmt: skip
    author = of_deepspec("dspark", "DSparkModel", family, tmp_path, monkeypatch, own)

    def expected(text, path, states):
        hidden = author._forward_backbone(
            position_ids=torch.arange(len(text) + BLOCK - 1)[None], noise_embedding=author.embed_tokens(block(text)),
            target_hidden_states=taps(states, (0, 2)),
        )  # fmt: skip
        logits = author.compute_logits(hidden)[:, None]
        if author.markov_head is not None:
            known = torch.tensor([[[text[-1], *path] + [MASK] * BLOCK]])[..., :BLOCK]
            logits = author.markov_head.apply_block_logits(logits, token_ids=known, hidden_states=hidden[:, None])
        return logits[0, 0, len(path)]

    check(target, tmp_path, expected, BLOCK)


SPECULATORS = {
    "DFlash": ("dflash", "DFlashDraftModel", "DFlashSpeculatorConfig", {}),
    "DFlash, sliding": ("dflash", "DFlashDraftModel", "DFlashSpeculatorConfig", {"sliding_window_non_causal": False}),
    "DFlash2": (
        "dflash2", "DFlash2DraftModel", "DFlash2SpeculatorConfig",
        {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 50},
    ),
    **{
        f"DSpark, {kind}": (
            "dspark", "DSparkDraftModel", "DSparkSpeculatorConfig",
            {"markov_rank": 6, "markov_head_type": kind, "sample_from_anchor": True},
        )
        for kind in ("vanilla", "gated", "rnn")
    },
}  # fmt: skip


def speculators_config(algorithm):
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=algorithm, default_proposal_method="greedy", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=5)],
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )  # fmt: skip


@pytest.mark.parametrize("name", SPECULATORS)
def test_dflash_of_speculators(tmp_path, name):
    target = tiny_llama(0)
    package, model_class, config_class, own = SPECULATORS[name]
    core = importlib.import_module(f"speculators.models.{package}.core")
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "use_sliding_window": True}
    config = getattr(importlib.import_module(f"speculators.models.{package}.config"), config_class)(
        transformer_layer_config=layers_config(**(sliding if "sliding" in name else {})), draft_vocab_size=VOCAB, block_size=BLOCK,
        aux_hidden_state_layer_ids=[1, 2], mask_token_id=MASK,
        speculators_config=speculators_config(package), **own,
    )  # fmt: skip
    author = randomized(getattr(core, model_class)(config))
    with torch.no_grad():
        author.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        author.lm_head.weight.copy_(target.get_output_embeddings().weight)
    author.save_pretrained(tmp_path)
    first = 0 if own.get("sample_from_anchor") else 1

    def expected(text, path, states):
        # The library drafts after an anchor within a text. No slot may see what follows the anchor.
        ids = torch.tensor([[*text] + [MASK] * (2 * BLOCK)])
        noise = torch.randn(1, ids.shape[1] - len(text) + 1, 64, generator=torch.Generator().manual_seed(1))
        anchors = torch.zeros_like(ids)
        anchors[0, len(text) - 1] = 1
        hidden, logits, *_ = author._backbone_forward(
            torch.cat([taps(states, (1, 2)), noise], dim=1), ids, anchors, torch.zeros(1, ids.shape[1], 32), torch.zeros_like(ids),
            max_anchors=1,
        )  # fmt: skip
        slot = first + len(path)
        before = torch.tensor([[text[-1], *path] + [MASK] * BLOCK])[:, : BLOCK - first]
        before = torch.cat([before[:, :first], before], dim=1)  # the token before that of a slot
        if package == "dspark":
            head = author.markov_head
            bias = head.block_bias(prev_token_ids=before, hidden_states=hidden, prev_emb=head.prev_embeddings(before))
            return (logits + bias)[0, slot]
        if package == "dflash2":
            chosen = logits.topk(own["selector_top_k"], dim=-1).indices
            scores = author.candidate_selector.score_candidates(logits, hidden, before, chosen)
            return torch.full((VOCAB,), -torch.inf).scatter(0, chosen[0, slot], scores[0, slot])
        return logits[0, slot]

    check(target, tmp_path, expected, BLOCK - first)


# ---- EAGLE ----------------------------------------------------------------------------------------------------------


def grown(path, features, tokens, run, read):
    """Logits after a path: the head reads (feature, next token) rows, then (its own state, drafted token) rows, one at a time."""
    rows = run(features, torch.tensor([tokens]))
    for token in path:
        features = torch.cat([features, rows[:, -1:]], dim=1)
        tokens = [*tokens, token]
        rows = run(features, torch.tensor([tokens]))
    return read(rows[0, -1])


def eagle_model(module, folder, target, **changes):
    """A head of the EAGLE repository, saved; with the target's embeddings. Its code reads configurations of older transformers."""
    config = layers_config(LlamaConfig, num_hidden_layers=1, layer_types=None, **changes)
    older = SimpleNamespace(**config.to_dict(), rope_scaling=None, rope_theta=700.0)
    author = randomized(importlib.import_module(module).Model(older))
    with torch.no_grad():
        author.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    if "t2d" in author.state_dict():
        author.t2d.fill_(True)
    save_file(author.state_dict(), folder / "model.safetensors")
    config.save_pretrained(folder)
    return author


def test_eagle_of_safeailab(tmp_path):
    target = tiny_llama(0)
    author = eagle_model("eagle.model.cnets1", tmp_path, target)

    def expected(text, path, states):
        return grown(path, states[-2][None, :-1], list(text[1:]), author, target.get_output_embeddings())

    check(target, tmp_path, expected, tree=True, method="eagle")


def test_eagle3_of_safeailab(tmp_path):
    target = tiny_llama(0, num_hidden_layers=6)
    author = eagle_model("eagle.model.cnets", tmp_path, target, draft_vocab_size=VOCAB)

    def expected(text, path, states):
        features = author.fc(taps(states, (2, 3, 3)))
        return grown(path, features, list(text[1:]), author, lambda row: author.lm_head(author.norm(row)))

    check(target, tmp_path, expected, tree=True, method="eagle3")


@pytest.mark.parametrize(
    "changes", [{}, {"norm_output": False}, {"fc_norm": True}], ids=["", "norm_output: false", "fc_norm"]
)
def test_eagle3_of_specforge(tmp_path, changes):
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    target = tiny_llama(0, num_hidden_layers=6)
    config = layers_config(
        LlamaConfig, num_hidden_layers=1, layer_types=None, draft_vocab_size=VOCAB, pretraining_tp=1,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}, **changes,
    )  # fmt: skip
    author = randomized(LlamaForCausalLMEagle3(config))
    author.save_pretrained(tmp_path)

    def run(features, ids):
        positions = torch.arange(ids.shape[1])[None]
        return author.backbone(author.embed_input_ids(ids), features, None, None, positions)

    def expected(text, path, states):
        features = author.project_hidden_states(taps(states, (1, 2, 5)))
        return grown(path, features, list(text[1:]), run, author.compute_logits)

    check(target, tmp_path, expected, tree=True, method="eagle3")


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_eagle3_of_deepspec(tmp_path, monkeypatch, family):
    target = tiny_llama(0, num_hidden_layers=7)
    own = {
        "num_hidden_layers": 1, "layer_types": ["full_attention"], "target_layer_ids": [0, 1, 2, 4, 5], "ttt_length": 5,
        "step_loss_decay": 0.8, "draft_num_hidden_layers": 1, "num_target_layers": 7,
    }  # fmt: skip
    author = of_deepspec("eagle3", "Eagle3Model", family, tmp_path, monkeypatch, own)

    def expected(text, path, states):
        cache, ids, features, start = DynamicCache(), torch.tensor([text[1:]]), taps(states, (1, 2, 3, 5, 6)), 0
        for token in (None, *path):
            if token is not None:
                ids, start = torch.tensor([[token]]), cache.get_seq_length()
            features = author.extend_draft_cache(features, ids, start + torch.arange(ids.shape[1])[None], cache)
        return author.compute_logits(features)[0, -1]

    check(target, tmp_path, expected, tree=True)


@pytest.mark.parametrize("layers", ["qwen3", "qwen3_5_text"])
def test_mtp_of_speculators(tmp_path, layers):
    from speculators.models.mtp.config import MTPSpeculatorConfig
    from speculators.models.mtp.core import MTPDraftModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    target = tiny_llama(0)
    kind = CONFIG_MAPPING[layers]
    config = MTPSpeculatorConfig(
        transformer_layer_config=layers_config(kind, num_hidden_layers=1, layer_types=["full_attention"]),
        num_nextn_predict_layers=1, speculators_config=speculators_config("mtp"),
    )  # fmt: skip
    author = randomized(MTPDraftModel(config))
    del author.verifier_lm_head  # as its `load_verifier_weights` does
    with torch.no_grad():
        author.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        author.lm_head.weight.copy_(target.get_output_embeddings().weight)
    author.save_pretrained(tmp_path)

    def run(features, ids):
        positions = torch.arange(ids.shape[1])[None]
        rotary = positions[None].expand(3, -1, -1) if layers == "qwen3_5_text" else positions
        mask = torch.full((ids.shape[1], ids.shape[1]), torch.finfo(torch.float32).min).triu(1)[None, None]
        return author.mtp_layers[0](
            hidden_states=features, token_embeddings=author.embed_tokens(ids), attention_mask=mask, position_ids=positions,
            position_embeddings=author.rotary_emb(features, rotary),
        )  # fmt: skip

    def expected(text, path, states):
        return grown(path, states[-2][None, :-1], list(text[1:]), run, author.lm_head)

    check(target, tmp_path, expected, tree=True)


# ---- heads without attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"tied": True, "scale_input": True}], ids=["untied", "tied, scaled"])
def test_mlp_speculator_of_fms(tmp_path, options):
    from fms_extras.models.speculator import MLPSpeculator

    target = tiny_llama(0)
    stored = mlp_checkpoint(tmp_path, n_predict=5, hidden=32, repeat=True, **options)
    author = MLPSpeculator(
        32, 24, VOCAB, 5, tie_weights=options.get("tied", False), scale_input=options.get("scale_input", False)
    )
    author.load_state_dict({name.removeprefix("speculator."): tensor for name, tensor in stored.weights.items()})

    def expected(text, path, states):
        tokens = torch.tensor([[text[-1], *path] + [0] * 5])[:, :5]
        return author(states[-2][None, -2:-1], tokens)[len(path), 0, 0]

    check(target, tmp_path, expected, tree=True)
