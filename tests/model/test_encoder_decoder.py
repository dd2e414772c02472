"""Encoder-decoder targets write the text of plain generate(), whatever drafts, however their rows are packed."""

import pytest
import torch
import transformers
from encoders import BART_SIZES, DRAFT, IDS, NEW, NGRAM, PAIRS, SIZES, SUFFIX, TREE, VOCAB, build, inputs_for, of
from families import perturbed
from oracle import tiny_llama
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    LogitsProcessor,
)

import hf_specdec
from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.core.names import CACHE
from hf_specdec.model import architectures
from hf_specdec.model.encoder_decoder import forward


def written(model, inputs, config=None, **options):
    """The output as a dict, whose ids Whisper then returns with the prompt."""
    given = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1, "return_dict_in_generate": True, **options}
    return model.generate(**inputs, speculative_config=config, **given)


def assert_exact(model, inputs, configs, **options):
    plain = written(model, inputs, **options).sequences
    assert len(plain) == 1 or (len(set(map(tuple, plain.tolist()))) == len(plain) and len(plain.unique()) > 4), (
        "too plain a text"
    )
    for config in configs:
        more = {"assistant_model": perturbed(model, 0.03)} if config["method"] == "draft_model" else {}
        assert torch.equal(written(model, inputs, config, **options, **more).sequences, plain), config


def _known(family: str):
    broken = family == "umt5" and transformers.__version__.startswith("5.17.")
    marks = [pytest.mark.skipif(broken, reason="in transformers 5.17 its tokens see later ones")]
    if family in (
        "mbart",
        "plbart",
        "pegasus",
        "blenderbot",
        "mt5",
        "speech_to_text",
    ):  # others have their kinds of layers
        marks.append(pytest.mark.slow)
    return pytest.param(family, marks=marks)


# Families whose steps the native library runs; BART's rounding errors at these sizes are too large for it.
NATIVE = {
    "t5",
    "mt5",
    "umt5",
    "mbart",
    "plbart",
    "marian",
    "pegasus",
    "blenderbot",
    "blenderbot-small",
    "whisper",
    "moonshine",
    "t5gemma",
    "vision mbart",
}


@pytest.mark.parametrize("family", map(_known, [*SIZES, *PAIRS]))
def test_text_is_plain_generates(family):
    """One row and five ragged ones; chains, a tree, and a draft model with its own encoder, whose rows are preempted."""
    model = of(family)
    path = {"native": True} if family in NATIVE else {"native": False}  # True: an error if the library cannot
    assert_exact(model, inputs_for(family, rows=1, seed=2), [{**NGRAM, **path}, {**NGRAM, "native": False}])
    few_blocks = {**DRAFT, "num_blocks": 7, "block_size": 4}
    assert_exact(model, inputs_for(family), [NGRAM, TREE, few_blocks])


@pytest.mark.parametrize("family", ["bart", "m2m_100", "whisper", "moonshine", "t5gemma", "text gpt2", "text bert"])
def test_gathered_keys(family, monkeypatch):
    """Where attention cannot read pages, the model attends to the sources of all rows under one mask."""
    monkeypatch.setattr(architectures, "reads_pages", lambda model: False)
    model = build(family, seed=2)
    assert_exact(model, inputs_for(family), [NGRAM, TREE])
    assert all(entry.target.gather for entry in hf_specdec.integration.kept_decoders(model))


class Pads(LogitsProcessor):
    """Every fifth token is a padding token."""

    def __call__(self, input_ids, scores):
        return scores + 1e4 * torch.eye(VOCAB)[0] if input_ids.shape[1] % 5 == 0 else scores


@pytest.mark.parametrize("family", ["m2m_100", "speech_to_text"])
def test_padding_inside_a_text(family):
    """Its vector in the table of positions is its own, and programs do not know it: the modules run these steps."""
    options = {"logits_processor": [Pads()], "max_new_tokens": 12, "eos_token_id": None}
    assert (written(of(family), inputs_for(family), **options).sequences == 0).any()
    assert_exact(of(family), inputs_for(family), [{**NGRAM, "native": True}, TREE], **options)


