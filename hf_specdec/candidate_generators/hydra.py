"""Hydra and Hydra++ (Ankner et al. 2024): Medusa's heads, but each also reads the tokens drafted before it; method `hydra`."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from ..core.sequence import Sequence
from ..kernels.transfer import upload
from ..model.draft_loop import LevelForward
from ..model.packed_head import PackedHead
from ..model.packed_model import PackedModel
from .base import CandidateGenerator, DrafterContext
from .checkpoints.files import Checkpoint, Plan, counted, register_format, renaming, share_equal
from .checkpoints.keys import FLAG, Key, Table, one_of
from .checkpoints.layers import Embeddings, RotaryPositions, embeddings_of, fit_biases
from .checkpoints.target_parts import DraftVocabulary, built, check_target, device_and_dtype, load_once
from .growing.features import FeatureGenerator
from .growing.grower import GrowsDrafts
from .growing.last_hidden import LastHiddenConfig, LastHiddenGenerator
from .growing.tree_growth import DraftLevel
from .registry import register

LLAMA_LIKE = ("llama", "mistral", "qwen2")  # types of targets whose settings a prefix layer can have
_LAYER_KEYS = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "rope_parameters",
)  # fmt: skip


def prefix_config(target: PretrainedConfig, head_dim: int | None, intermediate_size: int) -> LlamaConfig:
    """The prefix layer's configuration: a Llama layer with the target's settings, since checkpoints have none of their own."""
    values = {key: getattr(target, key) for key in _LAYER_KEYS}
    return LlamaConfig(**values, head_dim=head_dim, intermediate_size=intermediate_size, num_hidden_layers=1)


class HydraBlock(nn.Module):
    """res(x) + SiLU(W x + b) of `num_inputs` parts [H]; with more than one (a head's first block) the residual is a linear map."""

    def __init__(self, hidden_size: int, num_inputs: int):
        super().__init__()
        self.linear = nn.Linear(num_inputs * hidden_size, hidden_size)
        self.res_connection = nn.Linear(num_inputs * hidden_size, hidden_size) if num_inputs > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[.., num_inputs * H] to [.., H]."""
        return self.res_connection(x) + F.silu(self.linear(x))


class HydraHead(nn.Module):
    """Blocks and a language-model head with bias."""

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

    rotary: RotaryPositions  # set after loading

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, features: torch.Tensor, position_ids: torch.Tensor, **attention) -> torch.Tensor:
        """The prefix embeddings [1, T, H] of hidden states [1, T, H]."""
        position_embeddings = self.rotary(position_ids, features.dtype)
        (layer,) = self.layers
        out = layer(features, position_ids=position_ids, position_embeddings=position_embeddings, **attention)
        return self.norm(out)


class HydraHeads(nn.Module):
    """All heads of a checkpoint, and the prefix layer of Hydra++.

    Ungrounded heads read the prefix layer too, as in training; the original inference code skips it for them.

    Args:
        grounded: whether heads read the tokens drafted before; if not, they are like Medusa's.
        prefix_config: of the prefix layer; None: no prefix layer.
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
        """The prefix layer's output for the target's hidden states [1, T, H] (see `PackedHead`). `input_ids` are not used."""
        assert self.prefix is not None
        return self.prefix(features, position_ids, **attention)

    def with_tokens(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The states [.., S + H] after tokens [..], from states [.., S]."""
        return torch.cat([state, self.embeddings(tokens, state)], dim=-1) if self.grounded else state


_PREFIX = r"prefix_embed+ing_layer\."  # the original code spells it with one d
_RULES = (
    (r"hydra_lm_head\.(\d+)\.(\d+\.)?(weight|bias)$", r"heads.\1.lm_head.\3"),
    (_PREFIX + r"embed_tokens\.weight$", None),  # stored as a whole one-layer model; its embeddings are not used
    (_PREFIX, "prefix."),
)
_TABLE = Table(
    {"arch": Key(one_of("mlp", "prefix-mlp"), places=("hydra_head_arch",)), "grounded_heads": Key(FLAG)},
    only={"hidden_state_offset": 0},
    nothing=frozenset({"hydra_num_heads", "hydra_num_layers", "version", "model_type"}),  # tensors are counted
    has_layers=False,
)


register_format(
    "Hydra, Hydra++ (ankner/hydra-*: hydra_mlp.{head}.{block}, hydra_lm_head.{head})",
    "hydra",
    lambda checkpoint: checkpoint.any(r"hydra_mlp\.\d+\.\d+\.linear\.weight$"),
)


def load_hydra(checkpoint: Checkpoint, target: PackedModel) -> HydraHeads:
    """Load the heads of a checkpoint on the target's device, in its dtype. Raises CheckpointError: an architecture other than "mlp" and
    "prefix-mlp", tensors that do not fit, or heads for another target."""
    if checkpoint.config.get("speculators_model_type") == "hydra":
        raise checkpoint.error(
            "is of speculators type 'hydra', whose trainer shows a head the token that it predicts: it cannot draft."
        )
    has_prefix = checkpoint.any(_PREFIX)
    kind = "prefix-mlp" if has_prefix else "mlp"
    given = _TABLE.read(checkpoint)
    if given.arch not in (None, kind):
        raise checkpoint.error(f"has hydra_head_arch = {given.arch!r} and tensors of {kind!r}.")
    names = checkpoint.names()
    matches = [match for name in names if (match := re.match(r"hydra_mlp\.(\d+)\.(\d+)\.", name))]
    places = sorted({int(match[2]) for match in matches})  # the blocks' indices in a head; dropout modules count, too
    blocks = [(rf"hydra_mlp\.(\d+)\.{place}\.", rf"heads.\1.blocks.{i}.") for i, place in enumerate(places)]
    plan = Plan(checkpoint, renaming(*blocks, *_RULES))
    first, lm_head = "heads.0.blocks.0.linear.weight", "heads.0.lm_head.weight"
    for canonical, name in ((first, f"hydra_mlp.0.{places[0]}.linear.weight"), (lm_head, "hydra_lm_head.0.weight")):
        if canonical not in plan:
            raise checkpoint.error(f"has no {name}.")
    (hidden_size, width), vocab_size = plan.matrix(first), plan.matrix(lm_head)[0]
    check_target(checkpoint, target, hidden_size, vocab_size)
    grounded = width > hidden_size
    if given.grounded_heads not in (None, grounded):
        raise checkpoint.error(
            f"config.json says grounded_heads = {not grounded}, but the first head reads width {width}."
        )
    prefix_config = _prefix_config(checkpoint, target, plan) if has_prefix else None
    num_heads = counted(checkpoint, (int(match[1]) for match in matches), "head")
    embeddings = embeddings_of(checkpoint, target, None, hidden_size)
    sizes = hidden_size, num_heads, len(places), vocab_size

    def make() -> HydraHeads:
        heads = HydraHeads(*sizes, grounded, embeddings, prefix_config)
        if heads.prefix is not None:
            fit_biases(heads.prefix, plan, "prefix.")
        return heads

    hydra = built(checkpoint, plan, target, make)
    share_equal(hydra)
    if hydra.prefix is not None and prefix_config is not None:
        hydra.prefix.rotary = RotaryPositions(checkpoint, prefix_config, device_and_dtype(target)[0])
    return hydra


def _prefix_config(checkpoint: Checkpoint, target: PackedModel, plan: Plan) -> LlamaConfig:
    """The configuration of the file's prefix layer."""
    gate, queries = (f"prefix.layers.0.{name}.weight" for name in ("mlp.gate_proj", "self_attn.q_proj"))
    model = target.config
    if model.model_type not in LLAMA_LIKE:
        raise checkpoint.error(
            f"has a prefix layer, which takes its settings from a target like Llama; this one's model_type is {model.model_type!r}."
        )
    for name in (gate, queries):
        if name not in plan:
            raise checkpoint.error(f"has no {name.replace('prefix.', 'prefix_embeding_layer.')}.")
    return prefix_config(model, plan.matrix(queries)[0] // model.num_attention_heads, plan.matrix(gate)[0])


@dataclass
class HydraConfig(LastHiddenConfig):
    """Hydra: heads like Medusa's, but each also reads the tokens drafted before it. Hydra++ checkpoints (arch "prefix-mlp") put
    a decoder layer, with its own KV, between the target and the heads."""

    name = "hydra"
    requires = ("Hydra heads trained for the target: 'model'",)


@register(HydraConfig)
def make_hydra(config: HydraConfig, target: PackedModel, context: DrafterContext | None = None) -> CandidateGenerator:
    """The generator for heads with or without a prefix layer."""
    checkpoint = config.open_head()
    heads = load_once(config, target, lambda: load_hydra(checkpoint, target))
    return (HydraGenerator if heads.prefix is None else HydraPrefixGenerator)(config, target, heads)


class HydraDrafting(GrowsDrafts):
    """Grows a draft with the heads. A node's state is that of its text and the embeddings of its path."""

    heads: HydraHeads
    score_only = GrowsDrafts.score_only  # each head has a language-model head inside

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        hidden, tokens = roots
        state = self.heads.with_tokens(hidden, tokens)
        self.state = state[:, None]
        return self.heads.heads[0](state)

    def expand(self, level: DraftLevel) -> torch.Tensor:
        """The next head's logits after each node [R, F, V]."""
        self.state = self.heads.with_tokens(self.carried(level), level.tokens)
        return self.heads.heads[level.depth](self.state)


class HydraGenerator(HydraDrafting, LastHiddenGenerator):
    """Drafts with Hydra heads from the target's last hidden state."""

    def __init__(self, config: HydraConfig, target: PackedModel, heads: HydraHeads):
        super().__init__(config, target, heads, len(heads.heads))
        self.heads = heads


class HydraPrefixGenerator(HydraDrafting, FeatureGenerator):
    """Drafts with Hydra++ heads: the prefix layer reads the text with a KV cache; drafting itself needs none."""

    def __init__(self, config: HydraConfig, target: PackedModel, heads: HydraHeads):
        shape = config.shape_within(len(heads.heads))
        super().__init__(config.bounded(shape.depth), target, shape=shape)
        assert heads.prefix_config is not None
        self.heads, self.vocabulary = heads, DraftVocabulary(target.vocab_size)
        self.head = self.captured(
            PackedHead(heads, heads.prefix_config, num_layers=1, prepack_weights=config.prepack_weights),
            native=False,  # most of the work is in the heads, which prepacked weights serve
        )

    def level_forwards(self, depth: int) -> list[LevelForward]:
        """Empty: only the text has keys and values."""
        return []

    def roots(self, sequences: list[Sequence], limits: list[int]) -> tuple[torch.Tensor, ...]:
        """Read all unread rows of each text: the prefix layer's outputs [R, H] at the ends, and the newest tokens [R]."""
        hidden = self.read_all(sequences)
        return hidden, upload([seq.tokens[-1] for seq in sequences], hidden.device)
