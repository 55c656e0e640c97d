"""Prices against what really runs: FLOPs to the digit, live bytes by hand, and how both grow."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from training_fixture import (
    CLIP,
    CONTRAST,
    CROSS_ENTROPY,
    dataset,
    job,
    model_spec,
    parts_of,
    random_batch,
    stages_of,
    with_hyper,
)

from edgefl.budget.stage_cost import Priced, beside_tensors
from edgefl.models.check import encoder_of_size
from edgefl.models.spec import HeadSpec, ModelSpec
from edgefl.models.staged import build
from edgefl.patterns import patterns_of
from edgefl.plan.job import Hyper, Job, Slots
from edgefl.plan.stages import restrict, shallower
from edgefl.plan.training_samples import REHEARSED_BYTES
from edgefl.pricing.overhead import Overhead, Share
from edgefl.pricing.round_price import CONVOLUTION_BYTES, LIBRARIES_BYTES, Pricer, most_rows, price_step
from edgefl.prototypes.mask import Table
from edgefl.registry import method, methods
from edgefl.resources.heap import Heap
from edgefl.resources.tensor_counters import FlopCounter, LiveBytes
from edgefl.training.batches import Batch, meta_batch
from edgefl.training.flop_cache import kind_of_step
from edgefl.training.forward import Auxiliary
from edgefl.training.local_round import train_round
from edgefl.training.step import make_optimizer, prepare, train_step

INCOMPLETE = {"b": [0, 2, 3]}
FULL = {"a": 6, "b": 6}


def counted(made: Job, batch: Batch) -> float:
    """FLOPs of a real step on the CPU."""
    tables = {}
    if made.slots.prototypes.get("class_mean") is not None:
        valid = torch.ones(3, dtype=torch.bool)
        tables = {m: Table(torch.randn(3, made.model.head.out), valid) for m in made.model.encoders}
    model = build(made.model, made.stage.present)
    prepare(model, made.stage.trained)
    optimizer = make_optimizer(model, made.stage.trained, made.hyper)
    with FlopCounter() as counter:
        train_step(model, made, batch, optimizer, Auxiliary(tables))
    return float(counter.flops)


@pytest.mark.parametrize("schedule", methods("schedule"))
@pytest.mark.parametrize("micro", [0, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [{}, INCOMPLETE], ids=["complete", "incomplete"])
def test_flops_on_shapes_alone_are_those_of_the_step_itself(schedule, micro, rows):
    for stage in stages_of(model_spec(stages=2), schedule):
        made = job(stage=stage, micro_batch=micro)
        batch = random_batch(rows)
        price = price_step(made, {m: len(x) for m, x in batch.inputs.items()})
        assert price[1] == counted(made, batch) > 0


@pytest.mark.parametrize(
    ("objective", "missing", "prototypes", "rows"),
    [
        (CROSS_ENTROPY, {"random": {"drop": 0.3}}, {}, {}),
        (CONTRAST, {"prototype": {"by": "label"}}, {"class_mean": {}}, INCOMPLETE),
        (CONTRAST, {"prototype": {"by": "match"}}, {"class_mean": {}}, INCOMPLETE),
        (CLIP, {"ignore": {}}, {}, {}),
        ({**CROSS_ENTROPY, **CLIP}, {"zero": {}}, {}, INCOMPLETE),
    ],
    ids=["random", "label", "match", "clip", "clip and cross-entropy"],
)
def test_flops_of_every_term_and_stand_in(objective, missing, prototypes, rows):
    spec = model_spec(classes=3 if "cross_entropy" in objective else 0)
    made = job(spec, objective=objective, missing=missing, prototypes=prototypes)
    batch = random_batch(rows)
    assert price_step(made, {m: len(x) for m, x in batch.inputs.items()})[1] == counted(made, batch)


@pytest.mark.parametrize("kind", ["vision", "text", "audio"])
def test_flops_of_the_other_kinds_of_encoder(kind):
    shape = {"vision": (8, 8, 3), "text": (6,), "audio": (16, 8)}[kind]
    spec = ModelSpec({"m": encoder_of_size(kind, "tiny", shape)}, 3, HeadSpec(8, 4), 8, 3, ("x", "y", "z"))
    made = job(spec)
    x = torch.randint(1, 9, (4, *shape)) if kind == "text" else torch.rand(4, *shape)
    batch = Batch(4, {"m": x}, {"m": None}, torch.tensor([0, 1, 2, 0]))
    made = with_hyper(made, batch_size=4)
    assert price_step(made, {"m": 4})[1] == counted(made, batch)


def test_a_round_costs_what_was_predicted_when_every_sample_is_complete():
    data, made = dataset(13), job(epochs=2)
    _, flops, *_ = Pricer()(made, {"": 13, "a": 13, "b": 13})
    assert flops == train_round(made, data, parts_of(made)).flops


def test_live_bytes_of_a_linear_layer_by_hand():
    layer = torch.nn.Linear(100, 50, bias=False, device="meta")
    x = torch.empty(8, 100, device="meta")
    with LiveBytes() as live:
        y = layer(x)  # [8, 50]: 1600 bytes
        assert live.live == live.peak == 1600
        y.sum().backward()  # sum 4; gradient of y 1600 (an expanded view of 4); gradient of the weight 20000
        del y
    assert 20000 + 1600 <= live.peak <= 20000 + 1600 + 1600 + 8
    assert live.live == 20000  # the gradient, which the layer holds


def test_what_was_there_before_is_not_counted_and_views_are_free():
    x = torch.zeros(10)
    with LiveBytes() as live:
        x.add_(1)
        x.view(2, 5).t()
        assert live.peak == 0
        y = x + 1
        y.view(2, 5).mul_(2)
        assert live.live == 40
        del y
        assert (live.live, live.peak) == (0, 40)


def test_memory_of_a_step_holds_weights_gradients_states_and_one_temporary():
    spec = ModelSpec({"m": encoder_of_size("sensor", "tiny", (8, 2), depth=1)}, 1, HeadSpec(512, 4), 8, 2, ("x", "y"))
    made = job(spec, stages_of(spec, "end_to_end")[0], batch_size=2, clip_norm=1.0)  # all gradients are there at once
    model = build(spec, device="meta")
    weights = sum(p.numel() * 4 for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    expected = 4 * weights + buffers + 512 * 512 * 4  # the second layer of the head is by far the largest
    peak = price_step(made, {"m": 2})[0]
    assert expected < peak < 1.02 * expected
    plain = price_step(with_hyper(made, optimizer="sgd", momentum=0.0), {"m": 2})[0]
    assert 2 * weights < peak - plain <= 2 * weights + 512 * 512 * 4  # plain SGD has no temporary


@pytest.mark.parametrize("schedule", ["layerwise", "end_to_end"])
def test_memory_grows_with_the_batch_and_shrinks_with_the_micro_batch(schedule):
    spec = model_spec(stages=2, modalities="a")
    made = job(spec, stages_of(spec, schedule)[-1])
    peaks = [price_step(with_hyper(made, batch_size=size), {"a": size})[0] for size in (32, 64, 128)]
    assert peaks == sorted(set(peaks))
    pieces = [price_step(with_hyper(made, batch_size=128, micro_batch=micro), {"a": 128}) for micro in (0, 64, 32)]
    assert [p.peak for p in pieces] == sorted({p.peak for p in pieces}, reverse=True)
    assert pieces[0][1] < pieces[1][1] == pieces[2][1]  # the price of memory: encoding twice


def test_memory_and_flops_shrink_with_every_encoder_stage_that_is_not_trained():
    made = job(stage=stages_of(model_spec(), "end_to_end")[0])
    prices = [price_step(job(stage=stage), FULL) for stage in shallower(made.stage)]
    assert [p.peak for p in prices] == sorted({p.peak for p in prices}, reverse=True)
    assert [p.flops for p in prices] == sorted({p.flops for p in prices}, reverse=True)


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 2), ("sgd", 1)])
@pytest.mark.parametrize("schedule", ["end_to_end", "layerwise"])
def test_what_memory_goes_to_by_hand(schedule, optimizer, copies):
    """Two rows: the largest moment has nearly all gradients, whose norm is limited, and little besides."""
    stage = stages_of(model_spec(), schedule)[-1]
    made = job(stage=stage, optimizer=optimizer, momentum=0.9, clip_norm=1.0, batch_size=2)
    model = build(made.model, stage.present, device="meta")
    trained = sum(p.nbytes for part in stage.trained for p in model.part(part).parameters())
    own = sum(t.nbytes for t in [*model.parameters(), *model.buffers()] if t.ndim)
    price = price_step(made, {"a": 2, "b": 2})
    peak, memory = price.peak, price.memory
    batch = meta_batch(made, {"a": 2, "b": 2})
    inputs = sum(x.nbytes for x in [*batch.inputs.values(), batch.labels])
    exact = {"weights": own, "optimizer": copies * trained, "batch": inputs}
    assert {name: memory[name] for name in exact} == exact
    assert 0.8 * trained < memory["gradients"] <= trained
    assert 0 < memory["activations"] <= trained
    assert peak == sum(memory.values())
    large = price_step(with_hyper(made, batch_size=64), {"a": 64, "b": 64}).memory
    assert large["gradients"] < 0.1 * trained  # the largest moment is when the backward pass begins
    assert large["activations"] > 5 * trained


def test_a_rare_modality_is_priced_with_the_least_rows_that_can_be_trained():
    made = job(batch_size=16)
    peak, flops, *_ = Pricer()(made, {"": 100, "a": 100, "b": 1})
    assert flops == 6 * price_step(made, {"a": 16, "b": 2})[1]
    assert peak == price_step(made, {"a": 16, "b": 4})[0]  # a quarter of a batch, though there is but one sample


@pytest.mark.parametrize(
    "missing",
    [pytest.param({"zero": {}}, marks=pytest.mark.slow), {"prototype": {"by": "match"}}],
    ids=["zero", "match"],
)
def test_prices_of_a_fleet_follow_from_a_few_traces_exactly(missing, monkeypatch):
    slots = {"objective": CONTRAST, "missing": missing, "prototypes": {"class_mean": {}}}
    made, pricer, traced = job(batch_size=20, **slots), Pricer(), []

    def watched(job_, rows, steps=2):
        traced.append(rows)
        return price_step(job_, rows, steps)

    monkeypatch.setattr("edgefl.pricing.round_price.price_step", watched)
    shares = [(100, 100), (90, 80), (80, 100), (100, 70), (55, 60), (30, 95)]
    found = [pricer(made, {"": 100, "a": a, "b": b}) for a, b in shares]
    assert len(traced) == 6  # of five sizes the largest batch; of mean batches one that these do not span
    for (a, b), (peak, flops, *_) in zip(shares, found, strict=True):
        step = price_step(made, {"a": a // 5, "b": b // 5})[1]
        patterns = {p: n / 100 for p, n in patterns_of({"": 100, "a": a, "b": b}, "ab").items()}
        after = Overhead()(made, Share(100, 100, 0, patterns, {}))
        assert flops == 5 * step + after
        assert peak <= found[0][0]
    after = found[0][1] - 5 * price_step(made, {"a": 20, "b": 20})[1]
    assert pricer(made, {"": 10, "a": 10, "b": 10})[1] == pytest.approx(after / 10)  # no step, yet prototypes


def test_a_step_s_kind_is_what_decides_its_cost_and_nothing_else():
    def kind(depth: int = 2, labels: tuple[str, ...] = ("x", "y"), **changes: object) -> bytes:
        spec = model_spec()
        one = replace(spec.encoders["a"], **changes)
        named = replace(spec, encoders={**spec.encoders, "a": one}, label_names=labels)
        made = job(named)
        return kind_of_step(replace(made, stage=replace(made.stage, depth=depth)), with_tables=False)

    scaled = kind(mean=(0.0,), std=(1.0,))
    assert kind(mean=(3.5,), std=(0.1,)) == scaled
    assert kind(labels=("p", "q")) == kind()
    assert len({scaled, kind(), kind(depth=1)}) == 3  # scaling takes a copy of the batch


def test_the_paper_s_model_is_priced_without_its_memory():
    encoders = {"image": encoder_of_size("vision", "paper"), "text": encoder_of_size("text", "paper", (32,))}
    spec = ModelSpec(encoders, 6, HeadSpec(), 256, 0)
    last = method("schedule", "layerwise").stages(spec, [1] * 6, "frozen")[5]
    made = Job(spec, last, Hyper(batch_size=256), Slots(CLIP, {"ignore": {}}, {}))
    peak, flops, *_ = price_step(made, dict.fromkeys(encoders, 256))
    assert flops / 256 / 1e9 == pytest.approx(5.5, rel=0.02)  # 6.6 with whole last blocks, as counted once
    assert peak / 2**20 == pytest.approx(1932, rel=0.01)  # 3,026 were measured with whole blocks and all gradients


def test_patches_that_are_convolved_cost_the_kernels_of_convolutions():
    picture = encoder_of_size("vision", "tiny", (16, 16, 3), patch=8)
    mixed = ModelSpec({"a": model_spec().encoders["a"], "b": picture}, 3, HeadSpec(12, 6), 10, 3, tuple("xyz"))
    made, pricer = job(mixed, stages_of(mixed, "end_to_end")[0]), Pricer()
    samples = dict.fromkeys(("", "a", "b"), 12)
    assert pricer(made, samples).libraries == LIBRARIES_BYTES + CONVOLUTION_BYTES
    without = replace(made, stage=restrict(made.stage, ["a"]))  # as a device has it that has no pictures
    assert pricer(without, {"": 12, "a": 12}).libraries == LIBRARIES_BYTES


def test_what_libraries_take_is_there_before_a_round_that_was_rehearsed():
    made, priced = job(), Priced(2**20, 0.0, libraries=2**22, holes=2**10)
    small, large = (dict.fromkeys(made.stage.present, size) for size in (2**10, REHEARSED_BYTES))
    assert beside_tensors(made, priced, small) == (2**22, 2**10)
    assert beside_tensors(made, priced, large) == (0, 2**22 + 2**10)


def test_holes_of_the_heap_by_hand():
    """A hole is taken by the smallest request that fits; a larger one goes to the heap's end, a mapping beside it."""
    heap, small, large = Heap(mapped_bytes=2**20), 2**10 - 16, 2**12 - 16  # with a head of 16 bytes: 1 and 4 KiB
    heap.run([(1, large), (2, small), (-1, large), (3, small)])
    assert heap.peak == 5 * 2**10  # 3 lies where 1 was
    heap.run([(4, large)])
    assert heap.peak == 9 * 2**10  # 3 KiB are left of that hole
    heap.run([(-3, small), (5, large), (6, 2**20), (-6, 2**20)])
    assert heap.peak == 9 * 2**10 + 2**20 + 2**12  # whole again, and the mapping with its head


