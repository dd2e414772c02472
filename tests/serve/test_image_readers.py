"""Pairs of models whose encoder reads an image: every request gets the text of generate()."""

import numpy as np
import pytest
import torch
from encoders import NEW, NGRAM, TREE, VOCAB, build
from helpers_server import in_thread
from test_encoders import GREEDY, check_empty
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrOCRProcessor
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from hf_specdec.serve import LLM


def tokenizer_of_words():
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<3>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", bos_token="<1>", eos_token="<2>")


def test_llm_reads_images(tmp_path, monkeypatch):
    """Pairs whose encoder reads one, from a folder and in memory; how the decoder begins; a bad image is its request's alone."""
    tokenizer = tokenizer_of_words()
    reader = ViTImageProcessorPil(size={"height": 32, "width": 32})
    draw = np.random.default_rng(0)
    pictures = [draw.integers(0, 255, (20 + i, 30, 3), dtype=np.uint8) for i in range(4)]
    for family in ("vision mbart", "vision trocr", "vision donut"):
        model = build(family, 4)
        pixels = reader(pictures, return_tensors="pt")["pixel_values"]
        plain = model.generate(pixels, max_new_tokens=NEW, do_sample=False)[:, 1:].tolist()
        start = [] if "donut" in family else [1]  # transformers' rule: its prompts are whole
        begun = torch.tensor([[*start, 7, 9]])
        begun = model.generate(pixels[:1], decoder_input_ids=begun, max_new_tokens=NEW, do_sample=False)
        begun = begun[0, len(start) + 2 :].tolist()
        assert len(set(map(tuple, [*plain, begun]))) == 5
        for part in (model, reader, tokenizer):
            part.save_pretrained(tmp_path / family)
        for llm in (
            LLM(str(tmp_path / family), speculative_config=NGRAM, device="cpu"),
            LLM(model, TrOCRProcessor(reader, tokenizer), {**TREE, "block_size": 4, "num_blocks": 20}),
        ):
            prompts = [{"multi_modal_data": {"image": picture}} for picture in pictures]
            prompts += [{**prompts[0], "prompt": "<7> <9>"}, {**prompts[0], "prompt_token_ids": [*start, 7, 9]}]
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == [*plain, begun, begun]
            for wrong, message in (
                ("<7>", "A prompt of this model is"), ({"multi_modal_data": {"image": pictures}}, "one image"),
                ({"multi_modal_data": {"image": "no image"}}, "refuses the image"), ({"multi_modal_data": {"audio": 1}}, "A prompt of"),
                ({"multi_modal_data": {"image": np.full((32, 32, 3), np.nan)}}, "refuses|finite"),
            ):  # fmt: skip
                with pytest.raises(ValueError, match=message):
                    llm.generate(wrong, GREEDY, use_tqdm=False)
            with monkeypatch.context() as patch:
                patch.setattr(llm.encoder, "pixels", (3, 16, 16))
                with pytest.raises(ValueError, match="images of this model become"):
                    llm.generate(prompts, GREEDY, use_tqdm=False)
            check_empty(llm)
            llm.close()


def test_the_server_says_who_reads_them(tmp_path):
    build("vision mbart").save_pretrained(tmp_path)
    tokenizer_of_words().save_pretrained(tmp_path)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    with in_thread(NGRAM, model=tmp_path, max_model_len=None) as server:
        for path, body in (
            ("completions", {"prompt": "<5>"}),
            ("chat/completions", {"messages": [{"role": "user", "content": "<5>"}]}),
        ):
            status, _, got = server.post(f"/v1/{path}", body)
            assert status == 400 and "which LLM.generate answers" in got["error"]["message"]
