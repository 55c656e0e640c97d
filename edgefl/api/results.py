"""Results as a program takes them: a run's report, a finished run, a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl.api.frames import Table, frame, report_frame
from edgefl.api.needs import explained
from edgefl.api.runs import RUNS, find_run, priced, read_run, referenced
from edgefl.budget.fit import RunPrice
from edgefl.errors import ExportError
from edgefl.report import quality
from edgefl.run_records import RunReport

if TYPE_CHECKING:
    import pandas as pd

    from edgefl.export.runtime import Bundle

PLAN_TYPES = {
    **dict.fromkeys(("device", "profile"), "string"),
    "stage": "int64",
    "fits": "bool",
    "limit": "string",
    **dict.fromkeys(("needed", "allowed"), "float64"),
    "unit": "string",
}


@dataclass(frozen=True)
class Report:
    """Everything a run's ledger has, read once. ``record``: its rows as structs (``edgefl.run_records.RunReport``)."""

    record: RunReport = field(repr=False)
    directory: Path

    @property
    def id(self) -> str:
        """The run's id."""
        return self.record.run

    @property
    def status(self) -> str:
        """done, running, paused, stopped, failed, or interrupted: on record as running, and no coordinator holds it."""
        return self.record.status

    @property
    def accuracy(self) -> float | None:
        """Test accuracy after the last evaluated round, every modality given, 0..1; None: not scored by accuracy."""
        rows = [row for row in quality.latest(self.record.evaluations) if row.metric == "accuracy"]
        complete = [row for row in rows if row.missing == "none"]
        return max(complete, key=lambda row: len(row.available)).value if complete else None

    @property
    def headline(self) -> str:
        """The sentence on top of the page: who trained, how good the model is, whose budget was tightest."""
        from edgefl.report import story

        return story.headline(self.record)

    @property
    def bundles(self) -> dict[str, Path]:
        """Folder of each exported ONNX bundle, by its name, such as ``acc+gyro``; empty before an export."""
        return {row.name: (self.directory / row.path).parent for row in self.record.bundles}

    def to_pandas(self, table: Table = "figures") -> pd.DataFrame:
        """A tidy data frame, a row for each

        * ``figures``: device, attempt and figure, predicted and measured, in the base unit of its column ``unit`` (B,
          FLOP, s, J, °C): the rows of ``edgefl report --format csv``;
        * ``scores``: evaluation of the global model: what it was given, what stood in for the rest, metric, value;
        * ``devices``: device, with its samples and its budget for a round.

        Raises MissingDependencyError without pandas.
        """
        return report_frame(self.record, table)

    @explained("report")
    def to_html(self, *, interactive: bool = True) -> str:
        """The page of ``edgefl report --html``, one file. ``interactive``: with scripts (0.9 MB) in it."""
        from edgefl.report.writers import to_html

        return to_html(self.record, interactive=interactive)


@dataclass(frozen=True)
class Run:
    """A run that has come to its end. ``directory`` holds its ledger, page, bundles, shares and logs."""

    directory: Path
    report: Report = field(repr=False)

    @property
    def id(self) -> str:
        """Its id, by which ``edgefl report`` and ``load_report`` find it."""
        return self.report.id

    @property
    def status(self) -> str:
        """done; or stopped, on an operator's request."""
        return self.report.status

    @property
    def accuracy(self) -> float | None:
        """Test accuracy of the final model with every modality, 0..1; None: not scored by accuracy."""
        return self.report.accuracy

    @property
    def bundles(self) -> dict[str, Path]:
        """Folder of each exported ONNX bundle, by its name."""
        return self.report.bundles

    def load_bundle(self, name: str = "") -> Bundle:
        """An exported bundle, ready to predict; by default the one of all modalities. Raises ExportError."""
        from edgefl.export.runtime import load_bundle

        folders = self.bundles
        wanted = name or max(folders, key=lambda one: one.count("+"), default="")
        if wanted not in folders:
            there = ", ".join(folders) or "none"
            raise ExportError(
                f"run {self.id} has no bundle {wanted!r}",
                remedy=f"Bundles there are: {there}; `edgefl export {self.directory}` writes them.",
            )
        return explained("predict")(load_bundle)(folders[wanted])


@dataclass(frozen=True)
class Plan:
    """Predicted cost of each stage on each device.

    ``price``: every number; ``assumptions``: sentences about settings that the run file leaves out.
    """

    price: RunPrice = field(repr=False)
    assumptions: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every device can train in every stage."""
        return not any(plan.placement.refusal for plan in self.price.devices)

    @property
    def verdict(self) -> str:
        """One sentence: every device fits, and the tightest one; or those that do not, both numbers, and the remedy."""
        from edgefl.report.verdict import verdict

        return verdict(self.price)

    def to_pandas(self) -> pd.DataFrame:
        """A row for each device, stage and limit of its budget: needed and allowed, in the unit of its row.

        Where a device does not fit the row is the refusal. Raises MissingDependencyError without pandas.
        """
        rows = []
        for plan in self.price.devices:
            refusal = plan.placement.refusal
            for limit in (refusal,) if refusal else plan.limits:
                where = (plan.device, plan.profile, plan.placement.stage.index, refusal is None)
                rows.append((*where, limit.reason, limit.needed, limit.allowed, limit.unit))
        return frame(PLAN_TYPES, rows)

    @explained("report")
    def to_html(self) -> str:
        """The page of ``edgefl plan --html``."""
        from edgefl.report.plan_page import to_html

        return to_html(self.price, self.assumptions)


@explained("report")
def load_report(run: str | Path = "latest", *, directory: str | Path = RUNS) -> Report:
    """The report of a run, also of one that is still going on.

    ``run``: its id, the beginning of one, ``latest``, or its own directory; ``directory``: where runs are. Raises
    RunError naming the runs there are, StoreError for a ledger that cannot be read.
    """
    found = find_run(run if isinstance(run, str) else str(run.absolute()), Path(directory))
    return Report(referenced(priced(read_run(found), found), found), found)