def test_every_method_and_sampling():
    """What is learnt in a text does not change it; samples depend on seeds, not on drafts."""
    model, inputs = of("mbart"), inputs_for("mbart")
    methods = [*SUFFIX, *({"method": name} for name in ("none", "lookahead", "auto"))]
    assert_exact(model, inputs, methods)
    sampled = [
        written(model, inputs, {**method, "seed": 5}, do_sample=True, num_return_sequences=2).sequences
        for method in (*methods[:-1], NGRAM, TREE)
    ]
    assert all(torch.equal(each, sampled[0]) for each in sampled) and len(set(map(tuple, sampled[0].tolist()))) == 10
    output = written(model, inputs, NGRAM)
    assert output.speculation.num_new_tokens == 5 * NEW and "speculation" not in output


class Repeats(LogitsProcessor):
    """Lets every row repeat its source, but for every 12th token."""

    def __init__(self, sources):
        self.sources = sources

    def __call__(self, input_ids, scores):
        at = input_ids.shape[1] - 1
        if at % 12:
            scores = scores.index_put(
                tuple(torch.stack([torch.arange(len(scores)), self.sources[:, at]])), torch.tensor(1e4)
            )
        return scores


def test_lookups_in_the_source():
    """n-grams and suffixes of what the encoder has read are drafted, unless the encoder has a vocabulary of its own."""
    ids = torch.randint(3, VOCAB, (3, 30), generator=torch.Generator().manual_seed(1))
    options = {"logits_processor": [Repeats(ids)], "max_new_tokens": 28}
    plain = written(of("marian"), {"input_ids": ids}, **options).sequences
    for config in (NGRAM, *SUFFIX):
        output = written(of("marian"), {"input_ids": ids}, config, **options)
        assert torch.equal(output.sequences, plain) and output.speculation.mean_accepted_length > 2, config
    for own in (
        build("marian", share_encoder_decoder_embeddings=False, decoder_vocab_size=VOCAB),
        build("text gpt2", vocab_size=VOCAB + 4),
    ):
        output = written(own, {"input_ids": ids}, NGRAM, **options)
        assert output.speculation.mean_accepted_length < 1.3


@pytest.mark.parametrize("family", ["marian", "t5"])
def test_returned_tensors(family):
    model, inputs = of(family), inputs_for(family)
    options = {"output_logits": True, "output_hidden_states": True}
    plain, output = written(model, inputs, **options), written(model, inputs, NGRAM, **options)
    assert torch.allclose(torch.stack(output.logits), torch.stack(plain.logits), atol=2e-3)
    for ours, theirs in zip(output.decoder_hidden_states, plain.decoder_hidden_states, strict=True):
        assert torch.allclose(torch.stack(ours), torch.stack(theirs), atol=2e-3)
    for ours, theirs in zip(output.encoder_hidden_states, plain.encoder_hidden_states, strict=True):
        assert torch.equal(ours, theirs)


def test_decoder_prompts():
    """BART's positions, and those of a pair's decoder, count the padding of a decoder prompt; Whisper's do not; Marian's prompt may be
    anything without padding."""
    prompts = torch.tensor([[1, 0, 0, 7, 8], [1, 5, 9, 7, 8], [0, 0, 0, 1, 4]])
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    for family in ("bart", "whisper", "t5", "t5gemma", "text gpt2", "text bert"):
        given = {**inputs_for(family, rows=3), "decoder_input_ids": prompts, "decoder_attention_mask": mask}
        assert_exact(of(family), given, [NGRAM, {**TREE, "num_blocks": 7, "block_size": 4}])
    given = {**inputs_for("m2m_100", rows=3), "decoder_input_ids": prompts[:, 3:]}
    assert_exact(of("m2m_100"), given, [NGRAM])
    for wrong in ({"decoder_input_ids": prompts}, {"decoder_input_ids": prompts, "decoder_attention_mask": mask}):
        with pytest.raises(UnsupportedModel, match="M2M100ForConditionalGeneration counts positions in padded"):
            written(of("m2m_100"), {**inputs_for("m2m_100", rows=3), **wrong}, NGRAM)


