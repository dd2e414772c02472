"""Hydra and Hydra++ (Ankner et al. 2024): Medusa's heads, each reading the tokens drafted before it, also behind a prefix layer."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from ..core.sequence import Sequence
from ..kernels.transfer import upload
from ..model.draft_loop import LevelForward
from ..model.packed_head import PackedHead
from ..model.packed_model import PackedModel
from .base import CandidateGenerator, DrafterContext
from .checkpoints.files import Checkpoint, Plan, counted, load_module, register_format
from .checkpoints.layers import Embeddings, RotaryPositions, fit_biases, shared_embeddings
from .checkpoints.target_parts import DraftVocabulary, check_target, load_once, place_of
from .growing.features import FeatureGenerator
from .growing.last_hidden import LastHiddenConfig, LastHiddenGenerator, bounded_shape
from .growing.levels import Level
from .medusa import share_equal
from .registry import register


@dataclass
class HydraConfig(LastHiddenConfig):
    """Hydra: like Medusa's, but each head also reads the tokens drafted before it. Hydra++ checkpoints (arch "prefix-mlp") put
    a decoder layer of their own, with its own KV, between the target and the heads."""

    name = "hydra"
    requires = ("Hydra heads trained for the target: 'model'",)


class HydraBlock(nn.Module):
    """res(x) + SiLU(W x + b). The first block of a head maps the hidden state and the tokens' embeddings to one width.

    Args:
        num_inputs: hidden-sized parts of the input; if more than one, the residual is a linear map.
    """

    def __init__(self, hidden_size: int, num_inputs: int):
        super().__init__()
        self.linear = nn.Linear(num_inputs * hidden_size, hidden_size)
        self.res_connection = nn.Linear(num_inputs * hidden_size, hidden_size) if num_inputs > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., num_inputs * H] to [.., H]."""
        return self.res_connection(x) + F.silu(self.linear(x))


class HydraHead(nn.Module):
    """Blocks under a language-model head with bias."""

    def __init__(self, hidden_size: int, num_inputs: int, num_blocks: int, vocab_size: int):
        super().__init__()
        widths = [num_inputs] + [1] * (num_blocks - 1)
        self.blocks = nn.Sequential(*(HydraBlock(hidden_size, width) for width in widths))
        self.lm_head = nn.Linear(hidden_size, vocab_size)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        """Logits [.., V] from [hidden; embeddings of the tokens since] [.., num_inputs * H]."""
        return self.lm_head(self.blocks(state))


class PrefixLayer(nn.Module):
    """Hydra++'s decoder layer and norm over the target's hidden states."""

    rotary: RotaryPositions  # set once the layer is on its device

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, features: torch.Tensor, position_ids: torch.Tensor, **attention) -> torch.Tensor:
        """The prefix embeddings [1, T, H] of hidden states [1, T, H]."""
        position_embeddings = self.rotary(position_ids, features.dtype)
        (layer,) = self.layers
        return self.norm(
            layer(features, position_ids=position_ids, position_embeddings=position_embeddings, **attention)
        )


