"""Encoder-decoder models in LLM and the server: every request gets the text of generate(), and nothing is left behind."""

import asyncio
import copy
import dataclasses
import http.client
import io
import json
import select
import threading
import time
from types import SimpleNamespace

import numpy as np
import openai
import pytest
import torch
from cache_checks import check_blocks
from encoders import DRAFT, END, MARKS, NEW, NGRAM, NO_TIMES, START, TREE, VOCAB, build, inputs_for, whisper
from families import perturbed
from helpers_server import Process, in_thread
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    PreTrainedTokenizerFast,
    WhisperFeatureExtractor,
    WhisperProcessor,
    WhisperTokenizer,
    pipeline,
)

from hf_specdec.core.errors import UnsupportedModel
from hf_specdec.serve import LLM, SamplingParams
from hf_specdec.serve.engine.encoder import EncoderSide
from hf_specdec.serve.engine.speech import Speech
from hf_specdec.serve.http.audio import AudioRequest, Transcription
from hf_specdec.serve.http.errors import ApiError
from hf_specdec.serve.http.server import Limits, Server
from hf_specdec.serve.ipc.messages import Cancel, Submit

GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
RATE = 16000


def prompts_of(family):
    given = inputs_for(family)
    return [ids[mask != 0].tolist() for ids, mask in zip(given["input_ids"], given["attention_mask"], strict=True)]


def check_empty(llm):
    """No sequence and no block is in use, neither the target's nor the drafter's."""
    caches = [llm.engine.decoder.cache, getattr(llm.engine.decoder.generator, "pages", None)]
    for cache in [each for own in caches if own is not None for each in (own, own.cross) if each is not None]:
        check_blocks(cache.pool)
        assert not cache.tables and not cache.pool.num_used


# ---- LLM --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bart", "m2m_100", "t5"])
def test_every_request_gets_the_text_of_generate(family, tmp_path):
    """Ragged inputs and rules of the generation config; trees, a draft model with its own encoder, too few blocks of both pools."""
    model = build(family, 4)
    rules = {
        "forced_bos_token_id": 9,
        "no_repeat_ngram_size": 2,
        "encoder_no_repeat_ngram_size": 3,
        "bad_words_ids": [[11]],
        "repetition_penalty": 1.2,
    }
    for name, value in rules.items():
        setattr(model.generation_config, name, value)
    prompts = prompts_of(family)
    plain = [
        model.generate(torch.tensor([ids]), max_new_tokens=NEW + 1, do_sample=False)[0].tolist() for ids in prompts
    ]
    perturbed(model, 0.03).save_pretrained(tmp_path)
    for config, limits in (
        (NGRAM, {}), (TREE, {}), ({**DRAFT, "model": str(tmp_path)}, {"max_num_seqs": 3}),
        ({**DRAFT, "model": str(tmp_path), "num_blocks": 9, "block_size": 4}, {}),
        ({**NGRAM, "block_size": 4}, {"kv_cache_memory_bytes": 120_000}),
    ):  # fmt: skip
        llm = LLM(model, None, config, max_model_len=60, **limits)
        greedy = llm.get_default_sampling_params().copy(max_tokens=NEW, ignore_eos=True)
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        assert [each.prompt_token_ids + each.outputs[0].token_ids for each in outputs] == plain, config
        assert [each.encoder_prompt_token_ids for each in outputs] == prompts
        check_empty(llm)
        if "num_blocks" in config:
            assert llm.engine.scheduler.num_preemptions
        if "kv_cache_memory_bytes" in limits:
            assert llm.engine.decoder.cache.cross.most_blocks < 5 * 8  # not for all five rows
            assert (
                llm.engine.scheduler.num_preemptions == 0
            )  # a row starts once its source fits beside those that started with it
        llm.close()


