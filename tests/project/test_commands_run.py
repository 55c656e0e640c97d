"""Each command of the hand-written pages is run: here, or by the test that is named beside it."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from desk_fixture import PATIENCE_S, Desk, desk, free_port, until
from identity_fixture import enrolled
from PIL import Image
from test_pages import SHOWN
from transport_fixtures import mosquitto_wanted

from edgefl.identity.fleet import Fleet

__all__ = ["desk"]

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ("tests/agent/test_service_machine.py", '"--purge"')
IDENTITY = ("tests/identity/test_identity_run.py", "enroll")
#: By page and first words of a command: the test that runs it, and what is written there.
ELSEWHERE = {
    "doctor.md: edgefl-agent doctor --broker": ("tests/agent/test_doctor_broker.py", "mqtts://"),
    "doctor.md: edgefl-agent doctor --state": ("tests/agent/test_state_of_another.py", '["doctor", "--format"'),
    "fleet.md: edgefl devices drop": ("tests/identity/test_groups.py", "group:night"),
    "fleet.md: edgefl-coordinator run": ("tests/identity/test_groups.py", "group:night"),
    "install.md: edgefl-agent": MACHINE,
    "ledger.md: edgefl-coordinator run": ("tests/fleet_fixture.py", '"--ledger"'),
    "networks.md: edgefl-coordinator run": ("tests/fleets/test_fleet_objects.py", '"--objects-at"'),
    "operation.md: edgefl-coordinator run RUN.yaml --track": ("tests/report/test_track.py", "mlflow"),
    "operation.md: edgefl-coordinator run RUN.yaml --web-at": ("tests/web/test_web_browser.py", '"--web-at"'),
    "operation.md: edgefl-": ("tests/fleets/test_log_lines.py", '"--log-format", "json"'),
    "own_training.md: edgefl": ("tests/examples/test_own_training.py", "export_run"),
    "public_data.md: edgefl data fetch": ("tests/fetch/test_fetch_command.py", '"fetch"'),
    "security.md: edgefl-agent": IDENTITY,
    "security.md: edgefl-coordinator run": IDENTITY,
    "server.md: edgefl": ("tests/fleets/test_fleet_queue.py", '"reorder"'),
    "service.md: edgefl-agent": MACHINE,
    "serving.md: edgefl serve": ("tests/serve_fixture.py", '"serve"'),
    "start.md: edgefl-coordinator init": IDENTITY,
    "start.md: edgefl-coordinator enroll": IDENTITY,
    "start.md: edgefl-coordinator run RUN.yaml": IDENTITY,
    "start.md: edgefl-agent": IDENTITY,
    "start.md: edgefl devices revoke": IDENTITY,
    "start.md: edgefl run": ("tests/config/test_falling_rates.py", "training.lr_fall=cosine"),
    "start.md": ("tests/project/test_start_page.py", "By hand, on one machine"),
    "steering.md: edgefl": ("tests/fleets/test_fleet_control.py", '"--lines"'),
    "studies.md: edgefl study study.yaml --engine ray": ("tests/api/test_study_ray.py", 'engine="ray"'),
    "tours.md": ("tests/project/test_tours.py", "SERVER, DEVICE, BILLS, OWNER"),
    "web.md: edgefl": ("tests/web/test_web_browser.py", '"--web-control"'),
}
#: Not run by any test, and why.
NOT_RUN = {
    "edgefl run har": "its data are a download of 76 MiB",
    "edgefl-coordinator init --host broker.example --broker mqtts://broker.example:8883": "a broker of others",
}


def elsewhere(page: str, line: str) -> tuple[str, str] | None:
    """The test that runs a command of a page."""
    return next((told for words, told in ELSEWHERE.items() if f"{page}: {line}".startswith(words)), None)


SAID = [(page.name, shlex.join(words)) for page, words in SHOWN]
HERE: dict[str, list[str]] = {}
for page_, line_ in SAID:
    if not elsewhere(page_, line_) and not any(line_.startswith(words) for words in NOT_RUN):
        HERE.setdefault(page_, []).append(line_)


def test_each_command_has_its_test() -> None:
    typed = {*LATEST, *OWN, *FLEET}
    assert set(HERE) == typed, "add the page's commands to a test below"
    for words, (file, text) in ELSEWHERE.items():
        assert any(f"{page}: {line}".startswith(words) for page, line in SAID), words
        assert text in (ROOT / file).read_text(encoding="utf-8"), (words, file)
    for words in NOT_RUN:
        assert any(line.startswith(words) for _, line in SAID), words


def type_all(pages: tuple[str, ...], do: Callable[[str], str], **changes: str) -> None:
    """Type each command of the pages, with what a reader puts in place of the words in ``changes``."""
    for page in pages:
        for line in HERE[page]:
            typed = line
            for said, meant in changes.items():
                typed = typed.replace(said.replace("_", " ") if said.isupper() else said, meant)
            do(typed)


LATEST = (
    *("comparing.md", "export.md", "report.md", "scale.md", "simulating.md", "studies.md"),
    *("doctor.md", "operation.md"),
)
OWN = ("data.md", "labels.md")
FLEET = ("fleet.md", "security.md")


@pytest.mark.slow  # two small runs, a simulated fleet and a study
@pytest.mark.timeout(4 * PATIENCE_S)
def test_the_commands_about_a_run_that_is_over(desk: Desk) -> None:
    small = "--set 'training.rounds=[1, 1, 1, 1, 1, 1]' --set training.epochs=1"
    for seed in (1, 2):
        desk.do(f"edgefl run demo --no-page {small} --set seed={seed}")
    latest, first = desk.do("ls -t runs").split()
    shutil.copytree(desk.folder / "runs" / first, desk.folder / "elsewhere/runs/demo-20260918-141320")
    shutil.copy(ROOT / "profiles/runs/demo.yaml", desk.folder / "RUN.yaml")
    shutil.copy(ROOT / "profiles/devices/gpu-box.yaml", desk.folder / "device.yaml")
    (desk.folder / "study.yaml").write_text(
        "run: demo\nseeds: [1, 2]\noverrides:\n"
        "  {training.rounds: [1, 1, 1, 1, 1, 1], training.epochs: 1, fleet: [{name: a}, {name: b}]}\n"
    )
    meant = {"runs/ID/": f"runs/{latest}/", "demo-20261001": first, "demo-20261002": latest, "/var/lib/edgefl/": ""}
    type_all(LATEST, desk.do, RUN_RUN=f"{first} {latest}", DATA=f"runs/{latest}/shares/test.npz", **meant)
    assert (desk.folder / "run.csv").is_file()
    assert len(list((desk.folder / "tables").iterdir())) > 5
    assert len((desk.folder / "cells.csv").read_text().splitlines()) == 3
    assert (desk.folder / "runs" / latest / "bundles-int8/acc").is_dir()


def pictures(folder: Path, rows: int) -> None:
    """Red and blue pictures, in a folder a class."""
    rng = np.random.default_rng(0)
    for number in range(rows):
        name, colour = (("red", (200, 40, 40)), ("blue", (40, 40, 200)))[number % 2]
        (folder / name).mkdir(parents=True, exist_ok=True)
        noisy = np.clip(np.array(colour) + rng.normal(0, 40, (24, 24, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(noisy).save(folder / name / f"{number}.png")


def recordings(file: Path, ids: list[str], label: bool) -> None:
    """Walks as a table: a row a point in time."""
    rng = np.random.default_rng(1)
    with file.open("w") as out:
        print("recording,person,time,x,y,z" + (",label" if label else ""), file=out)
        for number, name in enumerate(ids):
            walks = number % 2
            for at in range(40):
                values = rng.normal(walks * np.sin(at / 2), 0.2, 3)
                cells = [name, f"p{number % 4}", f"{at * 0.02:.2f}", *(f"{value:.4f}" for value in values)]
                print(",".join([*cells, *(["walk" if walks else "rest"] if label else [])]), file=out)


@pytest.mark.slow  # trains on three kinds of data
@pytest.mark.timeout(4 * PATIENCE_S)
def test_the_commands_about_own_data(desk: Desk) -> None:
    here = desk.folder
    rng = np.random.default_rng(2)
    pictures(here / "photos", 60)
    pictures(here / "new-photos", 6)
    pictures(here / "inbox", 4)
    recordings(here / "walks.csv", [f"r{number}" for number in range(48)], label=True)
    recordings(here / "walk.csv", ["new"], label=False)
    for number in range(24):
        folder = here / "recordings" / f"g{number % 4}" / ("red", "blue")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (24, 24, 3), dtype=np.uint8)).save(folder / f"{number}_image.png")
    names = ("cars.csv", "rooms.csv", "notes.csv", "pictures.csv")
    cars, rooms, notes, several = ([] for _ in names)
    for number in range(80):
        fast = number % 2
        cars.append(
            f"car {number},{('japan', 'usa')[fast]},g{number % 5},{1970 + number % 9},{100 + 80 * fast + number % 7}"
        )
        rooms.append(
            f"{fast},{number % 3 == 0:d},{fast + rng.normal(0, 0.2):.3f},{number % 3 + rng.normal(0, 0.2):.3f}"
        )
        notes.append(
            f'"{("sea", "hill")[fast]}{("", ",snow")[number % 3 == 0]}",the {("waves", "rocks")[fast]} of day {number}'
        )
        Image.fromarray(rng.integers(0, 255, (24, 24, 3), dtype=np.uint8)).save(here / f"{number}.png")
        several.append(f"{number}.png,{('cat', 'cat;dog', 'dog')[number % 3]}")
    heads = ("name,origin,garage,year,power", "hot,wet,heat,damp", "topics,text", "image,label")
    for name, head, rows in zip(names, heads, (cars, rooms, notes, several), strict=True):
        (here / name).write_text("\n".join([head, *rows]) + "\n")

    trained: dict[str, str] = {}

    def do(line: str) -> str:
        if line.startswith("edgefl init") and (here / line.split()[2]).with_suffix(".yaml").is_file():
            line += " --force"  # two pages write the same file
        if line.startswith("edgefl predict"):
            source = {"walk.csv": "walks", "cars.csv": "cars"}.get(line.split()[-1], "photos")
            if source == "cars":
                desk.do("edgefl init cars.csv --label origin")
            if source not in trained:
                desk.do(f"edgefl run {source}.yaml")
            line = line.replace("latest", trained.get(source, "latest"))
        said = desk.do(line)
        if line == "edgefl run photos.yaml":
            trained["photos"] = desk.do("ls -t runs").split()[0]
        return said

    type_all(OWN, do)


@pytest.mark.slow  # a broker with TLS, and tokens for many
@pytest.mark.skipif(not mosquitto_wanted(), reason="the fleet's broker is mosquitto; it is not installed")
@pytest.mark.timeout(2 * PATIENCE_S)
def test_the_commands_about_a_fleet(desk: Desk) -> None:
    here = desk.folder
    (here / "names.csv").write_text("name\ndoor-1\ndoor-2\n")

    def do(line: str) -> str:
        if " init " in line and "--fleet" not in line:
            line = line.replace("--host broker.example --host 192.0.2.7", "--host 127.0.0.1 --host broker.example")
            line += f" --port {free_port()} --enroll-port {free_port()}"
        if "--wait" not in line:
            return desk.do(line)
        waits = desk.start(line)
        until(lambda: "answering" in waits())
        tokens = sorted((here / "tokens").glob("*.token")) if "--out" in line else []
        texts = [file.read_text() for file in tokens] or [re.search(r"^edgefl-\S+", waits(), re.MULTILINE)[0]]  # type: ignore[index]
        for text in texts:
            nonlocal machines
            machines += 1
            desk.do(f"edgefl-agent enroll - --state machine-{machines}", text.strip() + "\n")
        assert desk.running[-1].wait(30) == 0
        return waits()

    machines = 0
    for page in ("security.md", "fleet.md"):
        if page == "fleet.md":
            for name in ("cam-01", "cam-02"):
                enrolled(Fleet(here / "fleet"), name, here / name)
        type_all((page,), do)
