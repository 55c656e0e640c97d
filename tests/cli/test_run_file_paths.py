"""One run file, used from anywhere: paths relative to it, for `edgefl run`, `edgefl plan` and the coordinator."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import yaml

from coordinator.runtime import start
from edgefl.api.run_inputs import PlanOptions, assumptions, price_of, shares_of
from edgefl.config.profiles import load_run, profiles_folder
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError

SENSOR = {"kind": "sensor", "size": "small", "width": 16, "heads": 2, "patch": 8}
RUN = {
    "name": "lab",
    "recipe": "lw-fedmml",
    "data": {"source": "own.npz"},
    "model": {"stages": 2, "encoders": {"acc": SENSOR, "gyro": SENSOR}},
    "training": {"rounds": [1, 1], "batch_size": 8},
    "fleet": [{"name": "a"}, {"name": "b"}],
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file and its data, which is not the working directory."""
    folder, elsewhere = tmp_path / "lab", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    rng = np.random.default_rng(0)
    values = {m: rng.normal(size=(60, 16, 3)).astype(np.float32) for m in ("acc", "gyro")}
    np.savez(folder / "own.npz", label=np.arange(60) % 3, **values)
    np.savez(folder / "test.npz", label=np.arange(60) % 3, **values)
    monkeypatch.chdir(elsewhere)
    return folder


def a_file(place: Path, **changes: object) -> str:
    (place / "run.yaml").write_text(yaml.safe_dump({**RUN, **changes}))
    return str(place / "run.yaml")


def test_paths_of_a_run_file_are_relative_to_it(place: Path) -> None:
    recipe = yaml.safe_load((profiles_folder() / "recipes" / "lw-fedmml.yaml").read_text())
    (place / "mine.yaml").write_text(yaml.safe_dump({**recipe, "name": "mine"}))
    device = yaml.safe_load((profiles_folder() / "devices" / "cpu.yaml").read_text())
    (place / "box.yaml").write_text(yaml.safe_dump({**device, "name": "box"}))
    name = a_file(
        place,
        recipe="mine.yaml",
        data={"source": "own.npz", "test": "test.npz"},
        fleet=[{"name": "a", "profile": "box.yaml"}, {"name": "b", "profile": "cpu"}],
    )
    config, found = load_run(name)
    assert found.name == "mine"
    assert (config.data.source, config.data.test) == (str(place / "own.npz"), str(place / "test.npz"))
    assert [device.profile for device in config.fleet] == [str(place / "box.yaml"), "cpu"]
    assert load_run(name, ["data.source=other.npz"])[0].data.source == str(Path("other.npz").absolute())  # the shell's


def test_names_of_what_is_shipped_stay_names() -> None:
    config, recipe = load_run("demo")
    assert (config.recipe, recipe.name) == ("lw-prototypes", "lw-prototypes")
    assert isinstance(config.data.source, dict)


def test_a_path_that_is_not_there_is_told_in_full(place: Path) -> None:
    config, _ = load_run(a_file(place, data={"source": "none.npz"}))
    assert config.data.source == str(place / "none.npz")
    with pytest.raises(ConfigError, match=str(place / "none.yaml")):
        load_run(a_file(place, recipe="none.yaml"))


def test_a_path_written_for_the_working_directory_still_works_with_a_warning(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (place / "own.npz").rename("old.npz")
    with caplog.at_level(logging.WARNING):
        config, _ = load_run(a_file(place, data={"source": "old.npz"}))
    assert config.data.source == str(Path("old.npz").absolute())
    assert "paths of a run file are relative to the file" in caplog.text


def test_the_coordinator_takes_its_test_set_from_the_same_run_file(place: Path, tmp_path: Path) -> None:
    said: list[str] = []
    name = a_file(place)
    plan, _ = start._compiled(start.RunOptions(name, directory=tmp_path / "runs"), "r1", said.append)
    prepared = shares_of(load_run(name)[0], ["a", "b"], tmp_path / "shares")
    assert Dataset.load_npz(plan.test).ids == Dataset.load_npz(prepared.test).ids
    assert any("12 of 60 samples" in line for line in said)
    assert any("waiting for 2 devices (round.devices)" in line for line in said)
    with pytest.raises(ConfigError, match=r"data\.test: is needed, or data\.source"):
        start._compiled(start.RunOptions(a_file(place, data={}), directory=tmp_path / "runs"), "r2", said.append)


def test_a_coordinators_file_can_be_planned(place: Path) -> None:
    name = a_file(place, fleet=[], data={"test": "test.npz"}, round={"devices": 3})
    price = price_of(name, [], PlanOptions(trainer_base="200MiB"))
    assert {(device.device, device.profile) for device in price.devices} == {(f"device-{i}", "cpu") for i in (1, 2, 3)}
    assert price.samples == 60
    fleet, data = assumptions(name, [], PlanOptions())
    assert "planned for 3 devices of profile cpu" in fleet
    assert "--samples" in data
    assert assumptions(a_file(place), [], PlanOptions()) == []