def test_a_request_that_leaves_takes_nothing_with_it(tmp_path):
    """Cancelled while it waits and while it runs; one whose input the encoder refuses ends alone; choices share one source."""
    model = build("bart", 4)
    prompts = prompts_of("bart")
    poison, reads = prompts[1][:5], []

    def refuse(module, args, given):
        reads.append(given["input_ids"].shape[1])
        if given["input_ids"].tolist() == [poison]:
            raise RuntimeError("this one")

    hook = model.get_encoder().register_forward_pre_hook(refuse, with_kwargs=True)
    llm = LLM(model, None, {**NGRAM, "block_size": 4}, max_num_seqs=3)
    plain = [each.outputs[0].token_ids for each in llm.generate(prompts, GREEDY, use_tqdm=False)]
    engine = llm.engine
    reads.clear()
    requests = [
        engine.add(str(i), None, [1], GREEDY, encoder=llm._submit(ids, GREEDY).encoder) for i, ids in enumerate(prompts)
    ]
    bad = engine.add("bad", None, [1], GREEDY, encoder=llm._submit(poison, GREEDY).encoder)
    with engine.decoder.active():
        for _ in range(3):
            engine.step()
        engine.abort(requests[0])
        engine.abort(requests[4])
        while engine.has_work:
            engine.step()
    assert str(bad.error) == "this one" and all(request.error is None for request in requests)
    for i in (1, 2, 3):
        assert requests[i].choices[0].output.token_ids == plain[i]
    assert [size for size in reads if size != len(poison)] == [len(ids) for ids in prompts[:4]]  # once each
    assert requests[4].choices[0].output.finish_reason == "abort"
    check_empty(llm)
    reads.clear()
    sampled = SamplingParams(temperature=1, seed=3, max_tokens=8, n=3)
    (output,) = llm.generate([prompts[0]], sampled, use_tqdm=False)
    assert len({tuple(each.token_ids) for each in output.outputs}) == 3 and len(reads) == 1
    both = {"encoder_prompt": prompts[0], "decoder_prompt": {"prompt_token_ids": [1, 7]}}
    (output,) = llm.generate(both, GREEDY, use_tqdm=False)
    given = {"input_ids": torch.tensor([prompts[0]]), "decoder_input_ids": torch.tensor([[1, 7]])}
    assert [1, 7, *output.outputs[0].token_ids] == model.generate(**given, max_new_tokens=NEW, do_sample=False)[
        0
    ].tolist()
    for wrong, message in (
        ({"prompt_token_ids": []}, "is empty"), ({"prompt_token_ids": [VOCAB]}, "ids 0 to 95"),
        ({"prompt_token_ids": [5] * 65}, "reads at most 64"), ({"prompt_token_ids": [5], "multi_modal_data": {}}, "reads text"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            llm.generate(wrong, GREEDY, use_tqdm=False)
    check_empty(llm)
    llm.close()
    hook.remove()
    with pytest.raises(UnsupportedModel, match="read audio for Whisper only"):
        LLM(build("moonshine"), None)
    AutoConfig.for_model("pix2struct").save_pretrained(tmp_path / "reader")
    with pytest.raises(UnsupportedModel, match="pix2struct model, whose encoder LLM does not know"):
        LLM(tmp_path / "reader", None)
    with pytest.raises(UnsupportedModel, match="has no image processor"):
        LLM(build("vision mbart"), None)
    with pytest.raises(ValueError, match="of one input of 64 states"):
        LLM(model, None, kv_cache_memory_bytes=1000)


# ---- the server -------------------------------------------------------------------------------------------------------


def save_corrector(folder):
    """A BART with a tokenizer of words."""
    model = build("bart", 4)
    model.generation_config.forced_bos_token_id = 9
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<3>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<0>", bos_token="<1>", eos_token="<2>", additional_special_tokens=["<9>"]
    ).save_pretrained(folder)
    return model


def test_completions_of_an_encoder_decoder_model(tmp_path):
    model, tokenizer = save_corrector(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    texts = [" ".join(f"<{i}>" for i in ids) for ids in prompts_of("bart")]

    def plain(text, **more):
        ids = model.generate(torch.tensor([tokenizer(text)["input_ids"]]), do_sample=False, **more)[0]
        return tokenizer.decode(ids[3 if "decoder_input_ids" in more else 2 :], skip_special_tokens=True)

    with in_thread(NGRAM, model=tmp_path, max_model_len=None) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        asked = {"model": "tiny", "max_tokens": NEW, "temperature": 0, "extra_body": {"ignore_eos": True}}
        answer = client.completions.create(prompt=texts, **asked)
        assert [choice.text for choice in answer.choices] == [plain(text, max_new_tokens=NEW + 1) for text in texts]
        assert (
            answer.usage.prompt_tokens == sum(map(len, prompts_of("bart")))
            and answer.usage.completion_tokens == 5 * NEW
        )
        pieces = [each.choices[0].text for each in client.completions.create(prompt=texts[0], stream=True, **asked)]
        assert "".join(pieces) == answer.choices[0].text and len(pieces) > 3
        more = {**asked, "extra_body": {"ignore_eos": True, "decoder_prompt": [1, 9, 20]}}
        begun = client.completions.create(prompt=texts[0], **more).choices[0].text
        assert begun.lstrip() == plain(texts[0], max_new_tokens=NEW, decoder_input_ids=torch.tensor([[1, 9, 20]]))
        for body, message in (
            ({"prompt": texts[0], "echo": True}, "echo is for decoder-only models"),
            ({"prompt": texts[0], "prompt_logprobs": 0}, "prompt_logprobs is for decoder-only models"),
            ({"prompt": "<5> " * 65}, "has 65 tokens"), ({"prompt": ""}, "is empty"),
        ):  # fmt: skip
            status, _, got = server.post("/v1/completions", body)
            assert status == 400 and message in got["error"]["message"]
        status, _, got = server.post("/v1/audio/transcriptions", *form_of([("file", b"")]))
        assert status == 400 and "reads text, not audio" in got["error"]["message"]
        for path, body, message in (
            ("chat/completions", {"messages": [{"role": "user", "content": "<5>"}]}, "encoder-decoder model, which has no conversations"),
            ("responses", {"input": "<5>"}, "encoder-decoder model, which has no conversations"),
        ):  # fmt: skip
            status, _, got = server.post(f"/v1/{path}", body)
            assert status == 400 and message in got["error"]["message"]


@pytest.fixture(scope="module")
def ears(tmp_path_factory):
    """The folder of a small Whisper, whose windows have 40 frames and are a second long."""
    folder, ids = tmp_path_factory.mktemp("whisper"), range(60, 96)
    whisper(15).save_pretrained(folder)
    names = {i: f"<|{0.02 * (i - 74):.2f}|>" if i >= 74 else f"<|{i}|>" for i in ids} | MARKS
    vocab = {chr(0x21 + i): i for i in range(60)} | {name: i for i, name in names.items()}
    tokenizer = WhisperTokenizer(
        vocab=vocab, merges=[], **{f"{kind}_token": MARKS[END] for kind in ("unk", "bos", "eos", "pad")}
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [name for i, name in names.items() if END < i < 74]})
    tokenizer.add_tokens([name for i, name in names.items() if i >= 74])
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=400).save_pretrained(folder)
    return folder


