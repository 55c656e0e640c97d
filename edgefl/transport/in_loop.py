"""MQTT packets moved by an event loop, without a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading

from paho.mqtt.enums import MQTTErrorCode

from edgefl.transport.metered_client import BUSY_KEEPALIVE_S, MeteredClient


class InLoop:
    """Service of a client in an event loop, from ``serve`` until the connection ends or ``end`` is called."""

    def __init__(self, client: MeteredClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._descriptor = -1
        self._writing = False  # the loop tells when there is room
        self._timer: asyncio.TimerHandle | None = None

    def serve(self) -> None:
        """Block a thread meanwhile. Raises what reading raised, such as on a malformed packet."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._begin)
            self._ended.wait()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Leave the connection, as it is, to the thread. Callable from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._leave)
        except RuntimeError:  # the loop is closed
            self._ended.set()

    def _begin(self) -> None:
        opened = self._client.socket()
        if opened is None or self._ended.is_set():
            self._leave()
            return
        self._descriptor = opened.fileno()
        self._client.on_wake = self._wake
        self._loop.add_reader(self._descriptor, self._read)
        self._look()
        self._read()  # what came with the broker's greeting

    def _read(self) -> None:
        if self._ended.is_set():
            return
        try:
            code = self._client.pump()
        except Exception as error:  # paho raises freely on malformed packets: the link tells of it
            self._error = error
            self._leave()
            return
        self._settle(code)

    def _wake(self) -> None:
        self._loop.call_soon(self._write)

    def _write(self) -> None:
        if not self._ended.is_set():
            self._settle(self._client.flush())

    def _settle(self, code: MQTTErrorCode) -> None:
        """Go on after a step with this outcome."""
        opened = self._client.socket()
        if code != MQTTErrorCode.MQTT_ERR_SUCCESS or opened is None:
            self._leave()
            return
        if self._client.want_write() != self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self._descriptor, self._write)
            else:
                self._loop.remove_writer(self._descriptor)
        if self._client.reads_ahead or (isinstance(opened, ssl.SSLSocket) and opened.pending()):
            self._loop.call_soon(self._read)

    def _look(self) -> None:
        """Ping when it is due, and notice that an answer is overdue."""
        wait_s = min(self._client.patience_s(), BUSY_KEEPALIVE_S)
        self._timer = self._loop.call_later(wait_s, self._look)
        self._settle(self._client.loop_misc())

    def _leave(self) -> None:
        self._client.on_wake = None
        if self._timer is not None:
            self._timer.cancel()
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # closed meanwhile
                self._loop.remove_writer(self._descriptor)
            with contextlib.suppress(OSError):
                self._loop.remove_reader(self._descriptor)
            self._descriptor = -1
        self._ended.set()
