"""Writers of a whole report: JSON, CSV, tables on a terminal, and a self-contained HTML page."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from edgefl.config.yaml_files import yaml_text
from edgefl.records import FIGURES
from edgefl.report import (
    bills,
    budget_plots,
    combination,
    decisions,
    fleet_plots,
    model_plots,
    prediction_plot,
    quality,
    repairs,
    resources,
    rounds,
    story,
    tables,
    time_table,
    units,
)
from edgefl.report.grid import Grid, print_grids, with_rows
from edgefl.report.pages import page
from edgefl.run_records import RunReport

#: Grows when a field changes its meaning or goes away; new fields leave it as it is.
SCHEMA = "edgefl.report/1"
#: First characters of a cell that a spreadsheet takes for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"-?[0-9.]+(e[+-]?[0-9]+)?|-?inf|nan")
#: The page's charts, in order.
PICTURES = (
    budget_plots.memory,
    fleet_plots.over_time,
    budget_plots.against_end_to_end,
    model_plots.accuracy,
    model_plots.loss,
    prediction_plot.prediction,
    fleet_plots.by_stage,
)
#: The page's sentences below its headline, where they say something.
TOLD = (story.in_all, story.tightest_where, story.no_saving, story.renamed)
#: Sentences on what went wrong that stand on top; the tables have them all.
MAX_TROUBLES = 8
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
    "layer_up_bytes": "of the payload sent, single layers",
    "layer_down_bytes": "of the payload received, layers in place of poverty layers",
    "payload_down_bytes": "payload received",
    "resent_up_bytes": "payload sent again after losses and cuts",
    "resent_down_bytes": "payload received again after losses and cuts",
    "wire_up_bytes": "sent on the wire",
    "wire_down_bytes": "received on the wire",
    "wall_s": "time from offer to update",
    "compute_s": "time in training steps",
    "energy_j": "energy",
    "temperature_c": "highest temperature",
    "cuda_allocated_peak_bytes": "tensors on the GPU, peak",
    "cuda_reserved_peak_bytes": "what torch's allocator held of the GPU, peak",
}


def to_json(report: RunReport) -> str:
    """The whole report as indented JSON, with every table but the figures, which are in ``assignments``."""
    every = {name: _records(tables.table(report, name)) for name in tables.COLUMNS if name != "figures"}
    body = {"schema": SCHEMA, **msgspec.to_builtins(report), "tables": every}
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"


def _records(table: tables.Table) -> list[dict[str, str | float | None]]:
    return [dict(zip(table.types, row, strict=True)) for row in table.rows]


def to_csv(report: RunReport, name: str = "figures") -> str:
    """A table in base units (B, FLOP, s, J, °C). A missing number is an empty field, with its ``reason``."""
    types, rows = tables.table(report, name)
    return csv_text(list(types), rows)


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[str | float | None]]) -> str:
    """A table as CSV: an empty field for None."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(inert, columns))
    writer.writerows([inert(_field(cell)) for cell in row] for row in rows)
    return out.getvalue()


def inert(cell: object) -> object:
    """A CSV cell; texts that a spreadsheet would take for a formula are quoted."""
    if not isinstance(cell, str) or not cell.startswith(_FORMULA) or _NUMBER.fullmatch(cell):
        return cell
    return "'" + cell


def _field(value: str | float | None) -> str:
    """Text of a CSV field: "" for None, whole numbers without a decimal point."""
    if value is None or isinstance(value, str):
        return value or ""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def print_report(report: RunReport, console: Console, *, verbose: bool = False) -> None:
    """The report on a terminal: what went wrong, accuracy, each device's costs.

    ``verbose``: also refusals, costs by stage, times, rounds, bundles, every metric, and notes on the figures.
    """
    console.print(Text(story.headline(report), style="bold"))
    for why in filter(None, (story.no_saving(report), story.renamed(report))):
        console.print(Text(why, style="dim"))
    for text in story.troubles(report):
        console.print(Text(text, style="red" if report.status == "failed" else "yellow"))
    if not verbose:
        for why in filter(None, (story.slowest(report), story.payload_used(report))):
            console.print(Text(why, style="dim"))
        grids = [quality.evaluation(report, bound=False), *with_rows(quality.personal(report))]
        grids.append(bills.brief_bill(report))
        grids += with_rows(bills.group_totals(report))
        print_grids(grids, console, brief=True)
        return
    grids = [
        *with_rows(bills.fleet_totals(report)),
        quality.evaluation(report),
        *with_rows(*quality.grids(report)),
        bills.device_bill(report),
        bills.stage_bill(report),
        *with_rows(bills.group_totals(report)),
        time_table.seconds_of_devices(report),
        decisions.refusals(report),
        *with_rows(decisions.not_offered(report), decisions.requests(report)),
        *with_rows(*_beside(report)),
        rounds.rounds(report),
        rounds.bundles(report),
    ]
    print_grids(grids, console)


def _beside(report: RunReport) -> list[Grid]:
    """Tables on updates: late, left out, repaired, lent layers."""
    return [
        rounds.late_updates(report),
        combination.left_out(report),
        repairs.repairs(report),
        repairs.lent(report),
    ]


def to_html(report: RunReport, *, interactive: bool = True) -> str:
    """The whole page. ``interactive``: with Vega (0.9 MB) in it. Needs the extra ``coordinator``."""
    drawn = [chart for chart in (made(report) for made in PICTURES) if chart is not None]
    troubles = story.troubles(report)
    rounds_done = [row for row in report.rounds if row.status == "done"]
    stages = len({row.stage for row in rounds_done})
    return page(
        "report.html.j2",
        drawn,
        interactive=interactive,
        report=report,
        started=units.moment(report.started_at),
        took=took(report),
        done=f"{len(rounds_done)} rounds in {stages} stage{'' if stages == 1 else 's'}",
        headline=story.headline(report),
        told=[*filter(None, (sentence(report) for sentence in TOLD))],
        troubles=troubles[:MAX_TROUBLES],
        more_troubles=len(troubles[MAX_TROUBLES:]),
        evaluation=quality.evaluation(report).filled(),
        quality=with_rows(*quality.grids(report)),
        totals=bills.fleet_totals(report),
        fleet_bill=bills.device_bill(report).filled(),
        bills=bills.bills(report),
        unbilled=len(resources.by_device(report)) - len(bills.billed(report)),
        group_totals=with_rows(bills.group_totals(report)),
        stage_totals=bills.stage_totals(report).filled(),
        seconds=time_table.seconds_of_devices(report),
        refusals=decisions.refusals(report),
        absences=with_rows(decisions.not_offered(report), decisions.requests(report)),
        rounds=rounds.rounds(report).filled(),
        late=with_rows(*_beside(report)),
        devices=rounds.devices(report).filled(),
        stages=rounds.stages(report),
        bundles=rounds.bundles(report),
        sources=[
            (MEANINGS[n], units.printed_unit(FIGURES[n]), where) for n, where in resources.origins(report).items()
        ],
        config=yaml_text(without_secrets(report.config)) if report.config else "",
    )


def took(report: RunReport) -> str:
    """Text of the run's duration, or its status if it has no end."""
    if report.finished_at is None:
        return {"running": "still going on", "interrupted": "did not end"}.get(report.status, "end not on record")
    return units.seconds(report.finished_at - report.started_at)


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
