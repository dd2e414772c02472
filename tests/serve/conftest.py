"""What tests of the server share."""

import pytest
from helpers_weights import changed, plain
from oracle import bundled_prompts, load_bundled


@pytest.fixture(scope="module")
def new_model():
    """A model that writes other texts than the bundled one."""
    return changed()


@pytest.fixture(scope="module")
def new_folder(new_model, tmp_path_factory):
    """The folder of `new_model`."""
    root = tmp_path_factory.mktemp("new")
    new_model.save_pretrained(root)
    return str(root)


@pytest.fixture(scope="module")
def three_prompts(tiny_tokenizer):
    texts = bundled_prompts(tiny_tokenizer, 3)
    return [tiny_tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@pytest.fixture(scope="module")
def both_texts(three_prompts, new_model):
    """What the old weights and the new ones write after `three_prompts`."""
    texts = plain(load_bundled("tiny"), three_prompts), plain(new_model, three_prompts)
    assert all(old != new for old, new in zip(*texts, strict=True))
    return texts
