"""Parts in fewer bytes: both sides hold the same bits, and what is lost comes with the next round."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.errors import ProtocolError
from edgefl.plan.stages import packed_bytes, packing_of
from edgefl.protocol.packing import WHOLE_BELOW, compress, decompress
from edgefl.protocol.tensors import encode_part, is_packed
from edgefl.records import PACKINGS

DELTAS = [name for name in PACKINGS if name.startswith("delta+")]


def part(seed: int, rows: int = 40, columns: int = 50) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "weight": rng.normal(size=(rows, columns)).astype(np.float32),
        "bias": rng.normal(size=rows).astype(np.float32),
        "steps": np.array(seed + 7, np.int64),
    }


@given(st.sampled_from(PACKINGS), st.integers(0, 2**31), st.floats(0.001, 1.0))
@settings(max_examples=40)
def test_both_sides_hold_the_same_bits(packing, seed, top):
    target, base = part(seed), part(seed + 1)
    sent = compress(target, base, packing, top)
    held = decompress(sent.data, base, packing)
    assert held.keys() == sent.reconstructed.keys() == target.keys()
    for name, value in sent.reconstructed.items():
        assert held[name].dtype == target[name].dtype
        assert held[name].tobytes() == value.tobytes()
    assert encode_part(held) == encode_part(sent.reconstructed)  # so the hash of what is held tells that all went well


def test_by_hand():
    """Rows of 127 levels: row 0 reaches 2.54, so a level is 0.02 and 1.01 becomes 50 or 51 of them."""
    weight = np.zeros((2, 1024), np.float32)
    weight[0, :3] = 2.54, 1.01, -0.009
    sent = compress({"w": weight}, {"w": weight}, "int8", 0.1)
    np.testing.assert_allclose(sent.reconstructed["w"][0, :3], [2.54, 1.0, 0.0], atol=0.021)
    assert not sent.reconstructed["w"][1].any()
    weight[1, 7] = -5
    top = compress({"w": weight}, {"w": np.zeros_like(weight)}, "delta+top", 2 / 2048)  # the two largest
    assert np.flatnonzero(top.reconstructed["w"]).tolist() == [0, 1024 + 7]
    assert top.reconstructed["w"][1, 7] == pytest.approx(-5)
    assert top.reconstructed["w"][0, 0] == pytest.approx(2.54, abs=5 / 127)
    halves = compress({"w": weight}, {"w": weight}, "bf16", 0.1).reconstructed["w"]
    assert halves[0, 0] == np.float32(2.546875)  # 8 bits of mantissa


@pytest.mark.parametrize("columns", [1024, 1023])
def test_two_levels_a_byte_by_hand(columns):
    """Rows of 7 levels: row 0 reaches 7, so a level is 1; an odd row has a place that means nothing."""
    weight = np.zeros((2, columns), np.float32)
    weight[0, :4], weight[1, -1] = [7, -7, 2.4, -0.6], 3.5
    sent = compress({"w": weight}, {"w": np.zeros_like(weight)}, "delta+int4", 0.1)
    assert sent.reconstructed["w"][0, :5].tolist() == [7, -7, 2, -1, 0]
    assert sent.reconstructed["w"][1, -1] == np.float32(3.5)
    np.testing.assert_allclose(sent.residual["w"][0, :4], [0, 0, 0.4, 0.4], atol=1e-6)
    np.testing.assert_array_equal(
        decompress(sent.data, {"w": np.zeros_like(weight)}, "delta+int4")["w"], sent.reconstructed["w"]
    )
    assert len(sent.data) < 2 * (columns + 1) // 2 + 300


@pytest.mark.parametrize("packing", DELTAS)
def test_what_is_lost_comes_with_the_next_rounds(packing):
    """A change is of what the other side holds, so that it follows a target that stands still."""
    target, held = part(3), part(4)
    first = None
    for _ in range(30):
        held = compress(target, held, packing, 0.1).reconstructed
        first = first or np.abs(target["weight"] - held["weight"]).mean()
    assert np.abs(target["weight"] - held["weight"]).mean() < 1e-3 * first + 1e-6


def test_bytes_are_about_what_is_said():
    target, base = part(0, 300, 400), part(1, 300, 400)
    whole = len(encode_part(target))
    for packing in PACKINGS:
        size = len(compress(target, base, packing, 0.05).data)
        assert size == pytest.approx(packed_bytes(whole, packing, 0.05), rel=0.02, abs=3000)


def test_small_tensors_and_integers_travel_whole():
    target = {"weight": np.ones((2, WHOLE_BELOW), np.float32), "bias": np.full(WHOLE_BELOW - 1, np.pi, np.float32)}
    target["count"] = np.array(5)
    held = compress(target, {n: v * 0 for n, v in target.items()}, "delta+top", 0.001).reconstructed
    np.testing.assert_array_equal(held["bias"], target["bias"])
    assert held["count"] == 5


def test_rules_by_part():
    rules = (("head/*", "int8"), ("*/embed", "f16"))
    assert [packing_of(rules, name) for name in ("head/a", "a/embed", "a/stage1")] == ["int8", "f16", "f32"]
    assert packing_of((("*", "delta+top"),), "a/stage1") == "delta+top"


def test_values_beyond_f16_are_an_error_that_says_what_to_do():
    big = {"w": np.full((2, WHOLE_BELOW), 1e6, np.float32)}
    with pytest.raises(ProtocolError, match="'w' has values up to 1e") as caught:
        compress(big, big, "f16", 0.1)
    assert "bf16" in caught.value.remedy
    assert compress(big, big, "bf16", 0.1).reconstructed["w"][0, 0] == pytest.approx(1e6, rel=0.01)


def hostile(**changes: np.ndarray | None) -> bytes:
    base = {"w|top": np.array([1, 2], np.int8), "w|at": np.array([0, 5], np.int32), "w|scale": np.ones(1, np.float32)}
    wanted = {**base, **{f"w|{name}": value for name, value in changes.items()}}
    return encode_part({name: value for name, value in wanted.items() if value is not None}, "packed")


@pytest.mark.parametrize(
    "changes",
    [
        {"at": np.array([5, 0], np.int32)},
        {"at": np.array([0, 0], np.int32)},
        {"at": np.array([-1, 0], np.int32)},
        {"at": np.array([0, 10**6], np.int32)},
        {"at": np.array([0], np.int32)},
        {"at": None},
        {"scale": None},
        {"scale": np.ones(2, np.float32)},
        {"scale": np.array([np.inf], np.float32)},
        {"top": np.array([1.0, 2.0], np.float32)},
        {"int8": np.ones((3, 3), np.int8)},
        {"secret": np.ones(1, np.int8)},
        {"top": np.array([[1, 2]], np.int8), "at": np.array([[0, 5]], np.int32)},
        {"top": np.array(1, np.int8), "at": np.array(0, np.int32)},
    ],
    ids=str,
)
def test_what_can_not_be_right_is_refused(changes):
    base = {"w": np.zeros((40, 50), np.float32)}
    with pytest.raises(ProtocolError):
        decompress(hostile(**changes), base, "delta+top")


def test_a_number_can_not_be_packed():
    scalar = encode_part({"n|int8": np.array(1, np.int8), "n|scale": np.array(1.0, np.float32)}, "packed")
    for base in ({"n": np.array(1.0, np.float32)}, None):
        with pytest.raises(ProtocolError, match="travels whole"):
            decompress(scalar, base, "int8")


def test_running_averages_travel_whole():
    """A variance with error feedback would become negative: what was not sent is no step that can be added later."""
    target = {"weight": np.ones((64, 64), np.float32), "running_var": np.full(4096, 0.02, np.float32)}
    sent = compress(target, {name: value * 3 for name, value in target.items()}, "delta+top", 0.01)
    np.testing.assert_array_equal(sent.reconstructed["running_var"], target["running_var"])
    assert set(sent.residual) == {"weight"}


def test_what_is_used_up_is_what_is_lost():
    target, base = part(0), part(1)
    kept = compress(target, base, "delta+int8", 0.1)
    used = {name: value.copy() for name, value in target.items()}
    used_up = compress(used, base, "delta+int8", 0.1, reconstruct=False)
    assert (used_up.data, used_up.reconstructed) == (kept.data, {})
    np.testing.assert_array_equal(used_up.residual["weight"], kept.residual["weight"])
    np.testing.assert_allclose(kept.reconstructed["weight"] + kept.residual["weight"], target["weight"], atol=1e-6)


def test_names_are_those_of_the_base():
    base = {"w": np.zeros((40, 50), np.float32)}
    assert is_packed(hostile())
    assert not is_packed(encode_part(base))
    np.testing.assert_array_equal(np.flatnonzero(decompress(hostile(), base, "delta+top")["w"]), [0, 5])
    with pytest.raises(ProtocolError, match="'v'"):
        decompress(hostile(), {**base, "v": base["w"]}, "delta+top")
    with pytest.raises(ProtocolError, match="'w'"):
        decompress(hostile(), {}, "delta+top")
