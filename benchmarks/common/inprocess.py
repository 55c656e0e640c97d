"""A whole fleet in one process (edgefl/api/in_process.py), with shares and a plan of the caller's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from coordinator.ledger.ledger import Ledger
from device_agent.runtime.connect import Options
from edgefl.api import in_process
from edgefl.api.run_inputs import shares_of
from edgefl.config.profiles import load_run
from edgefl.data.dataset import Dataset
from edgefl.plan.compile import compile_run
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


def run_values(
    folder: Path, values: Mapping[str, Any], budgets: Mapping[str, Budget] | None = None
) -> tuple[RunPlan, RunReport]:
    """``run_fleet`` of a run file's ``values``, whose data are shared out by it; files go to ``folder``."""
    (folder / "run.yaml").write_text(yaml.safe_dump(dict(values)))
    config, recipe = load_run(str(folder / "run.yaml"))
    prepared = shares_of(config, [device.name for device in config.fleet], folder / "shares")
    plan = compile_run(
        config, recipe, run="run", shapes=prepared.signature, label_names=prepared.label_names, test=prepared.test
    )
    paths = {share.device: Path(share.path) for share in prepared.shares}
    return plan, run_fleet(folder, plan, paths, seconds=3600, budgets=budgets)


def run_shares(
    folder: Path,
    values: Mapping[str, Any],
    shares: Mapping[str, Dataset],
    test: Dataset,
    overrides: Sequence[str] = (),
    budgets: Mapping[str, Budget] | None = None,
) -> RunReport:
    """``run_fleet`` of a run file's ``values``, an agent a share (device -> samples); files go to ``folder``.

    ``budgets``: as ``run_fleet`` has them.
    """
    test.save_npz(folder / "test.npz")
    paths = {device: folder / f"{device}.npz" for device in shares}
    for device, share in shares.items():
        share.save_npz(paths[device])
    (folder / "run.yaml").write_text(yaml.safe_dump({**values, "data": {"test": str(folder / "test.npz")}}))
    config, recipe = load_run(str(folder / "run.yaml"), list(overrides))
    plan = compile_run(
        config,
        recipe,
        run="run",
        shapes=test.signature(),
        label_names=test.label_names,
        test=str(folder / "test.npz"),
    )
    return run_fleet(folder, plan, paths, seconds=3600, budgets=budgets)


def state_of(directory: Path, run: str) -> tuple[ObjectStore, Manifest]:
    """The object store of a finished run, and its last state."""
    with Ledger(directory / "run" / "ledger.sqlite") as ledger:
        return ObjectStore(directory / "run" / "objects"), ledger.position(run).manifest
