"""Make an EAGLE-3 head bigger without changing its drafts, for a target made bigger by `inflate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from .tensors import DIMENSIONS, Inflation, check_growth, layer_places

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def inflate_eagle3(
    folder: str | Path,
    source: PretrainedConfig,
    target: PretrainedConfig,
    destination: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> None:
    """Write the head of `folder`, which drafts for `source`, to `destination`, with the sizes of `target`. Raises ValueError: `folder`
    has no EAGLE-3 head in the original layout, or the target is too small to hold the head."""
    folder, destination = Path(folder), Path(destination)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "model.safetensors", device=str(device))
    if "midlayer.hidden_norm.weight" not in tensors or not config.get(LAYER_IDS):
        raise ValueError(f"{folder} is not an EAGLE-3 head with midlayer.* and {LAYER_IDS}: give such a head.")
    old, new = {name: config[name] for name in DIMENSIONS}, {name: getattr(target, name) for name in DIMENSIONS}
    new["num_hidden_layers"] = old["num_hidden_layers"]
    if old["hidden_size"] != source.hidden_size:
        raise ValueError(
            f"{folder} has width {old['hidden_size']}, but `source` has {source.hidden_size}: give the head's own target."
        )
    check_growth(old, new, HeadInflation.groups, "the head's")
    with torch.device(device):
        grown = HeadInflation(None, old, new, dtype, seed).tensors(tensors)
        offsets(grown, config, target.vocab_size)
    destination.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous().cpu() for name, tensor in grown.items()}, destination / "model.safetensors")
    config = {**config, **new, **tapped(config[LAYER_IDS], source.num_hidden_layers, target.num_hidden_layers)}
    config |= {
        "rms_norm_eps": config["rms_norm_eps"] * old["hidden_size"] / new["hidden_size"],
        "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def tapped(layers: list[int], old: int, new: int) -> dict[str, Any]:
    """Config keys for the hidden states to read. The output of old layer i - 1 comes from its new place among the `new` layers."""
    places = layer_places(old, new)
    moved = [places[i - 1] + 1 if i else 0 for i in layers]
    outputs = {LAYER_IDS: [i - 1 for i in moved], "use_aux_hidden_state": True}
    return {LAYER_IDS: moved, "eagle_config": outputs}


def offsets(tensors: dict[str, Tensor], config: dict[str, Any], vocab_size: int) -> None:
    """Add `d2t` and `t2d` if the target has more tokens than the head. A new `d2t` maps the head's tokens to the target's first."""
    size = tensors["lm_head.weight"].shape[0]
    if size < vocab_size:
        tensors.setdefault("d2t", torch.zeros(size, dtype=torch.long))
        chosen = torch.zeros(vocab_size, dtype=torch.bool)
        chosen[torch.arange(size) + tensors["d2t"]] = True
        tensors["t2d"] = chosen
    config["draft_vocab_size"] = size


class HeadInflation(Inflation):
    """The inflated tensors of one head. Old units get the same places as in a model."""

    def tensors(self, old: dict[str, Tensor]) -> dict[str, Tensor]:
        """All tensors by name. New inner units are random and do not affect the output."""
        old_sizes, new = self.old, self.new
        h, width, inner_new = old_sizes["hidden_size"], new["hidden_size"], new["intermediate_size"]
        channels, inner = torch.arange(h), torch.arange(old_sizes["intermediate_size"])
        projections = {  # new rows of the old ones, old rows, new heads that have them, number of new heads
            "q_proj": (self.q_rows, slice(None), self.q_heads, new["num_attention_heads"]),
            "k_proj": (self.kv_rows, self.kv_sources, self.kv_heads, new["num_key_value_heads"]),
        }
        projections["v_proj"] = projections["k_proj"]
        grown = {}
        for name, weight in old.items():
            kind, states = name.split(".")[-2] if "." in name else name, weight.shape[-1] // h
            columns = torch.cat([channels + i * width for i in range(max(states, 1))])  # of concatenated states
            if kind in projections:
                rows, sources, heads, count = projections[kind]
                scale = (new["head_dim"] / old_sizes["head_dim"]) ** 0.5 if kind == "q_proj" else 1.0
                out, block = self.random(count * new["head_dim"], states * width), (weight.float() * scale)[sources]
                grown[name] = self.placed(out, block, rows, columns, self.rows_of_heads(heads))
            elif kind in ("gate_proj", "up_proj"):
                grown[name] = self.placed(self.random(inner_new, states * width), weight, inner, columns, inner)
            elif kind == "o_proj":
                grown[name] = self.zeros(width, new["num_attention_heads"] * new["head_dim"])
                self.placed(grown[name], weight, channels, self.q_rows)
            elif kind == "down_proj":
                grown[name] = self.placed(self.zeros(width, inner_new), weight, channels, inner)
            elif kind == "fc":
                grown[name] = self.placed(self.zeros(width, states * width), weight, channels, columns)
            elif kind == "lm_head":
                tokens = torch.arange(len(weight))
                grown[name] = self.placed(self.random(len(weight), width), weight, tokens, channels)
            elif weight.shape == (h,):  # norms, including those of the states
                grown[name] = self.residual_norm(weight).data
            elif kind in ("d2t", "t2d"):
                grown[name] = weight
            else:
                raise ValueError(f"{name} {tuple(weight.shape)}: this tensor is not part of a known EAGLE-3 head.")
        return grown
