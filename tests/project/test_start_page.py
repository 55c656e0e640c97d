"""The run by hand of docs/start.md, typed as it stands there: each long-lived command in a terminal of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 240


def commands() -> list[str]:
    """The lines of the page's first walk, in order."""
    text = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    walk = text[text.index("## By hand, on one machine") : text.index("## Less of everything")]
    blocks = re.findall(r"^```\n(.*?)^```", walk, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.slow  # a minute of training
@pytest.mark.timeout(2 * PATIENCE_S)
def test_the_run_by_hand_works_as_it_stands_on_the_page(tmp_path):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    lines = commands()
    assert len(lines) == 9
    terminals: list[subprocess.Popen[bytes]] = []
    said = ""
    try:
        for line in lines:
            if line.startswith(("edgefl-coordinator run", "edgefl-agent run")):
                with (tmp_path / f"terminal-{len(terminals)}.log").open("wb") as log:
                    command = ["bash", "-c", f"exec {line}"]
                    terminals.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log))
                if line.startswith("edgefl-coordinator"):
                    until = time.monotonic() + PATIENCE_S
                    while not (tmp_path / "runs/by-hand/broker/url").exists():
                        assert terminals[0].poll() is None, (tmp_path / "terminal-0.log").read_text()
                        assert time.monotonic() < until, "no broker"
                        time.sleep(0.1)
                continue
            if "report" in line:
                assert terminals[0].wait(PATIENCE_S) == 0, (tmp_path / "terminal-0.log").read_text()
            done = subprocess.run(
                ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            said += done.stdout
    finally:
        for terminal in terminals:
            terminal.terminate()
            terminal.wait(30)
    assert "left" in said
    assert "12 / 12" in said
    assert (tmp_path / "runs/by-hand/bundles").is_dir()
