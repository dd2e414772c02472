"""--init-from: start training with the weights of an existing head."""

from __future__ import annotations

import torch

from ..candidate_generators.checkpoints.files import CheckpointError, open_checkpoint
from .base import HeadTrainer
from .errors import TrainingError


@torch.no_grad()
def begin_as(trainer: HeadTrainer, name: str) -> None:
    """Copy the weights of an exported head of the same shape into the head that `trainer` has built.

    Args:
        name: bundled name, folder or Hub id; in the first of the trainer's formats.

    Raises:
        TrainingError: the checkpoint does not exist, or a tensor is missing in one of the heads or differs in shape. Callers add what
            names the head: an option, or a key.
    """
    own = trainer.exported(trainer.formats[0]).tensors
    try:
        checkpoint = open_checkpoint(name)
        theirs = set(checkpoint.names())
        if theirs != own.keys():
            missing, unknown = sorted(own.keys() - theirs), sorted(theirs - own.keys())
            raise TrainingError(
                f"not a head of this shape and layout; it lacks {_some(missing)} and has {_some(unknown)} in addition. "
                "Give the options it was made with."
            )
        tensors = {}
        for each, tensor in own.items():
            tensors[each] = checkpoint.tensor(each)
            if tensors[each].shape != tensor.shape:
                raise TrainingError(
                    f"{each} is {tuple(tensors[each].shape)} there and {tuple(tensor.shape)} by these options."
                )
    except CheckpointError as error:
        raise TrainingError(str(error)) from None
    trainer.take_over(tensors)


def _some(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