def recording(seconds, seed=0):
    return (0.3 * np.random.default_rng(seed).standard_normal(int(RATE * seconds))).astype("float32")


def transcript(folder, samples, **options):
    """(text, output) of Whisper's own generate()."""
    model, tokenizer = whisper(15), WhisperTokenizer.from_pretrained(folder)
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    whole = {"truncation": False, "padding": "longest"} if len(samples) > RATE else {}
    features = extractor(samples, sampling_rate=RATE, return_tensors="pt", **whole)["input_features"]
    output = model.generate(features, num_beams=1, **options)
    tokens = output["sequences"] if isinstance(output, dict) else output
    return tokenizer.decode(tokens[0], skip_special_tokens=True).lstrip(), output


def test_llm_hears(ears):
    samples = recording(0.7)
    llm = LLM(str(ears), speculative_config=NGRAM, device="cpu")
    audio = {"audio": (samples, RATE)}
    greedy = SamplingParams(temperature=0, max_tokens=None)
    heard, told, by_ids = llm.generate(
        [
            {"multi_modal_data": audio}, {"prompt": "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>", "multi_modal_data": audio},
            {"prompt_token_ids": np.array([START, 63, 64, NO_TIMES]), "multi_modal_data": audio},
        ],
        greedy, use_tqdm=False,
    )  # fmt: skip
    assert by_ids.prompt_token_ids == told.prompt_token_ids and by_ids.outputs[0].text == told.outputs[0].text
    one = {"task": "transcribe", "force_unique_generate_call": True}
    assert heard.outputs[0].text.lstrip() == transcript(ears, samples, **one)[0]
    assert told.outputs[0].text.lstrip() == transcript(ears, samples, **one, language="de")[0]
    for wrong, message in (
        ("a text", "multi_modal_data"),
        ({"multi_modal_data": {"audio": (recording(2), RATE)}}, "longer than a window"),
        ({"multi_modal_data": None}, "multi_modal_data"),
        ({"multi_modal_data": {**audio, "image": 1}}, "A prompt of this model is"),
        ({"multi_modal_data": audio, "language": "de"}, "a key 'language'"),
        ({"encoder_prompt": {"prompt": "a", "multi_modal_data": audio}, "decoder_prompt": "b"}, "begins twice"),
        ({"encoder_prompt": {"multi_modal_data": audio}, "prompt": "b"}, "a key 'prompt'"),
        ({"multi_modal_data": {"audio": (recording(1e-2) * 1e30, RATE)}}, "finite"),
        ({"multi_modal_data": {"audio": (samples[None], RATE)}}, "one channel"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(wrong, greedy, use_tqdm=False)
    check_empty(llm)
    llm.close()
    processor = WhisperProcessor(WhisperFeatureExtractor.from_pretrained(ears), WhisperTokenizer.from_pretrained(ears))
    llm = LLM(whisper(15), processor, NGRAM)  # in memory
    assert llm.generate({"multi_modal_data": audio}, greedy, use_tqdm=False)[0].outputs[0].text == heard.outputs[0].text
    llm.close()


def file_of(samples, rate=RATE, kind="WAV"):
    soundfile = pytest.importorskip("soundfile")
    written = io.BytesIO()
    soundfile.write(written, samples, rate, format=kind, subtype="FLOAT" if kind == "WAV" else None)
    return written.getvalue()


def form_of(fields, boundary="limit"):
    parts = []
    for name, value in fields:
        named = f'form-data; name="{name}"' + ('; filename="a.wav"' if isinstance(value, bytes) else "")
        data = value if isinstance(value, bytes) else value.encode()
        parts.append(f"--{boundary}\r\nContent-Disposition: {named}\r\n\r\n".encode() + data + b"\r\n")
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), {
        "Content-Type": f"multipart/form-data; boundary={boundary}"
    }


def test_transcriptions(ears):
    pytest.importorskip("python_multipart")
    pytest.importorskip("soxr")
    short, long = recording(0.8), recording(3.3, 1)
    with Process.running("--speculative-config", json.dumps(NGRAM), "--max-num-seqs", "4", model=ears) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        audio, name = client.audio, str(ears)

        def hear(samples, work=audio.transcriptions, **more):
            return work.create(model=name, file=("a.wav", file_of(samples)), **more)

        cases = [  # samples, options of the request, options of generate()
            (short, {}, {}), (short, {"language": "de"}, {"language": "de"}),
            (short, {"prompt": "234", "language": "en"}, {"language": "en", "prompt_ids": torch.tensor([67, 17, 18, 19])}),
            (long, {"language": "en"}, {"language": "en", "return_timestamps": True}), (long, {}, {"return_timestamps": True}),
        ]  # fmt: skip
        heard = [None] * 10

        def ask(i):
            heard[i] = hear(cases[i % 5][0], **cases[i % 5][1]).text

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i, (samples, _, options) in enumerate(cases):
            expected = transcript(ears, samples, task="transcribe", **options)[0]
            if "prompt_ids" in options:  # generate() returns the prompt, too
                expected = expected.removeprefix("234")
            assert heard[i] == heard[i + 5] == expected, options
        assert len(set(heard)) == 5
        english = hear(short, audio.translations, response_format="text")
        assert english == transcript(ears, short, task="translate")[0] + "\n"

        options = {"language": "en", "return_timestamps": True, "return_segments": True, "task": "transcribe"}
        expected = transcript(ears, long, **options)[1]["segments"][0]
        whole = hear(long, language="en", response_format="verbose_json", timestamp_granularities=["segment"])
        assert [each.tokens for each in whole.segments] == [each["tokens"].tolist() for each in expected]
        assert [each.start for each in whole.segments] == [round(float(each["start"]), 2) for each in expected]
        assert whole.language == "english" and abs(whole.duration - 3.3) < 1e-6 and whole.segments[0].avg_logprob < 0
        _check_times_of_words(ears, hear, {0.8: short, 3.3: long})
        subtitles = {form: hear(long, language="en", response_format=form) for form in ("srt", "vtt")}
        assert subtitles["srt"].startswith("1\n00:00:0") and subtitles["vtt"].startswith("WEBVTT\n\n00:00:0")
        assert subtitles["srt"].count("-->") == subtitles["vtt"].count("-->") == len(expected)

        for samples, more in ((short, {}), (long, {"language": "en"})):
            events = list(hear(samples, stream=True, **more))
            deltas = [each.delta for each in events if each.type == "transcript.text.delta"]
            assert events[-1].type == "transcript.text.done" and len(deltas) > 1
            assert "".join(deltas) == events[-1].text == hear(samples, **more).text
        stereo = np.repeat(recording(0.5)[::2, None], 2, axis=1)
        flac = audio.transcriptions.create(model=name, file=("a.flac", file_of(stereo, RATE // 2, "FLAC")))
        assert flac.text
        _check_bad_forms(server, file_of(short))
        assert "ChatML" not in server.said()
        _check_long_recording_of_few_bytes(server)
        stream = hear(long, stream=True, language="en")
        next(iter(stream))
        stream.close()  # the client leaves
        names, deadline = ("requests_running", "requests_waiting", "kv_cache_usage_ratio"), time.monotonic() + 60
        while any(server.metrics()[f"hf_specdec_{name}"] for name in names):
            assert time.monotonic() < deadline, server.metrics()
            time.sleep(0.02)


@pytest.mark.parametrize("fields", [{}, {"response_format": "verbose_json", "timestamp_granularities[]": "word"}])
def test_an_aborted_window_ends_the_transcript(ears, fields):
    """As when the engine is paused: a text that lacks what was spoken in the middle would look whole."""
    pytest.importorskip("python_multipart")
    tokenizer, request = WhisperTokenizer.from_pretrained(ears), SimpleNamespace(headers={}, scope={})
    raw, headers = form_of([("file", file_of(recording(3.3, 1))), ("language", "en"), *fields.items()])
    request.headers = {name.lower(): value for name, value in headers.items()}

    async def serve():
        server = Server(tokenizer, ["ears"], Limits())
        server.start(LLM(str(ears), speculative_config=NGRAM, device="cpu"), asyncio.get_running_loop())
        begun, submit = [], server.worker.send

        def send(message):
            submit(message)
            begun.append(message)
            if isinstance(message, Submit) and len(begun) == 2:  # the second window
                submit(Cancel(message.id, "abort"))

        server.worker.send = send
        try:
            await Transcription.respond("transcribe", server, request, raw)
        finally:
            await asyncio.get_running_loop().run_in_executor(None, server.stop)

    with pytest.raises(ApiError, match="aborted") as refused:
        asyncio.run(serve())
    assert refused.value.status == 503


def _check_times_of_words(folder, hear, recordings):
    """Those of transformers' pipeline, which splits a text at other places, too; segments stay beside them if both are wanted."""
    parts = {
        "tokenizer": WhisperTokenizer.from_pretrained(folder),
        "feature_extractor": WhisperFeatureExtractor.from_pretrained(folder),
    }
    recognize = pipeline("automatic-speech-recognition", whisper(15), **parts)
    options = {"return_timestamps": "word", "generate_kwargs": {"num_beams": 1, "task": "transcribe", "language": "en"}}
    given = {"language": "en", "response_format": "verbose_json"}

    def by_place(words):
        """When the words begin, and when they end, by numbers of characters before that; and the text."""
        ends = np.cumsum([len(word) for word, _, _ in words]).tolist()
        starts = dict(zip([0, *ends], [start for _, start, _ in words], strict=False))
        return starts, dict(zip(ends, [end for _, _, end in words], strict=True)), "".join(word for word, _, _ in words)

    for seconds, samples in recordings.items():
        theirs = recognize(samples.copy(), **options)["chunks"]
        words, both = (
            hear(samples, timestamp_granularities=kinds, **given) for kinds in (["word"], ["segment", "word"])
        )
        assert words.words == both.words and words.segments is None and both.segments
        *expected, text = by_place([(each["text"].strip(), *each["timestamp"]) for each in theirs])
        *got, written = by_place([(each.word, each.start, each.end) for each in words.words])
        assert written == text and max(got[1].values()) <= seconds
        for ours, pipelines in zip(got, expected, strict=True):
            same = ours.keys() & pipelines.keys()
            assert len(same) > 0.8 * len(pipelines) and len({ours[place] for place in same}) > 3
            assert {place: ours[place] for place in same} == {place: pipelines[place] for place in same}


def test_times_of_words_need_alignment_heads(monkeypatch):
    model, body = (
        copy.deepcopy(whisper(15)),
        AudioRequest(timestamp_granularities=["word"], response_format="verbose_json"),
    )
    body.check(Speech.of(model, None))
    del model.generation_config.alignment_heads
    with pytest.raises(ApiError, match="alignment_heads"):
        body.check(Speech.of(model, None))


def test_an_answer_whose_times_fail_ends_alone(ears, monkeypatch):
    llm, given = (
        LLM(str(ears), speculative_config=NGRAM, device="cpu"),
        {"multi_modal_data": {"audio": (recording(0.7), RATE)}},
    )
    greedy = SamplingParams(temperature=0, max_tokens=None)
    plain = llm.generate([given], greedy, use_tqdm=False)[0].outputs[0].token_ids
    _, ids, _, encoder = llm.prompts.read(given, greedy)
    timed = [dataclasses.replace(encoder, num_frames=count) for count in (28, 1, -1, 0)]
    requests = [llm.engine.add(str(i), None, ids, greedy, encoder=each) for i, each in enumerate(timed)]
    llm.engine.run()
    assert [request.choices[0].output.token_ids for request in requests] == [plain] * 4
    times = [request.token_times for request in requests]
    assert times[3] is None and len(times[0]) == len(plain) and sorted(times[0]) == times[0] and max(times[0]) <= 0.7
    monkeypatch.setattr(EncoderSide, "times", lambda *_: 1 / 0)
    requests = [llm.engine.add(str(i), None, ids, greedy, encoder=each) for i, each in enumerate(timed[2:])]
    llm.engine.run()
    assert isinstance(requests[0].error, ZeroDivisionError) and requests[1].error is None
    assert requests[1].choices[0].output.token_ids == plain
    check_empty(llm)
    llm.close()


def _check_long_recording_of_few_bytes(server):
    """Requests that are read at once do not wait for it."""
    body, headers = form_of(
        [("file", file_of(np.zeros(900_000), 1000, "FLAC")), ("stream", "true"), ("language", "en")]
    )
    assert len(body) < 8000
    client = http.client.HTTPConnection("127.0.0.1", server.port)
    client.request("POST", "/v1/audio/transcriptions", body, headers)
    time.sleep(0.2)
    assert server.post("/tokenize", {"prompt": "234"})[0] == 200
    assert not select.select([client.sock], [], [], 0)[0]  # it is being read still
    client.close()


def _check_bad_forms(server, wav):
    nan = file_of(np.full(800, np.nan, "float32"))
    for fields, message in (
        ([("language", "en")], "file must be an uploaded recording"), ([("file", "text")], "file must be an uploaded recording"),
        ([("file", b"noise")], "cannot be read as audio"), ([("file", file_of(recording(0)))], "the recording is empty"),
        ([("file", nan)], "finite"), ([("file", file_of(recording(0.1) * 1e30))], "finite"),
        ([("file", wav), ("language", "xx")], "language 'xx' is not one of"),
        ([("file", wav), ("temperature", "hot")], "temperature"), ([("file", wav), ("temperature", "2")], "temperature"),
        ([("file", wav), ("response_format", "xml")], "response_format"), ([("file", wav), ("prompt", "a<|en|>")], "special tokens"),
        ([("file", wav), ("response_format", "srt"), ("stream", "true")], "A stream has no srt"),
        ([("file", wav), ("timestamp_granularities[]", "word")], "needs response_format verbose_json"),
        ([("file", wav), ("language", "en"), ("language", "de")], "given twice"), ([("file", wav), ("file", wav)], "Too many files"),
    ):  # fmt: skip
        body, headers = form_of(fields)
        status, _, got = server.post("/v1/audio/transcriptions", body, headers)
        assert status == 400 and message in got["error"]["message"], (got, message)
    for body, headers in (
        (b"{}", {"Content-Type": "application/json"}),
        (b"x", {"Content-Type": "multipart/form-data"}),
    ):
        assert server.post("/v1/audio/transcriptions", body, headers)[0] == 400
    status, headers, _ = server.post("/v1/audio/transcriptions", *form_of([("file", wav), ("colour", "red")]))
    assert status == 200 and {key.lower(): value for key, value in headers.items()}["x-ignored-fields"] == "colour"
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        status, _, got = server.post(path, body)
        assert status == 400 and "reads audio: use /v1/audio/transcriptions" in got["error"]["message"]
