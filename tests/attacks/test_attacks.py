"""Attacks on a fleet's broker and on its enrolment: a real mosquitto with the files that ``init`` writes.

SECURITY.md lists them. What must not arrive is followed by something that must, so that no test waits for silence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from identity_fixture import FLEET, HOST, Asked, Attackers, a_fleet, denied, enrolled
from msgspec.structs import replace
from transport_fixtures import fails, mosquitto_wanted, run, until

from coordinator.runtime.fleet_auth import serve
from device_agent.enroll import enroll
from edgefl.errors import BrokerError, IdentityError
from edgefl.identity import authority as x
from edgefl.identity import token as t
from edgefl.identity.acl import rules
from edgefl.identity.device import Credentials, bundle
from edgefl.identity.fleet import Fleet, fleet_broker
from edgefl.identity.issued_tokens import TOKEN_LIFE_S, issue_token
from edgefl.identity.membership import answer_request, renew, revoke
from edgefl.protocol import topics
from edgefl.transport.broker import Broker
from edgefl.transport.link import TlsFiles
from edgefl.transport.mosquitto import FLEET_PACKET_BYTES
from edgefl.transport.mqtt import MqttTransport

pytestmark = pytest.mark.skipif(not mosquitto_wanted(), reason="the fleet's broker is mosquitto; it is not installed")
#: Chunks of a transfer, which a device that fetches it subscribes to.
SHARED = topics.build("shared-object", FLEET, transfer="d-1")


class World(NamedTuple):
    fleet: Fleet
    broker: Broker
    cam: Credentials
    thief: Credentials  # an enrolled device that misbehaves


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    place = tmp_path_factory.mktemp("attacks")
    fleet = a_fleet(place / "fleet")
    broker = fleet_broker(fleet)
    asyncio.run(broker.start())
    yield World(fleet, broker, enrolled(fleet, "cam", place / "cam"), enrolled(fleet, "thief", place / "thief"))
    asyncio.run(broker.stop())


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Without a broker."""
    return a_fleet(tmp_path / "fleet")


# Getting in


def test_without_a_certificate_nobody_gets_in(world: World) -> None:
    ca = str(world.fleet.directory / "ca.pem")
    assert isinstance(run(fails(MqttTransport(world.fleet.url, "nobody", tls=TlsFiles(ca)).connect())), BrokerError)


def test_a_certificate_of_another_authority_does_not_get_in(world: World, tmp_path: Path) -> None:
    other = enrolled(a_fleet(tmp_path / "other"), "cam", tmp_path / "state")
    ca = str(world.fleet.directory / "ca.pem")
    wrong = MqttTransport(world.fleet.url, "cam", tls=TlsFiles(ca, str(other.certificate)))
    assert isinstance(run(fails(wrong.connect())), BrokerError)


def test_a_broker_of_another_authority_is_not_believed(world: World, tmp_path: Path) -> None:
    """Somebody in between, with a certificate for the right host that the fleet has not signed."""
    other = a_fleet(tmp_path / "other")
    wrong = MqttTransport(
        world.fleet.url, "cam", tls=TlsFiles(str(other.directory / "ca.pem"), str(world.cam.certificate))
    )
    error = run(fails(wrong.connect()))
    assert isinstance(error, BrokerError)
    assert "not trusted" in error.message


def test_a_devices_certificate_can_not_play_the_broker(world: World, tmp_path: Path) -> None:
    """Its purpose is client authentication, whatever name it holds."""
    import ssl

    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(world.thief.certificate)

    async def scene() -> None:
        listening = await asyncio.start_server(lambda reader, writer: None, HOST, 0, ssl=server)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            client = MqttTransport(f"mqtts://{HOST}:{port}", "cam", tls=TlsFiles(str(world.cam.authority)))
            error = await fails(client.connect())
            assert isinstance(error, BrokerError)
            assert "not trusted" in error.message

    run(scene())


