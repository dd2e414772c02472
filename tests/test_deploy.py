"""The deployment files speak of flags and metrics that exist."""

import json
import re
import shlex
from pathlib import Path

import pytest

from hf_specdec.cli import build_parser

pytest.importorskip("prometheus_client")

from hf_specdec.serve.metrics import Metrics
from hf_specdec.serve.worker import Load

DEPLOY = Path(__file__).parents[1] / "deploy"


def metric_names():
    """Every name in what /metrics says after a request with drafts."""
    metrics = Metrics("tiny", lambda: Load(running=1))
    metrics.tokens_written(3, 2)
    for histogram in (metrics.first_token, metrics.whole, metrics.per_token):
        histogram.observe(0.1)
    statistics = {"num_drafts": 2, "num_draft_tokens": 6, "num_accepted_tokens": 3, "num_accepted_per_position": [2, 1]}
    metrics.request_ended("stop", 5, 2, statistics)
    return set(re.findall(r"^([a-z_:]+)\{", metrics.text().decode(), flags=re.M))


def test_the_dashboard_asks_for_metrics_that_exist():
    dashboard = json.loads((DEPLOY / "grafana/dashboards/hf-specdec.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [each["query"] for each in dashboard["templating"]["list"]]
    asked = {name for each in expressions for name in re.findall(r"(?:hf_specdec|vllm)[a-z_:]+", each)}
    assert len(asked) > 12 and asked <= metric_names(), asked - metric_names()
    titles = " ".join(panel["title"] for panel in dashboard["panels"])
    for wanted in ("τ", "position", "first token", "output token", "Rows", "KV cache"):
        assert wanted in titles
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


def test_the_metrics_of_the_page_exist():
    text = (DEPLOY.parent / "hf_specdec/serve/page.html").read_text()
    asked = set(re.findall(r"\bhf_specdec_[a-z_]+[a-z]\b", text))
    assert len(asked) == 5 and asked <= metric_names()


def test_commands_of_the_files_are_the_cli():
    unit = (DEPLOY / "hf-specdec.service").read_text()
    line = (
        re.search(r"^ExecStart=\S+ (.*)$", unit, flags=re.M).group(1).replace("${MODEL}", "tiny").replace(" $FLAGS", "")
    )
    docker = (DEPLOY / "Dockerfile").read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", docker, flags=re.M).group(1))[1:]
    command = json.loads(re.search(r"^CMD (.*)$", docker, flags=re.M).group(1))
    for words in (shlex.split(line), entry + command):
        assert build_parser().parse_args(words).model == "tiny"
    compose = (DEPLOY / "docker-compose.yml").read_text()
    for path in re.findall(r"- (\./\S+?):|\"(\./\S+?):", compose):
        assert (DEPLOY / "".join(path)).exists(), path
    assert (DEPLOY.parent / re.search(r"dockerfile: (\S+)", compose).group(1)).exists()
