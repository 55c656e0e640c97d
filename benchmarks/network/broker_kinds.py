"""The brokers of ``benchmarks.network.brokers``: how each is set up in a folder, on loopback, in the foreground.

nats-server (Debian) is looked for on the PATH, aedes (npm) by node's own search (NODE_PATH), iotcore (PyPI; it is
rumqttd) in the interpreter that EDGEFL_IOTCORE_PYTHON names, else in this one, rabbitmq-server and ejabberd where
Debian puts them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from edgefl.process import parent_death as leash
from edgefl.transport.broker import free_port

#: Longest that asking whether one is installed may take.
_ASK_S = 20.0
_AEDES = """
const {Aedes} = require('aedes');
Aedes.createBroker().then(b => require('net').createServer(b.handle).listen(+process.argv[1], '127.0.0.1'));
"""
_IOTCORE = "import iotcore, sys; iotcore.IotCoreBroker(listen='127.0.0.1', port=int(sys.argv[1])).run_forever()"
_NATS = """
server_name: brokers
listen: "127.0.0.1:-1"
jetstream {{ store_dir: "{folder}" }}
mqtt {{ listen: "127.0.0.1:{port}" }}
"""
_RABBITMQ = """
listeners.tcp = none
mqtt.listeners.tcp.1 = 127.0.0.1:{port}
mqtt.allow_anonymous = true
"""
_EJABBERD = """
hosts: [localhost]
listen: [{{port: {port}, ip: "127.0.0.1", module: mod_mqtt}}]
modules: {{mod_mqtt: {{}}}}
acme: {{auto: false}}
"""
#: RabbitMQ needs Erlang's port mapper, which would outlive it. Arguments: this Python, the leash, RabbitMQ.
_WITH_EPMD = """
"$0" -I -S "$1" $$ epmd &
until epmd -names > /dev/null 2>&1; do sleep 0.1; done
exec "$2"
"""

#: (folder, port) -> the command, None where it is not installed.
Command = Callable[[Path, int], "list[str] | None"]


class Kind(msgspec.Struct, frozen=True):
    """A broker, as it is set up. ``query``, ``user`` (with password): of the URL."""

    name: str
    command: Command
    query: str = ""
    user: str = ""


def mosquitto(*lines: str) -> Command:
    """With these lines beside the listener."""

    def command(folder: Path, port: int) -> list[str] | None:
        file = folder / "mosquitto.conf"
        file.write_text("\n".join([f"listener {port} 127.0.0.1", "allow_anonymous true", *lines]) + "\n")
        return _if_found("mosquitto", "-c", str(file))

    return command


def nats(folder: Path, port: int) -> list[str] | None:
    """nats-server, which speaks MQTT over its own streams."""
    file = folder / "nats.conf"
    file.write_text(_NATS.format(folder=folder / "jetstream", port=port))
    return _if_found("nats-server", "-c", str(file))


def aedes(folder: Path, port: int) -> list[str] | None:
    """aedes, in memory."""
    command = _if_found("node", "-e", _AEDES, str(port))
    return command if command and _succeeds("node", "-e", "require('aedes')") else None


def iotcore(folder: Path, port: int) -> list[str] | None:
    """iotcore with its defaults: payloads of 20,480 bytes at most, in memory."""
    python = os.environ.get("EDGEFL_IOTCORE_PYTHON", sys.executable)
    return [python, "-c", _IOTCORE, str(port)] if _succeeds(python, "-c", "import iotcore") else None


def rabbitmq(folder: Path, port: int) -> list[str] | None:
    """RabbitMQ with its MQTT plugin. Debian's program on the PATH changes user; the one behind it does not."""
    program = shutil.which("rabbitmq-server", path="/usr/lib/rabbitmq/bin") or shutil.which("rabbitmq-server")
    if program is None:
        return None
    (folder / "rabbitmq.conf").write_text(_RABBITMQ.format(port=port))
    (folder / "plugins").write_text("[rabbitmq_mqtt].\n")
    settings = {
        "HOME": folder,
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": free_port("127.0.0.1"),
        "RABBITMQ_ALLOW_INPUT": "true",  # the program becomes the broker instead of its parent
        "RABBITMQ_CONF_ENV_FILE": folder / "no-file",
        "RABBITMQ_CONFIG_FILE": folder / "rabbitmq.conf",
        "RABBITMQ_DIST_PORT": free_port("127.0.0.1"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": folder / "plugins",
        "RABBITMQ_LOG_BASE": folder,
        "RABBITMQ_MNESIA_BASE": folder / "mnesia",
        "RABBITMQ_NODENAME": f"brokers{port}@localhost",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-noinput -kernel inet_dist_use_interface {127,0,0,1}",
    }
    return _with(settings, "sh", "-c", _WITH_EPMD, sys.executable, leash.__file__, program)


def ejabberd(folder: Path, port: int) -> list[str] | None:
    """ejabberd with mod_mqtt alone and one user; without a node name, so that Erlang listens nowhere else."""
    library = next(Path("/usr/lib").glob("*/ejabberd-*/ebin/mod_mqtt.beam"), None)
    if library is None:
        return None
    (folder / "ejabberd.yml").write_text(_EJABBERD.format(port=port))
    settings = {
        "HOME": folder,
        "ERL_LIBS": library.parents[2],
        "EJABBERD_CONFIG_PATH": folder / "ejabberd.yml",
        "EJABBERD_LOG_PATH": folder / "ejabberd.log",
    }
    user = 'ejabberd_auth:try_register(<<"edge">>, <<"localhost">>, <<"secret">>)'
    database = f'"{folder / "mnesia"}"'
    return _with(settings, "erl", "-noinput", "-mnesia", "dir", database, "-s", "ejabberd", "-eval", user)


def _if_found(program: str, *arguments: str) -> list[str] | None:
    found = shutil.which(program)
    return None if found is None else [found, *arguments]


def _with(settings: Mapping[str, object], *command: str) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in settings.items()), *command]


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False, timeout=_ASK_S).returncode == 0


KINDS = (
    Kind("mosquitto", mosquitto()),
    Kind("mosquitto, `?version=3`", mosquitto(), "?version=3"),
    Kind("mosquitto, `max_packet_size 50000`", mosquitto("max_packet_size 50000")),
    Kind("mosquitto, `message_size_limit 50000`", mosquitto("message_size_limit 50000")),
    Kind("the same, `?version=3`", mosquitto("message_size_limit 50000"), "?version=3"),
    Kind("nats-server", nats),
    Kind("aedes", aedes),
    Kind("iotcore (rumqttd)", iotcore),
    Kind("RabbitMQ", rabbitmq),
    Kind("ejabberd", ejabberd, user="edge%40localhost:secret@"),
)
