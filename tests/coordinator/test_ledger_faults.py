"""What ledgers meet in the field: locks, servers that go away, disks and accounts that refuse, wrong addresses."""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from coordinator_fixture import FLEET, FakeDevice, FakeWorker, a_plan
from faulty_broker import FaultyBroker
from ledger_fixture import POSTGRESQL, engine_of, ledger_at, new_database, on_postgresql, saved_round
from sqlalchemy import event
from sqlalchemy import text as sql
from sqlalchemy.engine import make_url

from coordinator.core.timeouts import Timeouts
from coordinator.ledger import database
from coordinator.ledger.ledger import Ledger
from coordinator.runtime.environment import Environment
from coordinator.runtime.runner import run
from edgefl.api.runs import read_run, read_runs
from edgefl.errors import MissingDependencyError, StoreError
from edgefl.records import Attempt, ObjectRef
from edgefl.run_records import EventRow, RunReport
from edgefl.storage.disk import LEDGER, LEDGER_URL, ledger_of, note_ledger
from edgefl.transport.memory_broker import MemoryTransport

FIRST = Attempt("r1", 1, 1, 1)
INITIAL = {"task": ObjectRef("0" * 64, 10)}
FAST = Timeouts(tick_s=0.02, grace_s=0.1, retry_pause_s=0.05, introduce_s=0.05, drain_s=1.0)


@pytest.fixture
def path(tmp_path: Path) -> str | Path:
    return ledger_at(tmp_path / LEDGER)


def begun(path: str | Path) -> Ledger:
    ledger = Ledger(path)
    ledger.create(a_plan(), INITIAL, {"task": 8}, 100.0)
    return ledger


def told(number: int) -> list[EventRow]:
    return [EventRow(float(number), "warning", data={"text": str(number)})]


def texts(report: RunReport) -> list[str]:
    return [row.data["text"] for row in report.events]


# Both kinds


def test_many_may_open_the_same_empty_ledger_at_once(path: str | Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        ledgers = list(pool.map(lambda _: Ledger(path), range(4)))
    for number, ledger in enumerate(ledgers):
        if number == 0:
            ledger.create(a_plan(), INITIAL, {}, 1.0)
        assert [one.run for one in ledger.runs()] == ["r1"]
        ledger.close()


def test_writers_of_two_runs_wait_for_each_other(path: str | Path) -> None:
    """Transactions that overlap all count: in SQLite one after the other, in PostgreSQL side by side."""
    with begun(path) as first, Ledger(path) as second:
        second.create(a_plan(run="r2"), INITIAL, {}, 1.0)

        def write(of: tuple[Ledger, str]) -> None:
            for number in range(40):
                of[0].commit(of[1], [saved_round(Attempt(of[1], 1, number + 1, 1))], told(number), 1.0)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(write, [(first, "r1"), (second, "r2")]))
        for name in ("r1", "r2"):
            report = first.report(name)
            assert len(report.rounds) == 40
            assert texts(report) == [str(number) for number in range(40)]


def test_a_lock_held_for_too_long_is_named_and_the_ledger_goes_on(
    path: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(path).close()
    monkeypatch.setattr(database, "LEDGER_BUSY_S", 0.2)
    other = engine_of(path)
    with Ledger(path) as ledger:
        with other.connect() as holder:
            if isinstance(path, Path):
                holder.exec_driver_sql("BEGIN IMMEDIATE")
            else:
                holder.execute(sql("LOCK TABLE events"))
            with pytest.raises(StoreError, match="lock") as caught:
                ledger.commit("r1", [], told(1), 1.0)
            assert "Another process holds it" in caught.value.remedy
        ledger.commit("r1", [], told(2), 1.0)
        assert texts(ledger.report()) == ["2"]
    other.dispose()


def test_reading_a_run_from_elsewhere_connects_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made the folder chose the address; a password in it is shown to nobody."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"postgresql://me:secret@127.0.0.1:{listener.getsockname()[1]}/x?host=127.0.0.1"
        place = tmp_path / "runs" / "evil"
        place.mkdir(parents=True)
        said = f"would connect to 'postgresql://…@127.0.0.1:{listener.getsockname()[1]}/x"
        for text in (url, f"{url}\n", f"{url}\n{'0' * 64}\n"):
            (place / LEDGER_URL).write_text(text)
            for reading in (lambda: read_run(place), lambda: ledger_of(place)):
                with pytest.raises(StoreError, match=said) as told:
                    reading()
                assert "secret" not in str(told.value)
                assert "EDGEFL_LEDGER_URL" in told.value.remedy
            assert "was not written on this machine" in read_runs(place.parent)[1][0]
        with pytest.raises(BlockingIOError):
            listener.accept()
        monkeypatch.setenv("EDGEFL_LEDGER_URL", url)
        assert ledger_of(place) == url


def test_a_run_finds_its_ledger_where_it_was_started(tmp_path: Path) -> None:
    """`edgefl report` and --resume need no --ledger; the address, which may hold a password, is private."""
    elsewhere = ledger_at(tmp_path / "elsewhere.sqlite")
    url = elsewhere if isinstance(elsewhere, str) else f"sqlite:///{elsewhere}"
    for name in ("r1", "r2"):
        (tmp_path / name).mkdir()
        note_ledger(tmp_path / name, url)
        assert (tmp_path / name / LEDGER_URL).stat().st_mode & 0o777 == 0o600
    assert ledger_of(tmp_path / "r1") == url
    with Ledger(url) as ledger:
        ledger.create(a_plan(), INITIAL, {}, 1.0)
        ledger.create(a_plan(run="r2"), INITIAL, {}, 2.0)
        ledger.create(a_plan(run="of somebody else"), INITIAL, {}, 3.0)
    assert read_run(tmp_path / "r1").run == "r1"
    found, unreadable = read_runs(tmp_path)
    assert ([report.run for report in found], unreadable) == (["r2", "r1"], [])
    (tmp_path / "r1").rename(tmp_path / "r3")
    with pytest.raises(StoreError, match="'r3' is not in the ledger"):
        read_run(tmp_path / "r3")


# Addresses


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("://", "is not a database URL"),
        ("mysql://user:secret@host/db", "cannot be kept in mysql"),
        ("postgresql+nope://host/db", "no driver"),
    ],
)
def test_addresses_that_mean_nothing_are_refused(url: str, text: str) -> None:
    with pytest.raises(StoreError, match=text) as caught:
        Ledger(url)
    assert "secret" not in caught.value.message
    assert "postgresql://" in caught.value.remedy


