"""Measurement of this device's profile (``edgefl-agent profile``): hardware and speeds, for planning.

Failed measurements are left out, with the reason in ``notes``: never zero, never a guess.
"""

from __future__ import annotations

import asyncio
import math
import os
import platform
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from edgefl.budget.stage_cost import Priced
from edgefl.errors import BrokerError
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec
from edgefl.models.staged import build
from edgefl.plan.job import Hyper, Job, Slots
from edgefl.pricing.round_price import price_step
from edgefl.protocol import topics
from edgefl.protocol.chunks import DEFAULT_CREDIT, fitting_chunk_bytes
from edgefl.records import kind_of_machine
from edgefl.registry import choose
from edgefl.resources.gpu_memory import gpu_of
from edgefl.resources.hardware import capabilities
from edgefl.resources.process_memory import give_back_at_once
from edgefl.resources.sensors import EnergyProbe, temperature
from edgefl.training.batches import Batch
from edgefl.training.forward import Auxiliary
from edgefl.training.step import make_optimizer, prepare, train_step
from edgefl.transport.link import TlsFiles
from edgefl.transport.mqtt import MqttTransport

#: Bytes written and read back: more than a disk's own cache of a small device, less than wears a card out.
DISK_BYTES = 64 * 2**20
#: Bytes sent through the broker and back: a second at 4 MB/s.
LINK_BYTES = 4 * 2**20
#: Longest wait for what the broker gives back.
LINK_S = 30.0
#: Side of the matrices that are multiplied: 2 GFLOP a product.
SIDE = 1024
#: Seconds that each product is measured for, and all training steps together.
WORK_S, STEPS_S = 1.0, 8.0


class StepSize(NamedTuple):
    """Size of a measured training step."""

    modalities: int
    rows: int
    tokens: int
    width: int
    depth: int


#: Steps whose time is mostly that of calls, of bytes written, and of FLOPs.
STEPS = (
    *(StepSize(2, 8, 16, 16, 1), StepSize(2, 8, 16, 32, 3)),
    *(StepSize(2, 64, 16, 32, 3), StepSize(1, 128, 32, 32, 2), StepSize(2, 64, 16, 64, 2), StepSize(2, 64, 16, 128, 2)),
    StepSize(1, 16, 64, 256, 2),
)


class Rates(NamedTuple):
    """Measured rates of training steps: FLOPs and written bytes a second, seconds an operation."""

    flops: float
    operation_s: float
    written_bytes: float


class Link(NamedTuple):
    """A link to measure: the broker's URL, and this client's identity."""

    broker: str
    fleet: str
    device: str
    files: TlsFiles


def measured_profile(name: str, torch_device: str, directory: Path, link: Link | None = None) -> dict[str, object]:
    """The profile's fields, ready for YAML; ``directory``: on the disk to measure. Raises EdgeFLError."""
    notes: list[str] = []
    directory.mkdir(parents=True, exist_ok=True)
    machine = capabilities(directory)
    device = _device(torch_device)
    if device == "cpu":
        give_back_at_once()  # as a trainer's process does, whose large tensors are mapped each time
    rates, power, source = _training(device)
    speed: dict[str, object] = {
        "flops": _rounded(rates.flops),
        "operation_s": _rounded(rates.operation_s),
        "written_bytes": _rounded(rates.written_bytes),
        "machine": kind_of_machine(machine),
        "matmul": _matmul(device, notes),
    }
    if power is None:
        notes.append(f"power_w: {source}")
    elif source.startswith("ina3221"):  # the only one that is the whole device's
        speed["power_w"] = round(power, 2)
    else:
        notes.append(f"power_w: {power:.1f} W by {source}, which is not the whole device; add the rest by hand")
    speed |= _disk(directory)
    if link is not None:
        rate = asyncio.run(_link(link, notes))
        if rate is not None:
            speed |= {"down_bytes": rate, "up_bytes": rate}
    else:
        notes.append("down_bytes, up_bytes: no --broker was given")
    heat = temperature()
    sensors = {"energy": source, "temperature": heat.source if heat.value is not None else heat.reason}
    return {
        "name": name,
        "description": f"{machine.gpu or platform.processor() or machine.machine}, {machine.cores} cores, "
        f"{machine.memory_total_bytes / 2**30:.1f} GiB, {machine.runtime}",
        "date": f"{datetime.now(tz=timezone.utc):%Y-%m-%d}",
        "source": f"edgefl-agent profile on this device ({device})",
        "torch_device": device,
        "memory_bytes": machine.memory_total_bytes,
        **_gpu_memory(device),
        "speed": speed,
        "sensors": sensors,
        "notes": notes,
    }


