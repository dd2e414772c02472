"""Medusa heads: every layout of their files, the numbers they draft with, trees, losslessness, and files that do not fit."""

import copy
import json
import logging

import pytest
import torch
from combinations import covering
from differences import largest_difference
from families import make
from helpers_drafters import (
    RAGGED,
    assert_drafts_in_transformers_own_loop,
    assert_forced,
    assert_four_heads_bound_the_length,
    assert_lossless,
    assert_refused,
    forced,
    kept_proposals,
)
from helpers_medusa import CONVERTED, HIDDEN, ORIGINAL, SPECULATORS, converted, original, renamed, write
from helpers_speculators import DraftRecorder, TrueHidden
from oracle import VOCAB, assert_clean, ragged, tiny_llama
from safetensors.torch import save_file

from hf_specdec import integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.candidate_generators.growing.tree_shapes import PUBLISHED_TREES
from hf_specdec.core.sequence import Sequence

TREES = {
    "chain": {},
    "published": {"speculative_token_tree": "medusa_mc_sim_7b_63"},
    "static": {"speculative_token_tree": [[0], [1], [2], [0, 0], [2, 1], [2, 1, 0]]},
    "dynamic": {"top_k": 3, "total_tokens": 10},
}


pytestmark = pytest.mark.usefixtures("forget_decoders")


