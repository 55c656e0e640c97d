"""Another machine takes over a device's name: ``enroll --replace``, over a real broker."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from identity_fixture import FLEET, Asked, Attackers, a_fleet, denied, enrolled
from transport_fixtures import fails, mosquitto_wanted, run, until

from coordinator.core.moves import Replaced, Revoked
from coordinator.core.state import Device
from coordinator.runtime.fleet_auth import Guard, serve
from device_agent.enroll import enroll
from edgefl.errors import BrokerUnreachableError, IdentityError
from edgefl.identity import token as t
from edgefl.identity.acl import emqx_acl, rules
from edgefl.identity.device import Credentials
from edgefl.identity.fleet import Fleet, fleet_broker
from edgefl.identity.issued_tokens import issue_token
from edgefl.identity.membership import renew, revoke
from edgefl.protocol import topics
from edgefl.protocol.messages import Hello
from edgefl.report.presence import Enrolled, presence_grid, presences
from edgefl.run_records import RunReport

needs_mosquitto = pytest.mark.skipif(not mosquitto_wanted(), reason="mosquitto is not installed")
UP, DOWN = topics.build("up", FLEET, "cam"), topics.build("down", FLEET, "cam")


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return a_fleet(tmp_path / "fleet")


def written(fleet: Fleet) -> dict[str, str]:
    return {name: (fleet.directory / "broker" / name).read_text() for name in ("fleet.acl", "emqx-acl.conf")}


@needs_mosquitto
def test_the_old_machine_goes_on_until_the_new_one_enrols_and_is_refused_from_then_on(
    fleet: Fleet, tmp_path: Path
) -> None:
    """As at a desk: `enroll --replace --wait` on the server, `edgefl-agent enroll` on the new machine."""
    old = enrolled(fleet, "cam", tmp_path / "old")

    async def scene() -> None:
        told: list[str] = []
        async with fleet_broker(fleet), Attackers(fleet) as at:
            _, heard = await at.coordinator(topics.build("up", FLEET, "+"))
            own, had = await at.device(old, DOWN)
            other, _ = await at.device(old, client_id="another-id")  # a copy of its key, which no takeover cuts
            text = issue_token(fleet, "cam", time.time(), replace=True)
            await own.publish(UP, b"of the old, the token is out")
            await heard.arrived(1)
            serving = asyncio.ensure_future(serve(fleet, told.append, until=("cam",), limit_s=20.0))
            await until(lambda: any("answering" in line for line in told))
            hidden = (fleet.directory / "broker" / "mosquitto.pid").rename(tmp_path / "hidden")
            refused = await fails(enroll(text, tmp_path / "new", tmp_path, 5.0, lambda line: None))
            hidden.rename(fleet.directory / "broker" / "mosquitto.pid")
            assert isinstance(refused, IdentityError)
            assert "no broker runs on the server" in refused.message
            assert "use this one again" in refused.remedy
            state = await enroll(text, tmp_path / "new", tmp_path, 5.0, lambda line: None)
            await serving
            new = Credentials(state)
            assert "device cam has enrolled" in told
            await until(lambda: False in had.connections)  # its connection was cut
            assert await denied(other, UP), "nor does one that was open go on"
            fresh, _ = await at.device(new, DOWN)
            await fresh.publish(UP, b"of the new")
            await heard.arrived(2)
            assert heard.payloads == [b"of the old, the token is out", b"of the new"]
            for rule in rules(FLEET):
                if rule.who == "device" and rule.may == "write":
                    await fresh.publish(rule.topic.replace("%u", "cam").replace("+", "t-1"), b"x")
            assert await denied(fresh, topics.build("up", FLEET, "other"))
        async with fleet_broker(fleet), Attackers(fleet) as at:  # after the broker's restart, too
            error = await fails(at.device(old))
            assert isinstance(error, BrokerUnreachableError)
            assert error.finding == "identity-revoked"
            await at.device(new, DOWN)

    run(scene(), 40)
    record = fleet.devices()["cam"]
    assert (record.generation, len(record.retired), len(record.serials)) == (2, 1, 1)
    assert record.enrolled[0] < record.enrolled[1] == record.since
    assert list(fleet.devices()) == ["cam"], "one history under one name"


@needs_mosquitto
def test_a_revoked_name_is_taken_over_again_and_again(fleet: Fleet, tmp_path: Path) -> None:
    machines = [enrolled(fleet, "cam", tmp_path / "1")]

    async def scene() -> None:
        async with fleet_broker(fleet), Attackers(fleet) as at:
            for number in (2, 3):
                await revoke(fleet, "cam", time.time())
                taken = await asyncio.to_thread(enrolled, fleet, "cam", tmp_path / str(number), replace=True)
                machines.append(taken)
                assert fleet.revoked() == frozenset()
            for gone in machines[:2]:
                assert isinstance(await fails(at.device(gone)), BrokerUnreachableError)
            newest, heard = await at.device(machines[2])
            await newest.publish(UP, b"x")
            await revoke(fleet, "cam", time.time())
            await until(lambda: False in heard.connections)
            assert isinstance(await fails(at.device(machines[2], client_id="another")), BrokerUnreachableError)

    run(scene(), 30)
    assert fleet.devices()["cam"].generation == 3
    acl = written(fleet)["fleet.acl"]
    assert [f"user {user}\ntopic deny #" in acl for user in ("cam", "cam~2", "cam~3")] == [True] * 3


@needs_mosquitto
def test_the_new_machine_renews_as_itself(tmp_path: Path) -> None:
    short = a_fleet(tmp_path / "short", life_s=60.0)
    enrolled(short, "cam", tmp_path / "old")

    async def scene() -> None:
        async with fleet_broker(short):
            await asyncio.to_thread(enrolled, short, "cam", tmp_path / "new", replace=True)

    run(scene())
    from edgefl.identity.authority import new_key, signing_request

    answer = renew(short, "cam", signing_request("cam", new_key()), time.time())
    made = x509.load_der_x509_certificate(answer.certificate)
    assert made.subject.rfc4514_string() == "CN=cam~2"
    assert len(short.devices()["cam"].serials) == 2


def test_a_token_that_nobody_uses_changes_nothing(fleet: Fleet, tmp_path: Path) -> None:
    enrolled(fleet, "cam", tmp_path / "cam")
    before, rules_before = fleet.devices(), written(fleet)
    asked = Asked(issue_token(fleet, "cam", time.time(), 60.0, replace=True))
    assert (fleet.devices(), written(fleet)) == (before, rules_before)
    assert asked.answered(fleet, time.time() + 61.0).refusal == "this token has expired"
    assert (fleet.devices(), written(fleet)) == (before, rules_before)


def test_without_a_broker_that_shuts_the_old_machine_out_the_new_one_is_not_let_in(
    fleet: Fleet, tmp_path: Path
) -> None:
    enrolled(fleet, "cam", tmp_path / "cam")
    before, rules_before = fleet.devices(), written(fleet)
    asked = Asked(issue_token(fleet, "cam", time.time(), replace=True))
    assert "no broker runs on the server" in asked.answered(fleet).refusal
    assert (fleet.devices(), written(fleet)) == (before, rules_before)
    far = a_fleet(tmp_path / "far", broker="mqtts://broker.example:8883", reload=("false",))
    enrolled(far, "cam", tmp_path / "cam-far")
    assert "ended with 1" in Asked(issue_token(far, "cam", time.time(), replace=True)).answered(far).refusal
    mute = a_fleet(tmp_path / "mute", broker="mqtts://broker.example:8883")
    enrolled(mute, "cam", tmp_path / "cam-mute")
    with pytest.raises(IdentityError, match=r"has to read its files") as caught:
        issue_token(mute, "cam", time.time(), replace=True)
    assert '"reload"' in str(caught.value.remedy)


def test_a_revocation_ends_the_open_token_of_the_name_and_no_other(fleet: Fleet, tmp_path: Path) -> None:
    enrolled(fleet, "cam", tmp_path / "cam")
    text, others = issue_token(fleet, "cam", time.time(), replace=True), issue_token(fleet, "mic", time.time())
    run(revoke(fleet, "cam", time.time()))
    with pytest.raises(AssertionError):
        Asked(text).answered(fleet)
    assert fleet.revoked() == {"cam"}
    assert Asked(others).answered(fleet).certificate


@needs_mosquitto
def test_a_reload_that_acts_and_then_fails_is_taken_back_at_the_broker(fleet: Fleet, tmp_path: Path) -> None:
    old = enrolled(fleet, "cam", tmp_path / "cam")

    async def scene() -> None:
        async with fleet_broker(fleet), Attackers(fleet) as at:
            own, _ = await at.device(old)
            asked = Asked(issue_token(fleet, "cam", time.time(), replace=True))
            pid = (fleet.directory / "broker" / "mosquitto.pid").read_text().strip()
            command = ("sh", "-c", f"kill -HUP {pid}; sleep 0.5; exit 3")
            fleet.record = msgspec.structs.replace(fleet.record, reload=command)
            assert "ended with 3" in (await asyncio.to_thread(asked.answered, fleet)).refusal
            assert fleet.devices()["cam"].generation == 1
            assert not await denied(own, UP, b"the old one keeps the name")

    run(scene(), 30)


@pytest.mark.parametrize("refusal", [PermissionError(1, "Operation not permitted"), ProcessLookupError(3, "No such")])
def test_a_broker_that_cannot_be_told_keeps_the_old_machine(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: OSError
) -> None:
    def kill(pid: int, number: int) -> None:
        raise refusal

    enrolled(fleet, "cam", tmp_path / "cam")
    before, rules_before = fleet.devices(), written(fleet)
    monkeypatch.setattr("edgefl.identity.membership.running", lambda file: 77)
    monkeypatch.setattr(os, "kill", kill)
    asked = Asked(issue_token(fleet, "cam", time.time(), replace=True))
    assert "process 77" in asked.answered(fleet).refusal
    assert (fleet.devices(), written(fleet)) == (before, rules_before)
    assert "process 77" in run(revoke(fleet, "cam", time.time())).trouble


def test_many_enrolments_at_once_are_told_and_cut_once_each(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, cut, told = ["cam-1", "cam-2", "cam-3"], list[str](), list[str]()

    async def drop(fleet: Fleet, client_id: str) -> str:
        cut.append(client_id)
        return ""

    monkeypatch.setattr("edgefl.identity.membership.reload_broker", lambda fleet: True)
    monkeypatch.setattr("coordinator.runtime.fleet_auth.drop", drop)
    old = [enrolled(fleet, name, tmp_path / name).record.client_id for name in names]
    asked = [Asked(issue_token(fleet, name, time.time(), replace=True)) for name in names]
    asked.append(Asked(issue_token(fleet, "new", time.time())))

    async def scene() -> None:
        guard = Guard(fleet)
        guard.start(lambda device, message: None, told.append)
        for one in asked:
            guard._enroll(one.client, t.encode(one.request))
        await guard.answered()
        guard._enroll(asked[0].client, t.encode(asked[0].request))  # the answer was lost
        await guard.answered()

    run(scene())
    assert sorted(told) == [f"device {name} has enrolled" for name in (*names, "new")]
    assert sorted(cut) == sorted(old)


@needs_mosquitto
def test_of_two_tokens_for_one_name_the_second_ends_the_first(fleet: Fleet, tmp_path: Path) -> None:
    enrolled(fleet, "cam", tmp_path / "cam")

    async def scene() -> None:
        async with fleet_broker(fleet):
            early = Asked(issue_token(fleet, "cam", time.time(), replace=True))
            late = Asked(issue_token(fleet, "cam", time.time(), replace=True))
            with pytest.raises(AssertionError):
                early.answered(fleet)
            assert await asyncio.to_thread(late.answered, fleet) == await asyncio.to_thread(late.answered, fleet)
            assert fleet.devices()["cam"].generation == 2, "the same request again is the same machine"

    run(scene())


def test_names_that_cannot_be_taken_over_are_told_with_the_way_out(fleet: Fleet, tmp_path: Path) -> None:
    enrolled(fleet, "cam", tmp_path / "cam")
    enrolled(fleet, "c" * 61, tmp_path / "long")
    with pytest.raises(IdentityError, match="'kam' is enrolled") as caught:
        issue_token(fleet, "kam", time.time(), replace=True)
    assert "Enrolled are: " in str(caught.value.remedy)
    with pytest.raises(IdentityError, match="61 characters"):
        issue_token(fleet, "c" * 61, time.time(), replace=True)
    with fleet.changing() as devices:
        devices["cam"] = msgspec.structs.replace(devices["cam"], enrolled=(1.0,) * 999)
    with pytest.raises(IdentityError, match="999 machines") as caught:
        issue_token(fleet, "cam", time.time(), replace=True)
    assert "another name" in str(caught.value.remedy)
    with pytest.raises(IdentityError, match="enrolled already") as caught:
        issue_token(fleet, "cam", time.time())
    assert "--replace" in str(caught.value.remedy)


@needs_mosquitto
def test_a_coordinator_learns_of_it_at_its_next_look(fleet: Fleet, tmp_path: Path) -> None:
    enrolled(fleet, "cam", tmp_path / "old")
    guard, known = Guard(fleet), {"cam": Device(Hello("cam")), "stranger": Device(Hello("stranger"))}

    async def scene() -> None:
        async with fleet_broker(fleet):
            await asyncio.to_thread(enrolled, fleet, "cam", tmp_path / "new", replace=True)
            assert guard.decided(known) == []
            assert guard.look()
            (event,) = guard.decided(known)
            assert isinstance(event, Replaced)
            assert (event.device, event.generation, guard.generation("cam")) == ("cam", 2, 2)
            await revoke(fleet, "cam", time.time())
            assert guard.look()
            assert [type(one) for one in guard.decided(known)] == [Replaced, Revoked]
            was = {"cam": Device(Hello("cam"), revoked=True)}
            assert [type(one) for one in guard.decided(was)] == [Replaced, Revoked], "of the old one it was"
            assert guard.decided({"cam": Device(Hello("cam"), revoked=True, generation=2)}) == []
            assert not guard.look()

    run(scene())


def test_a_fleets_devices_of_an_earlier_release_are_first_machines(fleet: Fleet, tmp_path: Path) -> None:
    (fleet.directory / "devices.json").write_text('{"cam":{"serials":["1f"],"not_after":9e9,"client_id":"cam-x"}}')
    cam = fleet.devices()["cam"]
    assert (cam.generation, cam.since) == (1, 0.0)
    second = cam.successor("cam-y", 5.0)
    assert (second.generation, second.since, second.retired) == (2, 5.0, {"1f": 9e9})
    assert second.successor("cam-z", 9.1e9).retired == {}, "what has expired need not be refused"


def test_who_is_there_says_which_machine_has_the_name_and_since_when() -> None:
    known = {"cam": Enrolled(9e9, False, 2, 1.8e9), "mic": Enrolled(9e9, False)}
    there = presences(RunReport(), known, 1.9e9)
    assert [(one.device, one.generation, one.since) for one in there] == [("cam", 2, 1.8e9), ("mic", 1, None)]
    (note,) = presence_grid(there, 1.9e9).notes
    assert note.startswith("cam: machine 2, since 2027-01-15 ")


def test_emqx_gets_the_same_rules_of_a_later_machine(fleet: Fleet) -> None:
    lines = emqx_acl(FLEET, ["cam"], {"cam~2": "cam"}).splitlines()
    assert lines[0] == '{deny, {username, "cam"}, all, ["#"]}.'
    own = [rule for rule in rules(FLEET) if rule.who == "device"]
    later = [line for line in lines if '"cam~2"' in line]
    assert len(later) == len(own)
    assert '{allow, {username, "cam~2"}, publish, ["edgefl/1/default/d/cam/up"]}.' in later
