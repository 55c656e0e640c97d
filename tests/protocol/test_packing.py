"""Parts in fewer bytes: both sides hold the same bits, and what is lost comes with the next round."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.errors import ProtocolError
from edgefl.plan.job import Transfer
from edgefl.plan.packed_sizes import WHOLE_BELOW, object_bytes, sent_bytes
from edgefl.plan.stages import packing_of
from edgefl.protocol.bits import to_gaps
from edgefl.protocol.packing import compress, decompress, pays
from edgefl.protocol.tensors import decode_part, encode_part, is_packed
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


@pytest.mark.parametrize("packing", DELTAS)
@pytest.mark.parametrize("shape", [(1, 1024), (1025, 1), (3, 19, 20), (2, 2, 2, 300), (4096, 1), (1, 4099), (64, 129)])
def test_tensors_of_any_shape(packing, shape):
    rng = np.random.default_rng(1)
    target, base = ({"w": rng.normal(size=shape).astype(np.float32), "b": np.ones(3, np.float32)} for _ in range(2))
    sent = compress(target, base, packing, 0.1)
    held = decompress(sent.data, base, packing)["w"]
    assert held.tobytes() == sent.reconstructed["w"].tobytes()
    np.testing.assert_allclose(held + sent.residual.get("w", 0), target["w"], atol=1e-5)


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


def block(width: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a transformer's block: weights, and more values in biases and norms the narrower it is."""
    inner = {"qkv": 3 * width, "out": width, "up": 4 * width}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, width) for name, rows in inner.items()}
    shapes |= {"down.weight": (width, 4 * width), "down.bias": (width,), "norm.weight": (width,), "norm.bias": (width,)}
    return shapes | {f"{name}.bias": (rows,) for name, rows in inner.items()}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("width", [16, 32, 64, 200])
def test_bytes_are_what_is_priced(packing, width):
    """To the byte; coded gaps of places at random within two in a hundred."""
    rng, shapes = np.random.default_rng(width), block(width)
    layout = {name: ("F32", shape) for name, shape in shapes.items()}
    target = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    base = {name: np.zeros_like(value) for name, value in target.items()}
    for top in (0.02, 0.1, 0.5) if packing == "delta+top" else (0.1,):
        priced = sent_bytes(layout, packing, Transfer(top=top))
        packed = pays(target, packing, Transfer(top=top))
        size = len(compress(target, base, packing, top).data if packed else encode_part(target))
        assert size == pytest.approx(priced, rel=0.02 if packing == "delta+top" else 0)
        assert (size < object_bytes(layout)) == packed
    assert sent_bytes(layout, packing, Transfer(whole=True)) == object_bytes(layout) == len(encode_part(target))


def test_a_part_that_shrinks_by_less_than_a_tenth_is_priced_and_sent_whole():
    target = {"w": np.ones((32, 32), np.float32), "b": np.ones(8000, np.float32)}  # int8 saves 3 of 36 kB
    layout = {"w": ("F32", (32, 32)), "b": ("F32", (8000,))}
    assert not pays(target, "delta+int8", Transfer())
    assert sent_bytes(layout, "delta+int8", Transfer()) == object_bytes(layout)
    assert pays({"w": target["w"], "b": target["b"][:4000]}, "delta+int8", Transfer())


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
    gaps = to_gaps(np.array([0, 5]), 2000)
    base = {"w|top": np.array([1, 2], np.int8), "w|gaps": gaps, "w|scale": np.ones(1, np.float32)}
    wanted = {**base, **{f"w|{name}": value for name, value in changes.items()}}
    return encode_part({name: value for name, value in wanted.items() if value is not None}, "packed")


@pytest.mark.parametrize(
    "changes",
    [
        {"gaps": to_gaps(np.array([0, 2000]), 2001)},
        {"gaps": to_gaps(np.array([0, 5]), 2000)[:-1]},
        {"gaps": np.zeros(11, np.uint8)},
        {"gaps": np.full(11, 255, np.uint8)},
        {"gaps": np.zeros(0, np.uint8)},
        {"gaps": np.append(to_gaps(np.array([0, 5]), 2000), np.uint8(0))},
        {"gaps": np.ones(10**6, np.uint8)},
        {"gaps": to_gaps(np.array([0, 5]), 2000).astype(np.int32)},
        {"gaps": None},
        {"scale": None},
        {"scale": np.ones(2, np.float32)},
        {"scale": np.array([np.inf], np.float32)},
        {"top": np.array([1.0, 2.0], np.float32)},
        {"int8": np.ones((3, 3), np.int8)},
        {"secret": np.ones(1, np.int8)},
        {"top": np.array([[1, 2]], np.int8)},
        {"top": np.array(1, np.int8)},
    ],
    ids=str,
)
def test_what_can_not_be_right_is_refused(changes):
    base = {"w": np.zeros((40, 50), np.float32)}
    with pytest.raises(ProtocolError):
        decompress(hostile(**changes), base, "delta+top")


