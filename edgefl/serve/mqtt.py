"""Inference over MQTT, for devices that speak nothing else: the same engine, limits and answers as over HTTP.

A request is published on ``edgefl-serve/MODEL/infer`` (the protocol's JSON) or on ``edgefl-serve/MODEL/predict/FILE``
(a raw file; FILE is the modality with the file's ending, such as ``image.jpg``). With MQTT 5 the answer goes to the
request's response topic, with its correlation data. With any version, ``…/CLIENT/ID`` may follow the topic, and the
answer goes to ``edgefl-serve/MODEL/answer/CLIENT/ID``. A refusal is ``{"error": …}``, as over HTTP. A topic can't hold
a +, so bundles of several modalities are asked by the model of all bundles.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from pathlib import PurePosixPath
from typing import NamedTuple

import msgspec

from edgefl.errors import BrokerError, BrokerUnreachableError, EdgeFLError, MessageSizeError
from edgefl.process.tasks import Tasks
from edgefl.serve.catalogue import Catalogue
from edgefl.serve.engine import Asked, Engine
from edgefl.serve.forms import as_files, file_end
from edgefl.serve.limits import MAX_NAME, Lease, Refused, busy
from edgefl.serve.metrics import UNKNOWN
from edgefl.transport.interface import ReplyTo
from edgefl.transport.link import TlsFiles
from edgefl.transport.mqtt import MqttTransport

_LOG = logging.getLogger(__name__)
ROOT = "edgefl-serve"
#: Seconds until a broker that is not there at the start is tried again.
AGAIN_S = 10.0
#: MODEL, then infer or predict/FILE, then perhaps CLIENT/ID.
_REQUEST = re.compile(
    rf"{ROOT}/(?P<model>[^/]+)/(?:infer|predict/(?P<file>[^/]+))(?:/(?P<client>[^/]{{1,64}})/(?P<id>[^/]{{1,64}}))?"
)
#: Where this server's account may be able to publish and a client's may not: fleets, and our own requests.
_NOT_OURS = re.compile(r"edgefl|\$")


class Broker(NamedTuple):
    """The broker to serve on. ``ca``: the authority of its certificate; "": the system's."""

    url: str
    ca: str = ""


class _Request(NamedTuple):
    topic: str
    payload: bytes
    reply: ReplyTo
    begun: float