def test_a_revoked_device_is_cut_off_at_once_and_does_not_come_back(world: World, tmp_path: Path) -> None:
    stolen = enrolled(world.fleet, "stolen", tmp_path / "stolen")

    async def scene() -> None:
        async with Attackers(world.fleet) as at:
            coordinator, heard = await at.coordinator(topics.build("up", FLEET, "+"))
            thief, got = await at.device(stolen, topics.build("down", FLEET, "stolen"))
            cam, _ = await at.device(world.cam)
            await thief.publish(topics.build("up", FLEET, "stolen"), b"before")
            await heard.arrived(1)
            done = await revoke(world.fleet, "stolen", time.time())
            assert (done.reloaded, done.dropped, done.trouble) == (True, True, "")
            await until(lambda: False in got.connections)
            await coordinator.publish(topics.build("down", FLEET, "stolen"), b"secret")
            await cam.publish(topics.build("up", FLEET, "cam"), b"after")  # the others are not disturbed
            await heard.arrived(2)
            assert [payload for _, payload in heard.messages] == [b"before", b"after"]
            assert got.messages == []
            again = MqttTransport(
                world.fleet.url, "again", tls=TlsFiles(str(stolen.authority), str(stolen.certificate))
            )
            assert isinstance(await fails(again.connect()), BrokerError)
            await at.device(world.cam, client_id="once-more")  # the list shuts nobody else out

    run(scene())
    assert renew(world.fleet, "stolen", x.signing_request("stolen", x.new_key()), time.time()).certificate == b""


def test_a_revoked_device_whose_connection_could_not_be_cut_has_no_topics(world: World, tmp_path: Path) -> None:
    """The rules alone, as on a broker that only reads its files again: it stays connected and is deaf and mute."""
    kept = enrolled(world.fleet, "kept", tmp_path / "kept")

    async def scene() -> None:
        async with Attackers(world.fleet) as at:
            device, got = await at.device(
                kept, topics.build("down", FLEET, "kept"), client_id="a-client-id-nobody-knows"
            )
            coordinator, heard = await at.coordinator(topics.build("up", FLEET, "+"))
            done = await revoke(world.fleet, "kept", time.time())
            assert done.reloaded
            assert await denied(device, topics.build("up", FLEET, "kept"))
            await coordinator.publish(topics.build("down", FLEET, "kept"), b"secret")
            cam, _ = await at.device(world.cam)
            await cam.publish(topics.build("up", FLEET, "cam"), b"after")
            await heard.arrived(1)
            assert heard.payloads == [b"after"]
            assert got.messages == []

    run(scene())


# Topics


def test_a_device_can_not_write_what_is_not_its_own(world: World) -> None:
    """Another's messages, presence and objects; and everything that is the coordinator's."""
    foreign = [
        topics.build("up", FLEET, "cam"),
        topics.build("presence", FLEET, "cam"),
        topics.build("up-object", FLEET, "cam", "u-1"),
        topics.build("up", "other-fleet", "thief"),
    ]

    async def scene() -> None:
        async with Attackers(world.fleet) as at:
            thief, _ = await at.device(world.thief)
            _, heard = await at.coordinator(*topics.coordinator_subscriptions(FLEET))
            for topic in foreign:
                assert await denied(thief, topic), topic
            await thief.publish(topics.build("up", FLEET, "thief"), b"own")
            await heard.arrived(1)
            assert heard.messages == [(topics.build("up", FLEET, "thief"), b"own")]

    run(scene())


def test_a_device_can_not_speak_as_the_coordinator(world: World) -> None:
    """An offer to another, an offer to itself, a chunk for everybody, an answer to somebody who enrols."""
    its = [
        topics.build("down", FLEET, "cam"),
        topics.build("down", FLEET, "thief"),
        topics.build("down-object", FLEET, "cam", "d-1"),
        topics.build("shared-object", FLEET, transfer="d-1"),
        topics.build("enroll-down", FLEET, "enroll-1"),
    ]

    async def scene() -> None:
        async with Attackers(world.fleet) as at:
            _, heard = await at.device(world.cam, *topics.device_subscriptions(FLEET, "cam"), SHARED)
            thief, _ = await at.device(world.thief)
            coordinator, _ = await at.coordinator()
            for topic in its:
                assert await denied(thief, topic), topic
            await coordinator.publish(topics.build("down", FLEET, "cam"), b"true")
            await heard.arrived(1)
            assert heard.payloads == [b"true"]

    run(scene())


