"""Training draft heads: `hf-specdec train METHOD --target MODEL --data FILE --output DIR`, and `train()` behind it.

One method is one file here, as in `candidate_generators`: it imports the head's modules from there, so that what is
trained is what drafts. Adding a method is adding a file; nothing else is edited. The file holds

    @dataclass
    class MyOptions(TrainingOptions):          # options.py; every field becomes a command-line option
        learning_rate: float = option(1e-4, "peak of the learning rate")     # redefine what the method wants otherwise
        num_heads: int = option(4, "heads, one per drafted token")

    @register(MyOptions)
    class MyTrainer(HeadTrainer):              # base.py
        method = "my_method"                   # the method that drafts with what is exported
        taps = Taps(last_hidden=True)          # what it reads of the target (may be set in __init__ if it depends)
        formats = ("original", "speculators")  # layouts it can be written in; the first is the default

        def build(self, token_counts) -> nn.Module   # the head, initialised, in float32 on self.target.device
        def loss(self, batch) -> StepLoss            # differentiable; sums over positions, and how many those are
        def guesses(self, batch) -> Guesses          # greedy drafts under teacher forcing, for the estimated τ
        def exported(self, form) -> Exported         # tensors by the names of the layout, config.json, file name

What the framework does and a trainer need not: reading data and chat templates, answer masks, held-out split, order of
the batches, hidden states (computed on the fly or kept on disk), optimizer and schedule, accumulation, several devices,
autocast, logs, plots, estimated τ, checkpoints, resuming, the model card, the Hub.

**The batch** (`batch.py`). B texts padded on the *right*; nothing is packed, so attention is plain causal attention
without any mask (`attention_mask=None`, `is_causal`), and position_ids are 0 .. S-1 in every row. What comes after a row's
end is garbage that no mask below lets count.

    input_ids    int64 [B, S]     x_t
    lengths      int64 [B]        tokens of each row
    loss_mask    bool [B, S]      x_t is the target's to write (an answer): losses and figures count such tokens only
    last_hidden  [B, S, H]        h_t: the target's final hidden state after the last norm (its lm_head reads it)
    layers       {i: [B, S, H]}   of taps.layers, indexed as transformers' hidden_states (0: embeddings, i: what layer
                                  i-1 puts out and layer i reads). Features are float32 (the target's dtype before)

Alignment, the same for every head: h_t has seen x_0 .. x_t, and the target has chosen x_{t+1} from it (the *newest token*).
So a head at t knows h_t and x_{t+1}, and its first guess is for x_{t+2}, its guess number k (from 0) for x_{t+2+k}.
`batch.labels(k)` are these labels [B, S] with their mask. `self.target.logits(hidden)` are the target's own logits of the
*next* token: from h_t for x_{t+1}, so what the first guess at t is measured by are the logits at t + 1;
`batch.ahead(tensor, n)` moves things by n positions. `self.target.choices(batch)` are their argmaxes [B, S].

**The head.** `self.head` is what `build` returned: parameters that require gradients are trained, checkpointed and counted;
the target's own (embeddings, lm_head) do not require them and stay out. Master weights are float32. Do not wrap anything
for devices: `loss` is called inside autocast and a DDP wrapper already. Randomness (noise, anchors, dropout) comes from
torch's global generators, which are seeded anew for every micro-batch from (seed, step, micro-batch, process), so that a
resumed run repeats itself. `TargetModel` has the attributes of `PackedModel` that `candidate_generators/heads` read.

**The loss.** `StepLoss(loss, weight, metrics)`: `loss` is a *sum* over positions, `weight` how many (or their total weight);
the framework divides the sum over all micro-batches and devices by the weights' sum. `metrics` {name: (sum, weight)} are
logged likewise as means; accuracies per head are called `accuracy_1`, `accuracy_2`, ..

**The estimate.** `Guesses(tokens [N, K], rows [N], anchors [N])`: guess k of anchor a is for x_{a+1+k}, where x_a is the
newest token (a = t + 1 above), under teacher forcing: recurrent heads read the text's own tokens after a.
`every_anchor(tokens [B, S, K])` makes it from guesses at every t. The framework judges them against the target's choices on
held-out text: acceptance of guess k given that all before were accepted, and τ = 1 + the sum over k of their products up to k.
"""

from .base import Exported, Guesses, HeadTrainer, StepLoss, every_anchor
from .batch import Batch
from .errors import TrainingError
from .options import TrainingOptions, option
from .registry import available_trainers, register, trainer_class

__all__ = [
    "Batch",
    "Exported",
    "Guesses",
    "HeadTrainer",
    "StepLoss",
    "TrainingError",
    "TrainingOptions",
    "available_trainers",
    "every_anchor",
    "option",
    "register",
    "trainer_class",
]
