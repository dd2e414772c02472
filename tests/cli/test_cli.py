"""The command line: every subcommand on the bundled models, in-process, and one line per error."""

import dataclasses
import importlib.util
import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from paths import ROOT

import hf_specdec
from hf_specdec.cli import build_parser, demo, main, measure, serve
from hf_specdec.cli.measure import Measurement, Variant, cut_at_end, equal_rows
from hf_specdec.cli.options import Output, read_prompts

PROMPT = "Tell me a story about a dog."
DRAFT = '{"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 3}'


def run(capsys, *argv: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command line."""
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def error_line(capsys, *argv: str) -> str:
    """The one line a failing command leaves on stderr; its exit code is 2 and its stdout empty."""
    code, out, err = run(capsys, *argv)
    lines = err.strip().splitlines()
    assert (code, out, len(lines)) == (2, "", 1), (code, out, err)
    assert "Traceback" not in err
    return lines[0]


def test_help_teaches(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    for command in ("generate", "demo", "models", "bench"):
        assert command in out
        code, text, _ = run(capsys, command, "--help")
        assert code == 0
        assert "examples:" in text


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("hf-specdec 0.")


def test_generate_text_does_not_depend_on_the_method(capsys):
    texts = set()
    for config in ('{"method": "none"}', '{"method": "ngram"}', DRAFT):
        code, out, err = run(
            capsys, "generate", "tiny", "--prompt", PROMPT, "--max-new-tokens", "24", "--dtype", "float32",
            "--speculative-config", config, "--no-stream",
        )  # fmt: skip
        assert code == 0, err
        assert "tokens/s" in err
        texts.add(out)
    assert len(texts) == 1
    assert texts.pop().strip()


def test_generate_streams_the_same_text(capsys):
    command = ("generate", "tiny", "--prompt", PROMPT, "--max-new-tokens", "24", "--speculative-config", DRAFT)
    _, streamed, _ = run(capsys, *command, "--stream")
    _, printed, _ = run(capsys, *command, "--no-stream")
    assert streamed.strip() == printed.strip() != ""


def test_generate_sampling_depends_on_the_seed_alone(capsys):
    command = (
        "generate", "tiny", "--prompt", PROMPT, "--max-new-tokens", "16", "--dtype", "float32", "--no-stream",
        "--do-sample", "--temperature", "0.9",
    )  # fmt: skip
    plain, other = (run(capsys, *command, "--seed", seed)[1] for seed in ("1", "2"))
    assert plain != other
    for config in ('{"method": "ngram"}', DRAFT):
        assert run(capsys, *command, "--seed", "1", "--speculative-config", config)[1] == plain


def test_generate_batch_from_file_with_stop_and_config_file(capsys, tmp_path):
    prompts, config = tmp_path / "prompts.jsonl", tmp_path / "config.json"
    prompts.write_text("\n".join(json.dumps({"prompt": p}) for p in (PROMPT, "What is 2 + 3?")))
    config.write_text('{"method": "ngram", "prompt_lookup_max": 4}')
    code, out, err = run(
        capsys, "generate", "tiny", "--prompts", str(prompts), "--speculative-config", str(config),
        "--max-new-tokens", "16", "--stop", ".", "--no-chat",
    )  # fmt: skip
    assert code == 0, err
    assert "--- 1 ---" in out
    assert "--- 2 ---" in out


def test_models_lists_what_is_there(capsys):
    methods, bundled = hf_specdec.available_methods(), hf_specdec.bundled_names()
    code, short, err = run(capsys, "models")
    assert code == 0, err
    assert all(name in short for name in (*bundled, *methods, "native library for CPUs", "--all"))
    assert len(short.splitlines()) < 30
    code, out, err = run(capsys, "models", "--all")
    assert code == 0, err
    wanted = (
        "num_speculative_tokens",
        "prompt_lookup_max",
        "AngelSlim/Qwen3-8B_eagle3 (eagle3, published τ 1.97 on MT-bench",
    )
    assert all(name in out for name in (*bundled, *methods, *wanted))


def test_models_finds_published_heads(capsys):
    code, out, err = run(capsys, "models", "QWEN3-8b")
    assert code == 0, err
    heads = out.splitlines()[1:]
    assert len(heads) > 1 and all("qwen3-8b" in line.lower() for line in heads) and "eagle3" in out


def test_readme_names_every_method():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in hf_specdec.available_methods():
        assert f"`{name}`" in readme, f"README.md says nothing about {name!r}"


def test_the_page_of_keys_is_current(capsys):
    page = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    code, out, _ = run(capsys, "models", "--markdown")
    assert code == 0
    assert out == page, "write it anew: hf-specdec models --markdown > docs/keys.md"
    for config in hf_specdec.available_methods().values():
        for key in (f.name for f in dataclasses.fields(config) if f.name != "method"):
            assert f"`{key}`" in page


def test_models_shows_one_method(capsys):
    code, out, _ = run(capsys, "models", "ngram")
    assert code == 0
    assert "prompt_lookup_min" in out
    assert "suffix_decoding" not in out and "on the Hub" not in out


def test_bench_writes_table_and_json(capsys, tmp_path):
    report_file = tmp_path / "report.json"
    code, out, err = run(
        capsys, "bench", "tiny", "--speculative-config", '{"method": "ngram"}', "--speculative-config", DRAFT,
        "--dtype", "float32", "--limit", "3", "--batch-size", "2", "--max-new-tokens", "12", "--repeats", "2",
        "--json", str(report_file), "--trace",
    )  # fmt: skip
    assert code == 0, err
    assert out.index("× none") < out.index("× plain") < out.index("tokens/s") and 'method "none"' in out
    assert "█" * 8 in out  # the fastest
    report = json.loads(report_file.read_text())
    assert report["environment"]["versions"]["transformers"]
    assert [r["rows_equal_to_baseline"] for r in report["results"]] == [3, 3, 3, 3]
    plain, none, _, draft = report["results"]
    assert plain["mean_accepted_length"] is None and none["speculative_config"] == {"method": "none"}
    assert none["speed_up_over_none"] == plain["speed_up"] == 1
    assert draft["speed_up_over_none"] == draft["tokens_per_second"] / none["tokens_per_second"]
    assert draft["mean_accepted_length"] >= 1
    assert len(draft["seconds"]) == 2
    steps = report["traces"][DRAFT]
    assert all(step["drafted"] for step in steps if step["rejected"] or step["accepted"]) and "rejected" in out
    assert {step["row"] for step in steps} == {0, 1} and all(step["forward_ms"] > 0 for step in steps)


def test_what_drafting_brings_is_compared_with_the_same_loop():
    """Other weights or kernels of the target are not the drafter's merit; and a loss is marked, however fast the loop is."""
    quantized = Variant("q", {"method": "ngram", "target_quantization": "wint4"})
    ngram = Variant("n", '{"method": "ngram"}')
    variants = measure.with_baselines([ngram, quantized, Variant("x", {"method": "none"})])
    chunks = {"method": "none", "prefill_chunk_size": 64}
    assert [v.speculative_config for v in measure.with_baselines([Variant("y", chunks)])] == [
        None,
        {"method": "none"},
        chunks,
    ]
    configs = [each.speculative_config for each in variants]
    four_bits = {"method": "none", "target_quantization": "wint4"}
    assert configs == [None, {"method": "none"}, four_bits, ngram.speculative_config, quantized.speculative_config]
    speeds = [10, 28, 40, 30, 31]
    results = [Measurement(v, [1.0], [n], [[1]]) for v, n in zip(variants, speeds, strict=True)]
    shown = [measure.times_none(each, results) for each in results]
    assert shown == ["0.36 ×", "1.00 ×", "1.00 ×", "1.07 ×", f"0.78 × {measure.LOSES}"]
    assert measure.LOSED in measure.remarks(results) and measure.LOSED not in measure.remarks(results[:4])
    assert measure.FASTER_LOOP in measure.remarks(results) and measure.SLOWER_LOOP in measure.reading(0.7, False)


def test_bench_prints_json(capsys):
    code, out, err = run(
        capsys, "bench", "tiny", "--speculative-config", '{"method": "ngram"}', "--limit", "1", "--max-new-tokens", "4",
        "--repeats", "1", "--json", "-",
    )  # fmt: skip
    assert code == 0, err
    assert len(json.loads(out)["results"]) == 3


def test_demo_shows_text_and_table(capsys):
    code, out, err = run(
        capsys, "demo", "--size", "tiny", "--dtype", "float32", "--limit", "2", "--max-new-tokens", "6"
    )
    assert code == 0, (out, err)
    for word in ("tokens/s", "τ", "× none", "draft_model", "eagle3", "2/2", "16/16", "--all"):
        assert word in out
    assert "batch size 1: 10 of 10 runs" in err


def test_a_demo_that_fails_leaves_no_hook_on_the_model(tiny_model, tiny_tokenizer, monkeypatch):
    def fail(**arguments):
        raise RuntimeError("mine")

    monkeypatch.setattr(tiny_model, "generate", fail)
    shown = demo.DemoModel(tiny_model, tiny_tokenizer, hf_specdec.bundled("tiny-eagle3"))
    with pytest.raises(RuntimeError, match="mine"):
        demo.show_text(Output(), shown, PROMPT, 4)
    assert not tiny_model.get_input_embeddings()._forward_pre_hooks


@pytest.mark.slow
def test_demo_of_every_method(capsys):
    code, out, err = run(capsys, "demo", "--all", "--limit", "2", "--max-new-tokens", "6")
    assert code == 0, (out, err)
    for word in ("tokens/s", "τ", "ngram", "draft_model, chain", "draft_model, tree", "2/2"):
        assert word in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["genrate"], "did you mean 'generate'"),
        (["generate", "tniy", "--prompt", "x"], "did you mean 'tiny'"),
        (["bench", "tiny", "--speculative-config", '{"model": "tiny-eagel3"}'], "did you mean 'tiny-eagle3'"),
        (["bench", "tiny", "--speculative-config", "ngrm"], "did you mean 'ngram'"),
        (["bench", "tiny", "--speculative-config", "ngram", "--repeat-count", "3"], "did you mean '--repeats'"),
        (["train", "medusa", "--target", "t", "--data", "d", "--output", "o", "--epoch-count", "3"], "did you mean '--epochs'"),
        (["generate", "tiny"], "--prompt"),
        (["generate", "tiny", "--prompt", "x", "--max-new-tokens", "0"], "at least 1"),
        (["generate", "tiny", "--prompt", "x", "--temperature", "0.5"], "--do-sample"),
        (["generate", "tiny", "--prompt", "x", "--prompt", "y", "--stream"], "one prompt"),
        (["generate", "tiny", "--prompt-file", "/nowhere.txt"], "/nowhere.txt"),
        (["generate", "tiny", "--prompt", "x", "--speculative-config", '{"method": "ngrm"}'], "ngram"),
        (["generate", "tiny", "--prompt", "x", "--speculative-config", '{"method": "ngram", "prompt_lookup_maxx": 3}'],
         "prompt_lookup_max"),
        (["generate", "tiny", "--prompt", "x", "--speculative-config", "{not json"], "{not json"),
        (["generate", "/no/such/model", "--prompt", "x"], "/no/such/model"),
        (["generate", str(Path(hf_specdec.bundled("tiny")).parent / "tiny-darft"), "--prompt", "x"], "did you mean 'tiny-draft'"),
        (["models", "ngrm"], "did you mean 'ngram'"),
        (["bench", "tiny"], "--speculative-config"),
        (["bench", "tiny", "--speculative-config", '{"method": "ngram"}', "--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
    ],
)  # fmt: skip
def test_errors_are_one_line(capsys, argv, says):
    assert says in error_line(capsys, *argv)


