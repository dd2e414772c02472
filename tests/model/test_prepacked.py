"""Linear layers with packed weights compute what the layers compute, and follow changes of the weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_specdec.model.options import prepacked
from hf_specdec.model.options.prepacked import prepack
from hf_specdec.model.options.replaced_linears import ReplacedLinears

WIDTH = 512
ONEDNN = torch.backends.mkldnn.is_available()
PACKS_BFLOAT16 = ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()
pytestmark = pytest.mark.skipif(not ONEDNN, reason="needs oneDNN")
BFLOAT16 = pytest.param(
    torch.bfloat16,
    id="bfloat16",
    marks=pytest.mark.skipif(not PACKS_BFLOAT16, reason="oneDNN packs no bfloat16 on this CPU"),
)


class Attention(nn.Module):
    """Three projections of one input, and one more."""

    def __init__(self, bias: bool, key_width: int = WIDTH):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x), self.o_proj(x)


def module(dtype=torch.float32, bias=True) -> Attention:
    torch.manual_seed(0)
    return Attention(bias).to(dtype).eval()


def outputs(attention: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    """By the layers' own weights."""
    return [F.linear(x, layer.weight, layer.bias) for layer in attention.children()]


def close(found, wanted) -> bool:
    bound = 1e-5 if wanted[0].dtype == torch.float32 else 2e-2
    return all(
        a.shape == b.shape and a.dtype == b.dtype and (a - b).abs().max() < bound
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, id="float32"), BFLOAT16])
@torch.no_grad()
def test_packed_layers_compute_what_the_layers_compute(dtype, bias, rows):
    attention = module(dtype, bias)
    packed = prepack(attention, True)
    x = torch.randn(1, rows, WIDTH, dtype=dtype)
    with packed.active():
        found = attention(x)
        again = attention(x)
    assert close(found, outputs(attention, x))
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert not any("forward" in vars(layer) for layer in attention.modules())


def write_in_place(weight):
    weight.mul_(2.0)


def write_through_data(weight):
    weight.data[3:5, 7] += 1.0


def write_through_numpy(weight):
    weight.detach().numpy()[-1, -1] = 9.0


def write_other_memory(weight):
    weight.data = weight.detach() * 2


def swap_two_rows(weight):
    weight.data[[0, 1]] = weight.data[[1, 0]]


@pytest.mark.parametrize(
    "write", [write_in_place, write_through_data, write_through_numpy, write_other_memory, swap_two_rows]
)
@pytest.mark.parametrize("layer", ["k_proj", "o_proj"])
@torch.no_grad()
def test_changed_weights_are_packed_again(layer, write):
    attention = module()
    packed = prepack(attention, True)
    x = torch.randn(1, 6, WIDTH)
    with packed.active():
        before = attention(x)
    write(getattr(attention, layer).weight)
    with packed.active():
        after = attention(x)
    assert close(after, outputs(attention, x))
    assert not close(after, before)


@torch.no_grad()
def test_a_changed_bias_is_packed_again():
    attention = module()
    packed = prepack(attention, True)
    x = torch.randn(1, 6, WIDTH)
    for _ in range(2):
        with packed.active():
            assert close(attention(x), outputs(attention, x))
        attention.o_proj.bias.data.add_(1.0)
        attention.v_proj.bias.data.add_(1.0)


@torch.no_grad()
def test_weights_that_did_not_change_are_packed_once(monkeypatch):
    packings = []
    original = prepacked.PackedProduct.copy
    monkeypatch.setattr(
        prepacked.PackedProduct, "copy", lambda self, *given: (packings.append(self), original(self, *given))
    )
    attention = module()
    packed = prepack(attention, True)
    x = torch.randn(1, 6, WIDTH)
    for _ in range(3):
        with packed.active():
            attention(x)
    assert len(packings) == 4


@torch.no_grad()
def test_rows_that_packing_does_not_serve_read_no_weights(monkeypatch):
    attention = module()
    packed = prepack(attention, True)
    monkeypatch.setattr(ReplacedLinears, "refresh", lambda self: pytest.fail("weights were read"))
    for rows in (1, 200):
        x = torch.randn(1, rows, WIDTH)
        with packed.active():
            assert close(attention(x), outputs(attention, x))


@torch.no_grad()
def test_bfloat16_is_left_alone_where_onednn_does_not_pack_it(monkeypatch):
    monkeypatch.setattr(prepacked, "packs_bfloat16", lambda: False)
    assert prepack(module(torch.bfloat16), True) is None


def test_inference_mode():
    attention = module()
    with torch.inference_mode(), prepack(attention, True).active():
        x = torch.randn(1, 6, WIDTH)
        assert close(attention(x), outputs(attention, x))
