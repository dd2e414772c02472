"""Linear layers in the native library while a drafter of a few rows runs: what they compute, and which are left alone."""

import pytest
import torch
from torch import nn

from hf_specdec.kernels.native import library
from hf_specdec.model.options.replaced_linears import native_linears

pytestmark = pytest.mark.skipif(library() is None, reason="the native library is not compiled")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_products(dtype, bias):
    """Of vectors, rows and trees of rows; writes to the weights take effect at once."""
    layer = nn.Linear(48, 37, bias=bias).to(dtype)
    model = nn.Sequential(layer)
    replaced = native_linears(model)
    for shape in ([48], [3, 48], [2, 5, 48]):
        x = torch.randn(shape, dtype=dtype)
        with torch.no_grad():
            layer.weight.mul_(1.5)
            expected = layer(x)
            with replaced.active():
                assert "forward" in vars(layer)
                found = layer(x)
        assert found.shape == expected.shape and found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=1e-2)
    assert "forward" not in vars(layer)


def test_what_the_library_cannot_read_is_left_to_torch():
    double, transposed, plain = (nn.Linear(8, 8) for _ in range(3))
    double.to(torch.float64)
    transposed.weight = nn.Parameter(transposed.weight.detach().t())
    model = nn.ModuleList([double, transposed, plain])
    with torch.no_grad(), native_linears(model).active():
        assert ["forward" in vars(each) for each in (double, transposed, plain)] == [False, False, True]
        many, other = torch.randn(300, 8), torch.randn(2, 8, dtype=torch.float64)
        assert torch.equal(plain(many), nn.functional.linear(many, plain.weight, plain.bias))
        assert double(other).dtype == torch.float64