def test_a_device_can_not_read_what_is_for_another(world: World) -> None:
    """Neither by its topic, nor by any wildcard, nor what a broker tells of itself."""
    wide = ["#", "+/#", f"edgefl/1/{FLEET}/#", f"edgefl/1/{FLEET}/d/+/down", f"edgefl/1/{FLEET}/d/+/up", "$SYS/#"]
    wide += [
        topics.build("down", FLEET, "cam"),
        topics.build("up", FLEET, "cam"),
        topics.build("presence", FLEET, "cam"),
    ]

    async def scene() -> None:
        async with Attackers(world.fleet) as at:
            cam, _ = await at.device(world.cam)
            _, got = await at.device(world.thief, *wide)
            coordinator, _ = await at.coordinator()
            await coordinator.publish(topics.build("down", FLEET, "cam"), b"secret")
            await coordinator.publish(topics.build("down-object", FLEET, "cam", "d-1"), b"secret")
            await cam.publish(topics.build("up", FLEET, "cam"), b"secret")
            await coordinator.publish(topics.build("down", FLEET, "thief"), b"own")
            await got.arrived(1)
            assert set(got.messages) == {(topics.build("down", FLEET, "thief"), b"own")}

    run(scene())


def test_a_user_name_counts_nothing_beside_a_certificate(world: World) -> None:
    async def scene() -> None:
        async with Attackers(world.fleet) as at:
            as_coordinator, _ = await at.device(world.thief, user=("coordinator", "x"))
            assert await denied(as_coordinator, topics.build("down", FLEET, "cam"))
            for password in ("x", ""):  # where newcomers come, the coordinator has a password
                posing = at.newcomer("enroll-7", user=("coordinator", password))
                assert "does not admit" in str(await fails(posing))

    run(scene())


def test_another_device_can_not_take_a_connection_over(world: World) -> None:
    """An id that is in use pushes its owner off, so it must not be guessed: all that others know of it fails."""
    assert len(world.cam.record.client_id) > 32
    guesses = ["cam", f"{FLEET}.cam", f"edgefl-coordinator-{FLEET}", "coordinator"]

    async def scene() -> None:
        async with Attackers(world.fleet) as at:
            _, heard = await at.device(world.cam, topics.build("down", FLEET, "cam"))
            coordinator, _ = await at.coordinator()
            for guess in guesses:
                await at.device(world.thief, client_id=guess)
                await at.newcomer(guess)
            await coordinator.publish(topics.build("down", FLEET, "cam"), b"still here")
            await heard.arrived(1)
            assert heard.connections == [True]

    run(scene())


def test_a_message_that_is_too_large_ends_at_the_broker(world: World) -> None:
    async def scene() -> None:
        async with Attackers(world.fleet) as at:
            thief, got = await at.device(world.thief)
            cam, _ = await at.device(world.cam)
            _, heard = await at.coordinator(topics.build("up", FLEET, "+"))
            assert thief.max_payload < FLEET_PACKET_BYTES
            thief.max_payload = 2**28  # it does not heed what the broker told it
            sending = asyncio.ensure_future(
                thief.publish(topics.build("up", FLEET, "thief"), bytes(FLEET_PACKET_BYTES + 1))
            )
            await until(lambda: False in got.connections)  # mosquitto ends the connection
            sending.cancel()
            await thief.close()
            await cam.publish(topics.build("up", FLEET, "cam"), b"fine")
            await heard.arrived(1)
            assert heard.payloads == [b"fine"]

    run(scene())


