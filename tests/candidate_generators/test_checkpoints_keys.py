"""What keys of config.json do: the draft follows the reference's formula, or the file is refused by name; nothing is ignored."""

import contextlib
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import helpers_dflash
import helpers_eagle
import helpers_mtp
import helpers_speculators
import pytest
import test_eagle
import test_hydra
import test_medusa
import test_mtp_checkpoints
import torch
from combinations import every_second
from families import build
from families import make as make_family
from helpers_dflash import MASK, compare
from helpers_drafters import assert_refused
from helpers_eagle import check_against, recorded
from helpers_eagle3 import AUX, LAYOUTS, PlainEagle3
from helpers_eagle3 import write as write_eagle3
from oracle import ragged
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

import hf_specdec
from hf_specdec.candidate_generators import eagle, eagle3, hydra, medusa
from hf_specdec.candidate_generators import mlp_speculator as mlp
from hf_specdec.candidate_generators.checkpoints import keys as key_tables
from hf_specdec.candidate_generators.checkpoints import layers
from hf_specdec.candidate_generators.checkpoints.files import Checkpoint, CheckpointError
from hf_specdec.candidate_generators.checkpoints.keys import Table
from hf_specdec.candidate_generators.dflash import checkpoint as dflash
from hf_specdec.candidate_generators.eagle3 import Eagle3Generator
from hf_specdec.candidate_generators.mtp import checkpoint as mtp

pytestmark = pytest.mark.usefixtures("forget_decoders")


def changed(config: dict, changes: dict) -> dict:
    """A copy with keys changed, by paths such as "dflash_config.causal"; None removes one."""
    config = copy.deepcopy(config)
    for path, value in changes.items():
        *sections, name = path.split(".")
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        place.pop(name, None)
        if value is not None:
            place[name] = value
    return config


def put(folder, changes: dict) -> str:
    """Change keys of a folder's config.json."""
    file = Path(folder) / "config.json"
    file.write_text(json.dumps(changed(json.loads(file.read_text()), changes)))
    return str(folder)


# ---- what was read wrong without a word -----------------------------------------------------------------------------

