"""Figures of a device's round as its trainer took them: memory, energy, FLOPs, seconds."""

from __future__ import annotations

from device_agent.core.state import NOTHING_TRAINED
from edgefl.budget.stage_cost import OWN_CODE
from edgefl.records import Figure, Figures
from edgefl.resources.memory_probe import MemoryProbe, NotMeasured
from edgefl.resources.sensors import EnergyProbe, temperature
from edgefl.training.local_round import AbandonedError, RoundResult


def round_figures(
    spent: RoundResult | AbandonedError,
    steps: int | None,
    memory: MemoryProbe | NotMeasured,
    energy: EnergyProbe | NotMeasured,
    *,
    own: bool = False,
) -> Figures:
    """Figures of a round, or of the ``steps`` of an abandoned one; ``own``: by the owner's own code.

    Without a step it may have filled the cache of frozen prefixes.
    """
    if steps == 0 and not spent.flops:
        return dict(NOTHING_TRAINED)
    until = "" if steps is None else f", {steps} step{'' if steps == 1 else 's'} until the round was left off"
    timed = "the training function" if own else "the steps"
    figures = memory.figures() | {
        "energy_j": energy.figure(),
        "temperature_c": temperature(),
        "flops": Figure(kind="counted", reason=OWN_CODE)
        if own
        else Figure(spent.flops, "counted", f"torch FlopCounterMode{until}"),
        "compute_s": NOTHING_TRAINED["compute_s"]
        if steps == 0
        else Figure(spent.compute_s, "measured", f"monotonic clock around {timed}{until}"),
    }
    if isinstance(spent, RoundResult) and spent.cache_fill_flops:
        figures["filling_flops"] = Figure(spent.cache_fill_flops, "counted", "torch FlopCounterMode")
    return figures
