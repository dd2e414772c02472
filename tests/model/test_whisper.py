"""Whisper's own generate() and the speech pipeline: each call of the mixin's generate() inside drafts, and the transcript stays."""

import copy

import numpy as np
import peft
import pytest
import torch
from combinations import every_second
from encoders import DRAFT, END, MARKS, NGRAM, PREVIOUS, TREE, build, whisper
from transformers import WhisperFeatureExtractor, WhisperForCausalLM, WhisperTokenizer, pipeline

import hf_specdec
from hf_specdec.core.errors import UnsupportedModel

TO_PREVIOUS = {"return_timestamps": True, "condition_on_prev_tokens": True, "temperature": 0.0, "language": "en"}
PROMPT = torch.tensor([PREVIOUS, 9, 12, 15])


def speech(num_frames: int):
    """Three recordings of different lengths; one segment has 40 frames."""
    mask = (torch.arange(num_frames) < torch.tensor([num_frames, num_frames * 2 // 3, num_frames // 2])[:, None]).long()
    features = torch.randn(3, 8, num_frames, generator=torch.Generator().manual_seed(1))
    return {"input_features": features * mask[:, None], "attention_mask": mask}


def transcript(model, inputs, options, config=None, **more):
    output = model.generate(**copy.deepcopy(inputs), **options, **more, num_beams=1, speculative_config=config)
    return output if torch.is_tensor(output) else output["sequences"]


CASES = {
    "short": (40, {"language": "en"}),
    "detected language": (40, {}),
    "prompt": (40, {"language": "de", "prompt_ids": PROMPT}),
    "times": (40, {"return_timestamps": True}),
    "as a dict": (40, {"language": "en", "return_dict_in_generate": True}),
    "long": (130, {"return_timestamps": True, "return_segments": True}),
    "long, conditioned": (130, TO_PREVIOUS),
    "long, prompted": (130, {**TO_PREVIOUS, "prompt_ids": PROMPT, "prompt_condition_type": "all-segments"}),
    "thresholds": (130, {**TO_PREVIOUS, "logprob_threshold": -1.0, "compression_ratio_threshold": 1.35, "no_speech_threshold": 0.6}),
}  # fmt: skip


@pytest.mark.parametrize("case", every_second(CASES))
def test_transcripts(case):
    num_frames, options = CASES[case]
    for seed, config in enumerate((NGRAM, TREE)):
        model, inputs = whisper(seed), speech(num_frames)
        plain = transcript(model, inputs, options)
        assert len(plain.unique()) > 5
        assert torch.equal(transcript(model, inputs, options, config), plain), config


@pytest.mark.long
def test_silence_is_still_detected_and_does_not_stop_drafts():
    """A segment whose first token says 'no speech' is skipped; the processor that looks at it changes no score."""
    model, inputs = whisper(), speech(130)
    options = {**TO_PREVIOUS, "logprob_threshold": 10.0}
    spoken, calls = transcript(model, inputs, options), []
    for threshold in (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 5e-3, 2e-3):
        options["no_speech_threshold"] = threshold
        try:
            plain = transcript(model, inputs, options)
        except IndexError:  # every segment of a recording is skipped
            continue
        if plain.shape != spoken.shape or not torch.equal(plain, spoken):
            break
    else:
        pytest.fail("no threshold tells segments apart")
    counting = model.proj_out.register_forward_hook(lambda *_: calls.append(1))
    counts = []
    for config in ({"method": "none"}, TREE):
        calls.clear()
        assert torch.equal(transcript(model, inputs, options, config), plain)
        counts.append(len(calls))
    counting.remove()
    assert counts[1] < counts[0]


@pytest.mark.long
@pytest.mark.parametrize(("layers", "kind"), [(1, "WhisperForConditionalGeneration"), (2, "WhisperForCausalLM")])
def test_a_drafter_by_name(layers, kind, tmp_path):
    """`assistant_model=` makes Whisper drop begin_suppress_tokens; a drafter in the configuration does not. A drafter whose encoder is as
    large as the target's is only a decoder on the target's encoder output: where it is the target's own decoder, it knows the text."""
    model, inputs = whisper(), speech(130)
    drafter = model if layers == 2 else build("whisper", 3, encoder_layers=2)
    drafter.save_pretrained(tmp_path)
    counting, counts = model.proj_out.register_forward_hook(lambda *_: counts.append(1)), []
    for options in ({"return_timestamps": True}, TO_PREVIOUS):
        plain = transcript(model, inputs, options, {"method": "none"})
        num_plain = len(counts)
        counts.clear()
        for config in (DRAFT, {"method": "draft_model", "speculative_token_tree": [[0], [1], [0, 0], [0, 0, 0]]}):
            assert torch.equal(transcript(model, inputs, options, {**config, "model": str(tmp_path)}), plain)
        assert (len(counts) / 2 < 0.7 * num_plain) == (layers == 2)
        counts.clear()
    counting.remove()
    last = hf_specdec.integration.kept_decoders(model)[-1]
    assert type(last.generator.drafter.model).__name__ == kind


@pytest.mark.parametrize("adapted", [False, True])
def test_pipeline(adapted):
    """Recordings of one segment and of several; beams, which Whisper's pipeline may choose itself, name what to pass."""
    model = copy.deepcopy(whisper(2))
    if adapted:
        torch.manual_seed(5)
        config = peft.LoraConfig(target_modules=["q_proj", "fc1", "proj_out"], lora_alpha=1, init_lora_weights=False)
        model = peft.get_peft_model(model, config).eval()
    names = {i: f"<|{0.02 * (i - 74):.2f}|>" if i >= 74 else f"<|{i}|>" for i in range(60, 96)} | MARKS
    vocab = {chr(0x21 + i): i for i in range(60)} | {name: i for i, name in names.items()}
    special = {f"{kind}_token": MARKS[END] for kind in ("unk", "bos", "eos", "pad")}
    tokenizer = WhisperTokenizer(vocab=vocab, merges=[], **special)
    tokenizer.add_special_tokens({"additional_special_tokens": [name for i, name in names.items() if i > END]})
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    extractor.nb_max_frames, extractor.n_samples = 40, 40 * extractor.hop_length
    recognize = pipeline("automatic-speech-recognition", model, tokenizer=tokenizer, feature_extractor=extractor)
    draw = np.random.default_rng(0)
    audio = [draw.standard_normal(num_samples).astype("float32") for num_samples in (6000, 14400, 11200)]

    def texts(**options):
        recordings = [{"raw": own.copy(), "sampling_rate": 16000} for own in audio]
        return recognize(
            recordings, return_timestamps=True, generate_kwargs={"language": "en", "temperature": 0.0, **options}
        )

    plain = texts(num_beams=1)
    assert any(own["text"] for own in plain)
    assert texts(num_beams=1, speculative_config=NGRAM) == plain
    if adapted:
        with model.disable_adapter():
            assert texts(num_beams=1) != plain
    with pytest.raises(ValueError, match=r"cannot be combined with beam search.*num_beams=1"):
        texts(num_beams=5, speculative_config=NGRAM)


def test_times_of_tokens():
    """From attention weights, for recordings of one window and of several."""
    for num_frames, options in ((40, {"language": "en"}), (130, TO_PREVIOUS)):
        inputs, given = speech(num_frames), {**options, "return_token_timestamps": True, "num_beams": 1}
        model = whisper()
        model.generation_config.alignment_heads = [[0, 0], [0, 1]]
        plain, ours = (
            model.generate(**copy.deepcopy(inputs), **given, speculative_config=config) for config in (None, NGRAM)
        )
        assert torch.equal(ours["sequences"], plain["sequences"]) and len(plain["token_timestamps"].unique()) > 3
        assert torch.allclose(ours["token_timestamps"], plain["token_timestamps"])


def test_a_decoder_needs_an_encoder_of_its_width():
    """A decoder that is passed reads the target's encoder, and is no target itself."""
    model, inputs, options = whisper(), speech(130), {**TO_PREVIOUS, "begin_suppress_tokens": None}
    drafter = WhisperForCausalLM(copy.deepcopy(model.config)).eval()
    drafter.load_state_dict(model.state_dict(), strict=False)
    plain = transcript(model, inputs, options)
    assert torch.equal(transcript(model, inputs, options, DRAFT, assistant_model=drafter), plain)
    wide = WhisperForCausalLM(build("whisper", d_model=96).config)
    with pytest.raises(ValueError, match="reads the output of an encoder of width 96, and the target's has 48"):
        transcript(model, inputs, options, DRAFT, assistant_model=wide)
    with pytest.raises(
        UnsupportedModel, match="WhisperForCausalLM attends to what an encoder has read, and this text has no"
    ):
        drafter.generate(torch.arange(3, 6)[None], speculative_config=NGRAM)
