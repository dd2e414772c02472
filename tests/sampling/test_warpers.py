"""Warpers of our own against transformers', and every processor on tree nodes against plain calls with the node's prefix."""

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given, settings
from transformers.generation import logits_process as hf

from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.sequence import Sequence
from hf_specdec.kernels import random_bits as rb
from hf_specdec.sampling import CoupledNoiseLogitsWarper, DraftVocabularyLogitsWarper, FusedSamplingLogitsWarper
from hf_specdec.sampling.logits import needs_prefix, process_logits
from hf_specdec.sampling.parameters import SamplingParameters
from hf_specdec.sampling.processors import NodeProcessors, split_sampling

OLDEST = transformers.__version__.startswith("5.17.")
INF = float("inf")


def chain(temperature, top_k, top_p, min_p):
    """transformers' own warpers, in generate()'s order and only where generate() would add them."""
    warpers = hf.LogitsProcessorList()
    if temperature != 1.0:
        warpers.append(hf.TemperatureLogitsWarper(temperature))
    if top_k:
        warpers.append(hf.TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(hf.TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(hf.MinPLogitsWarper(min_p))
    return warpers


def logits_rows():
    values = st.floats(-30, 30, width=32) | st.sampled_from([0.0, 1.0, -1e4, 1e4, -INF, 3e38, -3e38])
    row = st.lists(values, min_size=6, max_size=6).filter(lambda r: max(r) > -INF)
    return st.lists(row, min_size=1, max_size=4).map(torch.tensor)


@settings(max_examples=200, deadline=None)
@given(
    scores=logits_rows(),
    temperature=st.sampled_from([1.0, 0.5, 0.8, 1.7, 1e-2]),
    top_k=st.sampled_from([0, 1, 2, 5, 6, 50]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-3]),
    min_p=st.sampled_from([0.0, 0.01, 0.05, 0.3, 1.0]),
)
def test_fused_equals_the_chain(scores, temperature, top_k, top_p, min_p):
    """Also with ties, tokens already removed, and extremes."""
    expected = chain(temperature, top_k, top_p, min_p)(None, scores.clone())
    before = scores.clone()
    got = FusedSamplingLogitsWarper(temperature, top_k, top_p, min_p)(None, scores)
    assert torch.equal(scores, before), "wrote into its input"
    if min_p and (expected == -INF).ne(got == -INF).any():
        # Sums in another order: only a token within rounding of min_p's own threshold may differ.
        probs = chain(temperature, top_k, top_p, 0.0)(None, scores.clone()).softmax(-1)
        edge = (probs / (min_p * probs.amax(-1, keepdim=True)) - 1).abs() < 1e-5
        assert not ((expected == -INF).ne(got == -INF) & ~edge).any()
        return
    assert torch.equal(got, expected)


def test_fused_on_a_large_vocabulary():
    scores = torch.randn(8, 50_000) * 4
    for arguments in [(0.7, 50, 0.9, 0.05), (1.0, 0, 0.95, 0.0), (1.3, 40, 1.0, 0.0), (0.6, 0, 1.0, 0.1)]:
        assert torch.equal(
            FusedSamplingLogitsWarper(*arguments)(None, scores), chain(*arguments)(None, scores.clone())
        ), arguments


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", -1),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 2),
    ],
)
def test_fused_refuses(name, value):
    with pytest.raises(ValueError, match=name):
        FusedSamplingLogitsWarper(**{name: value})


def test_draft_vocabulary():
    warper = DraftVocabularyLogitsWarper(torch.tensor([5, 0, 2]), 7)
    scores = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert warper(None, scores).tolist() == [[2, -INF, 3, -INF, -INF, 1, -INF], [5, -INF, 6, -INF, -INF, 4, -INF]]
    assert tuple(warper(None, torch.randn(2, 4, 3)).shape) == (2, 4, 7)
    for ids in ([5, 7], [-1, 2]):
        with pytest.raises(ValueError, match="vocab_size = 7"):
            DraftVocabularyLogitsWarper(torch.tensor(ids), 7)
    with pytest.raises(ValueError, match="vector"):
        DraftVocabularyLogitsWarper(torch.tensor([[1]]), 7)


