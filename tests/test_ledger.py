"""The ledger: made by its migrations, gives back what was put in, and never forgets what was announced."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from coordinator_fixture import a_plan
from sqlalchemy import create_engine

from coordinator import instructions as do
from coordinator import migrations, tables
from coordinator.database import sqlite_url
from coordinator.ledger import Ledger
from edgefl.errors import StoreError
from edgefl.plan.values import Hyper, Placement
from edgefl.protocol.messages import Hello, Update
from edgefl.records import Attempt, Budget, Capabilities, EvaluationRow, Figure, ObjectRef, Refusal
from edgefl.report.rows import AssignmentRow, BundleRow, DeviceRow, EventRow, RoundRow

FIRST = Attempt("r1", 1, 1, 1)
REF = ObjectRef("a" * 64, 10)
INITIAL = {"task": ObjectRef("0" * 64, 10)}
MADE_MS = 100_000  # milliseconds since the epoch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def begun(path: Path) -> Ledger:
    ledger = Ledger(path)
    ledger.create(a_plan(), INITIAL, {"task": 8}, 100.0)
    return ledger


def test_migrations_from_empty_make_the_tables_the_code_uses(path: Path) -> None:
    Ledger(path).close()
    engine = create_engine(sqlite_url(path))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, tables.metadata) == []
        assert context.get_current_revision() == tables.HEAD
    engine.dispose()
    assert ScriptDirectory(str(Path(migrations.__file__).parent)).get_current_head() == tables.HEAD


def test_a_ledger_from_before_the_matcher_was_noted_keeps_its_rows(path: Path) -> None:
    with begun(path) as ledger:
        ledger.commit("r1", [do.SaveEvaluation((EvaluationRow(1, 1, ("acc",), "prototype"),))], [], 1.0)
    older = sqlite3.connect(path)
    older.execute("ALTER TABLE evaluations DROP COLUMN matcher")
    older.execute("DROP TABLE snapshots")
    older.execute("UPDATE alembic_version SET version_num = '0001'")
    older.commit()
    older.close()
    with Ledger(path, create=False) as ledger:
        ledger.commit("r1", [do.SaveEvaluation((EvaluationRow(1, 2, missing="prototype", matcher="l2"),))], [], 2.0)
        assert [row.matcher for row in ledger.report().evaluations] == ["", "l2"]


def test_an_open_ledger_is_in_wal_mode_and_can_be_read_while_it_is_written(path: Path) -> None:
    with begun(path) as writer, Ledger(path, create=False) as reader:
        writer.commit("r1", [do.SaveRound(FIRST)], [], 101.0)
        assert [r.run for r in reader.runs()] == ["r1"]
        other = sqlite3.connect(path)
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        other.close()


def test_a_report_gives_back_what_was_put_in(path: Path) -> None:
    hello = Hello(
        device="a",
        profile="nano",
        capabilities=Capabilities(cores=4),
        budget=Budget(flops=1e12),
        samples={"": 8},
        class_counts=(4, 4),
    )
    stage = a_plan().stages[0]
    predicted = {"flops": Figure(5.0, "predicted", "meta device")}
    placement = Placement("a", stage, Hyper(micro_batch=2), predicted=predicted)
    measured = {"energy_j": Figure(reason="no sensor"), "flops": Figure(6.0, "counted", "counter")}
    update = Update("a", FIRST, {"task": REF}, {"task": 8}, {"loss": 0.5})
    refusal = Refusal("step_memory", 5.0, 3.0, "B", "too large")
    value = EvaluationRow(1, 1, ("acc",), "prototype", "accuracy", 0.75, 40, "cosine")
    told = EventRow(102.0, "warning", 1, 1, "a", {"text": "so"})
    with begun(path) as ledger:
        refused = do.SaveAssignment(FIRST, "b", "refused", Placement("b", stage, refusal=refusal), 4, refusal)
        saves = [do.SaveDevice(hello), do.SaveRound(FIRST), do.SaveAssignment(FIRST, "a", "offered", placement, 4)]
        ledger.commit("r1", [*saves, refused], [], 101.0)
        done = do.SaveAssignment(FIRST, "a", "done", placement, 4, None, update, measured)
        ledger.commit("r1", [done], [told], 102.0)
        closed = do.SaveRound(FIRST, "done", ("a",), {"loss": 0.5}, {"combine": {"choice": "mean"}}, {"task": REF})
        ledger.commit("r1", [closed, do.SaveEvaluation((value,))], [], 103.0)
        ledger.commit("r1", [do.SaveEnd("done")], [], 104.0)
        bundle = BundleRow("acc", "bundles/acc.onnx", ("acc",), 1000, 1e-6, 1e-4)
        ledger.add_bundle("r1", BundleRow("acc"))
        ledger.add_bundle("r1", bundle)
        report = ledger.report()
    assert (report.run, report.status, report.started_at, report.finished_at) == ("r1", "done", 100.0, 104.0)
    assert report.config == {"seed": 0}
    assert report.part_bytes == {"task": 8}
    assert report.stages[0]["trained"] == ["acc/stage1", "task"]
    assert report.devices == (DeviceRow("a", "nano", hello.capabilities, hello.budget, {"": 8}, (4, 4)),)
    record = {"combine": {"choice": "mean"}}
    assert report.rounds == (RoundRow(1, 1, 1, "done", 101.0, 103.0, ("a",), {"loss": 0.5}, record),)
    trained = stage.trained
    first = AssignmentRow("a", 1, 1, 1, "done", None, 4, 2, trained, {"task": 8}, {"loss": 0.5}, predicted, measured)
    assert report.assignments == (first, AssignmentRow("b", 1, 1, 1, "refused", refusal, 4, trained=trained))
    assert report.evaluations == (value,)
    assert report.events == (told,)
    assert report.bundles == (bundle,)


def test_the_position_is_after_the_last_finished_round(path: Path) -> None:
    with begun(path) as ledger:
        assert ledger.position("r1") == (0, 0, 0, INITIAL, None, MADE_MS)
        ledger.commit("r1", [do.SaveRound(FIRST)], [], 1.0)
        assert ledger.position("r1") == (0, 0, 1, INITIAL, None, MADE_MS)
        ledger.commit("r1", [do.SaveRound(FIRST, "done", manifest={"task": REF})], [], 2.0)
        assert ledger.position("r1") == (1, 1, 0, {"task": REF}, Attempt("r1", 1, 1, 1, MADE_MS), MADE_MS)
        ledger.commit("r1", [do.SaveEvaluation((EvaluationRow(1, 1),))], [], 2.0)
        ledger.commit("r1", [do.SaveRound(Attempt("r1", 2, 1, 1))], [], 3.0)
        assert ledger.position("r1") == (1, 1, 1, {"task": REF}, None, MADE_MS)
        ledger.reopen("r1", 4.0)
        assert ledger.report().rounds[-1].status == "failed"
        assert ledger.states("r1") == {(0, 0): INITIAL, (1, 1): {"task": REF}}
        assert ledger.plan("r1") == a_plan()


def test_a_metric_that_is_no_number_is_left_out_of_the_report(path: Path) -> None:
    with begun(path) as ledger:
        ledger.commit("r1", [do.SaveRound(FIRST, "done", metrics={"loss": math.nan, "ok": 1.0})], [], 1.0)
        assert ledger.report().rounds[0].metrics == {"ok": 1.0}


def test_a_failed_commit_changes_nothing(path: Path) -> None:
    with begun(path) as ledger:
        bad = EventRow(1.0, "warning", data={"text": object()})
        with pytest.raises((StoreError, TypeError)):
            ledger.commit("r1", [do.SaveRound(FIRST)], [bad], 1.0)
        assert ledger.report().rounds == ()


def test_a_run_of_the_same_name_is_refused_and_nothing_is_lost(path: Path) -> None:
    with begun(path) as ledger:
        with pytest.raises(StoreError, match=r"is in the ledger .* already"):
            ledger.create(a_plan(), INITIAL, {}, 200.0)
        assert ledger.report().started_at == 100.0


def test_unknown_runs_and_ledgers_are_named_with_what_there_is(path: Path) -> None:
    with begun(path) as ledger, pytest.raises(StoreError, match="'nope' is not in the ledger") as caught:
        ledger.report("nope")
    assert caught.value.remedy == "Runs there are: r1."
    with pytest.raises(StoreError, match="there is no ledger"):
        Ledger(path.with_name("other.sqlite"), create=False)
    assert not path.with_name("other.sqlite").exists()
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="can not be used: file is not a database"):
        Ledger(path)
    with pytest.raises(StoreError, match="is not a database URL"):
        Ledger("://")


def test_a_ledger_of_a_newer_version_is_refused(path: Path) -> None:
    Ledger(path).close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match="revision this version does not know"):
        Ledger(path)


CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
from coordinator.ledger import Ledger
from coordinator import instructions as do
from edgefl.records import Attempt, ObjectRef
from coordinator_fixture import a_plan

with Ledger(sys.argv[1]) as ledger:
    ledger.create(a_plan(), {}, {}, 0.0)
    for number in range(1, 10_000):
        manifest = {"task": ObjectRef(f"{number:064d}", number)}
        ledger.commit("r1", [do.SaveRound(Attempt("r1", 1, number, 1), "done", manifest=manifest)], [], 0.0)
        print(number, flush=True)
"""


