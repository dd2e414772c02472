"""Options of a training run: one dataclass, extended per method; the command line is made from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ..config import nearest_hint
from .errors import TrainingError

SCHEDULES = ("cosine", "linear", "constant")


def option(
    default: Any,
    help: str,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A dataclass field that becomes a command-line option: `num_heads` → `--num-heads`."""
    metadata = {"help": help, "choices": choices, "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class TrainingOptions:
    """Options of every method. A method's subclass adds its own and changes defaults.

    Raises:
        TrainingError: a value is out of range.
    """

    init_from: str | None = option(
        None, "a head of the same shape and layout (folder, Hub id, bundled name) whose weights the run begins with"
    )
    epochs: int = option(3, "passes over the data", minimum=1)
    max_steps: int | None = option(None, "stop after this many steps, whatever epochs says", minimum=1)
    tokens_per_batch: int = option(4096, "padded tokens in one forward of the target, per device", minimum=1)
    gradient_accumulation: int = option(1, "batches per optimizer step", minimum=1)
    max_length: int = option(2048, "tokens of a text that are used", minimum=4)
    learning_rate: float = option(1e-3, "peak of the learning rate", minimum=0)
    schedule: str = option("cosine", "how the learning rate falls after the warm-up", choices=SCHEDULES)
    warmup: float = option(0.05, "share of the steps in which the learning rate rises", minimum=0, maximum=1)
    final_learning_rate: float = option(0.05, "learning rate at the end, as a share of the peak", minimum=0, maximum=1)
    weight_decay: float = option(0.0, "of AdamW, on matrices", minimum=0)
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm", minimum=0)
    bf16: bool = option(False, "compute in bfloat16 (master weights stay in float32)")
    held_out: float = option(0.05, "share of the samples kept for the estimate of τ", minimum=0, maximum=0.9)
    max_held_out: int = option(200, "the most held-out samples that are used", minimum=1)
    eval_every: int = option(200, "steps between estimates of τ", minimum=1)
    save_every: int = option(200, "steps between checkpoints", minimum=1)
    log_every: int = option(10, "steps between log lines", minimum=1)
    seed: int = option(0, "of initial weights, order of the data, noise and the held-out split", minimum=0)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check(field)

    def _check(self, field: dataclasses.Field) -> None:
        value, meta = getattr(self, field.name), field.metadata
        name = "--" + field.name.replace("_", "-")
        if value is None and field.default is None:
            return
        if meta.get("choices") and value not in meta["choices"]:
            choices = ", ".join(meta["choices"])
            raise TrainingError(
                f"{name} must be one of {choices}, not {value!r}{nearest_hint(value, meta['choices'])}."
            )
        minimum, maximum = meta.get("minimum"), meta.get("maximum")
        if minimum is None and maximum is None:
            return
        is_whole = "int" in str(field.type).split(" | ")
        if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
            raise TrainingError(f"{name} must be {'an integer' if is_whole else 'a number'}, not {value!r}.")
        # Written so that NaN fails too.
        if not (minimum is None or value >= minimum) or not (maximum is None or value <= maximum):
            bound = f"at least {minimum}" + (f" and at most {maximum}" if maximum is not None else "")
            raise TrainingError(f"{name} must be {bound}, not {value!r}.")

    def to_dict(self) -> dict[str, Any]:
        """All values, JSON-serialisable."""
        return dataclasses.asdict(self)
