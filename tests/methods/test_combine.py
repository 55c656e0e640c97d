"""Robust combination: against Flower's values, what a liar can reach, partial parts, buffers, records and refusals."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.aggregation.aggregate import aggregate_round
from edgefl.aggregation.history import UpdateInfo
from edgefl.aggregation.mean import layout_of
from edgefl.aggregation.pieces import Changes, changes_of
from edgefl.config.profiles import load_run
from edgefl.config.slots import conflicts
from edgefl.errors import ConfigError
from edgefl.methods.robust import krum, norm_clipping, trimmed
from edgefl.plan.compile import default_norm
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.records import Manifest
from edgefl.registry import choose, default, methods
from edgefl.roles import ROLES
from edgefl.storage.objects import ObjectStore

FLOWER = json.loads((Path(__file__).parents[1] / "oracles/robust.json").read_text())["cases"]
ROBUST = {"median": {}, "trimmed_mean": {"share": 0.2}, "krum": {}, "norm_clipping": {}}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "objects")


def part(*values: float, **buffers: Any) -> dict[str, np.ndarray]:
    return {"w": np.array(values, np.float32), **{name: np.asarray(value) for name, value in buffers.items()}}


def sent(
    store: ObjectStore, device: str, parts: Mapping[str, Mapping[str, np.ndarray]], samples: int = 10
) -> UpdateInfo:
    manifest = {name: store.put(encode_part(tensors)) for name, tensors in parts.items()}
    return UpdateInfo(device, manifest, dict.fromkeys(parts, samples))


def state_of(store: ObjectStore, **parts: Mapping[str, np.ndarray]) -> Manifest:
    return {name: store.put(encode_part(tensors)) for name, tensors in parts.items()}


def value(store: ObjectStore, state: Manifest, name: str = "task", tensor: str = "w") -> Any:
    return decode_part(store.read(state[name].id))[tensor].tolist()


def round_of(
    store: ObjectStore, rows: Mapping[str, Any], how: str, before: float = 0.0, **options: float
) -> tuple[Any, dict[str, Any]]:
    """The next weights of one part that began as ``before``, and the round's record."""
    size = len(next(iter(rows.values())))
    previous = state_of(store, task=part(*[before] * size))
    updates = [sent(store, device, {"task": part(*row)}) for device, row in rows.items()]
    state, record = aggregate_round(updates, store, previous, {"combine": {how: options}})
    return value(store, state), record


@pytest.mark.parametrize("case", FLOWER, ids=lambda case: f"{case['f']} of {len(case['devices'])}")
@pytest.mark.parametrize("name", ["median", "trimmed_mean", "krum", "multi_krum"])
def test_the_new_part_is_flowers(store: ObjectStore, case: dict[str, Any], name: str) -> None:
    """Flower 1.42.0's aggregate_median, aggregate_trimmed_avg and aggregate_krum on the same rows."""
    rows = {f"d{i}": row for i, row in enumerate(case["devices"])}
    share = case["f"] / len(rows)
    options = {"median": {}, "krum": {"share": share, "keep": 1.0}}.get(name, {"share": share})
    found, _ = round_of(store, rows, name.removeprefix("multi_"), before=0.5, **options)
    np.testing.assert_allclose(found, case[name], rtol=2e-6)


def test_norm_clipping_by_hand(store: ObjectStore) -> None:
    """From (1, 1): changes (3, 4), (0, 1), (0, -1) of norms 5, 1, 1; M = 2 leaves (1.2, 1.6): mean (0.4, 1.6 / 3)."""
    rows = {"a": [4, 5], "b": [1, 2], "c": [1, 0]}
    found, record = round_of(store, rows, "norm_clipping", before=1.0, norm=2.0)
    np.testing.assert_allclose(found, [1 + 0.4, 1 + 1.6 / 3], rtol=1e-6)
    assert record["screened"]["factors"] == {"a": pytest.approx(0.4)}
    assert record["screened"]["norms"] == pytest.approx({"a": 5, "b": 1, "c": 1})
    _, record = round_of(store, rows, "norm_clipping", before=1.0)  # M the median: 1
    assert (record["screened"]["bound"], record["screened"]["factors"]) == (pytest.approx(1), {"a": pytest.approx(0.2)})


def test_an_update_of_an_earlier_round_is_clipped_once_more(store: ObjectStore) -> None:
    """Made from 2, sent as 10, damped by 0.5: a change of 4 from the present 0, of which M = 1 leaves a quarter."""
    previous, earlier = state_of(store, task=part(0.0)), state_of(store, task=part(2.0))
    late = UpdateInfo("late", state_of(store, task=part(10.0)), {"task": 10}, staleness=1, base=earlier, factor=0.5)
    updates = [sent(store, "b", {"task": part(1.0)}), late]
    state, record = aggregate_round(updates, store, previous, {"combine": {"norm_clipping": {"norm": 1.0}}})
    assert record["screened"]["factors"] == {"late~1": pytest.approx(0.25)}
    assert value(store, state) == [pytest.approx(1.0)]