def test_a_stranger_who_scans_every_topic_reads_nothing_and_is_not_heard(world: World) -> None:
    """On the port for enrolment, the only one that a stranger reaches: as itself, and with ids that are patterns."""
    named = {rule.topic.replace("%u", "cam").replace("%c", "other").replace("+", "x") for rule in rules(FLEET)}
    every = sorted(named | {f"edgefl/1/{FLEET}", "edgefl", "$SYS/broker/version", "$share/g/edgefl/#", "anything"})

    async def scene() -> None:
        async with Attackers(world.fleet) as at:
            coordinator, heard = await at.coordinator(*topics.coordinator_subscriptions(FLEET))
            greeter, _ = await at.greeter()
            _, cams = await at.device(world.cam, *topics.device_subscriptions(FLEET, "cam"), SHARED)
            known = "enroll-12345"
            for client_id in ("#", "+", "a/b", known):
                patterns = ["#", "$SYS/#", f"edgefl/1/{FLEET}/#", f"edgefl/1/{FLEET}/enroll/+/down"]
                stranger, got = await at.newcomer(client_id, *patterns)
                for topic in every:
                    if not topic.startswith("$"):
                        assert await denied(stranger, topic), (client_id, topic)
                for topic in (topics.build("down", FLEET, "cam"), topics.build("shared-object", FLEET, transfer="d-1")):
                    await coordinator.publish(topic, b"secret")
                await greeter.publish(topics.build("enroll-down", FLEET, "enroll-other"), b"secret")
            await greeter.publish(topics.build("enroll-down", FLEET, known), b"own")
            await got.arrived(1)
            assert {topic for topic, _ in got.messages} == {topics.build("enroll-down", FLEET, known)}
            assert heard.messages == []
            assert set(cams.payloads) == {b"secret"}  # of the coordinator, none forged

    run(scene())


# Enrolment


def test_a_stolen_token_that_was_used_gets_nothing(fleet: Fleet) -> None:
    text = issue_token(fleet, "cam", time.time())
    owner = Asked(text)
    first = owner.answered(fleet)
    assert first.certificate
    assert owner.answered(fleet) == first  # the answer was lost: the same one again
    assert Asked(text).answered(fleet).refusal == "this token has been used already"
    assert len(fleet.devices()["cam"].serials) == 1


def test_a_token_that_has_expired_gets_nothing(fleet: Fleet) -> None:
    asked = Asked(issue_token(fleet, "cam", time.time()))
    assert asked.answered(fleet, time.time() + TOKEN_LIFE_S + 1).refusal == "this token has expired"
    assert fleet.devices() == {}


def test_a_token_gives_no_other_name_than_its_own(fleet: Fleet) -> None:
    for name in ("other", "coordinator"):
        asked = Asked(issue_token(fleet, "cam", time.time()), name)
        assert "another name" in asked.answered(fleet).refusal
    honest = Asked(issue_token(fleet, "cam", time.time()))
    smuggled = t.Request(name="cam", request=x.signing_request("coordinator", honest.key))
    proof = t.request_proof(honest.proof_key, FLEET, honest.client, smuggled)
    honest.request = replace(smuggled, proof=proof)
    assert "another name" in honest.answered(fleet).refusal
    with pytest.raises(IdentityError, match="no device can be called"):
        issue_token(fleet, "coordinator", time.time())
    assert fleet.devices() == {}


def test_a_name_is_given_once(fleet: Fleet, tmp_path: Path) -> None:
    """Two tokens for one name: the earlier ends; and no token for a name that is enrolled, or was revoked."""
    early, late = (Asked(issue_token(fleet, "cam", time.time())) for _ in range(2))
    assert answer_request(fleet, early.client, t.encode(early.request), time.time()) is None
    assert late.answered(fleet).certificate
    with pytest.raises(IdentityError, match="enrolled already"):
        issue_token(fleet, "cam", time.time())
    run(revoke(fleet, "cam", time.time()))
    with pytest.raises(IdentityError, match="was revoked"):
        issue_token(fleet, "cam", time.time())


def test_who_overhears_an_enrolment_can_not_enrol(fleet: Fleet) -> None:
    """The request is seen (by a broker's operator, say): another key under the same proof is not answered at all."""
    asked = Asked(issue_token(fleet, "cam", time.time()))
    mine = t.Request(name="cam", request=x.signing_request("cam", x.new_key()), proof=asked.request.proof)
    assert answer_request(fleet, asked.client, t.encode(mine), time.time()) is None
    assert answer_request(fleet, "enroll-guess", t.encode(mine), time.time()) is None
    assert answer_request(fleet, asked.client, b"\xc1" * 100, time.time()) is None
    assert answer_request(fleet, asked.client, bytes(t.MAX_MESSAGE_BYTES + 1), time.time()) is None
    assert asked.answered(fleet).certificate


