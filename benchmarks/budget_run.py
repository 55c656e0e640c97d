"""A device with 1.5 GB for its whole trainer takes part in training the paper's model with batches of 256.

ViT-Tiny/16 at 224 px and DistilBERT at text length 40, heads of width 4096, CLIP, random weights, layer-wise; 512 pairs
of random images and words on the device, two rounds of two steps of the last stage, with Adafactor, stored prefixes and
changes in 4 bits. Through a real broker, coordinator and agent. The peak is the kernel's own high-water mark of the
agent's largest process from its start to its end (wait4's ru_maxrss), which our probe is told not to reset.

    python -m benchmarks.budget_run [--budget '1.5 GB'] [--write docs/results]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from edgefl.config.files import parse_bytes
from edgefl.resources.memory import KEEP_MARK

PAIRS, SIDE, WORDS, BATCH = 512, 224, 40, 256
#: A round takes some minutes on two slow cores.
LIMIT_S = 3000.0


def write_data(path: Path, pairs: int) -> None:
    """Random pairs, images as bytes."""
    rng = np.random.default_rng(pairs)
    images = rng.integers(0, 256, (pairs, SIDE, SIDE, 3), np.uint8)
    words = rng.integers(1, 30_000, (pairs, WORDS), np.int64)
    np.savez(path, image=images, text=words)


def run_file(folder: Path, rounds: int) -> dict[str, Any]:
    """The paper's model in six stages, of which the last has rounds."""
    return {
        "name": "budget",
        "recipe": "lw-fedmml-clip",
        "slots": {"schedule": {"layerwise": {"embed": "frozen"}}},
        "data": {"source": str(folder / "data.npz"), "test": str(folder / "test.npz")},
        "model": {
            "stages": 6,
            "encoders": {"image": {"kind": "vision", "size": "paper"}, "text": {"kind": "text", "size": "paper"}},
        },
        "training": {
            "rounds": [0, 0, 0, 0, 0, rounds],
            "batch_size": BATCH,
            "optimizer": "adafactor",
            "lr": {"encoder": 1e-3, "head": 1e-3},
        },
        "transfer": {"up": "delta+int4", "down": "delta+int4"},
        "round": {"devices": 1, "join_s": 300, "deadline_s": LIMIT_S},
        "evaluate": "stage",
    }


def measured(folder: Path, budget: int, rounds: int) -> tuple[int, str]:
    """(highest resident size of the agent and its trainer in bytes, the run's report)."""
    write_data(folder / "data.npz", PAIRS)
    write_data(folder / "test.npz", 32)
    (folder / "run.yaml").write_text(yaml.safe_dump(run_file(folder, rounds)))
    command = [sys.executable, "-m"]
    coordinator = subprocess.Popen(
        [*command, "coordinator.cli", "run", str(folder / "run.yaml"), "--run", "budget", "--broker", "auto"],
        cwd=folder,
        stdout=sys.stderr,
    )
    url = folder / "runs" / "budget" / "broker" / "url"
    until = time.monotonic() + 60
    while not url.exists() and time.monotonic() < until:
        time.sleep(0.2)
    agent = subprocess.Popen(
        [
            *(*command, "device_agent.cli", "run", "--broker", url.read_text().strip(), "--device", "small"),
            *("--data", str(folder / "data.npz"), "--state", str(folder / "agent")),
            *("--set", f"budget.memory_bytes={budget}"),
        ],
        stdout=sys.stderr,
        env={**os.environ, KEEP_MARK: "1"},
    )
    try:
        status = coordinator.wait(LIMIT_S)
    finally:
        coordinator.kill()
        agent.send_signal(signal.SIGTERM)
        _, _, usage = os.wait4(agent.pid, 0)
    if status:
        raise SystemExit(f"the run ended with status {status}")
    report = [*command, "edgefl.cli.main", "report", "budget", "--runs", "runs"]
    told = subprocess.run(report, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
    return usage.ru_maxrss * 1024, told


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="1.5 GB")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", type=Path, help="folder for budget_run.md")
    options = parser.parse_args()
    budget = int(parse_bytes(options.budget))
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as folder:
        peak, report = measured(Path(folder), budget, options.rounds)
    verdict = "within" if peak <= budget else "BEYOND"
    text = "\n".join(
        [
            "# A device with little memory",
            "",
            *((__doc__ or "").split("\n\n")[1].splitlines()),
            "",
            f"Budget {budget / 1e6:,.0f} MB; the kernel's high-water mark {peak / 1e6:,.0f} MB: {verdict}.",
            "",
            "```",
            report.rstrip(),
            "```",
            "",
        ]
    )
    sys.stdout.write(text)
    if options.write is not None:
        (options.write / "budget_run.md").write_text(text)


if __name__ == "__main__":
    main()
