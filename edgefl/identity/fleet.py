"""The identity of a fleet, a directory on its coordinator's machine: authority, certificates, devices, access rules.

Layout (all of it for its owner alone)::

    fleet.json       Record: name, addresses of the broker
    ca.pem, ca.key   the fleet's certificate authority
    signing.key      seed of the Ed25519 key that signs the coordinator's messages
    coordinator.pem  the coordinator's certificate and key
    devices.json     every device that was ever enrolled
    groups.json      groups of devices, if there are any
    tokens/          records by which issued tokens are recognised
    broker/          files of the broker: configuration, access rules, certificates, list of revoked ones
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import replace as replace_address
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from edgefl.errors import IdentityError, StoreError, some_of
from edgefl.identity import authority as x
from edgefl.identity.acl import emqx_acl, mosquitto_acl, mosquitto_enroll_acl, user_of
from edgefl.identity.device import MOST_ADDRESSES
from edgefl.identity.keys import (
    KEY_BYTES,
    Signer,
    check_private,
    key_of,
    key_text,
    make_private_directory,
    read,
    read_private,
    write_private,
)
from edgefl.protocol.topics import COORDINATOR, check_name
from edgefl.storage.disk import store_errors
from edgefl.transport import failures
from edgefl.transport.address import Address, parse_url
from edgefl.transport.broker import Broker, Program, dialled, program_of
from edgefl.transport.link import TlsFiles
from edgefl.transport.mosquitto import hash_password, newcomers_configuration, tls_configuration
from edgefl.transport.mqtt import MqttTransport

#: MQTT over TLS, as registered; and the next port for devices without a certificate.
PORT, ENROLL_PORT = 8883, 8884
#: Life of a certificate: a device that is away longer must enrol again, and a stolen one expires.
LIFE_S = 90 * 86400.0
#: Certificates of a device that can be valid at once: it may renew when a quarter of a life has passed, so five.
SERIALS = 10

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True):
    """A fleet as ``edgefl-coordinator init`` makes it, with the secrets that it draws.

    ``broker``: URL of a broker for everybody with a certificate, "" for the one whose files lie here; ``reload``: the
    command that makes it read its files again. ``newcomers``: the coordinator's password at the broker process for
    devices that enrol. ``retain``: the fleet has agents from before decision 0036, which retain their presence.
    ``revision``: of the hosts, higher with each change: seconds since the epoch where the clock allows.
    """

    fleet: str = "default"
    hosts: tuple[str, ...] = ()
    port: int = PORT
    enroll_port: int = ENROLL_PORT
    bind: str = ""
    life_s: float = LIFE_S
    client_id: str = ""
    broker: str = ""
    reload: tuple[str, ...] = ()
    newcomers: str = ""
    retain: bool = True
    revision: int = 0

    def served(self) -> list[str]:
        """Names and addresses of the server's certificate."""
        own = [self.bind] if self.bind else []
        return list(dict.fromkeys([*self.hosts, *own, "localhost", "127.0.0.1", "::1"]))


class Device(msgspec.Struct, frozen=True):
    """A device's certificates. ``holder``: fingerprint of the key that the newest of them is for.

    ``enrolled``: when each machine of the name enrolled, seconds since the epoch, 0: not on record; a device of an
    earlier release has none on record. ``retired``: serials of replaced machines -> when the last of them ends.
    ``shown``: its name for people and runs, "" for the one that it enrolled with; ``formerly``: earlier ones.
    ``hosts``: server names known to it; all but the one of its enrolment are as the device reports.
    """

    serials: tuple[str, ...] = ()  # hexadecimal: they have 160 bits
    holder: str = ""
    certificate: bytes = b""
    not_before: float = 0.0
    not_after: float = 0.0
    client_id: str = ""
    revoked_at: float | None = None
    enrolled: tuple[float, ...] = ()
    retired: dict[str, float] = {}
    shown: str = ""
    formerly: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def is_valid(self, now: float) -> bool:
        """True while its certificate is neither revoked nor expired."""
        return self.revoked_at is None and self.not_after > now

    @property
    def generation(self) -> int:
        """Number of the machine that has the name now, from 1."""
        return max(1, len(self.enrolled))

    @property
    def since(self) -> float:
        """When that machine enrolled, seconds since the epoch; 0: not on record."""
        return self.enrolled[-1] if self.enrolled else 0.0

    def successor(self, client_id: str, now: float) -> Device:
        """The next machine of the name, without its certificate. Those of the machines before are retired."""
        retired = {serial: until for serial, until in self.retired.items() if until > now}
        retired |= dict.fromkeys(self.serials, self.not_after)
        enrolled = (*(self.enrolled or (0.0,)), now)
        return Device(client_id=client_id, enrolled=enrolled, retired=retired, shown=self.shown, formerly=self.formerly)

    def with_certificate(self, certificate: x.Certificate, holder: str) -> Device:
        """The same with a newer certificate. Of the older ones those are remembered that can still be valid."""
        return replace(
            self,
            serials=(*self.serials[1 - SERIALS :], f"{certificate.serial:x}"),
            holder=holder,
            certificate=certificate.der,
            not_before=certificate.not_before,
            not_after=certificate.not_after,
        )


