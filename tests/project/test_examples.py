"""Every script of examples/ runs on the bundled model; those whose package is not installed are skipped with what to install."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from paths import ROOT
from transformers import GenerationMixin

import hf_specdec
from hf_specdec.candidate_generators import registry

EXAMPLES = ROOT / "examples"


def load(name, *needs):
    """An example as a module; skips the test if a package is missing."""
    for package, what in needs:
        pytest.importorskip(package, reason=f"pip install {what}", exc_type=ImportError)
    spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_lists_every_example():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = [path.name for path in EXAMPLES.glob("*.py")] + ["custom_method/"]
    assert len(scripts) == 10
    for name in scripts:
        assert f"[{name}]" in text, name


def test_summaries_of_a_folder(tmp_path):
    for i, word in enumerate(("dog", "cat")):
        (tmp_path / f"{i}.txt").write_text(f"The {word} ran to the park. It found a red ball.", encoding="utf-8")
    out = tmp_path / "out.jsonl"
    load("summarise_folder.py").main([str(tmp_path), "--output", str(out), "--max-tokens", "16"])
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["file"] for row in rows] == ["0.txt", "1.txt"] and all(row["summary"] for row in rows)


def test_summaries_of_an_empty_folder_are_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        load("summarise_folder.py").main([str(tmp_path)])
    assert "no .txt files" in capsys.readouterr().err


def test_structured_output():
    found = load("structured_output.py", ("llguidance", "'hf-specdec[serve]'")).main([])
    assert len(found) == 2 and all(set(each) == {"animal", "legs", "is_big"} for each in found)


def test_an_adapter_with_the_base_models_head():
    base, adapted = load("peft_adapter.py", ("peft", "peft")).main([])
    assert base > 2 and adapted >= 1


def test_a_quantized_target():
    output = load("quantized_target.py", ("torchao", "'hf-specdec[gpu]'")).main(["--max-new-tokens", "24"])
    assert output.speculation["mean_accepted_length"] > 1


def test_a_method_in_a_package_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    hf_specdec.available_methods()  # discovered before the registry is copied
    for name in ("_CONFIGS", "_GENERATORS"):  # other tests ask for the methods of this package only
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    output = load("custom_method/try_it.py").main()
    assert output.speculation["mean_accepted_length"] > 5
    declared = (EXAMPLES / "custom_method" / "pyproject.toml").read_text(encoding="utf-8")  # Python 3.10 has no tomllib
    assert '[project.entry-points."hf_specdec.methods"]\nboilerplate = "boilerplate:BoilerplateGenerator"' in declared
    with pytest.raises(hf_specdec.SpeculativeConfigError, match="token ids"):
        hf_specdec.parse_config({"method": "boilerplate", "texts": [[1]]})
    with pytest.raises(hf_specdec.SpeculativeConfigError, match=r"'match'.* integer"):
        hf_specdec.parse_config({"method": "boilerplate", "texts": [[1]], "match": 0})
    with pytest.raises(hf_specdec.SpeculativeConfigError, match="must be one of 'auto', not 'fixed'"):
        hf_specdec.parse_config("ngram").check_choice("draft_length", ("auto",))


def test_the_chat_tints_what_was_drafted():
    chat = load("gradio_chat.py", ("gradio", "gradio"))
    _, reply = chat.main([], launch=False)
    *_, last = reply("Tell me a story about a big dog.")
    assert {kind for _, kind in last} == {"drafted", None}
    assert len("".join(text for text, _ in last)) > 100


def test_the_chat_raises_what_generate_raised(tiny_model, tiny_tokenizer):
    chat = load("gradio_chat.py", ("gradio", "gradio"))
    with pytest.raises(hf_specdec.SpeculativeConfigError):
        list(chat.answers(tiny_model, tiny_tokenizer, {"method": "nothing"}, "Hello"))


def test_langchain():
    needs = (("langchain_huggingface", "langchain-huggingface"), ("langchain_core", "langchain-core"))
    answers = load("langchain_pipeline.py", *needs).main([])
    assert len(answers) == 2 and all(answers)


def test_llama_index_drafts(monkeypatch):
    """The configuration reaches every generate() that LlamaIndex calls, and the texts are plain decoding's."""
    script = load("langchain_pipeline.py", ("llama_index.llms.huggingface", "llama-index-llms-huggingface"))
    given, generate = [], GenerationMixin.generate

    def watched(self, *args, **kwargs):
        given.append(kwargs.get("speculative_config"))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", watched)
    drafted = script.main(["--llama-index"])
    assert given == [script.CONFIG] * 2
    monkeypatch.setattr(script, "CONFIG", None)
    assert script.main(["--llama-index"]) == drafted and all(drafted)


@pytest.mark.slow
def test_evaluation_harness():
    results = load("lm_eval_harness.py", ("lm_eval", "lm-eval")).main(["--limit", "3"])
    assert "bundled_prompts" in results["results"]


@pytest.mark.slow
def test_rollouts():
    trainer = load("trl_rollouts.py", ("trl", "trl"), ("datasets", "datasets")).main([])
    assert any("reward" in row for row in trainer.state.log_history)


@pytest.mark.slow
def test_ray_serve():
    assert len(load("ray_serve.py", ("ray.serve", "'ray[serve]'")).main()) > 40
