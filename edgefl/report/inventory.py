"""Tables of devices, stages, bundles, runs, shares of a data set, recipes and encoder sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from edgefl.models.spec import is_matcher
from edgefl.registry import ROLES, default, method
from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid, Record, Tone, limit_column, measure, table
from edgefl.run_records import BundleRow, DeviceRow, RunReport

if TYPE_CHECKING:
    from edgefl.data.prepare import Prepared, Share

#: After the parts of the closing round.
CLOSING = " (closing round: every eligible device, the model does not change)"
_RUN_TONES: dict[str, Tone] = {"done": "good", "failed": "bad", "interrupted": "warn"}

_Choice = tuple[str, int, str, Record]  # role, place among its choices, name, options


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
        Column("samples", lambda row: samples(row.samples), "", "data", text=True),
        Column("last seen", lambda row: units.moment(last_seen(report, row.device)), text=True),
    ]
    return table("Devices", columns, report.devices, empty="No device has joined yet.")


def samples(counts: Mapping[str, int], noun: str = "") -> str:
    """{"": 40, "acc": 40, "gyro": 31} -> "40 (acc 40, gyro 31)"; ``noun`` follows the whole."""
    parts = ", ".join(f"{name} {number:,}" for name, number in counts.items() if name)
    whole = f"{counts[''] if '' in counts else max(counts.values(), default=0):,}{noun}"
    return f"{whole} ({parts})" if parts else whole


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


def runs(reports: Sequence[RunReport], where: str, now: float) -> Grid:
    """The runs there are, one a row; ``now``: seconds since the epoch."""

    def took(row: RunReport) -> str:
        return "" if row.finished_at is None else units.seconds(row.finished_at - row.started_at)

    columns: list[Column[RunReport]] = [
        Column("run", lambda row: row.run, key=True, text=True, whole=True),
        Column("recipe", lambda row: row.recipe, text=True),
        Column("status", lambda row: Cell(row.status, tone=_RUN_TONES.get(row.status, "")), text=True),
        Column(
            "started", lambda row: Cell(units.ago(now - row.started_at), tip=units.moment(row.started_at)), text=True
        ),
        Column("took", took, text=True),
    ]
    if not all(row.run.startswith(row.name) for row in reports):  # an id begins with the name by default
        columns.insert(1, Column("name", lambda row: row.name, text=True))
    return table("Runs", columns, reports, empty=f"There is no run in {where}; start one with `edgefl run RUN.yaml`.")


def shares(name: str, prepared: Prepared) -> Grid:
    """How the data set ``name`` is partitioned: samples of each device, of each modality and of each class."""

    def modality(name: str) -> Column[Share]:
        def cell(share: Share) -> Cell:
            return Cell(str(share.samples.get(name, 0)), tone="" if share.samples.get(name) else "warn")

        return Column(name, cell, group="samples that have")

    def label(index: int, name: str) -> Column[Share]:
        return Column(name, lambda share: str(share.class_counts[index]), group="samples of class")

    columns: list[Column[Share]] = [
        Column("device", lambda share: share.device, key=True, text=True),
        Column("samples", lambda share: str(share.samples[""])),
        *map(modality, prepared.signature),
        *(label(index, name) for index, name in enumerate(prepared.label_names)),
        Column("discarded", lambda share: str(share.discarded), tip="samples that lost every modality"),
    ]
    shapes = ", ".join(f"{m} {list(shape)}" for m, shape in prepared.signature.items())
    notes = [f"One sample: {shapes}. Test set: {prepared.test_samples} samples."]
    if not prepared.label_names:
        notes.append("No sample has a label: recipes that learn from labels can not train on them.")
    if prepared.skipped:
        notes.append(f"{len(prepared.skipped)} bad samples left out; the first: {prepared.skipped[0]}.")
    return table(f"Shares of {name}", columns, prepared.shares, notes)


def recipes(found: Sequence[Record]) -> Grid:
    """Every recipe with its summary and source."""
    columns: list[Column[Record]] = [
        Column("recipe", lambda recipe: recipe["name"], key=True, text=True),
        Column("what it does", lambda recipe: recipe["summary"], text=True),
        Column("source", lambda recipe: recipe["source"], text=True),
    ]
    return table("Recipes", columns, found, ["edgefl recipes show NAME explains a recipe slot by slot."])


def slots(recipe: Record) -> Grid:
    """One recipe role by role: its methods, their summaries and options. Defaults are dimmed."""

    def tone(row: _Choice) -> Tone:
        return "dim" if row[2] == default(row[0]) and not row[3] else ""

    def option(name: str, value: float | str) -> str:
        return f"{name} {value:g}" if isinstance(value, float) else f"{name} {value or '—'}"

    columns: list[Column[_Choice]] = [
        Column("slot", lambda row: "" if row[1] else row[0], key=True, text=True),
        Column("decides", lambda row: "" if row[1] else ROLES[row[0]][0], text=True),
        Column("filled with", lambda row: Cell(row[2], tone=tone(row)), text=True),
        Column("which means", lambda row: Cell(method(row[0], row[2]).summary, tone=tone(row)), text=True),
        Column("options", lambda row: ", ".join(option(name, value) for name, value in row[3].items()), text=True),
    ]
    rows = [(role, i, name, options) for role in ROLES for i, (name, options) in enumerate(recipe[role].items())]
    return table(f"{recipe['name']}: {recipe['summary']}", columns, rows, [f"Source: {recipe['source']}."])


def encoder_sizes(sizes: Mapping[str, Mapping[str, Record]]) -> Grid:
    """Encoder sizes by kind: kind -> size -> fields."""

    def field(name: str) -> Column[tuple[str, str]]:
        return Column(name, lambda row: str(sizes[row[0]][row[1]].get(name, "")))

    columns: list[Column[tuple[str, str]]] = [
        Column("kind", lambda row: row[0], key=True, text=True),
        Column("size", lambda row: row[1], key=True, text=True),
        *map(field, ("width", "depth", "heads", "patch", "vocabulary")),
    ]
    note = "Fields of model.encoders.<modality>; one that is given in the run file wins over the size's."
    return table("Encoder sizes", columns, [(kind, name) for kind, named in sizes.items() for name in named], [note])
