"""Products of the native library: right, and the same bits however many tokens there are and wherever the weights come from."""

import ctypes
import mmap
import threading

import pytest
import torch

from hf_specdec.kernels.native import TYPES, Linear, library

pytestmark = pytest.mark.skipif(library() is None, reason="the native library is not compiled")
ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 16, 17, 30, 48, 97, 128, 256]
SHAPES = [
    (64, 64),
    (5, 7),
    (37, 1000),
    (3, 2816),
    (130, 96),
    (130, 2820),
]  # outputs, inputs; with remainders of every tile and block


@pytest.fixture(params=["baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16"])
def instruction_set(request):
    """The kernels of one instruction set."""
    loaded = library()
    best = loaded.specdec_instruction_set()
    if not loaded.specdec_use(request.param.encode()):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    loaded.specdec_use(best)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    streams: bool = False,
    pitch: int = 0,
    threads: int = 1,
    by_columns: bool = False,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias, by the library; `pitch`: unused numbers after each row of x and y. `by_columns`:
    the library reads the weight as [K, N]."""
    (rows, k), n = x.shape, weight.shape[0]
    spaced = torch.nn.functional.pad(x, (0, pitch), value=float("nan"))
    out = torch.full((rows, n + pitch), -1.0, dtype=x.dtype)
    weight = weight.T.contiguous() if by_columns else weight
    call = Linear(
        spaced.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), TYPES[x.dtype],
        rows, n, k, k + pitch, weight.stride(0), n + pitch, int(streams),
        by_columns=by_columns,
    )  # fmt: skip
    library().specdec_linear(ctypes.byref(call), threads)
    assert (out[:, n:] == -1).all(), "written beyond a row"
    return out[:, :n]


LAYOUTS = pytest.mark.parametrize("by_columns", [False, True], ids=["rows", "columns"])


@LAYOUTS
@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products(instruction_set, dtype, n, k, by_columns):
    generator = torch.Generator().manual_seed(n * k)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((max(ROWS), k), (n, k), (n,)))
    wanted = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T  # rounding is relative to the sizes of the summands
    alone = torch.cat([product(row[None], weight, by_columns=by_columns) for row in x])
    unit = torch.finfo(dtype).eps / 2
    assert ((alone.double() - wanted).abs() <= unit * wanted.abs() + 1e-6 * scale).all()
    for rows in ROWS:
        for streams in (False, True):
            found = product(x[:rows], weight, None, streams, rows % 3, by_columns=by_columns)
            assert torch.equal(found, alone[:rows]), (rows, streams)
    with_bias = product(x, weight, bias, True, by_columns=by_columns)
    assert (
        (with_bias.double() - wanted - bias.double()).abs()
        <= unit * (wanted + bias.double()).abs() + 1e-6 * scale + 1e-6
    ).all()


@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
def test_weights_with_a_longer_row(instruction_set, dtype):
    """Part of a larger matrix, as the queries of a joined layer are; what follows a row is not read."""
    whole = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    x, weight = torch.randn(9, 72, generator=torch.Generator().manual_seed(1)).to(dtype), whole[:, :72]
    wanted = product(x, weight.contiguous())
    whole[:, 72:] = float("nan")
    assert torch.equal(product(x, weight, streams=True), wanted)


@LAYOUTS
@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
@pytest.mark.parametrize("n", [7, 20, 130, 256])
def test_threads_share_the_outputs(instruction_set, dtype, n, by_columns):
    generator = torch.Generator().manual_seed(n)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((33, 168), (n, 168), (n,)))
    alone = product(x, weight, bias, by_columns=by_columns)
    for threads in (2, 3, 5):
        assert torch.equal(product(x, weight, bias, threads=threads, by_columns=by_columns), alone), threads


@LAYOUTS
@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
@pytest.mark.parametrize(("n", "k"), [(5, 7), (16, 64), (21, 40), (37, 100)])
def test_nothing_is_read_or_written_beyond_the_end(instruction_set, dtype, n, k, by_columns):
    """A page that may not be touched follows weights, tokens, bias and outputs."""
    generator = torch.Generator().manual_seed(n)
    for rows in (1, 5, 18):
        x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, k), (n, k), (n,)))
        wanted, read = product(x, weight, bias, by_columns=by_columns), weight.T.contiguous() if by_columns else weight
        own = [_before_a_closed_page(each) for each in (x, read, bias, torch.zeros(rows, n, dtype=dtype))]
        for streams in (0, 1):
            sizes = rows, n, k, k, read.shape[1], n
            call = Linear(*(each.data_ptr() for each in own), TYPES[dtype], *sizes, streams, by_columns=by_columns)
            library().specdec_linear(ctypes.byref(call), 1)
            assert torch.equal(own[3], wanted)


def _before_a_closed_page(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose end is that of a page, before one that may be neither read nor written."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=pages * mmap.PAGESIZE - size)
    copy = copy.view(tensor.shape).copy_(tensor)
    end = copy.data_ptr() + size
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return copy


@LAYOUTS
@pytest.mark.parametrize("dtype", list(TYPES), ids=str)
def test_tokens_and_outputs_do_not_touch_each_other(instruction_set, dtype, by_columns):
    """What is not a number stays in its token and in its output."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((21, 80), (40, 80)))
    wanted = product(x, weight, by_columns=by_columns)
    x[3], weight[17, 5] = float("nan"), float("inf")
    found = product(x, weight, by_columns=by_columns)
    rows, outputs = torch.arange(21) != 3, torch.arange(40) != 17
    assert found[3].isnan().all() and not found[:, 17].isfinite().any()
    assert torch.equal(found[rows][:, outputs], wanted[rows][:, outputs])


def test_tiles_are_left_as_they_were():
    """torch's products in the same thread may use AMX too, with tiles of other sizes."""
    generator = torch.Generator().manual_seed(0)
    cases = []
    for rows, n, k in ((1, 64, 96), (40, 130, 200), (7, 5, 64), (128, 256, 512)):
        cases.append([torch.randn(shape, generator=generator).bfloat16() for shape in ((rows, k), (n, k))])
    wanted = [(torch.nn.functional.linear(x, weight), product(x, weight)) for x, weight in cases]
    same = []

    def in_turns():
        for _ in range(3):
            for (x, weight), (by_torch, ours) in zip(cases, wanted, strict=True):
                for threads in (1, 2):
                    same.append(torch.equal(product(x, weight, threads=threads), ours))
                same.append(torch.equal(torch.nn.functional.linear(x, weight), by_torch))

    in_turns()
    thread = threading.Thread(target=in_turns)
    thread.start()
    thread.join()
    assert len(same) == 72 and all(same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_amx_changes_bfloat16_only(dtype):
    loaded = library()
    best = loaded.specdec_instruction_set()
    if best != b"amx_bf16":
        pytest.skip("this CPU has no amx_bf16")
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((9, 200), (50, 200)))
    with_tiles = product(x, weight)
    try:
        assert loaded.specdec_use(b"avx512_bf16")
        assert torch.equal(product(x, weight), with_tiles)
    finally:
        loaded.specdec_use(best)
