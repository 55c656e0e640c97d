"""The tables of every metric: the global model on the test set, and each device's model on what it set apart."""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.report import totals, units
from edgefl.report.grid import NOT_APPLICABLE, Cell, Column, Grid, count, words
from edgefl.run_records import AssignmentRow, RunReport

_CLASSIFICATION = {
    "accuracy": "accuracy",
    "macro_precision": "precision",
    "macro_recall": "recall",
    "macro_f1": "F1",
}
#: Recall at these, both ways, as ``edgefl.training.metrics`` has them.
_AT = (1, 5, 10, 50)


def grids(report: RunReport) -> tuple[Grid, Grid, Grid]:
    """All of them."""
    return classification(report), retrieval(report), personal(report)


def classification(report: RunReport) -> Grid:
    """Accuracy and the macro averages under every condition."""
    rows = [row for row in totals.latest(report.evaluations) if row.metric in _CLASSIFICATION]
    told: dict[tuple[tuple[str, ...], str], dict[str, float]] = {}
    samples: dict[tuple[tuple[str, ...], str], int] = {}
    for row in rows:
        key = (row.available, f"{row.missing} by {row.matcher}" if row.matcher else row.missing)
        told.setdefault(key, {})[row.metric] = row.value
        samples[key] = row.samples
    columns = (
        Column("given to the model", key=True, text=True),
        Column("mask", text=True),
        *(Column(name, "%", "" if metric == "accuracy" else "macro") for metric, name in _CLASSIFICATION.items()),
        Column("test samples"),
    )
    lines = tuple(
        (words(" + ".join(given)), words(mask), *_shares(values, list(_CLASSIFICATION)), count(samples[given, mask]))
        for (given, mask), values in told.items()
    )
    notes = ("Macro: the mean over the classes that occur, each counting alike.",)
    return Grid("Classification, all metrics", columns, lines, notes, "The model does not classify.")


def retrieval(report: RunReport) -> Grid:
    """Recall both ways of every pair of modalities."""
    rows = totals.latest(report.evaluations)
    values = {row.metric: row.value for row in rows}
    sums = {row.available: row.value for row in rows if row.metric == "rsum"}
    samples = {row.metric: row.samples for row in rows}
    names = sorted({metric.split("_recall_at_")[0] for metric in values if "_recall_at_" in metric})
    columns = (
        Column("from - to", key=True, text=True),
        *(Column(f"at {k}", "%", "recall") for k in _AT),
        Column("RSum", tip="Recall at 1, 5 and 10, both ways, in percent, added up."),
        Column("test samples"),
    )
    lines = []
    for name in names:
        pair = tuple(sorted(name.split("_to_")))
        total = next((value for available, value in sums.items() if tuple(sorted(available)) == pair), None)
        cells = _shares(values, [f"{name}_recall_at_{k}" for k in _AT])
        whole = words(units.number(total)) if total is not None else NOT_APPLICABLE
        found = next((samples[m] for m in samples if m.startswith(f"{name}_recall_at_")), None)
        lines.append((words(name.replace("_to_", " - ")), *cells, whole, count(found)))
    notes = ("A recall at more than there are candidates is left out.",)
    return Grid("Retrieval", columns, tuple(lines), notes, "The model does not retrieve.")


def own_accuracy(report: RunReport) -> float | None:
    """Mean over the devices with labels of their own model's accuracy, as trained last, on the samples set apart."""
    found = [row.metrics["trained_accuracy"] for row in _judged(report).values() if "trained_accuracy" in row.metrics]
    return sum(found) / len(found) if found else None


def _judged(report: RunReport) -> dict[str, AssignmentRow]:
    """Each device's last finished round in which it judged its own model."""
    done = [row for row in report.assignments if row.status == "done"]
    return {row.device: row for row in done if any(name.startswith("trained_") for name in row.metrics)}


def personal(report: RunReport) -> Grid:
    """Each device in its last round: the model it was sent, its own mended one, and the one it trained."""
    columns = (
        Column("device", key=True, text=True),
        Column("stage"),
        Column("round"),
        *(
            Column(f"{name} {what}", "%", group)
            for name, group in _MODELS
            for what in ("accuracy", "F1", "recall at 1")
        ),
    )
    lines = []
    for device, row in sorted(_judged(report).items()):
        cells: list[Cell] = []
        for name, _ in _MODELS:
            own = {k.removeprefix(f"{name}_"): v for k, v in row.metrics.items() if k.startswith(f"{name}_")}
            recalls = [value for key, value in own.items() if key.endswith("_recall_at_1")]
            mean = {"recall": sum(recalls) / len(recalls)} if recalls else {}
            cells += _shares({**own, **mean}, ["accuracy", "macro_f1", "recall"])
        lines.append((words(device), count(row.stage), count(row.round), *cells))
    overall = own_accuracy(report)
    notes = (
        *(
            [f"Accuracy as trained: {units.percent(overall)}, the mean of devices with labels."]
            if overall is not None
            else []
        ),
        "On the samples each device set apart (training.holdout). Recall at 1: the mean over both ways.",
    )
    return Grid(
        "On each device's own samples", columns, tuple(lines), notes, "Nothing was set apart: training.holdout."
    )


#: Prefix of the metrics -> the group of columns.
_MODELS = (("received", "as received"), ("personal", "its own, mended"), ("trained", "as trained"))


def _shares(values: Mapping[str, float], names: list[str]) -> list[Cell]:
    return [words(f"{100 * values[name]:.1f}") if name in values else NOT_APPLICABLE for name in names]
