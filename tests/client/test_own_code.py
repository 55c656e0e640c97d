"""The owner's code in a device's trainer: found by its name, run in a round, its faults told with file and line."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from device_agent.core.offer_check import check_offer
from device_agent.core.state import DataFacts, Disk, State, Train
from device_agent.runtime.trainer_process import TrainerProcess, TrainerSettings, TrainRequest, WarmRequest
from device_agent.trainer.own_code import MOST_TEXT, load_code
from device_agent.trainer.process import Trainers
from edgefl.client import save
from edgefl.errors import ConfigError, DivergedError, TrainingCodeError
from edgefl.models.declared import declared_spec, declared_tensors
from edgefl.models.spec import DeclaredSpec, ModelSpec
from edgefl.plan.job import Hyper, Job, Preparation, Slots, Stage
from edgefl.protocol.messages import Offer
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import Attempt, Budget
from edgefl.storage.objects import ObjectStore

HEADER = """
from torch import nn
def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
"""
GOOD = """
def train(round):
    model = net()
    round.load(model)
    for step in range(3):
        round.step(3.0 - step, epoch=1, steps=3)
    with __import__("torch").no_grad():
        model[1].weight += 1
        model[0].weight += 1
    return round.trained(model, samples=9, metrics={"data": len(round.data), "lr": round.lr})
def evaluate_round(round):
    model = net()
    round.load(model)
    return {"sum": model[1].weight.sum()}
"""


class Device:
    """A trainer in this process, with parts in its store."""

    def __init__(self, place: Path, code: str) -> None:
        self.place = place
        torch.manual_seed(0)
        save(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), {"body": ["0"], "head": ["1"]}, place / "initial")
        (place / "mine.py").write_text(HEADER + code)
        self.store = ObjectStore(place / "objects")
        self.settings = TrainerSettings(
            "d1", "my/data", str(place / "objects"), torch_device="cpu", code=f"{place / 'mine.py'}:train"
        )
        self.trainers = Trainers()
        self.notes: list[Any] = []

    def offer(self, *trained: str, slots: Slots | None = None) -> Offer:
        declared = declared_spec(self.place / "initial")
        manifest = {part: self.store.put(encode_part(t)) for part, t in declared_tensors(declared)}
        hyper = Hyper(epochs=2, batch_size=4, lr={"encoder": 1e-3, "head": 0.25})
        stage = Stage(1, 1, 1, declared.parts, trained or declared.parts)
        slots = slots or Slots(repair={"none": {}}, upload={"whole": {}})
        return Offer(Attempt("r", 1, 2, 1), 60.0, Job(ModelSpec(declared=declared), stage, hyper, slots), manifest)

    def train(self, *trained: str) -> Any:
        request = TrainRequest(self.settings, self.offer(*trained))
        return self.trainers.train(request, self.notes.append)

    def tensors(self, ref: Any) -> dict[str, Any]:
        return decode_part(self.store.read(ref.id))


def test_a_round_sends_the_trained_parts_and_what_was_measured(tmp_path: Path) -> None:
    device = Device(tmp_path, GOOD)
    facts = device.trainers.warm(WarmRequest(device.settings), device.notes.append)
    assert facts.code == device.settings.code
    assert (facts.samples, facts.modalities) == ({}, {}), "only its code knows the data"
    result = device.train("head")
    assert result.refusal is None
    assert list(result.manifest) == ["head"], "what is frozen stays here, whatever the code did to it"
    before = device.tensors(device.offer().manifest["head"])
    assert (device.tensors(result.manifest["head"])["1.weight"] - before["1.weight"] == 1).all()
    assert result.samples == {"head": 9}
    told = {"data": 7, "lr": 0.25, "loss": 2.0, "steps": 3}
    assert {name: result.metrics[name] for name in told} == told
    assert result.metrics["trained_sum"] == pytest.approx(result.metrics["received_sum"] + 8), "2 x 4 weights, each + 1"
    assert device.notes == [{"epoch": 1, "step": n, "steps": 3, "loss": 4.0 - n} for n in (1, 2, 3)]
    assert result.figures["flops"].value is None
    assert result.figures["flops"].reason == "own training code"
    assert result.figures["compute_s"].source == "monotonic clock around the training function"
    assert result.figures["step_peak_bytes"].value is not None


def test_a_round_that_is_left_off_ends_at_the_next_step(tmp_path: Path) -> None:
    device = Device(tmp_path, GOOD)

    def leave(note: Any) -> None:
        device.notes.append(note)
        device.trainers.leave_off()

    result = device.trainers.train(TrainRequest(device.settings, device.offer()), leave)
    assert result.refusal.reason == "abandoned"
    assert len(device.notes) == 1
    assert result.figures["compute_s"].source.endswith("2 steps until the round was left off")


@pytest.mark.parametrize(
    ("code", "text", "way_out"),
    [
        (
            "def train(round):\n    raise ValueError('no\\nfile')\n",
            "mine.py:6 in train: ValueError: no\\nfile",
            "trainer.log",
        ),
        ("def train(round):\n    __import__('sys').exit(3)\n", "mine.py:6 in train: SystemExit: 3", "trainer.log"),
        ("def train(round):\n    int('x')\n", "mine.py:6 in train: ValueError: invalid literal", "trainer.log"),
        ("def train(round):\n    nn.Linear(2, 2)(1)\n", "mine.py:6 in train: TypeError", "trainer.log"),
        ("def train(round):\n    return 1\n", "train returned int", "round.trained"),
        ("def train(round):\n    round.load(nn.Linear(1, 1))\n", "the model has no '0.bias'", "edgefl.client.save"),
        (GOOD + "def evaluate_round(round):\n    return 0.5\n", "float is no mapping of metrics", "{'accuracy': 0.9}"),
    ],
)
def test_a_fault_names_file_line_and_way_out_and_the_trainer_lives(
    tmp_path: Path, code: str, text: str, way_out: str, capfd: pytest.CaptureFixture[str]
) -> None:
    device = Device(tmp_path, code)
    refusal = device.train().refusal
    assert refusal.reason == "error"
    assert text in refusal.detail
    assert way_out in refusal.detail
    assert len(refusal.detail) <= 500
    assert refusal.detail.isprintable()
    if "mine.py" in text:
        assert "Traceback" in capfd.readouterr().err, "the whole of it is in the trainer's log"
    assert device.train().refusal.detail == refusal.detail


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    refusal = Device(tmp_path, "def train(round):\n    raise KeyError('\\u2603' * 9999)\n").train().refusal
    assert refusal.detail.count("\\u2603") <= MOST_TEXT // 6
    assert refusal.detail.endswith("traceback.")


def test_values_that_are_not_finite_end_the_round_as_diverged(tmp_path: Path) -> None:
    code = GOOD.replace("model[0].weight += 1", "model[0].weight *= float('nan')")
    with pytest.raises(DivergedError, match=r"part body: '0\.weight' has values that are not finite"):
        Device(tmp_path, code).train()


@pytest.mark.parametrize("raised", ["MemoryError", 'RuntimeError("DefaultCPUAllocator: can\'t allocate memory")'])
def test_short_memory_is_a_refusal_of_memory(tmp_path: Path, raised: str) -> None:
    refusal = Device(tmp_path, f"def train(round):\n    raise {raised}\n").train().refusal
    assert refusal.reason in {"memory", "ceiling"}, "so that its budget decides, and not its code is mended"


def test_a_round_that_is_tried_again_draws_the_same(tmp_path: Path) -> None:
    device = Device(tmp_path, GOOD.replace('"lr": round.lr', '"drawn": __import__("torch").rand(1)'))
    first, again = (device.train().metrics["drawn"] for _ in range(2))
    assert first == again


HUNGRY = """
def train(round):
    if round.number == 2:
        held = bytearray(b"x") * (400 * 2**20)
        __import__("time").sleep(5)
    model = net()
    round.load(model)
    return round.trained(model, samples=1)