def test_other_arguments():
    """Forced and ending tokens, processors that look at the encoder's ids, and embeddings for the encoder."""
    model, inputs = of("mbart"), inputs_for("mbart")
    assert_exact(
        model, inputs, [NGRAM, TREE], forced_bos_token_id=9, encoder_no_repeat_ngram_size=2, repetition_penalty=1.3
    )
    options = {"encoder_repetition_penalty": 1.5}
    options["eos_token_id"] = written(model, inputs, **options).sequences[:3, 7].tolist()
    assert torch.equal(written(model, inputs, TREE, **options).sequences, written(model, inputs, **options).sequences)
    embedded = {**inputs, "inputs_embeds": model.get_encoder().embed_tokens(inputs["input_ids"]).detach()}
    del embedded["input_ids"]
    assert_exact(model, embedded, [NGRAM, DRAFT])


def test_padding_that_the_model_writes():
    """In M2M100's table, a pad token has no position, wherever it stands."""
    inputs = inputs_for("m2m_100")
    for pad in range(3, VOCAB):
        model = build("m2m_100", pad_token_id=pad)
        plain = written(model, inputs, output_logits=True)
        if (plain.sequences[:, 1:-4] == pad).any():
            break
    output = written(model, inputs, NGRAM, output_logits=True)
    assert torch.equal(output.sequences, plain.sequences)
    assert torch.allclose(torch.stack(output.logits), torch.stack(plain.logits), atol=2e-3)


def test_soft_capping():
    """Eager attention caps scores in both attentions; sdpa cannot, and refuses."""
    capped = {part: {**sizes, "attn_logit_softcapping": 2.0} for part, sizes in SIZES["t5gemma"].items()}
    model = build("t5gemma", attn_implementation="eager", **capped)
    assert_exact(model, inputs_for("t5gemma"), [NGRAM, TREE])


def test_tables_that_grow_and_tables_that_end():
    """M2M100 computes more positions when it needs them; where a table ends, a request beyond it is refused."""
    model = build("m2m_100", max_position_embeddings=8)
    assert_exact(model, inputs_for("m2m_100"), [NGRAM])
    grows = build("m2m_100")  # in the middle of a call: the program reads the table as it was
    output = written(grows, inputs_for("m2m_100"), {**NGRAM, "native": True}, max_new_tokens=90)
    assert torch.equal(output.sequences, written(grows, inputs_for("m2m_100"), max_new_tokens=90).sequences)
    assert_exact(of("bart"), inputs_for("bart"), [NGRAM, TREE, DRAFT], max_new_tokens=64)  # the last one is never read
    with pytest.raises(ValueError, match=r"66 tokens .* were requested from .*, which has 64 positions"):
        written(of("bart"), inputs_for("bart"), NGRAM, max_new_tokens=65)
    for family in ("bart", "whisper"):
        with pytest.raises(ValueError, match=r"101 tokens .* were requested from .*, which has 64 positions|exceeds"):
            written(of(family), inputs_for(family), NGRAM, max_new_tokens=100)


def test_a_hook_is_compared_token_by_token():
    model, inputs = build("bart"), inputs_for("bart")
    layer = model.model.decoder.layers[0]
    layer.register_forward_hook(lambda module, args, output: output * 1.5)
    assert_exact(model, inputs, [NGRAM])
    layer.register_forward_hook(lambda module, args, output: output - output.mean(1, keepdim=True))
    with pytest.raises(UnsupportedModel, match="a hook on BartDecoderLayer"):
        written(model, inputs, NGRAM)


# ---- refused ----------------------------------------------------------------------------------------------------------


def test_other_families_are_refused_before_any_work():
    sizes = {
        **BART_SIZES,
        "attention_window": 8,
        "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    }
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("led", **IDS, **sizes)).eval()
    model.get_encoder().register_forward_pre_hook(lambda *_: pytest.fail("the encoder ran"))
    with pytest.raises(
        UnsupportedModel, match="LEDForConditionalGeneration is an encoder-decoder model of another family"
    ):
        written(model, inputs_for("bart"), NGRAM)
    model = build("vision mbart")
    model.config.decoder.model_type = "roberta"  # counts positions from its padding id
    with pytest.raises(
        UnsupportedModel, match="VisionEncoderDecoderModel with 'roberta' is an encoder-decoder model of another"
    ):
        written(model, inputs_for("vision mbart"), NGRAM)