def _gpu_memory(device: str, cuda: ModuleType | None = None) -> dict[str, object]:
    """Profile fields on GPU memory; {} for a CPU. ``cuda``: a stand-in for ``torch.cuda``."""
    if not device.startswith("cuda"):
        return {}
    gpu = gpu_of(cuda or torch.cuda, device)
    return {"unified": True} if gpu.shared else {"gpu_memory_bytes": gpu.total_bytes}


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def _training(device: str) -> tuple[Rates, float | None, str]:
    """(Rates of training steps, watts of the largest or None, the sensor or why there is none)."""
    made = [_trainer_step(device, size) for size in STEPS]
    spent: list[list[float]] = [[] for _ in made]
    for step, _ in made:
        step()
    until = time.perf_counter() + STEPS_S
    while not spent[0] or time.perf_counter() < until:
        for (step, _), times in zip(made, spent, strict=True):  # in turn, so that other load disturbs all alike
            times.append(_timed(step))
    seconds = [float(np.quantile(times, 0.25)) for times in spent]
    largest, _ = made[-1]
    with EnergyProbe(device) as energy:
        began = time.perf_counter()
        _seconds(largest)
        whole = time.perf_counter() - began
    figure = energy.figure()
    told = figure.source if figure.value is not None else figure.reason
    rates = rates_of([price for _, price in made], seconds)
    return rates, None if figure.value is None else figure.value / whole, told


def _trainer_step(device: str, size: StepSize) -> tuple[Callable[[], None], Priced]:
    """A step as the trainer takes it, and its price as the planner counts it."""
    names, tokens = ("acc", "gyro")[: size.modalities], size.tokens
    encoder = EncoderSpec(input_shape=(4 * tokens, 3), width=size.width, depth=size.depth, heads=4, patch=4)
    head = HeadSpec(width=size.width, out=32, dropout=0.0)
    model = ModelSpec(dict.fromkeys(names, encoder), size.depth, head, 32, 4, tuple("abcd"))
    schedule = choose("schedule", {})
    stage = schedule.bind(schedule.method.stages)(model, [1] * size.depth)[-1]
    job = Job(model, stage, Hyper(batch_size=size.rows, lr={"encoder": 1e-3, "head": 1e-3}), Slots())
    built = build(model, stage.present, device=device)
    prepare(built, stage.trained)
    optimizer = make_optimizer(built, stage.trained, job.hyper)
    inputs = {m: torch.randn(size.rows, 4 * tokens, 3, device=device) for m in names}
    labels = torch.arange(size.rows, device=device) % 4
    batch = Batch(size.rows, inputs, dict.fromkeys(names), labels, complete=size.rows)

    def step() -> None:
        train_step(built, job, batch, optimizer, Auxiliary())
        _wait(device)

    return step, price_step(job, dict.fromkeys(names, size.rows))


def rates_of(prices: Sequence[Priced], seconds: Sequence[float]) -> Rates:
    """Rates that explain the seconds of steps with these prices best, by relative error; none is negative.

    A step's seconds are the sum of its FLOPs, its operations and the bytes that it writes, each by its rate. Of three
    costs only those are taken that together come nearest; one that is not needed has the rate 0.
    """
    counts = np.array([(price.flops, price.operations, price.written) for price in prices])
    shares = counts / np.array(seconds)[:, None]
    best, found = math.inf, np.zeros(3)
    for chosen in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
        costs = np.zeros(3)
        costs[chosen] = np.linalg.lstsq(shares[:, chosen], np.ones(len(prices)), rcond=None)[0]
        error = float(np.square(shares @ costs - 1).sum())
        if (costs >= 0).all() and error < best:
            best, found = error, costs
    flop_s, operation_s, written_s = map(float, found)
    # Where the seconds tell nothing of the FLOPs, they take no longer than the largest step.
    flops = 1 / flop_s if flop_s else prices[-1].flops / seconds[-1]
    return Rates(flops, operation_s, 1 / written_s if written_s else 0.0)


