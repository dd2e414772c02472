"""Text of new tokens, one at a time: always the end of what decoding everything gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_specdec.serve.engine.text import Detokenizer, find_stop, token_bytes, token_text

LETTERS = bytes_to_unicode()  # how byte-level BPE writes bytes


def byte_level():
    """Each byte is a token; "the " and a part of "👍" are, too."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "theĠ", "ðŁĳ"]
    return models.BPE({piece: i for i, piece in enumerate(pieces)}, []), decoders.ByteLevel(), LETTERS


def byte_fallback(*strip):
    """SentencePiece's pieces: words, and bytes where there are none."""
    pieces = ["<unk>", "▁a", "▁", "b", "é", "▁the", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    return model, decoders.Sequence(parts), {byte: f"<0x{byte:02X}>" for byte in range(256)}


def word_pieces():
    """Words and parts of words; no bytes."""
    pieces = ["[UNK]", "do", "n", "'", "t", "s", "##s", "##ing", ".", ",", "the", "ve", "!"]
    model = models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    return model, decoders.WordPiece(cleanup=False), {}


KINDS = {
    "byte level": byte_level(), "byte fallback, Llama": byte_fallback(decoders.Strip(" ", 1, 0)),
    "byte fallback, Gemma": byte_fallback(), "word pieces": word_pieces(),
}  # fmt: skip


def tokenizer_of(kind):
    """A tokenizer with the special token "<end>", and its ids of bytes."""
    model, decoder, pieces = KINDS[kind]
    raw = Tokenizer(model)
    raw.decoder = decoder
    cleans = kind == "word pieces"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", clean_up_tokenization_spaces=cleans)
    return tokenizer, {byte: tokenizer.convert_tokens_to_ids(piece) for byte, piece in pieces.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_what_decoding_everything_gives(kind):
    """For all ids, however many come at a time, and all places where the prompt ends. No piece is taken back."""
    tokenizer, ids_of = tokenizer_of(kind)
    thumb = [ids_of[byte] for byte in "👍".encode()] if ids_of else []
    part = st.one_of(st.integers(0, len(tokenizer) - 1).map(lambda id: [id]), st.just(thumb))

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(st.lists(part, max_size=30), st.integers(0, 40), st.booleans(), st.integers(1, 9), st.integers(0, 9))
    def check(parts, cut, skips, size, num_last):
        ids = [id for part in parts for id in part]
        prompt, answer = ids[:cut], ids[cut:]
        answer, last = answer[: max(0, len(answer) - num_last)], answer[max(0, len(answer) - num_last) :]
        found, pieces = Detokenizer(tokenizer, prompt, skips), []
        for i in range(0, len(answer), size):
            pieces.append(found.add(answer[i : i + size]))
            so_far = tokenizer.decode(prompt + answer[: i + size], skip_special_tokens=skips)
            if "\ufffd" not in so_far:
                shown = found.text + found.tail
                assert so_far.endswith(shown) or " " + so_far == shown  # Llama's decoder drops a text's first space
        pieces.append(found.finish(last))
        whole, before = (tokenizer.decode(each, skip_special_tokens=skips) for each in (ids, prompt))
        assert found.text == "".join(pieces) and whole.endswith(found.text)
        if "\ufffd" not in before or whole.startswith(before):  # else the answer completes a character
            assert found.text == whole[len(before) :]

    check()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][2]])
