"""The ledger: gives back what was put in, and never forgets what was announced."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from coordinator_fixture import a_plan
from ledger_fixture import engine_of, ledger_at, saved_round
from sqlalchemy import text as sql

from coordinator.core import moves as do
from coordinator.ledger import tables
from coordinator.ledger.ledger import Ledger
from edgefl.errors import StoreError
from edgefl.records import Attempt, Budget, Capabilities, EvaluationRow, Figure, ObjectRef, Refusal
from edgefl.run_records import AssignmentRow, BundleRow, DeviceRow, EventRow, RoundRow

FIRST = Attempt("r1", 1, 1, 1)
REF = ObjectRef("a" * 64, 10)
INITIAL = {"task": ObjectRef("0" * 64, 10)}
MADE_MS = 100_000  # milliseconds since the epoch


@pytest.fixture
def path(tmp_path: Path) -> str | Path:
    return ledger_at(tmp_path / "ledger.sqlite")


def begun(path: str | Path) -> Ledger:
    ledger = Ledger(path)
    ledger.create(a_plan(), INITIAL, {"task": 8}, 100.0)
    return ledger


def test_what_a_device_wrote_is_kept_as_every_database_can(path: str | Path) -> None:
    """Texts with a character 0 and too long, a figure that is no number: cut, without it, and null."""
    device = DeviceRow("a", "na\0no" + "x" * 500)
    figures = {"flops": Figure(math.nan, "counted", "sour\0ce"), "energy_j": Figure(reason="\0" + "y" * 2000)}
    with begun(path) as ledger:
        row = AssignmentRow("a", 1, 1, 1, "done", metrics={"lo\0ss": 0.5}, measured=figures)
        done = row
        told = EventRow(1.0, "warning", device="a", data={"text": "a\0b"})
        ledger.commit("r1", [device, saved_round(FIRST), done], [told], 1.0)
        report = ledger.report()
    assert report.devices[0].profile == "nano" + "x" * 124
    measured = report.assignments[0].measured
    assert (measured["flops"].value, measured["flops"].source) == (None, "source")
    assert measured["energy_j"].reason == "y" * 1024
    assert report.events == (told,)


def test_rows_of_one_attempt_in_one_transaction_leave_what_those_in_several_leave(tmp_path: Path) -> None:
    """A simulated fleet's record takes one a round."""
    cost = {"flops": Figure(1.0, "counted", "s")}
    steps = [
        AssignmentRow("a", 1, 1, 1, "accepted", predicted=cost),
        AssignmentRow("a", 1, 1, 1, "accepted", measured={"payload_down_bytes": Figure(2.0, "counted", "s")}),
        AssignmentRow("a", 1, 1, 1, "declined", measured={"compute_s": Figure(3.0, "measured", "s")}),
        AssignmentRow("b", 1, 1, 1, "accepted", measured={"payload_down_bytes": Figure(4.0, "counted", "s")}),
        AssignmentRow("b", 1, 1, 1, "done", measured={"payload_up_bytes": Figure(5.0, "counted", "s")}),
    ]
    found = []
    for name, batches in (("one", [steps]), ("several", [[step] for step in steps])):
        with begun(ledger_at(tmp_path / f"{name}.sqlite")) as ledger:
            for batch in batches:
                ledger.commit("r1", batch, [], 1.0)
            found.append(ledger.report().assignments)
    assert found[0] == found[1]
    assert found[0][0].measured.keys() == {"payload_down_bytes", "compute_s"}


def test_what_we_wrote_ourselves_is_not_cut(tmp_path: Path) -> None:
    """Bundles whose names differ late are two. PostgreSQL refuses what is longer than its column."""
    names = ("n" * 64 + "1", "n" * 64 + "2")
    bundles = tuple(BundleRow(name, "p" * 1100 + name, ("acc",), 1) for name in names)
    with begun(tmp_path / "ledger.sqlite") as ledger:
        for bundle in bundles:
            ledger.add_bundle("r1", bundle)
        assert ledger.report().bundles == bundles


