"""What counts how much after the uploads: FedIoT's weights, agreement by CKA, and poverty substitution."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import procrustes
from scipy.stats import ortho_group
from sklearn.metrics.pairwise import linear_kernel
from sklearn.preprocessing import KernelCenterer

from edgefl.aggregation.mean import MisfitError
from edgefl.errors import ModelError
from edgefl.methods.fedavg.samples import by_samples
from edgefl.methods.fediot import fediot
from edgefl.methods.fedmvp.cka import centred_gram, cka_weights
from edgefl.methods.mmic.poverty_substitution import Substitution, plan_substitution, substitute, unlikely

ORACLES = json.loads((Path(__file__).parents[1] / "oracles" / "oracles.json").read_text())
CASES = {case["id"]: case for case in ORACLES["cases"]}
NEAR = ORACLES["tolerance"]


# FedIoT


def test_fediot_by_hand():
    """10 x 4 : 20 : 0, so 40/60 and 20/60."""
    samples, modalities = {"both": 10, "one": 20, "none": 0}, {"both": 2, "one": 1, "none": 2}
    assert fediot(samples, modalities, factor=4) == pytest.approx({"both": 2 / 3, "one": 1 / 3})
    assert fediot(samples, {**modalities, "both": 3}, factor=4) == pytest.approx({"both": 2 / 3, "one": 1 / 3})
    assert fediot(samples, modalities) == pytest.approx({"both": 1000 / 1020, "one": 20 / 1020})


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 3)), max_size=6), st.floats(0.1, 1000))
def test_fediot_sums_to_one_and_is_by_samples_when_the_devices_are_alike(pairs, factor):
    samples = {str(i): count for i, (count, _) in enumerate(pairs)}
    modalities = {str(i): many for i, (_, many) in enumerate(pairs)}
    got = fediot(samples, modalities, factor=factor)
    assert list(got) == list(by_samples(samples))
    assert sum(got.values()) == pytest.approx(1 if got else 0)
    for alike in (dict.fromkeys(samples, 1), dict.fromkeys(samples, 2)):
        assert fediot(samples, alike, factor=factor) == pytest.approx(by_samples(samples))
    assert fediot(samples, modalities, factor=1.0) == by_samples(samples)


def test_fediot_of_nobody_and_of_a_device_it_does_not_know():
    assert fediot({}, {}) == {}
    assert fediot({"a": 0}, {}) == {}
    assert fediot({"a": 3}, {"a": 2}, factor=0) == {}
    assert list(fediot({"b": 3, "a": 2}, {"a": 1, "b": 1})) == ["a", "b"]
    with pytest.raises(ModelError, match="modalities device 'b' trains is not known"):
        fediot({"c": 1, "a": 3, "b": 1}, {"a": 2})


# CKA


def linear_cka(x: np.ndarray, y: np.ndarray) -> float:
    return float((centred_gram("x", x) * centred_gram("y", y)).sum())


@pytest.mark.parametrize("case", ["cka-1", "cka-2"])
def test_oracle_linear_cka(case):
    inputs = CASES[case]["inputs"]
    assert linear_cka(np.array(inputs["x"]), np.array(inputs["y"])) == pytest.approx(CASES[case]["expect"], abs=NEAR)


def test_cka_by_hand():
    """Centred x = (-1, 0, 1); y = (1, -2, 1): their product is 0; y = (-1, -1, 2): 3^2 / (2 x 6)."""
    x = np.array([[4.0], [5.0], [6.0]])
    assert linear_cka(x, np.array([[1.0], [-2.0], [1.0]])) == pytest.approx(0)
    assert linear_cka(x, np.array([[0.0], [0.0], [3.0]])) == pytest.approx(0.75)


def test_cka_is_one_for_what_only_turns_scales_or_shifts_and_symmetric():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 4)), rng.normal(size=(9, 6))
    turned = 3 * x @ ortho_group.rvs(4, random_state=0) + 5
    assert procrustes(x, turned)[2] == pytest.approx(0)  # SciPy's word that they are the same shape
    assert linear_cka(x, x) == pytest.approx(1)
    assert linear_cka(x, turned) == pytest.approx(1)
    assert linear_cka(x, y) == pytest.approx(linear_cka(y, x))
    assert 0 < linear_cka(x, y) < 1


def test_cka_is_the_cosine_of_scikit_learns_centred_kernels():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(8, 20)) + 3, rng.normal(size=(8, 2))
    kernels = [KernelCenterer().fit_transform(linear_kernel(z)) for z in (x, y)]
    expected = (kernels[0] * kernels[1]).sum() / math.prod(np.linalg.norm(kernel) for kernel in kernels)
    assert linear_cka(x, y) == pytest.approx(expected)


@pytest.mark.parametrize("constant", [np.zeros((7, 3)), np.full((7, 3), 0.1, np.float32), np.full((7, 3), 0.1)])
def test_a_constant_representation_is_like_nothing(constant):
    other = np.random.default_rng(0).normal(size=(7, 3))
    assert linear_cka(constant, other) == 0
    assert linear_cka(constant, constant) == 0
    rounding = constant + 2.0**-26 * other.clip(-1, 1) * constant
    assert linear_cka(rounding, other) == 0
    assert linear_cka(1000 + other, other) == pytest.approx(1)
    spread = 2.0**-23 * np.array(
        [[1.0], [-1.0]]
    )  # the norm of 1 + spread is that of 1, the centred one's is 2^-23 of it
    assert linear_cka(1 + 0.9 * spread, spread) == 0
    assert linear_cka(1 + 1.1 * spread, spread) == pytest.approx(1)
    assert linear_cka(other[:1], other[1:2]) == 0


def test_cka_weights_by_hand():
    """s_ab = 0.75, s_ac = 0, s_bc = 0.25: sums 0.75, 1, 0.25."""
    outputs = {
        "a": np.array([[4.0], [5.0], [6.0]]),
        "b": np.array([[0.0], [0.0], [3.0]]),
        "c": np.array([[1.0, 1.0], [-2.0, -2.0], [1.0, 1.0]]),
    }
    odds = {"a": math.exp(0.75), "b": math.exp(1.0), "c": math.exp(0.25)}
    expected = {device: value / sum(odds.values()) for device, value in odds.items()}
    assert cka_weights(outputs) == pytest.approx(expected)
    assert list(cka_weights(dict(reversed(outputs.items()))).items()) == list(cka_weights(outputs).items())


def test_cka_weights_sum_to_one_and_are_even_for_equals_and_for_one():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3)).astype(np.float32)
    assert sum(cka_weights({str(i): rng.normal(size=(5, 3)) for i in range(6)}).values()) == pytest.approx(1)
    assert cka_weights({"a": x, "b": 2 * x, "c": x + 1}) == pytest.approx(dict.fromkeys("abc", 1 / 3))
    odds = {"a": math.e, "b": math.e, "c": 1.0}  # sums of similarities 1, 1 and 0
    expected = {device: value / sum(odds.values()) for device, value in odds.items()}
    assert cka_weights({"a": x, "b": x, "c": np.ones((5, 3))}) == pytest.approx(expected)
    fleet = cka_weights({"c": np.ones((5, 3)), **{str(i): x for i in range(800)}})  # exp(799) would overflow
    assert (fleet["c"], fleet["7"]) == pytest.approx((0, 1 / 800))
    assert cka_weights({"a": x}) == {"a": 1.0}
    assert cka_weights({}) == {}


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (np.zeros((4, 3)), "'b' has outputs on 4 probe pairs, 'a' on 5"),
        (np.zeros(5), r"'b' on the probe pairs are not finite numbers \[pairs, width\]: shape \[5\]"),
        (np.full((5, 3), np.nan), "'b' on the probe pairs are not finite"),
    ],
)
def test_outputs_that_cannot_be_compared_are_named(output, names):
    with pytest.raises(ModelError, match=names):
        cka_weights({"a": np.eye(5), "b": output})


# Poverty substitution

CLUSTERS = {"a": 0, "b": 0, "c": 0, "poor": 0, "far": 1, "lonely": 2, "self": 0}
LAYER = ("text/stage1", "mlp.weight")


def test_the_plan_names_donors_or_the_reason():
    poverty = dict.fromkeys(("poor", "lonely", "self", "stray"), LAYER)
    complete = ["c", "a", "far", "self", "nowhere"]
    assert plan_substitution(poverty, complete, CLUSTERS) == {
        "poor": Substitution(*LAYER, ("a", "c", "self")),
        "lonely": "no other device of its cluster trained the layer's part",
        "self": "it trained with complete data and needs no repair",
        "stray": "it belongs to no cluster",
    }
    assert plan_substitution({}, complete, CLUSTERS) == {}
    assert list(plan_substitution(dict.fromkeys("cab", LAYER), (), CLUSTERS)) == ["a", "b", "c"]


def test_the_plan_heeds_who_trained_the_part():
    def plan(**holders):
        return plan_substitution({"poor": LAYER}, ["a", "b"], CLUSTERS, holders)["poor"]

    part = LAYER[0]
    assert plan(**{part: {"poor", "b", "c"}}) == Substitution(*LAYER, ("b",))
    assert plan(**{part: {"poor", "c"}}) == "no device of its cluster had complete data"
    assert plan(**{part: {"a", "b"}}) == plan() == "it did not train the layer's part"


def test_less_affected_devices_lend_where_no_device_is_complete():
    def plan(complete, **changes):
        return plan_substitution({"poor": LAYER}, complete, CLUSTERS, None, {"poor": 0.3, **changes})["poor"]

    assert plan([], a=0.2, b=0.1, c=0.4, far=0.1) == Substitution(*LAYER, ("a", "b"))
    assert plan(["c"], a=0.2, c=0.0) == Substitution(*LAYER, ("c",))  # a complete one comes first
    assert plan(["far"], a=0.2) == "no device of its cluster had complete data"  # equation 11 alone
    assert plan([], a=0.3, b=0.0, c=math.nan) == "no device of its cluster had complete data or was less affected"
    assert plan([]) == "no device of its cluster had complete data or was less affected"
    old = plan_substitution({"poor": LAYER}, [], CLUSTERS, None, {"poor": 0.0, "a": 0.2})  # it did not say
    assert old["poor"] == "no device of its cluster had complete data or was less affected"


@pytest.mark.parametrize(
    ("samples", "donors", "told"),
    [
        ({"a": (9, 9, 9), "b": (9, 9, 9)}, "less_affected", "no device has samples that lack"),
        ({"a": (9, 0, 9), "b": (0, 9, 9)}, "less_affected", "no device has both"),
        ({"a": (9, 9, 9), "b": (0, 9, 9)}, "less_affected", "no device has both"),
        ({"a": (7, 8, 9)}, "less_affected", "one device alone"),
        ({"a": (7, 8, 9), "b": (8, 9, 9)}, "complete", "donors: less_affected"),
        ({"a": (7, 8, 9), "b": (8, 9, 9)}, "less_affected", ""),
        ({"a": (7, 8, 9), "b": (9, 9, 9)}, "complete", ""),
    ],
)
def test_data_tell_that_nothing_can_be_replaced(samples, donors, told):
    counts = {device: {"x": x, "y": y, "": n} for device, (x, y, n) in samples.items()}
    why = unlikely(counts, ["x", "y"], donors)
    assert told in why
    assert bool(why) == bool(told)


class Uploads:
    """Uploads of one part in two tensors; counts how often each donor's is loaded."""

    def __init__(self, **values: float) -> None:
        self.loaded: list[tuple[str, str]] = []
        self.tensors = {
            device: {"mlp.weight": np.full((2, 3), value, np.float32), "mlp.bias": np.full(2, -value, np.float32)}
            for device, value in values.items()
        }

    def __call__(self, device: str, part: str) -> dict[str, np.ndarray]:
        self.loaded.append((device, part))
        return self.tensors[device]


