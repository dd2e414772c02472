"""Makes a model's program: records one forward, and compares the program with the model on other batches before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ...core.output import PackedOutput
from ...core.rows import RowInput
from ...kernels.cache import writer_for
from ..packed_batch import PackedBatch, _OnDevice
from ..self_test import TOLERANCES, relative_error
from .assembly import assemble
from .program import Program, addresses
from .recording import Recorder
from .tape import NotLowered, Tape

if TYPE_CHECKING:
    from ..packed_model import PackedModel

_SIZES = (29, 31, 37, 41, 43, 47, 53, 59)  # of the recorded batch: numbers of tokens that no dimension of a model has
_MORE = 8  # room for the tokens of the further batches


@torch.no_grad()
def build(packed: PackedModel) -> Program:
    """The program of an active PackedModel.

    Raises:
        NotLowered: the library cannot run the model, or computes something else than it; the message says why.
    """
    num_selected, num_tokens = _sizes(packed)
    if packed.max_positions is not None and packed.max_positions < num_tokens + _MORE:
        raise NotLowered(f"its {packed.max_positions} positions, too few to record a forward")
    tape = Tape(num_tokens, num_selected)
    rows = _first_rows(num_tokens, num_selected, packed.vocab_size)
    cache, ours = _cache(packed, rows), _cache(packed, rows)
    output, recorder, batch = _record(packed, tape, rows, cache)
    if recorder.problem is not None:
        raise NotLowered(recorder.problem)
    if any(cache.layers[layer].keys.dtype != packed.model.dtype for layer in recorder.pools):
        raise NotLowered("keys in another dtype than the model's")
    values = [recorder.value_of(each) for each in outputs_of(packed, output)]
    program = assemble(tape, values, recorder.pools, packed.model.dtype)
    _check(packed, program, ours, rows, output)
    for more in _further_rows(rows, packed.vocab_size):
        batch = PackedBatch.pack(more, cache, packed.device, gather=False)
        batch.with_native = False
        _check(packed, program, ours, more, packed.forward_batch(batch, batch.logit_index))
    return program


def outputs_of(packed: PackedModel, output: PackedOutput) -> list[torch.Tensor]:
    """The tensors that a forward of this model returns."""
    taps = packed.taps
    found = [output.logits, *([output.last_hidden] if taps.last_hidden else []), *output.layers.values()]
    return [*found, *([output.all_logits] if taps.logits else [])]  # pyright: ignore[reportReturnType]


def _sizes(packed: PackedModel) -> tuple[int, int]:
    """Two numbers of tokens that no dimension of the model's tensors is, the smaller first."""
    config = packed.config.to_dict()
    taken = {value for value in config.values() if type(value) is int}
    for each in packed.model.parameters():
        taken |= set(each.shape)
    heads, groups = (
        getattr(packed.config, "num_attention_heads", 0),
        getattr(packed.config, "num_key_value_heads", 0) or 1,
    )
    taken |= {heads // groups, getattr(packed.config, "hidden_size", 0) // max(heads, 1)}
    free = [size for size in _SIZES if size not in taken]
    if len(free) < 2:
        raise NotLowered("its dimensions")
    return free[0], free[1]


def _first_rows(num_tokens: int, num_selected: int, vocab_size: int) -> list[RowInput]:
    """Two causal texts."""
    ids = np.arange(1, num_tokens + 1) * max(1, vocab_size // (num_tokens + 2)) % vocab_size
    split = num_tokens // 2
    texts = ids[:split], ids[split:]
    logits = num_selected - num_selected // 2, num_selected // 2
    return [RowInput(i, text, 0, logits=count) for i, (text, count) in enumerate(zip(texts, logits, strict=True))]


def _further_rows(rows: list[RowInput], vocab_size: int) -> list[list[RowInput]]:
    """One token after one text; then a token of each text, with a tree of two siblings after the other."""
    first, second = (row.num_tokens for row in rows)
    ids = np.array([3, 5, 7, 2]) % vocab_size
    visibility = np.array([[True, False, False], [True, True, False], [True, False, True]])
    positions = np.array([second, second + 1, second + 1])
    return [
        [RowInput(0, ids[:1], first)],
        [RowInput(0, ids[1:2], first + 1), RowInput(1, ids[:3], second, positions, visibility, positions, logits=2)],
    ]


def _cache(packed: PackedModel, rows: list[RowInput]):
    cache = packed.new_cache(num_blocks=16, block_size=16, share_prefixes=False)
    for row in rows:
        cache.add(row.seq_id)
    for row in reversed(rows):
        cache.reserve(row.seq_id, row.num_tokens + _MORE)
    return cache


def _record(packed: PackedModel, tape: Tape, rows: list[RowInput], cache) -> tuple[PackedOutput, Recorder, PackedBatch]:
    model = packed.model
    batch = PackedBatch.pack(rows, cache, packed.device, gather=False)
    batch.with_native = False
    recorder = Recorder(model, batch, tape)
    batch._on_device[packed.device] = _OnDevice(batch.write_slots, None, writer_for(packed.device), recorder.attend)
    batch._on_device[packed.device].write = recorder.write
    try:
        with recorder.angles_by_position(model), recorder:
            return packed.forward_batch(batch, batch.logit_index), recorder, batch
    except (NotLowered, torch.OutOfMemoryError):
        raise
    except Exception as failure:  # an unknown model may do anything with the recorded tensors
        raise NotLowered(f"its recorded forward raised {type(failure).__name__} ({failure})") from failure


def _check(packed: PackedModel, program: Program, cache, rows: list[RowInput], wanted: PackedOutput) -> None:
    """Compare the program's outputs with those of the model.

    Raises:
        NotLowered: they differ by more than rounding explains.
    """
    batch = PackedBatch.pack(rows, cache, packed.device, gather=False)
    found = program.run(batch, addresses(program, cache))
    for ours, own in zip(found, outputs_of(packed, wanted), strict=True):
        error = relative_error(ours, own.reshape(ours.shape))
        if not error <= TOLERANCES.get(packed.model.dtype, 5e-2):
            raise NotLowered(
                f"its program computes other values: they differ by {error:.2g} of their spread. Please report it"
            )