def test_no_more_values_than_agreed_on_are_placed():
    """All values of a part of 16 MiB as coded gaps are 5 MB, and took 128 MiB on the way."""
    base = {"w": np.zeros((40, 50), np.float32)}
    decompress(hostile(), base, "delta+top", top=0.001)
    with pytest.raises(ProtocolError, match="2 of 2000 values, at most 1 are agreed on"):
        decompress(hostile(), base, "delta+top", top=0.0005)


@pytest.mark.parametrize("packing", ["int8", "f32", "delta+bf16", "delta+int4"])
def test_a_form_that_is_not_agreed_on_is_refused(packing):
    base = {"w": np.zeros((40, 50), np.float32)}
    for sent in (hostile(), encode_part({"w|f32": np.zeros((40, 50), np.int16)}, "packed")):
        with pytest.raises(ProtocolError, match="does not belong"):
            decompress(sent, base, packing)


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


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
@pytest.mark.parametrize("packing", DELTAS)
def test_what_is_used_up_may_be_of_any_floating_type(packing, dtype):
    """A device's own training code may return any; numpy 2 makes no f32 of them where they lie."""
    base = {"w": np.zeros((40, 50), np.float32)}
    target = {"w": np.random.default_rng(0).normal(size=(40, 50)).astype(dtype)}
    kept = compress(target, base, packing, 0.1)
    assert compress({"w": target["w"].copy()}, base, packing, 0.1, reconstruct=False).data == kept.data


def test_names_are_those_of_the_base():
    base = {"w": np.zeros((40, 50), np.float32)}
    assert is_packed(hostile())
    assert not is_packed(encode_part(base))
    np.testing.assert_array_equal(np.flatnonzero(decompress(hostile(), base, "delta+top")["w"]), [0, 5])
    with pytest.raises(ProtocolError, match="'v'"):
        decompress(hostile(), {**base, "v": base["w"]}, "delta+top")
    with pytest.raises(ProtocolError, match="'w'"):
        decompress(hostile(), {}, "delta+top")


@pytest.mark.parametrize("name", ["delta+eden1", "delta+eden4"])
def test_what_is_rotated_follows_from_the_base(name):
    """Every entry of a rotated part has the type and size that the base gives it."""
    target, base = part(0), part(1)
    coded = decode_part(compress(target, base, name, 0.1).data)
    assert sorted(coded) == ["steps|whole", "|levels", "|scale", "|seed", "|whole"]
    for key, value in coded.items():
        for wrong in (value[:-1] if value.ndim else value[None], value.reshape(*value.shape, 1), value.astype(np.int8)):
            with pytest.raises(ProtocolError, match="of a packed part is not"):
                decompress(encode_part({**coded, key: wrong}, "packed"), base, name)
        with pytest.raises(ProtocolError, match="not both"):
            decompress(encode_part({k: v for k, v in coded.items() if k != key}, "packed"), base, name)
    for bits in (0x7F80, 0x7FC0, -0x0080):  # infinity, NaN, minus infinity
        scale = np.full_like(coded["|scale"], bits)
        with pytest.raises(ProtocolError, match="scales that are not finite"):
            decompress(encode_part({**coded, "|scale": scale}, "packed"), base, name)
    with pytest.raises(ProtocolError, match="more than 1000"):
        decompress(encode_part({}, "packed"), base, name, 1000)
    with pytest.raises(ProtocolError, match="says nothing"):
        decompress(encode_part(coded, "packed"), None, name)


def test_what_cannot_be_rotated_is_an_error():
    """The sum of squares of a block must be a number: the server then sends the part whole, a device declines."""
    base = {"w": np.zeros((40, 50), np.float32)}
    for value, kept in itertools.product((np.nan, 1e19), (True, False)):
        with pytest.raises(ProtocolError, match="'w' has changes that are not finite") as caught:
            compress({"w": np.full((40, 50), value, np.float32)}, base, "delta+eden2", 0.1, reconstruct=kept)
        assert "delta+bf16" in caught.value.remedy


def test_a_round_tried_again_sends_the_same_bytes_and_another_device_other_signs():
    target, base = part(0), part(1)
    first, again = (compress(target, base, "delta+eden1", 0.1).data for _ in range(2))
    assert first == again
    other = compress({**target, "bias": target["bias"] + 1}, base, "delta+eden1", 0.1).data
    seeds = [decode_part(data)["|seed"].tolist() for data in (first, other)]
    assert seeds[0] != seeds[1]
