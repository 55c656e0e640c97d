"""A round's rehearsal: under its ceiling, with the parts of the round alone, its faults told, nothing left."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest
from msgspec.structs import replace
from test_trainer_process import MODEL, SENSOR, TOTAL, offer_of, place, settings  # noqa: F401 - place is a fixture

from device_agent.core.state import NOTHING_TRAINED, Train
from device_agent.runtime import trainer_process
from device_agent.runtime.trainer_process import TrainerProcess, TrainRequest
from device_agent.trainer import local_trainer
from device_agent.trainer.local_trainer import LocalTrainer
from edgefl.data.sources import load
from edgefl.models.spec import HeadSpec
from edgefl.plan.job import Preparation, Stage, Transfer
from edgefl.plan.stages import RESIDUAL
from edgefl.records import Budget
from edgefl.storage.objects import ObjectStore
from edgefl.training import local_round

#: A trainer whose rehearsal takes 400 MiB.
HUNGRY = """from pathlib import Path

import numpy as np

from device_agent.trainer import local_trainer, process


def rehearse(self, offer):
    with (Path(self.settings.store).parent / "rehearsals").open("a") as told:
        told.write("1")
    kept = [np.ones(2**17) for _ in range(400)]

local_trainer.LocalTrainer.rehearse = rehearse
process.main()
"""

#: A trainer whose encoders are of a library with 150 MiB of modules.
LIBRARY = """import numpy as np

from device_agent.trainer import local_trainer, process

modules = []
train = local_trainer.LocalTrainer.train


def cut_of(encoder):
    if not modules:
        modules.append(np.ones(150 * 2**17))


def train_with_modules(self, request, note):
    cut_of(None)
    return train(self, request, note)

