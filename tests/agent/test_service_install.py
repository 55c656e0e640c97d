"""The agent as a service: what `install` would do, that it is the same the second time, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from device_agent.service_install import check_lasting, environment_text, install_steps, uninstall_steps
from device_agent.service_steps import Place, Remove, Run, Write, carry_out, place_of, shown
from edgefl.config.profiles import load_device
from edgefl.errors import ConfigError, ServiceError, StoreError

PYTHON = sys.executable
OPTIONS = ["--data", "/srv/my data", "--profile", "jetson-nano"]


def agent(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith("EDGEFL_")}
    command = [sys.executable, "-m", "device_agent.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**known, **environment})


@pytest.fixture
def installed(monkeypatch):
    """A Python where a service may see it, wherever these tests run."""
    monkeypatch.setattr(sys, "prefix", "/opt/edgefl")
    monkeypatch.setattr(sys, "executable", "/opt/edgefl/bin/python")


@pytest.fixture
def steps(installed):
    """Of a machine's service, its Python and data where a service may see them."""

    def made(profile="jetson-nano", options=OPTIONS, system=True):
        return install_steps(place_of("edgefl-agent", system), options, "", load_device(profile), 252)

    return made


def unit(steps) -> str:
    return next(step.text for step in steps if isinstance(step, Write) and step.path.suffix == ".service")


def test_the_steps_in_their_order(steps):
    text = shown(steps())
    wanted = [
        "chown",
        "--version",
        "test -r '/srv/my data'",
        "EDGEFL_RUN_OPTIONS=",
        "daemon-reload",
        "enable",
        "restart",
    ]
    places = [text.index(f" {word}") for word in wanted]
    assert places == sorted(places)
    assert "(mode 0600)" in text  # of the file that may hold a password


def test_the_unit_runs_this_python_with_the_budgets_ceiling(steps):
    text = unit(steps())
    python = sys.executable
    assert f"ExecStart={python} -m device_agent.cli run $EDGEFL_RUN_OPTIONS --state /var/lib/edgefl-agent" in text
    assert f"MemoryHigh={2 * 2**30 + 128 * 2**20}\n" in text
    assert "WatchdogSec=120" in text
    assert "User=edgefl\n" in text


@pytest.mark.parametrize(
    ("profile", "line"), [("raspberry-pi-5", "PrivateDevices=yes"), ("cuda", "DeviceAllow=char-nvidia*")]
)
def test_devices_are_open_as_far_as_training_needs_them(steps, profile, line):
    assert line in unit(steps(profile))


def test_home_is_seen_where_the_data_lies_there_alone(steps):
    assert "ProtectHome=yes" in unit(steps())
    assert "ProtectHome=read-only" in unit(steps(options=["--data", "/home/ada/data"]))


def test_what_the_service_could_not_see_is_refused(tmp_path, monkeypatch):
    place = here(tmp_path)._replace(system=True)
    with pytest.raises(ConfigError, match="/tmp/data: is in a directory for temporary files"):
        check_lasting(place, ["--data", "/tmp/data"])
    monkeypatch.setattr(sys, "prefix", "/tmp/a clone/.venv")
    with pytest.raises(ConfigError, match=r"/tmp/a clone/\.venv: is in a directory for temporary files"):
        check_lasting(place, [])
    check_lasting(place._replace(system=False), ["--data", "/tmp/data"])


def test_a_service_of_ones_own_has_no_account_and_lingers(steps):
    made = steps(system=False)
    text = shown(made)
    assert "useradd" not in text
    assert "chown" not in text
    assert "systemctl --user restart" in text
    assert "loginctl enable-linger" in text
    assert "WantedBy=default.target" in unit(made)
    assert "WatchdogSec=120" in unit(made)
    assert "(systemctl --user edit edgefl-agent)" in unit(made)
    assert "(systemctl edit edgefl-agent)" in unit(steps())


#: A torch without CUDA, as far as the check asks.
NO_CUDA = """
__version__ = "2.9.9"
class version: cuda = None
class cuda:
    @staticmethod
    def is_available(): return False
def randn(*sizes, **options): raise AssertionError("Torch not compiled with CUDA enabled")
"""