def test_an_open_ledger_can_be_read_while_it_is_written(path: str | Path) -> None:
    with begun(path) as writer, Ledger(path, create=False) as reader:
        writer.commit("r1", [saved_round(FIRST)], [], 101.0)
        assert [r.run for r in reader.runs()] == ["r1"]
        assert reader.report("r1").rounds[0].status == "running"


def test_a_report_gives_back_what_was_put_in(path: str | Path) -> None:
    device = DeviceRow("a", "nano", Capabilities(cores=4), Budget(flops=1e12), {"": 8}, (4, 4))
    trained = a_plan().stages[0].trained
    predicted = {"flops": Figure(5.0, "predicted", "meta device")}
    measured = {"energy_j": Figure(reason="no sensor"), "flops": Figure(6.0, "counted", "counter")}
    refusal = Refusal("step_memory", 5.0, 3.0, "B", "too large")
    value = EvaluationRow(1, 1, ("acc",), "prototype", "accuracy", 0.75, 40, "cosine")
    told = EventRow(102.0, "warning", 1, 1, "a", {"text": "so"})
    with begun(path) as ledger:
        refused = AssignmentRow("b", 1, 1, 1, "refused", refusal, 4, trained=trained)
        offered = AssignmentRow("a", 1, 1, 1, "offered", None, 4, 2, trained, predicted=predicted)
        saves = [device, saved_round(FIRST), offered, refused]
        ledger.commit("r1", saves, [], 101.0)
        done = AssignmentRow("a", 1, 1, 1, "done", None, 4, 2, trained, {"task": 8}, {"loss": 0.5}, measured=measured)
        ledger.commit("r1", [done], [told], 102.0)
        closed = saved_round(
            FIRST,
            "done",
            participants=("a",),
            metrics={"loss": 0.5},
            record={"combine": {"choice": "mean"}},
            manifest={"task": REF},
        )
        ledger.commit("r1", [closed, value], [], 103.0)
        ledger.commit("r1", [do.SaveEnd("done")], [], 104.0)
        bundle = BundleRow("acc", "bundles/acc.onnx", ("acc",), 1000, 1e-6, 1e-4)
        ledger.add_bundle("r1", BundleRow("acc"))
        ledger.add_bundle("r1", bundle)
        report = ledger.report()
    assert (report.run, report.status, report.started_at, report.finished_at) == ("r1", "done", 100.0, 104.0)
    assert report.config == {"seed": 0}
    assert report.part_bytes == {"task": 8}
    assert report.stages[0]["trained"] == ["acc/stage1", "task"]
    assert report.devices == (device,)
    record = {"combine": {"choice": "mean"}}
    assert report.rounds == (RoundRow(1, 1, 1, "done", 101.0, 103.0, ("a",), {"loss": 0.5}, record),)
    assert report.assignments == (msgspec.structs.replace(done, predicted=predicted), refused)
    assert report.evaluations == (value,)
    assert report.events == (told,)
    assert report.bundles == (bundle,)


def test_the_position_is_after_the_last_finished_round(path: str | Path) -> None:
    with begun(path) as ledger:
        assert ledger.position("r1") == (0, 0, 0, INITIAL, None, MADE_MS, ())
        ledger.commit("r1", [saved_round(FIRST)], [], 1.0)
        assert ledger.position("r1") == (0, 0, 1, INITIAL, None, MADE_MS, ())
        ledger.commit("r1", [saved_round(FIRST, "done", manifest={"task": REF})], [], 2.0)
        assert ledger.position("r1") == (1, 1, 0, {"task": REF}, Attempt("r1", 1, 1, 1, MADE_MS), MADE_MS, ())
        ledger.commit("r1", [EvaluationRow(1, 1)], [], 2.0)
        ledger.commit("r1", [saved_round(Attempt("r1", 2, 1, 1))], [], 3.0)
        assert ledger.position("r1") == (1, 1, 1, {"task": REF}, None, MADE_MS, ())
        ledger.reopen("r1", 4.0)
        assert ledger.report().rounds[-1].status == "failed"
        assert ledger.states("r1") == {(0, 0): INITIAL, (1, 1): {"task": REF}}
        assert ledger.plan("r1") == a_plan()


