"""Images in LLM and the server: every request gets the text of generate(), and no image, host or address harms another request."""

import base64
import contextlib
import io
import json
import re
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import openai
import peft
import pytest
import torch
from cache_checks import check_blocks
from families import make
from helpers_server import Process, in_thread
from mllama import build_mllama, needs_image_layers
from multimodal import HYBRID, MULTIMODAL, build_multimodal, build_processor, eagle_head, image_prompts
from PIL import Image
from transformers.cache_utils import Cache

from hf_specdec.serve import LLM, SamplingParams
from hf_specdec.serve.engine import images as of_images
from hf_specdec.serve.engine.encoder import EncoderInput
from hf_specdec.serve.http import media
from hf_specdec.serve.http import server as server_module
from hf_specdec.serve.http.errors import ApiError

NEW = 20
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3, "num_speculative_tokens": 4}
TREE = {"method": "draft_model", "early_exit": 2, "branching_factors": [2, 2, 1]}
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
FAMILIES = ("qwen2_5_vl", "llava", "gemma3")


def built(family):
    return build_mllama() if family == "mllama" else build_multimodal(family)


def picture(seed, width=40, height=30):
    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8))


def png(image):
    raw = io.BytesIO()
    image.save(raw, "PNG")
    return raw.getvalue()


def data_url(raw):
    return f"data:image/png;base64,{base64.b64encode(raw).decode()}"


def user(*parts):
    """A conversation of one message: texts and images."""
    kinds = (
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    )
    return [{"role": "user", "content": list(kinds)}]


CONVERSATIONS = [
    user(picture(0), "abcabcabcab"),
    user("one two one two one"),
    user("x", picture(1, 24, 40), "yz yz", picture(2), "yz yz yz"),  # the space is the id that pads
    user(picture(3), "abcabcabcab"),  # the first one's ids, and another image
]


def plain(model, processor, conversations, **more):
    """The new ids of transformers' generate(), for each conversation."""
    texts = []
    for messages in conversations:
        inputs = processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
        output = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **more)
        texts.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return texts


