"""The memory of `transformers` in a trainer, where an encoder is made of its modules."""

from __future__ import annotations

import msgspec
import pytest

from device_agent.runtime.trainer_process import library_encoders
from device_agent.trainer import local_trainer
from edgefl.budget.fit import verdict
from edgefl.budget.stage_cost import Priced, StageTraffic, cost_of, modules_bytes
from edgefl.models.check import encoder_of_size
from edgefl.models.spec import ModelSpec
from edgefl.plan.job import Candidate, Job
from edgefl.protocol.messages import Offer
from edgefl.records import Attempt, Budget, Capabilities

BASE, MIB = 250 * 2**20, 2**20
OWN = ModelSpec({"words": encoder_of_size("text", "tiny", (8,))}, classes=2)
LIBRARY = ModelSpec({"words": msgspec.structs.replace(OWN.encoders["words"], config="{}")}, classes=2)


@pytest.mark.parametrize("model", [OWN, LIBRARY])
def test_it_stands_in_the_price_of_the_process_and_not_in_the_step_s(model: ModelSpec):
    device = Candidate("d", Capabilities(trainer_base_bytes=BASE), samples={"": 12, "words": 12})
    job = Job(model)
    cost = cost_of(job, device, Priced(10 * MIB, 0.0, libraries=MIB), StageTraffic(job.stage, {}))
    library = modules_bytes(model)
    rehearsed = (9 if library else 1) * MIB
    assert (160 * MIB < library < 180 * MIB) if model is LIBRARY else library == 0
    assert cost.step_peak_bytes == 10 * MIB
    refusal = verdict(cost, msgspec.structs.replace(device, budget=Budget(memory_bytes=BASE)))
    assert refusal is not None
    assert refusal.reason == "memory"
    assert refusal.needed == BASE + library + rehearsed + cost.step_peak_bytes


def test_it_is_loaded_before_a_round_is_measured():
    assert library_encoders(Offer(Attempt("r", 1, 1, 1), 60.0, Job(LIBRARY))) == tuple(LIBRARY.encoders.values())
    assert not library_encoders(Offer(Attempt("r", 1, 1, 1), 60.0, Job(OWN)))


def test_a_device_without_it_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_trainer, "find_spec", lambda _: None)
    assert "transformers is not installed" in local_trainer._lacking(Job(LIBRARY))
    assert "transformers" not in local_trainer._lacking(Job(OWN))
