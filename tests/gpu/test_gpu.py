"""Training, its memory limits, exported models on a real GPU; left out where none is, unless EDGEFL_REQUIRE_GPU=1."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import pytest
import torch
from export_fixture import exported, windows
from fleet_fixture import Fleet, finish, share
from training_fixture import dataset, job, model_spec, parts_of, stages_of, with_hyper

from device_agent.core.state import Train
from device_agent.runtime.trainer_process import TrainerProcess, TrainerSettings
from device_agent.trainer.first_round import first_round
from edgefl.export.runtime import load_bundle
from edgefl.models.check import encoder_of_size
from edgefl.models.checkpoints import initial_parts
from edgefl.models.parts import part_tensors
from edgefl.models.spec import HeadSpec, ModelSpec
from edgefl.models.staged import build
from edgefl.plan.job import Job, Preparation
from edgefl.plan.training_samples import built_parts
from edgefl.protocol.messages import Offer
from edgefl.protocol.tensors import encode_part
from edgefl.records import GPU, Attempt, Budget
from edgefl.resources.gpu_memory import SEGMENT_BYTES, CudaCeiling, gpu_of, memory_refusal
from edgefl.storage.objects import ObjectStore
from edgefl.training.batches import Batch
from edgefl.training.forward import Auxiliary
from edgefl.training.local_round import LocalState, RoundResult, train_round
from edgefl.training.step import make_optimizer, prepare, train_step

if os.environ.get("EDGEFL_REQUIRE_GPU") == "1" and not torch.cuda.is_available():
    pytest.fail(f"EDGEFL_REQUIRE_GPU is set, and torch {torch.__version__} finds no GPU", pytrace=False)
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here that torch computes on"),
    pytest.mark.timeout(240),
]
MIB = 2**20
SHAPES = {"vision": (16, 16, 3), "text": (6,), "audio": (32, 16), "sensor": (8, 2)}


# ---- the same training as on the processor


def two_of(kind: str) -> ModelSpec:
    encoder = encoder_of_size(kind, "tiny", SHAPES[kind], depth=2)
    return ModelSpec({"a": encoder, "b": encoder}, 2, HeadSpec(12, 6, dropout=0.0), 10, 3, ("x", "y", "z"))


def batch_of(spec: ModelSpec, device: str, size: int = 6) -> Batch:
    draw = torch.Generator().manual_seed(0)
    inputs = {}
    for name, encoder in spec.encoders.items():
        shape = (size, *encoder.input_shape)
        whole = encoder.kind == "text"
        drawn = (
            torch.randint(1, encoder.vocabulary, shape, generator=draw) if whole else torch.rand(shape, generator=draw)
        )
        inputs[name] = drawn.to(device)
    return Batch(size, inputs, dict.fromkeys(inputs), torch.arange(size, device=device) % 3, complete=size)


def after_a_step(made: Job, device: str) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of one step, and every trained tensor after it."""
    model = build(made.model, built_parts(made), seed=1, device=device)
    prepare(model, made.stage.trained)
    optimizer = make_optimizer(model, made.stage.trained, made.hyper)
    loss, _ = train_step(model, made, batch_of(made.model, device), optimizer, Auxiliary())
    trained = {part: part_tensors(model, part) for part in made.stage.trained}
    return loss, {f"{part}.{name}": value for part, tensors in trained.items() for name, value in tensors.items()}


@pytest.mark.parametrize("schedule", ["end_to_end", "layerwise"])
@pytest.mark.parametrize("kind", SHAPES)
def test_a_step_is_that_of_the_processor_to_rounding(kind: str, schedule: str) -> None:
    """By plain gradient descent at rate 1: what the tensors differ by is what the gradients differ by."""
    spec = two_of(kind)
    stage = stages_of(spec, schedule)[-1]
    made = job(spec, stage, optimizer="sgd", lr={"encoder": 1.0, "head": 1.0})
    (loss, there), (expected, here) = (after_a_step(made, device) for device in ("cuda", "cpu"))
    assert loss == pytest.approx(expected, rel=1e-4)
    for name, value in here.items():
        np.testing.assert_allclose(there[name], value, rtol=2e-3, atol=2e-4, err_msg=name)


def on_gpu(made: Job, salt: str = "d/1") -> RoundResult:
    data = dataset(24, {"b": [0, 1]})
    return train_round(made, data, parts_of(made), LocalState(device="cuda"), salt=salt)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "apollo"])
def test_a_round_that_is_tried_again_gives_the_same_to_the_last_bit(optimizer: str) -> None:
    rates = {"encoder": 0.01, "head": 0.01}
    made = job(model_spec(dropout=0.2), epochs=3, optimizer=optimizer, lr=rates)
    one, same = on_gpu(made), on_gpu(made)
    assert one.metrics["loss"] == same.metrics["loss"]
    for part, tensors in one.parts.items():
        for name, value in tensors.items():
            np.testing.assert_array_equal(value, same.parts[part][name], err_msg=f"{part}.{name}")


def test_what_is_counted_is_counted_alike() -> None:
    made = job(epochs=2)
    data = dataset(24, {"b": [0, 1]})
    there, here = (train_round(made, data, parts_of(made), LocalState(device=device)) for device in ("cuda", "cpu"))
    assert there.flops == here.flops
    assert there.samples == here.samples


def losses_in(precision: str) -> list[float]:
    made = job(model_spec(stages=1), epochs=15, batch_size=16, precision=precision)
    losses: list[float] = []
    state = LocalState(device="cuda")
    train_round(made, dataset(48), parts_of(made), state, on_progress=lambda *told: losses.append(told[3]))
    return losses