@pytest.mark.parametrize(("profile", "warned"), [("h100", True), ("gpu-box", False)])
def test_installing_warns_where_the_profile_asks_for_cuda_and_torch_has_none(tmp_path, profile, warned):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(NO_CUDA)
    front = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    options = ["--data", "basic_motions", "--broker", "mqtt://127.0.0.1", "--profile", profile]
    done = agent("install", "--user", "--dry-run", *options, HOME=str(tmp_path), PYTHONPATH=front)
    assert done.returncode == 0
    assert ("warning: the agent will not train" in done.stderr) == warned
    assert ("[torch-no-gpu]" in done.stderr or "[torch-cpu-build]" in done.stderr) == warned
    assert ("what to do: " in done.stderr) == warned


def test_options_survive_systemds_splitting():
    text = environment_text(["--data", "/srv/my data", "--set", "budget.memory_bytes=3 GiB"], "mqtt://u:p@h")
    assert "EDGEFL_RUN_OPTIONS=\"--data '/srv/my data' --set 'budget.memory_bytes=3 GiB'\"\n" in text
    assert 'EDGEFL_BROKER="mqtt://u:p@h"\n' in text


@pytest.mark.parametrize("word", ["it's", 'a"b', "a\\b", "a\nb", "a`b"])
def test_what_systemd_would_take_for_its_own_is_refused(word):
    with pytest.raises(ConfigError, match="do not work in a service"):
        environment_text(["--data", word], "")


@pytest.mark.parametrize("name", ["..", "a/b", "", "-x", "a b"])
def test_a_name_that_leads_elsewhere_is_refused(name):
    with pytest.raises(Exception, match="letters, digits"):
        place_of(name, system=True)


def here(folder: Path) -> Place:
    return Place("edgefl-agent", False, folder / "unit" / "a.service", folder / "a.env", folder / "state")


def test_steps_that_are_done_already_change_nothing(tmp_path):
    told: list[str] = []
    file = tmp_path / "new" / "file"
    for text in ("one", "one", "two"):
        carry_out([Write(file, text, 0o600)], told.append)
    assert told == [f"wrote {file}", f"kept  {file}", f"wrote {file}"]
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("two", 0o600)
    file.chmod(0o644)
    carry_out([Write(file, "two", 0o600)], told.append)
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_step_that_fails_ends_it_with_the_programs_words(tmp_path):
    told: list[str] = []
    fails = Run(("sh", "-c", "echo one >&2; echo not allowed >&2; exit 3"), "Ask first.")
    with pytest.raises(ServiceError, match=r"\(3\): one not allowed") as raised:
        carry_out([fails, Write(tmp_path / "never", "")], told.append)
    assert raised.value.remedy == "Ask first."
    assert not (tmp_path / "never").exists()
    carry_out([fails._replace(optional=True), Run(("no-such-program",), "It is gone.", optional=True)], told.append)
    assert told[0].endswith("not allowed: Ask first.")
    assert told[1] == "cannot run no-such-program: No such file or directory: It is gone."


def test_uninstalling_keeps_identity_and_options_and_purging_does_not(tmp_path):
    place = here(tmp_path)
    (tmp_path / "state" / "credentials").mkdir(parents=True)
    place.environment.write_text("x")
    assert uninstall_steps(place, tmp_path / "state", purge=False) == []  # there is no unit
    purged = uninstall_steps(place, tmp_path / "state", purge=True)
    assert purged == [Remove(place.environment), Remove(tmp_path / "state")]
    carry_out(purged, lambda line: None)
    assert list(tmp_path.iterdir()) == []
    carry_out(purged, lambda line: None)  # again: nothing is there


