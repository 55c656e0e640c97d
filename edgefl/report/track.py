"""Writes a run's scalars for TensorBoard or MLflow, in a process of its own: ``python -m edgefl.report.track``.

Events come as JSON lines on standard input; its end is the end. MLflow alone takes 130 MB and five seconds to import,
for which the coordinator has neither room nor time, and whatever goes wrong here goes wrong here.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from edgefl.run_records import EventRow

#: Figure in an event -> name of its scalar.
_DEVICE = {
    "loss": "loss",
    "step_peak_bytes": "step_memory_bytes",
    "process_peak_bytes": "process_memory_bytes",
    "flops": "flops",
    "payload_up_bytes": "sent_bytes",
    "payload_down_bytes": "received_bytes",
    "energy_j": "energy_joules",
    "seconds": "seconds",
}
_ROUND = {"loss": "loss", "payload_bytes": "payload_bytes", "seconds": "seconds"}
#: Events that have scalars, or end the run.
TOLD = frozenset({"update", "round_closed", "evaluated", "run_finished", "run_failed"})


class Writer(Protocol):
    """Interface of a writer of scalars; ``end`` is called once."""

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Write one event's scalars. ``step``: rounds of the run so far; ``at``: seconds since the epoch."""

    def end(self, status: str) -> None:
        """Close the writer. ``status``: "done", "failed" or "", interrupted."""


def scalars(event: EventRow) -> Iterator[tuple[str, float]]:
    """(name, value) of the finite numbers in an event: device/NAME/…, round/…, test/METRIC/MODALITIES with the mask."""
    data = event.data
    if event.kind == "update":
        found = [(f"device/{event.device}/{name}", data.get(key)) for key, name in _DEVICE.items()]
    elif event.kind == "round_closed":
        found = [(f"round/{name}", data.get(key)) for key, name in _ROUND.items()]
        found.append(("round/devices", len(data.get("participants") or ())))
    else:
        rows = data.get("values") or () if event.kind == "evaluated" else ()
        found = [(_test(row), row.get("value")) for row in rows]
    for name, value in found:
        if isinstance(value, (int, float)) and math.isfinite(value):
            yield name, float(value)


def _test(row: Mapping[str, Any]) -> str:
    given, mask = "_and_".join(row.get("available") or ()), str(row.get("missing") or "none")
    return f"test/{row.get('metric')}/{given}" + ("" if mask == "none" else f"/{mask}")


def _tensorboard(target: str, _run: str) -> Writer:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    file = EventFileWriter(target, flush_secs=5)

    class Written:
        def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
            file.add_event(Event(wall_time=at, step=step, summary=summary))

        def end(self, _status: str) -> None:
            file.close()

    return Written()


def _mlflow(target: str, run: str) -> Writer:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # what is trained here is nobody else's business
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder is what a run has; servers are named by URI
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient(tracking_uri=target)
    known = client.get_experiment_by_name("edgefl")
    experiment = known.experiment_id if known else client.create_experiment("edgefl")
    again = client.search_runs([experiment], f"tags.`edgefl.run` = '{run}'", max_results=1)
    tags = {"edgefl.run": run}
    number = (again[0] if again else client.create_run(experiment, run_name=run, tags=tags)).info.run_id

    class Written:
        def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
            client.log_batch(
                number, metrics=[Metric(key, value, int(at * 1000), step) for key, value in values.items()]
            )

        def end(self, status: str) -> None:
            client.set_terminated(number, {"done": "FINISHED", "failed": "FAILED"}.get(status, "KILLED"))

    return Written()


#: Kind -> (its writer, the package it needs as imported).
WRITERS: dict[str, tuple[Callable[[str, str], Writer], str]] = {
    "tensorboard": (_tensorboard, "tensorboard"),
    "mlflow": (_mlflow, "mlflow"),
}


def main() -> None:
    """Entry point. Arguments: kind, target, run, rounds of each stage as a JSON list."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the coordinator, which closes our input
    kind, target, run, stages = sys.argv[1:]
    rounds: list[int] = json.loads(stages)
    writer, status = WRITERS[kind][0](target, run), ""
    for line in sys.stdin.buffer:
        event = msgspec.json.decode(line, type=EventRow)
        if event.kind in ("run_finished", "run_failed"):
            status = "failed" if event.kind == "run_failed" else str(event.data.get("status", "done"))
        if values := dict(scalars(event)):
            writer.add(sum(rounds[: event.stage - 1]) + event.round, event.at, values)
    writer.end(status)


if __name__ == "__main__":
    main()
