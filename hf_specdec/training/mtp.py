"""Multi-token prediction (DeepSeek-V3 report, section 2.2) with one module for all drafted tokens (FastMTP)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from ..candidate_generators.checkpoints.files import renaming
from ..candidate_generators.mtp.head import MtpModule, TargetFamily
from ..candidate_generators.mtp.layouts import find_layout
from ..core.names import CACHE
from ..model import architectures
from .base import Exported, register
from .batch import Batch, Places
from .losses import LogitsOf, StepTrainer
from .options import MtpOptions, TrainingError
from .target import TargetModel
from .unrolled import ATTENTION_NAME, unroll


@register(MtpOptions)
class MtpTrainer(StepTrainer):
    """Trains one MTP module, a decoder layer of the target's type, to draft several tokens from its own output (FastMTP); unrolled
    over `num_steps` tokens of the text with weights step_decay^k / sum."""

    formats = ("original", "speculators")
    options: MtpOptions
    head: MtpModule

    def build(self, token_counts: torch.Tensor) -> nn.Module:
        """Layer and last norm are initialised with the target's weights; the projection averages its two inputs."""
        options, target = self.options, self.target
        self.prefix = f"model.layers.{target.num_layers}."
        layout = find_layout([self.prefix + "shared_head.norm.weight"], target.num_layers)
        assert layout is not None
        family = TargetFamily.of(target.model, _refusal)
        if family.rotary is None:
            raise _refusal(f"{type(target.model).__name__} has layers of blocks, which no trainer builds.")
        sparse = any(".experts." in f".{name}" for name in family.last_layer.state_dict())
        with torch.device("meta"):
            module = MtpModule(family, layout, 0, sparse, shapes={})
        module = module.float().to_empty(device=target.device)
        for part in module.modules():
            target.model._init_weights(part)
        with torch.no_grad():
            module.norm.load_state_dict(family.norm.state_dict())
            source = last_like(target, module) if options.copy_layer else None
            if source is not None:
                module.layer.load_state_dict(source.state_dict())
            half = 0.5 * torch.eye(target.hidden_size, device=target.device)
            module.eh_proj.weight += torch.cat([half, half], dim=1)
        with torch.device(target.device):
            module.add_rotary(family.rotary)
        module.share(target.embed_tokens, target.lm_head_float32())
        self._choose_attention(module)
        self.num_guesses, weights = options.num_draft_tokens, [options.step_decay**k for k in range(options.num_steps)]
        self.weights = [weight / sum(weights) for weight in weights]
        return module.requires_grad_(True)

    def unrolled(self, batch: Batch, num_steps: int) -> list[torch.Tensor]:
        """The normed output [B, S, H] of each step, from which the logits of guess k at t are made, under teacher forcing.

        Step k at t reads x_{t+1+k} and the output of step k - 1 at t (step 0: h_t), at position t + k. It sees what a draft
        from t has in its cache: the rows of step 0 up to t, and its own earlier steps.
        """
        if self.is_plain:
            return list(unroll(self._step, batch, batch.hidden(), num_steps))  # pyright: ignore[reportArgumentType]
        states, state, cache = [], batch.hidden(), DynamicCache()
        for k in range(num_steps):
            seen = steps_mask(batch.input_ids.shape[1], k, self.window, state.device)
            if self.head.config._attn_implementation == "eager":  # it adds the mask
                lowest = torch.finfo(torch.bfloat16).min
                seen = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, lowest)
            tokens = batch.ahead(batch.input_ids, 1 + k)
            state = self._step(tokens, state, batch.position_ids + k, attention_mask=seen[None, None], **{CACHE: cache})
            states.append(state)
        return states

    def _step(
        self, tokens: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, **attention
    ) -> torch.Tensor:
        return self.head.norm(self.head(tokens, features, position_ids, **attention))

    def _choose_attention(self, module: MtpModule) -> None:
        """Use the fast attention of unrolled.py for plain attention, and the target's own with masks otherwise."""
        config, attention = module.config, module.layer.self_attn
        self.window = architectures.layer_window(attention)
        capped = getattr(config, "attn_logit_softcapping", None) is not None
        latent, sinks = getattr(config, "kv_lora_rank", None) is not None, hasattr(attention, "sinks")
        replaceable = self.target.model._can_set_attn_implementation()
        self.is_plain = replaceable and not (self.window or capped or latent or sinks)
        # transformers' sdpa ignores soft caps on scores.
        config._attn_implementation = "sdpa" if self.target.model._supports_sdpa and not capped else "eager"
        if self.is_plain:
            config._attn_implementation = ATTENTION_NAME

    def steps(self, batch: Batch, places: Places) -> Iterator[tuple[LogitsOf, torch.Tensor]]:
        """The steps of `unrolled`."""
        states = self.unrolled(batch, places.num_steps)
        return ((self.head.logits, places.guessed(state, k)) for k, state in enumerate(states))

    def exported(self, form: str) -> Exported:
        """Tensors under DeepSeek-V3's names, as a layer after the target's last, or speculators'; without embeddings and head."""
        named = {name: value for name, value in self.head.state_dict().items() if not name.startswith("rotary_emb.")}
        config = {k: v for k, v in self.target.config.to_dict().items() if k not in ("dtype", "_name_or_path")}
        if form == "original":
            config["num_nextn_predict_layers"] = 1
            return Exported(apart(self.prefix, named, _DEEPSEEK), config)
        layer = self.head.config.to_dict()
        layer = {k: v for k, v in layer.items() if k not in ("dtype", "architectures", "_name_or_path")}
        config = self.speculators_config("MTPDraftModel", {**layer, "num_hidden_layers": 1})
        config["num_nextn_predict_layers"] = 1
        return Exported(apart("mtp_layers.0.", named, _SPECULATORS), config)


