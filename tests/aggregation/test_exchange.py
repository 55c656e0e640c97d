"""What travels: which parts are sent, kept and seen, by the recipe's slot weight and by audience."""

from __future__ import annotations

import pytest

from edgefl.aggregation.server_state import is_shared, of_cluster, of_device, shared, view
from edgefl.plan.job import Job, Slots, Stage
from edgefl.plan.stages import exchange_of, kept, private, sent
from edgefl.records import ObjectRef
from edgefl.registry import methods

TRAINED = ("a/stage2", "shared/stage2", "head/a", "fusion", "task")
STAGE = Stage(index=2, depth=2, rounds=1, present=("a/embed", "a/stage1", *TRAINED), trained=TRAINED)


@pytest.mark.parametrize(
    ("exchange", "goes", "stays", "own"),
    [
        ("all", TRAINED, (), ()),
        ("mappings", ("a/stage2", "shared/stage2", "head/a"), ("fusion", "task"), ("fusion", "task", "head/a")),
        ("nothing", (), TRAINED, TRAINED),
    ],
)
def test_what_goes_what_stays_and_what_goes_on_from_the_devices_own_copy(exchange, goes, stays, own):
    assert sent(STAGE, exchange) == goes
    assert private(STAGE, exchange) == stays
    assert kept(Job(stage=STAGE, slots=Slots(exchange=exchange))) == own


@pytest.mark.parametrize("choice", methods("weight"))
def test_every_weight_says_what_travels(choice):
    expected = {"own": "nothing", "relationship": "mappings"}.get(choice, "all")
    assert exchange_of({choice: {}}) == expected


def ref(name: str) -> ObjectRef:
    return ObjectRef(name * 64, 1)


def test_a_device_sees_everyones_parts_its_clusters_over_them_and_its_own_over_all():
    state = {
        "task": ref("1"),
        "head/a": ref("2"),
        of_cluster(3) + "task": ref("3"),
        of_cluster(3) + "head/a": ref("4"),
        of_device("left") + "head/a": ref("5"),
        of_device("left") + "poverty": ref("6"),
        "server/memory": ref("7"),
    }
    assert shared(state) == {"task": ref("1"), "head/a": ref("2")}
    assert view(state, "right") == shared(state)
    assert view(state, "right", 3) == {"task": ref("3"), "head/a": ref("4")}
    assert view(state, "left", 3) == {"task": ref("3"), "head/a": ref("5"), "poverty": ref("6")}
    assert view(state, "lef", 31) == shared(state)
    assert [is_shared(part) for part in state] == [True, True, False, False, False, False, False]


def test_cluster_zero_is_a_cluster_and_minus_one_none():
    state = {"task": ref("0")} | {of_cluster(n) + "task": ref(str(n + 1)) for n in range(3)}
    assert [view(state, "d", cluster)["task"] for cluster in (0, 1, 2)] == [ref("1"), ref("2"), ref("3")]
    assert view(state, "d") == view(state, "d", -1) == {"task": ref("0")}
