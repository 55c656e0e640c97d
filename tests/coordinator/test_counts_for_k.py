"""The coordinator and the devices' counts for the choice of k: summed, bounded, and remembered over a restart."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import msgspec
from coordinator_fixture import a_plan
from test_coordinator_runner import Scene, played

from edgefl.plan.job import Hyper, RunPlan, Slots
from edgefl.run_records import RunReport

CHOSEN = {"class_mean": {"k": 0.0}}
#: A quarter of 20 samples: 5 are judged, with the one modality there is.
HYPER = Hyper(batch_size=4, holdout=0.25)


def plan(prototypes: dict[str, dict[str, float | str]] = CHOSEN) -> RunPlan:
    slots, server = Slots(prototypes=prototypes), {"prototypes": prototypes}
    return a_plan(slots=slots, server=server, hypers=(HYPER, HYPER))


def counts(judged: float, one: float, two: float) -> dict[str, float]:
    return {"received_judged_with_k": judged, "received_right_with_k_1": one, "received_right_with_k_2": two}


def run_of(place: Path, devices: dict[str, dict[str, float]], made: RunPlan) -> tuple[Scene, RunReport]:
    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        for name, metrics in devices.items():
            await scene.device(name, samples=20, metrics=metrics)
        report = await scene.coordinator(made)

    return played(place, script), report


def test_a_liar_is_ignored_with_the_reason_and_its_update_counts(tmp_path: Path) -> None:
    devices = {"a": counts(5, 2, 4), "b": counts(5, 3, 3), "liar": counts(6, 6, 0)}
    scene, report = run_of(tmp_path, devices, plan())
    choice = {"k": 2, "right": {"1": 5, "2": 7}, "judged": 10, "devices": ["a", "b"]}
    assert [row.record.get("choice_of_k") for row in report.rounds] == [choice] * 3
    assert all(row.participants == ("a", "b", "liar") for row in report.rounds)
    warned = [event.data["text"] for event in report.events if event.kind == "warning"]
    text = "its counts for the choice of k are ignored: 6 held-out samples judged, it has 5 at most"
    assert [one for one in warned if "choice of k" in one] == [f"liar: {text}"]
    (row, *_) = [one for one in report.assignments if one.device == "liar"]
    assert row.metrics == {"loss": 1.0}
    offers = scene.devices["a"].offers
    assert [offer.job.k for offer in offers] == [msgspec.UNSET, 2, 2]


def test_the_largest_lie_that_can_be_told_weighs_as_its_hold_out(tmp_path: Path) -> None:
    devices = {"a": counts(5, 1, 4), "b": counts(5, 1, 4), "liar": counts(5, 5, 0)}
    _, report = run_of(tmp_path, devices, plan())
    assert report.rounds[0].record["choice_of_k"]["right"] == {"1": 7, "2": 8}
    assert report.rounds[0].record["choice_of_k"]["k"] == 2


def test_counts_that_no_recipe_asks_for_choose_nothing(tmp_path: Path) -> None:
    scene, report = run_of(tmp_path, {"a": counts(5, 1, 4), "b": {}}, plan({"class_mean": {"k": 2.0}}))
    assert not any("choice_of_k" in row.record for row in report.rounds)
    assert {offer.job.k for offer in scene.devices["a"].offers} == {msgspec.UNSET}


def test_a_coordinator_that_begins_again_goes_on_with_the_same_k(tmp_path: Path) -> None:
    """It stops with a round open in which one device's counts are in and the other's are not."""
    report = RunReport()

    async def script(scene: Scene) -> None:
        nonlocal report
        devices = [await scene.device(name, samples=20, hold=True) for name in ("a", "b")]
        task = asyncio.ensure_future(scene.coordinator(plan()))
        await scene.received(stage=1)
        for device in devices:
            device.metrics = counts(5, 1, 3)
            device.train()
        await scene.received(stage=2)
        devices[0].metrics, devices[1].metrics = counts(5, 4, 3), counts(5, 1, 5)
        devices[0].train()
        await scene.until(lambda: len(devices[0].acks) == 2)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        for device in devices:
            device.hold = False
        going_on = asyncio.ensure_future(scene.coordinator(plan(), resume=True))
        devices[1].train()
        report = await going_on
        assert [offer.job.k for offer in devices[0].offers][:2] == [msgspec.UNSET, 2]

    played(tmp_path, script)
    choices = [row.record["choice_of_k"] for row in report.rounds]
    assert [(choice["k"], choice["right"]) for choice in choices] == [
        (2, {"1": 2, "2": 6}),
        (2, {"1": 5, "2": 8}),
        (2, {"1": 5, "2": 8}),
    ]
