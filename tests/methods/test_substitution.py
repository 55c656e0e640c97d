"""MMiC inside clusters: who lends the poverty layer, who trains together, and what report and coordinator say of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from memory_fleet import plan_of, run_fleet, share
from report_fixture import run_report

from edgefl.aggregation.history import UpdateInfo
from edgefl.aggregation.server_state import of_cluster
from edgefl.protocol.tensors import encode_part
from edgefl.records import Manifest
from edgefl.registry import choose
from edgefl.report.repairs import repairs
from edgefl.storage.objects import ObjectStore

PART = "task"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "objects")


def brought(store: ObjectStore, device: str, value: float, **told: object) -> UpdateInfo:
    """An update of one part with one weight tensor, all of whose values are ``value``."""
    ref = store.put(encode_part({"weight": np.full((2, 2), value, np.float32), "bias": np.zeros(2, np.float32)}))
    return UpdateInfo(device, {PART: ref}, {PART: 10}, **told)  # type: ignore[arg-type]


def mended(
    store: ObjectStore,
    updates: list[UpdateInfo],
    clusters: dict[str, int],
    away: dict[str, float] | None = None,
    sent: dict[str, float] | None = None,
    **options: str,
):
    """(device -> value that stands in for its layer, the record of it). ``away``: samples of devices without update.

    ``sent``: prefix of the state -> values of the part of that audience, beside zeros for the others.
    """
    values = {"": 0.0, **(sent or {})}
    state: Manifest = {prefix + PART: brought(store, "", value).manifest[PART] for prefix, value in values.items()}
    known = {u.device: u.weight for u in updates} | (away or {})
    slot = choose("repair", {"repair": {"poverty": dict(options)}})
    found, record = slot.bind(slot.method.mend)(updates, state, store, clusters, known)
    return {device: float(tensors["weight"][0, 0]) for (device, _), tensors in found.items()}, record


def test_a_device_without_a_cluster_is_mended_by_no_clusters_donors(store: ObjectStore) -> None:
    updates = [
        brought(store, "donor-0", 2.0),
        brought(store, "donor-1", 4.0),
        brought(store, "poor-0", 9.0, complete=False, poverty=0),
        brought(store, "stray", 9.0, complete=False, poverty=0),
    ]
    found, told = mended(store, updates, {"donor-0": 0, "donor-1": 1, "poor-0": 0})
    assert found == {"poor-0": 2.0}
    assert told["stray"] == {"kept": "it belongs to no cluster"}


def test_without_clusters_all_devices_are_one(store: ObjectStore) -> None:
    updates = [brought(store, "donor", 2.0), brought(store, "poor", 9.0, complete=False, poverty=0)]
    assert mended(store, updates, {})[0] == {"poor": 2.0}


def test_a_device_without_samples_of_the_part_lends_nothing(store: ObjectStore) -> None:
    """Nor does one whose samples of it brought no part."""
    updates = [
        brought(store, "donor", 2.0),
        msgspec.structs.replace(brought(store, "empty", 4.0), samples={PART: 0}),
        msgspec.structs.replace(brought(store, "away", 6.0), manifest={}),
        brought(store, "poor", 9.0, complete=False, poverty=0),
    ]
    found, told = mended(store, updates, {})
    assert (found, told["poor"]) == ({"poor": 2.0}, {"part": PART, "tensor": "weight", "donors": ["donor"]})


def test_where_every_device_loses_samples_the_less_affected_lend(store: ObjectStore) -> None:
    """Changes .1, .2, .3: b takes a's layer, c the mean of a's and b's, (2 + 4) / 2; a is the least affected."""
    updates = [
        brought(store, name, value, complete=False, poverty=0, poverty_change=change)
        for name, value, change in (("a", 2.0, 0.1), ("b", 4.0, 0.2), ("c", 9.0, 0.3))
    ]
    found, told = mended(store, updates, dict.fromkeys("abc", 5))
    assert found == {"b": 2.0, "c": 3.0}
    assert told["a"] == {"kept": "no device of its cluster had complete data or was less affected"}
    assert told["c"] == {"part": PART, "tensor": "weight", "donors": ["a", "b"]}
    found, told = mended(store, updates, dict.fromkeys("abc", 5), donors="complete")
    assert found == {}
    assert {one["kept"] for one in told.values()} == {"no device of its cluster had complete data"}


def test_everyone_of_a_cluster_with_another_poverty_layer_lends_as_in_the_authors_code(store: ObjectStore) -> None:
    """a and b share their layer; c has none and holds 6, away holds the layer as sent, 0, with three times c's samples:
    (10 x 6 + 30 x 0) / 40 = 1.5. far is of another cluster, new has never trained.
    """
    poor = {"complete": False, "poverty": 0}
    updates = [brought(store, "a", 2.0, **poor), brought(store, "b", 4.0, **poor), brought(store, "c", 6.0)]
    updates += [brought(store, "far", 9.0, **poor)]
    clusters = {**dict.fromkeys(["a", "b", "c", "away", "new"], 0), "far": 1}
    found, told = mended(store, updates, clusters, {"away": 30.0}, donors="cluster")
    assert found == {"a": 1.5, "b": 1.5}
    assert told["a"] == {"part": PART, "tensor": "weight", "donors": ["away", "c"]}
    assert told["far"] == {"kept": "no other device of its cluster trained the layer's part"}
    found, told = mended(store, updates[:2], {"a": 0, "b": 0}, donors="cluster")
    assert (found, told["b"]) == ({}, {"kept": "all others of its cluster have the same poverty layer"})
    assert mended(store, updates[:1], {}, {"away": 30.0}, donors="cluster")[0] == {"a": 0.0}  # no clusters: all are one


