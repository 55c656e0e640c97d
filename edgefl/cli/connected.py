"""Devices of a fleet that are connected to its broker now: they answer a call, with or without a run."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import NamedTuple

from edgefl.errors import ProtocolError
from edgefl.identity.fleet import Fleet
from edgefl.protocol import topics
from edgefl.protocol.messages import Hello, Presence, decode_up

#: How long devices are waited for: a round trip over a bad mobile link, and a board that is busy training.
ANSWER_S = 3.0


class Answer(NamedTuple):
    """A device's account of itself; "" where it has only shown that it is there."""

    release: str = ""
    platform: str = ""


async def connected(fleet: Fleet, wait_s: float = ANSWER_S) -> dict[str, Answer]:
    """Devices that answer within ``wait_s``; sooner when all have. Raises BrokerError.

    A run in progress hears the answers as well, as after a coordinator's restart.
    """
    name, answers = fleet.record.fleet, dict[str, Answer]()
    there = {device for device, one in fleet.devices().items() if one.revoked_at is None}
    complete = asyncio.Event()

    def hear(where: str, payload: bytes) -> None:
        try:
            topic, message = topics.parse(where), decode_up(payload)
        except ProtocolError:
            return
        if topic.device not in there or message.device != topic.device:
            return
        if isinstance(message, Presence) and not message.online:
            answers.pop(topic.device, None)
        elif isinstance(message, Hello):
            has = message.capabilities
            answers[topic.device] = Answer(message.agent_version, " ".join(filter(None, (has.machine, has.gpu))))
        else:
            answers.setdefault(topic.device, Answer())
        if there == {device for device, one in answers.items() if one.release}:
            complete.set()

    url = fleet.url if fleet.record.broker else fleet.local_url
    transport = fleet.transport(f"{fleet.record.client_id}-{secrets.token_hex(8)}", url)
    transport.on_message = hear
    try:
        await transport.connect()
        await transport.subscribe([topics.build("up", name, "+"), topics.build("presence", name, "+")])
        await transport.publish(topics.call(name), b"")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(complete.wait(), wait_s if there else 0.0)
    finally:
        await transport.close()
    return answers