def check_empty(llm):
    caches = [llm.engine.decoder.cache, getattr(llm.engine.decoder.generator, "pages", None)]
    for cache in [each for own in caches if own is not None for each in (own, own.cross) if each is not None]:
        check_blocks(cache.pool)
        assert not cache.tables and not cache.pool.num_used


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A LLaVA with its processor."""
    path = tmp_path_factory.mktemp("llava")
    build_multimodal("llava").save_pretrained(path)
    build_processor("llava").save_pretrained(path)
    return path


# ---- LLM --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, pytest.param("mllama", marks=needs_image_layers)])
def test_every_request_gets_the_text_of_generate(family, tmp_path):
    """Beside prompts of text, with look-ups, trees, a draft model, too few blocks; equal ids with another image are another prompt."""
    model, processor = built(family), build_processor(family)
    expected = plain(model, processor, CONVERSATIONS)
    assert expected[0] != expected[3]
    make("Llama", seed=5).save_pretrained(tmp_path / "draft")
    (tmp_path / "head").mkdir()
    head = {"method": "eagle", "model": eagle_head(tmp_path / "head"), "num_speculative_tokens": 3}
    accepted, few = 0, {"num_blocks": 24, "block_size": 4}
    for config in (
        NGRAM, TREE, {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3},
        {**NGRAM, **few}, {**head, **few},
    ):  # fmt: skip
        llm = LLM(model, processor, config, max_model_len=80)
        outputs = llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
        assert [each.outputs[0].token_ids for each in outputs] == expected, config
        accepted += sum(each.speculation["num_accepted_tokens"] for each in outputs)
        assert (llm.engine.scheduler.num_preemptions > 0) == ("num_blocks" in config)
        check_empty(llm)
        if config is NGRAM:
            (first,) = llm.chat(asked(CONVERSATIONS[0]), GREEDY, use_tqdm=False)  # data URLs
            assert first.outputs[0].token_ids == expected[0]
            (again,) = llm.chat(CONVERSATIONS[3], GREEDY, use_tqdm=False)
            assert again.outputs[0].token_ids == expected[3] and again.num_cached_tokens == 0
            prompt = {"prompt": again.prompt, "multi_modal_data": {"image": CONVERSATIONS[3][0]["content"][0]["image"]}}
            (raw,) = llm.generate(prompt, GREEDY, use_tqdm=False)
            assert raw.outputs[0].token_ids == expected[3] and raw.prompt_token_ids == again.prompt_token_ids
        llm.close()
    assert accepted > 0
    texts = []
    for config in ({"method": "none"}, TREE, {**NGRAM, **few}):
        llm = LLM(model, processor, config, max_model_len=80)
        drawn = SamplingParams(temperature=0.8, seed=3, max_tokens=12, n=2, ignore_eos=True)
        outputs = llm.chat(CONVERSATIONS, drawn, use_tqdm=False)
        texts.append([choice.token_ids for each in outputs for choice in each.outputs])
        llm.close()
    assert texts[0] == texts[1] == texts[2] and texts[0][0] != texts[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("family", [each for each in (*MULTIMODAL, HYBRID) if "paligemma" not in each])
def test_every_family(family):
    """Inputs of its processor, as generate() takes them; prompts that end in an image too; preempted, and beside text."""
    if family == HYBRID and not hasattr(Cache, "get_conv_state"):
        pytest.skip("needs transformers 5.23, as the model does")
    model = build_multimodal(family)
    given = [
        image_prompts(model, [n], [m], seed=n, text_seed=m, end=end)
        for n, m, end in ((1, 9, 0), (2, 30, 0), (1, 40, 1))
    ]
    rows = [
        (
            each["input_ids"][0].tolist(),
            {k: v.numpy() for k, v in each.items() if k not in ("input_ids", "attention_mask")},
        )
        for each in given
    ] + [([5, 6, 7, 8] * 6, None)]
    expected = [model.generate(**each, max_new_tokens=NEW, do_sample=False)[0].tolist() for each in given]
    expected.append(model.generate(torch.tensor([rows[3][0]]), max_new_tokens=NEW, do_sample=False)[0].tolist())
    for config in (NGRAM, {**NGRAM, "num_blocks": 30, "block_size": 4}):
        llm = LLM(model, None, config, max_model_len=200)
        requests = [
            llm.engine.add(str(i), None, ids, GREEDY, encoder=None if images is None else EncoderInput(images=images))
            for i, (ids, images) in enumerate(rows)
        ]
        llm.engine.run()
        assert [each.error for each in requests] == [None] * 4
        got = [each.prompt_token_ids + each.choices[0].output.token_ids for each in requests]
        assert got == expected
        check_empty(llm)
        llm.close()


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", pytest.param("mllama", marks=needs_image_layers)])
def test_a_request_with_images_has_its_adapter(family, tmp_path):
    """Also where the adapter changes the vision tower, beside rows of other adapters."""
    processor, expected, folders = build_processor(family), {}, {}
    for seed, name in enumerate((None, "north", "south")):
        model = built(family)
        if name is not None:
            torch.manual_seed(seed)
            options = {"target_modules": ["q_proj", "down_proj", "fc1"][: seed + 1], "init_lora_weights": False}
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, **options)).eval()
            model.save_pretrained(tmp_path / name)
            folders[name] = str(tmp_path / name)
        expected[name] = plain(model, processor, CONVERSATIONS)
    assert expected[None] != expected["north"] != expected["south"]
    llm = LLM(built(family), processor, NGRAM, max_model_len=80, lora_modules=folders)
    wanted = [(number, name) for number in range(len(CONVERSATIONS)) for name in expected]
    params = [SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, lora=name) for _, name in wanted]
    outputs = llm.chat([CONVERSATIONS[number] for number, _ in wanted], params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in outputs] == [expected[name][number] for number, name in wanted]
    assert not llm.engine.scheduler.num_preemptions  # no step has raised
    llm.close()


def test_what_LLM_refuses(caplog):
    model, processor = build_multimodal("llava"), build_processor("llava")
    llm, blind = LLM(model, processor), LLM(model, processor.tokenizer)
    prompt = {"prompt": "<image>ab", "multi_modal_data": {"image": picture(0)}}
    for given, message in (
        ({**prompt, "prompt": "ab"}, "processor refuses|do not match"),
        ({**prompt, "prompt": "<image><image>"}, "processor refuses"),
        ({"prompt_token_ids": [1], "multi_modal_data": prompt["multi_modal_data"]}, "A prompt with images is"),
        ({**prompt, "multi_modal_data": {"video": 1}}, "A prompt with images is"),
        ({**prompt, "prompt_token_ids": [1]}, "A prompt with images is"),
        ({"prompt": "ab", "multimodal_data": {"image": picture(0)}}, "a key 'multimodal_data'"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(given, GREEDY, use_tqdm=False)
    for part in (
        {"type": "image", "url": "picture.png"}, {"type": "image"}, {"type": "video", "video": "a.mp4"}, {"type": "audio", "path": "a.wav"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="does not read such a part"):
            llm.chat([{"role": "user", "content": [{"type": "text", "text": "ab"}, part]}], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="begins with data:image"):
        llm.chat(
            [{"role": "user", "content": [{"type": "image_url", "image_url": "http://a/b"}]}], GREEDY, use_tqdm=False
        )
    with pytest.raises(ValueError, match="prompt_logprobs and kv_transfer_params"):
        llm.generate(prompt, SamplingParams(prompt_logprobs=1), use_tqdm=False)
    with pytest.raises(ValueError, match=r"could not be loaded.*hf-specdec\[images\]"):
        blind.generate(prompt, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="LlamaForCausalLM reads no images"):
        LLM(make("Llama"), None).generate(prompt, GREEDY, use_tqdm=False)
    check_empty(llm)
    (output,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == NEW


def test_a_row_that_fails_takes_no_other_with_it():
    """An image at which the tower raises; and a row at which each step raises once it has begun to write, beside image rows."""
    model, processor = build_multimodal("llava"), build_processor("llava")
    llm, expected = LLM(model, processor, NGRAM), plain(model, processor, CONVERSATIONS)
    bad = processor.apply_chat_template(user(picture(9), "ab"), tokenize=True, return_dict=True, return_tensors="pt")

    def refuse(module, args, given):
        pixels = given.get("pixel_values", args[0] if args else None)
        if torch.equal(pixels, bad["pixel_values"]):
            raise RuntimeError("this one")

    hook = model.model.vision_tower.register_forward_pre_hook(refuse, with_kwargs=True)
    with pytest.raises(Exception, match="have changed since"):
        llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
    llm.close()
    llm = LLM(model, processor, NGRAM)
    outputs = llm.chat([*CONVERSATIONS, user(picture(9), "ab")], GREEDY, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in outputs[:4]] == expected and str(outputs[4].error) == "this one"
    hook.remove()
    llm.close()
    llm = LLM(model, processor, {"method": "none"})
    engine, forward, poison = llm.engine, llm.engine.decoder.target.forward, []

    def failing(rows, *args, **more):
        if (
            poison
            and len(engine.scheduler.running) + len(engine._isolated)
            and any(row.seq_id in poison for row in rows)
        ):
            raise RuntimeError("a step")
        return forward(rows, *args, **more)

    engine.decoder.target.forward = failing
    requests = []
    for messages in [*CONVERSATIONS, CONVERSATIONS[1]]:
        inputs = processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
        images = {k: v.numpy() for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
        given = EncoderInput(images=images) if images else None
        requests.append(engine.add("x", None, inputs["input_ids"][0].tolist(), GREEDY, encoder=given))
    with engine.decoder.active():
        for _ in range(12):
            engine.step()
        poison.append(requests[4].choices[0].sequence.id)
        for _ in range(200):
            engine.step()
    assert not engine.has_work and str(requests[4].error) == "a step"
    assert [each.choices[0].output.token_ids for each in requests[:4]] == expected
    check_empty(llm)


# ---- the server -------------------------------------------------------------------------------------------------------


class Images(BaseHTTPRequestHandler):
    """A host of images."""

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path == "/slow.png":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            return
        port = self.server.server_port
        location = {
            "/moved.png": "/0.png", "/loop.png": "/loop.png", "/away.png": f"http://localhost:{port}/0.png",
            "/inside.png": f"http://inside.example:{port}/0.png",
        }.get(path)  # fmt: skip
        body = {"/0.png": png(picture(0)), "/large.png": bytes(5000)}.get(path, b"")
        self.send_response(302 if location else 200 if body else 404)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def host():
    """The address of a host of images on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Images)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def asked(messages):
    """A conversation as OpenAI's clients send it."""
    return [
        {**message, "content": [
            part if part["type"] == "text" else {"type": "image_url", "image_url": {"url": data_url(png(part["image"]))}}
            for part in message["content"]
        ]} for message in messages
    ]  # fmt: skip


