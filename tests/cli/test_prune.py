"""Retention: which runs go, that all of a run goes, and that a crash in the middle is gone on from."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from pathlib import Path

import pytest
from ledger_fixture import POSTGRESQL, new_database

from coordinator.core.moves import SaveEnd
from coordinator.ledger.ledger import Ledger
from edgefl.cli import prune as module
from edgefl.cli.main import main
from edgefl.cli.prune import MARK, Policy, prune
from edgefl.plan.job import RunPlan
from edgefl.storage.disk import LEDGER, hold_directory, note_ledger

DAY = 86400


def a_run(runs: Path, name: str, days_ago: float, status: str = "done", url: str = "") -> Path:
    place = runs / name
    (place / "objects" / "partial").mkdir(parents=True)
    (place / "objects" / ("a" * 64)).write_bytes(bytes(100_000))
    (place / "bundles" / "acc").mkdir(parents=True)
    (place / "bundles" / "acc" / "model.onnx").write_bytes(bytes(5000))
    (place / "events.jsonl").write_text("{}\n")
    (place / "lock").touch()
    at = time.time() - days_ago * DAY
    with Ledger(url or place / LEDGER) as ledger:
        ledger.create(RunPlan(run=name, name=name), {}, {}, at)
        if status != "running":
            ledger.commit(name, [SaveEnd(status)], [], at)
    if url:
        note_ledger(place, url)
    return place


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for days, status in ((1, "done"), (10, "done"), (20, "failed"), (40, "done"), (50, "running"), (60, "stopped")):
        a_run(tmp_path / "runs", f"r{days}", days, status)
    return tmp_path / "runs"


def left(runs: Path) -> set[str]:
    return {path.name for path in runs.iterdir()}


def status_of(runs: Path, *words: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(["runs", "prune", "--runs", str(runs), *words])
    return ended.value.code


def pruned(runs: Path, *words: str) -> dict[str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert status_of(runs, "--format", "json", *words) == 0
    return {one["run"]: one["kept"] for one in json.loads(out.getvalue())["runs"]}


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (("--keep", "2"), {"r20", "r40"}),
        (("--older-than", "15d"), {"r20", "r40"}),
        (("--older-than", "5w"), {"r40"}),
        (("--keep", "3", "--older-than", "15d"), {"r40"}),
        (("--keep", "1", "--older-than", "15d"), {"r20", "r40"}),
        (("--keep", "0"), {"r1", "r10", "r20", "r40"}),
        (("--keep", "0", "--unfinished"), {"r1", "r10", "r20", "r40", "r50", "r60"}),
        (("--keep", "6", "--unfinished"), set()),
    ],
)
def test_what_goes(runs: Path, words: tuple[str, ...], gone: set[str]) -> None:
    before = left(runs)
    assert {run for run, kept in pruned(runs, *words, "--dry-run").items() if not kept} == gone
    assert left(runs) == before
    assert {run for run, kept in pruned(runs, *words).items() if not kept} == gone
    assert left(runs) == before - gone
    assert {run for run, kept in pruned(runs, *words).items() if not kept} <= gone
    assert not gone or gone & set(pruned(runs, "--keep", "0")) == set()


def test_it_says_why_a_run_stays(runs: Path) -> None:
    (runs / "r10" / LEDGER).write_bytes(b"rotten" * 100)
    told = pruned(runs, "--keep", "1", "--older-than", "30d")
    assert told.pop("r10").startswith("its ledger cannot be read")
    assert told == {
        "r1": "among the newest 1",
        "r20": "not old enough",
        "r40": "",
        "r50": "interrupted",
        "r60": "stopped",
    }
    assert "r10" in left(runs)


def test_what_has_not_begun_takes_no_place_among_the_newest(runs: Path) -> None:
    """A directory whose run was killed before it was in its ledger."""
    for name in ("new", "newer"):
        (runs / name).mkdir()
        (runs / name / "lock").touch()
        Ledger(runs / name / LEDGER).close()
    told = pruned(runs, "--keep", "20")
    assert (told["r1"], told["r10"]) == ("among the newest 20", "among the newest 20")
    assert told["new"] == told["newer"] == "it may be starting"


def a_failed_start(runs: Path, name: str, *files: str, hours_ago: float = 2) -> Path:
    place = runs / name
    for file in files:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text('{"at":1.0,"kind":"run_failed"}\n')
    then = time.time() - hours_ago * 3600
    for path in (*place.rglob("*"), place):
        os.utime(path, (then, then))
    return place


def test_what_a_failed_start_left_goes_whatever_is_asked(runs: Path) -> None:
    """Neither a lock that is held, nor a start within the hour, nor what is no run's; nor one that had begun."""
    a_failed_start(runs, "token", "run.yaml", "shares/test.npz", "broker/url", "lock")
    a_failed_start(runs, "unreadable", "shares/test.npz")
    a_failed_start(runs, "no-tables", "run.yaml", "lock")
    (runs / "no-tables" / LEDGER).touch()
    empty = a_failed_start(runs, "no-weights", "run.yaml", "events.jsonl", "objects/aa", "logs/evaluator.log", "lock")
    Ledger(empty / LEDGER).close()
    a_failed_start(runs, "held", "run.yaml", "lock")
    a_failed_start(runs, "fresh", "run.yaml", "lock", hours_ago=0.5)
    a_failed_start(runs, "mine", "run.yaml", "notes.txt")
    a_failed_start(runs, "bundles-only", "bundles/acc/model.onnx")
    begun = a_failed_start(runs, "other-ledger", "run.yaml")
    (begun / "events.jsonl").write_text('{"at":1.0,"kind":"run_started","stage":0}\n')
    os.utime(begun / "events.jsonl", (1, 1))
    before = left(runs)
    with hold_directory(runs / "held"):
        os.utime(runs / "held" / "lock", (1, 1))
        told = pruned(runs, "--keep", "6")
    gone = {"token", "unreadable", "no-tables", "no-weights"}
    assert {run for run, kept in told.items() if not kept} == gone
    assert left(runs) == before - gone
    assert (told["held"], told["fresh"]) == ("it is running", "it may be starting")
    assert told["other-ledger"] == "its events are of a run that its ledger does not have"
    assert not {"mine", "bundles-only"} & set(told)


