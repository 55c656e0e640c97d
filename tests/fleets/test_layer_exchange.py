"""One-layer exchange in whole fleets: its bytes, which layer trains on where, and that what is lent acts."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from memory_fleet import plan_of, run_fleet, share, state_of

from coordinator.ledger.ledger import Ledger
from edgefl.errors import ConfigError
from edgefl.models.spec import LAYERS
from edgefl.records import Manifest
from edgefl.report.repairs import lent
from edgefl.run_records import RoundRow, RunReport

WIDE = [f"model.encoders.{m}.{field}" for m in "ab" for field in ("width=32", "depth=4")]
#: Six rounds: a period of four, and one that the stage's end cuts to two.
SETTINGS = [*WIDE, "training.rounds=[6, 0]", "training.epochs=2"]
INSIDE = (2, 3)
#: What of a device's round the layer may be, beside what is exchanged whole.
SHARE = 1 / 20
PATCHY = {"one": {"a": 0.6, "b": 0.9}, "two": {"a": 0.9, "b": 0.5}, "three": {"a": 0.7, "b": 0.7}}


def run(directory: Path, recipe: str, overrides: list[str] | None = None) -> RunReport:
    directory.mkdir()
    plan = plan_of(directory, recipe, "ab", len(PATCHY), [*SETTINGS, *(overrides or [])])
    shares = {name: share(40, present, seed) for seed, (name, present) in enumerate(PATCHY.items())}
    return run_fleet(directory, plan, shares)


class Traffic(NamedTuple):
    up: float
    down: float


def traffic(report: RunReport, number: int) -> dict[str, Traffic]:
    rows = [row for row in report.assignments if row.round == number and row.status == "done"]
    ways = ("payload_up_bytes", "payload_down_bytes")
    return {row.device: Traffic(*(row.measured[way].value or 0.0 for way in ways)) for row in rows}


def done(report: RunReport) -> dict[int, RoundRow]:
    return {row.round: row for row in report.rounds if row.status == "done"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    return run(tmp_path_factory.mktemp("whole") / "run", "end_to_end")


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunReport]:
    directory = tmp_path_factory.mktemp("layers") / "run"
    return directory, run(directory, "mmic-layer")


def test_inside_a_period_a_device_moves_a_twentieth_of_what_averaging_moves(whole: RunReport, layers):
    _, report = layers
    for number in INSIDE:
        for device, moved in traffic(report, number).items():
            usual = traffic(whole, number)[device]
            assert 0 < moved.up <= SHARE * usual.up
            assert moved.down <= SHARE * usual.down
    usual = traffic(whole, 1)["one"]
    for number, up, down in ((1, False, True), (4, True, False), (5, False, True), (6, True, False)):
        for moved in traffic(report, number).values():
            assert (moved.up > 0.9 * usual.up) == up
            assert (moved.down > 0.9 * usual.down) == down


def test_a_device_trains_on_from_a_layer_that_is_not_its_own(layers):
    """By hash: what it receives is an object of its own name, which it did not send."""
    directory, report = layers
    rows = done(report)
    for number in INSIDE:
        told = rows[number - 1].record["repaired"]
        received = {device: one for device, one in told.items() if one.get("lent")}
        assert received, f"round {number} brings somebody a layer"
        assert all(one["lent"] != one["sent"] for one in received.values())
        for device, moved in traffic(report, number).items():
            assert (moved.down > 0) == (device in received)
        assert all(set(one["donors"]) <= set(PATCHY) for one in received.values())
    with Ledger(directory / "run" / "ledger.sqlite") as ledger:
        states = ledger.states("tiny")
    offered = {key: ref.id for key, ref in states[1, 1].items() if key.endswith(f"/{LAYERS}")}
    told = rows[1].record["repaired"]
    assert offered == {f"@{device}/{LAYERS}": one["lent"] for device, one in told.items() if "lent" in one}
    every = [one for row in rows.values() for one in row.record["repaired"].values()]
    assert len(lent(report).rows) == sum("lent" in one for one in every)


def test_the_model_moves_with_whole_exchanges_alone(layers):
    directory, report = layers
    with Ledger(directory / "run" / "ledger.sqlite") as ledger:
        states = ledger.states("tiny")

    def model(number: int) -> Manifest:
        return {part: ref for part, ref in states[1, number].items() if not part.startswith(("@", "server/"))}

    assert model(1) == model(2) == model(3) == {p: r for p, r in states[0, 0].items() if not p.startswith("match")}
    assert model(4) != model(3)
    assert {row.round for row in report.evaluations} == {4, 6}
    assert not any(part.endswith(f"/{LAYERS}") for part in states[1, 4])


def test_bytes_of_layers_have_a_line_of_their_own_and_are_predicted(layers):
    _, report = layers
    for row in (row for row in report.assignments if row.status == "done"):
        up, down = (row.measured.get(f"layer_{way}_bytes") for way in ("up", "down"))
        if row.round in INSIDE:
            assert up is not None
            assert up.value == row.measured["payload_up_bytes"].value
            assert row.measured["payload_up_bytes"].value <= row.predicted["payload_up_bytes"].value
            assert row.measured["payload_down_bytes"].value <= row.predicted["payload_down_bytes"].value
            assert down is None or down.value == row.measured["payload_down_bytes"].value
        if row.round in {4, 6}:
            predicted = row.predicted["payload_up_bytes"].value
            assert row.measured["payload_up_bytes"].value == pytest.approx(predicted, rel=0.02)


@pytest.mark.slow
def test_what_is_lent_acts_and_the_same_run_is_the_same_again(tmp_path: Path, layers):
    directory, _ = layers
    run(tmp_path / "again", "mmic-layer")
    run(tmp_path / "withheld", "mmic-layer", ["slots.repair={poverty: {exchange: layer, layers: 0}}"])
    first, again, withheld = (state_of(d)[1] for d in (directory, tmp_path / "again", tmp_path / "withheld"))
    assert again == first
    assert withheld["task"] != first["task"]


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("model.head.norm=batch", "model.head.norm"),
        ("transfer.up=int8", "transfer.up"),
        ("transfer.down=delta+int8", "transfer.down"),
        (
            "slots.objective={cross_entropy: {}, proximal: {}}",
            "proximal compares with the parts received, and repair: poverty",
        ),
        ("slots.weight=own", "weight: own"),
        ("slots.weight=relationship", "relationship"),
        ("rounds=async", "rounds"),
        ("round.late=keep", "round.late"),
    ],
)
def test_what_a_period_does_not_go_with_is_refused_by_name(tmp_path: Path, setting: str, field: str):
    with pytest.raises(ConfigError) as error:
        plan_of(tmp_path, "mmic-layer", "ab", 2, [setting])
    assert field in str(error.value)
