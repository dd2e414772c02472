"""Structured output: every method writes what plain decoding writes under the same grammar, and it is what was asked for."""

import itertools
import json
import re

import pytest
import torch
from cache_checks import check_blocks
from transformers import LogitsProcessorList

from hf_specdec.core.draft_trees import DraftTrees
from hf_specdec.core.sequence import Sequence
from hf_specdec.decoding import decoder
from hf_specdec.sampling.grammar import GrammarLogitsProcessor, Reasoning, along_grammars
from hf_specdec.sampling.processors import NodeProcessors
from hf_specdec.serve import LLM, SamplingParams, StructuredOutputsParams
from hf_specdec.serve.engine.structured import MOST_BYTES, GrammarCompiler

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "animal": {"enum": ["dog", "cat", "bird"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "animal", "age", "friends"],
    "additionalProperties": False,
}
GRAMMARS = [
    {"json": SCHEMA},
    {"json_object": True},
    {"regex": r"(Tom|Lily|the dog) (is|was) (happy|sad)\. [A-Z][a-z]{2,8}!"},
    {"choice": ["the big dog", "the little cat", "the little bird"]},
    {"grammar": 'start: line+\nline: NAME " has " NUMBER " " THING ".\\n"\n'
        'NAME: /[A-Z][a-z]{2,5}/\nNUMBER: /[1-9]/\nTHING: "dogs" | "cats"'},
    {"grammar": 'root ::= "yes" | "no" ws\nws ::= " because " [a-z ]{3,12} "."'},
]  # fmt: skip
PROMPTS = ["Once upon a time", 'Tom says {"name": "Tom", "animal": "dog", "age": 5, "friends": []} and {"name"', "Lily"]
METHODS = [
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "token_recycling"},
    {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3},
    {"method": "eagle3", "model": "tiny-eagle3", "top_k": 3, "total_tokens": 8, "num_speculative_tokens": 3},
]
MORE_METHODS = [
    {"method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_use_tree": True},
    {"method": "lookahead"},
    {"method": "eagle3", "model": "tiny-eagle3", "num_speculative_tokens": 3},
    {"method": "medusa", "model": "tiny-medusa"},
    {"method": "mtp", "model": "tiny-mtp", "num_speculative_tokens": 2},
    {"method": "dflash", "model": "tiny-dflash"},
    {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": None},
]  # fmt: skip


@pytest.fixture
def make(tiny_model, tiny_tokenizer):
    made = []

    def make(config=None, **arguments):
        made.append(LLM(tiny_model, tiny_tokenizer, config, **{"max_model_len": 256, **arguments}))
        return made[-1]

    yield make
    for llm in made:
        pool = llm.engine.decoder.cache.pool
        check_blocks(pool)
        assert pool.num_used == 0 and not llm.engine._choices
        llm.close()


def batch(sampled):
    """Prompts with every grammar, and rows without one between them."""
    own = {"temperature": 0.9, "seed": 4} if sampled else {"temperature": 0}
    prompts, params = [], []
    for i, grammar in enumerate([None, *GRAMMARS, None]):
        prompts.append(PROMPTS[i % len(PROMPTS)])
        params.append(SamplingParams(**own, max_tokens=40, structured_outputs=grammar))
    return prompts, params


def check(grammar, output):
    """The output is what its grammar describes, as far as it goes."""
    text = output.text
    if grammar is None:
        return
    whole = output.finish_reason == "stop"
    if "json" in grammar or "json_object" in grammar:
        if whole:
            found = json.loads(text)
            assert isinstance(found, dict) and ("json" not in grammar or set(found) == set(SCHEMA["required"])), text
        return
    assert whole or "line" in str(grammar)
    if "regex" in grammar:
        assert re.fullmatch(grammar["regex"], text), text
    elif "choice" in grammar:
        assert text in grammar["choice"]
    elif "root" in grammar["grammar"]:
        assert re.fullmatch(r"yes|no because [a-z ]{3,12}\.", text), text
    else:
        assert re.match(r"([A-Z][a-z]{2,5} has [1-9] (dogs|cats)\.\n)*", text), text


@pytest.fixture(scope="module")
def plain():
    return {}


def expected(plain, make, sampled):
    """What plain decoding writes; without grammars too, for the rows that have none."""
    if sampled not in plain:
        prompts, params = batch(sampled)
        plain[sampled] = [each.outputs[0] for each in make().generate(prompts, params, use_tqdm=False)]
    return plain[sampled]


def compare(plain, make, config, sampled, **arguments):
    prompts, params = batch(sampled)
    wanted = expected(plain, make, sampled)
    outputs = make(config, **arguments).generate(prompts, params, use_tqdm=False)
    for own, output, reference in zip(params, outputs, wanted, strict=True):
        grammar = own.structured_outputs
        found = output.outputs[0]
        assert (found.token_ids, found.finish_reason) == (reference.token_ids, reference.finish_reason), grammar
        check(None if grammar is None else {k: v for k, v in vars(grammar).items() if v}, found)
    return outputs


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("config", METHODS, ids=lambda config: config["method"])
def test_drafts_do_not_change_constrained_text(plain, make, config, sampled):
    outputs = compare(plain, make, config, sampled)
    assert sum(each.speculation["num_accepted_tokens"] for each in outputs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("config", MORE_METHODS, ids=str)
def test_drafts_do_not_change_constrained_text_more(plain, make, config, sampled):
    config = {key: value for key, value in config.items() if value is not None}
    if config["method"] == "suffix":
        pytest.importorskip("arctic_inference")
    compare(plain, make, config, sampled)


def test_rows_that_lose_their_blocks_go_on_in_their_grammar(plain, make):
    config = {"method": "ngram", "num_speculative_tokens": 3, "block_size": 4, "num_blocks": 24}
    llm_limits = {"max_num_batched_tokens": 24, "max_num_seqs": 4}
    compare(plain, make, config, False, **llm_limits)


def test_other_rows_of_the_batch_are_as_before(plain, make):
    prompts, params = batch(False)
    without = make().generate([prompts[0], prompts[-1]], [params[0], params[-1]], use_tqdm=False)
    beside = expected(plain, make, False)
    assert [each.outputs[0].token_ids for each in without] == [beside[0].token_ids, beside[-1].token_ids]


def test_every_choice_has_its_own_state(make):
    llm = make(METHODS[0])
    params = SamplingParams(
        temperature=1.0, seed=1, n=4, max_tokens=40, structured_outputs={"choice": ["a dog", "a cat", "birds"]}
    )
    (output,) = llm.generate(["I like"], params, use_tqdm=False)
    texts = [choice.text for choice in output.outputs]
    assert set(texts) <= {"a dog", "a cat", "birds"} and len(set(texts)) > 1
    assert all(choice.finish_reason == "stop" for choice in output.outputs)


def test_options_that_leave_no_token_end_the_request(make):
    """Not with token 0, nor with NaN; the others go on."""
    llm = make(METHODS[0])
    allowed = llm.tokenizer("zebra")["input_ids"]
    for temperature in (0, 1.0):
        params = SamplingParams(
            temperature=temperature, structured_outputs={"choice": ["dog"]}, allowed_token_ids=allowed
        )
        other = SamplingParams(temperature=0, max_tokens=6)
        refused, free = llm.generate(["Lily", "Tom"], [params, other], use_tqdm=False)
        assert "none of the tokens that the other options leave" in str(refused.error)
        assert refused.outputs[0].token_ids == [] and len(free.outputs[0].token_ids) == 6


def test_a_complete_text_ends_even_if_end_tokens_are_ignored(make):
    llm = make()
    for more in ({"ignore_eos": True}, {"min_tokens": 30}):
        params = SamplingParams(temperature=0, max_tokens=40, structured_outputs={"choice": ["dog", "doggy"]}, **more)
        (output,) = llm.generate(["A"], params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop" and output.outputs[0].text in ("dog", "doggy")


def test_json_has_at_most_one_space_after_its_separators(make):
    """A model that loves white space spends no tokens on it, unless the request says how much there may be."""
    llm = make()
    bias = {llm.tokenizer.convert_tokens_to_ids(each): 100 for each in ("Ġ", 'Ġ"')}
    pair = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": [1, 2]}}, "required": ["a", "b"]}
    schema = {"type": "array", "items": {**pair, "additionalProperties": False}, "minItems": 2, "maxItems": 2}

    def written(**more):
        params = SamplingParams(
            temperature=0, max_tokens=200, structured_outputs={"json": schema, **more}, logit_bias=bias
        )
        (choice,) = llm.generate(["A"], params, use_tqdm=False)[0].outputs
        assert choice.finish_reason == "stop" and json.loads(choice.text) == [{"a": 1, "b": [1, 2]}] * 2
        return choice.text

    value = [{"a": 1, "b": [1, 2]}] * 2
    assert written() == json.dumps(value)
    assert written(disable_any_whitespace=True) == json.dumps(value, separators=(",", ":"))
    assert written(whitespace_pattern=r"[ \n]{1,3}").startswith('[   {   "a"   :   1   ,')


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "exactly one of"),
        ({"json_object": True, "regex": "a"}, "2 are given"),
        ({"json": 5}, "wrong type"),
        ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}, "give either"),
        ({"regex": "a", "disable_any_whitespace": True}, "for JSON only"),
        ({"choice": []}, "choice must be"),
        ({"choice": ["a", 1]}, "choice must be"),
        ({"regex": "x" * (MOST_BYTES + 1)}, "bytes; 32768 are allowed"),
        ({"xml": "a"}, "has no 'xml'; its keys are json"),
        ({"regex": "\ud800"}, "cannot|no JSON"),
    ],
)
def test_bad_parameters_are_refused_at_once(wrong, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=wrong)