# The layouts' names for the module's parts. Names inside the layer stay as they are.
_DEEPSEEK = renaming((r"norm\.", "shared_head.norm."), (r"layer\.", ""))
_SPECULATORS = renaming(
    (r"enorm\.", "token_layernorm."), (r"hnorm\.", "hidden_layernorm."), (r"eh_proj\.", "input_proj."),
    (r"norm\.", "final_layernorm."), (r"layer\.", ""),
)  # fmt: skip


def apart(prefix: str, named: dict[str, torch.Tensor], rename: Callable[[str], str]) -> dict[str, torch.Tensor]:
    """Tensors under a layout's names. Experts, which transformers stacks, become separate tensors, as in checkpoints."""
    out = {}
    for name, value in named.items():
        name = prefix + rename(name)
        if name.endswith(".experts.gate_up_proj"):
            for i, both in enumerate(value):
                gate, up = both.chunk(2)
                out[name.replace("gate_up_proj", f"{i}.gate_proj.weight")] = gate
                out[name.replace("gate_up_proj", f"{i}.up_proj.weight")] = up
        elif name.endswith(".experts.down_proj"):
            out |= {name.replace("down_proj", f"{i}.down_proj.weight"): down for i, down in enumerate(value)}
        else:
            out[name] = value
    return out


def steps_mask(length: int, step: int, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [S, (step + 1) * S]: query t sees step 0's rows up to t and later steps' rows at t, within the window.

    Row t of step j has position t + j.
    """
    row = torch.arange(length, device=device)
    seen = [row <= row[:, None], *[row == row[:, None]] * step]
    if window is not None:
        seen = [mask & (row[:, None] + step - (row + j) < window) for j, mask in enumerate(seen)]
    return torch.cat(seen, dim=1)


def _refusal(what: str) -> TrainingError:
    return TrainingError(f"{what} Train another kind of head for this target.")


def last_like(target: TargetModel, module: MtpModule) -> nn.Module | None:
    """The target's last layer whose weights have the names and shapes of the module's layer."""
    shapes = {name: value.shape for name, value in module.layer.state_dict().items()}
    layers: Any = architectures.decoder_of(target.model).layers
    for layer in reversed(layers):
        if {name: value.shape for name, value in layer.state_dict().items()} == shapes:
            return layer
    return None
