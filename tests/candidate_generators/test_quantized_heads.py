"""Heads that are stored quantized: every form is read as its formula says, and drafts with what was read."""

import itertools
import json

import pytest
import torch
from helpers_eagle3 import write
from helpers_speculators import recorded
from oracle import ragged
from safetensors.torch import load_file, save_file

from hf_specdec.candidate_generators.checkpoints.files import Checkpoint, CheckpointError

pytestmark = pytest.mark.usefixtures("forget_decoders")
ROWS, COLUMNS, GROUP = 24, 32, 8


def numbers(*shape, low=0, high=16, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def factors(*shape, seed=1):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def packed(values, bits, dim, order=range(32)):
    """Fields of `bits` bits in int32, one after another by a loop; `order`: which value each field holds."""
    values, per = (values if dim == 1 else values.T), 32 // bits
    out = []
    for row in values.tolist():
        integers = []
        for first in range(0, len(row), per):
            integer = 0
            for field, place in enumerate(list(order)[:per]):
                integer |= row[first + place] << (bits * field)
            integers.append(integer - 2**32 if integer >= 2**31 else integer)
        out.append(integers)
    made = torch.tensor(out, dtype=torch.int32)
    return made if dim == 1 else made.T.contiguous()


def product(values, scale, zero=None, group=None):
    """(q - z) s by a loop over all entries; `group`: the column of the factors for a column."""
    group = [column // GROUP for column in range(values.shape[1])] if group is None else group
    out = torch.empty(values.shape)
    for i, j in itertools.product(*map(range, values.shape)):
        at = min(i, len(scale) - 1), min(group[j], scale.shape[1] - 1)
        out[i, j] = (float(values[i, j]) - (0.0 if zero is None else float(zero[at]))) * float(scale[at])
    return out


def compressed(weights, form="pack-quantized"):
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def int8():
    values, scale = numbers(ROWS, COLUMNS, low=-128, high=128), factors(ROWS, 1)
    config = compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized")
    return {"weight": values.to(torch.int8), "weight_scale": scale}, config, product(values, scale)


def float8():
    values, scale = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn), factors(1)
    config = compressed({"num_bits": 8, "type": "float", "strategy": "tensor"}, "float-quantized")
    return {"weight": values, "weight_scale": scale, "input_scale": scale.clone()}, config, product(values, scale[None])


def w4a16():
    values, scale = numbers(ROWS, COLUMNS), factors(ROWS, COLUMNS // GROUP)
    stored = {
        "weight_packed": packed(values, 4, 1),
        "weight_scale": scale,
        "weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    return (
        stored,
        compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}),
        product(values - 8, scale),
    )


