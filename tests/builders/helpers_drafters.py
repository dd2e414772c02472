"""What every drafter is asked in the same way: lossless texts, rows that come to an end of their own, what was proposed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from oracle import assert_clean, ragged

import hf_specdec
from hf_specdec import SpeculativeConfigError, integration
from hf_specdec.candidate_generators import parse_config
from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.sequence import Sequence as Row
from hf_specdec.decoding import SpeculativeDecoder

RAGGED = ragged([6, 13, 2, 9])


def assert_lossless(
    target, config: dict[str, Any], lengths: Sequence[Sequence[int]] = ((7,), (6, 13, 1, 9)), max_new_tokens: int = 12, **sampling
) -> int:  # fmt: skip
    """Greedy tokens equal plain generate()'s; sampled ones equal those without speculation under the same seed. Something is
    drafted for every batch. Returns how many greedy drafts were accepted.

    Args:
        lengths: of the prompts of each batch.
        sampling: e.g. temperature.
    """
    accepted = 0
    for each in lengths:
        inputs = ragged(list(each), vocab_size=target.config.vocab_size)
        call = {**inputs, "max_new_tokens": max_new_tokens}
        output = target.generate(**call, do_sample=False, speculative_config=config, return_dict_in_generate=True)
        assert torch.equal(output.sequences, target.generate(**call, do_sample=False))
        assert output.speculation.num_draft_tokens > 0
        accepted += output.speculation.num_accepted_tokens
        sampled = [
            target.generate(**call, do_sample=True, **sampling, speculative_config={**own, "seed": 5})
            for own in ({"method": "none"}, config)
        ]
        assert torch.equal(*sampled)
    assert_clean(target)
    return accepted


def texts_equal(found: list[list[int]], plain: torch.Tensor) -> bool:
    """Whether texts are those of a left-padded batch [B, S]."""
    return found == [row[-len(text) :].tolist() for row, text in zip(plain, found, strict=True)]


# ---- decoders without generate() ------------------------------------------------------------------------------------


def run_limited_and_preempted(decoder: SpeculativeDecoder, model, inputs, max_new_tokens: int) -> list[Row]:
    """Four rows limited to 0, 1, 2 and all drafts, prompts in chunks of three, each row preempted once: the texts stay plain.
    The rows are returned, still in the decoder."""
    plain = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    decoder.allocate(200, 4)
    prompts = [row[mask > 0].tolist() for row, mask in zip(*inputs.values(), strict=True)]
    rows = [Row(prompt, len(prompt) + max_new_tokens) for prompt in prompts]
    for seq, limit in zip(rows, (0, 1, 2, None), strict=True):
        seq.num_speculative_tokens = limit
        decoder.add(seq)
    with decoder.active():
        for step in range(100):
            running = [seq for seq in rows if not seq.finished]
            if not running:
                break
            if 3 <= step < 7:
                assert rows[step % 4] in running
                decoder.preempt(rows[step % 4])
            decoder.step(
                running, [3 if len(seq.tokens) - decoder.cache.tables[seq.id].length > 1 else 1 for seq in running]
            )
    assert texts_equal([seq.tokens for seq in rows], plain)
    return rows


def deepest_drafts(rows: list[Row], drafted: Iterable[tuple[Sequence[int], int]]) -> list[int]:
    """How deep each row was drafted for, from (text, depth) of the drafts behind its texts."""
    deepest = [0] * len(rows)
    for text, depth in drafted:
        owner = next(i for i, seq in enumerate(rows) if seq.tokens[: len(text)] == list(text))
        deepest[owner] = max(deepest[owner], depth)
    return deepest


def assert_nothing_left(decoder: SpeculativeDecoder, rows: list[Row]) -> None:
    """When its rows are removed, the drafter holds nothing of them."""
    for seq in rows:
        decoder.remove(seq)
    generator = decoder.generator
    held = [name for name in ("unread", "reached", "slots", "known") if getattr(generator, name, None)]
    assert held == []
    if hasattr(generator, "cache"):
        assert generator.cache.tables == {} and generator.cache.pool.num_used == 0


# ---- what was proposed ----------------------------------------------------------------------------------------------


def kept_proposals(generator) -> list[DraftTrees]:
    """The list that everything the generator proposes from here on is kept in."""
    propose, kept = generator.propose, []
    generator.propose = lambda *args: kept.append(propose(*args)) or kept[-1]
    return kept


def drafted(trees: DraftTrees, row: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of a row's nodes."""
    count = trees.lengths[row]
    return trees.tokens[row, :count].tolist(), trees.parent_index[row, :count].tolist()


def assert_drafts_in_transformers_own_loop(model, config: dict[str, Any]) -> None:
    """There the text is plain generate()'s too, and more than three rounds have drafts."""
    inputs = ragged([9])
    plain = model.generate(**inputs, max_new_tokens=20)
    with hf_specdec.assisted_loop(model, config) as drafter:
        drafts = kept_proposals(drafter.generator)
        assert torch.equal(model.generate(**inputs, max_new_tokens=20, prompt_lookup_num_tokens=1), plain)
    assert sum(trees.lengths[0] > 0 for trees in drafts) > 3