@pytest.fixture(scope="module")
def compiler(tiny_tokenizer):
    made = GrammarCompiler(tiny_tokenizer, 4096, frozenset({3}))
    yield made
    made.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"regex": "(a"}, {"json": "{"}, {"json": {"type": "nope"}}, {"json": {"not": {}}}, {"json": {"$ref": "#"}},
        {"grammar": "start: x"}, {"grammar": ""}, {"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000},
        {"grammar": "root ::= ("}, {"json": '{"items":' * 2000 + "{}" + "}" * 2000}, {"regex": "(" * 15000 + ")" * 15000},
        {"json": {"type": "object", "properties": {"a": {"pattern": "[", "type": "string"}}}}, {"grammar": "\x00"},
    ],
    ids=lambda wrong: str(wrong)[:40],
)  # fmt: skip
def test_malformed_grammars_are_refused(compiler, wrong):
    with pytest.raises(ValueError, match="structured_outputs"):
        compiler.matcher(StructuredOutputsParams(**wrong))


def test_grammars_that_nest_deep_do_not_end_the_process(compiler):
    """Rules that refer to the next one, thousands of them: the compiler recurses once for each."""
    names = [f"{chr(97 + i // 676)}{chr(97 + i // 26 % 26)}{chr(97 + i % 26)}" for i in range(3500)]
    rules = "start: aaa\n" + "\n".join(f"{a}:{b}" for a, b in itertools.pairwise(names))
    chain = {"$defs": {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(600)}, "$ref": "#/$defs/0"}
    chain["$defs"]["600"] = {}
    for params in ({"grammar": rules + f'\n{names[-1]}:"x"'}, {"json": chain}):
        matcher = compiler.matcher(StructuredOutputsParams(**params))
        assert not matcher.is_error()


