"""What MTP modules are stored as: FP8 blocks, experts, own tables, shards, speculators' format; and checkpoints that do not fit."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from families import build
from helpers_eagle import recorded, scripted
from helpers_mtp import KINDS, Kind, PlainMtp, Stored, _mimo, check_logits, randomized, split_experts, store
from oracle import ragged
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_specdec
from hf_specdec import integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.candidate_generators.mtp import MtpGenerator
from hf_specdec.model.prepare import prepare

CONFIG = {"method": "mtp", "num_speculative_tokens": 3}


def rewrite(folder, change=None, **config):
    """Change the tensors and the configuration of a checkpoint."""
    path, settings = Path(folder) / "model.safetensors", Path(folder) / "config.json"
    tensors = load_file(path)
    if change is not None:
        change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **config}))


def drafted(model, /, **config):
    script = scripted()
    with recorded(MtpGenerator) as recording:
        model.generate(
            **ragged([7, 4], vocab_size=128),
            max_new_tokens=8,
            logits_processor=script,
            speculative_config={**CONFIG, **config},
        )
    return recording


class PlainReducedMtp(PlainMtp):
    """The recursion, with logits of the draft vocabulary's tokens only."""

    def __init__(self, stored, ids, rows: dict[int, torch.Tensor]):
        super().__init__(stored)
        for i, part in enumerate(self.parts):
            weight = rows.get(i, stored.model.lm_head.weight.detach()[ids]).double()
            part["lm_head"] = lambda state, weight=weight: weight @ state


IDS = torch.tensor([*range(3, 90, 3), 127])
D2T = IDS - torch.arange(len(IDS))
# case → (family, number of modules, tables' names, names of stored rows by module)
REDUCED = {
    "a head per module": (
        "DeepSeek-V3", 2, ("model.layers.3.d2t",), {i: f"model.layers.{3 + i}.shared_head.head.weight" for i in range(2)},
    ),
    "one head for all": ("Qwen3.5", 2, ("mtp.d2t", "mtp.t2d"), dict.fromkeys(range(2), "mtp.lm_head.weight")),
    "rows of the target's head": ("GLM-4.5", 1, ("d2t", "t2d"), {}),
    "speculators": ("speculators", 1, ("d2t", "t2d"), {0: "lm_head.weight"}),
}  # fmt: skip


@pytest.mark.parametrize("case", REDUCED)
def test_a_reduced_vocabulary(tmp_path, case):
    """Logits are those of listed tokens, and the text is plain `generate()`'s."""
    family, count, tables, names = REDUCED[case]
    if family == "speculators":
        stored = in_speculators(tmp_path, "qwen3")[2].stored
    else:
        stored = store(tmp_path, family, count)
    rows = {name: torch.randn(len(IDS), 48, generator=torch.Generator().manual_seed(i)) for i, name in names.items()}
    known = torch.zeros(128, dtype=torch.bool).index_fill_(0, IDS, True)
    rewrite(
        tmp_path,
        lambda tensors: tensors.update(rows | {name: D2T if name.endswith("d2t") else known for name in tables}),
    )
    recording = drafted(stored.model, model=stored.folder)
    check_logits(PlainReducedMtp(stored, IDS, {i: rows[name] for i, name in names.items()}), recording, stored.model)
    (decoder,) = integration.kept_decoders(stored.model)
    assert torch.equal(decoder.generator.vocabulary.target_ids, IDS)
    inputs = ragged([7, 4], vocab_size=128)
    plain = stored.model.generate(**inputs, max_new_tokens=12)
    config = {**CONFIG, "model": stored.folder}
    assert torch.equal(stored.model.generate(**inputs, max_new_tokens=12, speculative_config=config), plain)


# ---- formats --------------------------------------------------------------------------------------------------------


def test_own_embeddings_and_head(tmp_path):
    """Stored tables that differ from the target's are used; equal ones are the target's own."""
    for name, tables in (("DeepSeek-V3", {"embed_tokens", "lm_head"}), ("LongCat-Flash", {"embed_tokens"})):
        stored = store(tmp_path / name, name, own_tables=True)
        check_logits(PlainMtp(stored), drafted(stored.model), stored.model)
        (decoder,) = integration.kept_decoders(stored.model)
        assert tables <= set(dict(decoder.generator.head.module.named_children()))
    stored = store(tmp_path / "shared", "DeepSeek-V3")
    module = MtpGenerator(parse_config(CONFIG), prepare(stored.model)).head.module
    assert module.shared["embed_tokens"] is stored.model.get_input_embeddings()
    assert module.shared["lm_head"] is stored.model.get_output_embeddings()
    assert not {"embed_tokens", "lm_head"} & set(dict(module.named_children()))


