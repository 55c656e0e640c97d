"""The tables of how well it went: accuracy with and without each modality, and the rounds."""

from __future__ import annotations

from edgefl.report import late_updates as staleness
from edgefl.report import totals, units
from edgefl.report.grid import Cell, Column, Grid, Tone, amount, count, words
from edgefl.run_records import EvaluationRow, RoundRow, RunReport

#: Masks that put something in the place of what is absent, and what it is.
STAND_INS = {
    "prototype": "The absent modality is replaced by the prototypes of the classes that match.",
    "reconstruction": "The absent modality is replaced by what a small network, trained along, makes of the others.",
}
_NOT_YET = "The model has not been evaluated yet."


def evaluation(report: RunReport) -> Grid:
    """The global model after its last evaluated round: everything given, and each modality alone."""
    metric = totals.primary_metric(report)
    rows = [row for row in totals.latest(report.evaluations) if row.metric == metric]
    unit = "%" if totals.is_share(metric) else ""
    masks = [mask for mask in STAND_INS if any(row.missing == mask for row in rows)] or ["prototype"]
    gains = {mask: "gain" if len(masks) == 1 else f"{mask} gain" for mask in masks}
    columns = (
        Column("given to the model", key=True, text=True),
        Column("complete", unit, metric),
        Column("zero mask", unit, metric, tip="The absent modality is replaced by zeros."),
        *(Column(f"{mask} mask", unit, metric, tip=STAND_INS[mask]) for mask in masks),
        *(
            Column(name, "points" if unit else "", metric, tip=f"{mask.capitalize()} mask minus zero mask.")
            for mask, name in gains.items()
        ),
        Column("test samples"),
    )
    lines = []
    for available in sorted({row.available for row in rows}, key=lambda names: (-len(names), names)):
        by_mask = {row.missing: row for row in rows if row.available == available}
        samples = max(row.samples for row in by_mask.values())
        name = " + ".join(available) + ("" if "none" in by_mask else " alone" if len(available) == 1 else "")
        scores = [_score(by_mask.get(mask), metric) for mask in ("none", "zero", *masks)]
        won = [_gain(by_mask.get("zero"), by_mask.get(mask), metric) for mask in masks]
        lines.append((words(name), *scores, *won, count(samples)))
    matchers = ", ".join(dict.fromkeys(row.matcher for row in rows if row.matcher))
    where = f", after stage {rows[0].stage}, round {rows[0].round}" if rows else ""
    notes = (
        "One global model on the test set. Alone: the model gets this modality only and fills in the others by a mask.",
        *([f"Prototype mask: classes matched by {matchers}."] if matchers else []),
        *_statistics(report),
    )
    own = any(name.startswith("trained_") for row in report.assignments for name in row.metrics)
    empty = "Each device keeps its own model: see how it does on the device's own samples." if own else _NOT_YET
    return Grid(f"Test {metric}{where}", columns, tuple(lines), notes, empty)


def _statistics(report: RunReport) -> list[str]:
    """That the model was judged with batch statistics of the test set, and why."""
    told = [
        str(why) for event in report.events if event.kind == "run_started" and (why := event.data.get("statistics"))
    ]
    return [f"{told[-1]} moves the weights; batch norm's statistics are those of the test inputs."] if told else []


def standing(report: RunReport) -> str:
    """How a run that is not done ended, and how to go on; "" for one that is done or goes on."""
    if report.status == "failed":
        told = next((event.data for event in reversed(report.events) if event.kind == "run_failed"), {})
        return f"The run failed: {told.get('text') or 'no reason on record'}"
    if report.status != "interrupted":
        return ""
    done = [row for row in report.rounds if row.status == "done"]
    after = f"after stage {done[-1].stage}, round {done[-1].round}" if done else "before its first round was finished"
    last = f"; the last event is of {units.moment(report.events[-1].at)}" if report.events else ""
    return f"The run was interrupted {after}{last}. No coordinator holds it; --resume {report.run} goes on."


