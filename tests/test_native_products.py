"""Products of the native library: right, and the same bits however many tokens there are and wherever the weights come from."""

import ctypes

import pytest
import torch

from hf_specdec.kernels.native import TYPES, Linear, library

pytestmark = pytest.mark.skipif(library() is None, reason="the native library is not compiled")
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 30]
SHAPES = [(64, 64), (5, 7), (37, 1000), (3, 2816), (130, 96)]  # outputs, inputs; with remainders of every tile


@pytest.fixture(params=["baseline", "avx2", "avx512", "avx512_bf16"])
def instruction_set(request):
    """The kernels of one instruction set."""
    loaded = library()
    best = loaded.specdec_instruction_set()
    if not loaded.specdec_use(request.param.encode()):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    loaded.specdec_use(best)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, streams: bool, pitch: int = 0
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias, by the library; `pitch`: unused numbers after each row of x and y."""
    (rows, k), n = x.shape, weight.shape[0]
    spaced = torch.nn.functional.pad(x, (0, pitch), value=float("nan"))
    out = torch.full((rows, n + pitch), -1.0, dtype=x.dtype)
    call = Linear(
        spaced.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), TYPES[x.dtype],
        rows, n, k, k + pitch, weight.stride(0), n + pitch, int(streams),
    )  # fmt: skip
    library().specdec_linear(ctypes.byref(call), 1)
    assert (out[:, n:] == -1).all(), "written beyond a row"
    return out[:, :n]


@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products(instruction_set, dtype, n, k):
    generator = torch.Generator().manual_seed(n * k)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((max(ROWS), k), (n, k), (n,)))
    wanted = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T  # rounding is relative to the sizes of the summands
    alone = torch.cat([product(row[None], weight, None, False) for row in x])
    unit = torch.finfo(dtype).eps / 2
    assert ((alone.double() - wanted).abs() <= unit * wanted.abs() + 1e-6 * scale).all()
    for rows in ROWS:
        for streams in (False, True):
            found = product(x[:rows], weight, None, streams, pitch=rows % 3)
            assert torch.equal(found, alone[:rows]), (rows, streams)
    with_bias = product(x, weight, bias, True)
    assert (
        (with_bias.double() - wanted - bias.double()).abs()
        <= unit * (wanted + bias.double()).abs() + 1e-6 * scale + 1e-6
    ).all()


def test_weights_with_a_longer_row(instruction_set):
    """Part of a larger matrix, as the queries of a joined layer are."""
    whole = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
    x, weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)), whole[:, :64]
    assert torch.equal(product(x, weight, None, True), product(x, weight.contiguous(), None, False))
