"""Prometheus metrics of a run from its snapshot: names with units, bounded labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.web.snapshot import GROUPS, DeviceView, Snapshot

#: Devices with series of their own; of a larger fleet those beyond are in the run's sums alone.
MOST_DEVICES = 1000
#: Figure of a device's costliest round -> name, what it is. ``kind``: measured, or the budget of a round.
_COSTS = {
    "step_peak_bytes": ("step_memory_bytes", "memory that training takes"),
    "process_peak_bytes": ("process_memory_bytes", "memory of the trainer's process"),
    "cuda_reserved_peak_bytes": ("gpu_memory_bytes", "memory reserved on the GPU"),
    "flops": ("round_operations", "floating-point operations of a round"),
    "payload_bytes": ("round_payload_bytes", "payload of a round, both ways"),
    "energy_j": ("round_energy_joules", "energy of a round"),
}
_TOTALS: tuple[tuple[str, str, Callable[[DeviceView], float | None]], ...] = (
    ("sent_bytes", "Payload that the device has sent.", lambda device: device.sent_bytes),
    ("received_bytes", "Payload that the device has received.", lambda device: device.received_bytes),
    ("operations", "Floating-point operations of its training.", lambda device: device.flops),
    ("energy_joules", "Energy of its training, where it is measured.", lambda device: device.energy_j),
)


class _OfRun(Collector):
    def __init__(self, latest: Callable[[], Snapshot]) -> None:
        self._latest = latest

    def collect(self) -> Iterable[Metric]:
        now = self._latest()
        return [*_of_run(now), *_of_devices(now)]


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(f"edgefl_{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _of_run(now: Snapshot) -> Iterator[Metric]:
    run = {"run": now.run}
    info = {**run, "name": now.name, "recipe": now.recipe}
    yield _gauge("run_info", "The run that this coordinator executes; always 1.", info, 1)
    yield _gauge("run_ended", "1 when the run is over, by whatever end.", run, bool(now.ended))
    yield _gauge("run_paused", "1 while the run is paused, or pauses after its round.", run, bool(now.paused))
    yield _gauge("run_elapsed_seconds", "Time since the run began.", run, now.elapsed_s)
    if now.rounds_total:  # it has begun
        yield _gauge("run_rounds_planned", "Rounds that the run has in all stages.", run, now.rounds_total)
    if now.stage:
        yield _gauge("run_stage", "The stage that is trained, from 1.", run, now.stage)
    rounds = CounterMetricFamily("edgefl_run_rounds_done", "Rounds that are closed.", labels=["run"])
    rounds.add_metric([now.run], now.rounds_done)
    yield rounds
    devices = GaugeMetricFamily("edgefl_run_devices", "Devices by what they do.", labels=["run", "group"])
    for group in GROUPS:
        devices.add_metric([now.run, group], now.counts.get(group, 0))
    yield devices
    loss = GaugeMetricFamily("edgefl_run_training_loss", "Mean loss of the last round's devices.", labels=["run"])
    labels = ["run", "metric", "given", "mask"]
    test = GaugeMetricFamily("edgefl_run_test_score", "Last test metric, by what the model was given.", labels=labels)
    for curve in (curve for curve in now.curves if curve.points):
        value = curve.points[-1][1]
        if curve.given == "training":
            loss.add_metric([now.run], value)
        else:
            test.add_metric([now.run, curve.metric, curve.given, curve.mask or "none"], value)
    yield from (loss, test)


def _of_devices(now: Snapshot) -> Iterator[Metric]:
    shown = now.devices[:MOST_DEVICES]
    place = ["run", "device"]
    online = GaugeMetricFamily("edgefl_device_online", "1 unless the device is away.", labels=place)
    heard = GaugeMetricFamily("edgefl_device_last_heard_timestamp_seconds", "Its last sign of life.", labels=place)
    loss = GaugeMetricFamily("edgefl_device_training_loss", "Loss of its last steps.", labels=place)
    for device in shown:
        online.add_metric([now.run, device.name], device.group != "away")
        if device.heard_at is not None:
            heard.add_metric([now.run, device.name], device.heard_at)
        if device.loss is not None:
            loss.add_metric([now.run, device.name], device.loss)
    yield from (online, heard, loss)
    for name, text, of in _TOTALS:
        total = CounterMetricFamily(f"edgefl_device_{name}", text, labels=place)
        for device, value in ((device, of(device)) for device in shown):
            if value is not None:  # what was not measured is no zero
                total.add_metric([now.run, device.name], value)
        yield total
    for figure, (name, text) in _COSTS.items():
        words = f"Most {text} so far (measured), and the limit (budget)."
        cost = GaugeMetricFamily(f"edgefl_device_{name}", words, labels=[*place, "kind"])
        for device in shown:
            for bar in device.bars:
                for kind, value in (("measured", bar.used), ("budget", bar.allowed)):
                    if bar.figure == figure and value is not None:
                        cost.add_metric([now.run, device.name, kind], value)
        yield cost


def metrics(latest: Callable[[], Snapshot]) -> Route:
    """The route ``/metrics``: the latest snapshot, at no cost to the run."""
    registry = CollectorRegistry()
    registry.register(_OfRun(latest))

    async def answer(_request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Route("/metrics", answer)