def rounds(report: RunReport) -> Grid:
    """Every round: who took part, how it ended, what it cost."""
    metric = totals.primary_metric(report)
    columns = (
        Column("stage", key=True),
        Column("round", key=True),
        Column("attempt"),
        Column("status", text=True),
        Column("took part", "of offered"),
        Column("loss"),
        Column(metric, "%" if totals.is_share(metric) else "", tip="All modalities given."),
        Column("payload", "MiB", tip="Tensors sent and received by all devices."),
        Column("time", "s"),
    )
    scores = {
        (row.stage, row.round): row for row in report.evaluations if row.missing == "none" and row.metric == metric
    }
    lines = []
    for row in report.rounds:
        here = [a for a in report.assignments if (a.stage, a.round) == (row.stage, row.round)]
        offered = {a.device for a in here if a.status not in {"refused", "quarantined"}} | set(row.participants)
        moved = totals.total(
            "payload", [totals.measured(n, here) for n in ("payload_up_bytes", "payload_down_bytes") if here]
        )
        tone: Tone = "bad" if row.status == "failed" else "dim" if row.status == "running" else ""
        lines.append(
            (
                count(row.stage),
                count(row.round),
                count(row.attempt),
                Cell(row.status, tone=tone),
                Cell(f"{len(row.participants)} / {len(offered)}", tip=", ".join(row.participants) or "nobody"),
                amount(row.metrics.get("loss"), "", why="" if "loss" in row.metrics else "no loss on record"),
                _score(scores.get((row.stage, row.round)), metric),
                amount(moved.value, "B", why=moved.reason),
                amount(_lasted(row), "s", why="" if row.ended_at is not None else "the round has not ended"),
            )
        )
    if any(staleness.stale(row) for row in report.rounds):
        late = Column("late updates", tip="Made from earlier models, and by how many rounds.")
        more = tuple((*line, staleness.of_round(row)) for line, row in zip(lines, report.rounds, strict=True))
        return _with_slots(Grid("Rounds", (*columns, late), more), report)
    return _with_slots(Grid("Rounds", columns, tuple(lines), empty="No round has started yet."), report)


def _with_slots(grid: Grid, report: RunReport) -> Grid:
    """What the recipe's slots did: a note when it was the same in every round, else a column."""
    cells = [_slots(row) for row in report.rounds]
    choices = {cell.text for cell in cells}
    if len(choices) <= 1:
        notes = tuple(f"In every round: {choice}." for choice in choices if choice)
        return Grid(grid.title, grid.columns, grid.rows, notes, grid.empty)
    columns = (*grid.columns, Column("what each slot did", text=True))
    rows = tuple((*row, cell) for row, cell in zip(grid.rows, cells, strict=True))
    return Grid(grid.title, columns, rows, empty=grid.empty)


def _score(row: EvaluationRow | None, metric: str) -> Cell:
    if row is None:
        return words("")
    return Cell(f"{100 * row.value:.1f}" if totals.is_share(metric) else units.number(row.value))


def _lasted(row: RoundRow) -> float | None:
    return None if row.ended_at is None else row.ended_at - row.started_at


def _gain(zero: EvaluationRow | None, stand_in: EvaluationRow | None, metric: str) -> Cell:
    if zero is None or stand_in is None:
        return words("")
    gain = (stand_in.value - zero.value) * (100 if totals.is_share(metric) else 1)
    tone: Tone = "good" if gain > 0 else "bad" if gain < 0 else ""
    return Cell(f"{gain:+.1f}".replace("-", "−"), tone=tone)


def _slots(row: RoundRow) -> Cell:
    """ "select all · weight samples · combine mean"; what each slot decided in detail is the tip."""
    short, long = [], []
    for role, did in row.record.items():
        if role == "stale":  # has a column of its own
            continue
        choice = did.get("choice", "") if isinstance(did, dict) else did
        short.append(f"{role} {choice}".strip())
        details = {name: value for name, value in did.items() if name != "choice"} if isinstance(did, dict) else {}
        long += [f"{role}.{name} = {value}" for name, value in details.items()]
    return words(" · ".join(short), tip="; ".join(long))