def test_a_directory_that_is_no_agents_state_is_not_deleted(tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(StoreError, match="does not look like an agent's state"):
        carry_out([Remove(tmp_path)], lambda line: None)
    assert (tmp_path / "photos").exists()


@pytest.mark.usefixtures("installed")
def test_what_another_program_has_under_that_name_is_left_alone(tmp_path):
    """A chown of /var/lib/docker, or its unit overwritten or removed, takes more than this service with it."""
    place = here(tmp_path)._replace(system=True)
    (tmp_path / "unit").mkdir()
    (tmp_path / "state").mkdir()
    device = load_device("cpu")
    assert install_steps(place, ["--data", "/srv/data"], "", device, 252), "an empty directory is nobody's"
    (tmp_path / "state" / "images").mkdir()
    for steps in (lambda: install_steps(place, [], "", device, 252), lambda: uninstall_steps(place, tmp_path, True)):
        with pytest.raises(ServiceError, match="state does not look like an agent's state"):
            steps()
    (tmp_path / "state" / "identity.json").touch()
    place.unit.write_text("[Service]\nExecStart=/usr/bin/dockerd\n")
    for steps in (lambda: install_steps(place, [], "", device, 252), lambda: uninstall_steps(place, tmp_path, False)):
        with pytest.raises(ServiceError, match="was not written by `edgefl-agent install`"):
            steps()


@pytest.mark.usefixtures("installed")
def test_the_unit_that_was_installed_is_its_own_and_can_be_changed_and_removed(tmp_path):
    place = here(tmp_path)
    for _ in range(2):
        made = install_steps(place, ["--data", "/srv/data"], "", load_device("cpu"), 252)
        carry_out([step for step in made if isinstance(step, Write)], lambda line: None)
    assert Remove(place.unit) in uninstall_steps(place, tmp_path / "state", False)


def test_a_dry_run_names_each_path_at_fault_and_makes_what_is_missing_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = agent("install", "--dry-run", "--data", "shares/cam.npz", "--broker", "mqtt://127.0.0.1")
    assert done.returncode == 0, done.stderr
    assert f'EDGEFL_RUN_OPTIONS="--data {tmp_path / "shares/cam.npz"}"' in done.stdout
    assert "problem" not in done.stderr
    if str(tmp_path).startswith("/tmp/"):
        assert f"missing: {tmp_path / 'shares/cam.npz'}: is in a directory for temporary files" in done.stderr
    done = agent("install", "--dry-run", "--data", "basic_motions", "--broker", "mqtt://127.0.0.1")
    assert "--data basic_motions" in done.stdout, "a data set's name is no path"


def test_a_dry_run_shows_the_unit_and_hides_the_password(tmp_path):
    broker = "mqtt://u:secret@127.0.0.1"
    done = agent("install", "--user", "--dry-run", "--data", "basic_motions", "--broker", broker, HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "ExecStart=" in done.stdout
    assert 'EDGEFL_BROKER="mqtt://u:***@127.0.0.1:1883"' in done.stdout  # else the password looks lost
    assert "secret" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_service_trains_by_its_owners_code_wherever_it_was_installed_from(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "device.yaml").write_text("name: d\ntrainer: 'mine:train'\n")
    monkeypatch.chdir(tmp_path)
    options = ["install", "--user", "--dry-run", "--broker", "mqtt://127.0.0.1"]
    done = agent(*options, "--trainer", "mine.py:train", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"--trainer {tmp_path / 'mine.py'}:train" in done.stdout
    assert "--data" not in done.stderr + done.stdout, "its own code knows where the data are"
    done = agent(*options, "--profile", "device.yaml", HOME=str(tmp_path))
    assert "which data" not in done.stderr, "the profile names the code"


def test_a_device_without_identity_and_broker_learns_how_to_enrol():
    done = agent("install", "--data", "basic_motions")
    assert done.returncode == 2
    assert "enroll - --state /var/lib/edgefl-agent" in " ".join(done.stderr.replace("│", " ").split())


def test_a_dry_run_shows_the_unit_whatever_is_missing_and_names_that():
    done = agent("install", "--dry-run", PATH="/nowhere")
    assert done.returncode == 0, done.stderr
    assert "ExecStart=" in done.stdout
    assert 'EDGEFL_RUN_OPTIONS="--data DATA"' in done.stdout
    missing = [line for line in done.stderr.splitlines() if line.startswith("missing: ")]
    for words in ("--data: which data", "--broker: is needed by a device that is not enrolled", "has no systemd"):
        assert any(words in line for line in missing), words
    assert agent("install").returncode == 2


@pytest.mark.skipif(Path("/run/systemd/system").is_dir(), reason="systemd runs this machine")
def test_without_systemd_it_says_what_to_do_instead(tmp_path):
    options = ["--data", "basic_motions", "--broker", "mqtt://127.0.0.1", "--user"]
    done = agent("install", *options, HOME=str(tmp_path))
    assert done.returncode == ServiceError.exit_code
    assert "systemd does not run this machine" in done.stderr
    assert "container" in done.stderr
    assert list(tmp_path.iterdir()) == []