def test_a_running_run_stays_whatever_is_asked(runs: Path) -> None:
    with hold_directory(runs / "r50"):
        assert pruned(runs, "--keep", "0", "--unfinished")["r50"] == "it is running"
    assert left(runs) == {"r50"}


def test_one_that_is_taken_up_meanwhile_stays(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_held", lambda _: False)
    with hold_directory(runs / "r40"):
        assert "another coordinator" in pruned(runs, "--older-than", "30d")["r40"]
        assert (runs / "r40" / LEDGER).is_file()


def test_what_it_says_it_freed_is_what_the_disk_has_again(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def used() -> int:
        files = [path for path in runs.rglob("*") if path.is_file()]
        return sum(512 * path.stat().st_blocks for path in files)

    before = used()
    prune(runs, Policy(0, None), "json", dry_run=False)
    assert json.loads(capsys.readouterr().out)["freed_bytes"] == before - used() > 400_000


def test_bundles_can_stay_and_the_run_is_none_any_more(runs: Path) -> None:
    assert pruned(runs, "--older-than", "30d", "--keep-bundles")["r40"] == ""
    assert [path.relative_to(runs / "r40") for path in sorted((runs / "r40").rglob("*"))] == [
        Path("bundles"),
        Path("bundles/acc"),
        Path("bundles/acc/model.onnx"),
    ]
    assert "r40" not in pruned(runs, "--keep", "0")
    assert "r40" in left(runs)


@pytest.mark.parametrize("bundles", [True, False])
@pytest.mark.parametrize("steps", range(12))
def test_a_crash_anywhere_is_gone_on_from(
    tmp_path: Path, steps: int, bundles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletions fail after so many; what is left is no run, and the next prune, whatever it asks, ends it."""
    runs = tmp_path / "runs"
    a_run(runs, "r40", 40)
    count = 0

    def dies(real: object) -> object:
        def instead(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count > steps:
                raise KeyboardInterrupt
            return real(*args, **kwargs)  # type: ignore[operator]

        return instead

    with monkeypatch.context() as patch:
        for name in ("unlink", "rmdir"):
            patch.setattr(os, name, dies(getattr(os, name)))
        with contextlib.suppress(KeyboardInterrupt):
            prune(runs, Policy(0, None, bundles), "json", dry_run=False)
    prune(runs, Policy(0, None, not bundles) if count else Policy(0, None), "json", dry_run=False)
    assert not (runs / "r40" / MARK).exists()
    assert {str(path.relative_to(runs)) for path in runs.rglob("*") if path.is_file()} == (
        {"r40/bundles/acc/model.onnx"} if bundles else set()
    )


def test_rows_in_a_database_go_too_and_those_of_others_stay(tmp_path: Path) -> None:
    url = new_database() if POSTGRESQL else f"sqlite:///{tmp_path / 'all.sqlite'}"
    for name, days in (("old", 40), ("new", 1)):
        a_run(tmp_path / "runs", name, days, url=url)
    assert pruned(tmp_path / "runs", "--older-than", "30d") == {"new": "not old enough", "old": ""}
    with Ledger(url) as ledger:
        assert [run.run for run in ledger.runs()] == ["new"]
    assert left(tmp_path / "runs") == {"new"}


def test_what_a_link_points_to_is_not_touched(runs: Path, tmp_path: Path) -> None:
    elsewhere = a_run(tmp_path / "elsewhere", "r70", 70)
    (runs / "r70").symlink_to(elsewhere)
    (runs / "r40" / "shares").symlink_to(tmp_path / "elsewhere")
    assert pruned(runs, "--older-than", "30d")["r40"] == ""
    assert (elsewhere / LEDGER).is_file()
    assert "r70" in left(runs)


@pytest.mark.parametrize("words", [(), ("--older-than", "30"), ("--older-than", "-1d"), ("--keep", "-1")])
def test_what_is_not_clear_is_not_done(runs: Path, words: tuple[str, ...]) -> None:
    before = left(runs)
    assert status_of(runs, *words) == 2
    assert left(runs) == before


@pytest.mark.parametrize("text", ["", "bundles", "[]", '["thesis"]', '["../r1"]', "{", '"thesis.txt"', "\xff"])
def test_a_mark_that_no_deletion_left_makes_no_folder_prey(tmp_path: Path, text: str) -> None:
    mine = tmp_path / "runs" / "mine"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("years")
    (mine / MARK).write_bytes(text.encode("latin-1"))
    a_run(tmp_path / "runs", "r1", 1)
    assert pruned(tmp_path / "runs", "--keep", "100") == {"r1": "among the newest 100"}
    assert {path.name for path in mine.iterdir()} == {"thesis.txt", MARK}
    assert left(tmp_path / "runs") == {"mine", "r1"}


def test_a_pipe_for_a_mark_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(a_run(tmp_path / "runs", "r1", 40) / MARK)
    assert pruned(tmp_path / "runs", "--keep", "100") == {"r1": "among the newest 100"}
