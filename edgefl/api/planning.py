"""The call ``edgefl.plan_run``: what ``edgefl plan`` predicts, as a value."""

from __future__ import annotations

from collections.abc import Sequence

from edgefl.api.needs import explained
from edgefl.api.results import Plan
from edgefl.api.run_inputs import PlanOptions, assumptions, price_of
from edgefl.config.profiles import RunSource
from edgefl.config.yaml_files import Overrides


@explained("plan")
def plan_run(
    file: RunSource,
    *,
    overrides: Overrides = (),
    devices: Sequence[str] = (),
    samples: int | None = None,
    batch_sizes: Sequence[int] = (),
) -> Plan:
    """Predict each stage's cost on each device, and who can train it, without running anything.

    ``devices``: profiles to plan for, instead of the run's fleet; ``samples``: per device, default those that the
    partition gives it; ``batch_sizes``: to price the schedules with. Raises ConfigError, DataError, ModelError.
    """
    return plan_of(file, overrides, PlanOptions(devices, samples, batch_sizes=batch_sizes))


def plan_of(file: RunSource, overrides: Overrides, options: PlanOptions) -> Plan:
    """The plan of a run file, with every option of ``edgefl plan``."""
    price = price_of(file, overrides, options)
    return Plan(price, tuple(assumptions(file, overrides, options)))
