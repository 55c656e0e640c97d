"""The command line: quick help, lazily loaded verbs, runs found by what a person types, the verbs that read."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer
from ledger_fixture import ledger_in
from report_fixture import run_report
from typer.testing import CliRunner

from edgefl.api import runs as locate
from edgefl.api.runs import write_file
from edgefl.cli import main
from edgefl.errors import BrokerError, EdgeFLError, RunError, StoreError
from edgefl.storage.disk import LEDGER

HEAVY = ("torch", "numpy", "sqlalchemy", "matplotlib", "jinja2", "pydantic", "msgspec", "coordinator", "device_agent")


def edgefl(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run the command in this process: exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as ended:
        main.main(list(arguments))
    told = capsys.readouterr()
    code = ended.value.code
    return int(code or 0), told.out, told.err


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs whose ledgers are stood in for by the fixture's report."""
    folder = tmp_path / "runs"
    for age, name in enumerate(("20260101-old", "20260918-new")):
        (folder / name).mkdir(parents=True)
        ledger = folder / name / LEDGER
        ledger.write_bytes(b"")
        os.utime(ledger, (1_000 + age, 1_000 + age))
    monkeypatch.setenv("EDGEFL_RUNS", str(folder))
    report = run_report()
    for module in ("show", "devices"):
        reading = f"edgefl.cli.{module}.read_run"
        monkeypatch.setattr(reading, lambda path: msgspec.structs.replace(report, run=path.name))
    monkeypatch.setattr("edgefl.cli.show.priced", lambda report, _: report)
    return folder


# Help


