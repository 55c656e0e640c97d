"""A simulated fleet whose devices come, go and have slow links by traces: who is asked, who drops out, and when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from memory_fleet import share
from test_in_process import FIELDS, Ended, bill, ended, fields, scores

import edgefl
from edgefl.api.simulation import drawn_fleet, kinds_of, traces_of
from edgefl.cli.simulate import command
from edgefl.config.settings import SizedFleet
from edgefl.errors import ConfigError
from edgefl.report.forecast import basis, forecast, sentence
from edgefl.run_records import RunReport

DEVICES, ROUNDS = 12, 2
#: One phone that is always there, one that leaves after a minute for an hour, and one that comes after two.
STAYS, LEAVES, COMES = ([("00:00:00", "wifi")], [("00:00:00", "wifi"), ("00:01:00", "4g")], [("00:02:00", "wifi")])


def states(place: Path, *phones: list[tuple[str, str]]) -> dict[str, object]:
    """``trace`` of a fleet with these phones, which are there while they have Wi-Fi; each lasts an hour."""
    texts = [
        "\n".join(f"2020-01-02 {at}\t{state}" for at, state in (("00:00:00", "50%"), *one, ("01:00:00", "50%")))
        for one in phones
    ]
    file = place / "states.json"
    file.write_text(json.dumps({f"p{n}": {"messages": text} for n, text in enumerate(texts)}))
    return {"states": str(file), "needs": ["wifi"]}


def links(place: Path, *kib: float) -> dict[str, str]:
    file = place / "links.json"
    file.write_text(
        json.dumps({f"l{n}": {"down_u": one, "down_sigma": 0, "up_u": one, "up_sigma": 0} for n, one in enumerate(kib)})
    )
    return {"links": str(file)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("traces")
    share(110, {"a": 1.0, "b": 1.0}, seed=5).save_npz(place / "all.npz")
    return place


def run_in(
    place: Path,
    source: Path,
    trace: dict[str, object] | None,
    workers: int = 0,
    options: dict[str, Any] | None = None,
    **more: Any,
) -> Ended:
    given: dict[str, Any] = fields(source, recipe="end_to_end", training={"rounds": [0, ROUNDS], "batch_size": 6})
    given["fleet"] = drawn_fleet(DEVICES, kinds_of(["jetson-nano"]), trace)
    given["data"] = {"source": source / "all.npz", "partition": {"drawn": {"each": 6}}}
    given["round"] = {"devices": 1, "quorum": 0.3, "deadline_s": 300}
    alone: dict[str, Any] = {"in_process": True, "workers": workers, "export": False, "page": False, **(options or {})}
    return ended(edgefl.run({**given, **more}, directory=place, **alone))


def phones(trace: dict[str, object]) -> dict[str, int]:
    """Device -> the number of its phone, of those that differ in who is there after three minutes and at once."""
    fleet = SizedFleet.model_validate(drawn_fleet(DEVICES, kinds_of(["jetson-nano"]), trace))
    assert fleet.trace is not None
    traces = traces_of(fleet, fleet.trace, FIELDS["seed"], pytest.fail)
    now, later = traces.there(1000), traces.there(180_000)
    return {name: 0 if a and b else 1 if a else 2 for name, a, b in zip(traces.names, now, later, strict=True)}


def statuses(report: RunReport, number: int) -> dict[str, str]:
    return {row.device: row.status for row in report.assignments if row.round == number}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("select", [{"all": {}}, {"random": {"share": 1.0}}])
def test_who_is_away_is_not_asked_and_who_leaves_drops_out(
    source: Path, tmp_path: Path, select: dict[str, Any]
) -> None:
    """Links of 0.3 KiB a second: a round takes minutes. Once of devices that are known, once of a crowd."""
    trace = {**states(tmp_path, STAYS, LEAVES, COMES), **links(tmp_path, 0.3)}
    run = run_in(tmp_path, source, trace, slots={"select": select})
    of, (first, second) = phones(trace), (statuses(run.report, number) for number in (1, 2))
    assert set(of.values()) == {0, 1, 2}
    if "random" in select:
        assert first == {name: {0: "done", 1: "lost"}[phone] for name, phone in of.items() if phone < 2}
    assert second == {name: "done" for name, phone in of.items() if phone != 1}
    lost = [row for row in run.report.assignments if row.status == "lost"]
    for row in lost:
        assert row.measured["wall_s"].value == 60.0
        down = row.measured["payload_down_bytes"]
        assert down.value == pytest.approx(60 * 0.3 * 1024)
        assert (down.kind, "its trace" in down.source) == ("predicted", True)
    found = forecast(run.report)
    assert found.ends == {
        "came back": len(run.report.assignments) - len(lost),
        **({"left in their round": len(lost)} if lost else {}),
    }
    (end,) = [event for event in run.report.events if event.kind == "run_finished"]
    assert found.seconds == end.data["simulated_s"] == end.data["seconds"]
    spent = [row.measured["wall_s"].value or 0.0 for row in run.report.assignments if row.status == "done"]
    assert (found.seconds or 0.0) >= max(spent) > 60


@pytest.mark.timeout(120)
def test_a_slow_link_is_late_and_the_round_closes_at_its_deadline(source: Path, tmp_path: Path) -> None:
    trace = {**states(tmp_path, STAYS), **links(tmp_path, 1000, 0.1)}
    run = run_in(
        tmp_path, source, trace, slots={"select": {"all": {}}}, round={"quorum": 0.2, "deadline_s": 30, "join_s": 30}
    )
    first = statuses(run.report, 1)
    slow = {row.device for row in run.report.devices if row.capabilities.speed.down_bytes < 1000}
    assert first == {name: "late" if name in slow else "done" for name in first}
    assert 0 < len(slow) < DEVICES
    assert [event.data["seconds"] for event in run.report.events if event.kind == "round_closed"] == [30.0] * ROUNDS
    assert forecast(run.report).ends["late"] == ROUNDS * len(slow)


@pytest.mark.timeout(120)
def test_slower_links_make_a_longer_run_of_the_same_result(source: Path, tmp_path: Path) -> None:
    runs = []
    for kib in (1, 4):
        place = tmp_path / str(kib)
        place.mkdir()
        runs.append(run_in(place, source, {**states(place, STAYS), **links(place, kib)}, slots={"select": {"all": {}}}))
    slow, fast = runs
    seconds = [forecast(run.report).seconds or 0.0 for run in (slow, fast)]
    assert seconds[0] == pytest.approx(4 * seconds[1], rel=0.02)
    assert slow.states == fast.states
    text = sentence(forecast(slow.report))
    assert f"{ROUNDS} rounds take" in text
    assert f"of {ROUNDS * DEVICES} device rounds that were asked for {ROUNDS * DEVICES} came back." in text
    assert [row[0].text for row in basis(forecast(slow.report)).rows] == ["wall time", "bytes", "energy", "came back"]
    plain = run_in(tmp_path, source, None, slots={"select": {"all": {}}})
    assert plain.states == slow.states, "with everybody there a trace changes the time alone"
    assert not any("simulated_s" in event.data for event in plain.report.events)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("select", [{"all": {}}, {"random": {"share": 0.5}}])
def test_any_number_of_processes_and_repetitions_gives_the_same(
    source: Path, tmp_path: Path, select: dict[str, Any]
) -> None:
    trace = {**states(tmp_path, STAYS, LEAVES, COMES), **links(tmp_path, 0.3, 0.6)}
    runs = [
        run_in(tmp_path / str(n), source, trace, workers, slots={"select": select})
        for n, workers in enumerate((0, 0, 2))
    ]
    for one in runs[1:]:
        assert one.states == runs[0].states
        assert scores(one.report) == scores(runs[0].report)
        assert bill(one.report) == bill(runs[0].report)
        assert forecast(one.report) == forecast(runs[0].report)


def test_a_profile_without_a_speed_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"profile cpu: has no speed\.flops"):
        run_in(
            tmp_path, source, {"states": "synthetic"}, fleet=drawn_fleet(3, kinds_of(["cpu"]), {"states": "synthetic"})
        )
    fleet = drawn_fleet(3, kinds_of(["jetson-nano"]), {"states": "synthetic"})
    with pytest.raises(ConfigError, match="is of rounds that wait for their devices"):
        run_in(tmp_path, source, None, fleet=fleet, rounds="async")
    with pytest.raises(ConfigError, match="is of simulated devices, and those of processes are always there"):
        edgefl.run(fields(source, fleet=fleet, data={"source": source / "all.npz"}), directory=tmp_path)
    with pytest.raises(ConfigError, match="say more of a trace, and none is given"):
        command("demo", needs=["charging"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_was_cut_off_goes_on_at_its_virtual_time(source: Path, tmp_path: Path) -> None:
    class CutError(Exception):
        pass

    trace = {**states(tmp_path, STAYS, LEAVES, COMES), **links(tmp_path, 0.3)}
    whole = run_in(tmp_path, source, trace, slots={"select": {"random": {"share": 1.0}}})

    def cut(event: edgefl.EventRow) -> None:
        if event.kind == "round_started" and event.round == 2:
            raise CutError

    with pytest.raises(CutError):
        run_in(tmp_path / "cut", source, trace, slots={"select": {"random": {"share": 1.0}}}, options={"on_event": cut})
    (begun,) = (tmp_path / "cut").iterdir()
    select = {"select": {"random": {"share": 1.0}}}
    went_on = run_in(tmp_path / "cut", source, trace, slots=select, options={"resume": begun.name})
    assert went_on.states == whole.states
    assert forecast(went_on.report) == forecast(whole.report)