numbers = st.floats(-1e6, 1e6, width=32)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(numbers, min_size=4, max_size=9),
    st.floats(-(2.0**60), 2.0**60, width=32),
    st.integers(0, 8),
    st.booleans(),
)
def test_one_liar_reaches_no_further_than_the_honest(honest: list[float], lie: float, place: int, trim: bool) -> None:
    values = list(honest)
    values.insert(place % (len(values) + 1), lie)
    loaders = {str(i): lambda one=one: part(one) for i, one in enumerate(values)}
    layout = layout_of(part(0.0))
    combined, _ = trimmed.trimmed_mean(loaders, layout, share=0.2) if trim else trimmed.median(loaders, layout)
    assert min(honest) <= combined["w"][0] <= max(honest)


@pytest.mark.parametrize("how", ["median", "trimmed_mean"])
def test_pieces_and_the_order_of_devices_change_no_bit(how: str) -> None:
    rng = np.random.default_rng(1)
    tensors = [
        {"a": rng.normal(size=(5, 7)).astype(np.float32), "n": np.array(i), "z": np.float32(rng.normal(size=3))}
        for i in range(6)
    ]
    layout, cut = layout_of(tensors[0]), 9 if how == "median" else 1
    whole, shares = trimmed.trim({str(i): lambda t=t: t for i, t in enumerate(tensors)}, layout, cut)
    random.Random(2).shuffle(tensors)
    pieced, _ = trimmed.trim({str(i): lambda t=t: t for i, t in enumerate(tensors)}, layout, cut, budget_bytes=1000)
    assert {name: one.tobytes() for name, one in whole.items()} == {n: one.tobytes() for n, one in pieced.items()}
    assert sum(shares.values()) == pytest.approx(4 if how == "median" else 2)


@pytest.mark.parametrize("how", ROBUST)
def test_who_came_first_changes_no_bit_of_the_round(store: ObjectStore, how: str) -> None:
    rng = np.random.default_rng(3)
    previous = state_of(store, task=part(*rng.normal(size=50)), other=part(*rng.normal(size=20)))
    updates = [
        sent(store, f"d{i}", {"task": part(*rng.normal(size=50)), "other": part(*rng.normal(size=20))}, 10 + i)
        for i in range(7)
    ]
    found = []
    for seed in range(3):
        random.Random(seed).shuffle(updates)
        found.append(aggregate_round(updates, store, previous, {"combine": {how: ROBUST[how]}}))
    assert found[0] == found[1] == found[2]


def test_a_part_is_combined_over_those_that_trained_it(store: ObjectStore) -> None:
    """Of two devices the median is the mean; a device with ten times the samples counts as one."""
    previous = state_of(store, **{"a/stage1": part(0.0), "b/stage1": part(0.0), "task": part(0.0)})
    updates = [
        sent(store, "x", {"a/stage1": part(1.0), "task": part(9.0)}, 100),
        sent(store, "y", {"a/stage1": part(4.0), "task": part(2.0)}),
        sent(store, "z", {"b/stage1": part(8.0), "task": part(1.0)}),
    ]
    state, record = aggregate_round(updates, store, previous, {"combine": {"median": {}}})
    assert [value(store, state, one) for one in ("a/stage1", "b/stage1", "task")] == [[2.5], [8.0], [2.0]]
    assert record["parts"]["a/stage1"]["devices"] == {"x": 0.5, "y": 0.5}
    assert record["parts"]["task"]["trimmed"] == {"x": 1.0, "y": 0.0, "z": 1.0}


def test_krum_compares_what_two_devices_both_trained(store: ObjectStore) -> None:
    """Two modalities; d4 flips what it changes. The part that it alone trained stays as it was."""
    both, left = {"a/stage1": part(1.0, 1.0), "task": part(1.0)}, {"b/stage1": part(3.0), "task": part(1.1)}
    previous = state_of(
        store, **{"a/stage1": part(0.0, 0.0), "b/stage1": part(0.0), "c/stage1": part(0.0), "task": part(0.0)}
    )
    updates = [sent(store, f"d{i}", both if i % 2 else left) for i in range(4)]
    updates.append(sent(store, "d4", {"c/stage1": part(-9.0), "task": part(-1.0)}, 1000))
    state, record = aggregate_round(updates, store, previous, {"combine": {"krum": {}}})
    assert record["screened"]["factors"] == {"d4": 0.0}
    assert value(store, state) == [pytest.approx(1.05)]
    assert state["c/stage1"] == previous["c/stage1"]
    assert record["kept"] == {"c/stage1": "every device that trained it was left out"}
    assert not record["refused"]


def test_distances_are_means_over_the_common_weights() -> None:
    """1 and 2 share two of 0 and 3 apart: (0 + 9) / 2; 1 and 3 share nothing."""
    base = {"p": part(1.0, 1.0), "q": part(1.0)}
    sent_parts = {"p": {"1": part(0.0, 0.0), "2": part(0.0, 3.0)}, "q": {"3": part(5.0)}}
    changes = {
        name: changes_of({d: lambda t=t: t for d, t in own.items()}, partial(dict, base[name]), layout_of(base[name]))
        for name, own in sent_parts.items()
    }
    distances = krum.squared_distances(changes, ["1", "2", "3"])
    assert distances[0, 1] == distances[1, 0] == pytest.approx(4.5)
    assert np.isinf(distances[0, 2])


