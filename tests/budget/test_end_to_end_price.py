"""The price of a run end to end: its refusal speaks of the same step as its peak."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from edgefl.pricing.end_to_end import _price
from edgefl.records import Budget, Cost
from edgefl.run_records import DeviceRow

MIB = 2**20


def test_the_refusal_of_the_whole_model_has_the_step_that_is_told() -> None:
    cost = Cost(step_peak_bytes=48 * MIB, flops=1e9, memory={"weights": 20 * MIB, "activations": 28 * MIB})
    job = SimpleNamespace(stage=SimpleNamespace(rounds=2))
    whole: Any = SimpleNamespace(job=job, cost=lambda _: cost)
    rows = [DeviceRow(name, budget=Budget(step_memory_bytes=limit * MIB)) for name, limit in (("a", 30), ("b", 64))]
    short, wide = (_price(whole, row) for row in rows)
    assert short.refusal is not None
    assert (short.refusal.reason, short.refusal.needed, short.refusal.allowed) == ("step_memory", 48 * MIB, 30 * MIB)
    assert short.refusal.needed == short.step_peak_bytes
    assert wide.refusal is None