SLIDING = {"layer_types": ["sliding_attention"] * 2, "window": 4}
TOP_LEVEL = {
    "dflash_config": None,
    "mask_token_id": MASK,
    "target_layer_ids": [0, 1],
    "architectures": ["Qwen3DSparkModel"],
}
DSPARK = {"markov_rank": 6, "enable_confidence_head": True, "confidence_head_with_markov": True, "num_anchors": 512}
# case → (options of the file, its head, keys of config.json, options of the formula)
DFLASH = {
    "ids at the top level": ({}, None, {"dflash_config.target_layer_ids": None, "target_layer_ids": [-1, 1]}, {"taps": (0, 2)}),
    "vLLM's ids": ({}, None, {"dflash_config.target_layer_ids": None, AUX: [0, 2]}, {"taps": (0, 2)}),
    "layer_ids": ({}, None, {"dflash_config.target_layer_ids": None, "dflash_config.layer_ids": [0, 2]}, {"taps": (0, 2)}),
    "DeepSpec, DFlash": ({}, None, TOP_LEVEL, {"from_anchor": True}),
    "DeepSpec, vanilla": ({}, "dspark", {**TOP_LEVEL, **DSPARK}, {}),
    "DeepSpec, rnn": ({"markov": "rnn"}, "dspark", {**TOP_LEVEL, **DSPARK, "markov_head_type": "rnn"}, {}),
    "from the anchor": ({}, None, {"dflash_config.sample_from_anchor": True}, {"from_anchor": True}),
    "from query zero": ({}, None, {"query_zero_predicts_next": True}, {"from_anchor": True}),
    "shifted labels": (
        {"style": "speculators"}, None,
        {"shift_label": True, "sample_from_anchor": None, "speculators_config.proposal_methods": None}, {"from_anchor": True},
    ),
    "Domino's sizes without it": (
        {"style": "speculators"}, None,
        {"projector_type": "dflash", "emb_dim": 256, "gru_hidden_dim": 1024, "pure_draft_prefix_len": 1}, {},
    ),
    "DSpark in mask slots": ({}, "dspark", {"dflash_config.sample_from_anchor": False}, {"from_anchor": False}),
    "DSpark, bonus anchor": ({}, "dspark", {"dspark_bonus_anchor": True}, {"from_anchor": False}),
    "DSpark's aliases": (
        {}, "dspark",
        {"dflash_config.mask_token_id": None, "dspark_noise_token_id": MASK, "dflash_config.target_layer_ids": None, "block_size": None,
         "dspark_target_layer_ids": [1, 0], "dspark_block_size": 6, "dflash_config.markov_rank": None, "dspark_markov_rank": 6},
        {"taps": (2, 1)},
    ),
    **{
        f"the mask as {name}": ({}, None, {"dflash_config.mask_token_id": None, name: MASK}, {})
        for name in ("pard_token", "ptd_token_id")
    },
    "sliding, not causal": (SLIDING, None, {"is_causal": False}, {"non_causal_window": True}),
    "sliding, not causal, inside": (SLIDING, None, {"dflash_config.causal": False}, {"non_causal_window": True}),
    "full, causal": ({}, None, {"is_causal": True}, {"causal": True}),
    "windows everywhere": (
        {}, None, {"dflash_config.use_swa": True, "dflash_config.swa_window_size": 4}, {**SLIDING, "non_causal_window": True},
    ),
    "causal windows everywhere": (
        {}, None, {"dflash_config.use_swa": True, "dflash_config.swa_window_size": 4, "dflash_config.causal": True}, SLIDING,
    ),
    "scaled embeddings": ({}, None, {"dflash_config.input_embedding_scale": 3.0}, {"embedding_scale": 3.0}),
    "multiplier and cap": (
        {}, "dspark", {"dflash_config.output_multiplier": 0.5, "final_logit_softcapping": 2.0}, {"multiplier": 0.5, "softcap": 2.0},
    ),
    "neutral values": ({}, None, {"is_neox_style": True, "output_multiplier": 1, "dflash_config.attention_value_scale": 1.0}, {}),
    "scaled values": ({}, None, {"attention_value_scale": 0.5}, {"value_scale": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("case", DFLASH)
def test_dflash_follows_its_keys(model, tmp_path, case):
    options, head, keys, formula = DFLASH[case]
    made = helpers_dflash.make(tmp_path, model, head=head, **options)
    put(made.folder, keys)
    made.options.update(formula)
    compare(model, made, {}, ragged([3, 8]), slots=6, max_new_tokens=14)


# case → (layout, keys of config.json, states that are read, flags of the plain head)
EAGLE3 = {
    "DeepSpec's ids": ("yuhuili", {"target_layer_ids": [0, 1, 2]}, (1, 2, -1), {}),
    "layer_ids": ("yuhuili", {"eagle_config.layer_ids": [1, 2, 3]}, (1, 2, -1), {}),
    "speculators' ids of DFlash": ("yuhuili", {"aux_hidden_state_layer_ids": [1, 2, 3]}, (1, 2, -1), {}),
    "no norm before the head": ("yuhuili", {"norm_output": False}, None, {"norm_before_head": False}),
    "vLLM's norm_output": ("yuhuili", {"norm_output": False, "architectures": ["LlamaForCausalLM"]}, None, {}),
}


@pytest.mark.parametrize("case", EAGLE3)
def test_eagle3_follows_its_keys(model, tmp_path, case):
    name, keys, states, flags = EAGLE3[case]
    tensors, folder = write_eagle3(tmp_path, name)
    layout = replace(LAYOUTS[name], flags=flags, **({} if states is None else {"states": states}))
    with recorded(Eagle3Generator) as recording:
        config = {"method": "eagle3", "model": put(folder, keys), "num_speculative_tokens": 3}
        model.generate(**ragged([6, 9]), max_new_tokens=8, speculative_config=config)
    check_against(PlainEagle3(tensors, model, layout), recording, model)


# case → (options of the file, its head, keys of config.json, message)
REFUSED = {
    "rotation in pairs": ({}, None, {"is_neox_style": False}, "is_neox_style = False; only True is supported"),
    "sinks": ({}, None, {"dflash_config.attention_sink_bias": True}, "dflash_config.attention_sink_bias = true, but the file has no"),
    "DFlash2's keys": ({}, None, {"dflash_config.conv_kernel_size": 2}, "conv_kernel_size = 2, but it is no drafter with this head"),
    "DFlash2's class": ({}, None, {"architectures": ["DFlash2DraftModel"]}, r"missing candidate_selector\.hidden_projection"),
    "two blocks": ({}, None, {"dflash_config.block_size": 4}, "dflash_config.block_size = 4 and block_size = 6, which contradict"),
    "two masks": ({}, None, {"pard_token": 4}, "dflash_config.mask_token_id = 5 and pard_token = 4, which contradict"),
    "two lists of layers": ({}, None, {AUX: [1, 3]}, rf"target_layer_ids = \[0, 1\] and {AUX} = \[1, 3\], which contradict"),
    "two anchors": ({}, None, {"sample_from_anchor": True, "dspark_bonus_anchor": True}, "sample_from_anchor = True and dspark_bonus"),
    "labels and anchor": ({}, None, {"sample_from_anchor": False, "shift_label": True}, "shift_label = True, but says False to"),
    "causal both ways": (
        {"style": "speculators", **SLIDING}, None, {"is_causal": False}, "sliding_window_non_causal = False beside is_causal",
    ),
    "a window of no size": ({}, None, {"dflash_config.use_swa": True}, "use_swa true and no swa_window_size"),
    "a Markov head of another file": ({}, None, {"markov_rank": 4}, "markov_rank = 4, but it is no drafter with"),
    "speculators' Domino": ({"style": "speculators"}, None, {"projector_type": "domino"}, "emb_dim = None, but"),
    "another layer at the top": ({"style": "speculators"}, None, {"hidden_size": 16}, "hidden_size = 16, but transformer_layer_config"),
    "experts of DeepSeek-V4.1's": ({}, "dspark", {"dspark_n_routed_experts": 128}, "dspark_n_routed_experts = 128, which this"),
    "SGLang's section": ({}, "dspark", {"dspark_config": {"block_size": 3}}, "dspark_config = .*, which this format does not have"),
    "an unknown key": ({}, None, {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar = 256, which this format does not have"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(model, tmp_path, case):
    options, head, keys, message = REFUSED[case]
    made = helpers_dflash.make(tmp_path, model, head=head, **options)
    assert_refused(model, {"method": "dflash", "model": put(made.folder, keys)}, message)


@pytest.mark.parametrize("how", ["tensor", "file", "named"])
def test_an_embedding_of_the_mask(model, tmp_path, how):
    """In place of the mask token's row: a tensor of the file, or a file beside it, MiMo's with the token's id."""
    made, row = helpers_dflash.make(tmp_path, model), torch.randn(32)
    if how == "tensor":
        save_file(
            load_file(tmp_path / "model.safetensors") | {"mask_embedding": row[None]}, tmp_path / "model.safetensors"
        )
    else:
        torch.save(row if how == "file" else {"mask_token_id": MASK, "embedding": row}, tmp_path / "mask_embedding.pt")
    made.options["mask_row"] = row.double()
    compare(model, made, {}, ragged([3, 8]), slots=6, max_new_tokens=8)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"mask_token_id": 7, "embedding": torch.ones(32)}, "is for token 7, config.json has mask_token_id 5"),
        (torch.ones(31), "its mask embedding is no tensor of 32 numbers"),
        ({"another": torch.ones(32)}, "its mask embedding is no tensor of 32 numbers"),
        (Path("."), "mask_embedding.pt is no plain file of a tensor"),
    ],
)
def test_a_bad_embedding_of_the_mask(model, tmp_path, held, message):
    made = helpers_dflash.make(tmp_path, model)
    torch.save(held, tmp_path / "mask_embedding.pt")
    assert_refused(model, {"method": "dflash", "model": made.folder}, message)


@pytest.mark.parametrize(
    ("style", "given", "scale"), [("own", None, 48**0.5), ("speculators", None, 1.0), ("own", 1.0, 1.0)]
)
def test_embeddings_of_a_target_that_scales_them(tmp_path, caplog, style, given, scale):
    """z-lab's and vLLM's first code read a Gemma's scaled rows, speculators its table; a key decides otherwise, a line says it."""
    gemma = make_family("Gemma3 text")
    made = helpers_dflash.make(tmp_path, gemma, style)
    made.options["embedding_scale"] = scale
    config = {} if given is None else {"input_embedding_scale": given}
    with caplog.at_level("INFO", logger="hf_specdec"):
        compare(gemma, made, config, ragged([3, 8]), slots=6, max_new_tokens=8)
    assert ("'input_embedding_scale' overrides this" in caplog.text) == (given is None)
    if given is not None:
        hf_specdec.release(gemma)
        put(made.folder, {"input_embedding_scale": 2.0})
        assert_refused(
            gemma, {"method": "dflash", "model": made.folder, **config}, "= 2.0, but speculative_config says 1.0"
        )


# ---- any one key of any format, in a good file of every format -------------------------------------------------------

# Logits [Vd] after a text and a path of drafts.
Formula = Callable[[list[int], list[int]], torch.Tensor]


@dataclass
class Good:
    """A good file of a format.

    Attributes:
        make: writes it to a folder for a target; returns the formula, given options that differ.
        effects: by path of a key, the formula's options where that key has the test's value; {}: the draft stays as it is.
    """

    method: str
    table: Table
    make: Callable[[Path, Any], Callable[[dict], Formula]]
    effects: dict[str, dict] = field(default_factory=dict)
    target: Callable[[], Any] | None = None


def eagle_file(layout: str):
    def make(folder, model):
        tensors, _ = test_eagle.write(folder, layout)
        options, known = test_eagle.LAYOUTS[layout][4], {}

        def formula(effect):
            changed = options | {key: value for key, value in effect.items() if key != "eps"}
            return plain_formula(
                test_eagle.PlainEagle(tensors, model, **changed), model, known, effect.get("eps", helpers_eagle.EPS)
            )

        return formula

    return make


def eagle3_file(name: str):
    def make(folder, model):
        tensors, _ = write_eagle3(folder, name)
        layout, known = LAYOUTS[name], {}

        def formula(effect):
            states = effect.get("states", layout.states)
            plain = {key: value for key, value in effect.items() if key in ("theta", "inv_freq", "window")}
            flags = {key: value for key, value in effect.items() if key not in (*plain, "states", "eps")}
            changed = replace(layout, states=states, plain=layout.plain | plain, flags=layout.flags | flags)
            return plain_formula(
                PlainEagle3(tensors, model, changed), model, known, effect.get("eps", helpers_eagle.EPS)
            )

        return formula

    return make


def plain_formula(plain, model, known: dict, eps: float = helpers_eagle.EPS) -> Formula:
    def logits(text, path):
        if tuple(text) not in known:
            known.update(helpers_eagle.hidden_states(model, [tuple(text)]))
        states = known[tuple(text)]
        helpers_eagle.rms.__defaults__ = (eps,)
        try:
            return plain.draft_logits(tuple(text), tuple(path), states)
        finally:
            helpers_eagle.rms.__defaults__ = (helpers_eagle.EPS,)

    return logits


def scaled_rope(theta: float) -> dict[str, dict]:
    """What the test's values of rotary keys do to a file with this base."""
    frequencies = theta ** (-torch.arange(4, dtype=torch.float64) / 4) / 2
    new = 0.5 if theta == 1e4 else theta + 1
    return {
        "rope_theta": {"theta": new},
        "rope_scaling": {"inv_freq": frequencies},
        "rope_parameters": {"inv_freq": frequencies},
        "partial_rotary_factor": {"inv_freq": theta ** (-torch.arange(2, dtype=torch.float64) / 2)},
    }


def dflash_file(head=None, **options):
    def make(folder, model):
        made = helpers_dflash.make(folder, model, head=head, block=4, **options)
        whole = helpers_dflash.Reference(model, made)

        def formula(effect):
            reference = copy.copy(whole)
            reference.o = made.options | effect
            slots = 2 + (not reference.o["from_anchor"])
            return lambda text, path: reference.logits(reference.block(text, slots), text, path)[0]

        return formula

    return make


def speculator_file(checkpoint, **options):
    def make(folder, model):
        stored, true = checkpoint(folder, **options), helpers_speculators.TrueHidden(model)

        def formula(effect):
            changed = replace(stored, config=stored.config | effect)
            return lambda text, path: helpers_speculators.reference(changed, true(text[:-1]), [text[-1], *path])

        return formula

    return make


def medusa_file(layout: str):
    def make(folder, model):
        tensors, config, file, _ = test_medusa.LAYOUTS[layout]
        test_medusa.write(folder, tensors, config, file)
        true = helpers_speculators.TrueHidden(test_medusa.as_read(model, config))
        return lambda effect: (
            lambda text, path: test_medusa.reference(tensors, config | effect, model, true(text[:-1]), len(path))
        )

    return make


def mtp_file(folder, model):
    def formula(effect):
        whole = (folder / "config.json").read_bytes() if effect else None
        _, _, plain = test_mtp_checkpoints.in_speculators(folder, "qwen3", **effect)
        if whole is not None:
            (folder / "config.json").write_bytes(whole)
        return lambda text, path: plain.draft_logits(
            tuple(text), tuple(path), helpers_mtp.target_states(model, [tuple(text)])[tuple(text)]
        )

    formula({})
    return formula


def hydra_file(folder, model):
    tensors = test_hydra.hydra(4)
    test_hydra.write(folder, tensors, grounded_heads=True)
    true = helpers_speculators.TrueHidden(model)
    return lambda effect: (
        lambda text, path: test_hydra.heads_reference(tensors, model, true(text[:-1]), [text[-1], *path])
    )


def alike(*names: str) -> dict[str, dict]:
    """Keys, or keys with values, that leave the draft as it is."""
    return {name: {} for name in names}


# Keys that say what a file is anyway, or what its tensors say better; and those of windows, without sliding layers.
ALIKE = alike(
    "model_type", "max_position_embeddings", "max_window_layers", "use_sliding_window", "sliding_window", "attention_bias=False"
)  # fmt: skip
EAGLE_KEYS = ALIKE | {
    "rms_norm_eps": {"eps": 1 + helpers_eagle.EPS},
    **alike("bias=False", "fusion_bias=False", "qkv_bias=False", "add_para_norm=False", "layernorms=False"),
    **alike("vocab_size", "speculators_model_type", "algorithm"),
}  # fmt: skip
EAGLE3_KEYS = ALIKE | {
    "rms_norm_eps": {"eps": 1 + helpers_eagle.EPS}, "logit_scale": {"logit_scale": 0.5}, "architectures": {}, "vocab_size": {},
    f"{AUX}=[1, 2, 3]": {"states": (1, 2, -1)}, f"eagle_config.{AUX}=[0, 1, 2]": {"states": (1, 2, -1)},
    "layer_ids=[1, 2, 3]": {"states": (1, 2, -1)}, "target_layer_ids=[0, 1, 2]": {"states": (1, 2, -1)},
    "aux_hidden_state_layer_ids=[1, 2, 3]": {"states": (1, 2, -1)},
    **alike(f"{AUX}=[0, 1, 2]", "layer_ids=[0, 1, 2]", "aux_hidden_state_layer_ids=[0, 1, 2]"),
    "norm_before_residual=True": {"norm_before_residual": True}, "norm_before_residual=False": {"norm_before_residual": False},
    "norm_output=True": {}, "norm_output=False": {"norm_before_head": False},
    "recycle_normed=True": {"norm_output": True}, "recycle_normed=False": {},
    **alike("use_aux_hidden_state=True", "fc_norm=False", "norm_before_fc=False", "parallel_drafting=False"),
    **alike("mask_token_id", "pard_token", "ptd_token_id"),
}  # fmt: skip
DFLASH_KEYS = ALIKE | {
    "rms_norm_eps": {"eps": 1 + helpers_dflash.EPS}, "rope_theta": {"theta": 1 + helpers_dflash.THETA},
    "rope_scaling": {"stretch": 2.0}, "rope_parameters": {"stretch": 2.0},
    "output_multiplier": {"multiplier": 0.5}, "input_embedding_scale": {"embedding_scale": 0.5},
    "attention_value_scale": {"value_scale": 0.5}, "partial_rotary_factor": {"rotated": 0.5}, "attention_sink_bias=False": {},
    "add_swa_attention_sink_bias=False": {}, "final_logit_softcapping": {"softcap": 0.5},
    "mask_token_id": {"mask": helpers_dflash.MASK + 1},
    "target_layer_ids": {"taps": (2, 1)}, "aux_hidden_state_layer_ids": {"taps": (2, 1)},
    **alike("projector_type=dflash", "block_size", "num_target_layers", "use_aux_hidden_state=True", "swa_window_size", "use_swa=False"),
    **{f"{key}={value}": {"from_anchor": value} for value in (True, False) for key in ("sample_from_anchor", "query_zero_predicts_next")},
    **{f"dspark_bonus_anchor={value}": {"from_anchor": not value} for value in (True, False)},
    **{f"{key}={value}": {"causal": value} for value in (True, False) for key in ("is_causal", "causal")},
    "sliding_window_non_causal": {}, "shift_label=True": {"from_anchor": True}, "shift_label=False": {},
    **alike(
        "markov_head_type=vanilla", "enable_confidence_head=False", "confidence_head_with_markov=False", "use_heterogeneous_kv=False",
    ),
}  # fmt: skip
DSPARK_KEYS = DFLASH_KEYS | alike(
    "shift_label=True", "projector_type=dspark", "confidence_head_alpha", "enable_confidence_head=True", "confidence_head_with_markov=True"
)  # fmt: skip
DOMINO_KEYS = DFLASH_KEYS | {
    "pure_draft_prefix_len": {"pure": 2}, "projector_type=domino": {}, "dflash_config.shift_label=False": {"from_anchor": False},
}  # fmt: skip
DFLASH2_KEYS = {key: effect for key, effect in DFLASH_KEYS.items() if effect != {"from_anchor": True}} | {
    "projector_type=dflash2": {}, "selector_top_k": {"top_k": 6},
}  # fmt: skip
GEMMA4_KEYS = alike("head_dim", "num_key_value_heads")  # of the target's layers with windows
LINEAR = {"rope_type": "linear", "factor": 2.0}
GOOD = {
    "EAGLE": Good("eagle", eagle._TABLE, eagle_file("llama3"), EAGLE_KEYS | scaled_rope(5e5)),
    "EAGLE, speculators": Good("eagle", eagle._TABLE, eagle_file("speculators"), EAGLE_KEYS | scaled_rope(1e4)),
    "EAGLE-3": Good("eagle3", eagle3._TABLE, eagle3_file("yuhuili"), EAGLE3_KEYS | scaled_rope(1e4)),
    "EAGLE-3, speculators": Good(
        "eagle3", eagle3._TABLE, eagle3_file("speculators"),
        EAGLE3_KEYS | scaled_rope(1e4) | {"norm_output=True": {"norm_output": True}, "norm_output=False": {}},
    ),
    "EAGLE-3, Gemma 4": Good(
        "eagle3", eagle3._TABLE | layers.GEMMA4, eagle3_file("DeepSpec, Gemma 4"),
        EAGLE3_KEYS | GEMMA4_KEYS | alike("norm_output=False") | {
            "norm_output=True": {"norm_output": True}, "final_logit_softcapping": {"softcap": 4.0}, "target_layer_ids": {"states": (1, 2)},
            "recycle_normed=True": {"norm_output": True},
        },
    ),
    "EAGLE-3, latent": Good(
        "eagle3", eagle3._TABLE | layers.LATENT, eagle3_file("latent"),
        EAGLE3_KEYS | scaled_rope(5e4) | alike("head_dim", "num_key_value_heads"),
    ),
    "P-EAGLE": Good(
        "eagle3", eagle3._TABLE, eagle3_file("p-eagle"),
        EAGLE3_KEYS | scaled_rope(1e4) | alike("parallel_drafting=True")
        | {"pard_token": {"mask_token": 8}, "mask_token_id": None, "ptd_token_id": None},
    ),
    "DFlash": Good("dflash", dflash._TABLE, dflash_file(), DFLASH_KEYS | {"projector_type=dspark": {"from_anchor": True}}),
    "DFlash, speculators": Good("dflash", dflash._TABLE, dflash_file(style="speculators"), DFLASH_KEYS),
    "DSpark": Good("dflash", dflash._TABLE, dflash_file("dspark"), DSPARK_KEYS),
    "DSpark, speculators": Good("dflash", dflash._TABLE, dflash_file("dspark", style="speculators"), DSPARK_KEYS),
    "Domino": Good("dflash", dflash._TABLE, dflash_file("domino"), DOMINO_KEYS),
    "DSpark, Gemma 4": Good(
        "dflash", dflash._TABLE | layers.GEMMA4,
        dflash_file("dspark", gemma=True, own_embeddings=True, own_head=True, softcap=3.0, heads=(4, 1, 16), embedding_scale=32**0.5),
        DSPARK_KEYS | GEMMA4_KEYS | {"final_logit_softcapping": {"softcap": 4.0}},
    ),
    "DFlare": Good(
        "dflash", dflash._TABLE, dflash_file(style="speculators", kind="dflare"), DFLASH_KEYS | alike("use_heterogeneous_kv=True"),
    ),
    "DFlash2": Good("dflash", dflash._TABLE, dflash_file("dflash2"), DFLASH2_KEYS),
    "DFlash2, speculators": Good("dflash", dflash._TABLE, dflash_file("dflash2", style="speculators"), DFLASH2_KEYS),
    "MLP": Good(
        "mlp_speculator", mlp.TABLE, speculator_file(helpers_speculators.mlp_checkpoint),
        {"scale_input": {"scale_input": True}}
        | alike("method=sum_rnn", "top_k_tokens_per_head", "n_candidates", "tie_lstm_embs", "proj_dim"),
    ),
    "LSTM": Good(
        "arctic", mlp.TABLE, speculator_file(helpers_speculators.lstm_checkpoint),
        {"scale_input": {"scale_input": False}, "n_predict": {"n_predict": 4}, "n_candidates": {}},
    ),
    "Medusa": Good(
        "medusa", medusa._TABLE, medusa_file("v0.1 safetensors"),
        {"logit_scale": {"logit_scale": 0.5}, "medusa_num_heads": {}, "original_lm_head=False": {}, "medusa_fc_bias=True": {}},
    ),
    "Medusa, converted": Good(
        "medusa", medusa._TABLE, medusa_file("converted"),
        {"logit_scale": {"logit_scale": 0.5}, "num_heads": {}, "medusa_num_heads": {}, "original_lm_head=False": {}},
    ),
    "Medusa, speculators": Good(
        "medusa", medusa._TABLE, medusa_file("speculators"),
        {"logit_scale": {"logit_scale": 0.5}, **alike("num_heads", "medusa_num_heads", "model_type")},
    ),
    "Hydra": Good("hydra", hydra._TABLE, hydra_file, {}),
    "MTP, speculators": Good(
        "mtp", replace(mtp._TABLE, class_keys=frozenset(Qwen3Config().to_dict())), mtp_file,
        ALIKE | alike("layer_types", "num_hidden_layers", "partial_rotary_factor") | {
            "rms_norm_eps": {"rms_norm_eps": 1 + 1e-6}, "rope_parameters": {"rope_parameters": LINEAR},
            "rope_scaling": {"rope_parameters": LINEAR},
        },
        target=lambda: build("qwen3", 0),
    ),
}  # fmt: skip
TABLES = (
    eagle._TABLE,
    eagle3._TABLE,
    dflash._TABLE,
    layers.GEMMA4,
    layers.LATENT,
    mlp.TABLE,
    medusa._TABLE,
    hydra._TABLE,
    mtp._TABLE,
)
# Read by the table of a format that is tried anyway, with the same formula.
OF_ANOTHERS_TABLE = (
    "EAGLE, speculators", "EAGLE-3, speculators", "DFlash, speculators", "DSpark, speculators", "DFlash2, speculators",
    "Medusa, converted",
)  # fmt: skip
UNKNOWN = ("conv_kernel_size", "selector_rank", "query_pre_attn_scalar", "partial_rotary", "never_seen")


def all_keys() -> dict[str, key_tables.Kind]:
    """The kind of every key that some format acts on or refuses by its value, without sections."""
    kinds = dict(key_tables.LAYER_KEYS)
    for table in TABLES:
        for name, key in table.keys.items():
            kinds |= {path.rpartition(".")[2]: key.kind for path in table.places(name)}
    only = {name: value for table in TABLES for name, value in (key_tables._ONLY | table.only).items()}
    named = {name: key_tables.FLAG if isinstance(value, bool) else key_tables.NUMBER for name, value in only.items()}
    return named | kinds | dict.fromkeys(UNKNOWN, key_tables.NUMBER)


def other_values(path: str, kind: key_tables.Kind, now: Any) -> list[Any]:
    """Values that the key does not have now."""
    if isinstance(now, bool):
        return [not now]
    if isinstance(now, (int, float)):
        return [now + 1]
    if isinstance(now, str):
        return ["qwen2" if path.endswith("model_type") else "another"]
    if isinstance(now, list):
        return [now[::-1] if isinstance(now[0], int) else ["sliding_attention"] * len(now)]
    if kind is key_tables.FLAG:
        return [True, False]
    if kind is key_tables.IDS:
        return [[1, 2, 3], [0, 1, 2]]
    if kind is key_tables.NAMES:
        return [["sliding_attention"] * 2]
    if kind is key_tables.ANYTHING:
        return [LINEAR]
    if " or " in kind.name and kind is not key_tables.FLAG:
        return [name.strip("'") for name in kind.name.split(" or ")]
    return [0.5] if kind is key_tables.NUMBER else [3]


def looked_up(config: dict, path: str) -> Any:
    for name in path.split("."):
        config = (config or {}).get(name)
    return config


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) for n in OF_ANOTHERS_TABLE]
    + every_second(n for n in GOOD if n not in OF_ANOTHERS_TABLE),
)
def test_any_one_key(model, tmp_path, name):
    """Added or changed: the draft follows the formula with that key, or the file is refused, or the key is declared to mean nothing."""
    good = GOOD[name]
    model = good.target() if good.target else model
    formula = good.make(tmp_path, model)
    whole = (tmp_path / "config.json").read_text()
    config, problems, refused = json.loads(whole), [], 0
    sections = [section for section in good.table.sections if section in config or section == good.table.section]
    neutral: list[list[tuple[str, Any]]] = [
        [],
        [],
        [],
        [],
    ]  # changes that change nothing, by the number of the key's value

    def check(changes: list[tuple[str, Any]], effect: dict) -> bool:
        """Whether drafts with all these changes follow the formula. If not, halves are tried, and a change alone is a problem."""
        try:
            follows = agrees(drafts(model, good.method, tmp_path, whole, changes), formula(effect))
        except CheckpointError as error:
            assert "\n" not in str(error)
            follows = len(changes) == 1
        half = (len(changes) + 1) // 2
        if not follows and len(changes) == 1:
            problems.append(f"{changes[0]} drafts otherwise")
        return follows or (half < len(changes) and check(changes[:half], effect) & check(changes[half:], effect))

    for key, kind in all_keys().items():
        for path in [key, *(f"{section}.{key}" for section in sections if key in inside(good.table, section))]:
            for i, value in enumerate(other_values(path, kind, looked_up(config, path))):
                checkpoint = Checkpoint(tmp_path)
                checkpoint.config = changed(config, {path: value})
                try:
                    good.table.read(checkpoint)
                except CheckpointError:
                    refused += 1
                    continue
                effect = effect_of(good, path, value)
                if effect:
                    check([(path, value)], effect)
                elif effect is not None or good.table.means_nothing(key):
                    neutral[i].append((path, value))
                else:
                    with contextlib.suppress(CheckpointError):
                        drafts(model, good.method, tmp_path, whole, [(path, value)])
                        problems.append(f"{path} = {value!r} loads")
    nothing = [*good.table.nothing, *key_tables._NOTHING.split(), "_attn_implementation_autoset", "_commit_hash"]
    neutral[0] += [(key, "another" if key != "architectures" else ["Another"]) for key in nothing if key not in config]
    for changes in neutral:
        check(changes, {})
    assert agrees(drafts(model, good.method, tmp_path, whole, []), formula({}))
    assert not problems, "\n".join(problems)
    assert refused > 50