TOKEN_MAP = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:40]
DRAFTED = TOKEN_MAP.sort().values
D2T = {"d2t": DRAFTED - torch.arange(40), "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, DRAFTED, True)}
# layout → (tensors, config.json, file, number of heads)
LAYOUTS = {
    "v0.1": (original(), ORIGINAL, "medusa_lm_head.pt", 4),
    "v0.1 safetensors": (original(), ORIGINAL, "medusa_lm_head.safetensors", 4),
    "with prefix": (renamed("medusa_head.", original(3)), {}, "medusa_lm_head.pt", 3),
    "repeated blocks": (original(3, 3, repeat=True), ORIGINAL, "medusa_lm_head.pt", 3),
    "two blocks": (original(3, 2), {"medusa_num_layers": 2}, "medusa_lm_head.pt", 3),
    "target's head": (original(5, own=False), ORIGINAL, "medusa_lm_head.pt", 5),
    "one head": (original(1), ORIGINAL, "medusa_lm_head.pt", 1),
    "converted": (converted(), CONVERTED, "model.safetensors", 3),
    "converted, bias": (converted(bias=True), CONVERTED | {"medusa_fc_bias": True}, "model.safetensors", 3),
    "converted, prefix": (renamed("medusa_heads.", converted()), CONVERTED, "model.safetensors", 3),
    "original_lm_head": (converted(one="lm_head.weight"), CONVERTED | {"original_lm_head": True}, "model.safetensors", 3),
    "lm_heads.0": (converted(one="lm_heads.0.weight"), CONVERTED | {"original_lm_head": True}, "model.safetensors", 3),
    "every name": (
        converted(one="lm_head.weight lm_heads.0.weight lm_heads.1.weight lm_heads.2.weight"),
        CONVERTED | {"original_lm_head": True}, "model.safetensors", 3,
    ),
    "no head": (converted(one=" "), CONVERTED | {"original_lm_head": True}, "model.safetensors", 3),
    "token_map": (
        converted(vocab=40) | {"token_map": TOKEN_MAP}, CONVERTED | {"truncated_vocab_size": 40}, "model.safetensors", 3,
    ),
    "logit_scale": (converted(), CONVERTED | {"logit_scale": 0.25}, "model.safetensors", 3),
    "speculators": (converted(one=" "), SPECULATORS, "model.safetensors", 3),
    "speculators, own heads": (converted(), SPECULATORS | {"original_lm_head": False}, "model.safetensors", 3),
    "speculators, d2t": (converted(one=" ") | D2T, SPECULATORS | {"truncated_vocab_size": 40}, "model.safetensors", 3),
}  # fmt: skip


def reference(tensors, config, model, hidden, index):
    """Logits [Vd] of head `index`, by the formula, from the target's last hidden state [H]."""
    w = {name.removeprefix("medusa_head.").removeprefix("medusa_heads."): t.double() for name, t in tensors.items()}
    block = "{}.{}.linear" if "0.0.linear.weight" in w else "blocks.{}.layers.{}"
    x, j = hidden.double(), 0
    while (name := block.format(index, j)) + ".weight" in w:
        y = w[name + ".weight"] @ x + w.get(name + ".bias", 0)
        x, j = x + y / (1 + torch.exp(-y)), j + 1
    names = (f"{index}.{j}.weight", f"lm_heads.{index}.weight", "lm_head.weight", "lm_heads.0.weight")
    head = next((w[name] for name in names if name in w), None)
    rows = DRAFTED if "d2t" in w else slice(None)
    head = model.get_output_embeddings().weight.detach().double()[rows] if head is None else head
    return head @ x * config.get("logit_scale", 1.0)


def as_read(model, config):
    """The target as heads read it: those of speculators read what goes into its last norm."""
    if "speculators_model_type" in config:
        model = copy.deepcopy(model)
        model.model.norm = torch.nn.Identity()
    return model


def recorded(model, config) -> DraftRecorder:
    generator = integration.get_decoder(model, parse_config(config)).generator
    expand = generator.expand
    generator.expand = lambda level: expand(level).expand(-1, level.tokens.shape[1], -1)  # every node's, though shared
    return DraftRecorder(generator)


def largest_error(recorder, tensors, config, model) -> float:
    true = TrueHidden(model)
    return largest_difference(
        (logits, reference(tensors, config, model, true(text[:-1]), len(path))) for text, path, logits in recorder.seen
    )


# ---- numerics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_the_formula_s(tmp_path, model, layout):
    """Step by step, over rounds in which none, some and all drafts are accepted, against float64 from the whole text."""
    tensors, stated, file, depth = LAYOUTS[layout]
    config = write(tmp_path, tensors, stated, file)
    config |= forced(depth)
    recorder = recorded(model, config)
    output = model.generate(**RAGGED, max_new_tokens=16, speculative_config=config, return_dict_in_generate=True)
    assert_forced(output, recorder, depth)
    # without a norm, states and logits are some hundred times as large
    bound = 1e-3 if "speculators" in layout else 1e-4
    assert largest_error(recorder, tensors, stated, as_read(model, stated)) < bound
    if depth > 1:
        heads = integration.kept_decoders(model)[-1].generator.heads
        assert len(heads.blocks) == depth
        assert len({id(block) for block in heads.blocks[0].layers}) == (
            1 if "repeated" in layout else len(heads.blocks[0].layers)
        )
    assert_clean(model)


def test_the_formula_is_not_another(tmp_path, model):
    """The check above sees a head too many, and a scale that is not applied."""
    tensors, stated, _, _ = LAYOUTS["logit_scale"]
    config = write(tmp_path, tensors, stated)
    recorder = recorded(model, config)
    model.generate(**RAGGED, max_new_tokens=6, speculative_config=config)
    assert largest_error(recorder, tensors, stated, model) < 1e-4
    assert largest_error(recorder, tensors, CONVERTED, model) > 1e-2
    recorder.seen = [(text, [*path, 5], logits) for text, path, logits in recorder.seen if len(path) < 2]
    assert largest_error(recorder, tensors, stated, model) > 1e-2


@pytest.mark.parametrize("shape", TREES)
def test_shapes(tmp_path, shape):
    """Every shape drafts its heads' best tokens, accepted or not; a vocabulary so small that nodes of all ranks are."""
    target = tiny_llama(vocab_size=11)
    tensors = original(4, vocab=11)
    config = write(tmp_path, tensors) | TREES[shape]
    recorder = recorded(target, config)
    generator = integration.kept_decoders(target)[-1].generator
    drafts = kept_proposals(generator)
    inputs = ragged([6, 13, 2, 9], vocab_size=11)
    output = target.generate(**inputs, max_new_tokens=20, speculative_config=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, target.generate(**inputs, max_new_tokens=20))
    assert output.speculation.num_accepted_tokens > 3
    assert largest_error(recorder, tensors, {}, target) < 1e-4
    best = {(tuple(text), len(path)): logits.argsort(descending=True).tolist() for text, path, logits in recorder.seen}
    trees = next(each for each in drafts if any(each.lengths))
    if shape == "published":
        assert trees.lengths[0] == 63
    if shape in ("published", "static"):
        paths = (
            PUBLISHED_TREES["medusa_mc_sim_7b_63"]
            if shape == "published"
            else TREES["static"]["speculative_token_tree"]
        )
        closed = {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}
        first = tuple(recorder.seen[0][0])
        expected = {tuple(best[first, depth][rank] for depth, rank in enumerate(path)) for path in closed}
        found = set()
        for node in range(trees.lengths[0]):
            path, at = [], node
            while at >= 0:
                path.append(int(trees.tokens[0, at]))
                at = int(trees.parents[0, at])
            found.add(tuple(reversed(path)))
        assert found == expected
    if shape == "dynamic":
        assert max(trees.lengths) == 9
    assert_clean(target)


def test_rows_with_their_own_limits(tmp_path, model):
    config = write(tmp_path, original(4), {}) | {"branching_factors": [3, 2, 1]}
    generator = integration.get_decoder(model, parse_config(config)).generator
    model.generate(**RAGGED, max_new_tokens=5, speculative_config=config)
    rows = [Sequence([5, 6, 7 + i], 30) for i in range(4)]
    decoder = integration.kept_decoders(model)[-1]
    decoder.allocate(400, 4)
    with decoder.active():
        for seq in rows:
            decoder.add(seq)
        decoder.step(rows)
        together = generator.propose(rows, [1, 3, 0, 2])
        assert together.lengths == [3, 15, 0, 9]
        for i, limit in ((0, 1), (1, 3), (3, 2)):
            alone = generator.propose([rows[i]], [limit])
            assert alone.tokens[0].tolist() == together.tokens[i, : together.lengths[i]].tolist()
        for seq in rows:
            decoder.remove(seq)
    assert_clean(model)


def test_token_map_keeps_drafts_in_the_truncated_vocabulary(tmp_path, model):
    tensors, stated, _, _ = LAYOUTS["token_map"]
    config = write(tmp_path, tensors, stated) | {"branching_factors": [3, 2]}
    generator = integration.get_decoder(model, parse_config(config)).generator
    drafts = kept_proposals(generator)
    model.generate(**RAGGED, max_new_tokens=10, speculative_config=config)
    drafted = {int(t) for trees in drafts for row, n in zip(trees.tokens, trees.lengths, strict=True) for t in row[:n]}
    assert len(drafted) > 5 and drafted <= set(TOKEN_MAP.tolist())


def test_published_trees():
    sizes = {"eagle": (25, 5), "medusa": (63, 4), "token": (80, 6)}
    for name, paths in PUBLISHED_TREES.items():
        nodes, depth = sizes[name.partition("_")[0]]
        found = {tuple(path) for path in paths}
        assert len(found) == len(paths) == nodes
        assert all(len(path) == 1 or path[:-1] in found for path in found)
        assert all(rank == 0 or (*head, rank - 1) in found for *head, rank in found)
        assert max(map(len, paths)) == (3 if name == "medusa_vicuna_33b_stage1" else depth)


# ---- losslessness ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "shape"), covering(["Llama", "Gemma2", "GPT-2"], ["chain", "published"]))
def test_lossless(tmp_path, family, shape):
    """Greedy: plain generate()'s text. Coupled sampling: the text the seed gives without speculation."""
    target = make(family)
    hidden, vocab = 48, target.config.vocab_size
    config = write(tmp_path, original(4, own=family != "GPT-2", hidden=hidden, vocab=vocab)) | TREES[shape]
    assert_lossless(target, config, lengths=((7,), (6, 13, 2, 9)), temperature=0.9, top_p=0.95)


def test_in_transformers_own_loop(tmp_path, model):
    assert_drafts_in_transformers_own_loop(model, write(tmp_path, original()))


def test_bfloat16_target(tmp_path):
    target = tiny_llama().to(torch.bfloat16)
    config = write(tmp_path, original())
    output = target.generate(**RAGGED, max_new_tokens=8, speculative_config=config, return_dict_in_generate=True)
    assert output.speculation.num_draft_tokens > 0
    (decoder,) = integration.kept_decoders(target)
    assert {weight.dtype for weight in decoder.generator.heads.parameters()} == {torch.bfloat16}


# ---- merged checkpoints ---------------------------------------------------------------------------------------------


def test_medusa_2_is_merged_with_its_target(tmp_path, model, caplog):
    """`model` names the target's own folder, here in shards: only those with heads are opened."""
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    save_file(renamed("medusa_head.", original()), tmp_path / "heads.safetensors")
    index["weight_map"] |= dict.fromkeys(renamed("medusa_head.", original()), "heads.safetensors")
    index_path.write_text(json.dumps(index))
    for shard in set(index["weight_map"].values()) - {"heads.safetensors", index["weight_map"]["lm_head.weight"]}:
        (tmp_path / shard).write_bytes(b"never opened")
    config = {"method": "medusa", "model": str(tmp_path)}
    recorder = recorded(model, config)
    model.generate(**RAGGED, max_new_tokens=6, speculative_config=config)
    assert largest_error(recorder, original(), {}, model) < 1e-4


def test_a_merged_single_file(tmp_path, model):
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    stated = {"model_type": "cohere", "logit_scale": 0.0625}  # the target's, not the heads'
    config = write(tmp_path, tensors | renamed("medusa_head.", original()), stated)
    assert parse_config({"model": config["model"]}).method == "medusa"
    recorder = recorded(model, config)
    model.generate(**RAGGED, max_new_tokens=6, speculative_config=config)
    assert largest_error(recorder, original(), {}, model) < 1e-4


# ---- configuration, method ------------------------------------------------------------------------------------------


def test_method_is_inferred(tmp_path):
    for i, (tensors, stated, file, _) in enumerate(LAYOUTS.values()):
        write(tmp_path / str(i), tensors, stated, file)
        assert parse_config({"model": str(tmp_path / str(i))}).method == "medusa"


def test_draft_length(tmp_path, model):
    assert_four_heads_bound_the_length(model, write(tmp_path, original(4)))


def test_stated_number_of_heads_is_only_logged(tmp_path, model, caplog):
    config = write(tmp_path, original(4), ORIGINAL)
    with caplog.at_level(logging.INFO, logger="hf_specdec"):
        model.generate(**RAGGED, max_new_tokens=3, speculative_config=config)
    assert "config.json says 2 heads; the file has 4" in caplog.text


def test_shared_head_stays_the_target_s(tmp_path):
    target = tiny_llama().train()
    config = write(tmp_path, original(own=False))
    generator = integration.get_decoder(target, parse_config(config)).generator
    weight = target.get_output_embeddings().weight
    assert weight.requires_grad and target.lm_head.training
    assert generator.heads.scoring()[0].weight is weight  # no copy
    target.lm_head.weight = torch.nn.Parameter(weight.detach() + 1)
    assert generator.heads.scoring()[0].weight is target.lm_head.weight


@pytest.mark.parametrize("native", [None, False])
def test_quantized_heads_leave_the_target_s_head_as_it_is(tmp_path, native):
    target = tiny_llama()
    weight = target.lm_head.weight
    config = write(tmp_path, original(own=False)) | {"quantization": "wint8", "native": native}
    assert_lossless(target, config)
    assert target.lm_head.weight is weight


# ---- bad checkpoints ------------------------------------------------------------------------------------------------

BAD = {
    "missing block": ("v0.1", lambda t, c: t.pop("2.0.linear.weight"), r"missing blocks\.2\.layers\.0\.weight"),
    "missing first": ("v0.1", lambda t, c: t.pop("0.0.linear.weight"), r"has no blocks\.0\.layers\.0\.weight"),
    "missing bias": ("v0.1", lambda t, c: t.pop("3.0.linear.bias"), r"missing blocks\.3\.layers\.0\.bias"),
    "missing head": ("v0.1", lambda t, c: t.pop("1.1.weight"), r"missing lm_heads\.1\.weight"),
    "extra": ("v0.1", lambda t, c: t.update({"1.2.weight": torch.zeros(3)}), r"unused 1\.2\.weight"),
    "extra bias": ("v0.1", lambda t, c: t.update({"1.1.bias": torch.zeros(VOCAB)}), r"unused 1\.1\.bias"),
    "wrong shape": (
        "v0.1", lambda t, c: t.update({"1.0.linear.weight": torch.zeros(32, 31)}), r"1\.0\.linear\.weight has shape \[32, 31\]",
    ),
    "another width": ("v0.1", lambda t, c: (t.clear(), t.update(original(hidden=40))), r"width 40; the target's have 32"),
    "unknown beside": ("converted", lambda t, c: t.update({"blocks.0.norm.weight": torch.zeros(3)}), r"unused blocks\.0\.norm"),
    "both heads": (
        "converted", lambda t, c: t.update({"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}), r"unused lm_head\.weight",
    ),
    "copies differ": (
        "original_lm_head", lambda t, c: t.update({"lm_heads.1.weight": torch.zeros(VOCAB, HIDDEN)}), r"lm_heads?\..* differ",
    ),
    "map too short": ("token_map", lambda t, c: t.update(token_map=TOKEN_MAP[:30]), r"token_map has shape \[30\].*40 tokens"),
    "map out of range": ("token_map", lambda t, c: t.update(token_map=TOKEN_MAP + 30), r"token_map names tokens \d+ to"),
    "negative map": ("token_map", lambda t, c: t.update(token_map=TOKEN_MAP - 1 - TOKEN_MAP.min()), r"token_map names tokens -1 to"),
    "map twice": ("token_map", lambda t, c: t.update(token_map=torch.zeros(40, dtype=torch.long)), "token of the target twice"),
    "scale": ("logit_scale", lambda t, c: c.update(logit_scale="big"), r"logit_scale = 'big'"),
    "quantised": (
        "v0.1", lambda t, c: t.update({"1.1.weight": t["1.1.weight"].to(torch.float8_e4m3fn)}), r"1\.1\.weight is quantized",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints(tmp_path, model, case):
    layout, change, message = BAD[case]
    tensors, stated, file, _ = LAYOUTS[layout]
    tensors, stated = dict(tensors), copy.deepcopy(stated)
    change(tensors, stated)
    assert_refused(model, write(tmp_path, tensors, stated, file), message)


def test_another_vocabulary(tmp_path):
    assert_refused(
        tiny_llama(vocab_size=1061), write(tmp_path, original()), "vocabulary of 61 tokens; the target has 1061"
    )


def test_other_files(tmp_path, model):
    assert_refused(model, {"method": "medusa"}, "'model'.* is missing")
    assert_refused(
        model, {"method": "medusa", "model": str(tmp_path / "nothing")}, "neither a bundled name nor a folder"
    )
    model.save_pretrained(tmp_path / "plain")
    assert_refused(model, {"method": "medusa", "model": str(tmp_path / "plain")}, "no known format")
    hydra = {"hydra_mlp.0.0.linear.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}
    assert_refused(model, write(tmp_path / "hydra", hydra), "is a head for method 'hydra'.*not 'medusa'")