def test_of_fewer_than_five_krum_leaves_nobody_out_and_says_so(store: ObjectStore) -> None:
    found, record = round_of(store, {"a": [1.0], "b": [1.0], "c": [1.0], "d": [9.0]}, "krum", keep=1.0)
    assert found == [3.0]
    assert record["screened"]["factors"] == {}
    assert "Of 4 updates none is left out" in record["screened"]["note"]


def test_of_one_or_two_devices_no_norm_is_usual(store: ObjectStore) -> None:
    _, record = round_of(store, {"a": [1.0], "b": [9.0]}, "norm_clipping")
    assert record["screened"]["factors"] == {}
    assert "Of 2 updates no length is usual" in record["screened"]["note"]
    assert norm_clipping.norm_clipping({})[0] == {}


@pytest.mark.parametrize("how", ["median", "trimmed_mean"])
def test_buffers_are_combined_as_weights_and_integers_are_some_devices(store: ObjectStore, how: str) -> None:
    def of(scale: float, count: int, flag: bool) -> dict[str, np.ndarray]:
        variance = np.full(1, scale, np.float32)
        return {
            **part(scale),
            "n.running_var": variance,
            "n.num_batches_tracked": np.array(count),
            "on": np.array(flag),
        }

    previous = state_of(store, task=of(0.0, 0, False))
    lie = sent(store, "a", {"task": of(-50.0, -(2**60), True)})
    updates = [lie, *(sent(store, f"d{i}", {"task": of(1.0, 7, False)}) for i in range(4))]
    state, _ = aggregate_round(updates, store, previous, {"combine": {how: {}}})
    tensors = decode_part(store.read(state["task"].id))
    assert tensors["n.running_var"].tolist() == [1.0]
    assert (tensors["n.num_batches_tracked"].tolist(), tensors["n.num_batches_tracked"].dtype) == (7, np.int64)
    assert (tensors["on"].tolist(), tensors["on"].dtype) == (False, np.bool_)


@pytest.mark.parametrize("how", ROBUST)
def test_what_cannot_be_calculated_with_is_refused_and_the_others_count(store: ObjectStore, how: str) -> None:
    rows = {"a": [1.0, 2.0], "b": [1.0, 2.0], "broken": [float("nan"), 2.0]}
    found, record = round_of(store, rows, how, before=1.0)
    assert found == [1.0, 2.0]
    assert [(one["device"], one["reason"]) for one in record["refused"]] == [("broken", "not_finite")]
    assert record["parts"]["task"]["devices"] == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize("how", ["median", "trimmed_mean", "krum"])
@pytest.mark.parametrize("weight", ["fediot", "cka", "own"])
def test_a_weight_without_effect_is_refused(how: str, weight: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run("demo", [f"slots.combine={how}", f"slots.weight={weight}"])
    assert f"{how} counts all devices alike" in str(caught.value)


def test_local_training_combines_nothing() -> None:
    with pytest.raises(ConfigError, match="weight: own exchanges nothing; set combine: mean"):
        load_run("demo", ["slots.combine=norm_clipping", "slots.weight=own", "slots.prototypes=none"])


@pytest.mark.parametrize(("how", "norm"), [("median", "layer"), ("trimmed_mean", "layer"), ("krum", "batch")])
def test_what_is_no_mean_gets_heads_without_statistics(how: str, norm: str) -> None:
    assert default_norm({"combine": {how: {}}}) == norm


@pytest.mark.parametrize("name", ["krum", "norm_clipping"])
@pytest.mark.parametrize(
    ("other", "way_out"),
    [
        ({"cluster": {"lsh": {"models": "own"}}}, "models: shared"),
        ({"weight": {"relationship": {}}}, "weight: samples"),
    ],
)
def test_changes_of_several_models_are_not_compared(name: str, other: dict, way_out: str) -> None:
    recipe = {role: {default(role): {}} for role in ROLES} | other | {"combine": {name: {}}}
    assert way_out in " ".join(problem.message for problem in conflicts(recipe))


def test_who_counts_alike_has_one_vote_a_round() -> None:
    """A late update beside a device's newest would be a second one."""
    assert all(methods("combine")[name].per_round for name in ("median", "trimmed_mean", "krum"))


def test_nothing_is_clipped_where_most_changed_nothing() -> None:
    changes = {"p": Changes(["a", "b", "c"], np.diag([0.0, 0.0, 4.0]), 1)}
    factors, record = norm_clipping.norm_clipping(changes)
    assert factors == {}
    assert "none is clipped" in str(record["note"])


def test_krum_s_option_of_absent_devices_acts() -> None:
    for absent, kept in (("keep", True), ("leave_out", False)):
        assert choose("combine", {"combine": {"krum": {"absent": absent}}}).flag("keeps") is kept