@pytest.mark.parametrize("place", ["thread", pytest.param("processes", marks=pytest.mark.slow)])
def test_openais_client(place, folder, host):
    """Data URLs long and short, a fetched image, a stream, responses, and texts beside them; and through all processes."""
    model, processor = build_multimodal("llava"), build_processor("llava")
    expected = [processor.decode(ids, skip_special_tokens=True) for ids in plain(model, processor, CONVERSATIONS)]
    noise = user(picture(7, 150, 150), "large")  # its body is read in another process
    (large,) = (processor.decode(ids, skip_special_tokens=True) for ids in plain(model, processor, [noise]))
    options = {"model": "tiny", "temperature": 0, "max_tokens": NEW, "extra_body": {"ignore_eos": True}}
    flags = (
        "--speculative-config",
        json.dumps(NGRAM),
        "--allowed-media-hosts",
        "127.0.0.1",
        "--served-model-name",
        "tiny",
    )
    running = in_thread(NGRAM, model=folder, media_hosts=["127.0.0.1"], max_model_len=200)
    if place == "processes":
        running = Process.running(*flags, model=folder)
    with running as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        for messages, text in zip([*CONVERSATIONS, noise], [*expected, large], strict=True):
            answer = client.chat.completions.create(messages=asked(messages), **options)
            assert answer.choices[0].message.content == text
        answer = client.chat.completions.create(
            messages=[{"role": "user", "content": "one two one two one"}], **options
        )
        assert answer.choices[0].message.content == expected[1]  # LLaVA's template wants parts
        fetched = [
            {"type": "image_url", "image_url": {"url": f"{host}/moved.png?a=b"}},
            {"type": "text", "text": "abcabcabcab"},
        ]
        stream = client.chat.completions.create(messages=[{"role": "user", "content": fetched}], stream=True, **options)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected[0]
        parts = [
            {"type": "input_image", "image_url": data_url(png(picture(0))), "detail": "low"},
            {"type": "input_text", "text": "abcabcabcab"},
        ]
        response = client.responses.with_raw_response.create(
            model="tiny", input=[{"role": "user", "content": parts}], temperature=0, max_output_tokens=NEW,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert response.parse().output_text == expected[0]
        assert response.headers["x-ignored-fields"] == "image_url.detail"
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(picture(0))).decode()}
        for of in (source, {"type": "url", "url": f"{host}/moved.png?a=b"}):
            parts = [{"type": "image", "source": of}, {"type": "text", "text": "abcabcabcab"}]
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": NEW, "temperature": 0}
            status, _, answer = server.post("/v1/messages", {**body, "ignore_eos": True})
            assert (status, answer["content"]) == (200, [{"type": "text", "text": expected[0]}])
            status, _, answer = server.post("/v1/messages/count_tokens", body)
            assert status == 400 and "Images and audio are not tokenized" in answer["error"]["message"]
        with pytest.raises(openai.BadRequestError, match="cannot be read"):
            broken = [{"type": "image_url", "image_url": {"url": data_url(b"none")}}]
            client.chat.completions.create(messages=[{"role": "user", "content": broken}], **options)