def test_debug_raises(capsys):
    with pytest.raises(ValueError, match="do-sample"):
        main(["generate", "tiny", "--prompt", "x", "--temperature", "0.5", "--debug"])


@pytest.mark.parametrize(
    ("text", "says"), [("", "no prompt"), ("{", "not JSON"), ("[1]", "JSON object"), ('{"id": 1}', "no text")]
)
def test_bad_prompt_files_are_named(tmp_path, text, says):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=says) as error:
        read_prompts(str(path))
    assert str(path) in str(error.value)


def test_a_text_file_has_a_prompt_a_line(tmp_path, capsys):
    """And whatever has no rows says how it was read."""
    for name, content, prompts in (("p.txt", "a\n\nb c\n", ["a", "b c"]), ("p.md", "a\n\nb", ["a\n\nb"])):
        path = tmp_path / name
        path.write_text(content)
        assert [row["prompt"] for row in read_prompts(str(path))] == prompts
        assert f"{path}: {len(prompts)} prompt" in capsys.readouterr().err


def test_prompt_files_of_known_data_sets(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "a"}\n\n{"turns": ["b", "c"]}\n{"prompt": "d", "task": "t"}\n')
    assert [row["prompt"] for row in read_prompts(str(path))] == ["a", "b", "d"]


def test_measurements_end_when_their_time_is_up(tiny_model, monkeypatch):
    """But not before a first batch; variants come in turned order for every other one."""
    clock, seen = iter(range(0, 10_000, 10)), []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(measure, "warm_up", lambda *_: None)
    monkeypatch.setattr(
        measure,
        "timed_generate",
        lambda model, inputs, variant, *_: (seen.append((inputs, variant.name)), ([[1]], 1.0, None))[1],
    )
    variants = [Variant("a"), Variant("b")]
    results = measure.measure(tiny_model, list(range(9)), variants, {}, 1, 0, seconds=35)
    assert seen == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert [result.new_tokens for result in results] == [[3], [3]]
    seen.clear()
    measure.measure(tiny_model, list(range(9)), variants, {}, 1, 0, seconds=0.1)
    assert len(seen) == 2


