"""The tables of every metric: the global model on the test set, and each device's model on its hold-out samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from edgefl.plan.choice_of_k import in_words
from edgefl.records import ORACLE
from edgefl.registry import methods
from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid, Tone, table
from edgefl.run_records import AssignmentRow, EvaluationRow, RunReport

_CLASSIFICATION = {
    "accuracy": "accuracy",
    "top5_accuracy": "top 5",
    "macro_precision": "precision",
    "macro_recall": "recall",
    "macro_f1": "F1",
    "macro_auroc": "AUROC",
}
#: Prefix of the accuracy on samples with a label of one label set.
_BY_SET = "accuracy_"
_REGRESSION = ("r2", "mae", "rmse")
_SEVERAL = {"mean_average_precision": "average precision", "macro_f1": "F1"}
#: What tables call the rows that know the labels.
_BOUND = f"{ORACLE} (upper bound)"
_TOLD = "Bound: prototypes of each sample's true class, the most that a mask could give; it takes the label."
_NOT_YET = "The model has not been evaluated yet."
_OWN_MODELS = "Each device keeps its own model: see how it does on the device's own samples."
_OWN_CODE = "Only devices can build the model (model.own): evaluate_round beside their train says how good it is."
#: Recall at these, both ways, as ``edgefl.training.metrics`` has them.
_AT = (1, 5, 10, 50)
#: Prefix of the metrics -> the group of columns.
_MODELS = {"received": "as received", "personal": "its own, mended", "trained": "as trained"}
#: What the tables call a metric of ``_MODELS``.
_PERSONAL = {
    "accuracy": "accuracy",
    "mean_average_precision": "average precision",
    "macro_f1": "F1",
    "r2": "R²",
    "mae": "mean absolute error",
    "recall": "recall at 1",
}


class _Given(NamedTuple):
    """A row of the evaluation: the modalities given, and the score under each mask."""

    available: tuple[str, ...]
    by_mask: Mapping[str, EvaluationRow]


def masks() -> dict[str, str]:
    """Mask -> sentence for each stand-in usable at inference; the first is the baseline."""
    offered = {name: one for name, one in methods("missing").items() if one.offered or one.build}
    return {name: f"The absent modality is replaced by {one.inferred or one.summary}." for name, one in offered.items()}


def primary_metric(report: RunReport) -> str:
    """The metric the report leads with: accuracy when there is one, else the first on record."""
    names = list(dict.fromkeys(row.metric for row in report.evaluations))
    return "accuracy" if "accuracy" in names or not names else names[0]


def latest(rows: Sequence[EvaluationRow]) -> list[EvaluationRow]:
    """The rows of the last evaluated round."""
    if not rows:
        return []
    last = max((row.stage, row.round) for row in rows)
    return [row for row in rows if (row.stage, row.round) == last]


def score(row: EvaluationRow | None) -> str:
    """Text of a score without its unit, which is in the header: percent of a share; "" for None."""
    if row is None:
        return ""
    return f"{100 * row.value:.1f}" if units.is_share(row.metric) else units.number(row.value)


def evaluation(report: RunReport, *, bound: bool = True) -> Grid:
    """Table of the global model's scores after the last evaluated round: each subset of modalities by mask.

    ``bound``: with the scores of the true class's prototype, which no served model knows.
    """
    metric = primary_metric(report)
    rows = [row for row in latest(report.evaluations) if row.metric == metric]
    unit, points = ("%", "points") if units.is_share(metric) else ("", "")
    words = units.metric_words(metric)
    tips = masks()
    plain, *others = tips
    evaluated = [mask for mask in others if any(row.missing == mask for row in rows)] or others[:1]

    def name(row: _Given) -> str:
        alone = " alone" if "none" not in row.by_mask and len(row.available) == 1 else ""
        return " + ".join(row.available) + alone

    def shown(name: str, mask: str, tip: str = "") -> Column[_Given]:
        return Column(name, lambda row: score(row.by_mask.get(mask)), unit, words, tip=tip)

    def gain(mask: str) -> Column[_Given]:
        name = "gain" if len(evaluated) == 1 else f"{mask} gain"
        tip = f"{mask.capitalize()} mask minus {plain} mask."
        return Column(name, lambda row: _gain(row.by_mask.get(plain), row.by_mask.get(mask)), points, words, tip=tip)

    columns: list[Column[_Given]] = [
        Column("given to the model", name, key=True, text=True),
        shown("complete", "none"),
        *(shown(f"{mask} mask", mask, tips[mask]) for mask in (plain, *evaluated)),
        *map(gain, evaluated),
        *([shown("bound", ORACLE, _TOLD)] if bound and any(row.missing == ORACLE for row in rows) else []),
        Column("samples", lambda row: max(one.samples for one in row.by_mask.values())),
    ]
    given: dict[tuple[str, ...], dict[str, EvaluationRow]] = {}
    for row in sorted(rows, key=lambda row: (-len(row.available), row.available)):
        given.setdefault(row.available, {})[row.missing] = row
    alone = " Alone: the model gets this modality only and fills in the others by a mask."
    notes = ["One global model on the test set." + alone * (len({m for row in rows for m in row.available}) > 1)]
    if matchers := ", ".join(dict.fromkeys(row.matcher for row in rows if row.matcher)):
        notes.append(f"Prototype mask: classes matched by {matchers}.")
    if scores := report.reference.scores:
        listed = ", ".join(f"{name} {units.score(report.reference.metric, value)}" for name, value in scores.items())
        notes.append(f"Simple models on the same samples, all in one place: {listed}.")
    if choices := [event.data for event in report.events if event.kind == "k_chosen"]:
        notes.append(f"Classes mixed: {in_words(choices[-1])}, by the devices; the test set had no part in it.")
    if any(row.missing == ORACLE for row in rows):
        notes.append(_TOLD)
    if reasons := [e.data["statistics"] for e in report.events if e.kind == "run_started" and e.data.get("statistics")]:
        notes.append(f"{reasons[-1]} moves the weights; batch norm's statistics are those of the test inputs.")
    own = any(name.startswith("trained_") for row in report.assignments for name in row.metrics)
    where = f", after stage {rows[0].stage}, round {rows[0].round}" if rows else ""
    empty = _OWN_CODE if by_own_code(report) else _OWN_MODELS if own else _NOT_YET
    return table(
        f"Test {units.metric_words(metric)}{where}", columns, [_Given(*item) for item in given.items()], notes, empty
    )


def _gain(zero: EvaluationRow | None, stand_in: EvaluationRow | None) -> Cell:
    if zero is None or stand_in is None:
        return Cell()
    gain = (stand_in.value - zero.value) * (100 if units.is_share(zero.metric) else 1)
    tone: Tone = "good" if gain > 0 else "bad" if gain < 0 else ""
    return Cell(f"{gain:+.1f}".replace("-", "−"), tone=tone)


def grids(report: RunReport) -> tuple[Grid, Grid, Grid]:
    """The tables of every metric."""
    return classification(report), retrieval(report), personal(report)


def classification(report: RunReport) -> Grid:
    """Table of accuracy, top 5 and macro averages by condition; for a numeric target R² and mean errors."""
    told = {row.metric for row in latest(report.evaluations)}
    numeric = not told.isdisjoint(_REGRESSION)
    by_set = {name: name.removeprefix(_BY_SET) for name in sorted(told) if name.startswith(_BY_SET)}
    known = {name: units.metric_words(name) for name in _REGRESSION} if numeric else {**_CLASSIFICATION, **by_set}
    known = known if told.isdisjoint({"mean_average_precision"}) else _SEVERAL
    metrics = {name: words for name, words in known.items() if name in told or not told}
    found: dict[tuple[str, str], dict[str, EvaluationRow]] = {}
    for row in latest(report.evaluations):
        if row.metric in metrics:
            name = _BOUND if row.missing == ORACLE else row.missing
            mask = f"{name} by {row.matcher}" if row.matcher else name
            found.setdefault((" + ".join(row.available), mask), {})[row.metric] = row

    def share(metric: str, name: str) -> Column[tuple[str, str]]:
        group = "macro" if metric.startswith("macro_") else "accuracy of set" if metric in by_set else ""
        return Column(name, lambda row: score(found[row].get(metric)), "%" if units.is_share(metric) else "", group)

    columns: list[Column[tuple[str, str]]] = [
        Column("given to the model", lambda row: row[0], key=True, text=True),
        Column("mask", lambda row: row[1], text=True),
        *(share(metric, name) for metric, name in metrics.items()),
        Column("test samples", lambda row: list(found[row].values())[-1].samples),
    ]
    notes = ["Macro: the mean over the classes that occur, each counting alike."]
    title = "Classification"
    if numeric:
        title, notes = "Regression", ["R²: 1 is exact, 0 no better than the mean; errors have the target's unit."]
    return table(f"{title}, all metrics", columns, found, notes, "The model does not classify.")


def retrieval(report: RunReport) -> Grid:
    """Table of retrieval recall, both ways, for every pair of modalities."""
    rows = latest(report.evaluations)
    found = {row.metric: row for row in rows}
    sums = {frozenset(row.available): units.number(row.value) for row in rows if row.metric == "rsum"}

    def recall(k: int) -> Column[str]:
        return Column(f"at {k}", lambda pair: score(found.get(f"{pair}_recall_at_{k}")), "%", "recall")

    def samples(pair: str) -> int:
        return next(row.samples for metric, row in found.items() if metric.startswith(f"{pair}_recall_at_"))

    columns: list[Column[str]] = [
        Column("from - to", lambda pair: pair.replace("_to_", " - "), key=True, text=True),
        *map(recall, _AT),
        Column(
            "RSum",
            lambda pair: sums.get(frozenset(pair.split("_to_"))),
            tip="Recall at 1, 5 and 10, both ways, in percent, added up.",
        ),
        Column("test samples", samples),
    ]
    pairs = sorted({metric.split("_recall_at_")[0] for metric in found if "_recall_at_" in metric})
    notes = ["A recall at more than there are candidates is left out."]
    return table("Retrieval", columns, pairs, notes, "The model does not retrieve.")


def personal(report: RunReport) -> Grid:
    """Table of hold-out scores by device in its last round: model received, repaired, trained."""

    rows = [row for _, row in sorted(_own_models(report).items())]

    def score_of(model: str, metric: str) -> Column[AssignmentRow]:
        unit = "" if metric in _REGRESSION else "%"
        return Column(f"{model} {_PERSONAL[metric]}", lambda row: _personal(row, model, metric), unit, _MODELS[model])

    columns: list[Column[AssignmentRow]] = [
        Column("device", lambda row: row.device, key=True, text=True),
        Column("stage", lambda row: row.stage),
        Column("round", lambda row: row.round),
        *(
            score_of(model, metric)
            for model in _MODELS
            for metric in _PERSONAL
            if any(_personal(row, model, metric) for row in rows)
        ),
    ]
    mean = own_accuracy(report)
    notes = [] if mean is None else [f"Accuracy as trained: {units.percent(mean)}, the mean of devices with labels."]
    code = by_own_code(report)
    notes.append(
        "By the devices' own evaluate_round." if code else "On the samples each device set apart (training.holdout)."
    )
    if any(_personal(row, model, "recall") for row in rows for model in _MODELS):
        notes.append("Recall at 1: the mean over both ways.")
    empty = "The devices' code has no evaluate_round." if code else "Nothing was set apart: training.holdout."
    return table("On each device's own samples", columns, rows, notes, empty)


def _personal(row: AssignmentRow, model: str, metric: str) -> str:
    """Text of a device's hold-out score for one of its models: percent, or the number of a numeric target."""
    own = {name: value for name, value in row.metrics.items() if name.startswith(f"{model}_")}
    recalls = [value for name, value in own.items() if name.endswith("_recall_at_1")]
    value = sum(recalls) / len(recalls) if metric == "recall" and recalls else own.get(f"{model}_{metric}")
    if value is None:
        return ""
    return units.number(value) if metric in _REGRESSION else f"{100 * value:.1f}"


def by_own_code(report: RunReport) -> bool:
    """Whether the devices train by their own code."""
    return bool(report.config.get("run", {}).get("model", {}).get("own"))


def own_accuracy(report: RunReport) -> float | None:
    """Mean hold-out accuracy of devices' own models, as trained last; None without labels."""
    name = "trained_accuracy"
    found = [row.metrics[name] for row in _own_models(report).values() if name in row.metrics]
    return sum(found) / len(found) if found else None


def _own_models(report: RunReport) -> dict[str, AssignmentRow]:
    """Device -> last finished round with an evaluation of its own model."""
    done = [row for row in report.assignments if row.status == "done"]
    return {row.device: row for row in done if any(name.startswith("trained_") for name in row.metrics)}
