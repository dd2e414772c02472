"""How each family of models stores and runs its multi-token-prediction (MTP) modules: data only.

Every module is converted to one form (Gloeckle et al. 2024; DeepSeek-V3 report, section 2.2):

    x = layer(eh_proj([enorm(embedding); hnorm(hidden)])),  logits = lm_head(norm(x))

with tensors named `enorm`, `hnorm`, `eh_proj`, `layer.*`, `norm`, `embed_tokens`, `lm_head`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MtpLayout:
    """One way in which MTP modules are stored and run.

    Attributes:
        name: shown in errors: the families, and an example of a tensor name.
        marker: a regular expression that matches some tensor's name in every checkpoint of this layout.
        rules: (pattern, prefix): the first pattern that matches a whole tensor name gives the canonical name, which is the
            prefix and the group `rest`; the group `i` is the module's number (default: 0). A prefix of None means that the
            tensor is not used.
        numbered_after_target: modules are numbered as layers after the target's last one.
        shared: canonical prefixes of tensors that all modules share.
        hidden_first: eh_proj reads [hidden; embedding].
        zero_first_embedding: the embedding at position 0 is zeros, as in the family's reference.
        has_norm: whether there is a norm between layer and head.
        normed_output: the next draft step reads the module's output after `norm`, not before.
        attention: the layer's kind of attention, for targets with several kinds whose configuration has no
            `mtp_layer_types`.
    """

    name: str
    marker: str
    rules: tuple[tuple[str, str | None], ...]
    numbered_after_target: bool = False
    shared: tuple[str, ...] = ()
    hidden_first: bool = False
    zero_first_embedding: bool = False
    has_norm: bool = True
    normed_output: bool = True
    attention: str = "full_attention"

    def canonical(self, name: str, num_layers: int) -> tuple[int, str] | None:
        """The module and the canonical name of a tensor; (-1, "") if it is not used; None if it is not part of this layout."""
        for pattern, prefix in self.rules:
            match = re.fullmatch(pattern, name)
            if match is None:
                continue
            groups = match.groupdict()
            module = int(groups.get("i") or 0) - (num_layers if self.numbered_after_target else 0)
            if module < 0:
                return None  # a layer of the target
            return (-1, "") if prefix is None else (module, prefix + groups["rest"])
        return None


def _rules(stem: str, parts: str, others: str | None = None) -> tuple[tuple[str, str | None], ...]:
    """Rules for the tensors whose names begin with `stem`.

    Args:
        parts: words "theirs=ours", a pattern after the stem and the canonical name; "theirs" where the names are the same; "theirs="
            where the part is not used.
        others: pattern before the layer's own names, for all other tensors; None: there are no others.
    """
    rules: list[tuple[str, str | None]] = []
    for theirs, renamed, ours in (part.partition("=") for part in parts.split()):
        rules.append((rf"{stem}{theirs}\.(?P<rest>.+)", None if renamed and not ours else f"{ours or theirs}."))
    if others is not None:
        rules.append((rf"{stem}{others}(?P<rest>.+)", "layer."))
    return tuple(rules)


_I = r"(?P<i>\d+)"
_LAYER = rf"(?:model\.)?(?:language_model\.)?layers\.{_I}\.(?:transformer\.)?"
_MTP = r"(?:model\.)?mtp\."
_MTP_LAYER = rf"{_MTP}layers\.{_I}\."
_BLOCKS = r"(?:(?:language_)?model\.)?mtp\.layers\."
_FUSION = "enorm hnorm eh_proj"
_OF_MIMO = "token_layernorm=enorm hidden_layernorm=hnorm input_proj=eh_proj final_layernorm=norm"

LAYOUTS = (
    MtpLayout(
        name="Hunyuan V3 (model.layers.{L}.eh_proj, .final_layernorm)",
        marker=_LAYER + r"final_layernorm\.weight",
        # The reference uses the target's head, not the stored one.
        rules=_rules(_LAYER, f"shared_head= final_layernorm=norm {_FUSION} embed_tokens", others=""),
        numbered_after_target=True,
        zero_first_embedding=True,
    ),
    # transformers and SGLang pass on the normed output and embed the first token; older versions of vLLM do neither.
    MtpLayout(
        name="DeepSeek-V3, GLM-4.5, openPangu (model.layers.{L}.eh_proj, .shared_head.norm)",
        marker=_LAYER + r"shared_head\.norm\.weight",
        rules=_rules(
            _LAYER,
            rf"shared_head\.norm=norm shared_head\.(?:head|output)=lm_head {_FUSION} embed_tokens",
            others="",
        ),
        numbered_after_target=True,
    ),
    MtpLayout(
        name="Qwen3-Next, Qwen3.5, EXAONE (mtp.fc, mtp.layers.0)",
        marker=r"mtp\.fc\.weight",
        rules=_rules(
            r"mtp\.",
            rf"layers\.{_I}=layer fc=eh_proj pre_fc_norm_embedding=enorm pre_fc_norm_hidden=hnorm norm embed_tokens lm_head",
        ),
        shared=("eh_proj.", "enorm.", "hnorm.", "norm.", "embed_tokens.", "lm_head."),
    ),
    MtpLayout(
        name="MiMo (model.mtp_layers.0.input_proj)",
        marker=r"model\.mtp_layers\.\d+\.input_proj\.weight",
        rules=_rules(rf"model\.mtp_layers\.{_I}\.", _OF_MIMO, others=""),
        hidden_first=True,
        zero_first_embedding=True,
    ),
    MtpLayout(
        name='speculators (speculators_model_type "mtp": mtp_layers.0.input_proj)',
        marker=r"mtp_layers\.\d+\.input_proj\.weight",
        rules=_rules(rf"mtp_layers\.{_I}\.", _OF_MIMO, others=""),
    ),
    MtpLayout(
        name="LongCat-Flash (model.mtp.layers.0.enorm.m)",
        marker=_MTP + r"layers\.\d+\.enorm\.m\.weight",
        rules=(
            *_rules(_MTP, "norm embed_tokens"),
            *_rules(_MTP_LAYER, r"enorm\.m=enorm hnorm\.m=hnorm eh_proj", others=r"(?:transformer_layer\.)?"),
        ),
        shared=("norm.", "embed_tokens."),
    ),
    MtpLayout(
        name="MiMo-V2 (model.mtp.layers.0.eh_proj, .pre_mlp_layernorm)",
        marker=_MTP + r"layers\.\d+\.pre_mlp_layernorm\.weight",
        rules=_rules(
            _MTP_LAYER, f"final_layernorm=norm pre_mlp_layernorm=layer.post_attention_layernorm {_FUSION}", others=""
        ),
        attention="sliding_attention",
    ),
    MtpLayout(
        name="Ernie 4.5 (model.mtp_linear_proj.0, model.mtp_block.0)",
        marker=r"(?:model\.)?mtp_linear_proj\.\d+\.weight",
        rules=_rules(
            r"(?:model\.)?mtp_",
            rf"emb_norm\.{_I}=enorm hidden_norm\.{_I}=hnorm linear_proj\.{_I}=eh_proj block\.{_I}=layer",
        ),
        zero_first_embedding=True,
        has_norm=False,
        normed_output=False,
    ),
    MtpLayout(
        name="Nemotron-H (mtp.layers.0.eh_proj, .mixer; mtp.layers.1.final_layernorm)",
        marker=_BLOCKS + r"\d+\.mixer\..+",
        # numbers are those of the one module's blocks: the first holds what comes before them, the last the norm
        rules=(
            *_rules(_BLOCKS + r"0\.", _FUSION),
            *_rules(_BLOCKS + r"\d+\.", "final_layernorm=norm"),
            (_BLOCKS + "(?P<rest>.+)", "layer.blocks."),
        ),
    ),
)

# Names of layer parts in checkpoints and in transformers; applied if the layer has the second name.
LAYER_NAMES = (
    (r"\.mlp\.moe_statics\.e_score_correction_bias", ".mlp.gate.moe_statics.e_score_correction_bias"),
    (r"\.mlp\.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    (r"\.mlp\.router\.gate\.weight", ".mlp.gate.weight"),
    (r"\.mlp\.expert_bias", ".mlp.e_score_correction_bias"),
    (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
    (r"\.self_attn\.attention_sink_bias", ".self_attn.sinks"),
)


def vocabulary_table(name: str) -> str | None:
    """`d2t` or `t2d` for a table of a reduced draft vocabulary, wherever the file has it: no family has a place for these."""
    last = name.rpartition(".")[2]
    return last if last in ("d2t", "t2d") else None


def is_mtp_tensor(num_layers: int) -> Callable[[str], bool]:
    """A test for tensor names that may belong to MTP modules of a target with that many layers, in any layout."""

    def wanted(name: str) -> bool:
        # include it even if no layout knows it, so that it is reported
        by_name = re.match(r"((language_)?model\.)*mtp[._]", name) is not None or vocabulary_table(name) is not None
        return by_name or any(layout.canonical(name, num_layers) is not None for layout in LAYOUTS)

    return wanted


def find_layout(names: Iterable[str], num_layers: int) -> MtpLayout | None:
    """The layout to which these tensor names belong, or None."""
    names = list(names)
    for layout in LAYOUTS:
        if any(re.fullmatch(layout.marker, name) and layout.canonical(name, num_layers) is not None for name in names):
            return layout
    return None


def holds_mtp_alone(config: dict[str, Any], names: Iterable[str]) -> bool:
    """True for MTP modules without a language model: with one, the checkpoint may be meant as a draft model."""
    names = list(names)
    if config.get("speculators_model_type") not in (None, "mtp"):
        return False
    if any(re.match(r"(model\.)?(language_model\.)?layers\.0\.", name) for name in names):
        return False
    num_layers = config.get("num_hidden_layers") or config.get("text_config", {}).get("num_hidden_layers") or 0
    return find_layout(names, num_layers) is not None
