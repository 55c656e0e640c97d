"""A fleet's directory copied to another place: its broker starts there, from the files that lie there."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from identity_fixture import Attackers, a_fleet, enrolled
from transport_fixtures import mosquitto_wanted

from coordinator.runtime.fleet_auth import fleets_broker
from edgefl.identity.device import Credentials
from edgefl.identity.fleet import Fleet
from edgefl.identity.membership import running
from edgefl.protocol import topics

needs_mosquitto = pytest.mark.skipif(not mosquitto_wanted(), reason="mosquitto is not installed")
FILES = ("mosquitto.conf", "newcomers.conf")


def copied(directory: Path, place: Path) -> Fleet:
    """As ``cp -a`` does it; the first place is no more, as on another machine."""
    shutil.copytree(directory, place, symlinks=True)
    shutil.rmtree(directory)
    return Fleet(place)


def brought_up(fleet: Fleet, device: Credentials) -> set[str]:
    """The names of files in the broker's directory while it runs and a device is connected."""

    async def play() -> set[str]:
        async with fleets_broker(fleet, "auto", lambda _: None) as url:
            assert url == fleet.local_url
            transport = fleet.transport("probe")
            await transport.connect()
            await transport.close()
            async with Attackers(fleet) as at:
                client, _ = await at.device(device)
                await client.publish(topics.build("up", "default", "cam"), b"x")
            place = fleet.directory / "broker"
            assert running(place / "mosquitto.pid") is not None
            return {path.name for path in place.iterdir()}

    return asyncio.run(play())


@pytest.mark.parametrize("name", ["elsewhere", "with blanks and (signs)+"])
def test_a_copied_fleets_configuration_names_the_files_beside_it(tmp_path: Path, name: str) -> None:
    made = a_fleet(tmp_path / "fleet")
    before = {file: (made.directory / "broker" / file).read_text() for file in FILES}
    fleet = copied(made.directory, tmp_path / name)
    assert fleet.write_configuration()
    for file in FILES:
        text = (fleet.directory / "broker" / file).read_text()
        assert f"{tmp_path / 'fleet'}/" not in text
        assert text == before[file].replace(f"{tmp_path / 'fleet'}/", f"{fleet.directory}/")
    assert copied(fleet.directory, tmp_path / "fleet").write_configuration()
    assert {file: (tmp_path / "fleet" / "broker" / file).read_text() for file in FILES} == before


def test_lines_added_by_hand_stay_in_a_copy(tmp_path: Path) -> None:
    made = a_fleet(tmp_path / "fleet")
    file = made.directory / "broker" / "mosquitto.conf"
    file.write_text(file.read_text() + f"log_type all\n# of {tmp_path / 'fleet-old'}/broker\n")
    fleet = copied(made.directory, tmp_path / "elsewhere")
    assert not fleet.write_configuration(), "it was edited"
    text = (fleet.directory / "broker" / "mosquitto.conf").read_text()
    assert text.endswith(f"log_type all\n# of {tmp_path / 'fleet-old'}/broker\n")
    assert f"{tmp_path / 'fleet'}/" not in text
    assert f"pid_file {fleet.directory}/broker/mosquitto.pid" in text
    assert f"{tmp_path / 'fleet'}/" not in (fleet.directory / "broker" / "newcomers.conf").read_text()


def test_a_file_that_was_moved_by_hand_stays_where_it_is(tmp_path: Path) -> None:
    made = a_fleet(tmp_path / "fleet")
    file = made.directory / "broker" / "mosquitto.conf"
    own = file.read_text().replace(f"pid_file {file.parent}/", "pid_file /run/mosquitto/")
    file.write_text(own)
    assert not made.write_configuration()
    assert file.read_text() == own


def test_a_copy_whose_process_id_is_elsewhere_has_its_own_keys(tmp_path: Path) -> None:
    made = a_fleet(tmp_path / "fleet")
    file = made.directory / "broker" / "mosquitto.conf"
    file.write_text(file.read_text().replace(f"pid_file {file.parent}/", "pid_file /run/"))
    fleet = copied(made.directory, tmp_path / "elsewhere")
    fleet.write_configuration()
    text = (fleet.directory / "broker" / "mosquitto.conf").read_text()
    assert "pid_file /run/mosquitto.pid" in text
    assert f"{tmp_path / 'fleet'}/" not in text


@needs_mosquitto
@pytest.mark.parametrize("edited", [False, True])
def test_a_copied_fleets_broker_starts(tmp_path: Path, edited: bool) -> None:
    made = a_fleet(tmp_path / "fleet")
    cam = enrolled(made, "cam", tmp_path / "cam")
    brought_up(made, cam)  # its own files (a log, sessions, an old process id) are in the copy
    if edited:
        file = made.directory / "broker" / "mosquitto.conf"
        file.write_text(file.read_text() + "log_type error\n")
    assert {"mosquitto.log", "newcomers.log"} <= brought_up(copied(made.directory, tmp_path / "elsewhere"), cam)


@needs_mosquitto
@pytest.mark.slow
def test_enrolments_are_answered_from_a_copied_fleet(tmp_path: Path) -> None:
    fleet = copied(a_fleet(tmp_path / "fleet").directory, tmp_path / "elsewhere")
    command = [sys.executable, "-m", "coordinator.cli", "enrollments", "--identity", str(fleet.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        said = []
        try:
            for line in program.stdout or ():
                said.append(line)
                if "answering devices that enrol" in line:
                    break
        finally:
            program.terminate()
    assert "answering devices that enrol" in "".join(said), said
