"""A round's aggregation beside the memory's bandwidth, and what the coordinator holds for 4, 16 and 64 devices.

Updates of 28 MB each (four parts of a transformer of width 384) lie in the coordinator's store, their hashes proved, as
after their checks. What is timed is all of ``aggregate_round``: read, check, add, write the new state, sync it. Beside
it, in the same process, copying 256 MiB in memory. Every number of devices has a process of its own, for its peak.

    python -m benchmarks.cost.aggregation [--write docs/results]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.common import sections
from benchmarks.cost.resource_table import MIB
from edgefl.aggregation.aggregate import aggregate_round
from edgefl.aggregation.history import UpdateInfo
from edgefl.protocol.tensors import encode_part
from edgefl.records import Manifest
from edgefl.resources.process_memory import status_bytes
from edgefl.storage.objects import ObjectStore

DEVICES = (4, 16, 64)
ROUNDS = 7
PARTS, WIDTH = 4, 384
SHAPES = {"qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}


class Work(msgspec.Struct, frozen=True):
    """What is to be aggregated: the state's parts, and each device's."""

    state: Manifest
    updates: tuple[Manifest, ...]


class Outcome(msgspec.Struct, frozen=True):
    """Medians of ROUNDS rounds, of one process."""

    devices: int
    update_bytes: int
    seconds: float
    copy_bytes_s: float  # read and written
    peak_bytes: int


def made(folder: Path) -> Work:
    """A state and as many updates as the largest case needs, each other than the others."""
    store = ObjectStore(folder)
    drawn = np.random.default_rng(0)
    plain = {f"acc/stage{n}": {name: _values(drawn, shape) for name, shape in SHAPES.items()} for n in range(PARTS)}

    def stored(shift: float) -> Manifest:
        moved = {part: {name: one + np.float32(shift) for name, one in found.items()} for part, found in plain.items()}
        return {part: store.put(encode_part(tensors)) for part, tensors in moved.items()}

    return Work(stored(0.0), tuple(stored(1e-3 * (1 + device)) for device in range(max(DEVICES))))


def _values(drawn: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return drawn.standard_normal(shape, dtype=np.float32)


def measured(folder: Path, devices: int) -> Outcome:
    """In this process."""
    work = msgspec.json.decode((folder / "work.json").read_bytes(), type=Work)
    store = ObjectStore(folder)
    updates = [
        UpdateInfo(f"device-{number:03}", refs, dict.fromkeys(refs, 100 + number))
        for number, refs in enumerate(work.updates[:devices])
    ]
    for update in updates:
        for ref in update.manifest.values():
            store.read(ref.id)  # proves its hash
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        _, record = aggregate_round(updates, store, work.state)
        seconds.append(time.perf_counter() - started)
        if record["refused"] or record["parts"].keys() != work.state.keys():
            raise SystemExit(f"not everything was aggregated: {record}")
        store.mark_garbage({ref.id for refs in (work.state, *work.updates) for ref in refs.values()})
        store.sweep()
    size = sum(ref.size for ref in work.state.values())
    peak = status_bytes("VmHWM") or 0  # before the copies, which are larger; ru_maxrss would be the parent's
    return Outcome(devices, size, statistics.median(seconds), _copy_bytes_s(), peak)


def _copy_bytes_s() -> float:
    source, target = np.ones(256 * MIB, np.uint8), np.empty(256 * MIB, np.uint8)
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - started)
    return 2 * source.nbytes / statistics.median(seconds)


def page(found: list[Outcome]) -> str:
    """A table."""
    columns = ["devices", "updates, MB", "s", "copying as much, s", "×", "a further device, ms", "peak, MiB"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for one in found:
        taken = one.devices * one.update_bytes
        copied = 2 * taken / one.copy_bytes_s
        cells: list[object] = [one.devices, f"{taken / 1e6:,.0f}", f"{one.seconds:.3f}", f"{copied:.3f}"]
        further = (one.seconds - found[0].seconds) / max(1, one.devices - found[0].devices)
        cells += [f"{one.seconds / copied:.1f}", f"{1e3 * further:.1f}" if further else ""]
        cells.append(f"{one.peak_bytes / MIB:.0f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


#: Above the table.
_EXPLAINED = """All of a round's aggregation, from updates in the coordinator's store to the new state, synced to the
disk; beside it, what copying the updates' bytes takes in memory, measured in the same process. The peak is of a process
that does nothing else."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help="folder of transport.md")
    options = parser.parse_args()
    if options.child is not None:
        sys.stdout.buffer.write(msgspec.json.encode(measured(options.child, options.devices)))
        return
    found = []
    with tempfile.TemporaryDirectory(prefix="edgefl-aggregation-") as name:
        folder = Path(name)
        (folder / "work.json").write_bytes(msgspec.json.encode(made(folder)))
        for devices in DEVICES:
            command = [sys.executable, "-m", "benchmarks.cost.aggregation", "--child", name, "--devices", str(devices)]
            child = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            found.append(msgspec.json.decode(child.stdout, type=Outcome))
    text = page(found)
    if options.write is not None:
        sections.transport(
            options.write, "Aggregation", "python -m benchmarks.cost.aggregation", f"{_EXPLAINED}\n\n{text}"
        )
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