def test_substitution_by_hand():
    """(1 x 2 + 3 x 6) / 4 = 5 over the donors a and b alone, whatever else weighs."""
    uploads = Uploads(a=2, b=6, poor=99, other=99)
    plan = {
        "poor": Substitution(*LAYER, ("a", "b")),
        "other": Substitution(*LAYER, ("a", "b")),
        "lonely": "nobody is near",
    }
    got = substitute(uploads, plan, {"a": 1, "b": 3, "poor": 7, "other": 5})
    assert list(got) == ["other", "poor"]
    part, name, tensor = got["poor"]
    assert (part, name) == LAYER
    np.testing.assert_array_equal(tensor, np.full((2, 3), 5, np.float32))
    assert got["other"][2] is tensor
    assert uploads.loaded == [("a", LAYER[0]), ("b", LAYER[0])]
    assert uploads.tensors["poor"]["mlp.weight"][0, 0] == 99  # uploads are not changed
    assert uploads.tensors["a"]["mlp.weight"][0, 0] == 2


def test_one_donor_gives_its_own_and_donors_without_weight_give_nothing():
    uploads = Uploads(a=2, b=6)
    both = Substitution("p", "mlp.bias", ("a", "b"))
    for weights in ({"a": 0.1}, {"a": 5, "b": 0}):
        np.testing.assert_allclose(substitute(uploads, {"poor": both}, weights)["poor"][2], [-2, -2], rtol=1e-6)
    with pytest.raises(ModelError, match=r"donors of 'mlp.bias' in part 'p' have no weight: a, b"):
        substitute(uploads, {"poor": both}, {})
    assert substitute(uploads, {"poor": "no donor"}, {}) == {}


@pytest.mark.parametrize(
    ("tensors", "names", "reason"),
    [
        ({"mlp.bias": np.zeros(2)}, "donor 'b' lacks tensor 'mlp.weight' of part 'text/stage1'", "names"),
        ({"mlp.weight": np.zeros((3, 2))}, r"donor 'b', part 'text/stage1': tensor 'mlp.weight' is \[3, 2\]", "shape"),
        ({"mlp.weight": np.full((2, 3), np.inf)}, "donor 'b', part 'text/stage1': .* NaN or infinity", "not_finite"),
    ],
)
def test_a_donor_that_does_not_fit_is_named(tensors, names, reason):
    uploads = Uploads(a=2)
    uploads.tensors["b"] = tensors
    with pytest.raises(MisfitError, match=names) as caught:
        substitute(uploads, {"poor": Substitution(*LAYER, ("a", "b"))}, {"a": 1, "b": 1})
    assert caught.value.reason == reason


def test_the_servers_methods_load_no_torch():
    code = "import sys; from edgefl import registry; registry.methods('weight'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