class Way:
    """Answers inference requests by MQTT until cancelled."""

    def __init__(self, broker: Broker, engine: Engine) -> None:
        self._engine = engine
        self._broker = broker
        self._connected = False
        engine.metrics.gauge("broker_connected", "1 while requests by MQTT are taken, else 0.", lambda: self._connected)
        self._transport = self._made()
        self._tasks = Tasks(self._failed)

    async def run(self) -> None:
        """Connect and answer. Raises BrokerError when the broker refuses."""
        try:
            await self._connect()
            _LOG.info("requests on %s/… are answered", ROOT)
            await asyncio.Event().wait()
        finally:
            await self._tasks.close()
            await self._transport.close()

    def _made(self) -> MqttTransport:
        tls = TlsFiles(ca=self._broker.ca) if self._broker.ca else None
        made = MqttTransport(self._broker.url, f"{ROOT}-{secrets.token_hex(6)}", tls=tls, clean_session=True)
        made.on_request = self._take
        made.on_connection = self._connection
        return made

    def _connection(self, connected: bool) -> None:
        self._connected = connected

    async def _connect(self) -> None:
        while True:
            try:
                await self._transport.subscribe(patterns(self._engine.catalogue))
                await self._transport.connect()
                return
            except BrokerUnreachableError as error:
                _LOG.warning("%s; trying again. %s", error.message, error.remedy)
                await asyncio.sleep(AGAIN_S)
                self._transport = self._made()  # one connects once

    def _failed(self, error: BaseException) -> None:
        _LOG.error("an answer could not be sent: %s", error)

    def _take(self, topic: str, payload: bytes, reply: ReplyTo) -> None:
        """Start answering a request, or refuse it beyond the limits on number and size."""
        waiting = self._engine.limits.waiting
        if len(self._tasks) >= 2 * waiting:
            return  # its answer could not even be sent: a client asks again
        request = _Request(topic, payload, reply, time.perf_counter())
        lease = self._engine.room.lease()
        try:
            if len(self._tasks) >= waiting:
                raise busy(f"{waiting} requests wait already")
            if len(payload) > self._engine.limits.body_bytes:
                raise Refused(413, f"{len(payload)} bytes; {self._engine.limits.body_bytes} at most")
            lease.take(len(payload))
        except Refused as error:  # which holds no room, and so no payload either
            self._tasks.spawn(self._send(request._replace(payload=b""), error_body(error), error.status))
        else:
            self._tasks.spawn(self._answer(request, lease))

    async def _answer(self, request: _Request, lease: Lease) -> None:
        with lease:
            answer = await self._outcome(request)
        request = request._replace(payload=b"")  # it may be long until the broker takes the answer
        await self._send(request, *answer)

    async def _outcome(self, request: _Request) -> tuple[bytes, int]:
        try:
            return await self._reply(request), 200
        except Refused as error:
            return error_body(error), error.status
        except EdgeFLError as error:
            return error_body(Refused(400, error.message, error.remedy)), 400
        except Exception:
            _LOG.exception("a request failed")
            return error_body(Refused(500, "the server failed on this request; its log tells more")), 500

    async def _reply(self, request: _Request) -> bytes:
        found = _REQUEST.fullmatch(request.topic)
        if found is None:
            raise Refused(
                404, "a request's topic is edgefl-serve/MODEL/infer or …/predict/FILE, then perhaps /CLIENT/ID"
            )
        if found["file"] is None:
            body, head = await self._engine.infer(Asked(found["model"], request.payload))
            if head is not None:
                raise Refused(400, "binary data is for HTTP: over MQTT tensors are JSON")
            return body
        if self._engine.model(found["model"]) is not self._engine.catalogue.main:
            raise Refused(404, f"raw files are for the model {self._engine.catalogue.main.name}")
        modality = PurePosixPath(found["file"]).stem
        form = {modality: (file_end(modality, found["file"]), request.payload)}
        with as_files(form) as files:
            return await self._engine.predict(files, None)

    async def _send(self, request: _Request, body: bytes, status: int) -> None:
        found = _REQUEST.fullmatch(request.topic)
        model = found["model"] if found and found["model"] in self._engine.catalogue.models else UNKNOWN
        self._engine.metrics.request("mqtt", model, status, time.perf_counter() - request.begun)
        topic = answer_topic(request.topic, request.reply.topic)
        if not topic:
            _LOG.warning("a request on %.100r says no topic for its answer, or one that is not its own", request.topic)
            return
        correlation = request.reply.correlation if topic == request.reply.topic else b""
        try:
            await self._transport.publish(topic, body, correlation=correlation)
        except MessageSizeError as error:
            short = error_body(Refused(413, f"the answer does not fit: {error.message}"))
            await self._transport.publish(topic, short, correlation=correlation)
        except BrokerError as error:
            _LOG.warning("the answer with status %d on %.100r was not sent: %s", status, topic, error.message)


def patterns(catalogue: Catalogue) -> list[str]:
    """Topic filters of the catalogue's models."""
    names = [model for model in catalogue.models if "+" not in model]
    return [*(f"{ROOT}/{model}/infer/#" for model in names), f"{ROOT}/{catalogue.main.name}/predict/#"]


def answer_topic(topic: str, asked: str) -> str:
    """Topic of the answer to a request on ``topic`` whose response topic is ``asked``; "": there is none."""
    if asked:
        fits = len(asked) <= MAX_NAME and not _NOT_OURS.match(asked) and not set(asked) & set("+#\0")
        return asked if fits else ""
    found = _REQUEST.fullmatch(topic)
    return f"{ROOT}/{found['model']}/answer/{found['client']}/{found['id']}" if found and found["client"] else ""


def error_body(error: Refused) -> bytes:
    """A refusal in the protocol's form."""
    return msgspec.json.encode({"error": error.told})
