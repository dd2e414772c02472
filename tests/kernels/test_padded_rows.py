"""Short rows of one query, attended in one padded product, against the same rows one by one."""

import numpy as np
import pytest
import torch
from families import make

from hf_specdec.core.rows import RowInput
from hf_specdec.kernels import dispatch
from hf_specdec.model import packed_batch, row_descriptions
from hf_specdec.model.prepare import ModelOptions, prepare
from hf_specdec.model.row_descriptions import is_worth_padding, padded_rows


@pytest.mark.parametrize("lengths", [(3, 17, 1, 30, 13), (15, 15, 15)])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2"])
@torch.no_grad()
def test_logits_are_those_of_rows_one_by_one(family, lengths, monkeypatch):
    """Ragged rows, equal ones, and (Mistral) windows shorter than the rows."""
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    model = prepare(make(family), ModelOptions(prepack_weights=False))
    taken = []
    monkeypatch.setattr(packed_batch, "padded_rows", lambda *args: taken.append(padded_rows(*args)) or taken[-1])
    logits = []
    for most in (row_descriptions.PADDED_BYTES, 0):
        monkeypatch.setattr(row_descriptions, "PADDED_BYTES", most)
        cache = model.new_cache(num_blocks=32, block_size=4, share_prefixes=False)
        for row in range(len(lengths)):
            cache.add(row)
        for row, length in reversed(list(enumerate(lengths))):
            cache.reserve(row, length)
        rows = [RowInput(row, np.arange(5, 5 + length), 0) for row, length in enumerate(lengths)]
        with model.active():
            model.forward(rows, cache)
            for row, length in enumerate(lengths):
                cache.reserve(row, length + 1)
            logits.append(
                model.forward([RowInput(i, np.array([7 + i]), n) for i, n in enumerate(lengths)], cache).logits
            )
    assert len(taken) == 1 and (taken[0].mask is None) == (len(set(lengths)) == 1 and family != "Mistral")
    torch.testing.assert_close(logits[0], logits[1], atol=2e-5, rtol=1e-5)


def test_drafts_and_large_rows_are_not_padded():
    one, draft = RowInput(0, np.array([1]), 40), RowInput(1, np.array([1, 2]), 40)
    assert is_worth_padding([one, one], 512)
    assert not is_worth_padding([one, draft], 512)
    assert not is_worth_padding([one], 512)
    assert not is_worth_padding([one, one], 1 << 20)


def test_ids_of_a_tensor_are_read_without_numpys_own_conversion(monkeypatch):
    """numpy 2.2 warns of that conversion in every step."""

    def converts(*args, **kwargs):
        raise AssertionError("numpy converts the tensor")

    monkeypatch.setattr(torch.Tensor, "__array__", converts)
    ids = np.zeros(3, dtype=np.int64)
    assert packed_batch.write_ids([RowInput(0, torch.tensor([4, 5]), 0, drafts=np.array([6]))], ids) == []
    assert ids.tolist() == [4, 5, 6]