@pytest.mark.parametrize(("head", "device"), [(None, "cpu"), ("tiny-eagle3", "cpu"), ("tiny-eagle3", "cuda")])
def test_what_the_demo_compares_can_be_parsed(head, device):
    target = SimpleNamespace(device=torch.device(device))
    model = demo.DemoModel(target, None, head and hf_specdec.bundled(head))
    single, batch = (
        [hf_specdec.parse_config(variant.speculative_config) for variant in variants if variant.speculative_config]
        for variants in (demo.single_variants(model), demo.batch_variants(model))
    )
    lookup = "ngram" if importlib.util.find_spec("arctic_inference") is None else "suffix"
    learnt = [lookup, "draft_model", *(["eagle3"] if head else [])]
    assert [config.method for config in single] == ["none", *learnt]
    assert [config.method for config in batch] == ["none", learnt[-1]]
    assert all(config.draft_length == "auto" for config in [*single[1:], *batch[1:]])


def test_rows_end_at_their_end_token():
    assert cut_at_end([[5, 2, 0], [5, 6, 7], []], {2}) == [[5, 2], [5, 6, 7], []]


def test_measurement_arithmetic():
    result = Measurement(Variant("x"), seconds=[1.0, 2.0, 4.0], new_tokens=[8, 8, 8], outputs=[[1], [2]])
    counts = {"num_steps": 2, "num_new_tokens": 6, "num_draft_tokens": 8, "num_accepted_tokens": 4}
    result.add([[5, 6]], 0.5, {**counts, "acceptance_per_position": [0.5]})
    assert (result.accepted_length, result.acceptance_rate, result.accepted_at) == (3.0, 0.5, {0: 1.0})
    assert (result.seconds, result.new_tokens, result.outputs.pop()) == ([1.0, 2.0, 4.5], [8, 8, 10], [5, 6])
    assert result.tokens_per_second == 4.0
    assert equal_rows(result, Measurement(Variant("y"), outputs=[[1], [3]])) == 1


def test_every_option_of_the_engine_reaches_it():
    """The list is written down, because the HTTP side does not import `LLM`, which has these arguments."""
    args = build_parser().parse_args(["serve", "tiny", "--lora-modules", "name=folder"])
    arguments = inspect.signature(hf_specdec.LLM).parameters.keys() - {"model", "tokenizer"}
    assert serve._engine_arguments(args).keys() == arguments & vars(args).keys()