def test_compiled_grammars_are_kept_but_not_all(compiler):
    for i in range(70):
        compiler.matcher(StructuredOutputsParams(choice=[str(i)]))
    assert len(compiler._kept) == 64
    first, second = (compiler.matcher(StructuredOutputsParams(choice=["69"])) for _ in range(2))
    assert first.consume_token(compiler.tokenizer("6")["input_ids"][-1]) and not second.is_stopped()


@pytest.mark.parametrize("config", [METHODS[0], METHODS[3]], ids=lambda config: config["method"])
def test_drafts_do_not_change_text_after_reasoning(make, config):
    """The reasoning ends with the first full stop, wherever in a draft that is."""

    def written(config):
        llm = make(config)
        params = SamplingParams(temperature=0, max_tokens=60, structured_outputs={"regex": "(yes|no)( [a-z]{1,7}){2}!"})
        prompts = [*PROMPTS, "One day, Tom went to the park", "Ben and Mia", "The cat was happy and"]
        ids = [llm.tokenizer(prompt)["input_ids"] for prompt in prompts]
        requests = [
            llm.engine.add(str(i), None, each, params, reasoning=Reasoning((), (".",))) for i, each in enumerate(ids)
        ]
        llm.engine.run()
        return [request.choices[0].output for request in requests]

    plain, drafted = written(None), written(config)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    whole = [each.text for each in plain if each.finish_reason == "stop"]
    assert len(whole) >= 4 and all(re.fullmatch(r"[^.]*\.[^.]*?(yes|no)( [a-z]{1,7}){2}!", text) for text in whole), (
        plain
    )


