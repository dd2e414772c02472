"""Every generator also drafts for transformers' own assisted generation (batch 1, chains)."""

import pytest
import torch
from oracle import assert_clean, drafter_of, method_configs, ragged, tiny_llama
from scipy import stats

import hf_specdec

CONFIGS = ["ngram", "suffix", "chain", "tree", "early exit", "none"]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def configs(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("drafter")
    drafter_of(model).save_pretrained(path)
    return {
        **method_configs(str(path)),
        "suffix": {"method": "suffix"},
        "early exit": {"method": "draft_model", "early_exit": 2, "num_speculative_tokens": 3},
    }


@pytest.fixture(params=CONFIGS)
def config(request, configs):
    if request.param == "suffix":
        pytest.importorskip("arctic_inference")
    return configs[request.param]


class Counted:
    """Counts a model's forwards while inside."""

    def __init__(self, model):
        self.model, self.forwards = model, 0

    def __enter__(self):
        self.hook = self.model.lm_head.register_forward_pre_hook(self._count)
        return self

    def _count(self, *_):
        self.forwards += 1

    def __exit__(self, *_):
        self.hook.remove()


def test_output_is_plain_and_drafts_are_accepted(model, config):
    """Two texts in a row through one generator; its state follows transformers' loop."""
    with hf_specdec.assisted_loop(model, config) as drafter:
        for lengths in ([9], [5], [20]):
            inputs = ragged(lengths)
            plain = model.generate(**inputs, max_new_tokens=40)
            calls = []
            get_candidates = drafter.get_candidates
            drafter.get_candidates = lambda ids, get=get_candidates, calls=calls: calls.append(ids.shape[1]) or get(ids)
            output = model.generate(**inputs, max_new_tokens=40, prompt_lookup_num_tokens=1)
            drafter.get_candidates = get_candidates
            assert torch.equal(output, plain)
            if config["method"] == "draft_model" and "early_exit" not in config:
                assert len(calls) < 35, "several drafted tokens are accepted in one round"
    assert "_get_candidate_generator" not in vars(model) and model.config._attn_implementation != "hf_specdec"
    generator = drafter.generator
    assert (
        drafter.sequence is None
        and not getattr(generator, "indices", None)
        and not getattr(generator, "kept_nodes", None)
    )
    if config["method"] == "draft_model":
        assert generator.cache.tables == {} and generator.cache.pool.num_used == 0
    assert_clean(model)


def test_processors_and_eos(model, config):
    arguments = dict(
        max_new_tokens=30, repetition_penalty=1.3, no_repeat_ngram_size=3, eos_token_id=[5, 9, 11], min_new_tokens=4
    )
    plain = model.generate(**ragged([7]), **arguments)
    with hf_specdec.assisted_loop(model, config):
        output = model.generate(**ragged([7]), **arguments, prompt_lookup_num_tokens=1)
    # transformers 5.17's own loop runs past an end token inside an accepted run
    assert torch.equal(output[:, : plain.shape[1]], plain)


def test_parts_do_not_draft_trees_of_which_one_path_is_verified(model):
    parts = {"first": {"method": "ngram"}, "second": {"method": "token_recycling"}}
    inputs, drafts = ragged([20]), []
    with hf_specdec.assisted_loop(model, {"method": "hybrid", **parts}) as drafter:
        propose = drafter.generator.propose
        drafter.generator.propose = lambda *args: drafts.append(propose(*args)) or drafts[-1]
        model.generate(**inputs, max_new_tokens=40, prompt_lookup_num_tokens=1)
    assert any(draft.num_nodes for draft in drafts)
    assert all(draft.depths[0, : draft.lengths[0]].tolist() == list(range(1, draft.lengths[0] + 1)) for draft in drafts)


def test_text_that_outgrows_the_room_first_given(configs):
    model = tiny_llama(max_position_embeddings=1024)
    inputs = ragged([2])
    plain = model.generate(**inputs, max_new_tokens=300)
    with hf_specdec.assisted_loop(model, configs["chain"]):
        assert torch.equal(model.generate(**inputs, max_new_tokens=300, prompt_lookup_num_tokens=1), plain)


def test_assistant_model_and_one_sequence_only(model):
    inputs = ragged([7])
    with hf_specdec.assisted_loop(model, {"method": "draft_model"}, assistant_model=drafter_of(model)) as drafter:
        output = model.generate(**inputs, max_new_tokens=12, prompt_lookup_num_tokens=1)
        assert torch.equal(output, model.generate(**inputs, max_new_tokens=12))
        with pytest.raises(ValueError, match="one sequence"):
            drafter.get_candidates(ragged([4, 5])["input_ids"])


def test_an_error_inside_leaves_nothing_behind(model, configs):
    with pytest.raises(RuntimeError, match="mine"), hf_specdec.assisted_loop(model, configs["chain"]) as drafter:
        model.generate(**ragged([7]), max_new_tokens=12, prompt_lookup_num_tokens=1)
        raise RuntimeError("mine")
    assert "_get_candidate_generator" not in vars(model) and drafter.sequence is None


@pytest.mark.long
def test_sampling_has_the_targets_distribution():
    """The second new token's distribution, over many calls, against the target's own probabilities."""
    model = tiny_llama(vocab_size=7, initializer_range=0.2, pad_token_id=None, bos_token_id=None)
    ids, draws = torch.tensor([[5, 6, 5, 6, 5]]), 600
    with torch.no_grad():
        first = model(ids).logits[0, -1].softmax(0)
        after = [model(torch.cat([ids, torch.tensor([[token]])], 1)).logits[0, -1].softmax(0) for token in range(7)]
    expected = sum(p * q for p, q in zip(first, after, strict=True)).double().numpy()
    counts = torch.zeros(7)
    with hf_specdec.assisted_loop(model, {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}):
        for _ in range(draws):
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=2,
                do_sample=True,
                top_k=0,
                prompt_lookup_num_tokens=1,
            )
            counts[output[0, 6]] += 1
    assert stats.chisquare(counts.numpy(), expected / expected.sum() * draws).pvalue > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("method", [{"method": "ngram"}, {"method": "draft_model", "model": "tiny-draft"}])
def test_text_ends_at_stop_strings_inside_a_draft(tiny_model, tiny_tokenizer, method):
    inputs = tiny_tokenizer("Tom went to the park. Tom went to the park. Tom went to", return_tensors="pt")
    for stop in ("the", "park.", "ark. T", "Tom", "was"):
        more = {"max_new_tokens": 40, "stop_strings": [stop], "tokenizer": tiny_tokenizer}
        plain = tiny_model.generate(**inputs, **more)
        with hf_specdec.assisted_loop(tiny_model, method):
            assert torch.equal(tiny_model.generate(**inputs, **more, prompt_lookup_num_tokens=1), plain)


@pytest.mark.parametrize(
    "key, value",
    [("kv_cache_dtype", "int8"), ("target_quantization", "wint8"), ("deterministic", True), ("seed", 1), ("trace", True),
     ("rejection_sample_method", "typical"), ("prediction", [5, 6])],
)  # fmt: skip
def test_keys_of_our_own_loop_are_refused(key, value):
    """transformers' loop would not read them, so that the text would be another one than asked for."""
    config, model = {"method": "ngram", key: value}, tiny_llama()
    with pytest.raises(ValueError, match=f"'{key}'.* is for generate"), hf_specdec.assisted_loop(model, config):
        pass