def test_characters_of_several_tokens(kind):
    """Cut by the prompt's end, by the beginning of its last six tokens, and by a byte that fits nothing."""
    tokenizer, ids_of = tokenizer_of(kind)
    thumb, junk = [ids_of[byte] for byte in "👍".encode()], ids_of[0xFF]
    word = tokenizer.convert_tokens_to_ids("theĠ" if kind == "byte level" else "▁the")

    def pieces(prompt, answer):
        found = Detokenizer(tokenizer, prompt)
        return [*(found.add([token]) for token in answer), found.finish([])]

    told = "the " if kind == "byte level" else " the"
    assert "".join(pieces(thumb * 2, [*thumb, word])) == "👍" + told
    assert "".join(pieces(thumb[:2], [*thumb[2:], word])) == "👍" + told
    assert pieces(thumb[:2], []) == [""] and "".join(pieces(thumb[:2], [word, *thumb])) == told + "👍"
    # the prompt's beginning is forgotten before its last byte is decided
    long, after = [word] * 8 + [junk] + [word] * 4 + thumb[:1], [thumb[1], word]
    whole, before = (tokenizer.decode(ids) for ids in (long + after, long))
    assert "".join(pieces(long, after)) == whole[len(before) :]
    unknown = "\ufffd" * (1 if kind == "byte level" else 3)  # one for the character, or one for each of its bytes
    assert "".join(pieces([word], [*thumb[:3], word])) == unknown + told
    assert "".join(pieces([word], [junk, word, *thumb])) == "\ufffd" + told + "👍"
    assert pieces([word], [*thumb[:3]]) == ["", "", "", unknown]
    # what can never be completed is shown at once, or after the run of bytes that it spoils
    shown = pieces([word], [junk, junk, word, word])
    assert shown[:3] == (["\ufffd", "\ufffd", told] if kind == "byte level" else ["", "", "\ufffd\ufffd" + told])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][2]])
@pytest.mark.parametrize("what", ["no character", "a character", "special", "no token", "words and bytes"])
def test_long_texts_take_time_in_proportion(kind, what):
    """Few ids are decoded for a new one."""
    tokenizer, ids_of = tokenizer_of(kind)
    counts = []

    class Counting:
        clean_up_tokenization_spaces = False
        convert_ids_to_tokens = staticmethod(tokenizer.convert_ids_to_tokens)

        def decode(self, ids, **arguments):
            counts.append(len(ids))
            return tokenizer.decode(ids, **arguments)

    found = Detokenizer(Counting(), [ids_of[ord("a")]] * 300)
    word = tokenizer.convert_tokens_to_ids("theĠ" if kind == "byte level" else "▁the")
    repeated = {
        "no character": [ids_of[0xFF]], "a character": [ids_of[ord("x")]], "special": [tokenizer.eos_token_id],
        "no token": [len(tokenizer) + 5], "words and bytes": [word, ids_of[ord("x")], ids_of[ord("y")]],
    }[what]  # fmt: skip
    for token in repeated * (2000 // len(repeated)):
        found.add([token])
    found.finish([])
    assert sum(counts) < 2400 * 40


def test_tokens_keep_the_spaces_that_their_own_text_loses():
    """SentencePiece's tokenizers (Llama 2, Mistral) decode "▁dog" by itself to "dog". Log-probabilities show each token by itself."""
    pieces = ["<unk>", "<s>", "▁a", "▁", "▁▁▁", "▁▁dog", "s", "<0xC3>", "<0xA9>", "▁é"]
    raw = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", unk_token="<unk>")
    ids = [2, 2, 3, 4, 5, 6, 7, 8, 9]
    assert tokenizer.decode([5]) == " dog"  # one space too few
    texts = [token_text(tokenizer, id) for id in ids]
    assert texts == [" a", " a", " ", "   ", "  dog", "s", "\ufffd", "\ufffd", " é"]
    assert b"".join(token_bytes(tokenizer, id) for id in ids).decode() == " " + tokenizer.decode(ids)
    assert token_text(tokenizer, 1) == "<s>" and token_text(None, 1) is None


def test_a_tokenizer_whose_tokens_are_bytes():
    """As QWen's first one."""

    class Bytes:
        def convert_ids_to_tokens(self, token):
            return bytes([token])

        def decode(self, ids, skip_special_tokens=False):
            return bytes(ids).decode(errors="replace")

    found = Detokenizer(Bytes(), list(b"a"))
    assert [found.add([token]) for token in "é\N{THUMBS UP SIGN}b".encode()] == ["", "é", "", "", "", "👍", "b"]
    assert found.add([0xFF]) == "\ufffd"
    assert token_text(Bytes(), 97) == "a" and token_bytes(Bytes(), 0xC3) == b"\xc3"


def test_stop_texts_are_found_across_tokens():
    assert find_stop("abcde", 1, ["de", "cde"]) == (2, "cde")
    assert find_stop("abcde", 1, ["bc"]) is None  # found when its last character came
    assert find_stop("abcbc", 2, ["bc"]) == (3, "bc")
    assert find_stop("", 0, ["x"]) is None
