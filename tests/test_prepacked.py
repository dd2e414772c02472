"""Linear layers with packed weights compute what the layers compute, also where several share one product."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_specdec.runtime.joined_linears import JoinedLinears
from hf_specdec.runtime.prepacked import prepack

WIDTH = 512
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


class Attention(nn.Module):
    """Three projections of one input; `swap` makes it feed them another way."""

    def __init__(self, bias: bool, key_width: int = WIDTH):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.feed = lambda x: (x, x, x)

    def forward(self, x):
        q, k, v = self.feed(x)
        return self.q_proj(q), self.k_proj(k), self.v_proj(v), self.o_proj(x)


def module(dtype=torch.float32, bias=True) -> Attention:
    torch.manual_seed(0)
    return Attention(bias).to(dtype).eval()


def outputs(attention: Attention, x: torch.Tensor) -> list[torch.Tensor]:
    """By the layers' own weights."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    inputs = (*attention.feed(x), x)
    layers = [getattr(attention, name) for name in names]
    return [F.linear(each, layer.weight, layer.bias) for layer, each in zip(layers, inputs, strict=True)]


def close(found, wanted) -> bool:
    bound = 1e-5 if wanted[0].dtype == torch.float32 else 2e-2
    return all(
        a.shape == b.shape and a.dtype == b.dtype and (a - b).abs().max() < bound
        for a, b in zip(found, wanted, strict=True)
    )


def num_products(packed: JoinedLinears) -> int:
    return len({id(each) for each in packed._products.values()})


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
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
    assert num_products(packed) == 2  # q, k, v together; o
    assert not any("forward" in vars(layer) for layer in attention.modules())


@pytest.mark.parametrize(
    "feed",
    [lambda x: (x, x.clone() + 1, x), lambda x: (x, x, x * 2), lambda x: (x, x.clone(), x.clone())],
    ids=["other keys", "other values", "copies"],
)
@torch.no_grad()
def test_layers_that_are_fed_different_tensors_are_right_and_packed_apart_from_then_on(feed):
    attention = module()
    attention.feed = feed
    packed = prepack(attention, True)
    x = torch.randn(1, 6, WIDTH)
    with packed.active():
        assert close(attention(x), outputs(attention, x))
        assert close(attention(x + 1), outputs(attention, x + 1))
    with packed.active():
        assert close(attention(x), outputs(attention, x))
        assert not any(module.forward.product.fed_apart for module in attention.children())
        assert all(module.forward.product.alone for module in attention.children())


@torch.no_grad()
def test_an_input_changed_in_place_between_layers_is_noticed():
    attention = module()
    x = torch.randn(1, 6, WIDTH)
    with prepack(attention, True).active():
        attention.q_proj(x)
        x += 1
        found = attention.k_proj(x)
    assert close([found], [F.linear(x, attention.k_proj.weight, attention.k_proj.bias)])


@torch.no_grad()
def test_a_layer_called_without_the_first_is_right():
    attention = module()
    x = torch.randn(1, 6, WIDTH)
    with prepack(attention, True).active():
        found = attention.v_proj(x)
    assert close([found], [F.linear(x, attention.v_proj.weight, attention.v_proj.bias)])


@torch.no_grad()
def test_changed_weights_are_packed_again():
    attention = module()
    packed = prepack(attention, True)
    x = torch.randn(1, 6, WIDTH)
    with packed.active():
        before = attention(x)
    attention.k_proj.weight.mul_(2.0)
    with packed.active():
        after = attention(x)
    assert close(after, outputs(attention, x))
    assert not torch.allclose(before[1], after[1])


def test_inference_mode_has_no_versions_to_compare():
    attention = module()
    with torch.inference_mode(), prepack(attention, True).active():
        x = torch.randn(1, 6, WIDTH)
        assert close(attention(x), outputs(attention, x))


@torch.no_grad()
def test_siblings_that_cannot_be_joined_are_packed_alone():
    attention = module()
    attention.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)  # the others have a bias
    packed = prepack(attention, True)
    x = torch.randn(1, 6, WIDTH)
    with packed.active():
        found = attention(x)
    assert close(found, outputs(attention, x))
    assert num_products(packed) == 4
