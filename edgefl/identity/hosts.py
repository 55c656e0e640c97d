"""Names and addresses that devices dial a fleet's server by: they come and go while the fleet goes on.

The server's certificate is made again for them, with the key that it has. Coordinators tell devices of them, signed.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from edgefl.errors import IdentityError, some_of
from edgefl.identity import authority as x
from edgefl.identity.device import MOST_ADDRESSES
from edgefl.identity.fleet import Devices, Fleet
from edgefl.identity.keys import read, read_private, write_private
from edgefl.identity.membership import reload_broker
from edgefl.transport.address import parse_url

#: How long the broker may take to show a certificate that it has been told to read: it reads within a second.
SHOWN_S = 5.0
#: Time limit of a connection to the broker of this machine.
_CONNECT_S = 5.0


class Changed(NamedTuple):
    """Outcome of a change. ``shown``: the broker shows the new certificate; ``trouble``: why that is not known."""

    hosts: tuple[str, ...]
    shown: bool
    trouble: str = ""


def add_host(fleet: Fleet, host: str, now: float) -> Changed:
    """Have the server serve another name or address as well. Raises IdentityError."""
    _check_own(fleet)
    host = x.host_name(host)

    def added(hosts: tuple[str, ...]) -> tuple[str, ...]:
        if host in hosts:
            raise IdentityError(f"{host} is one of the server's names already", remedy=_are(hosts))
        if len(hosts) >= MOST_ADDRESSES:
            text = f"a server has {MOST_ADDRESSES} names and addresses at most"
            raise IdentityError(text, remedy="Take one away first: edgefl-coordinator host remove NAME")
        return (*hosts, host)

    return _change(fleet, added, now)


def knowing(fleet: Fleet, now: float) -> dict[str, list[str]]:
    """Host -> devices that know it, by what they say; of those whose certificate is valid."""
    shown, there = fleet.shown(), _valid(fleet, now)
    return {host: [shown[name] for name in there if host in there[name].hosts] for host in fleet.record.hosts}


def cut_off(fleet: Fleet, left: Collection[str], now: float) -> list[str]:
    """Devices not known to know any of the names that are ``left``."""
    shown = fleet.shown()
    return sorted(shown[name] for name, device in _valid(fleet, now).items() if not {*left} & {*device.hosts})


def note_hosts(fleet: Fleet, known: Mapping[str, tuple[str, ...]]) -> None:
    """Write down which names of the server devices say that they know."""
    with fleet.changing() as devices:
        for name in known.keys() & devices.keys():
            devices[name] = replace(devices[name], hosts=known[name])


def _valid(fleet: Fleet, now: float) -> Devices:
    return {name: one for name, one in fleet.devices().items() if one.is_valid(now)}


def remove_host(fleet: Fleet, host: str, now: float, *, force: bool = False) -> Changed:
    """Take a name or address from the server.

    Raises IdentityError for one that it has not, for the last, and, unless ``force``, where a device would be cut off.
    """
    _check_own(fleet)

    def left(hosts: tuple[str, ...]) -> tuple[str, ...]:
        rest = tuple(name for name in hosts if name.lower() != host.lower())
        if rest == hosts:
            raise IdentityError(f"{host} is none of the server's names", remedy=_are(hosts))
        if not rest:
            text = f"{host} is the only name of the server"
            raise IdentityError(text, remedy="Add another first: edgefl-coordinator host add NAME")
        if (lost := cut_off(fleet, rest, now)) and not force:
            listed = some_of(lost)
            text = f"{len(lost)} device{'' if len(lost) == 1 else 's'} would be cut off, which may know no other name"
            remedy = "Leave a run or `enrollments` running until they have been there; --force cuts them off."
            raise IdentityError(f"{text}: {listed}", remedy=remedy)
        return rest

    return _change(fleet, left, now)


def _change(fleet: Fleet, changed: Callable[[tuple[str, ...]], tuple[str, ...]], now: float) -> Changed:
    """Write certificate and record, then have the broker read the certificate."""
    place = fleet.directory / "broker"
    with fleet.changing():
        record = fleet.read_record()
        revision = max(record.revision + 1, int(now))  # newer than what a fleet told whose backup this is
        record = replace(record, hosts=changed(record.hosts), revision=revision)
        key = x.load_key(read_private(place / "server.key"), "server.key")
        made = fleet.authority().server(key.public_key(), record.served(), now)
        write_private(place / "server.pem", ssl.DER_cert_to_PEM_cert(made.der).encode())
        fleet.write_record(record)
    try:
        if not reload_broker(fleet):
            return Changed(record.hosts, False, "no broker runs here: it shows the new certificate once it is started")
        shown = _is_shown(fleet)
    except (IdentityError, OSError) as error:
        return Changed(record.hosts, False, str(error))
    return Changed(record.hosts, shown, "" if shown else "the broker goes on with the old certificate: restart it")


def _is_shown(fleet: Fleet) -> bool:
    """Whether the broker of this machine shows the certificate that lies here, within ``SHOWN_S``. Raises OSError."""
    wanted = x.der_of(read(fleet.directory / "broker" / "server.pem"), "server.pem")
    context = ssl.create_default_context(cafile=str(fleet.directory / "ca.pem"))
    context.check_hostname = False  # the certificate is compared as a whole
    context.load_cert_chain(fleet.directory / "coordinator.pem")
    address, deadline = parse_url(fleet.local_url), time.monotonic() + SHOWN_S
    while True:
        with (
            socket.create_connection((address.host, address.port), _CONNECT_S) as raw,
            context.wrap_socket(raw) as opened,
        ):
            if opened.getpeercert(binary_form=True) == wanted:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def _check_own(fleet: Fleet) -> None:
    """Raises IdentityError where the broker is elsewhere."""
    if fleet.record.broker:
        raise IdentityError(
            f"this fleet's broker is {fleet.record.broker}, and its devices know no other address",
            remedy="Have that name lead to the new server (DNS), with the same server.pem and server.key there. Names "
            "that change need the fleet's own broker (init without --broker), in which devices enrol again.",
        )


def _are(hosts: tuple[str, ...]) -> str:
    return f"They are: {', '.join(hosts)}."
