"""A whole report: JSON and CSV for programs, tables on a terminal, and one HTML page that needs nothing else."""

from __future__ import annotations

import csv
import io
import re
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text

from edgefl import __version__
from edgefl.config.yaml_files import yaml_text
from edgefl.records import FIGURES, Figure
from edgefl.report import decisions, plots, quality, resources, rounds, units
from edgefl.report.grid import Grid, letters, print_grids, with_rows
from edgefl.run_records import RunReport

#: Grows when a field changes its meaning or goes away; new fields leave it as it is.
SCHEMA = "edgefl.report/1"
#: First characters of a cell that a spreadsheet takes for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"-?[0-9.]+(e[+-]?[0-9]+)?|-?inf|nan")
CSV_COLUMNS = (
    "run", "device", "stage", "round", "attempt", "status", "figure", "unit",
    "predicted", "measured", "kind", "source", "reason", "refusal", "needed", "allowed",
)  # fmt: skip
#: What each ledger figure means, for the table of sources.
MEANINGS: dict[str, str] = {
    "process_peak_bytes": "process memory, peak",
    "step_peak_bytes": "step memory, peak",
    "flops": "FLOPs, forward and backward",
    "filling_flops": "of these, what frozen parts took of every sample, once",
    "payload_up_bytes": "payload sent",
    "prototypes_up_bytes": "of the payload sent, prototypes",
    "prototypes_down_bytes": "of the payload received, prototypes",
    "signature_up_bytes": "of the payload sent, what clusters are made of",
    "layer_down_bytes": "of the payload received, the one layer in place of the poverty layer",
    "payload_down_bytes": "payload received",
    "resent_up_bytes": "payload sent again after losses and cuts",
    "resent_down_bytes": "payload received again after losses and cuts",
    "wire_up_bytes": "sent on the wire",
    "wire_down_bytes": "received on the wire",
    "wall_s": "wall time, from offer to update",
    "compute_s": "compute time, inside training steps",
    "energy_j": "energy",
    "temperature_c": "highest temperature",
    "cuda_allocated_peak_bytes": "tensors on the GPU, peak",
    "cuda_reserved_peak_bytes": "what torch's allocator held of the GPU, peak",
}


def to_json(report: RunReport) -> str:
    """The whole report as indented JSON; ``schema`` names its form."""
    body = {"schema": SCHEMA, **msgspec.to_builtins(report)}
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"


