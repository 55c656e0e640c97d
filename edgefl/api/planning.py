"""The call ``edgefl.plan_run``: what ``edgefl plan`` predicts, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

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
) -> Plan:
    """Predict each stage's cost on each device, and who can train it, without running anything.

    ``devices``: profiles to plan for, instead of the run's fleet; ``samples``: per device, default those that the
    partition gives it; ``batch_sizes``: to price the schedules with. ``data``, ``labels``, ``groups``: as of
    ``edgefl.run``. Raises ConfigError, DataError, ModelError.
    """
    with TemporaryDirectory() as folder:
        file, fields = with_data(file, Given(data, labels, groups), Path(folder))
        return plan_of(file, merged(fields, overrides), PlanOptions(devices, samples, batch_sizes=batch_sizes))


def plan_of(file: RunSource, overrides: Overrides, options: PlanOptions) -> Plan:
    """The plan of a run file, with every option of ``edgefl plan``."""
    price = price_of(file, overrides, options)
    return Plan(price, tuple(assumptions(file, overrides, options)))
