"""The call ``edgefl.plan_run``: what ``edgefl plan`` predicts, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from edgefl.api.given_data import Column, Given, GivenData, merged, with_data
from edgefl.api.needs import explained
from edgefl.api.results import Plan
from edgefl.api.run_inputs import PlanOptions, assumptions, price_of
from edgefl.config.profiles import RunSource
from edgefl.config.yaml_files import Overrides


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


def plan_of(file: RunSource, overrides: Overrides, options: PlanOptions) -> Plan:
    """The plan of a run file, with every option of ``edgefl plan``."""
    price = price_of(file, overrides, options)
    if options.runs_a_month:
        from edgefl.report.month_table import months

        runs = options.runs_a_month
        price = msgspec.structs.replace(price, runs_a_month=runs, months=months(price, runs))
    return Plan(price, tuple(assumptions(file, overrides, options)))
