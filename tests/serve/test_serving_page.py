"""The commands of docs/serving.md that curl makes, as they stand there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image
from serve_fixture import LABELS, running

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
BLOCKS = re.findall(r"^<!-- tested -->\n```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
COMMANDS = [one for block in BLOCKS for one in re.split(r"\n(?=curl )", block.strip())]


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_the_curl_commands_of_the_page_are_answered(tmp_path: Path):
    Image.new("RGB", (20, 20), (200, 100, 0)).save(tmp_path / "cat.png")
    (tmp_path / "walk.csv").write_text("x,y,z\n" + "0,0,1\n" * 4)
    assert len(COMMANDS) == 5
    answers = []
    with running() as server:
        for command in COMMANDS:
            here = command.replace("http://127.0.0.1:8481", server.url)
            done = subprocess.run(["sh", "-c", here], cwd=tmp_path, capture_output=True, text=True, timeout=30)
            assert done.returncode == 0, (command, done.stderr)
            answers.append(json.loads(done.stdout))
            assert "error" not in answers[-1], (command, answers[-1])
    pictured, by_zeros, told, both, alone = answers
    assert pictured["predictions"][0]["given"] == ["image", "text"]
    assert (by_zeros["predictions"][0]["mask"], by_zeros["predictions"][0]["filled"]) == ("zero", ["image", "text"])
    assert told["name"] == "demo"
    assert both["parameters"]["given"] == "acc,text"
    (label,) = alone["outputs"]
    assert (label["name"], label["data"][0] in LABELS, alone["parameters"]["mask"]) == ("label", True, "zero")
