"""The call ``edgefl.plan_run``: what ``edgefl plan`` predicts, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from edgefl.api.given_data import Column, Given, GivenData, merged, with_data
from edgefl.api.needs import explained
from edgefl.api.results import Plan
from edgefl.api.run_inputs import PastRun, PlanOptions, assumptions, price_of
from edgefl.api.runs import find_run, read_run
from edgefl.config.profiles import RunSource, find
from edgefl.config.yaml_files import Overrides
from edgefl.errors import ConfigError, RunError
from edgefl.report.rounds import idle_month, wire_bytes
from edgefl.storage.disk import ledger_file, ledger_of


@explained("plan")
def plan_run(
    file: RunSource | None = None,
    *,
    data: GivenData = None,
    labels: Column | None = None,
    groups: Column | None = None,
    overrides: Overrides = (),
    devices: Sequence[str] = (),
    samples: int | None = None,
    batch_sizes: Sequence[int] = (),
    runs_a_month: int = 0,
) -> Plan:
    """Predict each stage's cost on each device, and who can train it, without running anything.

    ``devices``: profiles to plan for, instead of the run's fleet; ``samples``: per device, default those that the
    partition gives it; ``batch_sizes``: to price the schedules with; ``runs_a_month``: to price
    a month of each device. ``data``, ``labels``, ``groups``: as of
    ``edgefl.run``. Raises ConfigError, DataError, ModelError.
    """
    with TemporaryDirectory() as folder:
        file, fields = with_data(file, Given(data, labels, groups), Path(folder))
        return plan_of(
            file,
            merged(fields, overrides),
            PlanOptions(devices, samples, batch_sizes=batch_sizes, runs_a_month=runs_a_month),
        )


def to_plan(text: str, runs: Path) -> tuple[str, PastRun | None]:
    """The run file ``text`` names, None; or of a run that has been its file as resolved, and its devices.

    Raises ConfigError, RunError, StoreError.
    """
    try:
        if not ledger_file(find("runs", text)):
            return text, None
        directory = Path(text)
    except ConfigError as unknown:
        try:
            directory = find_run(text, runs)
        except RunError as error:
            remedy = f"Nor is it a run: {error.message}. {error.remedy}"
            raise ConfigError(unknown.file, unknown.problems, remedy=remedy) from None
    from coordinator.ledger.ledger import Ledger
    from coordinator.runtime.start import RUN_FILE

    report = read_run(directory)
    with Ledger(ledger_of(directory), create=False) as ledger:
        model = ledger.plan(report.run).model
    if not report.devices:
        raise RunError(f"no device has joined the run {report.run}", remedy="Plan its run file instead.")
    wire = wire_bytes(report) if report.status == "done" else {}
    months = {row.device: idle_month(row.capabilities.traffic) for row in report.devices}
    idle = {device: found for device, found in months.items() if found is not None}
    return str(directory / RUN_FILE), PastRun(report.run, model, report.devices, wire, idle)


def plan_of(file: RunSource, overrides: Overrides, options: PlanOptions) -> Plan:
    """The plan of a run file, with every option of ``edgefl plan``."""
    price = price_of(file, overrides, options)
    if options.runs_a_month:
        from edgefl.report.month_table import months

        runs, past = options.runs_a_month, None if options.profiles else options.past
        wire = past.wire if past and not (overrides or options.samples) else {}  # else it is another run
        counted = months(price, runs, wire, past.idle if past else {})
        price = msgspec.structs.replace(price, runs_a_month=runs, months=counted)
    return Plan(price, tuple(assumptions(file, overrides, options)))
