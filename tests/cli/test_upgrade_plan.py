"""`edgefl devices upgrade-plan`: commands in waves, from releases that are devices' own words."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from identity_fixture import a_fleet, enrolled

from edgefl.cli.main import main
from edgefl.cli.upgrade_plan import commands, planned, playbook, wheel_of
from edgefl.errors import ConfigError
from edgefl.identity.groups import add_to_group

RELEASES = {"cam-a": "", "cam-b": "0.1.0", "cam-c": "0.2.0", "cam-d": "0.1.0"}


def test_one_device_goes_first_and_those_that_have_the_release_are_left_out() -> None:
    plan = planned(RELEASES, "0.2.0", RELEASES)
    assert plan.waves == ({"cam-b": "0.1.0"}, {"cam-a": "", "cam-d": "0.1.0"})
    assert plan.done == ("cam-c",)
    assert planned(RELEASES, f"wheels/{wheel_of('0.2.0')}", RELEASES) == plan._replace(
        wheel=f"wheels/{wheel_of('0.2.0')}"
    )
    assert planned({"a": "0.2.0"}, "0.2.0", {"a"}).waves == ()
    assert planned({"a": ""}, "0.2.0", ()).waves == ({"a": ""},)
    assert planned({"a": "0.2.0"}, "0.2.0", ()).waves == ({"a": ""},), "an earlier run's, perhaps of another machine"


def test_the_commands_copy_upgrade_and_know_the_way_back() -> None:
    lines = commands(planned(RELEASES, "0.2.0", RELEASES))
    new, old = wheel_of("0.2.0"), wheel_of("0.1.0")
    agent = "/opt/edgefl/bin/edgefl-agent"
    assert lines[:6] == [
        lines[0],
        "",
        "# wave 1: 1 device",
        "# cam-b has 0.1.0",
        f"scp dist/{new} cam-b:/tmp/",
        f"ssh cam-b 'sudo {agent} upgrade /tmp/{new}'",
    ]
    assert "# cam-a has an unknown release" in lines
    back = lines[lines.index("# back to the releases of before, by hand:") + 1 :]
    assert [line.split()[2] for line in back if " ssh " in f" {line}"] == ["cam-b", "cam-d"]
    assert f"# scp dist/{old} cam-b:/tmp/" in back


@pytest.mark.parametrize("said", ["0.1.0\ntouch pwned", "$(touch pwned)", "`touch pwned`", "0;touch pwned", "0" * 500])
def test_what_a_device_says_runs_nothing(tmp_path: Path, said: str) -> None:
    """Executed by a shell with `scp` and `ssh` that only say what they were given."""
    for name in ("scp", "ssh"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$0" "$@" >> calls\n')
        (tmp_path / name).chmod(0o700)
    plan = planned({"cam-a": said}, str(tmp_path / "a b; touch pwned" / wheel_of("0.2.0")), ())
    assert plan.waves == ({"cam-a": ""},)
    script = "\n".join(commands(plan))
    subprocess.run(
        ["sh"], input=script, text=True, cwd=tmp_path, env={**os.environ, "PATH": f"{tmp_path}:/bin"}, check=True
    )
    assert not (tmp_path / "pwned").exists()
    assert (tmp_path / "calls").read_text().count("\n") == 2
    assert said not in playbook(plan)


def test_the_playbook_has_a_play_a_wave_and_a_rollback_that_is_asked_for() -> None:
    plays = yaml.safe_load(playbook(planned(RELEASES, "0.2.0", RELEASES)))
    assert [(play["hosts"], play.get("tags")) for play in plays] == [
        ("cam-b", None),
        ("cam-a,cam-d", None),
        ("cam-b,cam-d", ["never", "rollback"]),
    ]
    assert [play["any_errors_fatal"] for play in plays] == [True, True, False]
    with pytest.raises(ConfigError, match="means other machines"):
        playbook(planned({"all": ""}, "0.2.0", ()))
    assert plays[2]["tasks"][1]["ansible.builtin.command"]["argv"][1:] == ["upgrade", f"/tmp/{wheel_of('0.1.0')}"]


@pytest.mark.parametrize("to", ["0.2.0; rm -rf /", "other-0.2.0-py3-none-any.whl", "-1", ""])
def test_what_is_no_release_is_refused(to: str) -> None:
    with pytest.raises(ConfigError, match="neither a version"):
        planned(RELEASES, to, RELEASES)


def test_the_command_plans_a_group_of_the_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = a_fleet(tmp_path / "fleet")
    for name in ("cam-a", "cam-b", "cam-c"):
        enrolled(fleet, name, tmp_path / name)
    add_to_group(fleet, "night", ["cam-a", "cam-c"])
    words = ["devices", "upgrade-plan", "--identity", str(fleet.directory), "--to", "0.2.0", "--runs", str(tmp_path)]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "group:night", "--format", "json"])
    assert json.loads(capsys.readouterr().out)["waves"] == [{"cam-a": ""}, {"cam-c": ""}]
    with pytest.raises(SystemExit) as caught:
        main([*words, "day"])
    assert caught.value.code == ConfigError.exit_code
    assert "no group 'day'; there are: night" in capsys.readouterr().err
