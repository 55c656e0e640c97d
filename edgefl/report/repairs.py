"""Tables of repaired layers: replaced and kept ones with reasons, and layers lent between devices."""

from __future__ import annotations

from collections.abc import Mapping

from edgefl.report import units
from edgefl.report.grid import Cell, Column, Grid, Record, table
from edgefl.run_records import RoundRow, RunReport

_REPAIR_NOTE = (
    "A device whose batches lacked modalities after complete ones has a poverty layer, the one that changed most. It "
    "is replaced by the mean of its cluster's donors in the round."
)
_LENT_NOTE = (
    "A layer sent alone in a round in which the model did not travel. The device trained on from it in the next round: "
    "the mean of what the named devices had sent of theirs. Lent and own: the first digits of the sha256 of the layer "
    "received, and of the one that the device had sent itself."
)


def repaired(row: RoundRow) -> dict[str, Record]:
    """Device -> replacement of its layer (part, tensor, donors), or reason for keeping it."""
    found = row.record.get("repaired", {})
    records = found.items() if isinstance(found, dict) else ()
    return {name: record for name, record in records if isinstance(record, dict)}


def repairs(report: RunReport) -> Grid:
    """Table of numbers of updates with a replaced layer, and of others by reason. No rows without repair."""
    met: dict[str, list[tuple[str, int]]] = {}  # reason ("": replaced) -> (device, round counted through the run)
    for number, row in enumerate((row for row in report.rounds if row.status == "done"), start=1):
        for device, record in repaired(row).items():
            met.setdefault(str(record.get("kept", "")), []).append((device, number))
    if met:
        met.setdefault("", [])
    columns: list[Column[str]] = [
        Column("poverty layer", lambda kept: f"kept: {kept}" if kept else "replaced", key=True, text=True),
        Column("updates", lambda kept: len(met[kept])),
        Column("devices", lambda kept: len({device for device, _ in met[kept]})),
        Column("rounds", lambda kept: units.spans([number for _, number in met[kept]])),
    ]
    rows = sorted(met, key=lambda kept: (bool(kept), -len(met[kept]), kept))
    return table("Substitutions", columns, rows, [_REPAIR_NOTE], "No layer was to be replaced.")


def lent(report: RunReport) -> Grid:
    """Table of layers lent in rounds without a whole exchange. No rows without such rounds."""
    rows = [
        (row.stage, row.round, device, record)
        for row in report.rounds
        if row.status == "done"
        for device, record in repaired(row).items()
        if record.get("lent")
    ]

    def digits(record: Mapping[str, object], name: str) -> Cell:
        whole = str(record.get(name, ""))
        return Cell(whole[:8], tip=whole)

    columns: list[Column[tuple[int, int, str, Record]]] = [
        Column("stage", lambda row: row[0], key=True),
        Column("round", lambda row: row[1], key=True),
        Column("layer", lambda row: f"{row[3].get('part', '')} {row[3].get('tensor', '')}", text=True),
        Column("from", lambda row: ", ".join(row[3].get("donors", ())), text=True),
        Column("to", lambda row: row[2], key=True, text=True),
        Column("lent", lambda row: digits(row[3], "lent"), text=True),
        Column("own", lambda row: digits(row[3], "sent"), text=True),
    ]
    return table("Layers exchanged alone", columns, rows, [_LENT_NOTE], "No layer was exchanged alone.")
