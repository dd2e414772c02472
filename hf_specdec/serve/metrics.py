"""Prometheus metrics under names of our own, and statistics of speculation under vLLM's names, which tools look for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from .ipc.messages import Load

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LENGTHS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16)
_SPECULATION = {  # by key of `Request.figures`
    "num_drafts": "Drafts verified.",
    "num_draft_tokens": "Tokens drafted.",
    "num_accepted_tokens": "Drafted tokens accepted.",
}
_BY_DRAFTER = {
    "num_steps": "Steps of rows whose drafts came from this drafter.",
    "num_draft_tokens": "Tokens drafted, by drafter.",
    "num_accepted_tokens": "Drafted tokens accepted, by drafter.",
}
_LEARNT = {
    "texts": "Texts that the head has learnt from.",
    "tokens": "Tokens that the head has learnt from.",
    "steps": "Training steps.",
    "swaps": "Times that better weights replaced those in use.",
    "rollbacks": "Times that worse weights were dropped.",
    "seconds": "Seconds spent on learning.",
    "held_out_tau": "Tokens per step on held-out texts with the weights in use.",
}

_OF_WEIGHTS = {
    "updates": "Updates of the weights.",
    "accepted_length": "Tokens per step of a row since the last update of the weights.",
    "best_accepted_length": "The same with the best of the earlier weights.",
}


@dataclass
class Metric:
    """A metric now, as `LLM.get_metrics` returns it; names of classes and attributes are vLLM's."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A number that rises and falls."""

    value: float


@dataclass
class Vector(Metric):
    """Counters by position in a draft."""

    values: list[int]


class Metrics:
    """All metrics of `/metrics`. Counts are updated in the event loop's thread; gauges are read when Prometheus asks. The server observes
    the histograms `first_token`, `whole` and `per_token`: seconds to the first token, of the request, and per token after the first.
    """

    def __init__(self, model: str, load: Callable[[], Load]):
        self.registry = CollectorRegistry()
        self._model, self._load = model, load

        def counter(name: str, text: str, *labels: str) -> PrometheusCounter:
            return PrometheusCounter(name, text, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            names = ["model_name", *labels]
            return Histogram(f"hf_specdec_{name}", text, names, buckets=buckets, registry=self.registry)

        def seconds(name: str, text: str) -> Any:
            return histogram(f"{name}_seconds", text, _SECONDS).labels(model)

        self._requests = counter("hf_specdec_requests", "Requests that ended.", "finish_reason")
        self._prompt_tokens = counter("hf_specdec_prompt_tokens", "Prompt tokens read.").labels(model)
        cached = "Prompt tokens whose KV was cached."
        self._cached_tokens = counter("hf_specdec_cached_prompt_tokens", cached).labels(model)
        self._new_tokens = counter("hf_specdec_generation_tokens", "Tokens written.").labels(model)
        self._steps = counter("hf_specdec_verification_steps", "Steps of all rows.").labels(model)
        self.first_token = seconds("time_to_first_token", "From the request to its first token.")
        self.whole = seconds("request_latency", "From the request to its end.")
        self.per_token = seconds("time_per_output_token", "Between tokens, per request.")
        self._speculation = {key: counter(f"vllm:spec_decode_{key}", text) for key, text in _SPECULATION.items()}
        for metric in self._speculation.values():
            metric.labels(model)  # shown before the first request ends
        self._by_drafter = {
            key: counter(f"hf_specdec_drafter_{key.removeprefix('num_')}", text, "drafter")
            for key, text in _BY_DRAFTER.items()
        }
        by_position = "vllm:spec_decode_num_accepted_tokens_per_pos"
        self._accepted_at = counter(by_position, "Accepted by position.", "position")
        text = "Share of a request's drafts this deep whose token was accepted, by position."
        self._share_at = histogram("acceptance_ratio", text, [i / 10 for i in range(11)], "position")
        text = "Tokens per step of a request, over its choices."
        self._accepted_length = histogram("accepted_length", text, _LENGTHS).labels(model)
        self.registry.register(self)  # type: ignore[arg-type]

    def tokens_written(self, count: int, num_rows: int) -> None:
        """Count the new tokens of a step, and the rows that wrote some."""
        self._new_tokens.inc(count)
        self._steps.inc(num_rows)

    def request_ended(
        self, reason: str, num_prompt: int, num_cached: int, statistics: dict[str, Any] | None, adapter: str | None = None
    ) -> None:  # fmt: skip
        """Count a request that has ended with this finish_reason or "error". `statistics`: `Request.figures`; None if it was cancelled.
        `adapter`: counted, with its drafts, as the model."""
        model = adapter or self._model
        self._requests.labels(model, reason).inc()
        self._prompt_tokens.inc(num_prompt)
        self._cached_tokens.inc(num_cached)
        if statistics is None:
            return
        if statistics["mean_accepted_length"]:  # it has written tokens
            self._accepted_length.observe(statistics["mean_accepted_length"])
        for key, counter in self._speculation.items():
            counter.labels(model).inc(statistics[key])
        for drafter, counts in statistics.get("drafters", {}).items():
            for key, counter in self._by_drafter.items():
                counter.labels(self._model, drafter).inc(counts[key])
        for position, count in enumerate(statistics["num_accepted_per_position"]):
            self._accepted_at.labels(self._model, str(position)).inc(count)
        for position, share in enumerate(statistics["acceptance_per_position"]):
            self._share_at.labels(self._model, str(position)).observe(share)

    def collect(self) -> Iterable[Any]:
        """The engine's load, which is read when Prometheus asks. Called by prometheus-client."""
        load = self._load()
        learnt, weights = load.learning or {}, load.weights or {}
        gauges = [
            ("requests_running", "Rows in the batch.", load.running),
            ("requests_waiting", "Rows that wait to run.", load.waiting),
            ("kv_cache_usage_ratio", "Used share of the KV cache.", load.kv_usage),
            *((f"learning_{name}", text, learnt.get(name)) for name, text in _LEARNT.items()),
            *((f"weights_{name}", text, weights.get(name)) for name, text in _OF_WEIGHTS.items()),
        ]
        text = "Rows that lost their KV blocks for a while."
        preemptions = CounterMetricFamily("hf_specdec_preemptions", text, labels=["model_name"])
        preemptions.add_metric([self._model], load.preemptions)
        yield preemptions
        for name, text, value in gauges:
            if value is not None:
                family = GaugeMetricFamily(f"hf_specdec_{name}", text, labels=["model_name"])
                family.add_metric([self._model], value)
                yield family

    def text(self) -> bytes:
        """All metrics in Prometheus' form."""
        return generate_latest(self.registry)

    def snapshot(self) -> list[Metric]:
        """All metrics but histograms, which `LLM`'s outputs have request by request."""
        metrics: list[Metric] = []
        for family in self.registry.collect():
            samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            if family.name.endswith("_per_pos"):
                metrics.append(Vector(family.name, {"model_name": self._model}, [int(one.value) for one in samples]))
            elif family.type == "counter":
                metrics += [Counter(family.name, dict(one.labels), int(one.value)) for one in samples]
            elif family.type == "gauge":
                metrics += [Gauge(family.name, dict(one.labels), one.value) for one in samples]
        return metrics
