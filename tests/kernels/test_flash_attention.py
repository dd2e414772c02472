"""flash-attn in place of the Triton kernel: which batches it is given, and that it is told the same.

The library has no CPU build. Stand-ins with its signatures do what its documentation says, one query after another.
"""

import itertools
import sys
import types

import pytest
import torch
from oracle import ragged, tiny_llama
from replayed_graphs import attention_by_definition, defined_attention, graphs_in_python  # noqa: F401

import hf_specdec
from hf_specdec.kernels import flash_attention as flash
from hf_specdec.kernels.attention.inputs import RowDescription, attention_inputs

CAPABILITY = {2: (8, 0), 3: (9, 0)}


class StandIn:
    """Paged attention as the library documents it: causal from the bottom right, windows with both ends.

    Attributes:
        calls: (longest row, tokens) of each call.
    """

    def __init__(self, version):
        self.version, self.calls = version, []

    def varlen(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, block_table=None,
    ):  # fmt: skip
        assert k.shape[1] % 256 == 0 and cu_seqlens_k.dtype == torch.int32 and cu_seqlens_k[0] == 0
        lengths = cu_seqlens_k.diff()
        assert int(lengths.max()) <= max_seqlen_k
        return self.attend(
            q, k, v, lengths, block_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window_size, softcap
        )

    def with_kvcache(
        self, q, k_cache, v_cache, cache_seqlens=None, page_table=None, cu_seqlens_q=None, max_seqlen_q=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    ):  # fmt: skip
        return self.attend(
            q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
            window_size, softcap,
        )  # fmt: skip

    def attend(self, q, k, v, lengths, table, starts, longest, scale, causal, window, softcap):
        assert table.dtype == lengths.dtype == starts.dtype == torch.int32
        assert causal and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        out, starts = torch.full_like(q, float("nan")), starts.tolist()
        assert max(b - a for a, b in itertools.pairwise(starts)) <= longest
        self.calls.append((longest, starts[-1]))
        for row, count in enumerate(lengths.tolist()):
            pages = table[row, : -(-count // k.shape[1])].long()
            keys, values = k[pages].flatten(0, 1)[:count], v[pages].flatten(0, 1)[:count]
            queries = starts[row + 1] - starts[row]
            for i in range(queries):
                last = i + count - queries
                first = max(last - window[0], 0) if window[0] >= 0 else 0
                for head in range(q.shape[1]):
                    own = head // (q.shape[1] // k.shape[2])
                    scores = keys[first : last + 1, own].double() @ q[starts[row] + i, head].double() * scale
                    if softcap:
                        scores = softcap * torch.tanh(scores / softcap)
                    weights = torch.softmax(scores, 0)
                    out[starts[row] + i, head] = (weights @ values[first : last + 1, own].double()).to(q.dtype)
        return out


@pytest.fixture
def installed(monkeypatch):
    """Puts a version there, on a device of its kind; returns its stand-in."""

    def install(version, choice=None):
        stand_in = StandIn(version)
        name = {2: "flash_attn", 3: "flash_attn_interface"}[version]
        module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace()
        module.flash_attn_varlen_func, module.flash_attn_with_kvcache = stand_in.varlen, stand_in.with_kvcache
        monkeypatch.setitem(sys.modules, name, module)
        pretend_gpu(monkeypatch, CAPABILITY[version])
        if choice is not None:
            monkeypatch.setenv(flash.VARIABLE, choice)
        return stand_in

    yield install
    flash.find_flash_attention.cache_clear()


def pretend_gpu(monkeypatch, capability):
    monkeypatch.setattr(flash, "_on_gpu", lambda device: True)
    monkeypatch.setattr(flash, "_capability", lambda device: capability)
    flash.find_flash_attention.cache_clear()


def problem(block_size, queries=(1, 5, 3), keys=(40, 9, 21), dtype=torch.bfloat16, heads=4, kv_heads=2, width=16):
    """Query, pools and inputs of rows in scattered blocks."""
    generator = torch.Generator().manual_seed(block_size)
    counts = [-(-count // block_size) for count in keys]
    order, rows = torch.randperm(sum(counts) + 2, generator=generator).tolist(), []
    for count, own, length in zip(queries, counts, keys, strict=True):
        blocks, order = order[:own], order[own:]
        rows.append(RowDescription(blocks, count, length))
    inputs = attention_inputs(rows, block_size, torch.device("cpu"))
    slots = (sum(counts) + 2) * block_size
    pools = [torch.randn(slots, kv_heads, width, generator=generator).to(dtype) for _ in range(2)]
    return torch.randn(sum(queries), heads, width, generator=generator).to(dtype), *pools, inputs


@pytest.mark.parametrize(("version", "block_size"), [(2, 256), (3, 4)])
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 5.0}], ids=["plain", "window", "softcap"])
def test_it_is_told_the_same(installed, version, block_size, options):
    installed(version, "always")
    query, keys, values, inputs = problem(block_size)
    attend = flash.flash_attention_for(query, keys, values, inputs)
    assert attend.version == version
    found = attend(query, keys, values, inputs, 0.3, **options)
    inputs = problem(block_size)[3]
    if "window" in options:  # the definition asks for positions where there are windows
        object.__setattr__(inputs, "positions", torch.tensor([39, *range(4, 9), *range(18, 21)], dtype=torch.int32))
    doubles = (each.double() for each in (query, keys, values))
    expected = attention_by_definition(*doubles, inputs, 0.3, **options)
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("choice", flash.CHOICES)
def test_which_batches(installed, choice):
    installed(3, choice)
    chains, prompts = problem(4), problem(4, queries=(80,), keys=(90,))
    expected = {"always": [True, True], "chains": [True, False], "prompts": [False, True]}.get(choice, [False, False])
    assert [flash.flash_attention_for(*each) is not None for each in (chains, prompts)] == expected


def test_what_stays_with_our_kernel(installed):
    installed(3, "always")
    assert flash.flash_attention_for(*problem(4)) is not None
    assert flash.flash_attention_for(*problem(4), sinks=torch.zeros(4)) is None
    assert flash.flash_attention_for(*problem(4, dtype=torch.float32)) is None
    assert flash.flash_attention_for(*problem(4, width=12)) is None
    query, keys, values, inputs = problem(4)
    assert flash.flash_attention_for(query, keys, values[..., :8], inputs) is None
    tree = RowDescription([0], 2, 4, visibility=torch.ones(2, 2, dtype=torch.bool).numpy())
    assert flash.flash_attention_for(query, keys, values, attention_inputs([tree], 4, torch.device("cpu"))) is None


def test_it_needs_a_gpu(monkeypatch):
    monkeypatch.setenv(flash.VARIABLE, "always")
    assert flash.flash_attention_for(*problem(4)) is None


def test_clear_errors(installed, monkeypatch):
    monkeypatch.setenv(flash.VARIABLE, "sometimes")
    with pytest.raises(ValueError, match="HF_SPECDEC_FLASH_ATTENTION must be one of never"):
        flash.flash_attention_for(*problem(4))
    monkeypatch.setenv(flash.VARIABLE, "always")
    pretend_gpu(monkeypatch, (9, 0))
    with pytest.raises(ImportError, match="needs flash-attn: pip install flash-attn"):
        flash.flash_attention_for(*problem(4))
    installed(2)
    with pytest.raises(ValueError, match="set 'block_size': 256, not 4"):
        flash.flash_attention_for(*problem(4))
    assert flash.flash_attention_for(*problem(256)) is not None


def test_a_build_from_the_hub(installed, monkeypatch):
    stand_in, asked = StandIn(3), []
    module = types.ModuleType("kernels")
    module.__spec__ = types.SimpleNamespace()
    build = types.SimpleNamespace(flash_attn_with_kvcache=stand_in.with_kvcache)
    module.get_kernel = lambda name: asked.append(name) or build
    monkeypatch.setitem(sys.modules, "kernels", module)
    pretend_gpu(monkeypatch, (9, 0))
    assert flash.flash_attention_for(*problem(4)) is None and not asked  # nothing is fetched that nobody asked for
    monkeypatch.setenv(flash.VARIABLE, "chains")
    attend = flash.flash_attention_for(*problem(4))
    assert attend.version == 3 and asked == ["kernels-community/flash-attn3"]


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["steps", "graphs"])
@pytest.mark.parametrize("method", ["ngram", "token_recycling"])
def test_generate(installed, defined_attention, graphs_in_python, method, cuda_graphs):  # noqa: F811
    """A whole generation: prompts, decoding and chains by the stand-in, trees by ours."""
    target, inputs = tiny_llama().to(torch.bfloat16), ragged([70, 5, 12])
    config = {"method": method, "num_speculative_tokens": 3, "cuda_graphs": cuda_graphs, "native": False}
    config |= {"prompt_lookup_min": 1} if method == "ngram" else {"use_tree": True}
    stand_in = installed(3, "never")
    plain = target.generate(**inputs, max_new_tokens=12, do_sample=False, speculative_config=config)
    assert not stand_in.calls
    hf_specdec.release(target)
    stand_in = installed(3, "always")
    out = target.generate(
        **inputs, max_new_tokens=12, do_sample=False, speculative_config=config, return_dict_in_generate=True
    )
    assert out.speculation.num_draft_tokens > 0
    assert (out.sequences == plain).float().mean() > 0.9  # in bfloat16 sums in another order may choose others
    longest = [call[0] for call in stand_in.calls]
    chains = {each for each in longest if 1 < each <= flash.LONGEST_CHAIN}
    if method == "ngram":
        assert chains and max(longest) > flash.LONGEST_CHAIN and min(longest) == 1
    else:  # prompts come with a tree behind them
        assert set(longest) == {1}
    hf_specdec.release(target)
