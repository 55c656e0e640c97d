"""Renewal of a device's certificate at half of its life: a new key and certificate over the device's own topic.

The key is made in a process of its own (``edgefl.identity.authority``); the supervisor only carries the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from device_agent.runtime.effects import Emit
from edgefl.errors import EdgeFLError, IdentityError
from edgefl.protocol.messages import Renew, Renewed
from edgefl.transport.interface import Transport
from edgefl.transport.mqtt import MqttTransport

if TYPE_CHECKING:
    from edgefl.identity.device import Credentials


#: How often a device looks whether its certificate is due: clocks of small boards jump when they hear of the time.
RENEWAL_CHECK_S: Final = 3600.0
#: An answer to a renewal that has not come by then is asked for again: no coordinator may be there for days.
RENEWAL_RETRY_S: Final = 600.0


class Renewal:
    """Renews ``credentials`` when it is due. ``send`` publishes a message of this device."""

    def __init__(self, credentials: Credentials, send: Callable[[Renew], None], emit: Emit) -> None:
        self._credentials = credentials
        self._send = send
        self._emit = emit
        self._asked = ""
        self._answer: asyncio.Future[Renewed] | None = None

    def answered(self, message: Renewed) -> None:
        """The coordinator's answer, its signature checked."""
        if self._answer is not None and not self._answer.done() and message.request == self._asked:
            self._answer.set_result(message)

    async def run(self, transport: Transport) -> None:
        """Renew the certificate whenever due, until cancelled. Failures are logged and retried."""
        while True:
            due = self._credentials.renewal_due()
            if time.time() < due:
                await asyncio.sleep(min(RENEWAL_CHECK_S, max(1.0, due - time.time())))
                continue
            try:
                until = await self.renew()
                if isinstance(transport, MqttTransport):
                    transport.read_certificate_again()
                self._emit("renewed", until=time.strftime("%Y-%m-%d", time.gmtime(until)))
                await asyncio.sleep(RENEWAL_RETRY_S)
            except asyncio.TimeoutError:
                continue  # no coordinator was there
            except (EdgeFLError, OSError) as error:
                self._emit("warning", text=f"the certificate was not renewed: {error}")
                await asyncio.sleep(RENEWAL_RETRY_S)

    async def renew(self) -> float:
        """Request one renewal; the new certificate's expiry. Raises IdentityError, or TimeoutError for no answer."""
        from edgefl.identity.device import bundle, replace_certificate
        from edgefl.identity.keys import read_private

        key = self._credentials.directory / "next.key"
        request = await self._request(str(key))
        self._asked = hashlib.sha256(request).hexdigest()
        self._answer = asyncio.get_running_loop().create_future()
        self._send(Renew(self._credentials.record.device, request))
        try:
            answer = await asyncio.wait_for(self._answer, RENEWAL_RETRY_S)
        finally:
            self._answer = None
        if answer.refusal:
            raise IdentityError(answer.refusal)
        pem = bundle(answer.certificate, read_private(key), answer.not_before, answer.not_after)
        replace_certificate(self._credentials, pem)
        key.unlink(missing_ok=True)
        return answer.not_after

    async def _request(self, key: str) -> bytes:
        command = [sys.executable, "-m", "edgefl.identity.authority", self._credentials.record.device, key]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            out, errors = await process.communicate()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        if process.returncode != 0:
            raise IdentityError(f"no key was made: {errors.decode(errors='replace').strip()[-300:]}")
        return out
