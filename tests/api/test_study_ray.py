"""Studies on Ray: a cluster of two nodes whose workers and nodes are killed, the same result, and no process left."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_studies import small

import edgefl
from coordinator.ledger.ledger import Ledger
from edgefl.api.study_ray import Place, StudyActor, ray_actors
from edgefl.config.yaml_files import read_yaml, yaml_text
from edgefl.errors import ConfigError, MissingDependencyError, RunError
from edgefl.records import Manifest
from edgefl.storage.disk import LEDGER

MIB = 2**20


def test_a_node_that_does_not_share_the_folder_or_the_version_says_so(tmp_path: Path) -> None:
    token, here = tmp_path / "token", Path.cwd()
    node = platform.node()

    def lacking(**more: str) -> str:
        return StudyActor().begin(Place(str(here), str(token), "right", str(tmp_path / "log"), **more))

    assert lacking() == f"the node {node} does not see {token}: No such file or directory"
    token.write_text("wrong")
    assert lacking() == f"the node {node} sees another folder as {tmp_path}"
    assert lacking(version="0.0.0").endswith(", this machine 0.0.0")
    assert Path.cwd() == here
    assert not (tmp_path / "log").exists()


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "edgefl.api.study_ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    file = small(tmp_path)
    with pytest.raises(MissingDependencyError, match=r"ray") as caught:
        edgefl.study(str(file.parent / "tiny.yaml"), {"seed": [1]}, directory=tmp_path / "studies", engine="ray")
    assert "edgefl-toolkit[ray]" in caught.value.remedy
    assert caught.value.exit_code == 19
    with pytest.raises(ConfigError, match="engine: is 'rays'"):
        edgefl.study(str(file.parent / "tiny.yaml"), {"seed": [1]}, directory=tmp_path / "studies", engine="rays")
    assert not (tmp_path / "studies").exists()


def study_of_four(folder: Path) -> Path:
    """The page's study in small form with two seeds, four cells, long enough for two at once."""
    file = small(folder)
    values, _ = read_yaml(file)
    file.write_text(yaml_text({**values, "overrides": {"training.rounds": [12]}, "seeds": [1, 2]}))
    return file


@contextlib.contextmanager
def begun(file: Path, directory: Path, *options: str, address: str = "") -> Iterator[subprocess.Popen[str]]:
    """``edgefl study`` in a process of its own, which is gone at the end; it takes Ctrl-C though this one may not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, "-m", "edgefl.cli.main", "study", str(file), "--directory", str(directory), *options]
    environment = {**os.environ, "RAY_ADDRESS": address}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as one:
        try:
            yield one
        finally:
            one.kill()
            signal.signal(signal.SIGINT, before)


def ended(study: subprocess.Popen[str]) -> str:
    """What it wrote to stderr, once it has ended well."""
    out, err = study.communicate(timeout=240)
    assert study.returncode == 0, out + err
    return err


def states(directory: Path) -> dict[str, Manifest]:
    """Run -> its last state, by the ids of its objects."""
    found = {}
    for run in directory.glob("tiny-*"):
        with Ledger(run / LEDGER, create=False) as ledger:
            found[run.name] = ledger.position(run.name).manifest
    return found


def until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def training(directory: Path) -> int:
    """Cells in the middle of a round."""
    logs = [path.read_text(encoding="utf-8") for path in directory.glob("tiny-*/events.jsonl")]
    return len([text for text in logs if "round_started" in text and "run_finished" not in text])


def actors(process: psutil.Process) -> list[psutil.Process]:
    """Those of the study's actors that a node's process has started, or one that started nodes."""
    found = []
    for child in process.children(recursive=True):
        try:
            if "StudyActor" in " ".join(child.cmdline()):
                found.append(child)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Manifest]]:
    """The study's file, and what its cells come to as processes of this machine."""
    folder = tmp_path_factory.mktemp("local")
    file = study_of_four(folder)
    with begun(file, folder / "studies", "--workers", "1") as study:
        ended(study)
    found = states(folder / "studies")
    assert len(found) == 4
    return file, found


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without cores, and two nodes with one each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    small_store = {"object_store_memory": 80 * MIB, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small_store})
    made.two = [made.add_node(num_cpus=1, memory=2048 * MIB, object_store_memory=80 * MIB) for _ in range(2)]
    made.raylets = [psutil.Process(node.all_processes["raylet"][0].process.pid) for node in made.two]
    try:
        yield made
    finally:
        made.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_share_a_study_and_a_killed_worker_changes_nothing(
    local: tuple[Path, dict[str, Manifest]], cluster: Any, tmp_path: Path
) -> None:
    file, wanted = local
    place = tmp_path / "studies"
    with begun(file, place, "--engine", "ray", address=cluster.address) as study:
        until(lambda: training(place) == 2 or study.poll() is not None)
        assert study.poll() is None
        (one,), (other,) = map(actors, cluster.raylets)
        os.kill(one.pid, signal.SIGKILL)
        said = ended(study)
    assert "2 of 2 workers" in said  # the cluster's cores
    assert said.count("it is taken up again") == 1
    assert states(place) == wanted
    assert sorted(path.name for path in (place / "logs").iterdir()) == ["ray-1.log", "ray-2.log"]
    assert not list(place.glob(".ray-*"))
    until(lambda: not other.is_running() and not any(map(actors, cluster.raylets)), 20)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_that_dies_leaves_its_cells_to_the_other(
    local: tuple[Path, dict[str, Manifest]], cluster: Any, tmp_path: Path
) -> None:
    file, wanted = local
    place = tmp_path / "studies"
    with begun(file, place, "--engine", "ray", address=cluster.address) as study:
        until(lambda: training(place) == 2 or study.poll() is not None)
        assert study.poll() is None
        (one,) = actors(cluster.raylets[0])
        cluster.remove_node(cluster.two[0], allow_graceful=False)
        until(lambda: not one.is_running(), 20)
        said = ended(study)
    assert said.count("it is taken up again") == 1
    assert states(place) == wanted


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_ctrl_c_ends_all_processes_of_an_engine_and_the_study_goes_on(
    local: tuple[Path, dict[str, Manifest]], tmp_path: Path, engine: str
) -> None:
    file, wanted = local
    place = tmp_path / "studies"
    with begun(file, place, "--engine", engine, "--workers", "2") as study:
        until(lambda: training(place) == 2 or study.poll() is not None)
        assert study.poll() is None
        started = psutil.Process(study.pid).children(recursive=True)
        assert len(actors(psutil.Process(study.pid))) == (2 if engine == "ray" else 0)
        os.killpg(study.pid, signal.SIGINT)  # as a terminal does
        _, err = study.communicate(timeout=60)
        assert study.returncode == 130, err
        assert "Call the study again" in err
    until(lambda: not any(process.is_running() for process in started), 20)
    with begun(file, place, "--workers", "1") as study:  # whichever engine it was begun with
        ended(study)
    assert states(place) == wanted


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999"])
def test_a_cluster_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RunError, match=f"no Ray at {address}") as caught:
        ray_actors(tmp_path)
    assert "RAY_ADDRESS" in caught.value.remedy
    assert not list(tmp_path.iterdir())
