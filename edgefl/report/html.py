"""The report as one HTML file that needs nothing else: styles and plots inside, dark or light as the reader has it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from edgefl import __version__
from edgefl.config.yaml_files import yaml_text
from edgefl.records import FIGURES
from edgefl.report import absences, decisions, inventory, plots, quality, repairs, totals, units
from edgefl.report import accuracy as outcome
from edgefl.report import late_updates as staleness
from edgefl.report import resources as bills
from edgefl.report.grid import Column, Grid, letters
from edgefl.report.run_warnings import warnings
from edgefl.report.svg import Plot
from edgefl.run_records import RunReport

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


@dataclass(frozen=True)
class Card:
    """One headline number."""

    label: str
    value: str
    detail: str = ""


def render(report: RunReport) -> str:
    """The whole page. Needs jinja2 and matplotlib (extra ``coordinator``)."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("edgefl.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(groups=groups, mark=letters)

    def drawn(plot: Plot | None) -> dict[str, Any] | None:
        return None if plot is None else {"svg": Markup(plot.svg), "caption": plot.caption}  # noqa: S704  # our own SVG, text escaped by matplotlib

    style, _, _ = environment.loader.get_source(environment, "style.css") if environment.loader else ("", None, None)
    return environment.get_template("report.html.j2").render(
        report=report,
        style=Markup(style),  # noqa: S704  # a file of this package
        started=units.moment(report.started_at),
        took=took(report),
        standing=outcome.standing(report),
        warnings=warnings(report),
        version=__version__,
        cards=cards(report),
        learning=drawn(plots.learning(report)),
        subsets=drawn(plots.subsets(report)),
        memory=drawn(plots.memory(report)),
        spending=drawn(plots.spending(report)),
        **_tables(report),
        sources=[
            (MEANINGS[name], units.printed_unit(FIGURES[name]), told) for name, told in totals.origins(report).items()
        ],
        config=yaml_text(without_secrets(report.config)) if report.config else "",
    )


def _tables(report: RunReport) -> dict[str, Any]:
    """Every table, under the name the template knows it by."""
    return {
        "evaluation": outcome.evaluation(report),
        "quality": [grid for grid in quality.grids(report) if grid.rows],
        "device_bills": thirds(bills.device_bill(report)),
        "stage_bills": thirds(bills.stage_bill(report)),
        "bill_notes": bills.NOTES,
        "stage_totals": bills.stage_totals(report),
        "refusals": decisions.refusals(report),
        "absences": [grid for grid in (absences.table(report),) if grid.rows],
        "late": [grid for grid in (staleness.by_device(report), repairs.substitutions(report)) if grid.rows],
        "rounds": outcome.rounds(report),
        "devices": inventory.devices(report),
        "stages": inventory.stages(report),
        "bundles": inventory.bundles(report),
    }


def took(report: RunReport) -> str:
    """How long the run took, or that it still goes on, or was interrupted."""
    if report.finished_at is None:
        return {"running": "still going on", "interrupted": "did not end"}.get(report.status, "end not on record")
    return units.seconds(report.finished_at - report.started_at)


def cards(report: RunReport) -> list[Card]:
    """The headline numbers."""
    metric = totals.primary_metric(report)
    scores = [row for row in totals.latest(report.evaluations) if row.metric == metric]
    shown = units.percent if totals.is_share(metric) else units.number
    found = [
        Card(f"test {metric}", shown(row.value), " + ".join(row.available)) for row in scores if row.missing == "none"
    ]
    if (
        not any(row.metric == "accuracy" for row in report.evaluations)
        and (own := quality.own_accuracy(report)) is not None
    ):
        found.append(
            Card("accuracy of the devices' own models", units.percent(own), "on samples set apart; their mean")
        )
    alone = [row for row in scores if row.missing in outcome.STAND_INS]
    if alone:
        worst = min(alone, key=lambda row: row.value)
        zero = next((r for r in scores if r.missing == "zero" and r.available == worst.available), None)
        against = f"; {shown(zero.value)} with zeros" if zero else ""
        told = f"{' + '.join(worst.available)}, {worst.missing} mask{against}"
        found.append(Card("weakest modality alone", shown(worst.value), told))
    trained = {row.device for row in report.assignments if row.status == "done"}
    refused = {row.device for row in report.assignments if row.refusal is not None}
    away = absences.absences(report)
    missed = [f"{len(refused)} refused or declined at times"] if refused else []
    missed += [f"{len(away)} not offered every round"] if away else []
    detail = " · ".join(missed) or "none refused"
    found.append(Card("devices that trained", f"{len(trained)} of {len(report.devices)}", detail))
    done = [row for row in report.rounds if row.status == "done"]
    stages = len({row.stage for row in done})
    found.append(Card("rounds", str(len(done)), f"in {stages} stage{'' if stages == 1 else 's'}"))
    peak = totals.fleet("step_peak_bytes", report)
    if report.assignments:
        found.append(Card("largest step memory", bills.figure_of(peak, "B"), "measured above the idle trainer"))
        up, down = totals.fleet("payload_up_bytes", report), totals.fleet("payload_down_bytes", report)
        found.append(Card("payload sent", bills.figure_of(up, "B"), f"received {bills.figure_of(down, 'B')}"))
        found.append(
            Card("compute", bills.figure_of(totals.fleet("flops", report), "FLOP"), "forward and backward, all devices")
        )
    return found


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


def groups(grid: Grid) -> list[tuple[str, int]]:
    """Header groups as (name, columns spanned), in order; columns without a group stand alone."""
    spans: list[tuple[str, int]] = []
    previous: Column | None = None
    for column in grid.columns:
        if previous is not None and column.group and previous.group == column.group:
            spans[-1] = (column.group, spans[-1][1] + 1)
        else:
            spans.append((column.group, 1))
        previous = column
    return spans


def without_secrets(value: Any) -> Any:
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