def bomb(width, height):
    """A PNG file of few bytes that has many pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def test_what_is_refused(folder, host, monkeypatch):
    """Each with one clear 400, after which the server still answers."""
    monkeypatch.setattr(media, "_SECONDS", 0.5)
    small, resolve = data_url(png(picture(0, 8, 8))), socket.getaddrinfo

    def named(name, *args, **more):
        return resolve("127.0.0.1" if name == "inside.example" else name, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", named)
    hosts = ["127.0.0.1", "inside.example"]
    with in_thread(model=folder, media_hosts=hosts, max_body_bytes=4000, max_model_len=100) as server:
        for url, message in (
            (data_url(bomb(50_000, 50_000)), "Image 1 (has 50000 × 50000 pixels|cannot be read: .*exceeds limit)"),
            (data_url(bomb(9_000, 9_000)), "Image 1 has 9000 × 9000 pixels; .* all together may have 64000000"),
            (data_url(bomb(20_000, 9)), "one side may be 200 times the other"),
            (data_url(png(picture(0))[:200]), "Image 1 cannot be read"),
            (data_url(b"GIF89a"), "Image 1 cannot be read"),
            (data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "Image 1 cannot be read"),
            ("data:image/png;base64,?", "not base64"),
            ("data:image/png,abc", "begins with data:image"),
            ("file:///etc/passwd", "begins with https"),
            ("ftp://127.0.0.1/x", "begins with https"),
            ("http://[::1", "cannot be fetched"),
            ("https://example.com/x.png", "example.com is not among --allowed-media-hosts"),
            ("http://127.0.0.1@example.com/x.png", "example.com is not among"),
            (f"{host}/away.png", "localhost is not among"),
            (f"{host}/inside.png", "inside.example has a private address"),
            (host.replace("127.0.0.1", "inside.example") + "/0.png", "inside.example has a private address"),
            (f"{host}/loop.png", "redirects more than 3 times"),
            (f"{host}/none.png", "answers with status 404"),
            (f"{host}/large.png", "may have 4000 bytes"),
            (f"{host}/slow.png", "took longer than"),
            (f"{host}/a b", "cannot be fetched"),
            (None, "a part with an image has"),
        ):  # fmt: skip
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "ab"}]
            body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
            began = time.monotonic()
            status, _, answer = server.post("/v1/chat/completions", body)
            found = answer["error"]["message"] if status != 200 else answer
            assert status == 400, (url, found)
            assert re.search(message, found), (url, found)
            assert time.monotonic() < began + 5
        many = [{"type": "image_url", "image_url": {"url": small}}]
        for parts, message in (
            ([*many, {"type": "text", "text": "<image>"}], "processor refuses"),
            ([{"type": "input_audio", "input_audio": {}}], "a part with audio has"),
            ([*many, {"type": "text", "text": "a" * 120}], "The prompt has"),
        ):
            status, _, answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
            assert status == 400 and message in answer["error"]["message"], answer
        status, _, answer = server.post("/tokenize", {"messages": [{"role": "user", "content": many}]})
        assert status == 400 and "not tokenized here" in answer["error"]["message"]
        body = {"messages": [{"role": "user", "content": many}]}
        with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
            patch.setattr(server_module, "_MOST_BYTES_OF_IMAGES", 2500)
            found = [answer[0] for answer in pool.map(server.post, ["/v1/chat/completions"] * 8, [body] * 8)]
            assert set(found) == {200, 429}
        status, _, answer = server.post("/v1/chat/completions", body)
        assert status == 200 and answer["usage"]["prompt_tokens"] == 7
    with pytest.raises(ValueError, match="more than 32 images"):
        of_images.read_images([png(picture(0, 2, 2))] * 33)
    with in_thread() as server:
        status, _, answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": many}]})
        assert status == 400 and "tiny reads no images" in answer["error"]["message"]


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1", "fe80::1", "fd00::1",
     "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"],
)  # fmt: skip
def test_private_addresses(address, monkeypatch):
    """Whatever a listed name, or any, stands for. A public one is asked."""
    found = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: found)
    for where in (address, "8.8.8.8"):
        family = socket.AF_INET6 if ":" in where else socket.AF_INET
        found[:] = [(family, socket.SOCK_STREAM, 6, "", (where, 80))]
        for hosts in (["name.example"], ["*"]):
            monkeypatch.setattr(socket.socket, "connect", lambda *args: (_ for _ in ()).throw(OSError("asked")))
            with pytest.raises(ApiError, match="asked" if where != address else "has a private address"):
                media.Media(hosts, 100)._fetch({"http://name.example/x"})