def to_csv(report: RunReport) -> str:
    """One line per device, attempt and figure, in base units (B, FLOP, s, J, °C). A missing number is an empty field
    with its ``reason`` in the next column."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in report.assignments:
        refusal = row.refusal
        where = (report.run, row.device, row.stage, row.round, row.attempt, row.status)
        why = ("", "", "") if refusal is None else (refusal.reason, _field(refusal.needed), _field(refusal.allowed))
        for name in [name for name in FIGURES if name in row.predicted or name in row.measured]:
            unknown = Figure(reason="not trained" if refusal or row.status != "done" else "not recorded")
            plan, told = row.predicted.get(name, Figure()), row.measured.get(name, unknown)
            origin = (told.kind, told.source) if name in row.measured else ("", "")
            values = (_field(plan.value), _field(told.value))
            writer.writerow(map(_inert, (*where, name, FIGURES[name], *values, *origin, told.reason, *why)))
        if refusal is not None and not row.predicted and not row.measured:
            writer.writerow(map(_inert, (*where, *[""] * 7, *why)))
    return out.getvalue()


def _inert(cell: object) -> object:
    """Texts that a spreadsheet would take for a formula are quoted; numbers stay."""
    if not isinstance(cell, str) or not cell.startswith(_FORMULA) or _NUMBER.fullmatch(cell):
        return cell
    return "'" + cell


def _field(value: float | None) -> str:
    """Empty for None; whole numbers without a decimal point."""
    if value is None:
        return ""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def print_report(report: RunReport, console: Console) -> None:
    """The whole report on a terminal: accuracy, bills, refusals, rounds."""
    if standing := rounds.standing(report):
        console.print(Text(standing, style="red" if report.status == "failed" else "yellow"))
    for text in rounds.warnings(report):
        console.print(Text(f"Warning: {text}.", style="yellow"))
    grids = [
        quality.evaluation(report),
        *with_rows(*quality.grids(report)),
        resources.device_bill(report),
        resources.stage_bill(report, brief=True),
        decisions.refusals(report),
        *with_rows(decisions.not_offered(report), rounds.late_updates(report), rounds.repairs(report)),
        rounds.rounds(report),
        rounds.bundles(report),
    ]
    print_grids(grids, console)


class Card(NamedTuple):
    """One headline number."""

    label: str
    value: str
    detail: str = ""


def to_html(report: RunReport) -> str:
    """The whole page. Needs jinja2 and matplotlib (extra ``coordinator``)."""
    import jinja2

    loader = jinja2.PackageLoader("edgefl.report", "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(
        report=report,
        mark=letters,
        style=loader.get_source(environment, "style.css")[0],
        started=units.moment(report.started_at),
        took=took(report),
        standing=rounds.standing(report),
        warnings=rounds.warnings(report),
        version=__version__,
        cards=cards(report),
        learning=plots.learning(report),
        subsets=plots.subsets(report),
        memory=plots.memory(report),
        spending=plots.spending(report),
        evaluation=quality.evaluation(report),
        quality=with_rows(*quality.grids(report)),
        device_bills=thirds(resources.device_bill(report)),
        stage_bills=thirds(resources.stage_bill(report)),
        bill_notes=resources.NOTES,
        stage_totals=resources.stage_totals(report),
        refusals=decisions.refusals(report),
        absences=with_rows(decisions.not_offered(report)),
        rounds=rounds.rounds(report),
        late=with_rows(rounds.late_updates(report), rounds.repairs(report)),
        devices=rounds.devices(report),
        stages=rounds.stages(report),
        bundles=rounds.bundles(report),
        sources=[
            (MEANINGS[n], units.printed_unit(FIGURES[n]), where) for n, where in resources.origins(report).items()
        ],
        config=yaml_text(without_secrets(report.config)) if report.config else "",
    )


def took(report: RunReport) -> str:
    """How long the run took, or that it still goes on, or was interrupted."""
    if report.finished_at is None:
        return {"running": "still going on", "interrupted": "did not end"}.get(report.status, "end not on record")
    return units.seconds(report.finished_at - report.started_at)


def cards(report: RunReport) -> list[Card]:
    """The headline numbers."""
    trained = {row.device for row in report.assignments if row.status == "done"}
    refused = {row.device for row in report.assignments if row.refusal is not None}
    away = decisions.absences(report)
    missed = [f"{len(refused)} refused or declined at times"] if refused else []
    missed += [f"{len(away)} not offered every round"] if away else []
    done = [row for row in report.rounds if row.status == "done"]
    stages = len({row.stage for row in done})
    return [
        *_scores(report),
        Card("devices that trained", f"{len(trained)} of {len(report.devices)}", " · ".join(missed) or "none refused"),
        Card("rounds", str(len(done)), f"in {stages} stage{'' if stages == 1 else 's'}"),
        *(_costs(report) if report.assignments else []),
    ]


def _scores(report: RunReport) -> list[Card]:
    """The global model with all modalities and with the weakest alone; the mean of the devices' own models."""
    metric = quality.primary_metric(report)
    rows = [row for row in quality.latest(report.evaluations) if row.metric == metric]
    complete = [row for row in rows if row.missing == "none"]
    found = [Card(f"test {metric}", units.score(metric, row.value), " + ".join(row.available)) for row in complete]
    own = quality.own_accuracy(report)
    if own is not None and not any(row.metric == "accuracy" for row in report.evaluations):
        found.append(
            Card("accuracy of the devices' own models", units.percent(own), "on samples set apart; their mean")
        )
    plain, *others = quality.masks()
    worst = min((row for row in rows if row.missing in others), key=lambda row: row.value, default=None)
    if worst is not None:
        zeros = [row.value for row in rows if row.missing == plain and row.available == worst.available]
        against = f"; {units.score(metric, zeros[0])} with zeros" if zeros else ""
        detail = f"{' + '.join(worst.available)}, {worst.missing} mask{against}"
        found.append(Card("weakest modality alone", units.score(metric, worst.value), detail))
    return found


def _costs(report: RunReport) -> list[Card]:
    def fleet(name: str, unit: str) -> str:
        """``≥``: rounds are missing."""
        figure = resources.fleet(name, report)
        return ("≥ " if figure.value is not None and figure.reason else "") + units.quantity(figure.value, unit)

    received = fleet("payload_down_bytes", "B")
    return [
        Card("largest step memory", fleet("step_peak_bytes", "B"), "measured above the idle trainer"),
        Card("payload sent", fleet("payload_up_bytes", "B"), f"received {received}"),
        Card("compute", fleet("flops", "FLOP"), "forward and backward, all devices"),
    ]


def thirds(grid: Grid) -> list[tuple[str, Grid]]:
    """A bill as three tables that fit a page."""
    groups_of = {
        "Memory and compute": ("step memory", "process", "FLOPs"),
        "Bytes": ("payload sent", "payload received", "of the payload", "on the wire"),
        "Time and energy": ("time", "energy", "heat"),
    }
    head = [index for index, column in enumerate(grid.columns) if column.key]
    counts = [index for index, column in enumerate(grid.columns) if not column.key and column.group in ("", "rounds")]
    found: list[tuple[str, Grid]] = []
    for title, wanted in groups_of.items():
        own = [index for group in wanted for index, column in enumerate(grid.columns) if column.group == group]
        found.append((title, grid.select(head + (counts if not found else []) + own)))
    return found


def without_secrets(value: object) -> object:
    """The same configuration without user names and passwords in URLs, values of secret-like keys masked."""
    if isinstance(value, dict):
        return {
            str(key): "***"
            if re.search(r"password|secret|token", str(key), re.IGNORECASE) and isinstance(item, str)
            else without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [without_secrets(item) for item in value]
    if isinstance(value, str):
        return units.public_url(value)
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)