def test_mixed_precision_learns() -> None:
    mixed, whole = losses_in("bf16"), losses_in("f32")
    assert mixed[0] != whole[0]
    assert mixed[0] == pytest.approx(whole[0], rel=0.05)
    assert mixed[-1] < 0.3 * mixed[0]


# ---- limits


def test_the_allocator_stops_at_its_limit_and_goes_on_below_it() -> None:
    first_round("cuda")
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 256 * MIB
    ceiling = CudaCeiling(torch.cuda, "cuda", Budget(gpu_memory_bytes=limit), 0)
    try:
        ceiling.hold()
        with pytest.raises(torch.OutOfMemoryError) as raised:
            torch.empty(300 * MIB, dtype=torch.uint8, device="cuda")
        refusal = memory_refusal(raised.value, ceiling, card=True)
        assert (refusal.reason, refusal.needed, refusal.allowed, refusal.where) == ("memory", None, float(limit), GPU)
        fits = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_reserved() <= limit
        del fits
    finally:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_card_is_what_the_driver_tells() -> None:
    gpu = gpu_of(torch.cuda, "cuda")
    assert gpu.total_bytes == torch.cuda.get_device_properties(0).total_memory
    assert 0 < gpu.free_bytes <= gpu.total_bytes
    assert gpu.name


def offer_of(store: ObjectStore, width: int) -> Offer:
    """A round of a model whose heads are ``width`` wide, end to end."""
    spec = model_spec(stages=1)
    spec = msgspec.structs.replace(spec, head=HeadSpec(width, 6))
    made = with_hyper(job(spec), batch_size=6)
    manifest = {name: store.put(encode_part(tensors)) for name, tensors in initial_parts(spec, 0)}
    return Offer(Attempt("r", 1, 1, 1), 60.0, made, {name: manifest[name] for name in made.stage.present})


def test_a_round_beyond_the_card_s_budget_is_declined_and_the_trainer_takes_the_next(tmp_path: Path) -> None:
    async def scene() -> None:
        dataset(24).save_npz(tmp_path / "data.npz")
        store = ObjectStore(tmp_path / "objects")
        places = (str(tmp_path / name) for name in ("data.npz", "objects", "trainer.log"))
        budget = Budget(gpu_memory_bytes=256 * MIB)
        trainer = TrainerProcess(TrainerSettings("d1", *places, torch_device="cuda", budget=budget), 2**40)
        try:
            facts = await trainer.warm(Preparation())
            assert (facts.torch_device, facts.gpu) == ("cuda", torch.cuda.get_device_name())
            assert facts.gpu_memory_bytes == torch.cuda.get_device_properties(0).total_memory
            assert 0 <= facts.gpu_idle_bytes <= 128 * MIB  # 66 on an H200
            # Two heads of 4 × 4096² B, their gradients and two moments each: over 512 MiB.
            wide = await trainer.train(Train(offer_of(store, 4096)), lambda _: None)
            assert wide.alive
            refusal = wide.result.refusal
            assert (refusal.reason, refusal.where, refusal.allowed) == ("memory", GPU, 256.0 * MIB)
            assert "out of memory" in refusal.detail
            small = await trainer.train(Train(offer_of(store, 64)), lambda _: None)
            assert small.alive
            assert small.result.refusal is None, small.result.refusal
            held = small.result.figures["cuda_reserved_peak_bytes"]
            assert 0 < held.value <= 256 * MIB
            assert small.result.figures["step_peak_bytes"].source == "torch.cuda.max_memory_allocated"
        finally:
            await trainer.stop()

    asyncio.run(scene())


# ---- a fleet


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_fleet_trains_on_the_gpu_within_its_budget(tmp_path: Path, precision: str) -> None:
    """A device with little of the GPU beside one without a limit. That the limit acts, the tests above show."""
    with Fleet(tmp_path) as fleet:
        little = SEGMENT_BYTES + 140 * MIB
        fleet.agent("little", share(40, "acc", "gyro", seed=1), gpu_memory_bytes=little)
        fleet.agent("much", share(24, "acc", "gyro", seed=2))
        finish(fleet.coordinator("r1", {"round.devices": 2, "training.precision": precision}))
        report = fleet.report("r1")
    assert report.status == "done"
    assert {device.capabilities.torch_device for device in report.devices} == {"cuda"}
    assert {device.capabilities.gpu for device in report.devices} == {torch.cuda.get_device_name()}
    rows = [row for row in report.assignments if row.status == "done"]
    assert sorted((row.device, row.stage) for row in rows) == [
        ("little", 1),
        ("little", 2),
        ("much", 1),
        ("much", 2),
    ]
    for row in rows:
        assert row.measured["cuda_allocated_peak_bytes"].value > 0
        assert row.measured["cuda_reserved_peak_bytes"].value >= row.measured["cuda_allocated_peak_bytes"].value
    held = [row.measured["cuda_reserved_peak_bytes"].value for row in rows if row.device == "little"]
    assert max(held) <= little


# ---- exported models


def test_a_bundle_answers_on_the_gpu_as_on_the_processor() -> None:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime-gpu is not installed")
    made = exported()
    for name in ("acc", "gyro", "acc+gyro"):
        there, here = (load_bundle(made.directory / name, device=device) for device in ("cuda", "cpu"))
        given = {m: x for m, x in windows(made.spec, 7).items() if m in here.modalities}
        one, other = there.predict(given), here.predict(given)
        np.testing.assert_allclose(one.probabilities, other.probabilities, rtol=1e-3, atol=1e-4)
