"""Writes what a mosquitto broker of our own needs: its configuration and its password file."""

from __future__ import annotations

import base64
import hashlib
import os
import pwd
import secrets
from pathlib import Path
from typing import NamedTuple

from edgefl.transport.client import MAX_PACKET_BYTES

#: How often sessions, queues and retained messages are written to disk: what a SIGKILL loses is at most this old
#: (subscriptions are renewed and chunks sent again by the layers above). Each write takes the whole database, so not
#: after each change.
AUTOSAVE_S = 2
#: Messages waiting per client; beyond it mosquitto drops in silence. Its default of 1000 lost two thirds of 200
#: devices × 16 chunks. 0 (no limit) is buggy in some 2.0.x. Credits of the protocol keep the real number far below.
MAX_QUEUED_MESSAGES = 100_000
#: Largest packet of a fleet's broker: a chunk of the largest size (1,000,000 bytes) with header and topic.
FLEET_PACKET_BYTES = 2**20
#: Bytes waiting per client: ten times all uploads that are admitted at once. A device that never reads fills no memory.
MAX_QUEUED_BYTES = 512 * 2**20
#: Connections of devices that enrol at the same time; each takes a second.
NEWCOMERS = 100
#: PBKDF2 rounds of mosquitto's own password files. The secret is 192 random bits, so more rounds would add nothing.
_ROUNDS = 101


def write_configuration(directory: Path, host: str, port: int, username: str, password: str) -> Path:
    """Write ``mosquitto.conf`` and its password file into ``directory``; returns the configuration's path."""
    passwords = directory / "passwords"
    write_private(passwords, f"{username}:{hash_password(password)}\n")
    lines = [
        f"listener {port} {host}",
        "allow_anonymous false",
        f"password_file {passwords}",
        *_common(directory, MAX_PACKET_BYTES),
    ]
    configuration = directory / "mosquitto.conf"
    write_private(configuration, "\n".join(lines) + "\n")
    return configuration


class TlsListeners(NamedTuple):
    """Where a fleet's broker listens, and where its files lie. ``bind``: an address, "" for all."""

    directory: Path
    port: int
    enroll_port: int
    bind: str = ""


def tls_configuration(listeners: TlsListeners) -> str:
    """The configuration of a fleet's broker: one listener for certificates, one for devices that have none yet.

    The user is the common name of the certificate. Files in the directory: ca.pem, server.pem, server.key, crl.pem,
    fleet.acl, newcomers.acl. SIGHUP reads the last three again.
    """
    place = listeners.directory
    files = [f"cafile {place}/ca.pem", f"certfile {place}/server.pem", f"keyfile {place}/server.key"]
    files.append("tls_version tlsv1.2")  # the least: TLS 1.3 where both sides have it
    lines = [
        "per_listener_settings true",
        *_common(place, FLEET_PACKET_BYTES),
        f"max_queued_bytes {MAX_QUEUED_BYTES}",
        f"pid_file {place}/mosquitto.pid",
        "",
        f"listener {listeners.port} {listeners.bind}".rstrip(),
        *files,
        f"crlfile {place}/crl.pem",
        "require_certificate true",
        "use_identity_as_username true",
        "allow_anonymous false",
        f"acl_file {place}/fleet.acl",
        "",
        f"listener {listeners.enroll_port} {listeners.bind}".rstrip(),
        *files,
        f"max_connections {NEWCOMERS}",
        "allow_anonymous true",
        f"acl_file {place}/newcomers.acl",
    ]
    return "\n".join(lines) + "\n"


def _common(directory: Path, packet_bytes: int) -> list[str]:
    """What every broker of ours is told, whoever may connect to it."""
    lines = [
        "persistence true",
        f"persistence_location {directory}/",
        "persistence_file sessions.db",
        f"autosave_interval {AUTOSAVE_S}",
        "autosave_on_changes false",
        "persistent_client_expiration 1d",
        f"max_queued_messages {MAX_QUEUED_MESSAGES}",
        f"max_packet_size {packet_bytes}",
        "set_tcp_nodelay true",
        "sys_interval 0",
        "log_dest stderr",
        "log_type error",
        "log_type warning",
        "log_type notice",
    ]
    user = _own_name()
    return lines if user is None else [*lines, f"user {user}"]


def hash_password(password: str) -> str:
    """A line's second half in a mosquitto 2 password file: PBKDF2-SHA512 with a random salt."""
    salt = secrets.token_bytes(12)
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _ROUNDS)
    return f"$7${_ROUNDS}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _own_name() -> str | None:
    """Root's mosquitto would become another user, who can not write our directory. None in nameless containers."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return None