def test_holes_are_left_by_tensors_that_the_allocator_does_not_map():
    small, wide = (price_step(job(batch_size=size), {"a": size, "b": size}) for size in (64, 2**17))
    assert 0 < small.holes < 0.5 * small.peak
    assert wide.holes < 0.05 * wide.peak  # nearly all are blocks of 2 MiB and more


def test_the_only_step_of_a_round_has_no_optimiser_state_before_it():
    made = job(batch_size=64)
    one, more = (price_step(made, {"a": 64, "b": 64}, steps) for steps in (1, 2))
    assert one.memory["optimizer"] == 0
    assert more.peak - one.peak == more.memory["optimizer"] > 0


def test_the_largest_batch_to_expect_lacks_what_most_samples_lack():
    made = job(batch_size=64)
    whole, half = frozenset({"a", "b"}), frozenset({"a"})
    rows = most_rows(made, {whole: 0.5, half: 0.5}, 6400, ["a", "b"])
    assert rows["a"] == 64
    assert rows["b"] == 48  # 32, and 2.5 of 4 for the largest of 100 batches, up to a quarter of the batch
    assert most_rows(made, {whole: 0.5, half: 0.5}, 64, ["a", "b"])["b"] == 32  # the one batch there is


def test_what_operations_make_and_change_is_written() -> None:
    with LiveBytes() as live:
        a = torch.empty(10, device="meta")  # 40 bytes
        b = a + 1  # 40
        b.mul_(2)  # 40 once more
        a.view(2, 5)  # nothing
        torch._foreach_add_([a, b], 1.0)  # 80
    assert (live.written, live.operations) == (200, 5)


def test_operations_of_a_step_are_with_its_update() -> None:
    rows = dict.fromkeys(job().model.encoders, 8)
    adamw, adafactor = (price_step(job(optimizer=name), rows) for name in ("adamw", "adafactor"))
    assert adafactor.operations > 1.5 * adamw.operations  # parameter by parameter