def inside(table: Table, section: str) -> set[str]:
    """Keys that are tried in a section: those that may be there, and one of another format."""
    own = {
        path.removeprefix(f"{section}.")
        for name in table.keys
        for path in table.places(name)
        if path.startswith(section)
    }
    return (
        own
        | {UNKNOWN[0]}
        | (set(key_tables.LAYER_KEYS) if section == key_tables.LAYERS and table.has_layers else set())
    )


def effect_of(good: Good, path: str, value: Any) -> dict | None:
    """The formula's options with this change, {} if the draft stays as it is, None if that is not known."""
    key = path.rpartition(".")[2]
    if (key_tables._ONLY | good.table.only).get(key) == value and key not in good.table.keys:
        return {}
    names = [f"{path}={value}", path, f"{key}={value}", key]
    return next((good.effects[name] for name in names if name in good.effects), None)


def drafts(model, method: str, folder: Path, whole: str, changes: list[tuple[str, Any]]) -> list:
    """(text, path, logits) of two drafted tokens, with changes to config.json."""
    hf_specdec.release(model)
    (folder / "config.json").write_text(json.dumps(changed(json.loads(whole), dict(changes))))
    config = {"method": method, "model": str(folder), "num_speculative_tokens": 2, "native": False}
    recorder = helpers_speculators.recorded(model, config)
    model.generate(torch.arange(4, 11)[None], max_new_tokens=4, do_sample=False, speculative_config=config)
    return recorder.seen


def agrees(seen: list, formula: Formula) -> bool:
    assert {len(path) for _, path, _ in seen} == {0, 1}
    return all(
        torch.allclose(logits.double(), formula(text, path), atol=1e-3, rtol=1e-3) for text, path, logits in seen
    )


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig])
def test_what_trainers_copy_from_their_target(tmp_path, kind):
    """The config.json of EAGLE-mixtral-instruct-8x7B and others is the target's own, with one layer."""
    (tmp_path / "config.json").write_text(json.dumps(kind().to_dict()))
    for table in (eagle._TABLE, eagle3._TABLE):
        table.read(Checkpoint(tmp_path))
