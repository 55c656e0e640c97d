"""Messages of a service to systemd (sd_notify): ready, alive, a line of status; none where it is not watched."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

_MICROSECONDS = 1e6


class Notify:
    """The socket that systemd gave this process, taken out of ``environment`` so that no child speaks for it.

    ``watchdog_s``: systemd ends a service that was silent for so long; 0: it does not watch.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        given = {name: environment.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")}
        address = given["NOTIFY_SOCKET"]
        self._address = "\0" + address[1:] if address.startswith("@") else address  # "@": an abstract socket
        watched = given["WATCHDOG_USEC"].isdecimal() and given["WATCHDOG_PID"] in {"", str(os.getpid())}
        self.watchdog_s = int(given["WATCHDOG_USEC"]) / _MICROSECONDS if watched else 0.0

    def tell(self, *assignments: str) -> None:
        """Send assignments such as ``READY=1`` in one datagram. Raises OSError when systemd does not take it."""
        if self._address:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.setblocking(False)
                channel.connect(self._address)
                channel.send("\n".join(line.replace("\n", " ") for line in assignments).encode())
