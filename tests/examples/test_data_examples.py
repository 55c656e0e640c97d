"""examples with data: ``edgefl init`` understands what each make_data.py writes; nightly the whole way to answers."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: The modalities and the labels, and how many of ``make_data.py``'s things (pictures, people) the small form has.
CASES = {
    "photos": ({"image", "text"}, {"circle", "cross", "square", "triangle"}, "80"),
    "three_sensors": ({"acc", "gyro", "mag"}, {"sitting", "walking", "stairs", "running"}, "3"),
    "speech_image": ({"audio", "image"}, {"left", "right", "stop", "up"}, "60"),
}


def done(*words: str, folder: Path, seconds: float = 110) -> str:
    finished = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    return finished.stdout


def steps(name: str) -> dict[str, list[str]]:
    """The first block of the example's page: the words behind make_data.py, init and run."""
    text = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    block = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
    lines = [shlex.split(line) for line in block.splitlines()]
    assert [line[:2] for line in lines] == [
        ["python", f"examples/{name}/make_data.py"], ["edgefl", "init"], ["edgefl", "run"],
    ]  # fmt: skip
    return dict(zip(("make", "init", "run"), (line[2:] for line in lines), strict=True))


def started(name: str, folder: Path, *size: str) -> list[dict[str, str]]:
    """The lines of the manifest that ``edgefl init`` writes, as the page says."""
    words = steps(name)
    done(str(EXAMPLES / name / "make_data.py"), *words["make"], *size, folder=folder)
    found = json.loads(done("-m", "edgefl.cli.main", "init", *words["init"], "--format", "json", folder=folder))
    assert found["fits"], found["verdict"]
    assert (folder / words["run"][0]).is_file()
    text = (folder / found["source"] / "manifest.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_its_data_are_understood(name: str, tmp_path: Path) -> None:
    modalities, labels, size = CASES[name]
    lines = started(name, tmp_path, size)
    assert {key for line in lines for key in line} - {"id", "label", "group"} == modalities
    assert {line["label"] for line in lines} == labels
    assert len((EXAMPLES / name / "make_data.py").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_the_whole_way_to_answers(name: str, tmp_path: Path) -> None:
    modalities, labels, _ = CASES[name]
    lines = started(name, tmp_path)
    done("-m", "edgefl.cli.main", "run", *steps(name)["run"], "--no-page", folder=tmp_path, seconds=800)
    (run,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    source = tmp_path / ("walks-edgefl" if name == "three_sensors" else name)
    whole = next(line for line in lines if modalities <= line.keys())
    for given in ({min(modalities)}, modalities):
        words = [f"{m}={source / whole[m]}" if (source / whole[m]).is_file() else f"{m}={whole[m]}" for m in given]
        told = json.loads(
            done("-m", "edgefl.cli.main", "predict", str(run / "bundles"), *words, "--format", "json", folder=tmp_path)
        )
        assert {row["label"] for row in told["predictions"]} <= labels
        assert told["predictions"]
