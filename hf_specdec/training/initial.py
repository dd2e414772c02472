"""Where training begins: a new head's own initial weights, or those of a head that is there already."""

from __future__ import annotations

import torch

from ..candidate_generators.checkpoints.files import CheckpointError, open_checkpoint
from .base import HeadTrainer
from .errors import TrainingError


@torch.no_grad()
def begin_as(trainer: HeadTrainer, name: str) -> None:
    """Give the head that `trainer` has built the weights of an exported one of the same shape.

    Args:
        name: bundled name, folder or Hub id; in the layout that the trainer exports first.

    Raises:
        TrainingError: no such checkpoint; a tensor that one of the two heads lacks, or of another shape.
    """
    own = trainer.exported(trainer.formats[0]).tensors
    try:
        checkpoint = open_checkpoint(name)
        theirs = set(checkpoint.names())
        if theirs != own.keys():
            missing, unknown = sorted(own.keys() - theirs), sorted(theirs - own.keys())
            raise TrainingError(
                f"--init-from {name}: not a head of this shape and layout; it lacks {_some(missing)} and has {_some(unknown)} "
                "besides. Give the options it was made with."
            )
        tensors = {}
        for each, tensor in own.items():
            tensors[each] = checkpoint.tensor(each)
            if tensors[each].shape != tensor.shape:
                raise TrainingError(
                    f"--init-from {name}: {each} is {tuple(tensors[each].shape)} there and {tuple(tensor.shape)} by these "
                    "options."
                )
    except CheckpointError as error:
        raise TrainingError(f"--init-from: {error}") from None
    trainer.take_over(tensors)


def _some(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
