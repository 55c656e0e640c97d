"""Updates made from earlier states: FedBuff's numbers by hand, and what is on record of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgefl.aggregation.aggregate import aggregate_round
from edgefl.aggregation.history import UpdateInfo
from edgefl.aggregation.mean import factor
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.prototypes.table import ClassMeans, from_tensors, to_tensors
from edgefl.records import Manifest
from edgefl.storage.objects import ObjectStore


def part(store: ObjectStore, *values: float, **more: Any) -> Manifest:
    return {"task": store.put(encode_part({"w": np.array(values, np.float32), **more}))}


def weights(store: ObjectStore, state: Manifest) -> list[float]:
    return [float(value) for value in decode_part(store.read(state["task"].id))["w"]]


def test_the_factor_is_the_papers() -> None:
    assert [factor(late, 0.5) for late in (0, 1, 3)] == [1.0, pytest.approx(2**-0.5), 0.5]
    assert factor(7, 0.0) == 1.0
    assert factor(3, 1.0) == 0.25


def test_the_next_state_is_what_the_paper_says_worked_out_by_hand(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    first, now = part(store, 0.0, 0.0), part(store, 4.0, 8.0)
    # a was sent (4, 8) and has (6, 8): change (2, 0), staleness 0, 10 samples of 40.
    # b was sent (0, 0) three rounds ago and has (8, -4): change (8, -4), damped to (4, -2), 30 samples of 40.
    # next = (4, 8) + 1/4 (2, 0) + 3/4 (4, -2) = (7.5, 6.5)
    updates = [
        UpdateInfo("a", part(store, 6.0, 8.0), {"task": 10}),
        UpdateInfo("b", part(store, 8.0, -4.0), {"task": 30}, staleness=3, base=first, factor=factor(3, 0.5)),
    ]
    state, record = aggregate_round(updates, store, now)
    assert weights(store, state) == [7.5, 6.5]
    assert record["stale"] == {"b~3": {"device": "b", "staleness": 3, "factor": 0.5}}
    assert record["parts"]["task"]["devices"] == {"a": 0.25, "b~3": 0.75}


def test_the_damping_is_not_made_up_for_when_all_are_late(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    first, now = part(store, 0.0), part(store, 10.0)
    late = UpdateInfo("a", part(store, 4.0), {"task": 1}, staleness=3, base=first, factor=0.5)
    state, _ = aggregate_round([late], store, now)
    assert weights(store, state) == [12.0]  # 10 + 0.5 (4 - 0)


def test_a_device_may_bring_an_old_update_and_a_new_one(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    first, now = part(store, 0.0), part(store, 10.0)
    old = UpdateInfo("a", part(store, 4.0), {"task": 5}, {"trained_score": 0.1}, staleness=3, base=first, factor=0.5)
    new = UpdateInfo("a", part(store, 14.0), {"task": 5}, {"trained_score": 0.9})
    for updates in ([old, new], [new, old]):
        state, record = aggregate_round(updates, store, now)
        assert weights(store, state) == [13.0]  # 10 + 1/2 4 + 1/2 0.5 4
        assert record["parts"]["task"]["devices"] == {"a": 0.5, "a~3": 0.5}
    with pytest.raises(ValueError, match="appears twice"):
        aggregate_round([new, new], store, now)


def test_a_servers_optimiser_steps_along_the_damped_change(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    first, now = part(store, 0.0), part(store, 10.0)
    late = UpdateInfo("a", part(store, 4.0), {"task": 1}, staleness=3, base=first, factor=0.5)
    state, _ = aggregate_round([late], store, now, {"optimise": {"momentum": {"lr": 0.5, "beta": 0.9}}})
    assert weights(store, state) == [11.0]  # 10 + 0.5 (0.5 4)


def test_counts_are_the_devices_ids_the_servers_and_a_variance_stays_one(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)

    def norm(var: float, batches: int) -> dict[str, Any]:
        counts = {"num_batches_tracked": np.array([batches]), "position_ids": np.array([batches])}
        return {"running_var": np.array([var], np.float32), **counts}

    first, now = part(store, 0.0, **norm(9.0, 1)), part(store, 0.0, **norm(1.0, 5))
    late = UpdateInfo("a", part(store, 0.0, **norm(2.0, 3)), {"task": 1}, staleness=3, base=first, factor=0.5)
    state, _ = aggregate_round([late], store, now)
    tensors = decode_part(store.read(state["task"].id))
    assert tensors["running_var"].tolist() == [1.5]  # half way from 1 to 2, not 1 + 0.5 (2 - 9)
    assert tensors["num_batches_tracked"].tolist() == [3]
    assert tensors["position_ids"].tolist() == [5], "a device's word on what nothing trains ends every forward pass"


def test_late_prototypes_count_for_fewer_samples(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)

    def table(value: float, count: float) -> Manifest:
        means = ClassMeans(np.full((1, 2), value, np.float32), np.array([count], np.float32))
        return {"prototypes": store.put(encode_part(to_tensors({"acc": means})))}

    updates = [UpdateInfo("a", table(1.0, 10.0)), UpdateInfo("b", table(4.0, 20.0), staleness=3, factor=0.5)]
    state, _ = aggregate_round(updates, store, {}, {"prototypes": {"class_mean": {}}})
    merged = from_tensors(decode_part(store.read(state["prototypes"].id)))["acc"]
    assert merged.means.tolist() == [[2.5, 2.5]]  # (10 x 1 + 20/2 x 4) / 20
    assert merged.counts.tolist() == [20.0]


def test_a_late_update_that_does_not_fit_is_left_out_and_named(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    now = part(store, 10.0)
    good = UpdateInfo("a", part(store, 12.0), {"task": 1})
    bad = UpdateInfo("b", part(store, 1.0, 2.0), {"task": 1}, staleness=1, base=now, factor=0.5)
    state, record = aggregate_round([good, bad], store, now)
    assert weights(store, state) == [12.0]
    assert [(r["device"], r["reason"]) for r in record["refused"]] == [("b~1", "shape")]


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        ({"w": [1.0, 2.0, 3.0]}, "shape"),  # an array of another length cannot be moved either
        ({"w": [[1.0], [2.0]]}, "shape"),
        ({"w": [1.0, 2.0], "b": [1.0]}, "names"),
        ({"b": [1.0]}, "names"),
    ],
)
def test_whatever_a_late_update_brings_instead_is_refused_before_it_is_moved(
    spoiled: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    store = ObjectStore(tmp_path)
    first, now = part(store, 0.0, 0.0), part(store, 4.0, 8.0)
    tensors = {name: np.array(values, np.float32) for name, values in spoiled.items()}
    late = UpdateInfo("b", {"task": store.put(encode_part(tensors))}, {"task": 1}, staleness=3, base=first, factor=0.5)
    state, record = aggregate_round([UpdateInfo("a", part(store, 6.0, 8.0), {"task": 1}), late], store, now)
    assert weights(store, state) == [6.0, 8.0]
    assert [(r["device"], r["reason"]) for r in record["refused"]] == [("b~3", reason)]