def test_a_forged_answer_is_not_believed(world: World, tmp_path: Path) -> None:
    """Whoever can write the answer's topic, but does not know the token, cannot hand out an identity."""
    text = issue_token(world.fleet, "tricked", time.time())
    given = t.decode_token(text)
    client = t.client_id(given.secret)
    forged = t.Answer(certificate=b"x", signer=bytes(32), broker="mqtts://evil", client_id="evil")

    async def scene() -> None:
        async with Attackers(world.fleet) as at:
            evil, heard = await at.greeter(topics.build("enroll-up", FLEET, "+"))
            asking = asyncio.ensure_future(enroll(text, tmp_path / "state", tmp_path, 1.0, lambda line: None))
            await heard.arrived(1)
            request = t.decode(heard.payloads[0], t.Request)
            guessed = replace(forged, proof=t.answer_proof(bytes(32), forged, request))
            for payload in (t.encode(forged), t.encode(guessed), b"\xc1"):
                await evil.publish(topics.build("enroll-down", FLEET, client), payload)
            error = await fails(asking)
            assert isinstance(error, IdentityError)
            assert "nobody answered" in error.message
            assert error.remedy.startswith("On the server a run, `edgefl-coordinator enrollments` or")
            # Nothing came of it: the rightful coordinator still can.
            serving = asyncio.ensure_future(serve(world.fleet, lambda line: None, until=["tricked"], limit_s=10))
            state = await enroll(text, tmp_path / "state", tmp_path, 10.0, lambda line: None)
            await serving
            assert Credentials(state).record.device == "tricked"

    run(scene())


def test_a_certificate_is_renewed_for_its_own_name_alone_and_not_too_often(fleet: Fleet, tmp_path: Path) -> None:
    enrolled(fleet, "cam", tmp_path / "cam")
    late = time.time() + fleet.record.life_s / 2
    for name in ("other", "coordinator"):
        assert "not for 'cam'" in renew(fleet, "cam", x.signing_request(name, x.new_key()), late).refusal
    assert "not a signing request" in renew(fleet, "cam", b"garbage", late).refusal
    assert "more than enough" in renew(fleet, "cam", bytes(10_000), late).refusal
    assert "too early" in renew(fleet, "cam", x.signing_request("cam", x.new_key()), time.time()).refusal
    assert "not enrolled" in renew(fleet, "who", x.signing_request("who", x.new_key()), late).refusal
    assert renew(fleet, "cam", x.signing_request("cam", x.new_key()), late).certificate


# Keys


@pytest.mark.parametrize("file", ["ca.key", "signing.key", "coordinator.pem"])
def test_a_key_of_the_fleet_that_others_can_read_is_refused(fleet: Fleet, file: str) -> None:
    def use() -> None:
        opened = Fleet(fleet.directory)
        opened.authority()
        opened.transport()

    use()
    (fleet.directory / file).chmod(0o644)
    with pytest.raises(IdentityError, match="0644"):
        use()


def test_a_devices_key_that_others_can_read_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    own = enrolled(fleet, "cam", tmp_path / "cam")
    own.certificate.chmod(0o640)
    with pytest.raises(IdentityError, match="0640") as caught:
        Credentials(tmp_path / "cam")
    assert "chmod 600" in caught.value.remedy


def test_no_file_of_a_fleet_or_a_device_is_open_to_others(fleet: Fleet, tmp_path: Path) -> None:
    issue_token(fleet, "next", time.time())
    enrolled(fleet, "cam", tmp_path / "cam")
    run(revoke(fleet, "cam", time.time()))
    every = [*fleet.directory.rglob("*"), fleet.directory, *(tmp_path / "cam" / "credentials").iterdir()]
    assert len(every) > 15
    for path in every:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_certificate_goes_with_no_other_key(fleet: Fleet, tmp_path: Path) -> None:
    from edgefl.identity.device import replace_certificate

    own = enrolled(fleet, "cam", tmp_path / "cam")
    before = own.certificate.read_bytes()
    certificate = fleet.devices()["cam"].certificate
    with pytest.raises(IdentityError):
        replace_certificate(own, bundle(certificate, x.key_pem(x.new_key()), 0, 1))
    assert own.certificate.read_bytes() == before
    assert sorted(path.name for path in own.directory.iterdir()) == ["ca.pem", "device.json", "device.pem"]
