"""A fleet's identity in the coordinator: signatures, enrolment, certificate renewal, revocation.

Work on the disk or with the authority's private key runs beside the loop; the check of each message is a look into a
set.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from pathlib import Path
from types import MappingProxyType

from coordinator.core.moves import Decided, Replaced, Revoked
from coordinator.core.state import Device
from edgefl.errors import BrokerError, EdgeFLError, IdentityError, ProtocolError, some_of
from edgefl.identity.acl import user_of
from edgefl.identity.fleet import Devices, Fleet, fleet_broker, newcomers_broker
from edgefl.identity.hosts import note_hosts
from edgefl.identity.issued_tokens import is_expected
from edgefl.identity.membership import answer_request, drop, renew, running
from edgefl.process.tasks import Tasks
from edgefl.protocol import messages as m
from edgefl.protocol import topics
from edgefl.transport.mqtt import MqttTransport

_LOG = logging.getLogger(__name__)
#: Enrolments and renewals in hand at a time; more are dropped, and asked for again by their devices.
MOST_AT_ONCE = 32


#: Pause before the broker for newcomers is dialled again: strangers who hold all of its connections are cut by
#: mosquitto after a minute and a half without a greeting.
DIAL_S = 5.0
#: How often it is looked whether the device that is waited for has come.
_LOOK_S = 0.2


class Guard:
    """Fleet identity of one coordinator: ``start``, then ``listen``. All calls come from the event loop's thread."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.seal = fleet.signer.seal
        self.dropped: Counter[str] = Counter()
        self._told: dict[str, int] = {}  # device -> the revision of the broker's addresses that it was told of
        self._knowing: dict[str, tuple[str, ...]] = {}  # device -> the server's names, not yet on record
        self._seen = self._stamp()  # before it is read: what changes in between is seen at the next tick
        self._devices = fleet.devices()
        self._newcomers: Newcomers | None = None
        self._post: Callable[[str, m.DownMessage], None] | None = None
        self._say: Callable[[str], None] = _LOG.warning
        self._welcome: Callable[[str], None] = lambda name: self._say(f"device {self._shown(name)} has enrolled")
        self._tasks = Tasks(self._failed)

    def start(
        self,
        post: Callable[[str, m.DownMessage], None],
        say: Callable[[str], None] = _LOG.warning,
        enrolled: Callable[[str], None] | None = None,
    ) -> None:
        """Set callbacks: ``post`` sends a message to a device, ``say`` warns operators, ``enrolled`` takes a name."""
        self._post, self._say = post, say
        self._welcome = enrolled or self._welcome

    def listen(self, url: str) -> Newcomers:
        """Start answering devices that enrol. ``url``: of the fleet's broker as this machine dials it."""
        self._newcomers = Newcomers(self.fleet, self._enroll, self._say)
        self._newcomers.start(url)
        return self._newcomers

    def decided(self, known: Mapping[str, Device], names: Mapping[str, str] = MappingProxyType({})) -> list[Decided]:
        """Revocations and replacements of a run's devices, new to the run.

        ``names``: of renamed devices, as the run has them.
        """
        now, events = time.monotonic(), list[Decided]()
        for own in sorted(self._devices):
            name, generation = names.get(own, own), self._devices[own].generation
            was = known.get(name)
            if was is None:
                continue
            if generation != was.generation:
                events.append(Replaced(now, name, generation))
            if self._is_revoked(own) and not (was.revoked and generation == was.generation):
                events.append(Revoked(now, name))
        return events

    def heard(self, name: str, hello: m.Hello) -> None:
        """Note which of the server's names a device says it knows; the next ``look`` writes that down."""
        device, record = self._devices.get(name), self.fleet.record
        if device is not None and 0 < record.revision == hello.addresses and set(device.hosts) != {*record.hosts}:
            self._knowing[name] = record.hosts

    def generation(self, name: str) -> int:
        """Number of a name's present machine, from 1, as of the last ``look``."""
        return self._devices[name].generation if name in self._devices else 1

    def look(self) -> bool:
        """Reload the fleet's devices; True if they had changed. Called on the tick."""
        if self._knowing:
            known, self._knowing = self._knowing, {}
            self._tasks.spawn(asyncio.to_thread(note_hosts, self.fleet, known))
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp
        before = self.fleet.record.revision
        try:
            self._devices, self.fleet.record = self.fleet.devices(), self.fleet.read_record()
        except EdgeFLError as error:
            self._say(f"the list of revoked devices cannot be read, so the last one read stays: {error.message}")
            return False
        if self.fleet.record.revision != before and self._post is not None:
            for name in self._devices:  # one that waits says nothing; who is away is told with its first message
                if not self._is_revoked(name):
                    self._post(name, m.Addresses(self.fleet.urls, self.fleet.record.revision))
        return True

    def _shown(self, name: str) -> str:
        """ "door-east (dev-01 at the broker)"; a device that was not renamed by its name."""
        shown = self._devices[name].shown if name in self._devices else ""
        return f"{shown} ({name} at the broker)" if shown else name

    def _is_revoked(self, name: str) -> bool:
        return name in self._devices and self._devices[name].revoked_at is not None

    def admits(self, user: str, device: str) -> bool:
        """True if the user of a certificate is the device's present machine, and not revoked."""
        known = device in self._devices and not self._is_revoked(device)
        return known and user == user_of(device, self.generation(device))

    def takes(self, topic: topics.Topic) -> bool:
        """True for a message to drop: from a revoked device, or a newcomer's on the fleet's connection.

        The sender of another one is sent the broker's addresses, once after each change.
        """
        if topic.channel == "enroll-up":
            self.dropped["stranger"] += 1
            return True
        if self._is_revoked(topic.device):
            self.dropped["revoked"] += 1
            return True
        self._tell_addresses(topic.device)
        return False

    def _tell_addresses(self, device: str) -> None:
        revision = self.fleet.record.revision
        if revision and self._told.get(device) != revision and device in self._devices and self._post is not None:
            self._told[device] = revision
            self._post(device, m.Addresses(self.fleet.urls, revision))

    def renew(self, message: m.Renew) -> None:
        """Answer a device's request for a new certificate; the topic proves its name."""
        self._spawn(self._renewing(message))

    async def answered(self) -> None:
        """Wait for the answers in progress."""
        await self._tasks.wait()
        if self._newcomers is not None:
            await self._newcomers.tasks.wait()

    async def close(self) -> None:
        """Cancel pending enrolments and renewals; devices retry."""
        await self._tasks.close()
        if self._newcomers is not None:
            await self._newcomers.close()

    def _enroll(self, client: str, payload: bytes) -> None:
        if is_expected(self.fleet, client):
            self._spawn(self._enrolling(client, payload))
        else:
            self.dropped["stranger"] += 1

    async def _enrolling(self, client: str, payload: bytes) -> None:
        answer = await asyncio.to_thread(answer_request, self.fleet, client, payload, time.time())
        if answer is None:
            self.dropped["unproved"] += 1
            return
        # The broker gives a replaced machine no topic any more; the cut tells it.
        if answer.replaced and (trouble := await drop(self.fleet, answer.replaced)):
            self._say(f"the machine that had the name {answer.name} is shut out, but {trouble}")
        if self._newcomers is not None:
            self._newcomers.publish(client, answer.payload)
        if answer.name:
            self._welcome(answer.name)

    async def _renewing(self, message: m.Renew) -> None:
        answer = await asyncio.to_thread(renew, self.fleet, message.device, message.request, time.time())
        if answer.refusal:
            self.dropped["renewal"] += 1
        if self._post is not None:
            self._post(message.device, answer)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        if len(self._tasks) >= MOST_AT_ONCE:
            self.dropped["busy"] += 1
            work.close()
        else:
            self._tasks.spawn(work)

    def _failed(self, error: BaseException) -> None:  # a full disk, say: the run goes on, the device asks again
        self._say(f"a device could not be answered: {error}")

    def _stamp(self) -> tuple[tuple[int, int], ...]:
        """Changes with every enrolment, renewal, revocation and change of the fleet's hosts."""
        return tuple(_stamp(self.fleet.directory / name) for name in ("devices.json", "fleet.json"))


