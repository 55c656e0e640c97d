"""A whole fleet in one process (edgefl/api/in_process.py), with shares and a plan of the caller's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from coordinator.ledger.ledger import Ledger
from device_agent.runtime.connect import Options
from edgefl.api import in_process
from edgefl.plan.job import RunPlan
from edgefl.records import Budget, Manifest
from edgefl.run_records import RunReport
from edgefl.storage.objects import ObjectStore


def run_fleet(
    directory: Path,
    plan: RunPlan,
    shares: Mapping[str, Path],
    seconds: float,
    budgets: Mapping[str, Budget] | None = None,
) -> RunReport:
    """Run ``plan`` in ``directory`` with one agent a share (device -> .npz) and give its report; at most ``seconds``.

    ``budgets``: device -> what it may spend; others have no limit. The last state: ``state_of``.
    """
    every = [
        Options(
            device=device,
            data=str(data),
            state=str(directory / "agents" / device),
            budget=(budgets or {}).get(device, Budget()),
            torch_device="cpu",
        )
        for device, data in shares.items()
    ]

    def failed(device: str, error: Exception) -> NoReturn:  # the run would wait for it in vain
        raise error

    run = in_process.run_fleet(plan, directory / "run", every, lambda event: None, failed)
    return asyncio.run(asyncio.wait_for(run, seconds))


def state_of(directory: Path, run: str) -> tuple[ObjectStore, Manifest]:
    """The object store of a finished run, and its last state."""
    with Ledger(directory / "run" / "ledger.sqlite") as ledger:
        return ObjectStore(directory / "run" / "objects"), ledger.position(run).manifest
