"""The fleet's broker, and a coordinator without a run: it answers devices that enrol or renew."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable

from coordinator.runtime.fleet_auth import Guard
from edgefl.errors import BrokerError, IdentityError, ProtocolError
from edgefl.identity.fleet import Fleet, fleet_broker, newcomers_broker
from edgefl.identity.revocation import running
from edgefl.protocol import messages as m
from edgefl.protocol import topics

#: How often it is looked whether the device that is waited for has come.
_LOOK_S = 0.2


@contextlib.asynccontextmanager
async def fleets_broker(fleet: Fleet, wanted: str, say: Callable[[str], None]) -> AsyncIterator[str]:
    """The URL of the fleet's broker as this machine dials it; started here if it is ours and does not run.

    ``wanted``: another URL, or auto, mosquitto. Raises BrokerError; IdentityError for amqtt, which can not do it.
    """
    if "://" in wanted:
        yield wanted
        return
    if wanted == "amqtt":
        raise IdentityError(
            "amqtt does not keep devices apart (docs/security.md)",
            remedy="Install mosquitto (apt install mosquitto), or give the URL of the fleet's broker.",
        )
    if fleet.record.broker:
        yield fleet.url
        return
    place = fleet.directory / "broker"
    if running(place / "mosquitto.pid") is not None:
        newcomers = newcomers_broker(fleet) if fleet.record.newcomers else None
        if newcomers is None or running(place / "newcomers.pid") is not None:
            yield fleet.local_url
            return
        async with newcomers:
            say(f"the broker for devices that enrol listens on {fleet.enroll_url}")
            yield fleet.local_url
        return
    broker = fleet_broker(fleet)
    if not fleet.record.newcomers:
        say(f"{place / 'mosquitto.conf'} was edited and is left as it is: strangers share its limits (SECURITY.md)")
    async with broker:
        say(f"the fleet's broker listens on {fleet.url}, and on {fleet.enroll_url} for devices that enrol")
        yield fleet.local_url


async def serve(fleet: Fleet, say: Callable[[str], None], until: str = "", limit_s: float = 0.0) -> None:
    """Answer devices until cancelled, or until the device ``until`` has enrolled, for ``limit_s`` seconds at most."""
    guard = Guard(fleet)
    async with fleets_broker(fleet, "auto", say) as url:
        transport = fleet.transport(f"{fleet.record.client_id}-{secrets.token_hex(8)}", url)
        posts: set[asyncio.Task[None]] = set()

        def post(device: str, message: m.DownMessage) -> None:
            topic = topics.down(fleet.record.fleet, device)
            task = asyncio.ensure_future(transport.publish(topic, guard.seal(topic, m.encode(message))))
            posts.add(task)
            task.add_done_callback(lambda done: _published(done, posts, say))

        def hear(name: str, payload: bytes) -> None:
            with contextlib.suppress(ProtocolError):
                topic = topics.parse(name)
                if not guard.takes(topic):
                    message = m.decode_up(payload)
                    if isinstance(message, m.Renew) and message.device == topic.device:
                        guard.renew(message)

        guard.start(post, say)
        transport.on_message = hear
        try:
            await transport.connect()
            await transport.subscribe([topics.up(fleet.record.fleet, "+")])
            await guard.listen(url).connected.wait()
            say(f"answering devices that enrol in fleet {fleet.record.fleet!r}; Ctrl-C ends it")
            await _until(fleet, guard, until, limit_s)
            await guard.answered()  # who was waited for stands in the fleet's record before that
            if posts:
                await asyncio.wait(posts)
        finally:
            await guard.close()
            await transport.close()


async def _until(fleet: Fleet, guard: Guard, name: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        await asyncio.sleep(_LOOK_S)
        guard.newly_revoked()
        if name and name in fleet.devices():
            return
        if limit_s and time.monotonic() > deadline:
            raise IdentityError(f"device {name!r} has not come", remedy="Print another token for it.")


def _published(task: asyncio.Task[None], posts: set[asyncio.Task[None]], say: Callable[[str], None]) -> None:
    posts.discard(task)
    error = None if task.cancelled() else task.exception()
    if isinstance(error, BrokerError):
        say(f"an answer could not be sent: {error.message}")