def test_what_was_announced_survives_kill_9(path: Path) -> None:
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here.parent)}
    command = [sys.executable, "-c", CHILD, str(path), str(here)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        announced = [int(child.stdout.readline()) for _ in range(20)]
        child.send_signal(signal.SIGKILL)
        announced += [int(line) for line in child.stdout]
    with Ledger(path, create=False) as ledger:
        stage, number, _, manifest, *_ = ledger.position("r1")
    assert stage == 1
    assert number >= announced[-1]
    assert manifest["task"].size == number


@pytest.mark.parametrize("text", ["{", '"x"', "[1]", '{"run": []}', "\ud7ff", '{"stages": [' + "[" * 3000])
@pytest.mark.parametrize("column", ["plan", "manifest", "part_bytes"])
def test_json_that_makes_no_sense_is_a_damaged_ledger(path: Path, text: str, column: str) -> None:
    begun(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE runs SET {column} = ?", (text,))  # noqa: S608 - of the test's own
    connection.close()
    errors = []
    with Ledger(path) as ledger:
        for read in (ledger.plan, ledger.position, ledger.states, ledger.report):
            try:
                read("r1")
            except StoreError as error:
                errors.append(error)
    assert errors
    assert all("holds what makes no sense" in error.message and "is damaged" in error.remedy for error in errors)


def test_a_zero_byte_in_a_device_s_words_reaches_no_database(path: Path) -> None:
    with begun(path) as ledger:
        ledger.commit("r1", [do.SaveDevice(Hello(device="d1", profile="a\0b"))], [], 1.0)
        assert ledger.report("r1").devices[0].profile == "ab"
