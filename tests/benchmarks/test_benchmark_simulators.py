"""Simulators beside a bare loop: all train the same module on the same samples, and a round's seconds are its own."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from benchmarks.cost.simulators import bare, task, with_edgefl
from benchmarks.cost.simulators.__main__ import SIMULATORS, Turn, measured, rows
from benchmarks.cost.simulators.task import Journal, Mark, Net, Rounds
from edgefl.config.profiles import load_run
from edgefl.models.checkpoints import initial_parts
from edgefl.models.parts import loaded
from edgefl.plan.compile import compile_run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The task with few users."""
    for name, value in {"USERS": 6, "COHORT": 2, "TEST": 250}.items():
        for module in (task, bare, with_edgefl):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    task.write_samples(tmp_path, "image", task.PICTURE)
    return tmp_path


@pytest.mark.parametrize("model", task.MODELS)
def test_edgefl_computes_what_the_plain_module_does(folder, model):
    modality, shape = task.MODELS[model][2:]
    task.write_samples(folder, modality, shape)
    with_edgefl.write_first_weights(folder, model)
    net = task.first_net(folder, model)
    config, recipe = load_run(with_edgefl.run_file(folder, model, Rounds(1, 1)), ())
    test = with_edgefl.Dataset.load_npz(folder / "test.npz")
    plan = compile_run(config, recipe, run="r", shapes=test.signature(), label_names=test.label_names)
    parts = dict(initial_parts(plan.model, plan.seed))
    staged = loaded(plan.model, list(parts), parts)
    x = torch.from_numpy(test.modalities[modality][:7])
    with torch.no_grad():
        logits = staged.classify(staged.fuse({modality: staged.project(modality, staged.encode(modality, x))}))
        torch.testing.assert_close(logits, net(x))
    assert plan.hypers[-1].optimizer == "sgd"
    assert (plan.hypers[-1].momentum, plan.hypers[-1].holdout) == (0.0, 0.0)


def test_edgefl_and_the_bare_loop_learn_the_classes(folder, monkeypatch):
    def tiny():
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 32), torch.nn.ReLU())

    monkeypatch.setitem(task.MODELS, "tiny", task.Model(tiny, 32, "image", task.PICTURE))
    with_edgefl.write_first_weights(folder, "tiny")
    threads, found = torch.get_num_threads(), {}
    for module in (bare, with_edgefl):
        monkeypatch.setattr(sys, "argv", ["", str(folder), "tiny", "2", "4"])
        module.main()
        found[module] = json.loads((folder / "journal.json").read_text())
        assert [mark[0] for mark in found[module]["marks"]] == [1, 2, 6]
    torch.set_num_threads(threads)
    assert min(one["accuracy"] for one in found.values()) > 0.7


def test_the_bare_loop_averages_what_users_have_trained(folder, monkeypatch):
    with_edgefl.write_first_weights(folder, "lenet")
    steps = iter([1.0, 3.0])  # of the two users asked in the one round: the mean is 2 above the first weights
    nets = []

    def trained(net, own, draw):
        step = next(steps)
        with torch.no_grad():
            for weight in net.parameters():
                weight += step

    monkeypatch.setattr(bare, "train_user", trained)
    monkeypatch.setattr(bare, "accuracy", lambda net, folder: nets.append(net) or 0.0)
    monkeypatch.setattr(bare, "asked", lambda: task.Asked(folder, "lenet", Rounds(1, 0)))
    bare.main()
    for weight, first in zip(nets[0].parameters(), task.first_net(folder, "lenet").parameters(), strict=True):
        torch.testing.assert_close(weight, first + 2)


def test_a_user_is_trained_on_full_batches_of_its_own_samples(folder):
    train = task.samples(folder, "train")
    assert torch.equal(train.of_user(1).labels, train.labels[50:100])
    net = Net("lenet")
    before = [weight.detach().clone() for weight in net.parameters()]
    task.train_user(net, train.of_user(1), np.random.default_rng(0))
    assert not any(torch.equal(one, other) for one, other in zip(before, net.parameters(), strict=True))


def test_a_journal_without_a_round_is_refused(tmp_path):
    journal = Journal(tmp_path, Rounds(2, 3))
    for number in (1, 2, 3, 4):
        journal.ended(number)
    with pytest.raises(AssertionError):
        journal.write(0.5)
    journal.ended(5)
    journal.write(0.5)


def test_a_rounds_seconds_are_between_two_ends_and_divided_by_the_bare_loops():
    # from round 2 to round 6: (14 - 6) / 4 processor seconds, (30 - 10) / 4 by the clock; round 1 ended 5 s after 3
    turn = measured([Mark(1, 8.0, 5.0), Mark(2, 10.0, 6.0), Mark(6, 30.0, 14.0)], 3.0, 100.0, 0.8)
    assert turn == Turn(cpu_s=2.0, wall_s=5.0, start_s=5.0, mib=100.0, accuracy=0.8)
    others = [turn._replace(cpu_s=2.0 * n) for n in range(1, len(SIMULATORS))]
    lines = list(rows([[turn, *others], [turn._replace(cpu_s=1.0), *others]]))
    assert "| × 1.00 (1.00 to 1.00) |" in lines[2]
    assert "| × 1.50 (1.00 to 2.00) |" in lines[3]