class HydraHeads(nn.Module):
    """All heads of a checkpoint, and the prefix layer of Hydra++.

    With a prefix layer, ungrounded heads read it as they do in training; the original's inference skips it for them.

    Args:
        grounded: whether heads read the tokens before (if not, they are Medusa's with other blocks).
        prefix_config: of the prefix layer; None: there is none.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, num_blocks: int, vocab_size: int, grounded: bool, embeddings: Embeddings,
        prefix_config: LlamaConfig | None,
    ):  # fmt: skip
        super().__init__()
        self.heads = nn.ModuleList(
            HydraHead(hidden_size, i + 2 if grounded else 1, num_blocks, vocab_size) for i in range(num_heads)
        )
        self.prefix = None if prefix_config is None else PrefixLayer(prefix_config)
        self.grounded, self.embeddings, self.prefix_config = grounded, embeddings, prefix_config

    def forward(self, input_ids, features, position_ids, **attention) -> torch.Tensor:
        """What the heads read instead of the target's hidden states [1, T, H] (see HeadModule); tokens have no part in it."""
        assert self.prefix is not None
        return self.prefix(features, position_ids, **attention)

    def with_tokens(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The states [.., S + H] after tokens [..] that followed states [.., S]."""
        return torch.cat([state, self.embeddings(tokens, state)], dim=-1) if self.grounded else state


# ---- format ---------------------------------------------------------------------------------------------------------

_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(.+)$")
_LM_HEAD = re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?(weight|bias)$")
_PREFIX = re.compile(r"prefix_embed+ing_layer\.(.+)$")  # the original code has one d
_LLAMA_LIKE = ("llama", "mistral", "qwen2")
_LAYER_KEYS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "rope_parameters",
)  # fmt: skip


def is_hydra(checkpoint: Checkpoint) -> bool:
    """Whether these are Hydra heads."""
    return checkpoint.any(r"hydra_mlp\.\d+\.\d+\.linear\.weight$")


register_format("Hydra, Hydra++ (ankner/hydra-*: hydra_mlp.{head}.{block}, hydra_lm_head.{head})", "hydra", is_hydra)


def _canonical(name: str, places: list[int]) -> str | None:
    """The module's name of a tensor.

    Args:
        places: where blocks stand in a head, ascending; dropout modules take places too.
    """
    if match := _BLOCK.match(name):
        return f"heads.{match[1]}.blocks.{places.index(int(match[2]))}.{match[3]}"
    if match := _LM_HEAD.match(name):
        return f"heads.{match[1]}.lm_head.{match[2]}"
    if match := _PREFIX.match(name):  # a whole one-layer model, whose embeddings are never read
        return None if match[1] == "embed_tokens.weight" else f"prefix.{match[1]}"
    return name


def _name_in_prefix(name: str) -> str | None:
    match = _PREFIX.match(name)
    return match[1] if match else None


def load_hydra(checkpoint: Checkpoint, target: PackedModel) -> HydraHeads:
    """The heads of a checkpoint on the target's device, in its dtype.

    Raises:
        CheckpointError: an architecture that is neither "mlp" nor "prefix-mlp", tensors that do not fit, another target's.
    """
    has_prefix = checkpoint.any(_PREFIX.pattern)
    found = "prefix-mlp" if has_prefix else "mlp"
    arch = checkpoint.config.get("hydra_head_arch", found)
    if arch != found:
        can_run = "'mlp' and 'prefix-mlp' can be run"
        raise checkpoint.error(f"has hydra_head_arch = {arch!r} and tensors of {found!r}; {can_run}.")
    if checkpoint.config.get("hidden_state_offset", 0) != 0:
        raise checkpoint.error(
            "reads an inner layer's hidden states (hidden_state_offset is not 0), which is not supported."
        )
    matches = [match for match in map(_BLOCK.match, checkpoint.names()) if match]
    places = sorted({int(match[2]) for match in matches})
    plan = Plan(checkpoint, lambda name: _canonical(name, places))
    first, lm_head = "heads.0.blocks.0.linear.weight", "heads.0.lm_head.weight"
    for canonical, name in ((first, f"hydra_mlp.0.{places[0]}.linear.weight"), (lm_head, "hydra_lm_head.0.weight")):
        if canonical not in plan:
            raise checkpoint.error(f"has no {name}.")
    (hidden_size, width), vocab_size = plan.matrix(first), plan.shape(lm_head)[0]
    check_target(checkpoint, target, hidden_size, vocab_size)
    grounded = width > hidden_size
    if checkpoint.config.get("grounded_heads", grounded) != grounded:
        raise checkpoint.error(
            f"config.json says grounded_heads = {not grounded}, but the first head reads width {width}."
        )
    with torch.device("meta"):
        hydra = HydraHeads(
            hidden_size,
            num_heads=counted(checkpoint, (int(match[1]) for match in matches), "head"),
            num_blocks=len(places),
            vocab_size=vocab_size,
            grounded=grounded,
            embeddings=shared_embeddings(checkpoint, target, hidden_size),
            prefix_config=_prefix_config(checkpoint, target, plan) if has_prefix else None,
        )
    if hydra.prefix is not None:
        fit_biases(hydra.prefix, Plan(checkpoint, _name_in_prefix))
    device, dtype = place_of(target)
    load_module(hydra, plan, device, dtype)
    share_equal(hydra)
    if hydra.prefix is not None and hydra.prefix_config is not None:
        hydra.prefix.rotary = RotaryPositions(checkpoint, hydra.prefix_config, device)
    return hydra


def _prefix_config(checkpoint: Checkpoint, target: PackedModel, plan: Plan) -> LlamaConfig:
    """The prefix layer is a Llama layer with the target's numbers: checkpoints say nothing of it."""
    own, gate, queries = (
        target.config,
        "prefix.layers.0.mlp.gate_proj.weight",
        "prefix.layers.0.self_attn.q_proj.weight",
    )
    if own.model_type not in _LLAMA_LIKE:
        raise checkpoint.error(
            f"has a prefix layer, which takes its settings from a target like Llama; this one's model_type is {own.model_type!r}."
        )
    for name in (gate, queries):
        if name not in plan:
            raise checkpoint.error(f"has no {name.replace('prefix.', 'prefix_embeding_layer.')}.")
    values = {key: getattr(own, key) for key in _LAYER_KEYS}
    head_dim = plan.shape(queries)[0] // own.num_attention_heads
    return LlamaConfig(**values, head_dim=head_dim, intermediate_size=plan.shape(gate)[0], num_hidden_layers=1)


# ---- drafting -------------------------------------------------------------------------------------------------------


@register(HydraConfig)
class HydraGenerator(LastHiddenGenerator):
    """Heads on the target's last hidden state; a node's state is that and the embeddings of its path."""

    config: HydraConfig

    @classmethod
    def create(
        cls, config: HydraConfig, target: PackedModel, context: DrafterContext | None = None
    ) -> CandidateGenerator:
        """With or without the prefix layer, as the checkpoint has it."""
        checkpoint = config.open_head(is_hydra)
        heads = load_once(config, target, lambda: load_hydra(checkpoint, target))
        return (cls if heads.prefix is None else HydraPrefixGenerator)(config, target, context, heads)

    def __init__(self, config: HydraConfig, target: PackedModel, context: DrafterContext | None, heads: HydraHeads):
        super().__init__(config, target, context)
        self.heads = heads
        self.vocabulary = DraftVocabulary(target.vocab_size)
        self.set_heads(heads, len(heads.heads))

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        """The first head's logits."""
        hidden, tokens = roots
        state = self.heads.with_tokens(hidden, tokens)
        self.state = state[:, None]
        return self.heads.heads[0](state)

    def expand(self, level: Level) -> torch.Tensor:
        """The next head's logits after each node [R, F, V]."""
        self.state = self.heads.with_tokens(self.carried(level), level.tokens)
        return self.heads.heads[level.depth](self.state)


class HydraPrefixGenerator(FeatureGenerator):
    """Hydra++: the prefix layer reads the text's hidden states, with KV of its own; drafting itself needs no KV."""

    config: HydraConfig

    def __init__(self, config: HydraConfig, target: PackedModel, context: DrafterContext | None, heads: HydraHeads):
        super().__init__(config, target, context)
        assert heads.prefix_config is not None
        self.heads = heads
        self.vocabulary = DraftVocabulary(target.vocab_size)
        self.head = self.captured(
            PackedHead(heads, heads.prefix_config, num_layers=1, prepack_weights=config.prepack_weights)
        )
        self.shape = bounded_shape(config, self.shape, len(heads.heads))
        self.config = self.settled(config)
        self.cache = self.new_cache(1, config.block_size)

    def settled(self, config: HydraConfig) -> HydraConfig:
        """A call's configuration, with the number of heads where it bounds the draft length."""
        return config.bounded(self.shape.depth)

    def modules(self) -> list[nn.Module]:
        """The heads, and what they share with the target."""
        return [self.heads, *super().modules()]

    def level_forwards(self, depth: int) -> list[LevelForward]:
        """None: only the text has keys and values."""
        return []

    def roots(self, sequences: list[Sequence]) -> tuple[torch.Tensor, ...]:
        """Read what is new of each text: the prefix layer's output [R, H] at its end, and the newest token [R]."""
        hidden = self.read_all(sequences)
        return hidden, upload([seq.tokens[-1] for seq in sequences], hidden.device)

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        """The first head's logits after the newest token."""
        hidden, tokens = roots
        state = self.heads.with_tokens(hidden, tokens)
        self.state = state[:, None]
        return self.heads.heads[0](state)

    def expand(self, level: Level) -> torch.Tensor:
        """The next head's logits after each node [R, F, V]."""
        self.state = self.heads.with_tokens(self.carried(level), level.tokens)
        return self.heads.heads[level.depth](self.state)
