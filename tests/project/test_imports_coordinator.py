"""What the coordinator loads: never torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import coordinator.cli, coordinator.runtime.start
from pathlib import Path
from coordinator.ledger.ledger import Ledger
Ledger(Path(sys.argv[1])).close()
for line in Path("/proc/self/status").read_text().splitlines():
    if line.startswith("VmRSS"):
        print(line.split()[1])
heavy = ("torch", "transformers", "matplotlib", "onnx", "onnxruntime", "pandas", "scipy", "sklearn")
heavy += ("starlette", "uvicorn", "sse_starlette", "jinja2")  # the live page is loaded when it is asked for
print(",".join(name for name in heavy if name in sys.modules))
"""


def test_the_coordinator_loads_no_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "ledger.sqlite")]
    first = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.split("\n")
    again = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout.split("\n")
    sys.stdout.write(f"coordinator with an open ledger: {int(again[0]) / 1024:.1f} MiB resident\n")
    assert first[1] == again[1] == ""
    assert int(again[0]) / 1024 < 110
