"""The files on a layer's walk: those that run while one device trains two stages, a round each, over MQTT.

The programs as they are (coordinator with its worker, agent with its trainer), each traced (``walk_trace``). The
broker runs elsewhere. Only commands, the run file and npz are used, so that older trees can be walked.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from edgefl.data.dataset import Dataset
from edgefl.transport.broker import start_broker

RUN = """
name: walk
seed: 3
recipe: lw-prototypes
data: {test: test.npz}
model:
  stages: 2
  encoders:
    acc: {kind: sensor, width: 16, depth: 2, heads: 2, patch: 4}
    gyro: {kind: sensor, width: 16, depth: 2, heads: 2, patch: 4}
  head: {width: 16, out: 8, dropout: 0.0}
  fusion_width: 16
training: {rounds: [1, 1], batch_size: 8}
evaluate: stage
"""
PATIENCE_S = 300


def walked(tree: Path) -> list[str]:
    """The product files of ``tree`` with a function that ran, relative to it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _samples(24, 1).save_npz(folder / "share.npz")
        _samples(12, 2).save_npz(folder / "test.npz")
        (folder / "run.yaml").write_text(RUN, encoding="utf-8")
        (folder / "notes").mkdir()
        asyncio.run(_run(tree.resolve(), folder))
        notes = "".join(path.read_text(encoding="utf-8") for path in (folder / "notes").iterdir())
    return sorted(set(notes.splitlines()))


async def _run(tree: Path, folder: Path) -> None:
    async with start_broker(folder / "broker", "auto") as broker:
        path = os.pathsep.join([str(Path(__file__).with_name("walk_trace")), str(tree)])
        walk = {"EDGEFL_WALK_TREE": str(tree), "EDGEFL_WALK_NOTES": str(folder / "notes")}
        environment = {**os.environ, **walk, "PYTHONPATH": path, "EDGEFL_BROKER": broker.url, "OMP_NUM_THREADS": "1"}
        agent = ["device_agent.cli", "run", "--device", "box", "--data", "share.npz", "--state", "state"]
        coordinator = ["coordinator.cli", "run", "run.yaml", "--run", "r1", "--directory", "runs"]
        with (folder / "log").open("wb") as log:
            started = [
                subprocess.Popen(
                    [sys.executable, "-m", *arguments], cwd=folder, env=environment, stdout=log, stderr=log
                )
                for arguments in (agent, coordinator)
            ]
            try:
                status = await asyncio.to_thread(started[1].wait, PATIENCE_S)
            finally:
                for program in started:
                    program.terminate()
                    program.wait(PATIENCE_S)
        if status:
            raise RuntimeError(f"the run ended with status {status}:\n{(folder / 'log').read_text(encoding='utf-8')}")


def _samples(rows: int, seed: int) -> Dataset:
    """Noise around a wave for each of two classes, from two sensors."""
    draw = np.random.default_rng(seed)
    labels = np.arange(rows, dtype=np.int64) % 2
    clean = np.sin(np.arange(16)[None, :, None] * (1 + labels)[:, None, None] / 2 + np.arange(3))
    return Dataset(
        modalities={name: (clean + 0.3 * draw.normal(size=clean.shape)).astype(np.float32) for name in ("acc", "gyro")},
        present={name: np.ones(rows, dtype=bool) for name in ("acc", "gyro")},
        labels=labels,
        label_names=("rest", "walk"),
        ids=[str(row) for row in range(rows)],
    )
