"""Counts and times the server's requests and refusals; reports them as Prometheus text and Triton's statistics.

The counters that Triton's dashboards read keep Triton's names and microseconds (`nv_inference_*`); our own histograms
(`tackboard_*`) are in seconds. Decided: no label holds a user, an item or anything else that a client can make up, so
the number of series is bounded. All methods are called on the event loop's thread, so they need no locks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tackboard.scoring.context_cache import OUTCOMES

FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
_REASON_OF_STATUS = {429: "REJECTED", 503: "REJECTED", 504: "REJECTED", 499: "CANCELED", 500: "BACKEND"}
SHED_REASONS = ("queue_full", "too_late", "memory", "draining", "connections")
EXPIRED_STAGES = ("parse", "queue", "compute")
UNKNOWN_FIELDS = ("action", "surface", "time_ms")
LOG_OUTCOMES = ("logged", "dropped", "without_user_or_time")
CLOSED_REASONS = (
    *("header_deadline", "body_deadline", "header_size", "chunk_size", "body_size", "pipeline", "malformed"),
    *("connections", "made_room"),
)
_COMPUTE_PARTS = ("compute_input", "compute_infer", "compute_output")
_PARTS = ("success", "queue", *_COMPUTE_PARTS)
"""Parts of the time of an answered request, named as in Triton's statistics; `success` is the total."""
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_CANDIDATES = (1, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10000)


