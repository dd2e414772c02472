"""Audio in chats: every request gets the text of generate(), and a bad recording is its request's alone."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
import torch
from families import VOCAB, drawn_vectors, make
from helpers_server import in_thread
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from hf_specdec.serve import LLM, SamplingParams
from hf_specdec.serve.engine import sounds

NEW, RATE, AUDIO = 16, 16000, 120
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 4}
TREE = {"method": "token_recycling", "num_successors": 4, "speculative_token_tree": [[0], [1], [0, 0]]}
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    """The folder of a small Qwen2-Audio that hears a second, the model, and its processor."""
    folder = tmp_path_factory.mktemp("hearing")
    tower = {"num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16,
             "max_source_positions": 20}  # fmt: skip
    config = Qwen2AudioConfig(audio_config=tower, text_config=make("Qwen2").config.to_dict(), audio_token_index=AUDIO)
    torch.manual_seed(0)
    model = drawn_vectors(Qwen2AudioForConditionalGeneration(config).eval())
    for weight in (w for n, w in model.named_parameters() if "audio_tower" in n or "multi_modal" in n):
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0, 0.3)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    special = {AUDIO: "<|AUDIO|>", 121: "<|audio_bos|>", 122: "<|audio_eos|>", 123: "<|im_start|>", 124: "<|im_end|>"}
    words = {special.get(i, chr(32 + i) if i < 95 else f"<{i}>"): i for i in range(VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="#"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token=" ")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special.values())})
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=400)
    processor = Qwen2AudioProcessor(extractor, tokenizer)
    tokenizer.chat_template = processor.chat_template
    for part in (model, processor):
        part.save_pretrained(folder)
    return folder, model, processor


def recording(seconds, seed=0):
    return (0.3 * np.random.default_rng(seed).standard_normal(int(RATE * seconds))).astype("float32")


def user(*parts):
    kinds = (
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "audio", "audio": (part, RATE)}
        for part in parts
    )
    return [{"role": "user", "content": list(kinds)}]


CONVERSATIONS = [
    user(recording(0.5), "abab"), user("abab abab"), user(recording(0.3, 1), "xyz", recording(0.9, 2), "xyz"),
    user(recording(0.5, 3), "abab"),  # the first one's ids, and another recording
]  # fmt: skip


def plain(model, processor, conversations):
    texts = []
    for messages in conversations:
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        heard = [part["audio"][0] for part in messages[0]["content"] if part["type"] == "audio"]
        media = {"audio": heard, "sampling_rate": RATE} if heard else {}
        inputs = processor(text=[text], **media, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        texts.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return texts


def wav(samples, rate=RATE, kind="WAV"):
    soundfile, raw = pytest.importorskip("soundfile"), io.BytesIO()
    soundfile.write(raw, samples, rate, format=kind, subtype="FLOAT" if kind == "WAV" else None)
    return raw.getvalue()


def part_of(raw, kind="wav"):
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(raw).decode(), "format": kind}}


def asked(messages):
    (message,) = messages
    parts = [part if part["type"] == "text" else part_of(wav(part["audio"][0])) for part in message["content"]]
    return [{**message, "content": parts}]


def test_every_request_gets_the_text_of_generate(hearing):
    pytest.importorskip("soxr")
    folder, model, processor = hearing
    expected = plain(model, processor, CONVERSATIONS)
    assert len(set(map(tuple, expected))) == 4
    for llm in (
        LLM(str(folder), speculative_config=NGRAM, device="cpu", max_model_len=120),
        LLM(model, processor, TREE, max_model_len=120),
        LLM(model, processor, {**NGRAM, "num_blocks": 40, "block_size": 4}, max_model_len=120),
    ):
        outputs = llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        (files,) = llm.chat(asked(CONVERSATIONS[2]), GREEDY, use_tqdm=False)
        assert files.outputs[0].token_ids == expected[2]
        prompt = {"prompt": outputs[0].prompt, "multi_modal_data": {"audio": (recording(0.5), RATE)}}
        for wrong, message in (
            ({**prompt, "multi_modal_data": {"audio": (recording(1.1), RATE)}}, "hears at most 1 s"),
            ({**prompt, "multi_modal_data": {"audio": (recording(0), RATE)}}, "hears at most 1 s"),
            ({**prompt, "multi_modal_data": {"audio": recording(0.5)}}, r"\(samples, samples a second\)"),
            ({**prompt, "multi_modal_data": {"audio": (np.full(99, np.nan), RATE)}}, "not finite"),
            ({**prompt, "multi_modal_data": {"audio": (recording(0.5)[None], RATE)}}, "one channel"),
            *(({**prompt, "multi_modal_data": {"audio": (recording(0.5), rate)}}, "samples a second are not from")
              for rate in (0, -1, 999, 10**19, float("inf"), None)),
            ({**prompt, "prompt": "ab"}, "refuses the recordings"), ({**prompt, "multi_modal_data": {}}, "one with audio has"),
            ({**prompt, "multi_modal_data": {"image": 1}}, "reads no images"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=message):
                llm.generate(wrong, GREEDY, use_tqdm=False)
        (again,) = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert again.outputs[0].token_ids == expected[0]
        assert not llm.engine.decoder.cache.tables and not llm.engine.decoder.cache.pool.num_used
        llm.close()
    with pytest.raises(ValueError, match=r"hears no audio.*hf-specdec\[audio\]"):
        LLM(make("Llama"), None).generate(prompt, GREEDY, use_tqdm=False)


def test_openais_client(hearing):
    """Requests with good and bad recordings together; a body that is read in another process; mp3 at another rate."""
    pytest.importorskip("soxr")
    folder, model, processor = hearing
    expected = [processor.decode(ids, skip_special_tokens=True) for ids in plain(model, processor, CONVERSATIONS)]
    options = {"model": "tiny", "temperature": 0, "max_tokens": NEW, "extra_body": {"ignore_eos": True}}
    good = asked(CONVERSATIONS[0])[0]["content"][0]
    cases = [
        (part_of(b"none"), "Recording 1: it cannot be read as audio"), (part_of(wav(recording(0))), "Recording 1: the recording is empty"),
        (part_of(wav(recording(1.1))), "longer than 1 s"), (part_of(wav(np.full(800, np.nan, "float32"))), "not finite"),
        ({"type": "input_audio", "input_audio": {"data": "?", "format": "wav"}}, "not base64"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "flac"}}, "a part with audio has"),
        ({"type": ["input_audio"]}, "are not served here"),
        ({"type": "input_audio"}, "a part with audio has"), ({"type": "text", "text": "<|AUDIO|>"}, "refuses the recordings"),
        ({"type": "video_url", "video_url": {"url": "data:"}}, "no files or video"),
        ({"type": "image_url", "image_url": {"url": "data:"}}, "reads no images"),
    ]  # fmt: skip
    with in_thread(NGRAM, model=folder, max_model_len=120) as server, ThreadPoolExecutor(14) as pool:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        answers = [
            pool.submit(client.chat.completions.create, messages=asked(messages), **options)
            for messages in CONVERSATIONS
        ]
        bodies = [{"messages": [{"role": "user", "content": [part, good]}]} for part, _ in cases]
        refused = [pool.submit(server.post, "/v1/chat/completions", body) for body in bodies]
        assert [answer.result().choices[0].message.content for answer in answers] == expected
        for answer, (_, message) in zip(refused, cases, strict=True):
            status, _, got = answer.result()
            assert status == 400 and message in got["error"]["message"], (message, got)
        many = {"messages": [{"role": "user", "content": [good] * 33}]}
        status, _, got = server.post("/v1/chat/completions", many)
        assert status == 400 and "more than 32 recordings" in got["error"]["message"]
        status, _, got = server.post("/tokenize", {"messages": asked(CONVERSATIONS[0])})
        assert status == 400 and "not tokenized here" in got["error"]["message"]
        mp3 = [{"role": "user", "content": [part_of(wav(recording(0.5)[::2], RATE // 2, "MP3"), "mp3")]}]
        assert client.chat.completions.create(messages=mp3, **options).choices[0].message.content
        stream = client.chat.completions.create(messages=asked(CONVERSATIONS[3]), stream=True, **options)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected[3]
    with in_thread() as server:
        status, _, got = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [good]}]})
        assert status == 400 and "tiny hears no audio" in got["error"]["message"]
    assert not sounds.hears(None)
