"""Options of a training run: one dataclass, extended per method; the command line is made from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config import config_key as option  # `num_heads` becomes `--num-heads`
from ..config import key_error


class TrainingError(ValueError):
    """Training cannot start or continue; the message says why and what to do."""


SCHEDULES = ("cosine", "linear", "constant")
VARIANTS = ("dflash", "dspark", "domino", "dflash2")
LOSSES = ("kl", "ce", "lk", "dpace")


def count(default: int | None, help: str) -> Any:
    """An option with an integer of at least 1."""
    return option(default, help, minimum=1)


def amount(default: float | None, help: str) -> Any:
    """An option with a number of at least 0."""
    return option(default, help, minimum=0)


def share(default: float, help: str) -> Any:
    """An option with a number from 0 to 1."""
    return option(default, help, minimum=0, maximum=1)


def _loss(default: str = "kl", choices: tuple[str, ...] = LOSSES) -> Any:
    meanings = {
        "kl": "KL to the target's distributions",
        "ce": "cross-entropy of the text's tokens",
        "lk": "KL, and more and more the share of drafts that is rejected (LK)",
        "dpace": "ce, with weights of depths by how likely the tokens before are accepted, in place of decays (D-PACE)",
    }
    return option(default, "; ".join(f"{key}: {meanings[key]}" for key in choices), choices=choices)


def _mask_token_id() -> Any:
    return amount(None, "token in the slots to be drafted (default: a token that no text has)")


@dataclass
class TrainingOptions:
    """Options of every method. A method's subclass adds its own and changes defaults; its docstring is the method's help.

    Raises:
        TrainingError: a value is out of range.
    """

    method: ClassVar[str] = ""
    init_from: str | None = option(None, "a head of the same shape and layout whose weights the run begins with")
    epochs: int = count(3, "passes over the data")
    max_steps: int | None = count(None, "stop after this many steps, whatever epochs says")
    tokens_per_batch: int = count(4096, "padded tokens in one forward of the target, per device")
    gradient_accumulation: int = count(1, "batches per optimizer step")
    max_length: int = option(2048, "tokens of a text that are used", minimum=4)
    learning_rate: float = amount(1e-3, "peak of the learning rate")
    schedule: str = option("cosine", "how the learning rate falls after the warm-up", choices=SCHEDULES)
    warmup: float = share(0.05, "share of the steps in which the learning rate rises")
    final_learning_rate: float = share(0.05, "learning rate at the end, as a share of the peak")
    weight_decay: float = amount(0.0, "of AdamW, on matrices")
    max_grad_norm: float = amount(1.0, "gradients are scaled down to this norm")
    bf16: bool = option(False, "compute in bfloat16 (master weights stay in float32)")
    held_out: float = option(0.05, "share of the samples kept for the estimate of τ", minimum=0, maximum=0.9)
    max_held_out: int = count(200, "the most held-out samples that are used")
    eval_every: int = count(200, "steps between estimates of τ")
    save_every: int = count(200, "steps between checkpoints")
    log_every: int = count(10, "steps between log lines")
    seed: int = amount(0, "of initial weights, order of the data, noise and the held-out split")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if wrong := key_error(field, getattr(self, field.name)):
                raise TrainingError(f"--{field.name.replace('_', '-')} {wrong}")

    def to_dict(self) -> dict[str, Any]:
        """All values, JSON-serialisable."""
        return dataclasses.asdict(self)


@dataclass
class DFlashOptions(TrainingOptions):
    """DFlash: a few layers that draft a whole block of tokens in one forward pass."""

    method: ClassVar[str] = "dflash"
    learning_rate: float = amount(2e-3, "peak of the learning rate")
    num_layers: int = count(3, "decoder layers")
    block_size: int = option(6, "slots of a block; the first holds the newest token, the others are drafted", minimum=2)
    intermediate_size: int | None = count(None, "of the MLPs (default: the target's, or three times the width)")
    target_layers: str | None = option(
        None, "layers of the target whose output is read, such as 1,3,5 (from 0; default: spread evenly)"
    )
    num_anchors: int = count(64, "blocks per text, at new random places in every step")
    loss_decay: float = option(4.0, "slot j (from 1) has the weight exp(-(j - 1) / this)", minimum=1e-3)
    loss: str = _loss()
    mask_token_id: int | None = _mask_token_id()
    variant: str = option(
        "dflash",
        "dflash: tokens of a block do not see one another; dspark, domino, dflash2: a small head (Markov, GRU, selector; DFlash2 has "
        "convolutions, too) corrects their logits by the token before. In dspark and domino the first slot drafts, too",
        choices=VARIANTS,
    )
    head_rank: int | None = count(None, "of that head: width of tables (dspark, dflash2) or bottleneck (default: 256)")
    markov_head_type: str = option("vanilla", "of dspark", choices=("vanilla", "gated", "rnn"))


@dataclass
class DraftModelOptions(TrainingOptions):
    """Distillation of a Llama of a few layers with the target's tokens."""

    method: ClassVar[str] = "draft_model"
    learning_rate: float = amount(2e-3, "peak of the learning rate")
    num_layers: int = count(2, "decoder layers")
    width: int | None = count(None, "hidden size (default: half the target's)")
    intermediate_size: int | None = count(None, "of the MLPs (default: three times the width)")
    num_heads: int | None = count(None, "query heads (default: as many as give the target's head size)")
    num_kv_heads: int | None = count(None, "key and value heads (default: half the query heads)")
    loss: str = _loss(choices=LOSSES[:3])
    num_draft_tokens: int = count(5, "tokens of a draft, in the estimate and in measurements")


