"""amqtt, a broker in Python, in a process of its own: ``python -m edgefl.transport.amqtt_process CONFIGURATION.json``.

For machines without mosquitto. Known limits of amqtt 0.12: MQTT 3.1.1 only, and a
greeting in MQTT 5 is never answered; sessions and queues live in memory and end with the process; what is in flight to
a client when its connection breaks is lost; a client that falls silent is never timed out, so its will is not sent;
retained messages reach every new connection; no limits on size or queue. Loopback only, therefore.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
from amqtt.broker import Broker
from amqtt.errors import AMQTTError
from amqtt.plugins.base import BaseAuthPlugin
from amqtt.session import Session

#: How long amqtt may take to end in an orderly way. Nothing of it outlives the process, so there is nothing to wait
#: for.
_GOODBYE_S = 1.0


class Configuration(msgspec.Struct, frozen=True):
    """Options from the parent process, in a file only their user can read."""

    host: str
    port: int
    username: str
    password: str


class SecretAuthentication(BaseAuthPlugin):  # type: ignore[misc] # amqtt is an optional, untyped dependency
    """Admits one user by comparing secrets.

    amqtt's own plug-in hashes with argon2, 50 ms and 64 MiB a connection, for nothing when the secret is 192 random
    bits. Anonymous sessions would be no way out: amqtt keeps no queue for them.
    """

    @dataclass
    class Config:
        """Options amqtt passes on."""

        username: str = ""
        password: str = ""

    async def authenticate(self, *, session: Session) -> bool | None:
        """Whether the session's credentials are the configured ones."""
        expected: SecretAuthentication.Config = self.context.config
        user_ok = hmac.compare_digest((session.username or "").encode(), expected.username.encode())
        secret_ok = hmac.compare_digest((session.password or "").encode(), expected.password.encode())
        return user_ok and secret_ok


async def serve(configuration: Configuration) -> None:
    """Run the broker until SIGTERM or SIGINT."""
    broker = Broker(
        {
            "listeners": {"default": {"type": "tcp", "bind": f"{configuration.host}:{configuration.port}"}},
            "plugins": {
                "edgefl.transport.amqtt_process.SecretAuthentication": {
                    "username": configuration.username,
                    "password": configuration.password,
                }
            },
        }
    )
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await broker.start()
    await ended.wait()
    with contextlib.suppress(asyncio.TimeoutError, AMQTTError):
        await asyncio.wait_for(broker.shutdown(), _GOODBYE_S)


def main() -> None:
    """Run the MQTT broker of the configuration file ``sys.argv[1]``.

    An AMQTTError is one line on stderr.
    """
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s %(message)s")
    configuration = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Configuration)
    try:
        asyncio.run(serve(configuration))
    except AMQTTError as error:
        sys.exit(f"amqtt: {error}")


if __name__ == "__main__":
    main()