def test_an_absent_donor_lends_what_it_was_sent_not_the_global_model(store: ObjectStore) -> None:
    """The model of its cluster 0 is 7, of cluster 1 it is 8; away is of the former."""
    updates = [brought(store, "a", 2.0, complete=False, poverty=0)]
    sent = {of_cluster(0): 7.0, of_cluster(1): 8.0}
    clusters = {"a": 0, "away": 0, "other": 1}
    found, _ = mended(store, updates, clusters, {"away": 10.0, "other": 10.0}, sent, donors="cluster")
    assert found == {"a": 7.0}


def test_who_has_no_poverty_layer_is_told_with_the_reason(store: ObjectStore) -> None:
    updates = [
        brought(store, "alone", 1.0, complete=False, poverty=-1),
        brought(store, "odd", 1.0, complete=False, poverty=7),
        brought(store, "whole", 1.0),
    ]
    _, told = mended(store, updates, {})
    assert told == {
        "alone": {"kept": "no batch that lacks modalities came after a complete one"},
        "odd": {"kept": "it names a layer that it did not train"},
    }


@pytest.mark.slow
def test_where_every_device_loses_samples_clusters_train_together_and_lend(ram_path: Path) -> None:
    """Eight devices, of whose samples each loses either modality with probability .2, as in av; four a round."""
    settings = [
        "training.batch_size=6",
        "training.rounds=[0, 4]",
        "evaluate=stage",
        "slots.cluster={lsh: {clusters: 2}}",
    ]
    plan = plan_of(ram_path, "mmic", "ab", 8, [*settings, "slots.select={banzhaf: {share: 0.5, warmup_rounds: 2}}"])
    report = run_fleet(ram_path, plan, {f"d{i}": share(36, {"a": 0.8, "b": 0.8}, seed=i) for i in range(8)})
    assert report.status == "done"
    rounds = [row for row in report.rounds if row.status == "done"]
    replaced = [device for row in rounds for device, told in row.record["repaired"].items() if "tensor" in told]
    assert len(replaced) >= 3  # with donors: complete none
    known: dict[str, int] = {}
    for row in rounds:
        groups = [known.get(device, -1) for device in row.participants]
        whole = [known.get(f"d{i}", -1) for i in range(8)]
        assert all(groups.count(m) >= min(2, whole.count(m)) for m in groups if m >= 0)  # -1: no cluster is known
        known = row.record["clusters"]
    assert not any("repair" in event.data.get("text", "") for event in report.events if event.kind == "warning")


def test_a_run_in_which_nothing_can_be_replaced_says_why(ram_path: Path) -> None:
    plan = plan_of(ram_path, "mmic", "ab", 2, ["training.batch_size=6", "training.rounds=[0, 1]", "slots.select=all"])
    report = run_fleet(ram_path, plan, {"left": share(24, {"a": 1.0}, 1), "right": share(24, {"a": 1.0, "b": 1.0}, 2)})
    told = [event.data["text"] for event in report.events if event.kind == "warning"]
    assert any("repair: poverty will replace nothing, or little: no device has both" in text for text in told)
    assert report.rounds[-1].record["repaired"] == {
        "left": {"kept": "no batch that lacks modalities came after a complete one"}
    }
    grid = repairs(report)
    assert [[cell.text for cell in row] for row in grid.rows] == [
        ["replaced", "0", "0", ""],
        ["kept: no batch that lacks modalities came after a complete one", "1", "1", "1"],
    ]


def test_the_report_counts_substitutions_and_why_others_were_not_made() -> None:
    report = run_report()
    assert not repairs(report).rows  # the recipe repairs nothing
    layer = {"part": PART, "tensor": "weight", "donors": ["x"]}
    rounds = [
        {"a": layer, "b": {"kept": "it belongs to no cluster"}},
        {},
        {"a": layer, "b": layer, "c": {"kept": "it belongs to no cluster"}},
    ]
    rows = [
        msgspec.structs.replace(row, record={**row.record, "repaired": told})
        for row, told in zip(report.rounds, rounds, strict=False)
    ]
    grid = repairs(msgspec.structs.replace(report, rounds=tuple(rows)))
    assert [[cell.text for cell in row] for row in grid.rows] == [
        ["replaced", "3", "2", "1, 3"],
        ["kept: it belongs to no cluster", "2", "2", "1, 3"],
    ]