@pytest.mark.parametrize(
    "config",
    [METHODS[3], *(pytest.param(config, marks=pytest.mark.slow) for config in (None, METHODS[0]))],
    ids=["eagle3-tree", "none", "ngram"],
)
def test_a_thinking_budget_ends_the_reasoning_at_its_token(make, config):
    """With and without drafts, in several tokens, beside a grammar, sampled; and where the reasoning ends before."""
    llm = make(config)
    end = tuple(llm.tokenizer.encode("</think>", add_special_tokens=False))
    reasoning, prompts = (
        Reasoning((), ("</think>", "."), end),
        [llm.tokenizer(prompt)["input_ids"] for prompt in PROMPTS],
    )
    assert len(end) > 2

    def written(prompts, thinks, **given):
        params = SamplingParams(**{"temperature": 0, "max_tokens": 60, **given})
        begins = reasoning if thinks else None
        requests = [llm.engine.add(str(i), None, ids, params, begins) for i, ids in enumerate(prompts)]
        llm.engine.run()
        return [request.choices[0].output.token_ids for request in requests]

    free = written(prompts, False)
    ended = 0
    for budget in (0, 1, 7, 40):
        found = written(prompts, True, thinking_token_budget=budget)
        for prompt, own, ids in zip(prompts, found, free, strict=True):
            text = itertools.accumulate(llm.tokenizer.decode([token]) for token in ids[:budget])
            natural = any("." in each for each in text)
            begins = ids if natural else [*ids[:budget], *end]
            rest = [] if natural else written([[*prompt, *begins]], False, max_tokens=60 - len(begins))[0]
            assert own == begins + rest
            ended += natural
        others = ({"temperature": 0.9, "seed": 2}, {"structured_outputs": {"regex": "(yes|no)( [a-z]{1,7}){2}!"}})
        for given in others if config is not None else ():
            given["thinking_token_budget"] = budget
            assert written(prompts, True, **given) == written(prompts, True, **given, num_speculative_tokens=0)
    assert 0 < ended < 12
    assert written(prompts, True, thinking_token_budget=-1) == free == written(prompts, True, thinking_token_budget=60)


def test_only_a_text_that_begins_to_reason_has_a_budget(tiny_tokenizer):
    x, y, z, e, f = ids_of(tiny_tokenizer, "xyzef")
    thinking = GrammarLogitsProcessor(
        None,
        4096,
        1,
        frozenset({3}),
        Reasoning((x, y), ("ef",), (e, f)),
        lambda id: tiny_tokenizer.decode([id]),
        budget=2,
    )

    def after(*ids):
        (found,) = allowed(thinking.along([7, *ids], None, torch.zeros(1, 4096)))
        return found

    everything = set(range(4096))
    assert after() == after(z, x, y, z, z) == after(x) == after(x, z, z, z) == after(x, y, z) == everything
    assert after(x, y, z, z) == {e} and after(x, y, z, z, e) == {f} and after(x, y, z, z, e, f) == everything
    assert after(x, y, e, f) == after(x, y, e, f, z, z) == everything
    assert thinking.forced([7, x, y, z], [z], 9) == [e, f] and not thinking.finished
    assert thinking.possible([7, x, y, z], [z, z, e, f, z], [-1, 0, 0, 2, 3]) == [0, 2, 3, 4]
    paths = [torch.tensor(path, dtype=torch.long) for path in ([], [z], [z, e])]
    assert allowed(thinking.along([7, x, y, z], paths, torch.zeros(3, 4096))) == [everything, {e}, {f}]


