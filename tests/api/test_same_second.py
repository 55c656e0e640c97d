"""Runs that begin in one second in one folder: each has a directory of its own, and ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from test_in_process import fields, source

from coordinator.runtime.start import RunOptions, planned
from edgefl.api.local_run import LocalOptions, LocalRun
from edgefl.errors import ConfigError, StoreError
from edgefl.storage.disk import begin_run

__all__ = ["source"]


def test_three_runs_of_one_second_have_three_directories(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20260102-030405")
    local = [LocalRun(LocalOptions(fields(source), runs=tmp_path), lambda _: None).run for _ in range(3)]
    assert local == ["same-20260102-030405", "same-20260102-030405-2", "same-20260102-030405-3"]
    file = tmp_path / "run.yaml"
    given = {**fields(source), "data": {"source": str(source / "all.npz")}}
    file.write_text(yaml.safe_dump(given))
    plans = [planned(RunOptions(str(file), directory=tmp_path), lambda _: None)[0].run for _ in range(2)]
    assert plans == ["same-20260102-030405-4", "same-20260102-030405-5"]


def test_many_that_look_at_once_do_not_take_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20260102-030405")
    made: list[str] = []
    at_once = threading.Barrier(8)

    def begin() -> None:
        at_once.wait()
        made.append(begin_run(tmp_path / "runs", "x" * 64)[0])

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(set(made)) == 8
    assert sorted(made) == sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert max(map(len, made)) <= 64


def test_a_second_whose_names_are_all_taken_is_an_error_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20260102-030405")
    for number in ("", *(f"-{number}" for number in range(2, 1000))):
        (tmp_path / f"x-20260102-030405{number}").mkdir()
    with pytest.raises(StoreError, match="is taken, and so is every name up to x-20260102-030405-999") as caught:
        begin_run(tmp_path, "x")
    assert caught.value.remedy == "Try again in a second."


@pytest.mark.parametrize(
    ("there", "run"), [("", ""), ("runs", ""), ("runs", "named"), ("runs/named", "named")], ids=str
)
def test_a_run_whose_data_is_missing_leaves_directories_as_they_were(
    tmp_path: Path, source: Path, there: str, run: str
) -> None:
    given = fields(source) | {"data": {"source": str(tmp_path / "nothing.npz")}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(given))
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    local = LocalRun(LocalOptions(given, runs=tmp_path / "runs", run=run), lambda _: None)
    with pytest.raises(Exception, match=r"nothing\.npz"):
        local._prepare()
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(Exception, match=r"nothing\.npz"):
        planned(RunOptions(str(file), run, directory=tmp_path / "runs"), lambda _: None)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_of_runs_that_is_a_file_is_an_error_that_names_it(tmp_path: Path, source: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises((StoreError, ConfigError), match="runs"):
        LocalRun(LocalOptions(fields(source), runs=tmp_path / "runs"), lambda _: None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_programs_begun_in_one_second_all_end_well(tmp_path: Path, source: Path) -> None:
    file = tmp_path / "run.yaml"
    small = {"training": {"rounds": [1, 0], "batch_size": 6}, "fleet": [{"name": "whole"}], "evaluate": "stage"}
    file.write_text(yaml.safe_dump({**fields(source), "data": {"source": str(source / "all.npz")}, **small}))
    fixed = "import time; time.strftime = lambda *_: '20260102-030405'\nfrom edgefl.cli.main import main; main()"
    words = ["run", str(file), "--runs", str(tmp_path / "runs"), "--in-process", "--set", "round.devices=1"]
    programs = [
        subprocess.Popen([sys.executable, "-c", fixed, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(3)
    ]
    said = [one.communicate(timeout=280)[0].decode() for one in programs]
    assert [one.returncode for one in programs] == [0, 0, 0], said
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["same-20260102-030405", "same-20260102-030405-2", "same-20260102-030405-3"]
