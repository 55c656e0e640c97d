"""Tokens, access rules, the fleet's directory and the programs around them. Attacks: test_attacks*.py."""

from __future__ import annotations

import asyncio
import errno
import importlib
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography import x509
from identity_fixture import FLEET, HOST, Asked, Attackers, a_fleet, enrolled
from msgspec.structs import replace
from paho.mqtt.client import topic_matches_sub
from transport_fixtures import MqttWorld, fails, mosquitto_wanted, run, until

from coordinator.runtime.fleet_auth import Guard, fleets_broker, serve
from device_agent.command import whose
from device_agent.enroll import enroll
from device_agent.runtime.connect import Options, make_agent
from device_agent.runtime.renewal import Renewal
from edgefl.errors import BrokerError, EdgeFLError, IdentityError, StoreError
from edgefl.identity import authority as x
from edgefl.identity import device
from edgefl.identity import membership as enrolling
from edgefl.identity import token as t
from edgefl.identity.acl import emqx_acl, mosquitto_acl, mosquitto_enroll_acl, rules
from edgefl.identity.fleet import Fleet, Record, create_fleet, fleet_broker
from edgefl.identity.issued_tokens import issue_token
from edgefl.identity.membership import reload_broker, revoke, running
from edgefl.protocol import messages as m
from edgefl.protocol import topics

needs_mosquitto = pytest.mark.skipif(not mosquitto_wanted(), reason="mosquitto is not installed")


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return a_fleet(tmp_path / "fleet")


# Tokens


def a_token() -> t.Token:
    return t.Token(1, "default", "cam-07", "mqtts://broker.example:8884", bytes(range(32)), b"certificate" * 40)


def test_a_token_survives_being_copied() -> None:
    text = t.encode_token(a_token())
    assert text.startswith("edgefl-")
    assert t.decode_token(text) == a_token()
    wrapped = "\n".join(text[i : i + 60] for i in range(0, len(text), 60))
    assert t.decode_token(f"  {wrapped}\r\n") == a_token()


def test_a_token_that_was_cut_off_is_incomplete_at_any_length() -> None:
    text = t.encode_token(a_token())
    for end in range(len(text) - 8, len(text)):
        with pytest.raises(IdentityError, match="incomplete"):
            t.decode_token(text[:end])
    for letter in "+/=*é":
        with pytest.raises(IdentityError, match="a character that does not belong there"):
            t.decode_token(text[:-1] + letter)


@pytest.mark.parametrize(("terminal", "prompts"), [(True, 1), (False, 0)])
def test_a_token_is_taken_at_the_end_of_its_line(tmp_path: Path, terminal: bool, prompts: int) -> None:
    """Input stays open, as that of a terminal does: nobody presses Ctrl-D."""
    reads, writes = pty.openpty() if terminal else os.pipe()
    if terminal:
        reads, writes = writes, reads  # the program has the terminal, this test its other end
    command = [sys.executable, "-m", "device_agent.cli", "enroll", "-", "--state", str(tmp_path)]
    try:
        with subprocess.Popen(command, stdin=reads, stderr=subprocess.PIPE, text=True) as program:
            try:
                os.write(writes, b"\n  \n" + t.encode_token(a_token())[:99].encode() + b"\n")
                _, said = program.communicate(timeout=30)
            finally:
                program.kill()
    finally:
        os.close(reads)
        os.close(writes)
    assert program.returncode == IdentityError.exit_code
    assert "the enrolment token is incomplete" in said
    assert said.count("paste the token, then Enter\n") == prompts


def test_a_mistyped_token_is_told_and_never_repeated() -> None:
    text = t.encode_token(a_token())
    middle = len(text) // 2
    other = "A" if text[middle] != "A" else "B"
    wrong = [text[:-5], text[5:], text[:middle] + other + text[middle + 1 :], text[:middle] + "!" + text[middle + 1 :]]
    wrong += ["", "edgefl-", "edgefl-AAAA", text * 20, "hello"]
    for one in wrong:
        with pytest.raises(IdentityError) as caught:
            t.decode_token(one)
        assert text[10:40] not in f"{caught.value.message} {caught.value.remedy}"