local_trainer.library_encoders = lambda offer: (None,)
local_trainer.cut_of = cut_of
local_trainer.LocalTrainer.train = train_with_modules
process.main()
"""


def test_a_librarys_modules_are_loaded_outside_the_ceiling(place):  # noqa: F811
    """They belong to no step: a device with room for the step alone trains, and its trainer lives."""
    (place / "library.py").write_text(LIBRARY)

    async def scene():
        store = ObjectStore(place / "objects")
        trainer = TrainerProcess(settings(place, budget=Budget(step_memory_bytes=100 * 2**20)), TOTAL, "library")
        trainer._worker.env["PYTHONPATH"] = os.pathsep.join([str(place), *sys.path])
        try:
            await trainer.warm(Preparation())
            first = trainer._worker.pid
            result, alive = await trainer.train(Train(offer_of(store)), lambda _: None)
            assert (alive, result.refusal) == (True, None)
            assert trainer._worker.pid == first
        finally:
            await trainer.stop()

    asyncio.run(scene())


def test_a_rehearsal_over_the_ceiling_costs_its_own_child_only(place):  # noqa: F811
    """Killed in a rehearsal: a new child trains the round without one, and rounds after it, too."""
    code = place / "hungry.py"
    code.write_text(HUNGRY)

    async def scene():
        store = ObjectStore(place / "objects")
        trainer = TrainerProcess(settings(place, budget=Budget(step_memory_bytes=100 * 2**20)), TOTAL, "hungry")
        trainer._worker.env["PYTHONPATH"] = os.pathsep.join([str(place), *sys.path])
        try:
            await trainer.warm(Preparation())
            first = trainer._worker.pid
            result, alive = await trainer.train(Train(offer_of(store)), lambda _: None)
            second = trainer._worker.pid
            again = await trainer.train(Train(offer_of(store)), lambda _: None)
            assert (alive, result.refusal, again.result.refusal) == (True, None, None)
            assert first != second == trainer._worker.pid
            assert (place / "rehearsals").read_text() == "1"
        finally:
            await trainer.stop()

    asyncio.run(scene())


def test_a_child_killed_as_it_answers_a_rehearsal_is_no_rounds_end(place, monkeypatch):  # noqa: F811
    killed = []

    class Late(trainer_process.Ceiling):
        def stop(self):
            super().stop()
            if not killed:
                killed.append(self.pid)
                self._kill()

    monkeypatch.setattr(trainer_process, "Ceiling", Late)

    async def scene():
        store = ObjectStore(place / "objects")
        trainer = TrainerProcess(settings(place), TOTAL)
        try:
            await trainer.warm(Preparation())
            first = trainer._worker.pid
            result, alive = await trainer.train(Train(offer_of(store)), lambda _: None)
            assert (alive, result.refusal) == (True, None)
            assert killed == [first] != [trainer._worker.pid]
        finally:
            await trainer.stop()

    asyncio.run(scene())


def test_a_round_left_off_in_its_rehearsal_takes_no_step(place):  # noqa: F811
    async def scene():
        store, steps = ObjectStore(place / "objects"), []
        trainer = TrainerProcess(settings(place), TOTAL)
        try:
            await trainer.warm(Preparation())
            training = asyncio.create_task(trainer.train(Train(offer_of(store)), steps.append))
            await asyncio.sleep(0)
            trainer.interrupt()
            result, alive = await training
            assert (alive, result.refusal.reason, steps) == (True, "abandoned", [])
            assert result.figures == NOTHING_TRAINED
            result, _ = await trainer.train(Train(offer_of(store)), steps.append)
            assert result.refusal is None
        finally:
            await trainer.stop()

    asyncio.run(scene())


def test_a_rehearsal_holds_the_parts_of_its_round_alone_and_leaves_nothing(place, monkeypatch, capsys):  # noqa: F811
    """Stored prefixes: the embedding goes, as in the round; no object is left; a fault is told and harms nothing."""
    store = ObjectStore(place / "objects")
    model = replace(MODEL, stages=2, encoders={m: replace(SENSOR, depth=2) for m in MODEL.encoders})
    whole = offer_of(store, model=model)
    names = whole.job.stage.present
    stage = Stage(2, 1, 2, names, tuple(n for n in names if "gyro" not in n and "embed" not in n and "stage1" not in n))
    offer = replace(whole, job=replace(whole.job, stage=stage, hyper=replace(whole.job.hyper, cache="f16")))
    trainer, built, before = LocalTrainer(settings(place), load(str(place / "data.npz"))), [], objects_in(place)
    trainer.warm()
    build = local_round.build

    def noted(model, parts, **how):
        built.append(tuple(parts))
        return build(model, parts, **how)

    monkeypatch.setattr(local_round, "build", noted)
    trainer.rehearse(offer)
    rehearsed = list(built)
    built.clear()
    assert objects_in(place) == before
    assert rehearsed
    assert capsys.readouterr().err == ""
    trainer.rehearse(offer)
    assert built == []  # once in a process
    result = trainer.train(TrainRequest(trainer.settings, offer), lambda _: None)
    assert result.refusal is None
    assert set(rehearsed) == set(built)
    assert "acc/embed" not in built[0]
    local_trainer._REHEARSED.clear()
    monkeypatch.setattr(local_trainer, "rehearse", lambda *_: raised_by(MemoryError("short of memory")))
    trainer.rehearse(offer)
    assert "a round was not rehearsed: short of memory" in capsys.readouterr().err


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in ("prototypes, residuals", "micro-batches, hold-out")]


@pytest.mark.parametrize("case", ["stored prefixes", *SLOW])
def test_rounds_are_the_same_to_the_bit_after_a_rehearsal(place, monkeypatch, case):  # noqa: F811
    monkeypatch.setattr(local_trainer, "_REHEARSED", set())
    offers = offers_of(ObjectStore(place / "objects"), case)
    rounds = {}
    for rehearses in (False, True):
        trainer = LocalTrainer(settings(place), load(str(place / "data.npz")))
        if rehearses:
            trainer.rehearse(offers[0])
        kept, rounds[rehearses] = {}, []
        for offer in offers:
            result = trainer.train(TrainRequest(trainer.settings, offer, kept), lambda _: None)
            assert result.refusal is None
            kept = result.retained
            told = (result.manifest, kept, result.metrics, result.samples, result.observed, result.figures["flops"])
            rounds[rehearses].append(told)
        assert any(name.startswith(RESIDUAL) for name in kept) == ("residuals" in case)
    assert local_trainer._REHEARSED
    assert rounds[True] == rounds[False]


@pytest.mark.slow
def test_a_rehearsal_leaves_what_equals_an_object_of_its_own(place, monkeypatch):  # noqa: F811
    """Such as parts that did not change, as an earlier process packed them: their upload may not be over."""
    monkeypatch.setattr(local_trainer, "_REHEARSED", set())
    whole = offers_of(ObjectStore(place / "objects"), "prototypes, residuals")[0]
    hyper = replace(whole.job.hyper, lr={"encoder": 0.0, "head": 0.0})
    offer = replace(whole, job=replace(whole.job, hyper=hyper))
    trainer = LocalTrainer(settings(place), load(str(place / "data.npz")))
    result = trainer.train(TrainRequest(trainer.settings, offer), lambda _: None)
    assert result.refusal is None
    before = objects_in(place)
    LocalTrainer(settings(place), load(str(place / "data.npz"))).rehearse(offer)
    assert objects_in(place) == before


def offers_of(store, case):
    """Those of two rounds in a row."""
    encoders = {m: replace(SENSOR, depth=2, dropout=0.1) for m in MODEL.encoders}
    model = replace(MODEL, stages=2, encoders=encoders, head=HeadSpec(128, 64))  # large enough to be packed
    offer = offer_of(store, model=model)
    job = offer.job
    if "residuals" in case:
        job = replace(
            job, transfer=Transfer(up=(("*", "delta+eden4"),)), slots=replace(job.slots, prototypes={"class_mean": {}})
        )
    if "prefixes" in case:
        names = job.stage.present
        trained = tuple(n for n in names if "gyro" not in n and "embed" not in n and "stage1" not in n)
        job = replace(job, stage=Stage(2, 1, 2, names, trained), hyper=replace(job.hyper, cache="f16"))
    if "micro" in case:
        job = replace(job, hyper=replace(job.hyper, micro_batch=2, holdout=0.2))
    later = replace(offer.attempt, round=2)
    return replace(offer, job=job), replace(offer, job=job, attempt=later)


def objects_in(folder) -> set[str]:
    return {path.name for path in (folder / "objects").rglob("*") if path.is_file() and path.name != "boot"}


def raised_by(error):
    raise error