def w4a16_with_zeros():
    stored, config, _ = w4a16()
    values, scale, zero = (
        numbers(ROWS, COLUMNS),
        factors(ROWS, COLUMNS // GROUP),
        numbers(ROWS, COLUMNS // GROUP, seed=4),
    )
    return stored | {"weight_zero_point": packed(zero, 4, 0)}, config, product(values, scale, zero)


def fp8_blocks():
    values, scale = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn), factors(2, 4)
    expected = torch.empty(ROWS, COLUMNS)
    for i, j in itertools.product(range(ROWS), range(COLUMNS)):
        expected[i, j] = float(values[i, j]) * float(scale[i // 16, j // 8])
    return (
        {"weight": values, "weight_scale_inv": scale},
        {"quant_method": "fp8", "weight_block_size": [16, 8]},
        expected,
    )


def awq():
    values, scale, zero = (
        numbers(ROWS, COLUMNS),
        factors(ROWS, COLUMNS // GROUP),
        numbers(ROWS, COLUMNS // GROUP, seed=5),
    )
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # of AutoAWQ's packing
    stored = {
        "qweight": packed(values.T, 4, 1, order),
        "qzeros": packed(zero.T, 4, 1, order),
        "scales": scale.T.contiguous(),
    }
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return stored, config, product(values, scale, zero)


def gptq(bits=4, version="gptq"):
    high, less = 2**bits, version == "gptq"
    values, scale = numbers(ROWS, COLUMNS, high=high), factors(ROWS, COLUMNS // GROUP)
    zero = numbers(ROWS, COLUMNS // GROUP, low=1, high=high, seed=6)
    group = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(7)) // GROUP  # desc_act
    stored = {
        "qweight": packed(values.T, bits, 0), "qzeros": packed(zero.T - int(less), bits, 1), "scales": scale.T.contiguous(),
        "g_idx": group.to(torch.int32),
    }  # fmt: skip
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": True, "checkpoint_format": version}
    return stored, config, product(values, scale, zero, group.tolist())


def bnb8():
    values, greatest = numbers(ROWS, COLUMNS, low=-127, high=128), factors(ROWS, 1)
    stored = {
        "weight": values.to(torch.int8),
        "SCB": greatest[:, 0],
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return stored, {"quant_method": "bitsandbytes", "load_in_8bit": True}, product(values, greatest / 127)


def nf4(nested=True):
    codes, table, block = numbers(ROWS, COLUMNS), factors(16, seed=8) - 0.6, 64
    greatest = factors(ROWS * COLUMNS // block, seed=9)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [ROWS, COLUMNS]}
    flat = codes.flatten().tolist()
    stored = {
        "weight": torch.tensor([[16 * a + b] for a, b in zip(flat[::2], flat[1::2], strict=True)], dtype=torch.uint8),
        "weight.quant_map": table, "weight.absmax": greatest,
    }  # fmt: skip
    if nested:
        of, each = numbers(len(greatest), high=256, seed=10), factors(-(-len(greatest) // 5), seed=11)
        inner = factors(256, seed=12)
        greatest = torch.tensor([float(inner[code]) * float(each[i // 5]) + 0.25 for i, code in enumerate(of)])
        state |= {"nested_blocksize": 5, "nested_dtype": "float32", "nested_offset": 0.25}
        stored |= {"weight.absmax": of.to(torch.uint8), "weight.nested_absmax": each, "weight.nested_quant_map": inner}
    expected = [float(table[code]) * float(greatest[i // block]) for i, code in enumerate(flat)]
    stored["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return stored, {"quant_method": "bitsandbytes", "load_in_4bit": True}, torch.tensor(expected).view(ROWS, COLUMNS)


FORMS = {
    "compressed-tensors int8": int8, "compressed-tensors fp8": float8, "compressed-tensors w4a16": w4a16,
    "compressed-tensors w4a16 with zeros": w4a16_with_zeros, "fp8 blocks": fp8_blocks, "AWQ": awq, "GPTQ": gptq,
    "GPTQ of 8 bits": lambda: gptq(8), "GPTQ v2": lambda: gptq(version="gptq_v2"), "bitsandbytes int8": bnb8,
    "bitsandbytes nf4": lambda: nf4(nested=False), "bitsandbytes nf4, nested": nf4,
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_what_its_formula_says(tmp_path, form):
    stored, config, expected = FORMS[form]()
    save_file(
        {f"fc.{role}": value.contiguous() for role, value in stored.items()} | {"fc.bias": torch.ones(3)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    checkpoint = Checkpoint(tmp_path)
    assert set(checkpoint.names()) == {"fc.weight", "fc.bias"}
    assert checkpoint.shape("fc.weight") == tuple(expected.shape)
    torch.testing.assert_close(checkpoint.tensor("fc.weight"), expected, rtol=1e-6, atol=1e-6)


QWEIGHT = {"fc.qweight": torch.ones(1, 1, dtype=torch.int32)}
REFUSED = {
    "unknown": ({"quant_method": "quark"}, {"fc.weight_scale": torch.ones(1)}, "quantized by 'quark'; compressed-tensors, fp8, awq"),
    "AWQ gemv": ({"quant_method": "awq", "version": "gemv"}, QWEIGHT, r"only \(4, 'gemm'\) is supported"),
    "GPTQ of 3 bits": ({"quant_method": "gptq", "bits": 3}, QWEIGHT, "2, 4 and 8 are supported"),
    "float4": (
        compressed({"num_bits": 4, "type": "float"}), {"fc.weight_scale": torch.ones(1), "fc.weight_packed": torch.ones(1)}, "float4",
    ),
    "no group": (compressed({}) | {"config_groups": {}}, {"fc.weight_scale": torch.ones(1)}, "no group of its quantization_config"),
    "scales alone": ({"quant_method": "fp8"}, {"fc.weight_scale_inv": torch.ones(1)}, "fc.weight_scale_inv and no fc.weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_forms_are_refused_by_name(tmp_path, case):
    config, stored, message = REFUSED[case]
    save_file({"norm.weight": torch.ones(2)} | stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path).names()


@pytest.mark.parametrize(
    "config",
    [{"quant_method": "mxfp4"}, {"quant_method": "gptq", "bits": 3}, {"quant_method": "awq", "version": "gemv"}],
)
def test_plain_numbers_may_have_any_configuration(tmp_path, config):
    save_file({"norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert Checkpoint(tmp_path).names() == ["norm.weight"]


def test_a_quantized_head_drafts_with_what_was_read(tmp_path, model):
    """An EAGLE-3 head in w4a16: its logits are those of the same head stored in plain numbers."""
    seen = []
    for kind in ("packed", "plain"):
        _, folder = write(tmp_path / kind, "yuhuili")
        file = tmp_path / kind / "model.safetensors"
        tensors = load_file(file)
        for name in [
            name
            for name, value in tensors.items()
            if value.dim() == 2 and "embed" not in name and name != "lm_head.weight"
        ]:
            value, module = tensors.pop(name), name.removesuffix(".weight")
            scale = value.view(len(value), -1, GROUP).abs().amax(2) / 7
            values = (value / scale.repeat_interleave(GROUP, 1)).round().long().clamp(-8, 7)
            if kind == "plain":
                tensors[name] = values * scale.repeat_interleave(GROUP, 1)
            else:
                tensors |= {f"{module}.weight_packed": packed(values + 8, 4, 1), f"{module}.weight_scale": scale}
                tensors[f"{module}.weight_shape"] = torch.tensor(value.shape)
        save_file(tensors, file)
        stated = json.loads((tmp_path / kind / "config.json").read_text())
        if kind == "packed":
            stated["quantization_config"] = compressed(
                {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
            )
        (tmp_path / kind / "config.json").write_text(json.dumps(stated))
        recorder = recorded(model, {"model": folder})
        model.generate(**ragged([9, 5]), max_new_tokens=8, speculative_config={"model": folder})
        seen.append(recorder.seen)
    for (text, path, logits), (other, below, others) in zip(*seen, strict=True):
        assert (text, path) == (other, below)
        torch.testing.assert_close(logits, others, rtol=1e-5, atol=1e-5)
