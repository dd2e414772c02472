"""What the HTTP process of a server loads: it needs a tokenizer and templates, and no code that computes with a model."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

# Everything up to the moment in which requests are accepted, but for the engine's process.
PROGRAM = """
import json, sys, types
from hf_specdec.cli import main
from hf_specdec.serve.http import run
run.EngineProcess = lambda *_: types.SimpleNamespace(end=lambda: None)
run._DrainingServer.run = lambda *_: print(json.dumps(sorted(sys.modules)))
main(["serve", "tiny", "--port", "0", "--speculative-config", '{"method": "suffix"}', *sys.argv[1:]])
"""
HEAVY = (
    "hf_specdec.candidate_generators.base", "hf_specdec.candidate_generators.suffix", "hf_specdec.decoding", "hf_specdec.model",
    "hf_specdec.serve.engine.engine", "hf_specdec.serve.llm", "torch._dynamo",
    "transformers.generation.utils", "transformers.modeling_utils", "transformers.models.llama.modeling_llama",
)  # fmt: skip


def loaded(*options):
    """The names of the modules that the process has loaded."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return set(
        json.loads(subprocess.check_output([sys.executable, "-c", PROGRAM, *options], env=environment, text=True))
    )


def test_the_http_process_loads_no_code_of_models():
    modules = loaded()
    assert "transformers.models.auto.tokenization_auto" in modules  # the list is that of a server
    assert not sorted(modules & set(HEAVY))
    # The names are of modules that exist: with a key that must be parsed, drafters are loaded.
    assert modules < (more := loaded("--api-key", "a", "--api-key", "b")) and set(HEAVY[:2]) < more