def test_the_driver_of_postgresql_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingDependencyError, match="psycopg") as caught:
        Ledger("postgresql://user@localhost/db")
    assert "edgefl-toolkit[postgresql]" in caught.value.remedy


def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StoreError, match=r"localhost:9/db.*refused") as caught:
        Ledger("postgresql://user:secret@localhost:9/db")
    assert "secret" not in caught.value.message + caught.value.remedy
    assert "Start the database's server" in caught.value.remedy


# SQLite


@pytest.fixture
def file(tmp_path: Path) -> Path:
    begun(tmp_path / LEDGER).close()
    return tmp_path / LEDGER


def test_a_sqlite_ledger_is_in_wal_mode(file: Path) -> None:
    other = sqlite3.connect(file)
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()


def test_a_file_that_is_no_ledger_is_refused(file: Path) -> None:
    with pytest.raises(StoreError, match="there is no ledger"):
        Ledger(file.with_name("other.sqlite"), create=False)
    assert not file.with_name("other.sqlite").exists()
    file.with_name("empty.sqlite").touch()
    with pytest.raises(StoreError, match="there is no ledger in"):
        Ledger(file.with_name("empty.sqlite"), create=False)
    file.write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="cannot be used: file is not a database"):
        Ledger(file)


def test_a_file_that_can_only_be_read_says_so() -> None:
    """Root may write everything: as root, under another account."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        begun(Path(name) / LEDGER).close()
        (Path(name) / LEDGER).chmod(0o444)
        Path(name).chmod(0o555)
        me = os.geteuid()
        try:
            if me == 0:
                os.seteuid(65534)
            with (
                pytest.raises(StoreError, match=r"readonly|unable to open") as caught,
                Ledger(f"{name}/{LEDGER}") as one,
            ):
                one.commit("r1", [], told(1), 1.0)
        finally:
            if me == 0:
                os.seteuid(0)
            Path(name).chmod(0o755)
        assert "can only be read" in caught.value.remedy


# PostgreSQL


class Server:
    """The private server of `make test-postgresql`."""

    def __init__(self) -> None:
        self._command = os.environ["EDGEFL_TEST_PG_CTL"].split()

    def control(self, *arguments: str) -> None:
        subprocess.run([*self._command, *arguments], check=True, cwd="/")

    def stop(self) -> None:
        """At once, as after a crash."""
        self.control("stop", "-m", "immediate")

    def start(self) -> None:
        self.control("start")


@pytest.fixture
def server() -> Iterator[Server]:
    """Whatever a test does to it, the next one finds it running."""
    found = Server()
    yield found
    if subprocess.run([*found._command, "status"], cwd="/", stdout=subprocess.DEVNULL).returncode:
        found.start()


@on_postgresql
def test_a_commit_survives_the_restart_of_the_server(path: str, server: Server) -> None:
    with begun(path) as ledger:
        ledger.commit("r1", [saved_round(FIRST)], told(1), 1.0)
        server.stop()
        back = threading.Timer(1.0, server.start)
        back.start()
        ledger.commit("r1", [saved_round(FIRST, "done", manifest=INITIAL)], told(2), 2.0)
        back.join()
        report = ledger.report()
    assert texts(report) == ["1", "2"]
    assert report.rounds[0].status == "done"


@on_postgresql
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_whose_answer_is_lost_counts_once(path: str, when: str) -> None:
    """The server ends the connection before or after it has committed; either way the caller hears of an error."""
    with begun(path) as ledger:
        other, cut = engine_of(path), []

        def end(connection: object) -> None:
            if not cut:
                cut.append(1)
                raw = connection.connection.dbapi_connection  # type: ignore[attr-defined]
                if when == "after":
                    raw.commit()
                with other.connect() as by:
                    by.execute(sql("SELECT pg_terminate_backend(:pid)"), {"pid": raw.info.backend_pid})

        event.listen(ledger._engine, "commit", end)
        ledger.commit("r1", [saved_round(FIRST)], told(1), 1.0)
        ledger.commit("r1", [], told(2), 2.0)
        other.dispose()
        assert cut
        assert texts(ledger.report()) == ["1", "2"]


@on_postgresql
def test_a_server_that_stays_away_is_an_error_with_the_way_on(
    path: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LEDGER_AWAY_S", 0.5)
    with begun(path) as ledger:
        server.stop()
        with pytest.raises(StoreError, match="cannot be used") as caught:
            ledger.commit("r1", [saved_round(FIRST)], told(1), 1.0)
        assert "--resume" in caught.value.remedy
        server.start()
        ledger.commit("r1", [saved_round(FIRST)], told(2), 1.0)
        assert texts(ledger.report()) == ["2"]


@on_postgresql
def test_a_database_that_can_only_be_read_says_so(path: str) -> None:
    begun(path).close()
    engine = engine_of(path)
    with engine.begin() as connection:
        name = make_url(path).database
        connection.execute(sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on"))
    engine.dispose()
    with Ledger(path, create=False) as ledger:
        assert ledger.report().run == "r1"
        with pytest.raises(StoreError, match="read-only transaction") as caught:
            ledger.commit("r1", [], told(1), 1.0)
    assert "can only be read" in caught.value.remedy


@on_postgresql
def test_databases_that_are_not_there_or_empty_are_named() -> None:
    missing = make_url(POSTGRESQL).set(database="nope").render_as_string(hide_password=False)
    with pytest.raises(StoreError, match="does not exist") as caught:
        Ledger(missing)
    assert "createdb" in caught.value.remedy
    with pytest.raises(StoreError, match="there is no ledger in"):
        Ledger(new_database(), create=False)


def played(directory: Path, place: str, disturb: Callable[[list[EventRow]], None]) -> tuple[RunReport, list[str]]:
    """A run of two devices; ``disturb`` is called beside it."""

    async def play() -> RunReport:
        broker, events = FaultyBroker(), list[EventRow]()
        devices = [FakeDevice(broker, name, directory / "devices") for name in ("a", "b")]
        for device in devices:
            await device.start()

        def emit(row: EventRow) -> None:
            events.append(row)
            kinds.append(row.kind)
            disturb(events)

        try:
            return await run(
                a_plan(),
                Environment(
                    directory=directory / "run",
                    transport=MemoryTransport(broker, "coordinator"),
                    fleet=FLEET,
                    emit=emit,
                    worker=FakeWorker(),
                    timeouts=FAST,
                    ledger_url=place,
                ),
                resume=(directory / "run" / "events.jsonl").exists(),
            )
        finally:
            for device in devices:
                await device.stop()

    kinds: list[str] = []
    return asyncio.run(asyncio.wait_for(play(), 60)), kinds


@on_postgresql
def test_a_run_goes_on_when_its_server_is_restarted(tmp_path: Path, path: str, server: Server) -> None:
    waiting: list[threading.Timer] = []

    def disturb(events: list[EventRow]) -> None:
        if events[-1].kind == "update" and not waiting:
            server.stop()
            waiting.append(threading.Timer(1.0, server.start))
            waiting[0].start()

    report, kinds = played(tmp_path, path, disturb)
    waiting[0].join()
    assert report.status == "done"
    assert [(row.stage, row.round, row.attempt) for row in report.rounds] == [(1, 1, 1), (2, 1, 1), (2, 2, 1)]
    assert [row.kind for row in report.events] == [kind for kind in kinds if kind != "progress"]


@on_postgresql
def test_a_run_that_lost_its_server_ends_with_the_reason_and_can_be_resumed(
    tmp_path: Path, path: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LEDGER_AWAY_S", 0.3)

    def disturb(events: list[EventRow]) -> None:
        if events[-1].kind == "round_closed":
            server.stop()

    with pytest.raises(StoreError, match="cannot be used"):
        played(tmp_path, path, disturb)
    server.start()
    report, _ = played(tmp_path, path, lambda events: None)
    assert report.status == "done"
    assert [(row.stage, row.round, row.attempt) for row in report.rounds] == [(1, 1, 1), (2, 1, 1), (2, 2, 1)]