def _stamp(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino


class Newcomers:
    """The coordinator's session with devices without a certificate, apart from that with its fleet.

    Whoever enrols may be anybody: what strangers send must not fill the queue in which enrolled devices' messages wait,
    and a broker for newcomers that is full or down must not stop a run. ``hear`` gets client id and payload of every
    request; ``say`` what a person must know. All in one loop.
    """

    def __init__(self, fleet: Fleet, hear: Callable[[str, bytes], None], say: Callable[[str], None]) -> None:
        self._fleet = fleet
        self._hear = hear
        self._say = say
        self._transport: MqttTransport | None = None
        self.tasks = _publishing(say)
        self.connected = asyncio.Event()

    def start(self, url: str) -> None:
        """Connect in the background, with retries. ``url``: of the fleet's broker as this machine dials it."""
        self.tasks.spawn(self._dial(url))

    def publish(self, client: str, answer: bytes) -> None:
        """Publish an answer to a newcomer without waiting."""
        if self._transport is not None:
            topic = topics.build("enroll-down", self._fleet.record.fleet, client)
            self.tasks.spawn(self._transport.publish(topic, answer))

    async def close(self) -> None:
        """Close the session; unsent answers are dropped."""
        await self.tasks.close()
        if self._transport is not None:
            await self._transport.close()

    async def _dial(self, url: str) -> None:
        told = ""
        while not self.connected.is_set():
            transport = self._fleet.newcomers(url)
            transport.on_message = self._on_message
            try:
                await transport.connect()
                await transport.subscribe([topics.build("enroll-up", self._fleet.record.fleet, "+")])
            except BrokerError as error:
                await transport.close()
                if error.message != told:
                    told = error.message
                    self._say(f"devices cannot enrol now: {told}")
                await asyncio.sleep(DIAL_S)
                continue
            except asyncio.CancelledError:
                await transport.close()
                raise
            self._transport = transport
            self.connected.set()

    def _on_message(self, name: str, payload: bytes) -> None:
        try:
            topic = topics.parse(name)
        except ProtocolError:
            return  # a client id that is no name: no device of ours
        if topic.channel == "enroll-up":
            self._hear(topic.device, payload)


@contextlib.asynccontextmanager
async def fleets_broker(fleet: Fleet, wanted: str, say: Callable[[str], None]) -> AsyncIterator[str]:
    """The URL of the fleet's broker as this machine dials it; started here if it is ours and does not run.

    ``wanted``: another URL, or auto, mosquitto. Raises BrokerError; IdentityError for amqtt, which does not keep
    devices apart.
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
        if running(place / "newcomers.pid") is not None:
            yield fleet.local_url
            return
        async with newcomers_broker(fleet):
            say(f"the broker for devices that enrol listens on {fleet.enroll_url}")
            yield fleet.local_url
        return
    broker = fleet_broker(fleet)
    async with broker:
        say(f"the fleet's broker listens on {fleet.url}, and on {fleet.enroll_url} for devices that enrol")
        yield fleet.local_url


async def serve(fleet: Fleet, say: Callable[[str], None], until: Collection[str] = (), limit_s: float = 0.0) -> None:
    """Answer enrolments and renewals without a run: at most ``limit_s``, or until all of ``until`` have enrolled."""
    guard = Guard(fleet)
    async with fleets_broker(fleet, "auto", say) as url:
        transport = fleet.transport(f"{fleet.record.client_id}-{secrets.token_hex(8)}", url)
        posts = _publishing(say)

        def post(device: str, message: m.DownMessage) -> None:
            topic = topics.build("down", fleet.record.fleet, device)
            posts.spawn(transport.publish(topic, guard.seal(topic, m.encode(message))))

        def hear(name: str, payload: bytes) -> None:
            with contextlib.suppress(ProtocolError):
                topic = topics.parse(name)
                if not guard.takes(topic):
                    message = m.decode_up(payload)
                    if isinstance(message, m.Renew) and message.device == topic.device:
                        guard.renew(message)
                    elif isinstance(message, m.Hello) and message.device == topic.device:
                        guard.heard(topic.device, message)

        guard.start(post, say)
        transport.on_message = hear
        try:
            await transport.connect()
            await transport.subscribe([topics.build("up", fleet.record.fleet, "+")])
            await guard.listen(url).connected.wait()
            say(f"answering devices that enrol in fleet {fleet.record.fleet!r}; Ctrl-C ends it")
            await _until(fleet, guard, until, limit_s)
            await guard.answered()  # who was waited for stands in the fleet's record before that
            await posts.wait()
        finally:
            await guard.close()
            await transport.close()


async def _until(fleet: Fleet, guard: Guard, names: Collection[str], limit_s: float) -> None:
    deadline, before = time.monotonic() + limit_s, fleet.devices()
    while True:
        await asyncio.sleep(_LOOK_S)
        guard.look()
        there = fleet.devices() if names else {}
        late = [one for one in names if _machine(before, one) == _machine(there, one)]
        if names and not late:
            return
        if limit_s and time.monotonic() > deadline:
            listed = some_of([*map(repr, late)])
            text = f"device {listed} has not come" if len(late) == 1 else f"{len(late)} devices have not come: {listed}"
            raise IdentityError(text, remedy=f"Print another token for {'it' if len(late) == 1 else 'each'}.")


def _machine(devices: Devices, name: str) -> int:
    """The number of the machine that has a name, from 1; 0: none has."""
    return devices[name].generation if name in devices else 0


def _publishing(say: Callable[[str], None]) -> Tasks:
    return Tasks(lambda error: say(f"enrolment: {error}"))
