"""Metrics for Prometheus: names with units, and labels bounded by the models that are served."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

#: Seconds: from a small model alone on a fast machine to the time limit of an answer.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Model of a request that names none of those here.
UNKNOWN = "-"


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._info = Gauge("edgefl_serve_info", "What is served; always 1.", ["model", "runs_on"], registry=registry)
        self._requests = Counter(
            "edgefl_serve_requests", "Requests by their answer.", ["by", "model", "code"], registry=registry
        )
        self._seconds = Histogram(
            "edgefl_serve_request_seconds", "From a request's head to its answer.", buckets=_SECONDS, registry=registry
        )
        self._batch_rows = Histogram(
            "edgefl_serve_batch_samples", "Samples computed at a time.", buckets=_ROWS, registry=registry
        )
        self._batch_seconds = Histogram(
            "edgefl_serve_batch_seconds", "Time of a batch.", buckets=_SECONDS, registry=registry
        )
        self._batched = Counter("edgefl_serve_batched_requests", "Requests that batches answered.", registry=registry)
        self._samples = Counter(
            "edgefl_serve_samples", "Samples by what they had and what filled in.", ["given", "mask"], registry=registry
        )

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Register a gauge; ``value`` is called at each read."""
        Gauge(f"edgefl_serve_{name}", text, registry=self.registry).set_function(value)

    def info(self, model: str, runs_on: str) -> None:
        """Register a served model and its execution provider."""
        self._info.labels(model, runs_on).set(1)

    def request(self, by: str, model: str, code: int, seconds: float) -> None:
        """Count an answered request and its time.

        ``by``: "http" or "mqtt"; ``code``: status of the answer.
        """
        self._requests.labels(by, model, str(code)).inc()
        self._seconds.observe(seconds)

    def batch(self, rows: int, requests: int, seconds: float) -> None:
        """Count a computed batch and its time."""
        self._batch_rows.observe(rows)
        self._batched.inc(requests)
        self._batch_seconds.observe(seconds)

    def samples(self, given: tuple[str, ...], mask: str, rows: int) -> None:
        """Count answered samples by modalities and mask."""
        self._samples.labels("+".join(given), mask).inc(rows)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)
