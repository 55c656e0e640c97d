"""The agent's command line: bad input ends with a message, a way out and a stable exit code; doctor's findings."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from device_agent.board import board
from device_agent.runtime.connect import Options, check_fit, take_options
from edgefl.errors import (
    BrokerError,
    BrokerUnreachableError,
    ConfigError,
    DataError,
    EdgeFLError,
    MissingDependencyError,
    ProtocolError,
    TrainingCodeError,
)
from edgefl.findings import FINDINGS
from edgefl.log_lines import LineHandler, line_writer
from edgefl.process.service_unit import NO_RESTART
from edgefl.transport import failures
from edgefl.transport.address import parse_url
from edgefl.transport.broker import start_broker


def agent(*arguments, timeout=60, **environment):
    command = [sys.executable, "-m", "device_agent.cli", *arguments]
    known = {name: value for name, value in os.environ.items() if name != "EDGEFL_BROKER"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**known, **environment})


def test_a_broker_that_refuses_ends_the_agent_and_its_password_is_not_printed(tmp_path):
    async def scene():
        async with start_broker(tmp_path / "broker", "auto") as broker:
            wrong = broker.url.replace(broker.address.password, "guessed-secret")
            options = [
                "--broker",
                wrong,
                "--data",
                "basic_motions",
                "--device",
                "d1",
                "--state",
                str(tmp_path / "state"),
            ]
            return await asyncio.to_thread(agent, "run", *options)

    done = asyncio.run(scene())
    assert done.returncode == BrokerError.exit_code
    assert "error: the broker mqtt://edgefl@127.0.0.1" in done.stderr
    assert "password" in done.stderr.splitlines()[-1]
    assert "guessed-secret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_sample_ends_the_agent_and_is_named(tmp_path):
    # The broker is not there either: the agent goes on dialling, and the data's fault ends it.
    np.savez(tmp_path / "bad.npz", acc=np.full((3, 4, 2), np.nan, np.float32), label=np.zeros(3, np.int64))
    options = [
        "--broker",
        "mqtt://127.0.0.1:9",
        "--data",
        str(tmp_path / "bad.npz"),
        "--state",
        str(tmp_path / "state"),
    ]
    done = agent("run", *options, "--device", "d1", "--format", "json")
    assert done.returncode == DataError.exit_code
    assert "bad.npz:0: sample 0: acc: holds values that are not finite" in done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert [line["event"] for line in lines if line["event"] == "unreachable"]
    assert [line["event"] for line in lines[-2:]] == ["stopped", "error"]
    assert lines[-1]["exit_code"] == DataError.exit_code


@pytest.mark.slow  # torch is loaded; test_trainer_process has the error, test_service_status the note
@pytest.mark.skipif(board().any_gpu, reason="there is a GPU here")
def test_a_profile_that_asks_for_cuda_where_there_is_none_ends_the_agent_for_good(tmp_path):
    """Not three tries and the exit code of a trainer that died, with which a service is started for ever."""
    given = ["--broker", "mqtt://127.0.0.1:9", "--data", "basic_motions", "--state", str(tmp_path), "--profile", "cuda"]
    done = agent("run", *given)
    assert done.returncode == ConfigError.exit_code
    assert done.returncode in NO_RESTART
    assert "trainer-lost" not in done.stderr
    assert "torch_device: the profile asks for cuda; no GPU is here (torch" in done.stderr
    assert f"what to do: {FINDINGS['torch-no-gpu'].remedy}" in done.stderr
    told = agent("status", "--state", str(tmp_path))
    assert told.returncode == 1
    assert "did last      ended in error: the device's profile: 1 problem torch_device: the profile" in told.stdout
    assert "(exit code 10)" in told.stdout


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--profile", "no-such-profile"], ConfigError.exit_code, "no shipped profile of this name"),
        (["--set", "budget.memory_bites=1"], ConfigError.exit_code, "budget.memory_bites"),
        (["--device", "a/b"], ProtocolError.exit_code, "device 'a/b' is not a valid name"),
    ],
)
def test_faults_of_the_command_line_are_named(tmp_path, options, code, words):
    done = agent("run", "--broker", "mqtt://h", "--data", "x", "--state", str(tmp_path), *options)
    assert done.returncode == code
    assert words in done.stderr
    assert "recipes" not in done.stderr
    assert ("`edgefl-agent profile` measures a device" in done.stderr) == (code == ConfigError.exit_code)
    assert "Traceback" not in done.stderr


def test_a_device_names_its_data_or_the_code_that_reads_them(tmp_path):
    done = agent("run", "--broker", "mqtt://h", "--state", str(tmp_path))
    assert done.returncode == 2
    assert "is needed, unless --trainer reads the data by itself" in " ".join(done.stderr.replace("│", " ").split())
    named = tmp_path / "device.yaml"
    named.write_text("name: d\ntrainer: 'nothing:train'\n")
    state, broker = tmp_path / "state", "mqtt://127.0.0.1:9"
    done = agent("run", "--broker", broker, "--state", str(state), "--profile", str(named), EDGEFL_TRAINER="")
    assert done.returncode == TrainingCodeError.exit_code, "by the profile alone"
    assert "ModuleNotFoundError: No module named 'nothing'" in done.stderr
    done = agent("run", "--broker", broker, "--state", str(state), EDGEFL_TRAINER="json:nothing")
    assert done.returncode == ConfigError.exit_code
    assert "json has no function 'nothing'" in done.stderr


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("nothere", "does not exist"),
        ("folder", "folder' has no manifest.jsonl"),
        ("folder", "folder/x.npz: name one"),
        ("bad.npz", "not a readable .npz file"),
    ],
)
def test_data_that_is_not_there_is_told_before_anything_is_dialled(tmp_path, data, words):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.npz").touch()
    (tmp_path / "bad.npz").write_bytes(b"PK")
    given = ["--broker", "mqtt://127.0.0.1:9", "--data", str(tmp_path / data), "--state", str(tmp_path / "state")]
    done = agent("run", *given)
    assert done.returncode == DataError.exit_code
    assert words in done.stderr
    assert "unreachable" not in done.stderr
    assert not (tmp_path / "state").exists()


def test_a_device_without_torch_is_told_before_anything_is_dialled(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match="'torch'"):
        check_fit("basic_motions")


def test_the_options_pass_the_exec_once():
    options = Options(broker="mqtt://u:secret@h", device="d1", data="x")
    environment = {"EDGEFL_AGENT_OPTIONS": msgspec.json.encode(options).decode(), "HOME": "/h"}
    assert take_options(environment) == options
    assert environment == {"HOME": "/h"}  # the trainer inherits no password
    with pytest.raises(EdgeFLError, match="by hand"):
        take_options(environment)


def test_only_a_broker_that_does_not_answer_is_worth_waiting_for():
    address = parse_url("mqtt://u:p@h:1883")
    waiting_helps = [
        failures.unreachable(address, ConnectionRefusedError()),
        failures.silent(address),
        failures.refused(address, "d1", "Bad user name or password"),
        failures.denied(address, "t", "subscribe to", "Not authorized"),
    ]
    assert [isinstance(error, BrokerUnreachableError) for error in waiting_helps] == [True, True, False, False]


def test_lines_are_one_an_event_in_both_forms():
    out = io.StringIO()
    line_writer("text", out)("declined", reason="disk", needed=2000.0, detail="two words", empty=None)
    assert out.getvalue()[9:] == '! declined       reason=disk needed=2000 detail="two words"\n'
    out = io.StringIO()
    LineHandler(line_writer("json", out)).handle(logging.LogRecord("x", logging.WARNING, "", 1, "a\nb", None, None))
    assert json.loads(out.getvalue())["text"] == "a\nb"