def test_a_token_of_another_version_says_so() -> None:
    with pytest.raises(IdentityError, match="another version"):
        t.decode_token(t.encode_token(replace(a_token(), version=2)))


def test_what_the_fleet_keeps_of_a_token_does_not_make_it_again(fleet: Fleet) -> None:
    text = issue_token(fleet, "cam", time.time())
    secret = t.decode_token(text).secret
    kept = b"".join(path.read_bytes() for path in fleet.directory.rglob("*") if path.is_file())
    assert secret not in kept


def test_after_a_crash_between_the_two_files_a_token_serves_its_own_key_alone(fleet: Fleet) -> None:
    """The device is on record, its token not yet marked as used: another key with it gets nothing of the record."""
    text = issue_token(fleet, "cam", time.time())
    unspent = {path: path.read_bytes() for path in fleet.directory.rglob("*") if path.is_file()}
    first, thief = Asked(text), Asked(text)
    given = first.answered(fleet)
    spent = [path for path, data in unspent.items() if path.read_bytes() != data and path.name != "devices.json"]
    assert len(spent) == 1, "the token's own file"
    spent[0].write_bytes(unspent[spent[0]])
    refused = thief.answered(fleet)
    assert "is enrolled already" in refused.refusal
    assert (refused.certificate, refused.client_id) == (b"", "")
    again = first.answered(fleet)
    assert (again.certificate, again.client_id) == (given.certificate, given.client_id)


# Rules: one table


def test_every_topic_the_programs_use_is_in_the_table() -> None:
    allowed = {(rule.who, rule.may, rule.topic.replace("%u", "cam")) for rule in rules(FLEET)}
    its = [*topics.device_subscriptions(FLEET, "cam"), topics.build("shared-object", FLEET, transfer="d-1")]
    for who, patterns in (("device", its), ("coordinator", topics.coordinator_subscriptions(FLEET))):
        may = [topic for one, verb, topic in allowed if (one, verb) == (who, "read")]
        for pattern in patterns:
            assert any(topic_matches_sub(topic, pattern) for topic in may), pattern
    assert len(rules(FLEET)) == 20


def test_both_brokers_say_the_same() -> None:
    """Every rule of the table stands in each language, and nothing else does."""
    of_mosquitto = set()
    who = ""
    for line in mosquitto_acl(FLEET).splitlines():
        word, *rest = line.split() or [""]
        if word == "user":
            (who,) = rest
        elif word in {"topic", "pattern"}:
            of_mosquitto.add((who if word == "topic" else "device", *rest))
    of_emqx = set()
    *allows, last = emqx_acl(FLEET).splitlines()
    assert last == "{deny, all}."
    for line in allows:
        user = "coordinator" if '{username, "coordinator"}' in line else "device"
        may = "write" if ", publish, " in line else "read"
        topic = line.split('["')[1].split('"]')[0].replace("${username}", "%u")
        of_emqx.add((user, may, topic))
    table = {(rule.who, rule.may, rule.topic) for rule in rules(FLEET) if rule.who != "newcomer"}
    assert of_mosquitto == of_emqx == table
    newcomers = {tuple(line.split()) for line in mosquitto_enroll_acl(FLEET).splitlines() if line.startswith("pattern")}
    assert newcomers == {("pattern", rule.may, rule.topic) for rule in rules(FLEET) if rule.who == "newcomer"}


def test_revoked_devices_are_denied_before_anything_is_allowed() -> None:
    assert "user thief\ntopic deny #\n" in mosquitto_acl(FLEET, ["thief"])
    assert emqx_acl(FLEET, ["thief"]).startswith('{deny, {username, "thief"}, all, ["#"]}.\n')


# The directory


def test_the_coordinator_connects_where_it_is_told_and_else_where_the_fleet_is(fleet: Fleet) -> None:
    other = "mqtts://elsewhere.example:9999"
    assert (fleet.transport(url=other).address.host, fleet.transport(url=other).address.port) == (
        "elsewhere.example",
        9999,
    )
    assert fleet.transport().address.host == HOST