"""


def test_code_that_takes_too_much_is_held_to_its_budget_and_asked_again(tmp_path: Path) -> None:
    device = Device(tmp_path, HUNGRY)
    settings = replace(device.settings, budget=Budget(step_memory_bytes=64 * 2**20), log=str(tmp_path / "trainer.log"))

    async def scene() -> None:
        trainer = TrainerProcess(settings, 2**40)
        try:
            await trainer.warm(Preparation())
            ended, alive = await trainer.train(Train(device.offer()), lambda _: None)
            if alive:  # the kernel refused it; where it cannot, the process is ended at its ceiling
                assert (ended.refusal.reason, ended.refusal.allowed > 64 * 2**20) == ("memory", True)
            else:
                assert ended.refusal.reason == "ceiling"
                assert ended.figures["process_peak_bytes"].value == ended.refusal.needed > ended.refusal.allowed
            again = device.offer()
            ended, alive = await trainer.train(Train(replace(again, attempt=Attempt("r", 1, 3, 1))), lambda _: None)
            assert (alive, ended.refusal) == (True, None), "the next round begins afresh"
            assert set(ended.manifest) == {"body", "head"}
        finally:
            await trainer.stop()

    asyncio.run(scene())


def test_code_is_named_by_file_or_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_mine.py").write_text("VALUE = 4\n")
    (tmp_path / "mine_too.py").write_text("from beside_mine import VALUE\ndef go(round):\n    return VALUE\n")
    assert load_code(f"{tmp_path / 'mine_too.py'}:go").train(None) == 4
    monkeypatch.syspath_prepend(tmp_path)
    assert load_code("mine_too:go").train(None) == 4
    (tmp_path / "mine_too.py").write_text("def evaluate(model, data):\n    pass\ndef go(round):\n    return VALUE\n")
    assert load_code(f"{tmp_path / 'mine_too.py'}:go").evaluate is None, "a script's own, with other arguments"
    with pytest.raises(ConfigError, match="'mine_too' names no function"):
        load_code("mine_too")
    with pytest.raises(ConfigError, match="has no function 'train'") as error:
        load_code("mine_too:train")
    assert error.value.remedy == "It has: go."
    with pytest.raises(TrainingCodeError, match="ModuleNotFoundError: No module named"):
        load_code("no_such:train")
    with pytest.raises(TrainingCodeError, match=r"FileNotFoundError: there is no file .*absent\.py"):
        load_code(f"{tmp_path / 'absent.py'}:train")
    (tmp_path / "torn.py").write_text("def train(round)\n")
    with pytest.raises(TrainingCodeError, match="SyntaxError"):
        load_code(f"{tmp_path / 'torn.py'}:train")


def test_a_device_takes_a_declared_model_by_its_own_code_alone() -> None:
    def offered(model: ModelSpec, facts: DataFacts) -> Any:
        return check_offer(State(device="d"), facts, Offer(job=Job(model)), Disk())

    declared, code = ModelSpec(declared=DeclaredSpec(("a",))), DataFacts(code="mine.py:train")
    assert offered(declared, code) is None
    without = offered(declared, DataFacts(samples={"": 99}, modalities={"acc": (4, 2)}))
    assert (without.reason, "--trainer FILE.py:FUNCTION" in without.detail) == ("method", True)
    ours = offered(ModelSpec(), code)
    assert (ours.reason, "mine.py:train" in ours.detail) == ("method", True)