@dataclass
class EagleOptions(TrainingOptions):
    """EAGLE-1: one layer continues the target's last hidden states. With several steps as in HASS."""

    method: ClassVar[str] = "eagle"
    num_steps: int = count(3, "steps trained: from the second on the head reads its own output (HASS); 1 is EAGLE-1")
    step_decay: float = share(1.0, "step s (from 0) has this weight to the power of s in the loss")
    feature_weight: float = amount(1.0, "of SmoothL1 between the head's output and the target's hidden state")
    loss: str = _loss()
    token_weight: float = amount(0.1, "of that loss")
    feature_noise: float = amount(
        0.2, "width of uniform noise on hidden states of a text of 512 tokens; less on longer ones"
    )
    num_layers: int = count(1, "decoder layers")
    intermediate_size: int | None = count(None, "width of the layers' MLP (none: the target's)")
    own_embeddings: bool = option(True, "copy the target's embeddings to the file, as published heads do")
    draft_length: int = count(5, "tokens of a draft in the estimate")


@dataclass
class Eagle3TrainingOptions(TrainingOptions):
    """EAGLE-3: one layer reads three of the target's layers, and is trained on its own output, too."""

    method: ClassVar[str] = "eagle3"
    num_steps: int = count(5, "steps of the training-time test: tokens drafted in training")
    loss: str = _loss()
    parallel: bool = option(False, "P-EAGLE: one forward drafts all tokens. More layers help")
    mask_token_id: int | None = _mask_token_id()
    down_sample_ratio: float = option(
        1.0,
        "P-EAGLE: share of a step's places that the next step is trained at, drawn at random: less time and memory per text",
        minimum=0.1,
        maximum=1,
    )
    step_decay: float = share(0.8, "step s (from 0) has this weight to the power of s in the loss")
    feature_weight: float = amount(
        0.0,
        "of SmoothL1 between the head's normed output and the target's last hidden state, added to the loss: EAGLE-1's "
        "loss, which learns faster from little data",
    )
    lm_head_rate: float = share(
        0.05, "factor on the learning rate of the language-model head, which begins as a copy of the target's"
    )
    draft_vocab_size: int | None = count(
        None, "tokens the head can draft, the most frequent ones (none: all of up to 8192, else 32000)"
    )
    feature_layers: str | None = option(
        None,
        "which hidden states of the target are read, as i,j,k (i: after i layers; default: a low, a middle and a high one)",
    )
    fc_norm: bool = option(False, "a norm on each hidden state that is read (EAGLE-3.1)")
    norm_output: bool = option(False, "feed the normed output back (EAGLE-3.1)")
    num_layers: int = count(1, "decoder layers")
    intermediate_size: int | None = count(None, "width of the layers' MLP (none: the target's)")
    num_key_value_heads: int | None = count(
        None,
        "of the layers (none: the target's). The newest token reaches the output only through their values: if the target has few "
        "and narrow ones, more are worth their size",
    )
    draft_length: int = count(5, "tokens of a draft in the estimate")


