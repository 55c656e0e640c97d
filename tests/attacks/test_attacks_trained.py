"""The bounds on updates and prototypes against what real training makes of real parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from training_fixture import dataset, job, parts_of

from coordinator.core.outliers import clips, out_of_line
from coordinator.core.state import BUFFERS_OF, Changes
from coordinator.runtime.validate_update import changes_of, clipped_change, opposed
from edgefl.plan.job import RoundPolicy
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.prototypes.table import ClassMeans, from_tensors, to_tensors
from edgefl.records import Manifest
from edgefl.storage.objects import ObjectStore
from edgefl.training.local_round import train_round

MOST = RoundPolicy().largest_change
RATES = {"encoder": 1e-3, "head": 1e-3}


def stored(store: ObjectStore, parts: dict[str, dict[str, np.ndarray]]) -> Manifest:
    return {part: store.put(encode_part(tensors)) for part, tensors in parts.items()}


def trained(store: ObjectStore, samples: int, epochs: int, salt: str) -> Changes:
    made = job(lr=RATES, epochs=epochs)
    before = parts_of(made)
    result = train_round(made, dataset(samples, seed=len(salt)), before, salt=salt)
    return changes_of(store, stored(store, result.parts), stored(store, before))


def test_noise_in_place_of_weights_is_out_of_line_and_ninety_times_the_steps_are_not(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    honest = {
        "a": trained(store, 12, 1, "a"),
        "bb": trained(store, 12, 1, "bb"),
        "much": trained(store, 54, 20, "much"),
    }
    samples = {"a": 12, "bb": 12, "much": 54, "evil": 12}
    assert out_of_line(honest, MOST, {name: samples[name] for name in honest}) == {}
    assert clips(honest, RoundPolicy()).keys() == {"much"}
    before = parts_of(job())
    rng = np.random.default_rng(0)
    noise = {
        part: {name: rng.normal(size=tensor.shape).astype(tensor.dtype) for name, tensor in tensors.items()}
        for part, tensors in before.items()
        if part in honest["a"]
    }
    sent = changes_of(store, stored(store, noise), stored(store, before))
    assert list(out_of_line({**honest, "evil": sent}, MOST, samples)) == ["evil"]


def test_prototypes_of_a_device_alone_are_held_against_their_width_and_the_table_it_was_offered(tmp_path: Path) -> None:
    """Means of sixteen values around 2.5 are longer than ten: an honest device alone was quarantined for them."""
    store = ObjectStore(tmp_path)

    def table(value: float) -> Manifest:
        means = ClassMeans(np.full((2, 16), value, np.float32), np.full(2, 5, np.float32))
        return stored(store, {"prototypes": to_tensors({"acc": means})})

    for value, offered, refused in ((2.6, None, False), (11.0, None, True), (90.0, 10.0, False), (110.0, 10.0, True)):
        found = out_of_line({"a": changes_of(store, table(value), table(offered) if offered else {})}, MOST)
        assert ("a" in found) == refused, (value, offered)


def test_weights_and_buffers_of_a_part_are_measured_apart(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    before = {"w": np.zeros(4, np.float32), "running_var": np.ones(4, np.float32), "n": np.zeros(1, np.int64)}
    after = {"w": np.full(4, 3, np.float32), "running_var": np.full(4, 5, np.float32), "n": np.ones(1, np.int64)}
    found = changes_of(store, stored(store, {"task": after}), stored(store, {"task": before}))
    # ||3, 3, 3, 3|| = 6 from ||0|| = 0; ||4, 4, 4, 4|| = 8 from ||1, 1, 1, 1|| = 2
    assert {part: (change.norm, change.base) for part, change in found.items()} == {
        "task": (6.0, 0.0),
        BUFFERS_OF + "task": (8.0, 2.0),
    }


def test_a_class_of_which_a_device_has_one_sample_stays_on_it() -> None:
    """Ten samples of x, one of y, none of z: the mean of the one would be that sample."""
    data = dataset(11, labels=[0] * 10 + [1])
    sent = {}
    for least in (1.0, 2.0):
        made = job(batch_size=5, prototypes={"class_mean": {"weighting": "modality", "min_count": least}})
        sent[least] = from_tensors(train_round(made, data, parts_of(made)).parts["prototypes"])
    assert [table.counts.tolist() for table in sent[1.0].values()] == [[10.0, 1.0, 0.0]] * 3
    assert [table.counts.tolist() for table in sent[2.0].values()] == [[10.0, 0.0, 0.0]] * 3
    for name, table in sent[2.0].items():
        assert not table.means[1].any()
        assert np.array_equal(table.means[0], sent[1.0][name].means[0])
    made = job(batch_size=5, prototypes={"class_mean": {}})
    old = from_tensors(train_round(made, data, parts_of(made)).parts["prototypes"])
    assert old["a"].counts.tolist() == [10.0, 0.0, 0.0], "a coordinator that knows no such option"


def test_classes_of_few_samples_stay_on_a_device_unless_a_recipe_asks_for_them() -> None:
    """Of a mean of two samples, who knows one has the other; the default keeps classes of fewer than five."""
    data = dataset(16, labels=[0] * 10 + [1] * 4 + [2] * 2)
    made = job(batch_size=5, prototypes={"class_mean": {}})
    sent = from_tensors(train_round(made, data, parts_of(made)).parts["prototypes"])
    assert [table.counts.tolist() for table in sent.values()] == [[10.0, 0.0, 0.0]] * 3


def test_a_clipped_change_is_scaled_and_of_one_that_opposes_the_others_nothing_is_left(tmp_path: Path) -> None:
    """From (1, 1) the others go to (2, 1); along to (9, 1), at 1/4 to (3, 1); against to (-7, 1)."""
    store = ObjectStore(tmp_path)

    def part(first: float, variance: float = 1.0) -> Manifest:
        values = {"w": np.array([first, 1.0], np.float32), "running_var": np.array([variance], np.float32)}
        return stored(store, {"task": values | {"n": np.array([7], np.int64)}})

    base = part(1.0)
    sent = [part(2.0), part(2.0), part(9.0, 5.0), part(-7.0)]
    assert opposed(store, [(one, base) for one in sent], [2, 3]) == {3}
    assert opposed(store, [(one, base) for one in sent[2:]], [0, 1]) == set(), "there is nothing to oppose"
    made = clipped_change(store, sent[2], base, {"task": 0.25, BUFFERS_OF + "task": 0.5})
    tensors = decode_part(store.read(made["task"].id))
    assert {name: value.tolist() for name, value in tensors.items()} == {"w": [3, 1], "running_var": [3], "n": [7]}
    none = clipped_change(store, sent[3], base, {"task": 0.0, BUFFERS_OF + "task": 0.0})
    assert none == base
