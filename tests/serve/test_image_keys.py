"""Mllama in LLM and the server: keys of images stand beside those of text, have room in the memory plan, and leave with their rows."""

import openai
import pytest
from helpers_server import in_thread
from mllama import build_mllama, eagle3_head, needs_image_layers
from multimodal import build_processor
from test_images import CONVERSATIONS, GREEDY, NEW, NGRAM, TREE, asked, check_empty, picture, plain, user

from hf_specdec.serve import LLM, SamplingParams
from hf_specdec.serve.engine.encoder import EncoderInput

pytestmark = needs_image_layers
TILE = (
    5 * 2 * 2 * 2 * 12 * 4
)  # bytes of a tile: keys, layers that attend to images, keys and values, heads, width, float32
TOKEN = 3 * 2 * 2 * 12 * 4  # of a token of text in the other layers


@pytest.fixture(scope="module")
def model():
    return build_mllama()


@pytest.fixture(scope="module")
def processor():
    return build_processor("mllama")


def requests_of(llm, processor, conversations, params=GREEDY):
    requests = []
    for messages in conversations:
        given = processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
        images = {k: v.numpy() for k, v in given.items() if k not in ("input_ids", "attention_mask")}
        encoder = EncoderInput(images=images) if images else None
        requests.append(llm.engine.add("x", None, given["input_ids"][0].tolist(), params, encoder=encoder))
    return requests


def held(llm):
    """The ids of rows whose images' keys are there, and how many blocks these take."""
    cross = llm.engine.decoder.cache.cross
    return ([], 0) if cross is None else (list(cross.tables), cross.pool.num_used)


def test_the_memory_plan_has_room_for_images(model, processor):
    """Rows with images wait for it, and text beside them does not. A row with more images than there is room for is refused."""
    expected = plain(model, processor, CONVERSATIONS)
    limits = {"max_model_len": 80, "max_num_seqs": 8, "kv_cache_memory_bytes": 60 * TILE}
    llm = LLM(model, processor, {**NGRAM, "block_size": 5}, **limits)
    cache, room = llm.engine.decoder.cache, llm.engine.admission.num_image_blocks  # a block is a tile
    assert 4 <= room < 16
    assert 55 * TILE < room * TILE + cache.most_blocks * 5 * TOKEN <= 60 * TILE
    requests, peak = requests_of(llm, processor, CONVERSATIONS * 3), []
    llm.engine.run(lambda touched: peak.append(held(llm)[1]))
    assert [each.choices[0].output.token_ids for each in requests] == expected * 3
    assert 0 < max(peak) <= room == cache.cross.most_blocks
    check_empty(llm)
    many = user("x", *(picture(i) for i in range(9)))
    with pytest.raises(ValueError, match=r"The images have \d+ keys; there is memory for \d+"):
        llm.chat(many, GREEDY, use_tqdm=False)
    llm.close()
    with pytest.raises(ValueError, match=r"in addition to \d+ bytes of an image's keys"):
        LLM(model, processor, **{**limits, "kv_cache_memory_bytes": 4 * TILE})
    llm = LLM(model, processor, **{**limits, "kv_cache_memory_bytes": 2000 * TILE})
    assert llm.engine.admission.num_image_blocks * 16 >= 8 * 4 * 5
    assert llm.engine.decoder.cache.most_blocks == 8 * 6  # all of the texts fit as well
    llm.close()


def test_heads_that_tap_layers_of_images(model, processor, tmp_path):
    """Rows with and without images in one step, prompts in chunks, too few blocks: rows that give way leave their images, too."""
    expected = plain(model, processor, CONVERSATIONS)
    head = {"method": "eagle3", "model": eagle3_head(tmp_path), "num_speculative_tokens": 3}
    for config, limits in (
        (head, {"max_num_batched_tokens": 8}),
        ({**head, "branching_factors": [2, 2, 1]}, {}),
        ({**head, "num_blocks": 24, "block_size": 4}, {}),
    ):
        llm = LLM(model, processor, config, max_model_len=80, **limits)
        mixed = []

        def note(touched, llm=llm, mixed=mixed):
            images = held(llm)[0]
            mixed.append((len(images), len(llm.engine.scheduler.running)))
            assert all(llm.engine.decoder.cache.tables[seq_id].length for seq_id in images)

        requests = requests_of(llm, processor, CONVERSATIONS)
        llm.engine.run(note)
        assert [each.choices[0].output.token_ids for each in requests] == expected
        assert any(0 < count < running for count, running in mixed)
        assert (llm.engine.scheduler.num_preemptions > 0) == ("num_blocks" in config)
        check_empty(llm)
        llm.close()


def test_an_aborted_row_leaves_nothing(model, processor):
    llm = LLM(model, processor, NGRAM, max_model_len=80)
    engine, requests = llm.engine, requests_of(llm, processor, CONVERSATIONS)
    with engine.decoder.active():
        while len(held(llm)[0]) < 3:
            engine.step()
        engine.abort(requests[0])
        assert len(held(llm)[0]) == 2
        engine.scheduler.preempt(requests[2].choices[0])
        assert len(held(llm)[0]) == 1
        for request in requests[1:3]:
            engine.abort(request)
    engine.run()
    assert requests[3].choices[0].output.token_ids == plain(model, processor, CONVERSATIONS[3:])[0]
    check_empty(llm)
    llm.close()


def test_the_server(model, processor, tmp_path):
    """From a folder: conversations, a stream, responses, and a seed whatever the method."""
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    texts, drawn = (
        [processor.decode(ids, skip_special_tokens=True) for ids in plain(model, processor, CONVERSATIONS)],
        [],
    )
    options = {"model": "tiny", "max_tokens": NEW, "extra_body": {"ignore_eos": True}}
    for config in (NGRAM, TREE, {"method": "none"}):
        with (
            in_thread(config, model=tmp_path, max_model_len=200) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client,
        ):
            ask = client.chat.completions.create
            for messages, text in zip(CONVERSATIONS, texts, strict=True):
                answer = ask(messages=asked(messages), temperature=0, **options)
                assert answer.choices[0].message.content == text
            stream = ask(messages=asked(CONVERSATIONS[2]), temperature=0, stream=True, **options)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == texts[2]
            image = asked(CONVERSATIONS[0])[0]["content"][0]["image_url"]["url"]
            parts = [{"type": "input_image", "image_url": image}, {"type": "input_text", "text": "abcabcabcab"}]
            response = client.responses.create(
                model="tiny", input=[{"role": "user", "content": parts}], temperature=0, max_output_tokens=NEW,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            assert response.output_text == texts[0]
            drawn.append(
                ask(messages=asked(CONVERSATIONS[2]), temperature=0.9, seed=5, **options).choices[0].message.content
            )
    assert drawn[0] == drawn[1] == drawn[2] != texts[2]


def test_penalties_see_padding_for_the_placeholder(model, processor):
    """Which has no logits, and so no penalty; the result shows it."""
    llm, texts = LLM(model, processor, NGRAM, max_model_len=80), []
    for penalty in (1.0, 1.3):
        params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, repetition_penalty=penalty)
        (output,) = llm.chat(CONVERSATIONS[0], params, use_tqdm=False)
        assert processor.image_token_id in output.prompt_token_ids
        texts.append(output.outputs[0].token_ids)
    assert texts[0] != texts[1]
    with pytest.raises(ValueError, match="The prompt holds the id 128"):
        llm.generate([[5, processor.image_token_id]], GREEDY, use_tqdm=False)
    llm.close()
