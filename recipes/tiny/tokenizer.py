"""The family's tokenizer: byte-level BPE, so every UTF-8 text comes back unchanged, with a chat template."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 4096
CONTEXT = 1024
END_OF_TEXT, USER, ASSISTANT, END, PAD, SYSTEM = (
    "<|endoftext|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|pad|>",
    "<|system|>",
)
SPECIAL_TOKENS = [END_OF_TEXT, USER, ASSISTANT, END, PAD, SYSTEM]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(documents: list[str], folder: Path) -> PreTrainedTokenizerFast:
    """Learn `VOCABULARY` tokens (the special ones and all bytes among them) and save the tokenizer to `folder`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        bos_token=None,
        unk_token=None,
        additional_special_tokens=[END_OF_TEXT, USER, ASSISTANT, SYSTEM],
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer
