"""Asks a port which language it speaks (plain MQTT, TLS, or neither), without sending any secret."""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Literal

from edgefl.transport.address import Address

#: A broker on the same network answers within milliseconds; one that was reached a moment ago within a round trip.
_PATIENCE_S = 2.0
#: CONNECT of MQTT 3.1.1 without user, clean session, keep-alive 5 s, client id "edgefl-asks".
_CONNECT = b"\x10\x17\x00\x04MQTT\x04\x02\x00\x05\x00\x0bedgefl-asks"
_CONNACK = 0x20


def speaks(address: Address) -> Literal["tls", "mqtt", ""]:
    """The protocol that the port speaks, if it is not the one that the URL asks for."""
    with contextlib.suppress(OSError), socket.create_connection((address.host, address.port), _PATIENCE_S) as opened:
        if address.tls:
            opened.sendall(_CONNECT)
            return "mqtt" if opened.recv(1)[:1] == bytes([_CONNACK]) else ""
        anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # asks which language, not who: nothing is sent over it
        anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
        with anyone.wrap_socket(opened):
            return "tls"
    return ""