# ---- tokens that a grammar forces --------------------------------------------------------------------------------------

PARTS = {
    "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}, "happy": {"type": "boolean"},
    "animal": {"enum": ["dog", "cat", "bird"]}, "friends": {"type": "array", "items": {"enum": ["Tom", "Lily"]}, "maxItems": 2},
    "home": {"type": "object", "properties": {"street": {"enum": ["Long Street"]}, "number": {"type": "integer", "maximum": 9}},
             "required": ["street", "number"], "additionalProperties": False},
    "identifier": {"const": "https://example.com/schemas/animal"}, "description": {"type": "string", "maxLength": 12},
}  # fmt: skip


def schemas():
    """20 schemas of two to five properties."""
    names = list(PARTS)
    chosen = [[names[(i + k * step) % len(names)] for k in range(2 + i % 4)] for step in (1, 3) for i in range(10)]
    return [
        {"type": "object", "properties": {name: PARTS[name] for name in own}, "required": own, "additionalProperties": False}
        for own in chosen
    ]  # fmt: skip


@pytest.mark.parametrize(
    "config", [None, METHODS[0], METHODS[3], {"method": "auto", "methods": ["ngram"], "memory": False}],
    ids=["none", "ngram", "eagle3-tree", "auto"],
)  # fmt: skip
def test_forced_tokens_are_drafts_of_every_method(make, monkeypatch, config):
    """20 schemas (10 with drafts), greedy and seeded: the same answers in fewer steps than without them."""
    llm = make(config)
    params = [
        SamplingParams(max_tokens=96, structured_outputs={"json": schema}, **sampling)
        for schema in schemas()[:: 1 if config is None else 2]
        for sampling in ({"temperature": 0}, {"temperature": 0.9, "seed": 1})
    ]
    after = llm.generate(["Tom has"] * len(params), params, use_tqdm=False)
    monkeypatch.setattr(decoder, "MOST_FORCED", 0)
    before = llm.generate(["Tom has"] * len(params), params, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in after] == [each.outputs[0].token_ids for each in before]
    counts = [[each.speculation["num_steps"] for each in outputs] for outputs in (before, after)]
    means = [sum(steps) / len(steps) for steps in counts]
    print(f"\nsteps per answer: {means[0]:.1f} before, {means[1]:.1f} after; {list(zip(*counts, strict=True))[::2]}")
    assert means[1] < 0.9 * means[0] and (config is not None or means[1] < 0.5 * means[0])


def test_forced_tokens_are_not_credited_to_a_drafter(make, monkeypatch, tiny_tokenizer):
    """All that it drafts is forbidden: neither statistics nor the policy count what the grammar brought instead."""
    llm = make({"method": "auto", "methods": ["ngram"], "memory": False})
    generator, wrong = llm.engine.decoder.generator, ids_of(tiny_tokenizer, "zz")
    monkeypatch.setattr(
        generator.parts[0], "propose", lambda rows, limits: DraftTrees.from_lists([wrong[:limit] for limit in limits])
    )
    params = SamplingParams(
        temperature=0, max_tokens=99, drafter="ngram", structured_outputs={"regex": "(Tom has a big dog\\. ){9}"}
    )
    (output,) = llm.generate("Tom", params, use_tqdm=False)
    (drafter, counts), *others = output.speculation["drafters"].items()
    assert drafter == "grammar" and not others and counts["num_accepted_tokens"] > 30
    assert generator.policy.steps["ngram"] > 1 and generator.policy.acceptance.share_of_rows[0] < 0.5


