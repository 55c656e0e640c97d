"""How a data set is shared out, as a table."""

from __future__ import annotations

from edgefl.data.prepare import Prepared
from edgefl.report.grid import Cell, Column, Grid


def share_grid(name: str, prepared: Prepared) -> Grid:
    """One row a device: samples, samples of each modality, samples of each class."""
    modalities = list(prepared.signature)
    columns = (
        Column("device", key=True, text=True),
        Column("samples"),
        *(Column(m, group="samples that have") for m in modalities),
        *(Column(label, group="samples of class") for label in prepared.label_names),
        Column("discarded", tip="samples that lost every modality"),
    )
    rows = tuple(
        (
            Cell(share.device),
            Cell(str(share.samples[""])),
            *(Cell(str(share.samples.get(m, 0)), tone="" if share.samples.get(m) else "warn") for m in modalities),
            *(Cell(str(count)) for count in share.class_counts),
            Cell(str(share.discarded)),
        )
        for share in prepared.shares
    )
    shapes = ", ".join(f"{m} {list(shape)}" for m, shape in prepared.signature.items())
    notes = [f"One sample: {shapes}. Test set: {prepared.test_samples} samples."]
    if not prepared.label_names:
        notes.append("No sample has a label: recipes that learn from labels can not train on them.")
    if prepared.skipped:
        notes.append(f"{len(prepared.skipped)} bad samples left out; the first: {prepared.skipped[0]}.")
    return Grid(f"Shares of {name}", columns, rows, tuple(notes))
