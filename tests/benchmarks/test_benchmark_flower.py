"""EdgeFL beside Flower's simulation: both train the same, and what processes take is seen."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from data_fixture import needed

from benchmarks.cost.flower import simulation
from benchmarks.cost.flower.__main__ import VALUES, Watch
from edgefl.data.sources import load_pair
from edgefl.models.checkpoints import initial_parts
from edgefl.models.parts import part_tensors


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Flower's side, of a small data set's run."""
    needed("har_hapt")
    values = copy.deepcopy(VALUES) | {"seed": 1}
    values["data"]["source"] = {"har_hapt": {"clients": 4, "mini": True}}
    values["fleet"] = values["fleet"][:4]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    monkeypatch.setenv(simulation.RUN, str(file))
    caches = (simulation.config, simulation.plan, simulation.samples, simulation.model)
    for one in caches:
        one.cache_clear()
    simulation.shared()
    yield simulation.plan()
    for one in caches:
        one.cache_clear()


def test_flowers_side_has_the_same_weights_shares_and_test_set(run):
    model = simulation.model()
    model.load_state_dict(simulation.first_weights())
    for part, tensors in initial_parts(run.model, run.seed):
        own = part_tensors(model, part)
        assert own.keys() == tensors.keys()
        assert all(np.array_equal(own[name], tensors[name]) for name in tensors)
    train, test = load_pair({"har_hapt": {"clients": 4, "mini": True}})
    for name in simulation.devices():
        assert simulation.samples(name).ids == train.subset(np.flatnonzero(train.groups == name)).ids
    assert simulation.samples("test").ids == test.ids


def test_the_test_set_is_judged_in_the_same_rounds_as_by_edgefl():
    assert [at for at in range(8) if simulation.is_judged(at, 5, 7)] == [5, 7]


def test_a_round_of_flowers_side_trains_all_of_the_model(run):
    state = {name: value.clone() for name, value in simulation.first_weights().items()}
    trained, samples = simulation.train(state, 0, 1)
    again, _ = simulation.train(state, 0, 1)
    assert samples == len(simulation.samples(simulation.devices()[0]))
    assert all(torch.equal(trained[name], again[name]) for name in state)
    assert [name for name in state if torch.equal(trained[name], state[name])] == []


def test_what_a_process_and_its_children_take_is_seen():
    burn = "import time\nx = bytearray(64 * 2**20)\nx[:] = b'1' * len(x)\nwhile time.process_time() < 1: pass"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        watch = Watch(process.pid, interval_s=0.05)
        process.wait()
        watch.stop()
    assert sum(watch.cpu.values()) > 0.5
    assert watch.peak > 64 * 2**20