def test_coupled_noise_in_a_processor_list():
    seeds, scores = [3, 2**60 + 1], torch.randn(2, 9)
    out = hf.LogitsProcessorList([CoupledNoiseLogitsWarper(seeds, [0, 2])])(torch.zeros(2, 6, dtype=torch.long), scores)
    noise = rb.gumbel(torch.tensor(seeds), torch.tensor([6, 4]), torch.tensor([0, 0]), rb.TOKEN_STREAM, 9)
    assert torch.equal(out, scores + noise)


# ---- processors on tree nodes ---------------------------------------------------------------------------------------

VOCAB, PAD, EOS = 48, 0, 11  # selfhash watermarking tries the 40 best tokens
PROMPTS = [[3, 4, 5, 3, 4], [7, 8], [5, 5, 6, 5]]
WIDTH = 5
PADDED = torch.tensor([[PAD] * (WIDTH - len(p)) + p for p in PROMPTS])
GENERATED = [[3, 4], [], [6, 5, 5, 6]]  # rows of a speculative batch run ahead of one another
TREES = ([[5, 3, 4, 3, 5, 3], [8, 7], [5, 6, 11, 5]], [[-1, -1, 0, 1, 2, 3], [-1, 0], [-1, -1, 0, 1]])


class RowDependent(hf.LogitsProcessor):
    """A user's processor that tells rows apart by index and looks at the prefix; checks what it is shown."""

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == len(PROMPTS)
        bias = torch.tensor([10.0, 20.0, 30.0])[:, None] * (
            torch.arange(VOCAB) == (input_ids.sum(1, keepdim=True) % VOCAB)
        )
        return scores + bias


class InPlace(hf.LogitsProcessor):
    """Writes into the scores it is given, and depends on length."""

    def __call__(self, input_ids, scores):
        scores[:, input_ids.shape[1] % VOCAB] = -INF
        return scores


def allowed_by_row(batch_id, input_ids):
    """Depends on the row and on its whole prefix."""
    return [(batch_id + int(input_ids.sum()) + i) % VOCAB for i in range(4)]


def only_after_pair(batch_id, input_ids):
    return [1, 2, 3] if input_ids[-2:].tolist() == [3, 4] else list(range(VOCAB))


def watermark(**kwargs):
    return hf.WatermarkLogitsProcessor(vocab_size=VOCAB, device="cpu", **kwargs)


