"""The trainer as a real child process: warm, one small real round, refusals, the memory ceiling, and its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from coordinator.core.plausibility import plausible
from device_agent.board import Board
from device_agent.core.state import Result, Train
from device_agent.runtime.trainer_process import TrainerProcess, TrainerSettings, TrainRequest, WarmRequest
from device_agent.trainer import local_trainer
from device_agent.trainer.local_trainer import LocalTrainer
from device_agent.trainer.process import Trainers, _check_cuda
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, WorkerError
from edgefl.findings import FINDINGS
from edgefl.models.checkpoints import initial_parts
from edgefl.models.spec import EncoderSpec, HeadSpec, ModelSpec, part_names
from edgefl.plan.job import Hyper, Job, Preparation, Slots, Stage
from edgefl.process.worker import WorkerFailedError
from edgefl.protocol.messages import Offer
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import NOT_TRAINED, Attempt, Budget, Figure
from edgefl.resources.process_memory import ceiling_bytes, idle_rss_bytes
from edgefl.storage.objects import ObjectStore
from edgefl.training.local_round import AbandonedError

SENSOR = EncoderSpec(input_shape=(16, 3), width=8, depth=1, heads=2, patch=4)
MODEL = ModelSpec({"acc": SENSOR, "gyro": SENSOR}, 1, HeadSpec(8, 4), 8, classes=2, label_names=("run", "rest"))
#: Its heads alone are 8 MiB: more than freed memory of the rounds before can hide.
LARGE = replace(MODEL, head=HeadSpec(1024, 4))
TOTAL = 2**40


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A small data set on disk, without gyroscope, and a store with the model's initial parts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rng = np.random.default_rng(0)
    labels = np.arange(20) % 2
    values = rng.normal(size=(20, 16, 3)).astype(np.float32) + labels[:, None, None].astype(np.float32)
    present = np.ones(20, dtype=bool)
    ids = [str(i) for i in range(20)]
    Dataset({"acc": values}, {"acc": present}, labels.astype(np.int64), ("rest", "run"), ids).save_npz(
        tmp_path / "data.npz"
    )
    return tmp_path


def offer_of(store, batch_size=4, model=MODEL) -> Offer:
    manifest = {name: store.put(encode_part(tensors)) for name, tensors in initial_parts(model, 0)}
    names = tuple(part_names(model))
    trained = tuple(name for name in names if "gyro" not in name)
    hyper = Hyper(epochs=2, batch_size=batch_size, lr={"encoder": 1e-2, "head": 1e-2})
    slots = Slots({"cross_entropy": {"weight": 1.0}}, {"zero": {}}, {"class_mean": {}})
    return Offer(Attempt("r", 1, 1, 1), 60.0, Job(model, Stage(1, 1, 1, names, trained), hyper, slots), manifest)


def settings(place, **changes) -> TrainerSettings:
    data, objects, log = (str(place / name) for name in ("data.npz", "objects", "trainer.log"))
    return replace(TrainerSettings("d1", data, objects, log, torch_device="cpu"), **changes)


def test_a_real_child_warms_trains_refuses_and_is_killed_at_its_ceiling(place):
    async def scene():
        store = ObjectStore(place / "objects")
        trainer = TrainerProcess(settings(place), TOTAL)
        try:
            facts = await trainer.warm(Preparation())
            assert (facts.modalities, facts.samples) == ({"acc": (16, 3)}, {"": 20, "acc": 20})
            assert (facts.class_counts, facts.label_names) == ((10, 10), ("rest", "run"))
            assert facts.base_bytes > 50e6  # torch is in it
            await check_round(trainer, store)
            await check_refusals(trainer, store)
            trainer.settings = settings(place, budget=Budget(step_memory_bytes=1))
            result, alive = await trainer.train(Train(offer_of(store, model=LARGE)), lambda _: None)
            assert not alive
            assert result.refusal.reason == "ceiling"
            assert result.refusal.allowed > facts.base_bytes
            assert result.refusal.needed > result.refusal.allowed
            assert result.figures["process_peak_bytes"].value == result.refusal.needed
        finally:
            await trainer.stop()

    asyncio.run(scene())


async def check_round(trainer, store):
    """One real round: progress after each step, new parts in the store, figures that say where they come from."""
    steps = []
    offer = offer_of(store)
    result, alive = await trainer.train(Train(offer), steps.append)
    assert alive
    assert result.refusal is None, result.refusal
    assert [note.step for note in steps] == list(range(1, 11))  # 20 samples, batches of 4, 2 epochs
    assert set(result.manifest) == {*offer.job.stage.trained, "prototypes"}
    assert result.samples["acc/embed"] == 20
    before, after = (decode_part(store.read(m["task"].id)) for m in (offer.manifest, result.manifest))
    assert any((before[name] != after[name]).any() for name in before)
    figures = result.figures
    assert figures["flops"].kind == "counted"
    assert figures["flops"].value > 0
    assert figures["process_peak_bytes"].value > figures["step_peak_bytes"].value > 0
    assert all(figure.value is not None or figure.reason for figure in figures.values())
    again, _ = await trainer.train(Train(offer), lambda _: None)
    assert again.manifest == result.manifest  # the same round gives the same parts


async def check_refusals(trainer, store):
    """A share that fills no batch: both numbers. A part that is not here: an error that names it. The trainer lives."""
    result, alive = await trainer.train(Train(offer_of(store, batch_size=32)), lambda _: None)
    assert (result.refusal.reason, result.refusal.needed, result.refusal.allowed) == ("data", 32.0, 20.0)
    assert alive
    whole = offer_of(store)
    other = replace(whole.job, slots=Slots({"gmc2": {}}))
    result, alive = await trainer.train(Train(replace(whole, job=other)), lambda _: None)
    assert (alive, result.refusal.reason) == (True, "method")
    assert result.refusal.detail == "not installed on this device: objective: gmc2"
    result, alive = await trainer.train(Train(replace(whole, manifest={})), lambda _: None)
    assert alive
    assert result.refusal.reason == "error"
    assert result.refusal.detail


def test_missing_data_is_told_as_such(place):
    async def scene():
        trainer = TrainerProcess(settings(place, data=str(place / "none.npz")), TOTAL)
        try:
            with pytest.raises(WorkerFailedError, match=r"none\.npz") as caught:
                await trainer.warm(Preparation())
            assert (caught.value.kind, caught.value.status) == ("DataError", None)
        finally:
            await trainer.stop()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("budget", "base", "limit"),
    [
        (Budget(), 100, None),
        (Budget(memory_bytes=500), 100, 500),
        (Budget(step_memory_bytes=50), 100, 150),
        (Budget(memory_bytes=120, step_memory_bytes=50), 100, 120),
    ],
)
def test_the_ceiling_is_the_smaller_of_both_limits(budget, base, limit):
    assert ceiling_bytes(budget, base) == limit


def test_the_room_for_reading_files_again_belongs_to_the_base(tmp_path):
    """A folder is read again under a round's ceiling, to the model's shapes; arrays of a file stay on disk."""
    (tmp_path / "folder").mkdir()
    rows, found = 1024, {}
    for data in ("folder", "data.npz"):
        values, present = np.ones((rows, 1024, 16), np.float32), np.ones(rows, dtype=bool)  # 64 MiB
        labels, ids = np.arange(rows) % 2, [str(i) for i in range(rows)]
        whole = [Dataset({"acc": values}, {"acc": present}, labels, ("rest", "run"), ids)]
        del values
        trainer = LocalTrainer(settings(tmp_path, data=str(tmp_path / data)), whole.pop())
        found[data] = trainer.warm().base_bytes - idle_rss_bytes()
    assert found["folder"] > 60 * 2**20
    assert found["data.npz"] < 4 * 2**20


@pytest.mark.parametrize(
    ("machine", "kind", "words"),
    [
        (Board(), ConfigError, "asks for cuda; no GPU is here"),
        (Board(cards=True), WorkerError, "does not reach an NVIDIA card"),  # a restart later in the boot may mend it
    ],
)
def test_cuda_that_is_asked_for_and_not_there_is_told_in_doctors_words(place, monkeypatch, machine, kind, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr("device_agent.board.board", lambda: machine)
    asked = WarmRequest(settings(place, torch_device="cuda"))
    with pytest.raises(kind, match=words) as raised:
        Trainers().warm(msgspec.to_builtins(asked), lambda body: None)
    assert raised.value.remedy == FINDINGS["torch-no-driver" if machine.cards else "torch-no-gpu"].remedy
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    _check_cuda()  # then it is the GPU's


def test_the_trainer_dies_with_its_agent_even_when_its_input_stays_open(place):
    read, write = os.pipe()  # this test holds the writing end, so the trainer never sees the end of its input
    child = [sys.executable, "-m", "device_agent.trainer.process"]
    script = (
        "import os, subprocess, sys, time; "
        f"p = subprocess.Popen({child!r} + ['--parent', str(os.getpid())], stdin={read}, close_fds=False); "
        "print(p.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], pass_fds=(read,), stdout=subprocess.PIPE)
    try:
        pid = int(parent.stdout.readline())
        wait_until(lambda: b"device_agent.trainer.process" in command_line(pid) and handles_sigusr1(pid))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        wait_until(lambda: not command_line(pid))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        os.close(read)
        os.close(write)


def handles_sigusr1(pid) -> bool:
    """The last thing the trainer does before it serves is to install this handler."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)