@dataclass
class HydraOptions(TrainingOptions):
    """Hydra: Medusa heads that also read the tokens before theirs. Hydra++ with --prefix-layer."""

    method: ClassVar[str] = "hydra"
    num_heads: int = count(4, "heads: tokens drafted")
    num_layers: int = count(1, "residual blocks per head")
    loss: str = _loss()
    head_decay: float = share(1.0, "head k (from 0) has this weight to the power of k in the loss")
    lm_head_rate: float = share(
        0.05, "factor on the learning rate of the language-model heads, which begin as copies of the target's"
    )
    prefix_layer: bool = option(False, "Hydra++: a decoder layer of their own over the target's hidden states")


@dataclass
class MedusaOptions(TrainingOptions):
    """Medusa: head k predicts the token k + 2 places after the text from the target's last hidden state."""

    method: ClassVar[str] = "medusa"
    num_heads: int = count(4, "heads: tokens drafted")
    num_layers: int = count(1, "residual blocks per head")
    head_decay: float = share(0.8, "head k (from 0) has this weight to the power of k in the loss")
    loss: str = _loss("ce")
    own_lm_head: bool = option(True, "every head has a vocabulary-sized layer of its own (off: all use the target's)")


@dataclass
class MLPSpeculatorOptions(TrainingOptions):
    """An MLP speculator: a small recurrence from the last hidden state, a step for each token. Other defaults are the authors'."""

    method: ClassVar[str] = "mlp_speculator"
    weight_decay: float = amount(0.1, "of AdamW, on matrices")
    final_learning_rate: float = share(0.1, "learning rate at the end, as a share of the peak")
    num_heads: int = count(3, "steps of the recurrence: tokens drafted")
    inner_dim: int = amount(0, "width of its state; 0: the target's hidden size")
    tie_weights: bool = option(False, "all steps share their weights (but the first projection): a third of the size")
    scale_input: bool = option(True, "normalise the target's hidden state first")
    from_target: bool = option(
        True, "embeddings and heads begin as the target's, along their main directions (off, or wider: at random)"
    )
    loss: str = _loss("ce")


@dataclass
class MtpOptions(TrainingOptions):
    """One MTP module: a decoder layer of the target's type, unrolled over several tokens (FastMTP)."""

    method: ClassVar[str] = "mtp"
    learning_rate: float = amount(2e-3, "peak of the learning rate")
    num_steps: int = count(4, "steps of the unroll: tokens drafted from one place of the text in training")
    step_decay: float = share(0.6, "step k (from 0) has this weight to the power of k; weights sum to 1")
    loss: str = _loss()
    copy_layer: bool = option(True, "begin as the target's last layer of the same shape (off: at random)")
    num_draft_tokens: int = count(5, "tokens of a draft, in the estimate and in measurements")


def options_by_method() -> dict[str, type[TrainingOptions]]:
    """The options of every method that can be trained. In this module, so that a command line needs no torch."""
    return {kind.method: kind for kind in sorted(TrainingOptions.__subclasses__(), key=lambda kind: kind.method)}