def test_the_authority_says_critically_that_it_is_one_and_signs_no_other(fleet: Fleet) -> None:
    """RFC 5280, 4.2.1.9: the extension is critical in certificates of authorities."""
    made = x509.load_pem_x509_certificate((fleet.directory / "ca.pem").read_bytes())
    extension = made.extensions.get_extension_for_class(x509.BasicConstraints)
    assert extension.critical
    assert extension.value == x509.BasicConstraints(ca=True, path_length=0)


def test_init_does_not_replace_a_fleet(fleet: Fleet, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in fleet.directory.rglob("*") if path.is_file()}
    with pytest.raises(IdentityError, match="not empty"):
        create_fleet(fleet.directory, Record(hosts=("localhost",)))
    assert before == {path: path.read_bytes() for path in fleet.directory.rglob("*") if path.is_file()}
    with pytest.raises(IdentityError, match="needs a name"):
        create_fleet(tmp_path / "new", Record())
    with pytest.raises(IdentityError, match="by TLS"):
        create_fleet(tmp_path / "new", Record(hosts=("localhost",), broker="mqtt://plain.example"))
    with pytest.raises(IdentityError, match="neither a host name"):
        create_fleet(tmp_path / "new", Record(hosts=("b\u00fccher..example",)))


def test_a_directory_that_is_none_and_one_that_is_damaged_are_named(fleet: Fleet, tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="no fleet's directory"):
        Fleet(tmp_path)
    (fleet.directory / "devices.json").write_text("{")
    with pytest.raises(StoreError, match=r"devices\.json is damaged"):
        fleet.devices()
    (fleet.directory / "signing.key").write_text("nonsense!")
    with pytest.raises(IdentityError, match="does not hold a key"):
        Fleet(fleet.directory)


def test_a_damaged_list_of_devices_shuts_nobody_in_or_out(fleet: Fleet, tmp_path: Path) -> None:
    """While a coordinator runs: it goes on with what it knows, and says so."""
    enrolled(fleet, "cam", tmp_path / "cam")
    run(revoke(fleet, "cam", time.time()))
    guard, told = Guard(fleet), []
    guard.start(lambda name, message: None, told.append)
    (fleet.directory / "devices.json").write_text("{")
    assert not guard.look()
    assert "damaged" in told[0]
    assert guard.takes(topics.Topic("up", "cam", ""))
    assert guard.dropped == {"revoked": 1}


def test_records_that_are_no_text_are_damaged(fleet: Fleet, tmp_path: Path) -> None:
    own = enrolled(fleet, "cam", tmp_path / "cam")
    (own.directory / "device.json").write_bytes(b'{"fleet": "\xff"}')
    with pytest.raises(IdentityError, match=r"device\.json is damaged"):
        device.Credentials(tmp_path / "cam")
    (fleet.directory / "devices.json").write_bytes(b'{"\xff": {}}')
    with pytest.raises(StoreError, match=r"devices\.json is damaged"):
        fleet.devices()


def test_a_reload_command_is_run_and_its_failure_told(tmp_path: Path, fleet: Fleet) -> None:
    done = tmp_path / "done"
    good = a_fleet(tmp_path / "good", reload=("touch", str(done)))
    assert reload_broker(good)
    assert done.exists()
    enrolled(good, "cam", tmp_path / "cam")
    bad = a_fleet(tmp_path / "bad", reload=("sh", "-c", "echo no such host >&2; exit 3"))
    enrolled(bad, "cam", tmp_path / "cam2")
    outcome = run(revoke(bad, "cam", time.time()))
    assert (outcome.reloaded, outcome.dropped) == (False, False)
    assert "ended with 3: no such host" in outcome.trouble
    assert bad.revoked() == {"cam"}  # the coordinator refuses it all the same
    with pytest.raises(IdentityError, match="failed"):
        reload_broker(a_fleet(tmp_path / "none", reload=("/no/such/program",)))
    assert not reload_broker(fleet)