PROCESSORS = {
    "repetition": lambda: hf.RepetitionPenaltyLogitsProcessor(1.7),
    "repetition, prompt ignored": lambda: hf.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=WIDTH),
    "repetition, prompt ignored by row": lambda: hf.RepetitionPenaltyLogitsProcessor(
        1.7, prompt_ignore_length=torch.tensor([5, 2, 4])
    ),
    "no repeated bigram": lambda: hf.NoRepeatNGramLogitsProcessor(2),
    "no repeated trigram": lambda: hf.NoRepeatNGramLogitsProcessor(3),
    "bad words": lambda: hf.NoBadWordsLogitsProcessor([[4], [3, 5], [5, 3, 4]], eos_token_id=torch.tensor([EOS])),
    "sequence bias": lambda: hf.SequenceBiasLogitsProcessor([[[4], -3.0], [[3, 5], 4.0], [[5, 4, 3], -INF]]),
    "min length": lambda: hf.MinLengthLogitsProcessor(8, torch.tensor([EOS]), device="cpu"),
    "min new tokens": lambda: hf.MinNewTokensLengthLogitsProcessor(WIDTH, 3, torch.tensor([EOS]), device="cpu"),
    "forced bos": lambda: hf.ForcedBOSTokenLogitsProcessor(2),
    "forced eos": lambda: hf.ForcedEOSTokenLogitsProcessor(WIDTH + 4, torch.tensor([EOS]), device="cpu"),
    "exponential decay": lambda: hf.ExponentialDecayLengthPenalty((1, 1.5), torch.tensor([EOS]), WIDTH),
    "prefix allowed, by row": lambda: hf.PrefixConstrainedLogitsProcessor(allowed_by_row, 1),
    "prefix allowed, by prefix": lambda: hf.PrefixConstrainedLogitsProcessor(only_after_pair, 1),
    "encoder repetition": lambda: hf.EncoderRepetitionPenaltyLogitsProcessor(1.3, PADDED),
    "encoder no repeated bigram": lambda: hf.EncoderNoRepeatNGramLogitsProcessor(2, PADDED),
    "watermark": watermark,
    "watermark, selfhash": lambda: watermark(seeding_scheme="selfhash", context_width=2),
    "suppress": lambda: hf.SuppressTokensLogitsProcessor([2, 5], device="cpu"),
    "suppress at begin": lambda: hf.SuppressTokensAtBeginLogitsProcessor([2, 5], WIDTH + 2, device="cpu"),
    "inf and nan": lambda: hf.InfNanRemoveLogitsProcessor(),
    "normalization": lambda: hf.LogitNormalization(),
    "temperature": lambda: hf.TemperatureLogitsWarper(0.6),
    "top k": lambda: hf.TopKLogitsWarper(3),
    "top p": lambda: hf.TopPLogitsWarper(0.7),
    "min p": lambda: hf.MinPLogitsWarper(0.1),
    "top h": lambda: hf.TopHLogitsWarper(0.4),
    "typical": lambda: hf.TypicalLogitsWarper(0.6),
    "epsilon": lambda: hf.EpsilonLogitsWarper(0.05),
    "eta": lambda: hf.EtaLogitsWarper(0.05, device="cpu"),
    "ours, fused": lambda: FusedSamplingLogitsWarper(0.8, 6, 0.9, 0.02),
    "a user's, by row": RowDependent,
    "a user's, in place": InPlace,
    "a user's function": lambda: lambda ids, scores: scores + ids[:, -1:].float() * torch.arange(VOCAB),
}
if OLDEST:  # it knows one length for all rows only
    del PROCESSORS["repetition, prompt ignored by row"]
COMBINED = ["repetition", "no repeated bigram", "a user's, by row", "prefix allowed, by prefix", "min new tokens", "temperature",
            "top k", "top p"]  # fmt: skip


def rows_and_prefixes(processors):
    """One entry per (row, root or node): sequence, drafted path, and its exact padded prefix."""
    trees = DraftTrees.from_lists(*TREES)
    rows, owners, paths, prefixes = [], [], [], []
    for i, prompt in enumerate(PROMPTS):
        seq = Sequence(
            list(prompt), 50, processors=processors, row=i, shown_prompt=[PAD] * (WIDTH - len(prompt)) + list(prompt)
        )
        seq.tokens += GENERATED[i]
        rows.append(seq)
        for node in range(-1, trees.lengths[i]):
            path, at = [], node
            while at >= 0:
                path.insert(0, TREES[0][i][at])
                at = TREES[1][i][at]
            owners.append(seq)
            paths.append(torch.tensor(path, dtype=torch.long))
            prefixes.append([*seq.shown_tokens, *path])
    return owners, paths, prefixes


def plain(make, owners, prefixes, logits):
    """Fresh processors called as transformers' loop would: the whole batch at that length, the node's prefix in its row."""
    out = torch.empty_like(logits)
    for i, (seq, prefix) in enumerate(zip(owners, prefixes, strict=True)):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(1, VOCAB, (len(PROMPTS), len(prefix)), generator=g)
        scores = torch.randn(len(PROMPTS), VOCAB, generator=g)
        ids[seq.row], scores[seq.row] = torch.tensor(prefix), logits[i]
        out[i] = hf.LogitsProcessorList(make())(ids, scores)[seq.row]
    return out


