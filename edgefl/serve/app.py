"""The Open Inference Protocol v2 over HTTP, raw samples, and metrics: requests to the engine, refusals as answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edgefl.errors import DISTRIBUTION, EdgeFLError
from edgefl.process.listening import Place, goes_by, holds_token
from edgefl.serve.catalogue import Model
from edgefl.serve.engine import Asked, Engine
from edgefl.serve.forms import OBJECT_BYTES, as_files, read_form, read_record, ways
from edgefl.serve.limits import BODY_S, STALL_S, Lease, Refused
from edgefl.serve.metrics import UNKNOWN

_LOG = logging.getLogger(__name__)
JSON = "application/json"
HEAD = "inference-header-content-length"
EXTENSIONS = ("binary_tensor_data",)
#: Asked by programs that watch the server, which hold no token.
OPEN = ("/v2/health/live", "/v2/health/ready")
Handler = Callable[[Request], Awaitable[Response]]


def answer(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(body), status, headers, JSON)


def refusal(error: Refused) -> Response:
    """An error in the protocol's form."""
    headers = {"retry-after": "1"} if error.status == 503 else None
    return answer({"error": error.told}, error.status, headers)


class Site:
    """Handlers of HTTP requests for the engine's models."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        metrics = engine.metrics
        for model in engine.catalogue.models.values():
            metrics.info(model.name, model.runs_on)
        metrics.gauge("waiting_requests", "Requests that wait for the processor.", lambda: engine.waiting)
        metrics.gauge("body_bytes", "Bytes of request bodies in memory.", lambda: engine.room.used)

    def app(self, place: Place, token: str) -> ASGIApp:
        """The ASGI application behind its ``Gate``; ``token`` "": none is needed."""
        routes = [Route("/predict", self._counted(self.predict), methods=["POST"])]
        for path, handler in {
            "/v2": self.server,
            "/v2/health/live": self.live,
            "/v2/health/ready": self.readiness,
            "/v2/models": self.models,
            "/metrics": self.metrics,
        }.items():
            routes.append(Route(path, handler))
        for version_path in ("", "/versions/{version}"):
            base = "/v2/models/{model}" + version_path
            routes += [
                Route(base, self._counted(self.model)),
                Route(base + "/ready", self._counted(self.model_ready)),
                Route(base + "/infer", self._counted(self.infer), methods=["POST"]),
            ]
        handlers = {404: _no_route, 405: _no_method}
        return Gate(Starlette(routes=routes, exception_handlers=handlers), place.names, token)

    async def server(self, _request: Request) -> Response:
        """Server metadata: name, version, protocol extensions."""
        return answer({"name": "edgefl", "version": version(DISTRIBUTION), "extensions": EXTENSIONS})

    async def live(self, _request: Request) -> Response:
        """Liveness: 200 while the server answers."""
        return answer({"live": True})

    async def readiness(self, _request: Request) -> Response:
        """Readiness: 200, since models are loaded before the server listens."""
        return answer({"ready": True})

    async def models(self, _request: Request) -> Response:
        """Names of the models."""
        return answer({"models": list(self.engine.catalogue.models)})

    async def model(self, request: Request) -> Response:
        """A model's metadata."""
        return answer(self._model(request).describe())

    async def model_ready(self, request: Request) -> Response:
        """Readiness of a model: 200, or an error for an unknown one."""
        return answer({"name": self._model(request).name, "ready": True})

    async def metrics(self, _request: Request) -> Response:
        """Metrics in Prometheus' text format."""
        return Response(self.engine.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def infer(self, request: Request) -> Response:
        """Answer an inference request of the protocol."""
        model = self._model(request).name
        with self.engine.room.lease() as lease:
            body = await self._body(request, lease)
            reply, head = await self.engine.infer(Asked(model, body, _head_length(request)))
            headers = None if head is None else {HEAD: str(head)}
            return Response(reply, 200, headers, JSON if head is None else "application/octet-stream")

    async def predict(self, request: Request) -> Response:
        """Answer a raw sample: a form or a JSON object."""
        mask = request.query_params.get("mask")
        encoders = self.engine.catalogue.main.encoders
        with self.engine.room.lease() as lease:
            body = await self._body(request, lease)
            if request.headers.get("content-type", "").partition(";")[0].strip().lower() == JSON:
                lease.take(OBJECT_BYTES * lease.held)
                return Response(await self.engine.predict(read_record(body, encoders), mask), media_type=JSON)
            lease.take(2 * lease.held)  # the form's parts are a copy
            form = await read_form(request.headers, body, ways(encoders))
            with as_files(form) as files:
                return Response(await self.engine.predict(files, mask), media_type=JSON)

    def _model(self, request: Request) -> Model:
        wanted = request.path_params.get("version", "1")
        model = self.engine.model(request.path_params["model"])
        if wanted != "1":
            raise Refused(404, f"{model.name} has no version {wanted!r:.60}", "Versions here: 1.")
        return model

    async def _body(self, request: Request, lease: Lease) -> bytes:
        """Read the body, leasing room as it arrives: a client may announce much and send nothing. Raises Refused."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refused(415, "compressed requests are not read", "Send the body as it is.")
        most = self.engine.limits.body_bytes
        declared = request.headers.get("content-length", "0")
        size = int(declared) if declared.isdecimal() and len(declared) < 20 else most + 1
        if size > most:
            raise Refused(413, f"a body of {declared:.30} bytes; at most {most} are read")
        body = bytearray()

        async def read() -> None:
            pieces = request.stream()
            while piece := await asyncio.wait_for(anext(pieces, b""), STALL_S):
                if len(body) + len(piece) > most:
                    raise Refused(413, f"a body of more than {most} bytes")
                lease.take(len(body) + len(piece))
                body.extend(piece)

        try:
            await asyncio.wait_for(read(), BODY_S)
        except asyncio.TimeoutError:
            raise Refused(408, f"the body did not come within {BODY_S:g} s, or stopped for {STALL_S:g} s") from None
        return bytes(body)

    def _counted(self, handler: Handler) -> Handler:
        """The handler with errors as refusals, and each request counted."""

        async def handle(request: Request) -> Response:
            begun = time.perf_counter()
            try:
                done = await handler(request)
            except Refused as error:
                done = refusal(error)
            except ClientDisconnect:
                done = refusal(Refused(400, "the client has gone"))
            except EdgeFLError as error:
                done = refusal(Refused(400, error.message, error.remedy))
            except Exception:
                _LOG.exception("a request failed")
                done = refusal(Refused(500, "the server failed on this request; its log tells more"))
            name = request.path_params.get("model", self.engine.catalogue.main.name)
            known = name if name in self.engine.catalogue.models else UNKNOWN
            self.engine.metrics.request("http", known, done.status_code, time.perf_counter() - begun)
            return done

        return handle


class Gate:
    """ASGI middleware: refuses requests for other host names, or without the token if one is set."""

    def __init__(self, app: ASGIApp, names: frozenset[str], token: str) -> None:
        self._app, self._names, self._token = app, names, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse one request."""
        request = Request(scope)
        given = request.headers.get("authorization", "")
        refused: Response | None = None
        if not goes_by(request.headers.get("host", ""), self._names):
            refused = refusal(Refused(403, "this server does not go by that host name", "Use its address."))
        elif self._token and scope["path"] not in OPEN and not holds_token(given, self._token):
            refused = refusal(Refused(401, "a token is needed", "Send the header Authorization: Bearer TOKEN."))
        app: ASGIApp = refused or self._app
        await app(scope, receive, send)


def _head_length(request: Request) -> int | None:
    text = request.headers.get(HEAD)
    if text is None:
        return None
    if not (text.isdecimal() and len(text) < 20):
        raise Refused(400, f"Inference-Header-Content-Length is {text!r:.40}, not a number of bytes")
    return int(text)


async def _no_route(request: Request, _error: Exception) -> Response:
    return refusal(Refused(404, f"there is nothing at {request.scope['path']!r:.200}"))


async def _no_method(request: Request, _error: Exception) -> Response:
    return refusal(Refused(405, f"{request.scope['path']:.200} does not take {request.method}"))
