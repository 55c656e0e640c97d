"""Answers under load: ``edgefl serve`` with 1, 8 and 32 clients beside bare onnxruntime, in one run on one machine.

Bare onnxruntime is the same bundle's session called in a loop: one sample at a time (what a server without batches does
at best), and 64 at a time (what batches are after). The clients are connections of one other process; each sends one
sample as binary data and asks again when it has the answer. The turns of one case lie apart, in another order each, so
that a machine that slows down meets all alike; medians of the turns.

    python -m benchmarks.serving.load BUNDLES [--seconds 5] [--turns 3] [--write docs/results/serving.md]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.common import sections
from benchmarks.serving.fresh import HEAD, MIB
from edgefl.export.runtime import Bundle, find_bundles, load_bundle
from edgefl.serve.limits import Limits

PORT = 18_482
CLIENTS = (1, 8, 32)
COMMAND = "python -m benchmarks.serving.load BUNDLES --write docs/results/serving.md"


class Figures(NamedTuple):
    """One turn of one case: milliseconds of an answer, answers a second, resident bytes of what computes."""

    p50: float
    p99: float
    rate: float
    resident: float
    batch: float


def inputs(bundle: Bundle, rows: int) -> dict[str, np.ndarray]:
    """Samples of all the bundle's modalities."""
    rng = np.random.default_rng(0)
    found = {}
    for m, encoder in bundle.manifest.encoders.items():
        shape = (rows, *encoder.input_shape)
        ids = encoder.kind == "text"
        found[m] = rng.integers(0, encoder.vocabulary, shape) if ids else rng.random(shape, np.float32)
    return found


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) * 1024


def request(bundle: Bundle, model: str) -> bytes:
    """One sample as an HTTP request with binary data."""
    tensors, blobs = [], []
    for m, array in inputs(bundle, 1).items():
        kind = "INT64" if array.dtype == np.int64 else "FP32"
        size = {"binary_data_size": array.nbytes}
        tensors.append({"name": m, "shape": list(array.shape), "datatype": kind, "parameters": size})
        blobs.append(array.tobytes())
    head = json.dumps({"inputs": tensors, "outputs": [{"name": "probabilities"}]}).encode()
    body = head + b"".join(blobs)
    lines = (
        f"POST /v2/models/{model}/infer HTTP/1.1",
        "host: 127.0.0.1",
        f"content-length: {len(body)}",
        f"inference-header-content-length: {len(head)}",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def _asking(message: bytes, until: float, took: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    while time.time() < until:
        begun = time.perf_counter()
        writer.write(message)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        took.append(time.perf_counter() - begun)
    writer.close()


def clients(count: int, message: bytes, until: float, out: multiprocessing.Queue[list[float]]) -> None:
    """So many clients ask again and again; the seconds of each answer."""
    took: list[float] = []

    async def every() -> None:
        await asyncio.gather(*(_asking(message, until, took) for _ in range(count)))

    asyncio.run(every())
    out.put(took)


def figures(took: list[float], seconds: float, memory: float, batch: float) -> Figures:
    """Percentiles and rate of the answers' seconds."""
    p50, p99 = np.percentile(np.array(took) * 1000, [50, 99])
    return Figures(float(p50), float(p99), len(took) / seconds, memory, batch)


def counted(name: str) -> float:
    """A counter of the server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def by_clients(count: int, message: bytes, seconds: float, pid: int) -> Figures:
    """One turn of so many clients."""
    out: multiprocessing.Queue[list[float]] = multiprocessing.Queue()
    names = ("edgefl_serve_batched_requests_total", "edgefl_serve_batch_seconds_count")
    before = [counted(name) for name in names]
    until = time.time() + seconds
    worker = multiprocessing.Process(target=clients, args=(count, message, until, out))
    worker.start()
    took = out.get(timeout=seconds + 60)
    worker.join()
    answered, batches = (counted(name) - was for name, was in zip(names, before, strict=True))
    return figures(took, seconds, resident(pid), answered / max(1.0, batches))


def bare(bundle: Bundle, rows: int, seconds: float) -> Figures:
    """One turn of onnxruntime alone; the rate is in samples."""
    some, took = inputs(bundle, rows), []
    until = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < until:
        bundle.predict(some)
        took.append(time.perf_counter() - begun)
    found = figures(took, seconds, resident(os.getpid()), rows)
    return found._replace(rate=found.rate * rows)


def served(bundles: Path, threads: int, delay_ms: float) -> subprocess.Popen[str]:
    """The server, listening."""
    words = [sys.executable, "-m", "edgefl.cli.main", "serve", str(bundles), "--name", "m", "--threads", str(threads)]
    words += ["--max-delay-ms", str(delay_ms)]
    made = subprocess.Popen([*words, "--host", f"127.0.0.1:{PORT}"], stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    said = made.stdout.readline()
    assert said.startswith("Serving"), said
    print(said)
    return made


def table(rows: dict[str, list[Figures]]) -> str:
    """Medians over the turns."""
    lines = [
        "| | p50, ms | p99, ms | answers/s | requests a batch | resident, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, turns in rows.items():
        p50, p99, rate, memory, batch = (statistics.median(one) for one in zip(*turns, strict=True))
        lines.append(f"| {name} | {p50:.2f} | {p99:.2f} | {rate:.0f} | {batch:.1f} | {memory / MIB:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--delay-ms", type=float, default=Limits.delay_s * 1000)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    manifests = find_bundles(given.bundles)
    largest = max(manifests, key=lambda path: len(manifests[path].modalities))
    bundle = load_bundle(largest, threads=given.threads)
    bundle.predict(inputs(bundle, 64))
    message = request(bundle, "m")
    with served(given.bundles, given.threads, given.delay_ms) as server:
        cases: dict[str, Callable[[], Figures]] = {
            "onnxruntime alone, a sample at a time": lambda: bare(bundle, 1, given.seconds),
            "onnxruntime alone, 64 at a time": lambda: bare(bundle, 64, given.seconds),
        }
        for count in CLIENTS:
            who = f"`edgefl serve`, {count} client{'s' if count > 1 else ''}"
            cases[who] = lambda count=count: by_clients(count, message, given.seconds, server.pid)  # type: ignore[misc]
        rows: dict[str, list[Figures]] = {name: [] for name in cases}
        order = random.Random(0)
        for _ in range(given.turns):
            for name in order.sample(list(cases), len(cases)):
                rows[name].append(cases[name]())
                print(name, rows[name][-1], flush=True)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    manifest = bundle.manifest
    text = f"""{table(rows)}

The bundle {manifest.name} ({manifest.size_bytes / MIB:.1f} MiB), all its modalities in every request, binary data,
{given.threads} thread of onnxruntime, turns of {given.seconds:g} s, medians of {given.turns}; clients and server share
two cores with other work (load {os.getloadavg()[0]:.0f} at the end). "onnxruntime alone" is in this benchmark's own
process, whose memory includes its libraries; at 64 a time p50 and p99 are of a batch and the rate is in samples."""
    print(text)
    if given.write:
        sections.put(given.write, "The server", f"`{COMMAND}`\n\n{text}", head=HEAD)


if __name__ == "__main__":
    main()
