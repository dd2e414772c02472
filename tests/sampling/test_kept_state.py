"""Logits processors that keep state: called once per token, in order, or undone; and how that is noticed."""

import collections
import functools
import random

import numpy as np
import pytest
import torch
from oracle import assert_clean, ragged
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specdec.sampling.kept_state import KeptState

PROMPTS = ragged([7, 9, 4])


class Counter(LogitsProcessor):
    """Forbids another token in each call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores[:, (7 * self.calls + torch.arange(40)) % scores.shape[1]] -= 3.0
        return scores


class RowMachine(LogitsProcessor):
    """A state per row of the batch, in a tensor, that moves with the row's last token."""

    def __init__(self):
        self.state = None

    def __call__(self, input_ids, scores):
        if self.state is None:
            self.state = torch.zeros(len(input_ids), dtype=torch.long)
        self.state = (3 * self.state + input_ids[:, -1] + 1) % 5
        return scores + torch.nn.functional.one_hot(torch.arange(scores.shape[1]) % 5, 5).float()[:, self.state].T * 4


class Late(LogitsProcessor):
    """Changes only once the text is long enough: drafted nodes set it off first."""

    def __init__(self, seen):
        self.seen = seen

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 20:
            self.seen.append(int(input_ids.shape[1]))
        return scores if not self.seen else scores.roll(len(self.seen) % 7, dims=1)


class Rolling(LogitsProcessor):
    """Holds what cannot be looked into."""

    def __init__(self):
        self.shifts = iter(range(1, 1000))

    def __call__(self, input_ids, scores):
        return scores.roll(next(self.shifts) % 11, dims=1)


class Closure(LogitsProcessor):
    """Keeps its state in a function's closure."""

    def __init__(self):
        held = [0]

        def shift():
            held[0] += 1
            return held[0] % 11

        self.shift = shift

    def __call__(self, input_ids, scores):
        return scores.roll(self.shift(), dims=1)


class CallsOfTheClass(LogitsProcessor):
    """Keeps its state in its class."""

    calls = 0

    def __call__(self, input_ids, scores):
        type(self).calls += 1
        return scores.roll(type(self).calls % 11, dims=1)


def fresh_class():
    CallsOfTheClass.calls = 0
    return CallsOfTheClass()


class Allowed:
    """For `prefix_allowed_tokens_fn`: allows other tokens at each call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, row, ids):
        self.calls += 1
        return [(self.calls * 7 + j) % 60 for j in range(20)]


MAKERS = {
    "class": fresh_class,
    "counter": Counter,
    "row machine": RowMachine,
    "late": lambda: Late([]),
    "opaque": Rolling,
    "closure": Closure,
}


@pytest.mark.parametrize(
    ("name", "rows"), [(name, rows) for name in MAKERS for rows in (1, 3) if (name, rows) != ("late", 3)]
)
def test_greedy_text_and_state_are_those_of_plain_generate(model, configs, name, rows):
    inputs = {key: value[:rows] for key, value in PROMPTS.items()}
    wanted_processor = MAKERS[name]()
    wanted = model.generate(**inputs, max_new_tokens=25, logits_processor=LogitsProcessorList([wanted_processor]))
    for config in configs.values():
        processor = MAKERS[name]()
        found = model.generate(
            **inputs, max_new_tokens=25, logits_processor=LogitsProcessorList([processor]), speculative_config=config
        )
        assert found.tolist() == wanted.tolist()
        if name == "counter":
            assert processor.calls == wanted_processor.calls == 25
        if name == "late":
            assert processor.seen == wanted_processor.seen and processor.seen
    assert_clean(model)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_function_of_allowed_tokens_that_keeps_state(model, configs, rows):
    inputs = {key: value[:rows] for key, value in PROMPTS.items()}
    plain = Allowed()
    wanted = model.generate(**inputs, max_new_tokens=25, prefix_allowed_tokens_fn=plain)
    for config in configs.values():
        allowed = Allowed()
        found = model.generate(**inputs, max_new_tokens=25, prefix_allowed_tokens_fn=allowed, speculative_config=config)
        assert found.tolist() == wanted.tolist() and allowed.calls == plain.calls
    assert_clean(model)


def test_who_declares_to_keep_no_state_is_drafted_for(model, configs):
    """A cache changes at calls, but not what they return."""
    seen = {}

    def allowed(row, ids):
        return seen.setdefault(len(ids), [*range(30)])

    def drafts():
        out = model.generate(
            **PROMPTS, max_new_tokens=12, prefix_allowed_tokens_fn=allowed, return_dict_in_generate=True,
            speculative_config=configs["chain"],
        )  # fmt: skip
        return out.speculation["num_draft_tokens"]

    assert drafts() == 0
    allowed.keeps_state = False
    assert drafts() > 0


def test_state_that_begins_late_in_a_batch(model, configs):
    """Rows that have got ahead cannot be taken back: an error, and a way out that gives plain decoding's text."""
    processor = Late([])
    arguments = {**PROMPTS, "max_new_tokens": 25, "logits_processor": LogitsProcessorList([processor])}
    with pytest.raises(ValueError, match=r"Late keeps state.*keeps_state = True"):
        model.generate(**arguments, speculative_config=configs["chain"])
    assert_clean(model)
    processor.seen.clear()
    wanted = model.generate(**arguments)
    seen = list(processor.seen)
    processor.seen.clear()
    processor.keeps_state = True
    assert model.generate(**arguments, speculative_config=configs["chain"]).tolist() == wanted.tolist()
    assert processor.seen == seen