def _matmul(device: str, notes: list[str]) -> dict[str, float]:
    """FLOPs a second of a product of square matrices, by type."""
    found = {}
    for name in ("float32", "float16", "bfloat16"):
        a = torch.randn(SIDE, SIDE, device=device).to(getattr(torch, name))

        def product(a: torch.Tensor = a) -> None:
            a @ a
            _wait(device)

        try:
            found[name] = _rounded(2 * SIDE**3 / _seconds(product))
        except RuntimeError as error:
            notes.append(f"matmul.{name}: {str(error).splitlines()[0]}")
    return found


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _seconds(work: Callable[[], None]) -> float:
    """Median seconds of ``work`` after a warm-up."""
    work()
    spent: list[float] = []
    until = time.perf_counter() + WORK_S
    while not spent or time.perf_counter() < until:
        spent.append(_timed(work))
    return statistics.median(spent)


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _disk(directory: Path) -> dict[str, int]:
    """Disk speeds in bytes a second: synced writes, and reads past the page cache if possible."""
    path = directory / f".edgefl-profile-{secrets.token_hex(4)}"
    block = secrets.token_bytes(2**20)
    try:
        started = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(DISK_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            write_s = time.perf_counter() - started
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(2**20):
                pass
        read_s = time.perf_counter() - started
    finally:
        path.unlink(missing_ok=True)
    return {
        "disk_write_bytes": int(_rounded(DISK_BYTES / write_s)),
        "disk_read_bytes": int(_rounded(DISK_BYTES / read_s)),
    }


async def _link(link: Link, notes: list[str]) -> int | None:
    """Link rate in bytes a second to the broker and back, of the slower way; None without an echo."""
    name = f"profile-{secrets.token_hex(4)}"
    topic = topics.build(
        "down-object", link.fleet, link.device, name
    )  # the device's own branch: no other client listens there
    transport = MqttTransport(link.broker, name, tls=link.files, clean_session=True)
    arrived, every = 0, asyncio.Event()

    def on_message(_topic: str, payload: bytes) -> None:
        nonlocal arrived
        arrived += len(payload)
        if arrived >= LINK_BYTES:
            every.set()

    transport.on_message = on_message
    try:
        await transport.connect()
        await transport.subscribe([topic])
        chunk = secrets.token_bytes(fitting_chunk_bytes(transport.max_payload, 96 * 1024))
        started = time.perf_counter()
        await asyncio.wait_for(_through(transport, topic, chunk, every), LINK_S)
        return int(_rounded(arrived / (time.perf_counter() - started)))
    except asyncio.TimeoutError:
        notes.append(f"down_bytes, up_bytes: the broker gave back {arrived} of {LINK_BYTES} bytes in {LINK_S:.0f} s")
    except BrokerError as error:
        notes.append(f"down_bytes, up_bytes: {error.message}")
    finally:
        await transport.close()
    return None


async def _through(transport: MqttTransport, topic: str, chunk: bytes, every: asyncio.Event) -> None:
    """Publish chunks with the usual number in flight, and wait for all to come back."""
    waiting: set[asyncio.Task[None]] = set()
    for _ in range(-(-LINK_BYTES // len(chunk))):
        if len(waiting) >= DEFAULT_CREDIT:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        waiting.add(asyncio.ensure_future(transport.publish(topic, chunk)))
    await asyncio.gather(*waiting)
    await every.wait()


def _rounded(value: float) -> float:
    """The value rounded to three digits: more are not repeatable."""
    return float(f"{value:.3g}")
