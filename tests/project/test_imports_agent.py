"""What the agent's supervisor loads, and what it weighs: in fresh interpreters, and as a real process over MQTT."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgefl.transport.broker import start_broker

#: What a supervisor must never load: each is larger than the whole supervisor, or has no business on a device.
HEAVY = ("torch", "numpy", "transformers", "sqlalchemy", "safetensors", "pandas", "onnxruntime")
LIMIT_BYTES = 45_000_000

PROBE = """
import importlib, sys
for name in sys.argv[1].split(","):
    importlib.import_module(name)
loaded = sorted(name for name in sys.argv[2].split(",") if name in sys.modules)
with open("/proc/self/status") as status:
    resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
print(",".join(loaded) or "-", resident)
"""


@pytest.mark.parametrize("module", ["device_agent.runtime.connect", "device_agent.runtime.agent", "device_agent.cli"])
def test_the_supervisor_loads_nothing_heavy(module):
    heavy = [*HEAVY, "rich", "pydantic", "nacl", "cryptography"]  # the last two come with an identity
    probe = [sys.executable, "-c", PROBE, module, ",".join(heavy)]
    done = subprocess.run(probe, capture_output=True, text=True, check=True)
    loaded, resident = done.stdout.split()
    print(f"{module}: VmRSS {int(resident) / 1024:.1f} MiB after import")  # noqa: T201 - shown by pytest -rP
    assert loaded == "-"
    assert int(resident) * 1024 < LIMIT_BYTES


def resident_bytes(pid) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def wait_for(log, words, process, timeout=40.0):
    deadline = time.monotonic() + timeout
    while words not in (text := log.read_text()):
        assert process.poll() is None, text
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def test_a_real_agent_over_mqtt_is_small_and_ends_cleanly_on_sigterm(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.jsonl").write_text('{"acc": [[1, 2, 3], [4, 5, 6]], "label": "rest"}\n' * 3)

    async def scene():
        async with start_broker(tmp_path / "broker") as broker:
            arguments = [sys.executable, "-m", "device_agent.cli", "run", "--device", "d1", "--format", "json"]
            arguments += ["--data", str(tmp_path / "data"), "--state", str(tmp_path / "state")]
            log = tmp_path / "agent.log"
            with log.open("w") as out:
                environment = {**os.environ, "EDGEFL_BROKER": broker.url, "OMP_NUM_THREADS": "1"}
                process = subprocess.Popen(arguments, env=environment, stderr=out, stdout=out)
            try:
                await asyncio.to_thread(wait_for, log, '"trainer-ready"', process)
                resident = resident_bytes(process.pid)
                print(f"supervisor over {broker.kind}: VmRSS {resident / 2**20:.1f} MiB")  # noqa: T201 - shown by -rP
                assert resident < LIMIT_BYTES
                assert broker.address.password not in Path(f"/proc/{process.pid}/cmdline").read_text()
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait, 10) == 0
                assert '"stopped"' in log.read_text()
            finally:
                process.kill()
                process.wait()

    asyncio.run(scene())