def test_the_same_object_again(model, configs):
    """What it was called for in one call counts in the next, as with plain generate()."""
    ours, theirs = Late([]), Late([])
    one = {key: value[:1] for key, value in PROMPTS.items()}
    for _ in range(2):
        outputs = [
            model.generate(**one, max_new_tokens=15, logits_processor=LogitsProcessorList([each]), **more)
            for each, more in ((ours, {"speculative_config": configs["chain"]}), (theirs, {}))
        ]
        assert outputs[0].tolist() == outputs[1].tolist()
    assert ours.seen == theirs.seen


class Stateless(LogitsProcessor):
    """Looks at the prefix, and holds much that never changes."""

    def __init__(self):
        self.table, self.ids, self.me = torch.randn(61), {"a": [1, 2], "b": (3, None)}, self

    def __call__(self, input_ids, scores):
        return scores + self.table.roll(int(input_ids.shape[1]))


def test_processors_without_state_are_drafted_for(model, configs, caplog):
    torch.manual_seed(3)
    processors = LogitsProcessorList([Stateless()])
    wanted = model.generate(**PROMPTS, max_new_tokens=25, logits_processor=processors)
    output = model.generate(
        **PROMPTS, max_new_tokens=25, logits_processor=processors, speculative_config=configs["tree"],
        return_dict_in_generate=True,
    )  # fmt: skip
    assert output.sequences.tolist() == wanted.tolist()
    assert output.speculation["num_draft_tokens"] > 50 and "keeps state" not in caplog.text


def test_who_keeps_state_is_named_once_a_call(model, configs, caplog):
    model.generate(
        **PROMPTS,
        max_new_tokens=5,
        logits_processor=LogitsProcessorList([Counter()]),
        speculative_config=configs["chain"],
    )
    assert [record.message.split()[0] for record in caplog.records if "keeps state" in record.message] == ["Counter"]


def test_rows_that_cannot_begin_together_are_an_error(model, configs):
    with pytest.raises(ValueError, match=r"Counter keeps state.*num_blocks"):
        model.generate(
            **PROMPTS, max_new_tokens=25, logits_processor=LogitsProcessorList([Counter()]),
            speculative_config={**configs["ngram"], "block_size": 4, "num_blocks": 9},
        )  # fmt: skip
    assert_clean(model)


# ---- noticing and undoing -------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = ("value",)


def change_slot(holder):
    holder.value.value = 2


def make_slotted():
    value = Slotted()
    value.value = 1
    return value


CHANGES = {
    "number": (lambda: 1, lambda h: setattr(h, "value", 2)),
    "bool for int": (lambda: 1, lambda h: setattr(h, "value", 1.5)),
    "list": (lambda: [1, 2], lambda h: h.value.append(3)),
    "deque": (lambda: collections.deque([1], maxlen=2), lambda h: h.value.extend([2, 3])),
    "dict": (lambda: {"a": 1}, lambda h: h.value.update(b=2)),
    "order of a dict": (lambda: {"a": 1, "b": [2]}, lambda h: h.value.update(a=h.value.pop("a"))),
    "set": (lambda: {1, 2}, lambda h: h.value.discard(1)),
    "counter": (lambda: collections.Counter("ab"), lambda h: h.value.update("a")),
    "nested": (lambda: {"a": [{"b": (1, [2])}]}, lambda h: h.value["a"][0]["b"][1].append(3)),
    "tensor": (lambda: torch.zeros(3), lambda h: h.value.data.add_(1)),
    "tensor's shape": (lambda: torch.zeros(3), lambda h: setattr(h, "value", torch.zeros(4))),
    "array": (lambda: np.zeros(3), lambda h: h.value.__setitem__(0, 5)),
    "array's shape": (lambda: np.zeros(3), lambda h: h.value.resize((2, 2), refcheck=False)),
    "object": (lambda: Holder([1]), lambda h: h.value.value.append(2)),
    "new attribute": (lambda: Holder(1), lambda h: setattr(h.value, "other", 2)),
    "slots": (make_slotted, change_slot),
    "partial": (lambda: functools.partial(max, [1]), lambda h: h.value.args[0].append(2)),
    "method": (lambda: Holder([1]).__init__, lambda h: h.value.__self__.value.append(1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed_and_undone(name):
    make, change = CHANGES[name]
    holder = Holder(make())
    inner = holder.value
    state = KeptState(holder)
    assert not state.opaque and not state.has_changed()
    change(holder)
    assert state.has_changed()
    state.restore()
    assert not state.has_changed() and holder.value is inner
    change(holder)
    assert state.has_changed()


@pytest.mark.parametrize(
    "value",
    [iter([1]), (x for x in [1]), random.Random(1), torch.Generator(), np.random.default_rng(0), torch.nn.Linear(2, 2),
     torch.zeros(9 << 20), [random.Random(1)], {"a": {"b": iter([1])}}],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_cannot_be_looked_into(value):
    assert KeptState(Holder(value)).opaque


def test_circles():
    holder = Holder([1])
    holder.value.append(holder)
    state = KeptState(holder)
    assert not state.opaque and not state.has_changed()
    holder.value.append(2)
    assert state.has_changed()