def test_blocks_of_fp8(tmp_path):
    """Matrices in float8 with a scale per block are multiplied out, experts' too; drafts are those of the products."""
    stored, block = store(tmp_path, "DeepSeek-V3"), (20, 16)
    first = stored.model.config.num_hidden_layers
    products = {}

    def quantize(tensors):
        for name in [name for name in tensors if f"layers.{first}." in name and tensors[name].dim() == 2]:
            if any(part in name for part in ("mlp.gate.", "embed_tokens", "shared_head")):
                continue
            value = tensors[name]
            rows, columns = -(-value.shape[0] // block[0]), -(-value.shape[1] // block[1])
            scale = torch.rand(rows, columns) * 0.01 + 0.001
            full = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[
                : value.shape[0], : value.shape[1]
            ]
            tensors[name] = (value / full).to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = scale
            products[name] = tensors[name].float() * full

    rewrite(stored.folder, quantize, quantization_config={"quant_method": "fp8", "weight_block_size": list(block)})
    assert len(products) > 15
    layer, prefix = stored.parts[0]["layer"], f"model.layers.{first}."
    with torch.no_grad():
        stored.parts[0]["eh_proj"].weight.copy_(products[prefix + "eh_proj.weight"])
        for name, value in layer.state_dict().items():
            for split, each in split_experts(name, value).items():
                if prefix + split in products:
                    each.copy_(products[prefix + split])
    check_logits(PlainMtp(stored), drafted(stored.model), stored.model)


def test_router_corrections_stay_in_float32(tmp_path):
    stored = store(tmp_path, "DeepSeek-V3")
    name = f"model.layers.{stored.model.config.num_hidden_layers}.mlp.gate.e_score_correction_bias"
    precise = torch.tensor([5.00001, 5.00002, 5.00003, 5.00004])
    rewrite(stored.folder, lambda tensors: tensors.update({name: precise}))
    stored.model.to(torch.bfloat16)
    module = MtpGenerator(parse_config(CONFIG), prepare(stored.model)).head.module
    state = module.state_dict()
    assert torch.equal(state["layer.mlp.gate.e_score_correction_bias"], precise)
    assert state["eh_proj.weight"].dtype == torch.bfloat16


def test_only_the_modules_shards_are_opened(tmp_path):
    """A sharded checkpoint whose other shards are gone; and a folder of the modules alone, named as 'model'."""
    stored = store(tmp_path / "whole", "GLM-4.5", 2)
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    (tmp_path / "whole" / "model.safetensors").unlink()
    own = {name: value for name, value in tensors.items() if name in stored.tensors}
    shards = {name: f"model-{1 + (name in own)}-of-2.safetensors" for name in tensors}
    (tmp_path / "whole" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    save_file(own, tmp_path / "whole" / "model-2-of-2.safetensors")
    check_logits(PlainMtp(stored), drafted(stored.model), stored.model)
    (tmp_path / "alone").mkdir()
    save_file(own, tmp_path / "alone" / "mtp.safetensors")
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "alone")
    stored.model.config.name_or_path = stored.model.name_or_path = ""
    hf_specdec.release(stored.model)
    check_logits(PlainMtp(stored), drafted(stored.model, model=str(tmp_path / "alone")), stored.model)
    assert parse_config({"model": str(tmp_path / "alone")}).method == "mtp"


def test_a_target_loaded_by_from_pretrained(tmp_path):
    """transformers drops the modules on load; they are found where the target came from."""
    stored = store(tmp_path, "GLM-4.5")
    target = AutoModelForCausalLM.from_pretrained(stored.folder, dtype=torch.float32).eval()
    check_logits(PlainMtp(stored), drafted(target), target)


def test_a_whole_language_model_is_no_mtp_checkpoint_unless_said(tmp_path):
    stored = store(tmp_path, "Qwen3.5")
    assert parse_config({"model": stored.folder}).method == "draft_model"


def in_speculators(folder, layer_type: str, **changes):
    """A target, its tensors in a file of speculators' format, and what they mean; embeddings first.

    changes: keys of the layer's configuration that differ from the target's.
    """
    target = build("qwen3", 0)
    options = {} if layer_type == "qwen3" else KINDS["Qwen3-Next"].options
    donor = build(layer_type, 1, **{**options, **changes})
    kind = Kind(layer_type, options, lambda part, i, n: _mimo(part, i, n, "mtp_layers"))
    generator = torch.Generator().manual_seed(3)
    hidden = target.config.hidden_size
    part = {key: randomized(donor.model.norm, generator) for key in ("enorm", "hnorm", "norm")}
    part["layer"] = randomized(donor.model.layers[-1], generator)
    part["eh_proj"] = randomized(torch.nn.Linear(2 * hidden, hidden, bias=False), generator)
    tensors = {}
    for key, module in part.items():
        for name, value in module.state_dict().items():
            tensors[kind.rename(f"{key}.{name}", 0, 0)] = value.contiguous()
    save_file(tensors, folder / "model.safetensors")
    layers = donor.config.to_dict() | {"name_or_path": ""}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    config = {
        "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": "mtp", "proposal_methods": [proposal], "verifier": {"name_or_path": "some/Target-8B", "architectures": []},
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    part |= {"embed_tokens": target.get_input_embeddings(), "lm_head": target.lm_head}
    stored = Stored(target, str(folder), kind, [part], tensors)
    plain = PlainMtp(stored)
    plain.rotary, plain.stored = donor.model.rotary_emb, stored
    return target, tensors, plain


@pytest.mark.parametrize("layer_type", ["qwen3", "qwen3_next"])
def test_speculators_format(tmp_path, layer_type):
    """A repository of its own, with its own configuration of the layer."""
    target, tensors, plain = in_speculators(tmp_path, layer_type)
    recording = drafted(target, model=str(tmp_path), num_speculative_tokens=None)
    check_logits(plain, recording, target)
    assert max(len(path) for _, path, _ in recording.logits) == 2, "as many drafts as the checkpoint proposes"
    assert parse_config({"model": str(tmp_path)}).method == "mtp"
    other = build("qwen3", 0, hidden_size=32)
    with pytest.raises(hf_specdec.SpeculativeConfigError, match=r"width 48; the target's have 32.*some/Target-8B"):
        drafted(other, model=str(tmp_path))
    extra = {**tensors, "lm_head.weight": torch.zeros(3, 3)}
    save_file(extra, tmp_path / "model.safetensors")
    hf_specdec.release(target)
    with pytest.raises(
        hf_specdec.SpeculativeConfigError, match=r"lm_head\.weight has 3 tokens; the target has 128, and there is no"
    ):
        drafted(target, model=str(tmp_path))


# ---- checkpoints that do not fit ------------------------------------------------------------------------------------

L = "model.layers.3."
BAD = {
    "a table without its head": (
        lambda t: t.update({"d2t": D2T, L + "shared_head.head.weight": torch.zeros(9, 48)}), {}, r"d2t has shape \[30\] .* of 9 tokens",
    ),
    "a head of no module": (
        lambda t: t.update({"d2t": D2T, "lm_head.weight": torch.zeros(30, 48)}), {}, r"lm_head\.weight has the 30 tokens .* no MTP module",
    ),
    "a head without its table": (
        lambda t: t.update({L + "shared_head.head.weight": torch.zeros(9, 48)}), {}, r"has 9 tokens; the target has 128, and there is no",
    ),
    "missing tensor": (lambda t: t.pop(L + "eh_proj.weight"), {}, r"missing 0\.eh_proj\.weight"),
    "extra tensor": (lambda t: t.update({L + "mlp.gate.other": torch.zeros(2)}), {}, r"unused model\.layers\.3\.mlp\.gate\.other"),
    "other layout's tensor": (lambda t: t.update({"mtp.foo": torch.zeros(2)}), {}, r"unused mtp\.foo"),
    "wrong shape": (
        lambda t: t.update({L + "eh_proj.weight": torch.zeros(48, 48)}), {}, r"eh_proj\.weight has shape \[48, 48\].*\[48, 96\]",
    ),
    "missing expert": (lambda t: t.pop(L + "mlp.experts.1.up_proj.weight"), {}, r"misses .*experts\.1\.up_proj\.weight, one of 4"),
    "missing last expert": (
        lambda t: [t.pop(L + f"mlp.experts.3.{part}_proj.weight") for part in ("gate", "up", "down")], {},
        r"gate_up_proj has shape \[3, 64, 48\].*\[4, 64, 48\]",
    ),
    "experts of two shapes": (
        lambda t: t.update({L + "mlp.experts.2.up_proj.weight": torch.zeros(5, 48)}), {},
        r"experts\.2\.up_proj\.weight has shape \[5, 48\], .*experts\.0\.gate_proj\.weight has \[32, 48\]",
    ),
    "another target's embeddings": (
        lambda t: t.update({L + "embed_tokens.weight": torch.zeros(100, 48)}), {},
        r"layers\.3\.embed_tokens\.weight has 100 tokens; the target has 128",
    ),
    "second module incomplete": (
        lambda t: t.update({"model.layers.4.eh_proj.weight": torch.zeros(48, 96)}), {}, r"missing 1\.enorm\.weight",
    ),
    "float8 without scales": (
        lambda t: t.update({L + "eh_proj.weight": t[L + "eh_proj.weight"].to(torch.float8_e4m3fn)}), {},
        r"eh_proj\.weight is quantized \(float8_e4m3fn\), and config\.json has no quantization_config",
    ),
    "scales of other blocks": (
        lambda t: t.update({
            L + "eh_proj.weight": t[L + "eh_proj.weight"].to(torch.float8_e4m3fn), L + "eh_proj.weight_scale_inv": torch.ones(9, 9),
        }), {}, r"weight_scale_inv has shape \[9, 9\]; a matrix \[48, 96\] in blocks of 128 x 128 has \[1, 1\]",
    ),
    "no modules": (lambda t: [t.pop(n) for n in list(t) if n.startswith(L)], {}, r"holds no MTP tensors.*save.*'model'"),
    "unknown layout": (
        lambda t: [t.pop(n) for n in list(t) if n.startswith(L) and "shared_head" in n], {}, r"in no known layout.*Tried: .*MiMo",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return store(tmp_path_factory.mktemp("glm"), "GLM-4.5")


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints(tmp_path, glm, case):
    change, config, message = BAD[case]
    folder = tmp_path / "copy"
    shutil.copytree(glm.folder, folder)
    rewrite(folder, change, **config)
    with pytest.raises(hf_specdec.SpeculativeConfigError, match=message):
        drafted(glm.model, model=str(folder))
    assert integration.kept_decoders(glm.model) == []


# owner → tensors of its MTP layers that have no layout here
UNKNOWN = {
    "DeepSeek-V4 (not DSpark)": ("mtp.0.attn.wq_a.weight", "mtp.0.e_proj.weight", "mtp.0.hc_head_fn"),
    "Mistral Large 4": ("mtp_dspark.layers.0.attn.wq.weight",),
    "MiniMax-M3": (
        "language_model.model.mtp.layers.0.eh_proj.weight",
        "language_model.model.mtp.layers.0.transformer_layer.self_attn.q_proj.weight",
    ),
}  # fmt: skip


def test_dspark_of_deepseek_v4_is_for_another_method(tmp_path, glm):
    save_file({"mtp.0.main_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(hf_specdec.SpeculativeConfigError, match=r"DeepSeek-V4 \(DSpark: 'dflash' runs them\)"):
        drafted(glm.model, model=str(tmp_path))


@pytest.mark.parametrize("owner", UNKNOWN)
def test_layers_of_others_are_refused_by_name(tmp_path, glm, owner):
    """Alone or in a target's checkpoint, with every method that could be meant."""
    save_file({name: torch.zeros(2, 2) for name in UNKNOWN[owner]}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"dspark_block_size": 5, "dspark_noise_token_id": 7}))
    for method in ({"method": "mtp"}, {"method": "dflash"}, {}):
        with pytest.raises(
            hf_specdec.SpeculativeConfigError, match=f"holds MTP layers of {re.escape(owner)}.*, wh(ich|ose)"
        ):
            glm.model.generate(
                **ragged([5], vocab_size=128), max_new_tokens=2, speculative_config={**method, "model": str(tmp_path)}
            )


def test_blocks_that_a_module_cannot_have(tmp_path):
    stored = store(tmp_path, "Nemotron-H")
    stored.model.config.mtp_layers_block_type = ["full_attention", "linear_attention"]
    with pytest.raises(
        hf_specdec.SpeculativeConfigError, match=r"MTP layer of the blocks \['full_attention', 'linear_attention'\]"
    ):
        drafted(stored.model)


def test_a_damaged_file_and_a_target_from_nowhere(tmp_path, glm):
    folder = tmp_path / "copy"
    shutil.copytree(glm.folder, folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(hf_specdec.SpeculativeConfigError, match="damaged or incomplete"):
        drafted(glm.model, model=str(folder))
    nowhere = build("glm4_moe", 0, **KINDS["GLM-4.5"].options)
    with pytest.raises(hf_specdec.SpeculativeConfigError, match=r"'model'.*where it was loaded from"):
        drafted(nowhere)


def test_another_targets_modules(tmp_path, glm):
    folder = store(tmp_path, "GLM-4.5", hidden_size=32).folder
    with pytest.raises(
        hf_specdec.SpeculativeConfigError, match=r"enorm\.weight has shape \[32\], the configuration says \[48\]"
    ):
        drafted(glm.model, model=folder)


def test_a_missing_shared_norm_and_another_methods_head(tmp_path):
    target, change = store(tmp_path, "Qwen3.5", 2), lambda tensors: tensors.pop("mtp.norm.weight")
    rewrite(target.folder, change)
    with pytest.raises(hf_specdec.SpeculativeConfigError, match=r"missing 0\.norm\.weight; missing 1\.norm\.weight"):
        drafted(target.model)
    rewrite(target.folder, speculators_model_type="eagle3")
    with pytest.raises(hf_specdec.SpeculativeConfigError, match="speculators checkpoint of type 'eagle3', not of MTP"):
        drafted(target.model)
