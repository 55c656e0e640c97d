"""A device with 200 MB for a training step takes part in training the paper's model with batches of 256.

ViT-Tiny/16 at 224 px and DistilBERT at text length 40, heads of width 4096, CLIP, random weights, layer-wise; 512
pairs of random images and words on the device, two rounds of two steps of the last stage, with low-rank terms of rank
16, weights on disk where memory does not hold them, stored prefixes and changes in 4 bits. A step of the whole model
takes 12.6 GB (resources.md). Through a real broker, coordinator and agent; a trainer over its budget in a round is
killed. Both peaks are the kernel's high-water marks, the process' of its last round (wait4's ru_maxrss).

With --device cuda the budget is for what torch's allocator takes of a card's memory; where processor and GPU share one
pool, as on a Jetson, for the process and the allocator together.

    python -m benchmarks.cost.budget_run [--budget '200 MB'] [--device cuda] [--write docs/results]
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
from typing import Any, NamedTuple

import msgspec
import numpy as np
import yaml

from benchmarks.common.fleet import largest
from benchmarks.cost.device_pages import elsewhere, page_name, title
from edgefl.config.yaml_files import parse_bytes
from edgefl.records import has_card
from edgefl.resources.memory_probe import KEEP_MARK
from edgefl.run_records import RunReport

PAIRS, SIDE, WORDS, BATCH = 512, 224, 40, 256
#: A round takes some minutes on two slow cores.
LIMIT_S = 3000.0


class Peaks(NamedTuple):
    """Bytes: highest resident size of agent and trainer, what a step took, what a GPU's allocator held."""

    resident: int
    allocated: int = 0
    reserved: int = 0


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
            "lora": {"rank": 16, "where": ["*/stage*", "head/*"]},
        },
        "training": {
            "rounds": [0, 0, 0, 0, 0, rounds],
            "batch_size": BATCH,
            "lr": {"encoder": 1e-3, "head": 1e-3},
        },
        "transfer": {"up": "delta+eden4", "down": "delta+eden4", "closing": "packed"},
        "round": {"devices": 1, "join_s": 300, "deadline_s": LIMIT_S},
        "evaluate": "stage",
    }


def one_pool(device: str) -> bool:
    """Whether processor and GPU share one pool, asked as a trainer does, in a process that takes its context along."""
    if device == "cpu":
        return False
    ask = f"import torch; from edgefl.resources.gpu_memory import gpu_of; print(gpu_of(torch.cuda, {device!r}).shared)"
    told = subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, check=True)
    return told.stdout.strip() == "True"


def limited(device: str, shared: bool) -> str:
    """The budget field that the device is held to."""
    if device == "cpu":
        return "step_memory_bytes"
    return "memory_bytes" if shared else "gpu_memory_bytes"


def measured(folder: Path, budget: int, rounds: int, device: str) -> tuple[Peaks, str, bool]:
    """The device's peaks, the run's report as text, and whether its trainer found one pool of processor and GPU."""
    write_data(folder / "data.npz", PAIRS)
    write_data(folder / "test.npz", 32)
    (folder / "run.yaml").write_text(yaml.safe_dump(run_file(folder, rounds)))
    field = limited(device, one_pool(device))
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
            *("--set", f"torch_device={device}"),
            *("--set", f"budget.{field}={budget}"),
        ],
        stdout=sys.stderr,
        # A reset mark would hide what a card's process takes before its rounds.
        env=dict(os.environ) if device == "cpu" else {**os.environ, KEEP_MARK: "1"},
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
    resident = usage.ru_maxrss * 1024
    rows = subprocess.run([*report, "--format", "json"], cwd=folder, stdout=subprocess.PIPE, check=True).stdout
    found = msgspec.json.decode(rows, type=RunReport)
    if device == "cpu":
        return Peaks(resident, int(largest(found, "step_peak_bytes"))), told, False
    gpu = (int(largest(found, f"cuda_{which}_peak_bytes")) for which in ("allocated", "reserved"))
    return Peaks(resident, *gpu), told, not has_card(found.devices[0].capabilities)


def page(budget: int, peaks: Peaks, report: str, device: str, *, shared: bool) -> str:
    """Markdown."""
    about = (__doc__ or "").split("\n\n")
    scene = about[1] if device == "cpu" else about[1].partition("; a trainer over")[0] + "."
    if device == "cpu":
        told, peak = f"the step took {peaks.allocated / 1e6:,.0f} MB above the idle trainer", peaks.allocated
        told += f" (its process {peaks.resident / 1e6:,.0f} MB)"
    else:
        peak = peaks.reserved + (peaks.resident if shared else 0)
        told = (
            f"torch's allocator held {peaks.reserved / 1e6:,.0f} MB for {peaks.allocated / 1e6:,.0f} MB of tensors"
            f"{', together with' if shared else '; beside it'} {peaks.resident / 1e6:,.0f} MB of the process"
        )
    return "\n".join(
        [
            title("A device with little memory", device),
            "",
            *scene.splitlines(),
            *([] if device == "cpu" else ["", *about[2].splitlines()]),
            *elsewhere("budget_run", device),
            "",
            f"Budget {budget / 1e6:,.0f} MB; {told}: {'within' if peak <= budget else 'BEYOND'}.",
            "",
            "```",
            report.rstrip(),
            "```",
            "",
        ]
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="200 MB")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the trainer computes")
    parser.add_argument("--write", type=Path, help="folder for budget_run.md; on a GPU budget_run_cuda.md")
    options = parser.parse_args()
    budget = int(parse_bytes(options.budget))
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as folder:
        peaks, report, shared = measured(Path(folder), budget, options.rounds, options.device)
    text = page(budget, peaks, report, options.device, shared=shared)
    sys.stdout.write(text)
    if options.write is not None:
        (options.write / page_name("budget_run", options.device)).write_text(text)


if __name__ == "__main__":
    main()
