"""The tables of what there is: devices with their budgets and data, stages with their parts, exported bundles."""

from __future__ import annotations

from collections.abc import Sequence

from edgefl.models.spec import is_matcher
from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid, Tone, amount, count, words
from edgefl.report.resources import limit
from edgefl.run_records import RunReport

#: After the parts of the closing round.
CLOSING = " (closing round: every eligible device, the model does not change)"


def devices(report: RunReport) -> Grid:
    """What each device is, what it may spend per round, and what data it holds."""
    columns = (
        Column("device", key=True, text=True),
        Column("profile", text=True),
        Column("machine", text=True),
        Column("cores"),
        Column("memory", "MiB", "has"),
        Column("disk free", "MiB", "has"),
        Column("GPU", "", "has", text=True),
        Column("step memory", "MiB", "may spend per round"),
        Column("process", "MiB", "may spend per round"),
        Column("FLOPs", "GFLOP", "may spend per round"),
        Column("payload", "MiB", "may spend per round"),
        Column("disk", "MiB", "may spend per round"),
        Column("samples", "", "data", text=True),
        Column("last seen", text=True),
    )
    lines = []
    for row in report.devices:
        has, may = row.capabilities, row.budget
        lines.append(
            (
                words(row.device),
                words(row.profile),
                words(has.machine, tip=has.runtime),
                count(has.cores or None),
                amount(has.memory_total_bytes or None, "B"),
                amount(has.disk_free_bytes or None, "B"),
                words(has.gpu or "none", tone="" if has.gpu else "dim", tip=_own(has.gpu_memory_bytes)),
                limit(may.step_memory_bytes, "B"),
                limit(may.memory_bytes, "B"),
                limit(may.flops, "FLOP"),
                limit(may.payload_bytes, "B"),
                limit(may.disk_bytes, "B"),
                words(samples(row.samples)),
                words(units.moment(last_seen(report, row.device))),
            )
        )
    return Grid("Devices", columns, tuple(lines), empty="No device has joined yet.")


def _own(gpu_memory_bytes: int) -> str:
    return f"{units.mib(gpu_memory_bytes)} of its own" if gpu_memory_bytes else ""


def samples(counts: dict[str, int], noun: str = "") -> str:
    """{"": 40, "acc": 40, "gyro": 31} -> "40 (acc 40, gyro 31)"; ``noun`` follows the whole."""
    parts = ", ".join(f"{name} {number:,}" for name, number in counts.items() if name)
    whole = f"{counts[''] if '' in counts else max(counts.values(), default=0):,}{noun}"
    return f"{whole} ({parts})" if parts else whole


def last_seen(report: RunReport, device: str) -> float | None:
    """When the device was last heard of: the latest event that names it, else the end of its last round."""
    times = [event.at for event in report.events if event.device == device]
    if not times:
        times = [row.ended_at or row.started_at for row in report.rounds if device in row.participants]
    return max(times, default=None)


def stages(report: RunReport) -> Grid:
    """What each stage trains and what a device holds for it."""
    columns = (
        Column("stage", key=True),
        Column("encoder depth", "stages"),
        Column("rounds", "planned"),
        Column("trained", "MiB", "size of the parts"),
        Column("present", "MiB", "size of the parts"),
        Column("parts trained", text=True),
    )
    why = "" if report.part_bytes else "sizes of the parts not on record"
    lines = []
    for row in report.stages:
        trained, present = list(row.get("trained", ())), list(row.get("present", ()))
        lines.append(
            (
                count(row.get("index")),
                count(row.get("depth")),
                count(row.get("rounds")),
                amount(_size(report, trained), "B", why=why),
                amount(_size(report, present), "B", why=why),
                words(", ".join(trained) + (CLOSING if trained and all(map(is_matcher, trained)) else "")),
            )
        )
    return Grid("Stages", columns, tuple(lines), empty="No stage on record.")


def bundles(report: RunReport) -> Grid:
    """The exported ONNX files and how far they are from the torch model."""
    columns = (
        Column("bundle", key=True, text=True),
        Column("modalities", text=True),
        Column("size", "MiB"),
        Column("largest", "", "difference from torch"),
        Column("tolerance", "", "difference from torch"),
        Column("file", text=True, whole=True),
    )
    lines = tuple(
        (
            words(row.name),
            words(" + ".join(row.modalities)),
            amount(row.size_bytes, "B"),
            Cell(f"{row.max_difference:.1e}", tone="good" if row.max_difference <= row.tolerance else "bad"),
            Cell(f"{row.tolerance:.1e}"),
            words(row.path),
        )
        for row in report.bundles
    )
    return Grid("Exported bundles", columns, lines, empty="Nothing exported; `edgefl export RUN` writes ONNX bundles.")


def _size(report: RunReport, parts: list[str]) -> int | None:
    return sum(report.part_bytes.get(part, 0) for part in parts) if report.part_bytes else None


def runs(reports: Sequence[RunReport], where: str, now: float) -> Grid:
    """The runs there are, one a row; ``now``: seconds since the epoch."""
    columns = (
        Column("run", key=True, text=True, whole=True),
        Column("name", text=True),
        Column("recipe", text=True),
        Column("status", text=True),
        Column("started", text=True),
        Column("took", text=True),
    )
    tones: dict[str, Tone] = {"done": "good", "failed": "bad", "interrupted": "warn"}
    lines = tuple(
        (
            words(report.run),
            words(report.name),
            words(report.recipe),
            words(report.status, tone=tones.get(report.status, "")),
            words(units.ago(now - report.started_at), tip=units.moment(report.started_at)),
            words("" if report.finished_at is None else units.seconds(report.finished_at - report.started_at)),
        )
        for report in reports
    )
    grid = Grid("Runs", columns, lines, empty=f"There is no run in {where}; start one with `edgefl run RUN.yaml`.")
    told = all(report.run.startswith(report.name) for report in reports)  # an id begins with the name by default
    return grid.select([0, 2, 3, 4, 5]) if told else grid