def test_help_is_quick_because_it_loads_no_verb() -> None:
    script = (
        "import sys\n"
        "from edgefl.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"
    for verb, (_, words) in main.VERBS.items():
        assert verb in done.stdout
        assert words.split(":")[0].split(",")[0] in done.stdout


@pytest.mark.parametrize("verb", ["runs", "report", "devices", "doctor"])
def test_each_reading_verb_has_full_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = edgefl(verb, "--help", capsys=capsys)
    assert code == 0
    assert "Example" in out
    assert "--format" in out
    assert "--debug" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    python = ".".join(map(str, sys.version_info[:3]))
    assert edgefl("--version", capsys=capsys)[:2] == (0, f"edgefl 0.1.0 (protocol 1, Python {python})\n")


def test_a_misspelt_verb_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = edgefl("repport", capsys=capsys)
    assert code == 2
    assert "report" in err


# Errors


def fake_verb(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def command(deep: bool = typer.Option(False, "--deep")) -> None:
        """Fail."""
        raise error

    module = type(sys)("edgefl_fake_verb")
    module.command = command  # type: ignore[attr-defined]  # a module made up for this test
    monkeypatch.setitem(sys.modules, "edgefl_fake_verb", module)
    monkeypatch.setitem(main.VERBS, "fake", ("edgefl_fake_verb:command", "Fail."))


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (BrokerError("mqtt://host:1 refuses the connection"), 14, "what to do: Check the broker"),
        (ModuleNotFoundError("No module named 'onnx'", name="onnx"), 19, "pip install 'edgefl-toolkit[export]'"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("odd"), 1, "--debug"),
    ],
)
def test_errors_of_a_verb_are_words_and_codes(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_verb(monkeypatch, error)
    ended, _, err = edgefl("fake", capsys=capsys)
    assert ended == code
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [("--debug", "fake"), ("fake", "--debug"), ("fake", "--deep", "--debug")])
def test_debug_may_stand_anywhere(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_verb(monkeypatch, BrokerError("no"))
    assert "Traceback" in edgefl(*arguments, capsys=capsys)[2]


def test_a_verb_whose_package_is_missing_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(_: str) -> None:
        raise ModuleNotFoundError("No module named 'sqlalchemy'", name="sqlalchemy")

    monkeypatch.setattr(main.importlib, "import_module", absent)
    code, _, err = edgefl("runs", capsys=capsys)
    assert code == 19
    assert "'SQLAlchemy'" in err
    assert "pip install 'edgefl-toolkit[coordinator]'" in err


def test_all_that_is_missing_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_verb(monkeypatch, ModuleNotFoundError("No module named 'sktime'", name="sktime"))
    monkeypatch.setitem(main.NEEDS, "fake", ("torch", "sqlalchemy", "msgspec"))
    known = importlib.util.find_spec
    absent = {"torch", "sqlalchemy"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else known(name))
    code, _, err = edgefl("fake", capsys=capsys)
    assert code == 19
    assert "needs the packages 'sktime', 'torch' and 'SQLAlchemy', which are not installed" in err
    assert "pip install 'edgefl-toolkit[demo,train,coordinator]'" in err
    assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" in err


# Finding runs


def test_a_run_is_found_by_id_prefix_or_latest(runs: Path) -> None:
    assert locate.find_run("latest", runs).name == "20260918-new"
    assert locate.find_run("202601", runs).name == "20260101-old"
    assert locate.find_run("20260918-new", runs).name == "20260918-new"
    assert locate.find_run(str(runs / "20260101-old"), runs).name == "20260101-old"


def test_an_ambiguous_or_unknown_run_names_what_there_is(runs: Path) -> None:
    with pytest.raises(RunError, match="fits 2 runs: 20260918-new, 20260101-old"):
        locate.find_run("2026", runs)
    with pytest.raises(RunError, match="no run 'x'") as unknown:
        locate.find_run("x", runs)
    assert "20260101-old" in unknown.value.remedy


def test_no_runs_at_all_says_how_to_begin(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run") as empty:
        locate.find_run("latest", tmp_path / "none")
    assert "edgefl run" in empty.value.remedy


# Reading verbs


def test_report_in_each_format(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = edgefl("report", capsys=capsys)
    assert code == 0
    assert "What each device spent" in out
    assert "\x1b" not in out
    assert json.loads(edgefl("report", "202601", "--format", "json", capsys=capsys)[1])["run"] == "20260101-old"
    assert edgefl("report", "--format", "csv", capsys=capsys)[1].startswith("run,device,stage")


def test_html_goes_next_to_the_ledger_or_where_it_is_told(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "edgefl.report.writers.to_html",
        lambda report, interactive: f"<!doctype html>{report.run}{'' if interactive else ', still'}",
    )
    code, _, err = edgefl("report", "--html", "20260918-new", capsys=capsys)  # no file: the run
    assert code == 0
    written = runs / "20260918-new" / "report.html"
    assert str(written) in err.replace("\n", "")
    assert written.read_text(encoding="utf-8") == "<!doctype html>20260918-new"
    edgefl("report", "--html", "--static", capsys=capsys)
    assert written.read_text(encoding="utf-8") == "<!doctype html>20260918-new, still"
    code, _, err = edgefl("report", "--static", capsys=capsys)
    assert (code, "goes with --html" in err) == (2, True)
    target = tmp_path / "deep" / "report.csv"
    edgefl("report", "--format", "csv", "-o", str(target), capsys=capsys)
    assert target.read_text(encoding="utf-8").startswith("run,device,stage")


def test_parquet_goes_next_to_the_ledger_into_a_folder_or_a_file(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    places = {"there": "there/report.parquet", "some.parquet": "some.parquet"}
    for output, written in places.items():
        assert edgefl("report", "--format", "parquet", "-o", str(tmp_path / output), capsys=capsys)[0] == 0
        assert "predicted" in parquet.read_schema(tmp_path / written).names
    edgefl("report", "--format", "parquet", capsys=capsys)
    assert (runs / "20260918-new" / "report.parquet").is_file()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = edgefl("report", "--format", "parquet", capsys=capsys)
    assert (code, "[parquet]" in err) == (19, True)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EdgeFLError, match="cannot write") as error:
        write_file(tmp_path / "file" / "report.html", "x")
    assert "another file" in error.value.remedy


def test_devices_shows_totals_with_reasons(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "may spend per round" in edgefl("devices", capsys=capsys)[1]
    body = json.loads(edgefl("devices", "latest", "--format", "json", capsys=capsys)[1])
    nano = next(device for device in body["devices"] if device["device"] == "nano")
    assert nano["totals"]["energy_j"]["value"] is None
    assert nano["totals"]["energy_j"]["reason"]
    assert nano["totals"]["flops"]["value"] > 0


def test_an_unknown_format_lists_the_choices(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = edgefl("report", "--format", "pdf", capsys=capsys)
    assert code == 2
    assert "parquet" in err


def test_a_damaged_ledger_is_named_and_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / LEDGER).write_bytes(b"this is no database" * 100)
    code, out, err = edgefl("runs", "--runs", str(tmp_path), "--format", "json", capsys=capsys)
    assert (code, json.loads(out)) == (0, [])
    assert "bad" in err
    with pytest.raises(StoreError):
        locate.read_run(tmp_path / "bad")


def test_the_verbs_read_a_real_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from coordinator.ledger.ledger import Ledger
    from edgefl.plan.job import RunPlan

    monkeypatch.setenv("EDGEFL_RUNS", str(tmp_path))
    with Ledger(ledger_in(tmp_path / "r1")) as ledger:
        ledger.create(RunPlan(run="r1", name="first", recipe="layerwise"), {}, {"task": 4}, at=1_790_000_000.0)
    assert "first" in edgefl("runs", capsys=capsys)[1]
    assert json.loads(edgefl("runs", "--format", "json", capsys=capsys)[1])[0]["run"] == "r1"
    assert "No device has joined yet." in edgefl("report", "r", capsys=capsys)[1]
    assert "No round has started yet." in edgefl("report", "r", "--verbose", capsys=capsys)[1]
    assert json.loads(edgefl("report", "--format", "json", capsys=capsys)[1])["part_bytes"] == {"task": 4}
    assert "No device has joined yet." in edgefl("devices", capsys=capsys)[1]


def test_doctor_fails_when_a_check_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from device_agent import device_checks as doctor
    from edgefl.cli.show import doctor_command
    from edgefl.findings import found, well

    checks = [well("python", "3.11"), found("broker-absent", "refused")]
    monkeypatch.setattr(doctor, "examine", lambda _: checks)
    app = typer.Typer()
    app.command()(doctor_command)
    told = CliRunner().invoke(app, ["--format", "json"])
    assert told.exit_code == 1
    assert json.loads(told.stdout)[1]["id"] == "broker-absent"
    assert "Start the broker" in CliRunner().invoke(app, []).stdout
