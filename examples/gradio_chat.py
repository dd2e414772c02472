"""A chat that tints drafted tokens: green ones were drafted and accepted, the others are the model's own.

python examples/gradio_chat.py --model Qwen/Qwen3-0.6B --speculative-config '{"method": "ngram"}'
"""

import argparse
import json
import threading
from queue import SimpleQueue

import gradio as gr
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec
from hf_specdec.cli.accepted_tokens import AcceptedTokens


class Pieces(AcceptedTokens):
    """Puts (text, is drafted) into a queue as tokens are accepted; None at the end."""

    def __init__(self, model, tokenizer):
        super().__init__(None, model, tokenizer)
        self.queue = SimpleQueue()

    def show(self, tokens, style):
        self.tokens += tokens
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd") and len(text) > len(self.printed):
            self.queue.put((text[len(self.printed) :], "drafted" if style else None))
            self.printed = text

    def end(self):
        self.end_step()
        self.queue.put(None)


def answers(model, tokenizer, speculative_config, message, max_new_tokens=128):
    """Yields the answer so far as a list of (text, "drafted" or None)."""
    chat = [{"role": "user", "content": message}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    pieces, failure = Pieces(model, tokenizer), []

    def write():
        try:
            with pieces:
                model.generate(
                    **inputs.to(model.device),
                    max_new_tokens=max_new_tokens,
                    speculative_config=speculative_config,
                    streamer=pieces,
                )
        except Exception as error:
            failure.append(error)
            pieces.queue.put(None)

    thread = threading.Thread(target=write)
    thread.start()
    shown = []
    while (piece := pieces.queue.get()) is not None:
        shown.append(piece)
        yield shown
    thread.join()
    if failure:
        raise failure[0]


def main(argv=None, launch=True):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--speculative-config", type=json.loads, default={"method": "eagle3", "model": "tiny-eagle3"})
    args = parser.parse_args(argv)
    folder = hf_specdec.resolve_model(args.model)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

    with gr.Blocks(title="hf-specdec") as app:
        message = gr.Textbox(label="You", value="Tell me a story about a big dog.")
        colours = {"drafted": "green"}
        answer = gr.HighlightedText(label="The model", color_map=colours, show_legend=True, show_inline_category=False)

        def reply(text):
            yield from answers(model, tokenizer, args.speculative_config, text)

        message.submit(reply, message, answer)
    if launch:
        app.launch()
    return app, reply


if __name__ == "__main__":
    main()
