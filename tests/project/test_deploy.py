"""The deployment files speak of flags and metrics that exist."""

import json
import re
import shlex
import urllib.request

import pytest
from paths import ROOT

from hf_specdec.cli import build_parser

pytest.importorskip("prometheus_client")

from hf_specdec.serve.ipc.messages import Load
from hf_specdec.serve.metrics import Metrics

DEPLOY = ROOT / "deploy"


def metric_names():
    """Every name in what /metrics says after a request with drafts."""
    metrics = Metrics("tiny", lambda: Load(running=1))
    metrics.tokens_written(3, 2)
    for histogram in (metrics.first_token, metrics.whole, metrics.per_token):
        histogram.observe(0.1)
    statistics = {"num_drafts": 2, "num_draft_tokens": 6, "num_accepted_tokens": 3, "num_accepted_per_position": [2, 1]}
    statistics |= {"acceptance_per_position": [1.0, 0.5], "mean_accepted_length": 2.5}
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
    text = (DEPLOY.parent / "hf_specdec/serve/http/page.html").read_text()
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


def test_a_server_as_compose_starts_it_exports_what_the_dashboard_asks_for():
    """Over HTTP, after one request: the names that Prometheus finds, with the labels that the expressions select and sum by."""
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("uvicorn")
    from helpers_server import Process

    compose = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]
    model, *flags = compose["serve"]["command"]
    assert model == "tiny"  # what `Process` starts
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["serve:8000"]}] and job.get("metrics_path", "/metrics") == "/metrics"
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and set(compose) == {"serve", "prometheus", "grafana"}
    (provider,) = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/files.yml").read_text())["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in compose["grafana"]["volumes"]
    dashboard = json.loads((DEPLOY / "grafana/dashboards/hf-specdec.json").read_text())
    sources = [each["datasource"] for each in (*dashboard["panels"], *dashboard["templating"]["list"])]
    assert all(each == {"type": "prometheus", "uid": source["uid"]} for each in sources)

    with Process.running(*flags) as server:
        body = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}
        assert server.post("/v1/completions", body)[0] == 200
        with urllib.request.urlopen(server.url + "/metrics", timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            samples = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    labels = {}
    for line in samples:
        name, _, rest = line.partition("{")
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', rest.partition("}")[0]))
    for target in (target for panel in dashboard["panels"] for target in panel["targets"]):
        names = set(re.findall(r"(?:hf_specdec|vllm)[a-z_:]+", target["expr"]))
        asked = set(re.findall(r"by \((\w+)\)", target["expr"])) | set(re.findall(r"\{(\w+)=", target["expr"]))
        assert names <= labels.keys(), names - labels.keys()
        assert asked <= set.union(*(labels[name] for name in names)), target["expr"]
    values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in samples}
    assert (
        values["vllm:spec_decode_num_accepted_tokens_total"] > 0 and values["hf_specdec_generation_tokens_total"] == 40
    )