def test_what_a_grammar_forces_after_a_drafters_own_draft_is_not_the_drafters(make, monkeypatch, tiny_tokenizer):
    """It drafts the next two tokens, which are right; the grammar, which leaves no choice, adds the others."""
    params = SamplingParams(
        temperature=0, max_tokens=60, drafter="ngram", structured_outputs={"regex": "(Tom has a big dog\\. ){9}"}
    )
    (plain,) = make().generate("Tom", params.copy(drafter=None), use_tqdm=False)
    text = plain.outputs[0].token_ids
    llm = make({"method": "auto", "methods": ["ngram"], "memory": False})

    def propose(rows, limits):
        nexts = [text[seq.num_generated :][: min(2, limit)] for seq, limit in zip(rows, limits, strict=True)]
        return DraftTrees.from_lists(nexts)

    monkeypatch.setattr(llm.engine.decoder.generator.parts[0], "propose", propose)
    (output,) = llm.generate("Tom", params, use_tqdm=False)
    assert output.outputs[0].token_ids == text
    whole, by_name = output.speculation, output.speculation["drafters"]
    own, forced = by_name["ngram"], by_name["grammar"]
    assert own["num_draft_tokens"] == own["num_accepted_tokens"] <= 2 * own["num_steps"]
    assert own["acceptance_per_position"] == [1.0, 1.0] and forced["num_accepted_tokens"] > 30
    for key in ("num_draft_tokens", "num_accepted_tokens"):
        assert own[key] + forced[key] == whole[key]


def test_a_drafter_is_judged_by_what_the_grammar_forbids(make, monkeypatch, tiny_tokenizer):
    """Nothing is forced, so its drafts are only cut: they count as rejected, not as drafts that it did not make."""
    llm = make({"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": "auto"})
    decoder, wrong = llm.engine.decoder, ids_of(tiny_tokenizer, "zz")
    monkeypatch.setattr(
        decoder.generator, "propose", lambda rows, limits: DraftTrees.from_lists([wrong[:limit] for limit in limits])
    )
    params = SamplingParams(temperature=0, max_tokens=30, structured_outputs={"regex": "[a-m ]{99}"})
    llm.generate("Tom", params, use_tqdm=False)
    assert decoder.policy.acceptance.of_first_token(0) == 0.0


def test_what_is_forced(compiler, tiny_tokenizer):
    """The only token that is allowed, or the usual tokens of the only text; nothing of it within a choice, after the end or the wrong."""
    matcher = compiler.matcher(StructuredOutputsParams(regex="(a|bc)d(e|f)?"))
    a, b, d, e = ids_of(tiny_tokenizer, "abde")
    grammar = GrammarLogitsProcessor(matcher, 4096, 0, frozenset({3}))
    assert grammar.forced([], [], 9) == [] == grammar.forced([], [a, b], 9) == grammar.forced([], [a, d, e], 9)
    assert (
        tiny_tokenizer.decode(grammar.forced([], [b], 9)) == "cd"
        and tiny_tokenizer.decode(grammar.forced([], [a], 9)) == "d"
    )
    assert grammar.forced([], [b], 1) == grammar.forced([], [b], 9)[:1] and grammar.forced([], [b], 0) == []
    thinking = GrammarLogitsProcessor(matcher, 4096, 0, frozenset({3}), Reasoning((7, 8), ("</>",)))
    assert thinking.forced([], [7], 9) == [8] and thinking.forced([], [7, 8, b], 9) == []


def test_drafts_with_distributions_keep_what_is_forbidden(compiler, tiny_tokenizer):
    """Rejection sampling is exact only if what is verified does not depend on what was drawn."""
    a, b, _, d = ids_of(tiny_tokenizer, "abcd")
    grammar = GrammarLogitsProcessor(compiler.matcher(StructuredOutputsParams(regex="abcd")), 4096, 1)
    seq = Sequence([7], 99, processors=NodeProcessors(LogitsProcessorList([grammar]), torch.tensor([[7]]), None))
    trees = DraftTrees.from_lists([[a, d, b]], [[-1, 0, 0]])
    cut, lengths = along_grammars([seq], trees, [9])
    assert lengths == [2] and cut.tokens[0, :2].tolist() == [a, b] and tiny_tokenizer.decode(cut.tokens[0]) == "abcd"
    trees.probs = torch.nn.functional.one_hot(trees.tokens, 4096).float()
    assert along_grammars([seq], trees, [9])[0].tokens.tolist() == [[a, d, b]]
    assert along_grammars([seq], trees, [0])[0] is trees