def command_line(pid) -> bytes:
    """Empty for a process that is gone, or a zombie nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_until(condition, timeout=20.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_a_round_abandoned_while_its_prefix_is_stored_has_no_implausible_figure(place, monkeypatch):
    def fills(*_, **__):
        error = AbandonedError("left off")
        error.flops = 1e6
        raise error

    monkeypatch.setattr(local_trainer, "begin_round", fills)
    request = TrainRequest(settings(place), offer_of(ObjectStore(place / "objects")))
    figures = Trainers(alone=False).train(msgspec.to_builtins(request), lambda _: None).figures
    assert figures["flops"].value == 1e6
    assert figures["compute_s"].reason == NOT_TRAINED
    assert plausible(figures, {}, partial=True) == (figures, [])


@pytest.mark.parametrize(
    ("budget", "peaks", "refused"),
    [
        (Budget(step_memory_bytes=2**30), (2**30 + 1, 2**29), (2**30 + 1, 2**30)),
        (Budget(memory_bytes=2**33), (2**20, 2**33 + 1), (2**33 + 1, 2**33)),
        (Budget(step_memory_bytes=2**30, memory_bytes=2**33), (2**30, 2**33), None),
        (Budget(), (2**40, 2**40), None),
    ],
)
def test_a_round_whose_peak_was_too_short_for_the_watch_is_refused_with_both_numbers(
    place, monkeypatch, budget, peaks, refused
):
    figures = {
        name: Figure(float(peak)) for name, peak in zip(("step_peak_bytes", "process_peak_bytes"), peaks, strict=True)
    }

    async def trained(*_):
        return Result(manifest={}, samples={"task": 4}, figures=figures)

    async def scene():
        trainer = TrainerProcess(settings(place, budget=budget), TOTAL)
        monkeypatch.setattr(trainer, "_rehearses", False)
        try:
            return await trainer.train(Train(offer_of(ObjectStore(place / "objects"))), lambda _: None)
        finally:
            await trainer.stop()

    monkeypatch.setattr("device_agent.runtime.trainer_process.train_in", trained)
    result, alive = asyncio.run(scene())
    assert alive
    assert result.figures == figures
    if refused is None:
        assert (result.refusal, result.samples) == (None, {"task": 4})
    else:
        assert (result.refusal.reason, result.refusal.needed, result.refusal.allowed) == ("ceiling", *refused)
        assert (result.manifest, result.samples) == ({}, {})
