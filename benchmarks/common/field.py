"""A run with real processes: a broker, one process with all agents, and the coordinator."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from device_agent.runtime.connect import Options
from edgefl.api.runs import read_run
from edgefl.run_records import RunReport
from edgefl.transport.broker import start_broker


async def played(
    folder: Path, run_file: dict[str, Any], module: str, every: Sequence[Options], *extra: str, broker: str = "auto"
) -> RunReport:
    """The report of a run in which ``python -m module OPTIONS.json *extra`` is the agents' process.

    Raises SystemExit when the coordinator fails: what it said is on stderr.
    """
    (folder / "run.yaml").write_text(yaml.safe_dump(run_file, sort_keys=False))
    (folder / "agents.json").write_bytes(msgspec.json.encode(list(every)))
    async with start_broker(folder / "broker", broker) as started:
        environment = {**os.environ, "EDGEFL_BROKER": started.url, "OMP_NUM_THREADS": "1"}
        agents = subprocess.Popen(
            [sys.executable, "-m", module, str(folder / "agents.json"), *extra], env=environment, cwd=folder
        )
        try:
            command = [sys.executable, "-m", "coordinator.cli", "run", str(folder / "run.yaml"), "--events"]
            command += ["--run", "bench", "--directory", str(folder / "runs")]
            coordinator = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=folder)
            status = await _ended(coordinator, agents)
        finally:
            agents.send_signal(signal.SIGTERM)
            await asyncio.to_thread(agents.wait)
    if status:
        raise SystemExit(f"the coordinator ended with {status}; see {folder}")
    return read_run(folder / "runs" / "bench")


async def _ended(coordinator: subprocess.Popen[bytes], agents: subprocess.Popen[bytes]) -> int:
    """The coordinator's exit status; it is told to stop when the agents have ended before it."""
    while (status := coordinator.poll()) is None:
        if agents.poll() is not None:
            coordinator.send_signal(signal.SIGTERM)
            return await asyncio.to_thread(coordinator.wait) or 1
        await asyncio.sleep(0.1)
    return status


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"