# ---- configurations -------------------------------------------------------------------------------------------------


def forced(depth: int) -> dict[str, Any]:
    """Keys with which drafts of that depth are accepted whatever the target says: none, some and all."""
    rates = [0.8 - 0.5 * i / depth for i in range(depth)]
    return {
        "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates, "num_speculative_tokens": depth, "seed": 2,
    }  # fmt: skip


def assert_forced(output, recorder, depth: int) -> None:
    """With those keys: rounds of every kind were seen, and drafts at every depth recorded."""
    rates = output.speculation.acceptance_per_position
    assert 0 < rates[-1] <= rates[0] < 1
    assert {len(path) for _, path, _ in recorder.seen} == set(range(depth))


def assert_four_heads_bound_the_length(model, base: dict[str, Any], too_deep: Sequence[dict[str, Any]] = ()) -> None:
    """A checkpoint with four heads: all by default, fewer if asked for, more is an error that names both numbers."""
    for more, depth in (({}, 4), ({"num_speculative_tokens": 2}, 2), ({"draft_length": "auto"}, 4), ({"top_k": 2}, 4)):
        decoder = integration.get_decoder(model, parse_config(base | more))
        (head,) = getattr(decoder.generator, "parts", [decoder.generator])  # of automatic length it may rest
        assert head.shape.depth == head.config.num_speculative_tokens == depth
        assert decoder.config.num_speculative_tokens == depth
    for more in ({"num_speculative_tokens": 5}, {"branching_factors": [2, 1, 1, 1, 1]}, *too_deep):
        with pytest.raises(SpeculativeConfigError, match=r"drafts of 5 tokens.* drafts 4: use at most 4"):
            integration.get_decoder(model, parse_config(base | more))
    with pytest.raises(SpeculativeConfigError, match=r"drafts of 1000000000000 tokens"):
        integration.get_decoder(model, parse_config(base | {"num_speculative_tokens": 10**12}))


def assert_refused(model, config: dict[str, Any], message: str) -> None:
    """A call fails with this message before any decoder is kept."""
    hf_specdec.release(model)  # decoders of other tests
    with pytest.raises(SpeculativeConfigError, match=message):
        model.generate(**RAGGED, max_new_tokens=3, speculative_config=config)
    assert not integration.kept_decoders(model)


def assert_round_trips(config: dict[str, Any]):
    """A configuration survives JSON; returns it, parsed."""
    parsed = parse_config(config)
    assert parse_config(parsed.to_json()) == parsed
    return parsed


# ---- drafters that need no model ------------------------------------------------------------------------------------


def assert_greedy_is_plain(model, config: dict[str, Any], lengths: list[int], chunks: Sequence[int]) -> None:
    """One call per prompt chunk size, one after the other: the text is plain generate()'s, some drafts are accepted."""
    call = {**ragged(lengths), "max_new_tokens": 40}
    plain = model.generate(**call)
    for chunk in chunks:
        keys = {**config, "prefill_chunk_size": chunk}
        out = model.generate(**call, return_dict_in_generate=True, speculative_config=keys)
        assert torch.equal(out.sequences, plain)
        assert out.speculation.num_accepted_tokens > 0


def assert_sampling_does_not_depend_on_drafts(model, configs: Sequence[dict[str, Any]], **sampling) -> None:
    """Coupled: the tokens of decoding without drafts, some of them drafted; by rejection every draft is served too."""
    call = {**ragged([9, 4, 17]), "max_new_tokens": 25, "do_sample": True, **sampling}
    expected = model.generate(**call, speculative_config={"method": "none", "seed": 5})
    for config in configs:
        config = {**config, "seed": 5}
        out = model.generate(**call, return_dict_in_generate=True, speculative_config=config)
        assert torch.equal(out.sequences, expected) and out.speculation.num_accepted_tokens > 0
        config = {**config, "rejection_sample_method": "rejection"}
        assert model.generate(**call, speculative_config=config).shape == expected.shape


def accepted_length_on_bundled(model, tokenizer, config: dict[str, Any]) -> float:
    """Tokens per step on three questions to the bundled model, whose answers stay the plain ones."""
    questions = [
        "Tom has 3 apples and buys 4 more. How many has he?",
        "Write a story about a fox.",
        "Add 2 and 2 in Python.",
    ]
    prompts = [f"<|user|>{question}<|end|><|assistant|>" for question in questions]
    call = {**tokenizer(prompts, return_tensors="pt", padding=True), "max_new_tokens": 48}
    plain = model.generate(**call)
    out = model.generate(**call, return_dict_in_generate=True, speculative_config=config)
    hf_specdec.release(model)
    assert torch.equal(out.sequences, plain)
    return out.speculation.mean_accepted_length
