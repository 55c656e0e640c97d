"""Configuration and password files of the mosquitto brokers that EdgeFL starts."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import pwd
import secrets
from pathlib import Path

from edgefl.storage.disk import write_new
from edgefl.transport.link import MAX_PACKET_BYTES

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
#: Connections of enrolled devices: far more than a coordinator serves, and fewer than the descriptors of most machines
#: (``parent_death`` raises them to the hard limit), so that some are left for the broker's own files.
CONNECTIONS = 10_000
#: Connections of devices that enrol at the same time; each takes a second.
NEWCOMERS = 100
#: Largest message of a device that enrols (``identity.token.MAX_MESSAGE_BYTES``), and with header, topic and client id.
NEWCOMER_BYTES = 8192
NEWCOMER_PACKET_BYTES = NEWCOMER_BYTES + 1024
#: Heap of the newcomers' broker: 100 connections with 20 messages in flight each need 16 MiB.
NEWCOMER_MEMORY_BYTES = 64 * 2**20
#: Requests that wait for the coordinator; a device that gets no answer asks again.
NEWCOMER_QUEUE = 1000
#: PBKDF2 rounds of mosquitto's own password files. The secret is 192 random bits, so more rounds would add nothing.
_ROUNDS = 101


def write_configuration(directory: Path, host: str, port: int, username: str, password: str) -> Path:
    """Write ``mosquitto.conf`` and its password file into ``directory``; returns the configuration's path."""
    passwords = directory / "passwords"
    write_new(passwords, f"{username}:{hash_password(password)}\n".encode(), mode=0o600)
    lines = [
        f"listener {port} {host}",
        "allow_anonymous false",
        f"password_file {passwords}",
        *_common(MAX_PACKET_BYTES),
        *_lasting(directory),
        f"max_queued_messages {MAX_QUEUED_MESSAGES}",
    ]
    configuration = directory / "mosquitto.conf"
    write_new(configuration, "\n".join([*lines, ""]).encode(), mode=0o600)
    return configuration


def tls_configuration(place: Path, listen: str, *, retain: bool) -> str:
    """The configuration of a fleet's broker, for clients with certificates.

    ``place``: directory of its files; ``listen``: port and, unless it is any, address. The user is the common name of
    the certificate. Files in the directory: ca.pem, server.pem, server.key, crl.pem, fleet.acl. SIGHUP reads the last
    two again. ``retain``: agents of releases before 0036 (docs/decisions) retain their presence and need it allowed.
    """
    lines = [
        "per_listener_settings true",
        *_common(FLEET_PACKET_BYTES),
        *_lasting(place),
        f"retain_available {'true' if retain else 'false'}",
        f"max_queued_messages {MAX_QUEUED_MESSAGES}",
        f"max_queued_bytes {MAX_QUEUED_BYTES}",
        f"pid_file {place}/mosquitto.pid",
        "",
        f"listener {listen}",
        *_tls(place),
        f"max_connections {CONNECTIONS}",
        f"crlfile {place}/crl.pem",
        "require_certificate true",
        "use_identity_as_username true",
        "allow_anonymous false",
        f"acl_file {place}/fleet.acl",
    ]
    return "\n".join(lines) + "\n"


def newcomers_configuration(place: Path, listen: str) -> str:
    """The configuration of a broker process for devices without a certificate: any client may connect.

    Its limits hold for the whole process, so it is no listener of the fleet's broker: nothing is retained or
    written to disk, messages are small, memory is bounded, and client ids are a name space of their own. The
    coordinator comes with a password. Files in the directory: ca.pem, server.pem, server.key, enroll.passwords,
    enroll.acl.
    """
    lines = [
        "per_listener_settings true",
        *_common(NEWCOMER_PACKET_BYTES),
        "persistence false",
        "persistent_client_expiration 1h",
        "retain_available false",
        f"message_size_limit {NEWCOMER_BYTES}",
        f"memory_limit {NEWCOMER_MEMORY_BYTES}",
        f"max_queued_messages {NEWCOMER_QUEUE}",
        f"pid_file {place}/newcomers.pid",
        "",
        f"listener {listen}",
        *_tls(place),
        f"max_connections {NEWCOMERS}",
        "allow_anonymous true",
        f"password_file {place}/enroll.passwords",
        f"acl_file {place}/enroll.acl",
    ]
    return "\n".join(lines) + "\n"


def _tls(place: Path) -> list[str]:
    files = [f"cafile {place}/ca.pem", f"certfile {place}/server.pem", f"keyfile {place}/server.key"]
    return [*files, "tls_version tlsv1.2"]  # the least: TLS 1.3 where both sides have it


def _lasting(directory: Path) -> list[str]:
    """Sessions and their queues survive a restart."""
    return [
        "persistence true",
        f"persistence_location {directory}/",
        "persistence_file sessions.db",
        f"autosave_interval {AUTOSAVE_S}",
        "autosave_on_changes false",
        "persistent_client_expiration 1d",
    ]


def _common(packet_bytes: int) -> list[str]:
    """Settings that all brokers of a fleet share, whichever clients they admit."""
    lines = [
        f"max_packet_size {packet_bytes}",
        "set_tcp_nodelay true",
        "sys_interval 0",
        "log_dest stderr",
        "log_type error",
        "log_type warning",
        "log_type notice",
    ]
    with contextlib.suppress(KeyError):  # by default, root's mosquitto becomes a user without access to our files
        lines.append(f"user {pwd.getpwuid(os.geteuid()).pw_name}")
    return lines


def hash_password(password: str) -> str:
    """A line's second half in a mosquitto 2 password file: PBKDF2-SHA512 with a random salt."""
    salt = secrets.token_bytes(12)
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _ROUNDS)
    return f"$7${_ROUNDS}${base64.b64encode(salt).decode()}${base64.b64encode(digest).decode()}"