def _bad_calls():
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    return [
        ({"num_beams": 2}, NGRAM, "cannot be combined with beam search.*num_beams=1"),
        ({"output_attentions": True}, NGRAM, "output_attentions .* attn_implementation='eager'"),
        ({CACHE: cache}, NGRAM, "not a EncoderDecoderCache"),
        ({"decoder_inputs_embeds": torch.zeros(5, 1, 48)}, NGRAM, "not supported with it: decoder_inputs_embeds"),
        ({}, {**NGRAM, "deterministic": True}, "deterministic cannot be used with BartForConditionalGeneration"),
        ({}, {**NGRAM, "compile": True}, "compile cannot be used with BartForConditionalGeneration"),
        ({}, {**NGRAM, "cuda_graphs": True}, "'cuda_graphs' cannot be used with BartForConditionalGeneration"),
        ({}, {**NGRAM, "target_quantization": "wint8"}, "quantization.* cannot be used with BartForCond"),
        (
            {},
            {"method": "extract_hidden_states", "output_dir": "nowhere"},
            "reads hidden states of decoder-only targets",
        ),
        ({}, {"method": "draft_model", "early_exit": 1}, "early_exit cannot be used with BartForConditionalGeneration"),
    ]


@pytest.mark.parametrize(("options", "config", "message"), _bad_calls())
def test_bad_calls(options, config, message):
    with pytest.raises(ValueError, match=message):
        written(of("bart"), inputs_for("bart"), config, **options)


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_row_of_padding_alone(family):
    """No key for its tokens to attend to: an error, whichever way it attends."""
    inputs = inputs_for(family)
    inputs["attention_mask"][2] = 0
    with pytest.raises(ValueError, match="attention_mask hides all of a row's input"):
        written(of(family), inputs, NGRAM)


def test_an_interrupt_leaves_no_mark(monkeypatch):
    """Between a layer's keys and its attention: the next call of another model attends to its own keys."""

    def interrupt(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(forward._CrossLayer, "values", property(interrupt))
        written(of("bart"), inputs_for("bart"), {**NGRAM, "native": False})
    model, inputs = tiny_llama(), {"input_ids": torch.arange(4, 12)[None]}
    plain = model.generate(**inputs, max_new_tokens=6)
    assert torch.equal(model.generate(**inputs, max_new_tokens=6, speculative_config={**NGRAM, "native": False}), plain)


def test_drafters_whose_encoder_reads_otherwise():
    """Another precision drafts; positions or features that do not fit are named."""
    inputs = inputs_for("moonshine")
    plain = written(of("moonshine"), inputs).sequences
    drafter = build("moonshine", 2).bfloat16()
    assert torch.equal(written(of("moonshine"), inputs, DRAFT, assistant_model=drafter).sequences, plain)
    with pytest.raises(UnsupportedModel, match=r"BartFor.* cannot draft: its encoder cannot read the target's input"):
        written(of("bart"), inputs_for("bart"), DRAFT, assistant_model=build("bart", 3, max_position_embeddings=12))


def test_what_needs_a_source_says_so(model):
    with pytest.raises(ValueError, match="needs what an encoder has read, and LlamaForCausalLM has no encoder"):
        model.generate(torch.arange(4, 9)[None], speculative_config=DRAFT, assistant_model=of("bart"))
    outputs = of("bart").get_encoder()(input_ids=inputs_for("bart")["input_ids"])
    for given in (outputs, (outputs.last_hidden_state,)):
        assert_exact(of("bart"), {"encoder_outputs": given, "input_ids": inputs_for("bart")["input_ids"]}, [NGRAM])
    mask = inputs_for("bart")["attention_mask"]
    assert_exact(of("bart"), {"encoder_outputs": outputs, "attention_mask": mask}, [NGRAM])
    with pytest.raises(UnsupportedModel, match="cannot draft: its encoder needs input_ids"):
        written(of("bart"), {"encoder_outputs": outputs}, DRAFT, assistant_model=perturbed(of("bart"), 0.03))
