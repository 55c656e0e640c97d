"""A simulated fleet whose devices take their steps together: the same to rounding, and the same bill."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from memory_fleet import share
from test_in_process import FIELDS, Ended, bill, ended, scores

import edgefl
from edgefl.aggregation.history import KEY
from edgefl.api.local_run import LocalOptions, LocalRun
from edgefl.api.simulation import drawn_fleet, kinds_of
from edgefl.errors import ConfigError
from edgefl.protocol.tensors import decode_part
from edgefl.storage.disk import JOINT_STEPS
from edgefl.storage.objects import ObjectStore
from edgefl.training import joint_trial

TRAINING: dict[str, Any] = {"rounds": [1, 2], "batch_size": 6, "holdout": 0.2, "optimizer": "sgd", "epochs": 2}
CROWD: dict[str, Any] = {
    "fleet": drawn_fleet(40, kinds_of(["cpu"])),
    "data": {"partition": {"drawn": {"each": 12}}},
    "slots": {"select": {"random": {"share": 0.2}}},
}


class Seen(NamedTuple):
    run: Ended
    told: list[str]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("joint")
    share(160, {"a": 1.0, "b": 1.0}, seed=5).save_npz(place / "all.npz")
    return place


@pytest.fixture(autouse=True)
def _whatever_it_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_trial, "LEAST_GAIN", 0.0)


def fields(source: Path, **more: Any) -> dict[str, Any]:
    data = {"source": source / "all.npz", **more.pop("data", {})}
    fleet = [{"name": f"box-{n}"} for n in range(5)]
    return {**FIELDS, "fleet": fleet, "round": {"join_s": 60}, "training": TRAINING, **more, "data": data}


def run_in(place: Path, source: Path, *, joint: bool, **more: Any) -> Seen:
    told: list[str] = []
    given: dict[str, Any] = {"on_event": lambda _: None} | more.pop("options", {})

    def seen(event: edgefl.EventRow) -> None:
        if event.kind in {"joint_steps", "warning"}:
            told.append(str(event.data["text"]))
        given["on_event"](event)

    options = {"directory": place, "in_process": True, "joint_steps": joint} | given | {"on_event": seen}
    run = edgefl.run(fields(source, **more), export=False, page=False, **options)
    return Seen(ended(run), told)


def last_weights(run: Ended) -> dict[str, np.ndarray]:
    store = ObjectStore(run.directory / "objects")
    refs = {part: ref for part, ref in run.states[max(run.states)].items() if part != KEY}
    return {f"{part}|{n}": v for part, ref in refs.items() for n, v in decode_part(store.read(ref.id)).items()}


def check_near(one: Ended, other: Ended, tolerance: float = 1e-4) -> None:
    """Weights and scores to rounding."""
    assert other.states.keys() == one.states.keys()
    found = last_weights(other)
    for name, value in last_weights(one).items():
        np.testing.assert_allclose(found[name], value, atol=tolerance, rtol=tolerance, err_msg=name)
    for mine, its in zip(scores(other.report), scores(one.report), strict=True):
        assert mine.value == pytest.approx(its.value, abs=0.04)
    assert {row.status for row in other.report.assignments} == {"done"}


def check_same(one: Ended, other: Ended, tolerance: float = 1e-4) -> None:
    """The same to rounding; who did what, and its bill, exactly."""
    check_near(one, other, tolerance)
    assert bill(other.report) == bill(one.report)


@pytest.mark.timeout(180)
def test_a_run_with_joint_steps_is_the_same_to_rounding_and_says_what_it_does(source: Path, tmp_path: Path) -> None:
    """Default heads; a device that lacks a sensor goes by itself in the same rounds."""
    more: dict[str, Any] = {"recipe": "lw-fedmml", "data": {"missing": {"rate": 0, "devices": {"box-3": ["b"]}}}}
    plain = run_in(tmp_path / "plain", source, joint=False, **more)
    joint = run_in(tmp_path / "joint", source, joint=True, **more)
    check_same(plain.run, joint.run)
    assert last_weights(plain.run).keys() == last_weights(joint.run).keys()
    assert plain.told == []
    assert [text.partition(",")[0] for text in joint.told] == [
        f"stage {stage}: steps of 4 devices are taken together" for stage in (1, 2)
    ]
    assert not (plain.run.directory / JOINT_STEPS).exists()
    for row in joint.run.report.assignments:
        assert row.measured["compute_s"].value > 0
        assert row.measured["energy_j"].reason == "several devices train together"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", ["end_to_end", "prog-fedmml", "lw-zeros", "mmic", "fedprox"])
def test_other_recipes_and_a_crowd(source: Path, tmp_path: Path, recipe: str) -> None:
    """Those whose steps have state of their own go one by one, and say why."""
    more = {"recipe": recipe, **(CROWD if recipe == "end_to_end" else {})}
    plain = run_in(tmp_path / "plain", source, joint=False, **more)
    joint = run_in(tmp_path / "joint", source, joint=True, **more)
    # Of all parts in every stage, roundings grow from step to step: in f64 updates are equal to 1e-9.
    check_same(plain.run, joint.run, 2e-3 if recipe == "prog-fedmml" else 1e-4)
    alone = {"mmic": "an observer of the steps", "fedprox": "a loss with state of its own"}.get(recipe, "")
    assert [alone in text if alone else "taken together" in text for text in joint.told]
    if alone:
        assert joint.run.states == plain.run.states


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_devices_that_a_trial_sends_on_their_own_way_are_what_they_were(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit, although their rounds halt and share a model's modules."""
    monkeypatch.setattr(joint_trial, "LEAST_GAIN", 1e9)
    plain = run_in(tmp_path / "plain", source, joint=False, recipe="lw-fedmml")
    joint = run_in(tmp_path / "joint", source, joint=True, recipe="lw-fedmml")
    assert joint.run.states == plain.run.states
    assert scores(joint.run.report) == scores(plain.run.report)
    assert bill(joint.run.report) == bill(plain.run.report)
    assert ["one by one: those of 5 devices together are" in text for text in joint.told] == [True, True]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_goes_on_keeps_the_way_it_had(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option, and without another trial."""

    class CutError(Exception):
        pass

    def cut(event: edgefl.EventRow) -> None:
        if event.kind == "update" and (event.stage, event.round) == (2, 2):
            raise CutError

    more: dict[str, Any] = {"recipe": "lw-fedmml"}
    whole = run_in(tmp_path / "whole", source, joint=True, **more)
    with pytest.raises(CutError):
        run_in(tmp_path / "cut", source, joint=True, options={"on_event": cut}, **more)
    (begun,) = (tmp_path / "cut").iterdir()
    monkeypatch.setattr(joint_trial, "trial", None)
    went_on = run_in(tmp_path / "cut", source, joint=False, options={"resume": begun.name}, **more)
    check_near(whole.run, went_on.run)
    assert any("steps of 5 devices are taken together" in text for text in went_on.told)
    plain = run_in(tmp_path / "plain", source, joint=False, **more)
    again = run_in(tmp_path / "plain", source, joint=True, options={"resume": plain.run.directory.name}, **more)
    assert any("not used: --joint-steps" in text for text in again.told)


@pytest.mark.parametrize(
    ("more", "options", "told"),
    [
        ({}, {"in_process": False}, "--joint-steps: is of a fleet in one process"),
        ({}, {"workers": 2}, "--joint-steps: takes the devices of a round together"),
        ({"rounds": "async", "round": {"buffer": 2}}, {}, "--joint-steps: takes the devices of a round together"),
    ],
)
def test_what_joint_steps_have_no_sense_with_is_refused(
    source: Path, tmp_path: Path, more: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    asked = LocalOptions(fields(source, **more), runs=tmp_path, **{"in_process": True, "joint_steps": True, **options})
    with pytest.raises(ConfigError, match=told):
        LocalRun(asked, lambda _: None)
    assert not list(tmp_path.iterdir())