Devices = dict[str, Device]
Groups = dict[str, tuple[str, ...]]


def names_of(devices: Devices, but: str = "") -> set[str]:
    """All names that devices have and had, of all ``but`` one: a run that goes on may have an earlier one."""
    others = {own: device for own, device in devices.items() if own != but}
    return {*others, *(name for one in others.values() for name in (one.shown, *one.formerly) if name)}


def id_of(devices: Devices, name: str) -> str:
    """The name that a device enrolled with, by its shown name, that name itself, or an earlier one."""
    shown = (own for own, device in devices.items() if device.shown == name)
    earlier = (own for own, device in devices.items() if name not in devices and name in device.formerly)
    return next(shown, next(earlier, name))


def enrolled_id(devices: Devices, name: str) -> str:
    """``id_of`` an enrolled device. Raises IdentityError."""
    own = id_of(devices, name)
    if own not in devices:
        there = some_of(sorted(device.shown or one for one, device in devices.items()))
        raise IdentityError(f"no device {name!r} is enrolled", remedy=f"Enrolled are: {there}.")
    return own


class Fleet:
    """An opened directory. Raises IdentityError when there is none, or when others could have read its keys."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        if not (directory / "fleet.json").is_file():
            raise IdentityError(
                f"{directory} is no fleet's directory",
                remedy="Make one with `edgefl-coordinator init --host NAME`, or name it with --identity DIRECTORY.",
            )
        self.record = self.read_record()
        self.signer = Signer(key_of(read_private(self.directory / "signing.key"), "signing.key"))
        self.authority_der = x.der_of(read(self.directory / "ca.pem"), "ca.pem")

    @property
    def url(self) -> str:
        """The broker's address for everybody with a certificate."""
        return self.urls[0]

    @property
    def urls(self) -> tuple[str, ...]:
        """All addresses of the broker for everybody with a certificate; new devices get the first."""
        if self.record.broker:
            return (self.record.broker,)
        return tuple(f"mqtts://{_netloc(host)}:{self.record.port}" for host in self.record.hosts)

    @property
    def enroll_url(self) -> str:
        """The broker's address for devices without one."""
        return f"mqtts://{_netloc(self.record.hosts[0])}:{self.record.enroll_port}"

    @property
    def local_url(self) -> str:
        """The address of the fleet's own broker as this machine dials it."""
        return str(_here(self, self.record.port))

    def read_record(self) -> Record:
        """The record as the file has it now."""
        return self._decode("fleet.json", Record)

    def write_record(self, record: Record) -> None:
        """Put another record in place; within ``changing``."""
        _write_record(self.directory, record)
        self.record = record

    def authority(self) -> x.Authority:
        """The fleet's authority, with its key."""
        return x.Authority(self.authority_der, x.load_key(read_private(self.directory / "ca.key"), "ca.key"))

    def devices(self) -> Devices:
        """Every device that was ever enrolled, by name."""
        return self._decode("devices.json", Devices)

    def shown(self, devices: Devices | None = None) -> dict[str, str]:
        """Name that a device enrolled with -> its shown name."""
        devices = self.devices() if devices is None else devices
        return {name: device.shown or name for name, device in devices.items()}

    def groups(self) -> Groups:
        """Group -> shown names of its devices; some may not have enrolled yet."""
        return self._decode("groups.json", Groups) if (self.directory / "groups.json").exists() else {}

    def write_groups(self, groups: Groups) -> None:
        """Put these groups, without empty ones, in place; within ``changing``."""
        kept = {group: tuple(sorted(set(groups[group]))) for group in sorted(groups) if groups[group]}
        write_private(self.directory / "groups.json", msgspec.json.format(msgspec.json.encode(kept)))

    def revoked(self) -> frozenset[str]:
        """Names of the revoked devices."""
        return frozenset(name for name, device in self.devices().items() if device.revoked_at is not None)

    def transport(self, client_id: str = "", url: str = "") -> MqttTransport:
        """The coordinator's connection. With a ``client_id`` of its own, it is a second one, whose session ends."""
        certificate = self.directory / "coordinator.pem"
        check_private(certificate)
        return MqttTransport(
            url or self.url,
            client_id or self.record.client_id,
            tls=TlsFiles(str(self.directory / "ca.pem"), str(certificate)),
            clean_session=bool(client_id),
        )

    def server_tls(self) -> ssl.SSLContext:
        """TLS of a server of this fleet, for clients with a certificate of its authority alone."""
        place = self.directory / "broker"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(place / "server.pem", place / "server.key")
            context.load_verify_locations(self.directory / "ca.pem")
        except OSError as error:
            raise IdentityError(failures.unreadable(f"the server's certificate in {place}", error).message) from error
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def newcomers(self, url: str = "") -> MqttTransport:
        """The coordinator's connection to devices that enrol, separate from the one to the fleet.

        ``url``: of the fleet's broker as this machine dials it; the process for newcomers is on the same host.
        """
        own = f"{COORDINATOR}-{secrets.token_hex(16)}"
        there = replace_address(parse_url(self.enroll_url), username=COORDINATOR, password=self.record.newcomers)
        if url and not self.record.broker:
            there = replace_address(there, host=parse_url(url).host)
        return MqttTransport(there.secret_url(), own, tls=TlsFiles(str(self.directory / "ca.pem")), clean_session=True)

    @contextlib.contextmanager
    def changing(self) -> Iterator[Devices]:
        """The devices, to be changed in place: written at the end, by one process at a time."""
        with store_errors("lock", self.directory / "lock"):
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            devices = self.devices()
            before = dict(devices)
            yield devices
            if devices != before:
                write_private(self.directory / "devices.json", msgspec.json.encode(devices))
        finally:
            os.close(lock)

    def write_configuration(self) -> bool:
        """Bring the configurations of the fleet's own brokers up to date, before they start; False: left as they are.

        They are left where lines were added by hand, but in a directory that was copied or moved they name the files
        that lie here.
        """
        place = self.directory / "broker" / "mosquitto.conf"
        with self.changing() as devices:
            for moved in (place, place.with_name("newcomers.conf")):
                _name_here(moved)
            self.record = self.read_record()
            own, newcomers = self._configurations()
            known = set(own.split("\n"))
            if place.exists() and not set(read(place).decode(errors="replace").split("\n")) <= known:
                return False
            password = f"{COORDINATOR}:{hash_password(self.record.newcomers)}\n"
            write_private(place.with_name("enroll.passwords"), password.encode())
            write_private(place.with_name("newcomers.conf"), newcomers.encode())
            write_private(place, own.encode())
            self.write_rules(time.time(), devices)
        return True

    def _configurations(self) -> tuple[str, str]:
        """Configurations of the fleet's broker, and of the one for devices that enrol."""
        record, place = self.record, self.directory / "broker"
        own = tls_configuration(place, f"{record.port} {record.bind}".rstrip(), retain=record.retain)
        return own, newcomers_configuration(place, f"{record.enroll_port} {record.bind}".rstrip())

    def write_rules(self, now: float, devices: Devices | None = None) -> None:
        """Write the files that the broker reloads when a device is revoked: access rules and revoked certificates.

        ``devices``: as they will be.
        """
        place, fleet = self.directory / "broker", self.record.fleet
        devices = self.devices() if devices is None else devices
        serials, denied, successors = [], [], {}
        for name, device in devices.items():
            serials += [*device.retired, *(device.serials if device.revoked_at is not None else ())]
            users = [user_of(name, generation) for generation in range(1, device.generation + 1)]
            denied += users if device.revoked_at is not None else users[:-1]
            if device.revoked_at is None and device.generation > 1:
                successors[users[-1]] = name
        write_private(place / "crl.pem", self.authority().revocations([int(one, 16) for one in serials], now))
        write_private(place / "fleet.acl", mosquitto_acl(fleet, denied, successors).encode())
        write_private(place / "enroll.acl", mosquitto_enroll_acl(fleet).encode())
        write_private(place / "emqx-acl.conf", emqx_acl(fleet, denied, successors).encode())

    def _decode(self, file: str, kind: type[T]) -> T:
        path = self.directory / file
        try:
            return msgspec.json.decode(read(path), type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreError(f"{path} is damaged: {error}", remedy="Restore it from a backup of the fleet.") from error


def create_fleet(directory: Path, asked: Record) -> Fleet:
    """A new fleet's directory; ``asked`` without its secrets, which are drawn here.

    Raises IdentityError when there is something in the directory already: keys are not replaced.
    """
    check_name("fleet", asked.fleet)
    if asked.broker and not parse_url(asked.broker).tls:
        raise IdentityError("a fleet's broker is reached by TLS", remedy="Write its URL as mqtts://host:port.")
    if not asked.hosts:
        raise IdentityError("the broker needs a name", remedy="Give --host NAME, as devices will dial it.")
    hosts = tuple(dict.fromkeys(map(x.host_name, asked.hosts)))
    if len(hosts) > MOST_ADDRESSES:
        text = f"a server has {MOST_ADDRESSES} names and addresses at most, and not {len(hosts)}"
        raise IdentityError(text, remedy="Give --host fewer times.")
    # New devices get the first host with their identity; of the others they are told.
    asked = replace(asked, hosts=hosts, revision=int(time.time()) if len(hosts) > 1 else 0)
    with store_errors("open", directory):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise IdentityError(
                f"{directory} is not empty: what is in it may be a fleet's keys",
                remedy="Name another --directory. A fleet whose keys are replaced must enrol every device anew.",
            )
    for folder in (directory, directory / "tokens", directory / "broker"):
        make_private_directory(folder)
    now, key = time.time(), x.new_key()
    authority = x.Authority(x.self_signed(asked.fleet, key, now).der, key)
    pem = ssl.DER_cert_to_PEM_cert(authority.certificate).encode()
    place = directory / "broker"
    server, own = x.new_key(), x.new_key()
    write_private(directory / "ca.key", x.key_pem(key))
    write_private(directory / "ca.pem", pem)
    write_private(directory / "signing.key", key_text(secrets.token_bytes(KEY_BYTES)).encode() + b"\n")
    certificate = authority.client(COORDINATOR, own.public_key(), x.LONG_LIFE_S, now)
    write_private(directory / "coordinator.pem", ssl.DER_cert_to_PEM_cert(certificate.der).encode() + x.key_pem(own))
    write_private(directory / "devices.json", b"{}")
    write_private(place / "ca.pem", pem)
    served = authority.server(server.public_key(), asked.served(), now)
    write_private(place / "server.pem", ssl.DER_cert_to_PEM_cert(served.der).encode())
    write_private(place / "server.key", x.key_pem(server))
    client_id, password = f"{COORDINATOR}-{secrets.token_hex(16)}", secrets.token_urlsafe(24)
    _write_record(directory, replace(asked, client_id=client_id, newcomers=password, retain=False))
    made = Fleet(directory)
    made.write_configuration()
    return made


def _name_here(file: Path) -> None:
    """Rewrite paths in a copied broker's configuration to its own directory.

    Its keys say whose files it names; a line that names a third place, such as the process id's, stays.
    """
    if not file.exists():
        return
    text = read(file).decode(errors="surrogateescape")
    named = {
        directory[1] if (directory := re.search(rf"^{option} (/.*)/[^/\n]+$", text, re.MULTILINE)) else ""
        for option in ("keyfile", "cafile")
    }
    if len(named) == 1 and (old := named.pop()) != str(file.parent) and old.endswith(f"/{file.parent.name}"):
        there = re.compile(rf"(?<=\s){re.escape(old)}/")
        write_private(file, there.sub(lambda _: f"{file.parent}/", text).encode(errors="surrogateescape"))


def _write_record(directory: Path, record: Record) -> None:
    write_private(directory / "fleet.json", msgspec.json.format(msgspec.json.encode(record)))


def _netloc(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def fleet_broker(fleet: Fleet) -> Broker:
    """The fleet's own mosquitto, not yet started, with the one for newcomers beside it.

    Raises BrokerError when there is none on the PATH.
    """
    if fleet.record.broker:
        raise IdentityError(f"this fleet's broker is {fleet.url}", remedy="It is started where it runs, not here.")
    fleet.write_configuration()

    def client(url: str) -> MqttTransport:
        return fleet.transport(f"probe-{secrets.token_hex(16)}", url)

    program = _program(fleet, "mosquitto", fleet.record.port, client)
    return Broker(program, beside=newcomers_broker(fleet))


def newcomers_broker(fleet: Fleet) -> Broker:
    """The mosquitto for devices that enrol, not yet started."""
    return Broker(_program(fleet, "newcomers", fleet.record.enroll_port, fleet.newcomers))


def _program(fleet: Fleet, name: str, port: int, client: Callable[[str], MqttTransport]) -> Program:
    """The mosquitto configured in ``name``.conf. ``client``: makes a client of its URL."""
    place, address = fleet.directory / "broker", _here(fleet, port)
    command = [program_of("mosquitto"), "-c", str(place / f"{name}.conf")]
    host = fleet.record.bind or "0.0.0.0"  # noqa: S104
    return Program("mosquitto", command, host, address, place / f"{name}.log", partial(client, str(address)))


def _here(fleet: Fleet, port: int) -> Address:
    """Address of the fleet's broker as this machine dials it."""
    return Address(dialled(fleet.record.bind), port, tls=True)
