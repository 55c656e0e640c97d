"""Prices of micro-batches from three traced pieces: those of all pieces, and of the step itself."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from test_pricing import counted
from training_fixture import job, model_spec, random_batch, stages_of

from edgefl.models.check import encoder_of_size
from edgefl.models.spec import HeadSpec, LoraSpec, ModelSpec, adaptable_parts
from edgefl.plan.job import Job
from edgefl.plan.stages import planned
from edgefl.pricing.round_price import price_step
from edgefl.registry import method
from edgefl.training import step


def adapted() -> ModelSpec:
    spec = model_spec()
    return replace(spec, lora=LoraSpec(2, 4.0, tuple(adaptable_parts(spec))))


def of_tokens() -> ModelSpec:
    pair = {"image": encoder_of_size("vision", "tiny", (16, 16, 3), depth=1)}
    pair["text"] = encoder_of_size("text", "tiny", (6,), depth=1)
    return ModelSpec(pair, 1, HeadSpec(16, 8), 8, 3, fusion="joint")


JOBS = {
    "end to end": lambda: job(model_spec(), stages_of(model_spec(), "end_to_end")[-1], batch_size=19, micro_batch=2),
    "remainder": lambda: job(model_spec(), stages_of(model_spec(), "layerwise")[-1], batch_size=19, micro_batch=4),
    "checkpoints": lambda: job(
        model_spec(), stages_of(model_spec(), "progressive")[-1], batch_size=19, micro_batch=2, checkpoint=True
    ),
    "low rank": lambda: job(
        adapted(), planned(adapted(), stages_of(adapted(), "layerwise"))[-1], batch_size=19, micro_batch=3
    ),
    "tokens": lambda: job(
        of_tokens(), method("schedule", "end_to_end").stages(of_tokens(), [1], "auto")[0], batch_size=19, micro_batch=2
    ),
}


def every_piece(made: Job, unit: object) -> list[tuple[int, object, list[object]]]:
    return [(i, piece, []) for i, piece in enumerate(step._pieces(unit, made.hyper.micro_batch))]


@pytest.mark.parametrize("name", JOBS)
def test_the_price_of_three_pieces_is_that_of_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = JOBS[name]()
    rows = dict.fromkeys(made.model.encoders, 19)
    found = price_step(made, rows)
    monkeypatch.setattr(step, "_traced", every_piece)
    whole = price_step(made, rows)
    assert (found.peak, found.flops, found.memory) == (whole.peak, whole.flops, whole.memory)
    assert found.operations == pytest.approx(whole.operations, rel=0.03)
    assert found.written == pytest.approx(whole.written, rel=0.03)


def test_rows_that_lack_a_modality_and_the_step_itself() -> None:
    made = JOBS["end to end"]()
    batch = random_batch({"b": [0, 2, 3, 9, 12]}, size=19)
    price = price_step(made, {m: len(x) for m, x in batch.inputs.items()})
    assert price.flops == counted(made, batch) > 0


def test_a_piece_in_the_middle_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, run = [], step._run
    monkeypatch.setattr(step, "_run", lambda *args: ran.append(args) or run(*args))
    made = JOBS["end to end"]()
    price_step(made, dict.fromkeys(made.model.encoders, 19))
    assert len(ran) == 2 * 2 * 3, "two modalities, two passes"


def test_on_a_real_device_every_piece_runs() -> None:
    made, unit = JOBS["end to end"](), random_batch({}, size=19)
    assert [len(alike) for *_, alike in step._traced(made, unit)] == [0] * 10
    assert torch.device(next(iter(unit.inputs.values())).device).type == "cpu"