@dataclass(slots=True)
class TotalDuration:
    """Counts occurrences of one kind, and sums their durations in nanoseconds. The field names are Triton's."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        """Counts one more occurrence, which took `ns` nanoseconds."""
        self.count += 1
        self.ns += ns


@dataclass(slots=True)
class Timings:
    """Nanoseconds that one answered request spent in each part."""

    total: int
    queue: int
    compute_input: int
    compute_infer: int
    compute_output: int


class Telemetry:
    """Counts the requests and connections of one served model.

    `pending` returns the number of waiting requests. `feature_log` returns the number of requests for each outcome in
    LOG_OUTCOMES. `contexts` returns the figures of the cache of contexts, or nothing without a cache.
    """

    def __init__(
        self,
        model: str,
        version: str,
        pending: Callable[[], int] = lambda: 0,
        feature_log: Callable[[], Mapping[str, int]] = dict,
        contexts: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        disable_created_metrics()
        self.model = model
        self.version = version
        self.pending = pending
        self.contexts = contexts
        self._durations = {part: TotalDuration() for part in (*_PARTS, "fail", "cache_hit", "cache_miss")}
        self._failures = dict.fromkeys(FAILURE_REASONS, 0)
        self._last_inference_ms = 0
        self._trimmed_bytes = 0
        self._registry = CollectorRegistry()
        registry = self._registry
        self._request = Histogram(
            "tackboard_request_duration_seconds",
            "Time from the end of an infer call's headers to its answer",
            ["status"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._requests: dict[int, Any] = {}
        self._queue = Histogram(
            "tackboard_queue_wait_seconds", "Wait for the model", buckets=_SECONDS, registry=registry
        )
        self._compute = Histogram("tackboard_compute_seconds", "Time in the model", buckets=_SECONDS, registry=registry)
        self._candidates = Histogram(
            "tackboard_request_candidates", "Candidates per answered request", buckets=_CANDIDATES, registry=registry
        )
        self._shed = Counter("tackboard_shed_total", "Refused by a busy server", ["reason"], registry=registry)
        self._expired = Counter("tackboard_deadline_expired_total", "Deadlines passed", ["stage"], registry=registry)
        self._closed = Counter("tackboard_connections_closed_total", "Closed by server", ["reason"], registry=registry)
        self._accept_errors = Counter(
            "tackboard_accept_errors_total", "Connections that could not be accepted", registry=registry
        )
        self._ready = Gauge("tackboard_ready", "1 while new requests are taken", registry=registry)
        self._trimmed = Counter(
            "tackboard_trimmed_bytes_total", "Bytes of inputs that the model does not read", registry=registry
        )
        self._unknown = Counter(
            "tackboard_unknown_values_total",
            "Events of answered requests with an action or surface that training never saw, or without a time",
            ["field"],
            registry=registry,
        )
        registry.register(_LogCollector(feature_log))
        registry.register(_ContextCollector(contexts))
        # Every series of these counters exists from the start, so that the rate of an event that never happened is 0.
        for counter, labels in (
            (self._shed, SHED_REASONS),
            (self._expired, EXPIRED_STAGES),
            (self._closed, CLOSED_REASONS),
            (self._unknown, UNKNOWN_FIELDS),
        ):
            for label in labels:
                counter.labels(label)

    def answered(self, timings: Timings, num_candidates: int) -> None:
        """Counts an infer request that got its scores."""
        for part in _PARTS:
            self._durations[part].add(timings.total if part == "success" else getattr(timings, part))
        self._last_inference_ms = int(time.time() * 1000)
        self._observe_request(200, timings.total)
        self._queue.observe(timings.queue / 1e9)
        self._compute.observe(timings.compute_infer / 1e9)
        self._candidates.observe(num_candidates)

    def failed(self, status: int, total_ns: int) -> None:
        """Counts an infer request that got no scores; the status is 499 if the client went away."""
        self._durations["fail"].add(total_ns)
        self._failures[_REASON_OF_STATUS.get(status, "OTHER")] += 1
        self._observe_request(status, total_ns)

    def shed(self, reason: str) -> None:
        """Counts a request or connection that a busy or draining server refused; `reason` is one of SHED_REASONS."""
        self._shed.labels(reason).inc()

    def expired(self, stage: str) -> None:
        """Counts a deadline that passed; `stage` is one of EXPIRED_STAGES."""
        self._expired.labels(stage).inc()

    def closed(self, reason: str) -> None:
        """Counts a connection that the server closed; `reason` is one of CLOSED_REASONS."""
        self._closed.labels(reason).inc()

    def accept_failed(self) -> None:
        """Counts a connection that the operating system did not hand over, usually for lack of descriptors."""
        self._accept_errors.inc()

    def trimmed(self, num_bytes: int) -> None:
        """Counts the bytes of inputs that were skipped because the model does not read them."""
        self._trimmed_bytes += num_bytes
        self._trimmed.inc(num_bytes)

    def unknown(self, counts: Mapping[str, int]) -> None:
        """Counts an answered request's events that have an unknown name or no time, by field (UNKNOWN_FIELDS)."""
        for name, count in counts.items():
            self._unknown.labels(name).inc(count)

    def set_ready(self, *, ready: bool) -> None:
        """Sets whether new requests are accepted."""
        self._ready.set(1 if ready else 0)

    def statistics(self) -> dict[str, Any]:
        """Returns one entry of Triton's `model_stats`."""
        times = {part: asdict(duration) for part, duration in self._durations.items()}
        compute = {part: times[part] for part in _COMPUTE_PARTS}
        num_computed = times["compute_infer"]["count"]
        return {
            "name": self.model,
            "version": self.version,
            "last_inference": self._last_inference_ms,
            "inference_count": times["success"]["count"],
            "execution_count": num_computed,
            "inference_stats": times,
            "batch_stats": [{"batch_size": 1, **compute}] if num_computed else [],
            "trimmed_bytes": self._trimmed_bytes,
            **({"contexts": figures} if (figures := self.contexts()) else {}),
        }

    def prometheus_text(self) -> bytes:
        """Returns all metrics as Prometheus text, format 0.0.4."""
        return (self._triton_text() + generate_latest(self._registry).decode()).encode()

    def _observe_request(self, status: int, total_ns: int) -> None:
        child = self._requests.get(status)
        if child is None:
            child = self._requests[status] = self._request.labels(str(status))
        child.observe(total_ns / 1e9)

    def _triton_text(self) -> str:
        # This text is made by hand, because the client library would append `_total` to names that dashboards expect.
        num_answered, num_computed = self._durations["success"].count, self._durations["compute_infer"].count
        label = f'model="{_escape(self.model)}",version="{_escape(self.version)}"'
        lines: list[str] = []

        def add(name: str, kind: str, text: str, samples: dict[str, int]) -> None:
            lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))
            lines.extend(f"{name}{{{labels}}} {value}" for labels, value in samples.items())

        add("nv_inference_request_success", "counter", "Answered requests", {label: num_answered})
        failures = {f'{label},reason="{reason}"': count for reason, count in self._failures.items()}
        add("nv_inference_request_failure", "counter", "Failed requests", failures)
        add("nv_inference_count", "counter", "Inferences performed", {label: num_answered})
        add("nv_inference_exec_count", "counter", "Model executions", {label: num_computed})
        add("nv_inference_pending_request_count", "gauge", "Requests that wait", {label: self.pending()})
        for part in _PARTS:
            name = "request" if part == "success" else part
            text, duration_us = f"Time of answered requests: {name}", self._durations[part].ns // 1000
            add(f"nv_inference_{name}_duration_us", "counter", text, {label: duration_us})
        return "\n".join(lines) + "\n"


class _LogCollector(Collector):
    """Reads the counts of the feature log only when metrics are read, because other threads update these counts."""

    def __init__(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yields one counter with a series per outcome."""
        counts = self._counts()
        family = CounterMetricFamily(
            "tackboard_feature_log_total", "Requests by outcome in the log of served features", labels=["outcome"]
        )
        for outcome in LOG_OUTCOMES:
            family.add_metric([outcome], counts.get(outcome, 0))
        yield family


class _ContextCollector(Collector):
    """Reads the figures of the context cache only when metrics are read; the model's thread updates these figures."""

    def __init__(self, figures: Callable[[], Mapping[str, Any]]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yields one counter with a series per outcome, and the memory of the contexts."""
        figures = self._figures()
        requests = CounterMetricFamily(
            "tackboard_context_requests_total", "Requests by what happened to their context", labels=["outcome"]
        )
        for outcome in OUTCOMES:
            requests.add_metric([outcome], figures.get("requests", {}).get(outcome, 0))
        yield requests
        text = "Memory of the kept contexts"
        yield GaugeMetricFamily("tackboard_context_cache_bytes", text, value=figures.get("bytes", 0))


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