def compare(make, everywhere=True):
    """`everywhere`: also below nodes that the processors forbid, for which code of the user's is not called."""
    nodes = NodeProcessors(hf.LogitsProcessorList(make()), PADDED, PAD)
    owners, paths, prefixes = rows_and_prefixes(nodes)
    logits = torch.randn(len(owners), VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    before = logits.clone()
    got = process_logits(owners, paths if needs_prefix(owners) else None, logits)
    assert torch.equal(logits, before), "the raw logits were changed"
    expected = plain(make, owners, prefixes, logits)
    places = {(seq.row, *prefix): i for i, (seq, prefix) in enumerate(zip(owners, prefixes, strict=True))}
    parents = [places.get((seq.row, *prefix[:-1])) for seq, prefix in zip(owners, prefixes, strict=True)]
    possible = []
    for i, (parent, prefix) in enumerate(zip(parents, prefixes, strict=True)):
        allowed = parent is None or (parent in possible and bool(expected[parent, prefix[-1]] > -torch.inf))
        possible += [i] if allowed or everywhere else []
    assert len(possible) >= len(PROMPTS)
    assert torch.allclose(got[possible], expected[possible], rtol=1e-6, atol=1e-6)
    return logits, got


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_node_gets_what_plain_decoding_would_give_it(name):
    logits, got = compare(lambda: [PROCESSORS[name]()], everywhere=not name.startswith("prefix allowed"))
    untouched = {"forced bos", "inf and nan"}  # prefixes are longer than one token; logits are finite
    assert torch.equal(logits, got) == (name in untouched), "the example does not exercise the processor"


def test_combined():
    compare(lambda: [PROCESSORS[name]() for name in COMBINED], everywhere=False)


def test_forced_bos_on_an_empty_prompt():
    """It acts on prefixes of length one."""
    nodes = NodeProcessors(hf.LogitsProcessorList([hf.ForcedBOSTokenLogitsProcessor(2)]), torch.tensor([[5]]), PAD)
    seq = Sequence([5], 9, processors=nodes)
    got = process_logits([seq, seq], [torch.tensor([], dtype=torch.long), torch.tensor([2])], torch.zeros(2, VOCAB))
    assert got[0].argmax() == 2 and got[0].isinf().sum() == VOCAB - 1 and not got[1].any()


BUILTIN = [n for n in dir(hf) if n.endswith(("LogitsProcessor", "LogitsWarper", "LengthPenalty", "LogitNormalization"))]


@pytest.mark.parametrize("name", BUILTIN)
def test_no_builtin_processor_is_overlooked(name):
    """A processor that transformers adds must be looked at: is it tested here, refused, or for other kinds of models?"""
    tested = {type(make()).__name__ for make in PROCESSORS.values()}
    refused = {"SynthIDTextWatermarkLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"}
    audio = {
        "AlternatingCodebooksLogitsProcessor", "BarkEosPrioritizerLogitsProcessor", "ClassifierFreeGuidanceLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor", "DiaEOSChannelFilterLogitsProcessor", "DiaEOSDelayPatternLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
    }  # fmt: skip
    assert name in tested | refused | audio | {"LogitsProcessor"}


ENCODER = {
    "repetition": lambda: hf.EncoderRepetitionPenaltyLogitsProcessor(1.3, PADDED[:2]),
    "no repeated bigram": lambda: hf.EncoderNoRepeatNGramLogitsProcessor(2, PADDED[:2]),
}


if OLDEST:  # it penalises the first rows for all prompts, whoever's they are
    del ENCODER["repetition"]


@pytest.mark.parametrize("name", ENCODER)
def test_copies_of_a_prompt_share_what_is_known_of_it(name):
    """generate() makes these processors before it expands the batch for num_return_sequences: row i has prompt i // n."""
    expanded = PADDED[:2].repeat_interleave(2, dim=0)
    nodes = NodeProcessors(hf.LogitsProcessorList([ENCODER[name]()]), expanded, PAD)
    tokens = [[3, 4], [5, 3], [3, 7], [8, 7]]
    rows = [Sequence([*expanded[i].tolist(), *tokens[i]], 50, processors=nodes, row=i) for i in range(4)]
    logits = torch.randn(4, VOCAB)
    ids = torch.tensor([seq.tokens for seq in rows])
    expected = ENCODER[name]()(ids, logits.clone())
    assert torch.equal(process_logits(rows, [ids[0, :0]] * 4, logits), expected)
    assert torch.equal(process_logits(rows[3:], [ids[0, :0]], logits[3:]), expected[3:])
    assert not torch.equal(expected[2:], logits[2:])


def test_stateful_processors_are_refused():
    processor = hf.SynthIDTextWatermarkLogitsProcessor(3, [1, 2, 3], 64, 0, 16, device="cpu")
    with pytest.raises(ValueError, match="SynthIDTextWatermarkLogitsProcessor keeps state"):
        NodeProcessors(hf.LogitsProcessorList([processor]), PADDED, PAD)


def test_rows_with_processors_of_their_own():
    """Rows of one batch may have different processors, or none."""
    cold = NodeProcessors(hf.LogitsProcessorList([hf.TemperatureLogitsWarper(0.5)]), PADDED, PAD)
    few = NodeProcessors(hf.LogitsProcessorList([hf.TopKLogitsWarper(1)]), PADDED, PAD)
    rows = [Sequence([1], 9, processors=p) for p in (cold, None, few, cold)]
    logits = torch.randn(4, VOCAB)
    got = process_logits(rows, None, logits)
    assert torch.equal(got[[0, 3]], logits[[0, 3]] / 0.5) and torch.equal(got[1], logits[1])
    assert got[2].isfinite().sum() == 1
    assert not needs_prefix(rows)


@pytest.mark.parametrize(
    ("before", "sampling"),
    [
        ([], (1.0, 5, 0.9, 0.0)),
        ([hf.RepetitionPenaltyLogitsProcessor(1.2)], (0.7, 5, 0.9, 0.1)),
        ([hf.TypicalLogitsWarper(0.9)], (0.7, 0, 1.0, 0.1)),
    ],
    ids=["alone", "all after another", "some after another"],
)
def test_sampling_parameters_can_be_left_to_others(before, sampling):
    """What a list ends with is known, and `apply` without it is the rest."""
    warpers = [*before, *chain(*sampling)]
    nodes = NodeProcessors(hf.LogitsProcessorList(warpers), PADDED, PAD)
    assert nodes.sampling == SamplingParameters(*sampling)
    fused = NodeProcessors(hf.LogitsProcessorList([*before, FusedSamplingLogitsWarper(*sampling)]), PADDED, PAD)
    assert fused.sampling == nodes.sampling
    row, logits = Sequence([1, 2], 9, processors=nodes), torch.randn(1, VOCAB)
    expected = logits.clone()
    for processor in before:
        expected = processor(torch.tensor([row.tokens]), expected)
    assert torch.equal(process_logits([row], [torch.tensor([], dtype=torch.long)], logits, whole=False), expected)


@pytest.mark.parametrize(
    "warpers",
    [
        [],
        [hf.TopKLogitsWarper(3), hf.TypicalLogitsWarper(0.9)],
        [hf.TopKLogitsWarper(3, filter_value=-1.0)],
        [hf.TopPLogitsWarper(0.5, min_tokens_to_keep=2)],
    ],
    ids=["none", "not last", "another filler", "two tokens kept"],
)
def test_what_kernels_cannot_do_is_not_left_to_them(warpers):
    assert split_sampling(warpers) == (warpers, None)


def test_only_what_stands_in_transformers_order_is_left_to_others():
    """Top-p before top-k keeps other tokens than the kernel's top-k before top-p."""
    top_p, top_k, min_p = hf.TopPLogitsWarper(0.5), hf.TopKLogitsWarper(3), hf.MinPLogitsWarper(0.1)
    assert split_sampling([top_p, top_k, min_p]) == ([top_p], SamplingParameters(top_k=3, min_p=0.1))
    assert split_sampling([top_k, top_k]) == ([top_k], SamplingParameters(top_k=3))