# ---- the state along a tree -----------------------------------------------------------------------------------------


def ids_of(tokenizer, text):
    return [tokenizer.convert_tokens_to_ids(character) for character in text]


def allowed(scores):
    return [set(torch.nonzero(row.isfinite())[:, 0].tolist()) for row in scores]


def test_every_node_is_masked_with_its_own_state(compiler, tiny_tokenizer):
    a, b, c, d = ids_of(tiny_tokenizer, "abcd")
    grammar = GrammarLogitsProcessor(
        compiler.matcher(StructuredOutputsParams(regex="a(b|cd)")), 4096, 2, frozenset({3})
    )
    paths = [torch.tensor(path, dtype=torch.long) for path in ([], [a], [a, b], [a, c], [a, d], [a, d, b], [b])]
    found = allowed(grammar.along([7, 8], paths, torch.zeros(7, 4096)))
    everything = set(range(4096))
    spelled = {id for id in range(4096) if tiny_tokenizer.decode([id]) in ("a", "ab", "ac", "acd")}
    assert found[0] == spelled
    assert {b, c} <= found[1] and a not in found[1]
    assert found[2] == {3} and d in found[3] and found[4] == found[5] == found[6] == everything
    assert grammar.possible([7, 8], [a, b, c, d, d], [-1, 0, 0, 1, 2]) == [0, 1, 2, 4]
    assert grammar.possible([7, 8], [a, b, d, d], [-1, 0, 0, 1]) == [0, 1]
    assert grammar.accept(a) and not grammar.finished and grammar.accept(b) and grammar.finished
    assert allowed(grammar.along([7, 8, a, b], None, torch.zeros(1, 4096))) == [{3}]
    assert not grammar.accept(c) and "none of the tokens" in grammar.error


def test_a_row_follows_tokens_that_were_taken_back(compiler, tiny_tokenizer):
    a, b = ids_of(tiny_tokenizer, "ab")
    grammar = GrammarLogitsProcessor(compiler.matcher(StructuredOutputsParams(regex="ab")), 4096, 1)
    scores = torch.zeros(1, 4096)
    first = allowed(grammar.along([7], None, scores))
    assert allowed(grammar.along([7, a], None, scores)) == [{b}]
    assert allowed(grammar.along([7], None, scores)) == first


@pytest.mark.parametrize("opens", [False, True], ids=["begun", "may begin"])
def test_reasoning_that_ends_inside_a_draft_starts_the_grammar_there(compiler, tiny_tokenizer, opens):
    a, b, x, y, less, slash, greater = ids_of(tiny_tokenizer, "abxy</>")
    reasoning = Reasoning((x, y) if opens else (), ("</>",))
    grammar = GrammarLogitsProcessor(
        compiler.matcher(StructuredOutputsParams(regex="(a|c)b")),
        4096,
        1,
        frozenset({3}),
        reasoning,
        lambda id: tiny_tokenizer.decode([id]),
    )
    begin = [x, y] if opens else []
    draft = [*begin, x, less, slash, greater, a, b]
    paths = [torch.tensor(draft[:i], dtype=torch.long) for i in range(len(draft) + 1)]
    found = allowed(grammar.along([7], paths, torch.zeros(len(paths), 4096)))
    free = len(begin)
    if opens:
        assert x in found[0] and a in found[0] and b not in found[0] and found[1] == {y}
    assert all(each == set(range(4096)) - {3} for each in found[free : free + 4])  # no end before the answer
    assert a in found[free + 4] and x not in found[free + 4] and b not in found[free + 4]
    assert found[free + 5] == {b} and found[free + 6] == {3}
    if opens:  # the answer may also begin at once
        assert allowed(grammar.along([7], [torch.tensor([a])], torch.zeros(1, 4096))) == [{b}]
    for token in draft:
        assert grammar.accept(token)
    assert grammar.finished
