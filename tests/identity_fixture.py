"""A fleet with a real mosquitto of its own, and devices that are enrolled without going through it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from transport_fixtures import Recorder

from edgefl.errors import BrokerError
from edgefl.identity import authority as x
from edgefl.identity import device
from edgefl.identity import token as t
from edgefl.identity.device import Credentials
from edgefl.identity.fleet import Fleet, Record, create_fleet
from edgefl.identity.issued_tokens import issue_token
from edgefl.identity.keys import key_text
from edgefl.identity.membership import answer_request
from edgefl.transport.address import parse_url
from edgefl.transport.link import TlsFiles
from edgefl.transport.mqtt import MqttTransport

FLEET = "default"
HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in taken]


def a_fleet(directory: Path, **changes: Any) -> Fleet:
    port, enroll_port = free_ports(2)
    asked = Record(FLEET, (HOST,), port, enroll_port, HOST)
    return create_fleet(directory, msgspec.structs.replace(asked, **changes))


class Asked:
    """A device that enrols, step by step. ``name``: what it calls itself; default, as its token says."""

    def __init__(self, text: str, name: str = "") -> None:
        self.token = t.decode_token(text)
        self.client = t.client_id(self.token.secret)
        self.proof_key = t.proof_key(self.token.secret)
        self.key = x.new_key()
        self.name = name or self.token.name
        request = t.Request(name=self.name, request=x.signing_request(self.name, self.key))
        proof = t.request_proof(self.proof_key, self.token.fleet, self.client, request)
        self.request = replace(request, proof=proof)

    def answered(self, fleet: Fleet, now: float | None = None) -> t.Answer:
        answered = answer_request(fleet, self.client, t.encode(self.request), now or time.time())
        assert answered is not None
        answer = t.decode(answered.payload, t.Answer)
        assert answer.proof == t.answer_proof(self.proof_key, answer, self.request)
        return answer


def enrolled(fleet: Fleet, name: str, state: Path, *, replace: bool = False) -> Credentials:
    """The identity of a new device in its state directory."""
    asked = Asked(issue_token(fleet, name, time.time(), replace=replace))
    answer = asked.answered(fleet)
    assert answer.refusal == ""
    pem = device.bundle(answer.certificate, x.key_pem(asked.key), answer.not_before, answer.not_after)
    record = device.Record(FLEET, name, answer.broker, key_text(answer.signer), answer.client_id)
    device.save(state, record, asked.token.authority, pem)
    return Credentials(state)


class Attackers:
    """Clients of a fleet's broker, closed at the end. ``got``: what each of them has heard."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._open: list[MqttTransport] = []

    async def __aenter__(self) -> Attackers:
        return self

    async def __aexit__(self, *_: object) -> None:
        for transport in self._open:
            await transport.close()

    async def device(self, own: Credentials, *patterns: str, client_id: str = "", **options: Any) -> Any:
        """Connected with a device's certificate; (transport, what it hears)."""
        files = TlsFiles(str(own.authority), str(own.certificate))
        return await self._client(self.fleet.url, client_id or own.record.client_id, patterns, tls=files, **options)

    async def coordinator(self, *patterns: str) -> Any:
        """The fleet's coordinator."""
        made = self.fleet.transport(f"coordinator-{id(self)}")
        return await self._connected(made, patterns)

    async def greeter(self, *patterns: str) -> Any:
        """The fleet's coordinator, where newcomers come."""
        return await self._connected(self.fleet.newcomers(), patterns)

    async def newcomer(self, client_id: str, *patterns: str, **options: Any) -> Any:
        """Without a certificate, on the port for enrolment."""
        files = TlsFiles(str(self.fleet.directory / "ca.pem"))
        return await self._client(self.fleet.enroll_url, client_id, patterns, tls=files, **options)

    async def _client(
        self, url: str, client_id: str, patterns: tuple[str, ...], user: tuple[str, str] = ("", ""), **options: Any
    ) -> Any:
        url = dataclasses.replace(parse_url(url), username=user[0], password=user[1]).secret_url()
        return await self._connected(MqttTransport(url, client_id, clean_session=True, **options), patterns)

    async def _connected(self, made: MqttTransport, patterns: tuple[str, ...]) -> Any:
        self._open.append(made)
        heard = Recorder(made)
        await made.connect()
        await made.subscribe(list(patterns))
        return made, heard


async def denied(transport: MqttTransport, topic: str, payload: bytes = b"forged") -> bool:
    """Whether the broker refuses a message."""
    try:
        await asyncio.wait_for(transport.publish(topic, payload), 5)
    except BrokerError:
        return True
    return False