def test_a_finished_run_that_is_started_again_keeps_the_time_of_its_end(path: str | Path) -> None:
    with begun(path) as ledger:
        ledger.commit("r1", [saved_round(FIRST, "done", manifest={"task": REF}), do.SaveEnd("stopped")], [], 2.0)
        ledger.reopen("r1", 3.0)
        assert ledger.report().finished_at is None
        ledger.commit("r1", [do.SaveEnd("done")], [], 4.0)
        ledger.reopen("r1", 5.0)
        assert (ledger.report().status, ledger.report().finished_at) == ("running", 4.0)
        ledger.commit("r1", [do.SaveEnd("done")], [], 6.0)
        assert (ledger.report().status, ledger.report().finished_at) == ("done", 4.0)


def test_a_metric_that_is_no_number_is_left_out_of_the_report(path: str | Path) -> None:
    with begun(path) as ledger:
        ledger.commit("r1", [saved_round(FIRST, "done", metrics={"loss": math.nan, "ok": 1.0})], [], 1.0)
        assert ledger.report().rounds[0].metrics == {"ok": 1.0}


def test_a_failed_commit_changes_nothing(path: str | Path) -> None:
    with begun(path) as ledger:
        bad = EventRow(1.0, "warning", data={"text": object()})
        with pytest.raises((StoreError, TypeError)):
            ledger.commit("r1", [saved_round(FIRST)], [bad], 1.0)
        assert ledger.report().rounds == ()


def test_a_run_of_the_same_name_is_refused_and_nothing_is_lost(path: str | Path) -> None:
    with begun(path) as ledger:
        with pytest.raises(StoreError, match=r"is in the ledger .* already"):
            ledger.create(a_plan(), INITIAL, {}, 200.0)
        assert ledger.report().started_at == 100.0


def test_unknown_runs_are_named_with_those_there_are(path: str | Path) -> None:
    with begun(path) as ledger, pytest.raises(StoreError, match="'nope' is not in the ledger") as caught:
        ledger.report("nope")
    assert caught.value.remedy == "Runs there are: r1."


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("revision", ["0004", "9999"])
def test_a_ledger_of_another_revision_is_refused(path: str | Path, revision: str, create: bool) -> None:
    Ledger(path).close()
    engine = engine_of(path)
    with engine.begin() as connection:
        connection.execute(sql(f"UPDATE alembic_version SET version_num = '{revision}'"))  # noqa: S608 - the test's own
    engine.dispose()
    with pytest.raises(StoreError, match=f"has the revision {revision}, this version of EdgeFL {tables.REVISION}"):
        Ledger(path, create=create)


CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
from coordinator.ledger.ledger import Ledger
from coordinator.core import moves as do
from edgefl.records import ObjectRef
from coordinator_fixture import a_plan

with Ledger(sys.argv[1]) as ledger:
    ledger.create(a_plan(), {}, {}, 0.0)
    for number in range(1, 10_000):
        manifest = {"task": ObjectRef(f"{number:064d}", number)}
        ledger.commit("r1", [do.SavedRound(1, number, 1, "done", manifest=manifest)], [], 0.0)
        print(number, flush=True)
"""


def test_what_was_announced_survives_kill_9(path: str | Path) -> None:
    here = Path(__file__).parents[1]
    Ledger(path).close()
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
    if not isinstance(path, Path):
        pytest.skip("PostgreSQL itself refuses JSON that is none")
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
        ledger.commit("r1", [DeviceRow("d1", "a\0b")], [], 1.0)
        assert ledger.report("r1").devices[0].profile == "ab"


def test_statements_of_ledgers_that_are_closed_do_not_pile_up(tmp_path: Path) -> None:
    """A study's process opens one after another, and each has a dialect of its own."""
    for number in range(20):
        dialect = engine_of(tmp_path / str(number)).dialect
        for table in tables.TABLES.values():
            tables._statement(table, dialect)
            tables._removal(table, ("run",), dialect)
    assert tables._statement.cache_info().currsize <= 64
    assert tables._removal.cache_info().currsize <= 64