def test_a_stale_process_id_is_nobodys(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    for text in ("", "x", "999999999", str(os.getpid())):
        file.write_text(text)
        assert running(file) is None
    assert running(tmp_path / "absent") is None


def test_whoever_is_not_enrolled_can_not_be_revoked(fleet: Fleet) -> None:
    error = run(fails(revoke(fleet, "nobody", time.time())))
    assert isinstance(error, IdentityError)
    assert "no device 'nobody' is enrolled" in error.message


def test_amqtt_and_a_broker_elsewhere_are_not_started_for_a_fleet(fleet: Fleet, tmp_path: Path) -> None:
    async def enter(one: Fleet, wanted: str) -> str:
        async with fleets_broker(one, wanted, print) as url:
            return url

    assert "amqtt" in str(run(fails(enter(fleet, "amqtt"))))
    far = a_fleet(tmp_path / "far", broker="mqtts://broker.example:8883")
    assert run(enter(far, "auto")) == "mqtts://broker.example:8883"
    assert run(enter(far, "mqtts://other.example")) == "mqtts://other.example"
    with pytest.raises(IdentityError, match=r"broker\.example"):
        fleet_broker(far)


# Devices


def test_a_device_is_known_by_its_identity(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    root = tmp_path / "home" / "edgefl" / "agents"
    assert whose(None, "", "box") == ("default", "box", root / "default" / "box", "")
    enrolled(fleet, "cam-1", root / FLEET / "cam-1")
    assert whose(None, "", "") == (FLEET, "cam-1", root / FLEET / "cam-1", fleet.url)
    enrolled(fleet, "cam-2", root / FLEET / "cam-2")
    with pytest.raises(IdentityError, match="default/cam-1, default/cam-2"):
        whose(None, "", "")
    assert whose(None, "", "cam-2").device == "cam-2"
    assert whose(root / FLEET / "cam-1", "", "").device == "cam-1"
    assert whose(None, "", "cam-9").broker == ""


def test_an_agent_does_not_start_with_what_does_not_fit(fleet: Fleet, tmp_path: Path) -> None:
    enrolled(fleet, "cam", tmp_path / "cam")
    options = Options(broker=fleet.url, fleet=FLEET, device="cam", data="x.npz", state=str(tmp_path / "cam"))
    wrong = [
        (replace(options, device="other"), "is of 'cam'"),
        (replace(options, fleet="other"), "is of 'cam'"),
        (replace(options, cert="c.pem", key="k.pem"), "identity of its own"),
        (replace(options, broker="mqtt://broker.example"), "without TLS"),
    ]
    for given, told in wrong:
        with pytest.raises(EdgeFLError, match=told):
            make_agent(given, lambda event, **fields: None)
    key = tmp_path / "k.pem"
    key.write_text("key")
    key.chmod(0o644)
    given = replace(options, state=str(tmp_path / "new"), cert="c.pem", key=str(key))
    with pytest.raises(IdentityError, match="0644"):
        make_agent(given, lambda event, **fields: None)


@pytest.mark.parametrize("made", ["fleet", "identity", "enrolment"])
def test_no_key_is_put_into_another_users_directory(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    """Unlike the data of a run, whose file system may lack permissions: that directory is used with a warning."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    text, place = issue_token(fleet, "cam", time.time()), tmp_path / "theirs"
    record = device.Record(FLEET, "cam", fleet.url, "", "")
    place.mkdir(mode=0o777)
    monkeypatch.setattr(Path, "chmod", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    makers: dict[str, Callable[[], object]] = {
        "fleet": lambda: a_fleet(place),
        "identity": lambda: device.save(place, record, fleet.authority_der, b"key"),
        "enrolment": lambda: run(enroll(text, place, tmp_path, 0.1, lambda line: None)),
    }
    with pytest.raises(StoreError, match=f"cannot create {place}.*: Operation not permitted"):
        makers[made]()
    assert not any(path.is_file() for path in place.rglob("*"))


def test_a_damaged_identity_is_named(fleet: Fleet, tmp_path: Path) -> None:
    own = enrolled(fleet, "cam", tmp_path / "cam")
    begin, end = own.valid()
    assert begin < time.time() < end
    assert begin < own.renewal_due() < begin + (end - begin) * 2 / 3
    own.certificate.write_bytes(b"rubbish\n")
    with pytest.raises(IdentityError, match="how long it is valid"):
        own.valid()
    (own.directory / "device.json").write_text("{")
    with pytest.raises(IdentityError, match="damaged"):
        device.Credentials(tmp_path / "cam")


@needs_mosquitto
def test_a_renewed_certificate_is_shown_at_the_next_connection(fleet: Fleet, tmp_path: Path) -> None:
    """Seen by what the broker allows: the file now holds the certificate of another name."""
    one, two = enrolled(fleet, "one", tmp_path / "one"), enrolled(fleet, "two", tmp_path / "two")

    async def scene() -> None:
        async with fleet_broker(fleet), Attackers(fleet) as at:
            client, heard = await at.device(one)
            await client.publish(topics.build("up", FLEET, "one"), b"x")
            device.replace_certificate(one, two.certificate.read_bytes())
            client.read_certificate_again()
            assert isinstance(await fails(client.publish(topics.build("up", FLEET, "two"), b"x")), BrokerError)
            MqttWorld(fleet.url).cut(client)
            await until(lambda: heard.connections[-2:] == [False, True])
            await client.publish(topics.build("up", FLEET, "two"), b"x")

    run(scene())


@needs_mosquitto
def test_who_is_waited_for_gets_its_answer_before_the_coordinator_goes(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*asked: Any) -> enrolling.Answered | None:
        answer = enrolling.answer_request(*asked)  # from here on the device stands in the fleet's record
        time.sleep(1.0)
        return answer

    async def scene() -> None:
        monkeypatch.setattr("coordinator.runtime.fleet_auth.answer_request", slow)
        told: list[str] = []
        serving = asyncio.ensure_future(serve(fleet, told.append, until=("cam",), limit_s=20.0))
        await until(lambda: any("answering" in line for line in told))
        text = issue_token(fleet, "cam", time.time())
        state = await enroll(text, tmp_path / "cam", tmp_path, 5.0, lambda line: None)
        await serving
        assert device.Credentials(state).record.device == "cam"

    run(scene(), 30)


@needs_mosquitto
def test_a_standing_coordinator_renews_and_gives_up_in_time(fleet: Fleet, tmp_path: Path) -> None:
    short = a_fleet(tmp_path / "short", life_s=60.0)  # backdated by a day: half of it is over at once
    own = enrolled(short, "cam", tmp_path / "cam")

    async def scene() -> None:
        told: list[str] = []
        serving = asyncio.ensure_future(serve(short, told.append, until=("late",), limit_s=4.0))
        await until(lambda: any("answering" in line for line in told))
        async with Attackers(short) as at:
            client, heard = await at.device(own, topics.build("down", FLEET, "cam"))

            def send(message: m.Renew) -> None:
                tasks.append(asyncio.ensure_future(client.publish(topics.build("up", FLEET, "cam"), m.encode(message))))

            tasks: list[asyncio.Future[None]] = []
            renewal = Renewal(own, send, lambda event, **fields: None)
            before = own.certificate.read_bytes()
            asking = asyncio.ensure_future(renewal.renew())
            await heard.arrived(1)
            answer = m.decode_down(own.verifier.open(*heard.messages[0]))
            assert isinstance(answer, m.Renewed)
            renewal.answered(replace(answer, request="another"))  # of an earlier request: not this one's
            assert not asking.done()
            renewal.answered(answer)
            assert await asking == answer.not_after
            assert own.certificate.read_bytes() != before
            assert len(short.devices()["cam"].serials) == 2
        error = await fails(serving)
        assert isinstance(error, IdentityError)
        assert "has not come" in error.message

    run(scene(), 30)


# The command line


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs a program inside this process: eleven interpreters would take half a minute."""

    def call(module: str, *arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(module).main()
        out, err = capsys.readouterr()
        return Done(int(ended.value.code or 0), out, err)

    return call


def test_the_programs_lead_from_nothing_to_a_token_and_say_what_is_wrong(
    tmp_path: Path, command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = str(tmp_path / "fleet")
    made = command("coordinator.cli", "init", "--directory", place, "--host", "broker.example", "--fleet", "f1")
    assert made.code == 0, made.err
    assert "enroll --name cam-01" in made.out
    again = command("coordinator.cli", "init", "--directory", place, "--host", "broker.example")
    assert again.code == IdentityError.exit_code
    printed = command("coordinator.cli", "enroll", "--name", "cam-07", "--identity", place)
    token = t.decode_token(printed.out)
    assert (token.fleet, token.name, token.url) == ("f1", "cam-07", "mqtts://broker.example:8884")
    file = tmp_path / "token"
    whole = printed.out.strip()
    file.write_text(f"{whole[:40]}{'B' if whole[40] == 'A' else 'A'}{whole[41:]}\n")
    typo = command("device_agent.cli", "enroll", "--file", str(file), "--state", str(tmp_path / "state"))
    assert typo.code == IdentityError.exit_code
    assert "checksum" in typo.err
    assert not (tmp_path / "state").exists()
    unknown = command("edgefl.cli.main", "devices", "revoke", "cam-08", "--identity", place)
    assert unknown.code == IdentityError.exit_code
    assert "no device 'cam-08' is enrolled" in unknown.err
    nameless = command("edgefl.cli.main", "devices", "revoke", "--identity", place)
    assert nameless.code == 2
    fleet = Fleet(tmp_path / "fleet")
    asked = Asked(printed.out)
    assert asked.answered(fleet).certificate
    gone = command("edgefl.cli.main", "devices", "revoke", "cam-07", "--identity", place, "--format", "json")
    assert json.loads(gone.out)["reloaded"] is False
    plain = command("coordinator.cli", "run", "demo", "--broker", "mqtt://broker.example")
    assert plain.code == BrokerError.exit_code
    assert "--insecure" in plain.err
    wrong = command("coordinator.cli", "run", "demo", "--identity", place, "--fleet", "other")
    assert wrong.code == IdentityError.exit_code
    unenrolled = command("device_agent.cli", "run", "--data", "x.npz", "--state", str(tmp_path / "new"))
    assert unenrolled.code == 2
    assert "not enrolled" in unenrolled.err


def test_a_device_without_identity_learns_which_there_are_and_how_to_enrol(
    fleet: Fleet, tmp_path: Path, command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "300")
    root = tmp_path / "home" / "edgefl" / "agents"
    for name in ("cam-1", "cam-2"):
        enrolled(fleet, name, root / FLEET / name)
    done = command("device_agent.cli", "run", "--data", "x.npz", "--device", "cam-99")
    assert done.code == 2
    assert "enrolled here: default/cam-1, default/cam-2" in done.err
    assert "to enrol it: edgefl-agent enroll -" in done.err


@pytest.mark.parametrize(
    ("there", "hint"),
    [
        (["default/cam-2"], ""),
        (["default/cam-1", "default/cam-2"], " --device cam-2"),
        (["default/cam-2", "roof/cam-2"], " --device cam-2 --fleet default"),
    ],
)
def test_after_enrolling_the_command_to_start_is_the_devices_own(
    tmp_path: Path, command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, there: list[str], hint: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    root = tmp_path / "edgefl" / "agents"
    for place in there:
        (root / place / "credentials").mkdir(parents=True)
        (root / place / "credentials" / "device.json").touch()

    async def exchange(*_: object) -> Path:
        return root / "default" / "cam-2"

    monkeypatch.setattr("device_agent.enroll.enroll", exchange)
    done = command("device_agent.cli", "enroll", "token")
    assert done.out.endswith(f"Now start it: edgefl-agent run --data PATH{hint}\n")


def test_a_key_that_is_none_is_named() -> None:
    with pytest.raises(IdentityError, match="not a private key"):
        x.load_key(b"rubbish", "ca.key")
    with pytest.raises(IdentityError, match="not a certificate"):
        x.der_of(b"rubbish", "ca.pem")
