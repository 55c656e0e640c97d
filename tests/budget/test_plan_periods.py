"""What periods cost by plan: layers between, twice the trained parts on disk, and a stage that has no small layer."""

from __future__ import annotations

from msgspec.structs import replace
from plan_fixture import MODEL, PART_BYTES, SUPERVISED, candidate, price

from edgefl.budget.fit import DevicePlan, RunPrice, place
from edgefl.budget.stage_cost import bytes_of
from edgefl.models.spec import part_names
from edgefl.plan.job import Candidate, Hyper, Job, Placement, Stage
from edgefl.plan.periods import whole_exchanges
from edgefl.records import LAYER, Budget, Cost, Refusal
from edgefl.report.month_table import months, stage_total

NAMES = tuple(part_names(MODEL))
STAGE = Stage(1, MODEL.stages, 4, present=NAMES, trained=NAMES)
FIRST, LAST = f"{NAMES[1]}|w.weight", f"{NAMES[-1]}|w.weight"


def put(layers: dict[str, int], device: Candidate | None = None, most: float = 1.0) -> Placement:
    slots = replace(SUPERVISED, repair={"poverty": {"exchange": "layer", "layers": most}})
    return place(Job(MODEL, STAGE, Hyper(batch_size=8), slots), device or candidate(), PART_BYTES, price, layers=layers)


def test_the_largest_layer_is_what_a_round_between_costs_each_way():
    layers = {FIRST: 100, LAST: 40, "not trained|w.weight": 900}
    placed = put(layers)
    assert (placed.cost.layer_bytes, placed.layer) == (100, FIRST)
    assert put({FIRST: 40, LAST: 40}).layer == max(FIRST, LAST), "of equals the last by name"


def test_more_layers_cost_as_many_times_as_much_up_and_one_comes_down():
    cost = put({FIRST: 100}, most=3.0).cost
    assert (cost.layers_up_bytes, cost.layer_bytes) == (300, 100)
    assert put({FIRST: 100}, most=0.0).cost.layer_bytes == 0


def test_a_device_holds_its_own_parts_of_two_rounds():
    usual = place(Job(MODEL, STAGE, Hyper(batch_size=8), SUPERVISED), candidate(), PART_BYTES, price).cost.disk_bytes
    placed = put({FIRST: 100})
    assert placed.cost.disk_bytes == usual + bytes_of(STAGE.trained, PART_BYTES)
    refused = put({FIRST: 100}, candidate(Budget(disk_bytes=usual))).refusal
    assert refused is not None
    assert (refused.reason, refused.allowed) == ("disk", usual)


def test_a_stage_whose_layers_are_all_large_is_refused_with_the_way_out():
    refusal = put({}).refusal
    assert refusal is not None
    assert refusal.reason == LAYER
    assert "5%" in refusal.detail
    assert "end_to_end" in refusal.detail
    assert put({}, most=0.0).refusal is None, "where nothing is to be exchanged"


def test_a_stage_adds_up_to_its_whole_exchanges_and_its_layers():
    """Ten rounds by four: three downloads and three uploads of everything, seven layers each way."""
    assert [whole_exchanges(10, length) for length in (1, 2, 4, 16)] == [10, 5, 3, 1]
    cost = Cost(payload_down_bytes=100, payload_up_bytes=90, whole_up_bytes=90, joining_down_bytes=110)
    cost = replace(cost, layer_bytes=5, layers_up_bytes=15)
    placement = Placement(stage=replace(STAGE, rounds=10), cost=cost)
    total = stage_total(placement, 4, joins=True)
    assert total.payload_down_bytes == 110 + 2 * 100 + 7 * 5
    assert total.payload_up_bytes == 3 * 90 + 7 * 15
    assert stage_total(placement, joins=True).payload_up_bytes == 10 * 90


def test_a_month_is_its_runs_with_their_packets_and_the_waiting_between():
    """Two stages of one round: 110 down and 90 up where it joins, 30 down and 90 up where it enters the stage."""
    cost = Cost(payload_down_bytes=100, payload_up_bytes=90, whole_up_bytes=90, joining_down_bytes=110)
    cost = replace(cost, entering_down_bytes=30, energy_j=2.5)
    first, second = (replace(STAGE, index=index, rounds=1) for index in (1, 2))
    placed = [Placement(stage=stage, cost=cost) for stage in (first, second)]
    closing = Placement(stage=replace(STAGE, index=3, rounds=0), cost=cost)
    refused = replace(placed[1], refusal=Refusal("payload", 2.0, 1.0, "B"))
    slow = replace(placed[0], cost=replace(cost, energy_j=0.0))
    devices = [DevicePlan("a", placement=one) for one in (*placed, closing)]
    devices += [DevicePlan("b", placement=one) for one in (slow, refused)]
    both, one = months(RunPrice(devices=tuple(devices)), 30)
    assert (both.device, both.runs_bytes, both.energy_j) == ("a", round(30 * 320 * 1.05), 30 * 2 * 2.5)
    assert (one.device, one.runs_bytes, one.energy_j) == ("b", 30 * 200 * 1.05, None)
    assert 10 < both.idle_bytes / 2**20 < 11
