"""Training draft heads: `hf-specdec train METHOD --target MODEL --data FILE --output DIR`, or `train_head` in `pipeline.py`.

Each method is one file in this package. It imports the head's network from `candidate_generators`, so that training and
drafting run the same modules. To add a trainer, add its options to options.py, which needs no torch, and a file. They hold

    @dataclass
    class MyOptions(TrainingOptions):          # options.py; every field becomes a command-line option
        method: ClassVar[str] = "my_method"    # the method that drafts with the exported head
        num_heads: int = option(4, "heads, one per drafted token")

    @register(MyOptions)
    class MyTrainer(HeadTrainer):              # base.py: the methods to write
        taps = Taps(last_hidden=True)          # what it reads of the target (or set in __init__)

The framework does the rest, from reading data to the model card, several devices and resuming included.

**The batch** (`Batch`). B texts padded on the *right*; nothing is packed, so attention is plain causal attention
without any mask (`attention_mask=None`, `is_causal`), and position_ids are 0 .. S-1 in every row. Values after a row's end
are meaningless. Only tokens of answers, which the target writes, count in losses and metrics (`loss_mask`). `last_hidden` is what the
target's lm_head reads; `layers` are indexed as transformers' hidden_states (0: embeddings, i: what layer i-1 puts out and layer i
reads). Features are float32, converted from the target's dtype.

Alignment, the same for every head: h_t has seen x_0 .. x_t, and the target has chosen x_{t+1} from it (the *newest token*).
So a head at t knows h_t and x_{t+1}; its guess number k (from 0) is for x_{t+2+k}. `batch.labels(k)` returns these labels
[B, S] with their mask. `self.target.logits(hidden)` are the target's logits of the *next* token: from h_t for x_{t+1}, so
the first guess at t is compared with the logits at t + 1. `batch.ahead(tensor, n)` shifts a tensor by n positions, and
`self.target.choices(batch)` are the argmaxes [B, S].

**The head.** `self.head` is what `build` returned: parameters that require gradients are trained, checkpointed and counted;
the target's modules (embeddings, lm_head) require none and are left out. Master weights are float32. Do not wrap modules
for devices: `loss` is called inside autocast and a DDP wrapper already. Randomness (noise, anchors, dropout) comes from
torch's global generators, which are seeded for every micro-batch from (seed, step, micro-batch, process), so that a
resumed run gives the same result.

**The loss and the estimate.** A head that guesses step by step extends `StepTrainer` (losses.py) and writes `steps`, from which the loss
by the option `loss`, the accuracies `accuracy_1`, `accuracy_2`, .. and the `Guesses` are made. Guesses read the text's own tokens; they
are compared with the target's choices on held-out text.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .options import TrainingError, TrainingOptions, option

if TYPE_CHECKING:
    from .base import (
        Batch,
        Exported,
        Guesses,
        HeadTrainer,
        StepLoss,
        available_trainers,
        every_anchor,
        register,
        trainer_class,
    )

__all__ = [
    "Batch", "Exported", "Guesses", "HeadTrainer", "StepLoss", "TrainingError", "TrainingOptions", "available_trainers",
    "every_anchor", "option", "register", "trainer_class",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imported when it is first asked for: options.py, which the command line reads, needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(".base", __name__), name)
    return value
