"""Tables of a run's devices, stages and bundles."""

from __future__ import annotations

from edgefl.models.spec import is_matcher
from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid, Record, limit_column, measure, table
from edgefl.run_records import BundleRow, DeviceRow, RunReport

#: After the parts of the closing round.
CLOSING = " (closing round: every eligible device, the model does not change)"


def devices(report: RunReport) -> Grid:
    """Each device: hardware, budget of a round, data."""
    may = "may spend per round"

    def gpu(row: DeviceRow) -> Cell:
        name, size = row.capabilities.gpu, row.capabilities.gpu_memory_bytes
        return Cell(name or "none", tone="" if name else "dim", tip=f"{units.mib(size)} of its own" if size else "")

    columns: list[Column[DeviceRow]] = [
        Column("device", lambda row: row.device, key=True, text=True),
        Column("profile", lambda row: row.profile, text=True),
        Column("machine", lambda row: Cell(row.capabilities.machine, tip=row.capabilities.runtime), text=True),
        Column("cores", lambda row: row.capabilities.cores or None),
        measure("memory", lambda row: row.capabilities.memory_total_bytes or None, "B", "has"),
        measure("disk free", lambda row: row.capabilities.disk_free_bytes or None, "B", "has"),
        Column("GPU", gpu, "", "has", text=True),
        limit_column("step memory", lambda row: row.budget.step_memory_bytes, "B", may),
        limit_column("process", lambda row: row.budget.memory_bytes, "B", may),
        limit_column("FLOPs", lambda row: row.budget.flops, "FLOP", may),
        limit_column("payload", lambda row: row.budget.payload_bytes, "B", may),
        limit_column("disk", lambda row: row.budget.disk_bytes, "B", may),
        Column("samples", lambda row: units.samples(row.samples), "", "data", text=True),
        Column("last seen", lambda row: units.moment(last_seen(report, row.device)), text=True),
    ]
    return table("Devices", columns, report.devices, empty="No device has joined yet.")


def last_seen(report: RunReport, device: str) -> float | None:
    """Time of the latest event that names the device, else of the end of its last round; seconds since the epoch."""
    times = [event.at for event in report.events if event.device == device]
    if not times:
        times = [row.ended_at or row.started_at for row in report.rounds if device in row.participants]
    return max(times, default=None)


def stages(report: RunReport) -> Grid:
    """The parts that each stage trains, and the size of those a device holds for it."""

    def size(kind: str) -> Column[Record]:
        def total(row: Record) -> int | None:
            return sum(report.part_bytes.get(part, 0) for part in row.get(kind, ())) if report.part_bytes else None

        return measure(kind, total, "B", "size of the parts", why="sizes of the parts not on record")

    def parts(row: Record) -> str:
        trained = list(row.get("trained", ()))
        return ", ".join(trained) + (CLOSING if trained and all(map(is_matcher, trained)) else "")

    columns: list[Column[Record]] = [
        Column("stage", lambda row: row.get("index"), key=True),
        Column("encoder depth", lambda row: row.get("depth"), "stages"),
        Column("rounds", lambda row: row.get("rounds"), "planned"),
        size("trained"),
        size("present"),
        Column("parts trained", parts, text=True),
    ]
    return table("Stages", columns, report.stages, empty="No stage on record.")


def bundles(report: RunReport) -> Grid:
    """The exported ONNX files and how far they are from the torch model."""

    def difference(row: BundleRow) -> Cell:
        return Cell(f"{row.max_difference:.1e}", tone="good" if row.max_difference <= row.tolerance else "bad")

    columns: list[Column[BundleRow]] = [
        Column("bundle", lambda row: row.name, key=True, text=True),
        Column("modalities", lambda row: " + ".join(row.modalities), text=True),
        measure("size", lambda row: row.size_bytes, "B"),
        Column("largest", difference, "", "difference from torch"),
        Column("tolerance", lambda row: f"{row.tolerance:.1e}", "", "difference from torch"),
        Column("file", lambda row: row.path, text=True, whole=True),
    ]
    empty = "Nothing exported; `edgefl export RUN` writes ONNX bundles."
    return table("Exported bundles", columns, report.bundles, empty=empty)
