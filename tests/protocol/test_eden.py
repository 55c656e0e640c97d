"""EDEN against theory: its error, its mean, any size, the same bits, nothing beside the levels and scales."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.errors import ProtocolError
from edgefl.plan.packed_sizes import bytes_of_bits, scales_of
from edgefl.protocol.bits import from_bf16, from_gaps, from_planes, to_gaps, to_planes
from edgefl.protocol.eden import LEVELS, Coded, decode, encode

#: Squared error over |x|^2 with the unbiased scale: 1 / (1 - D) - 1, D that of the levels for a standard normal value.
ERROR = {1: 0.5708, 2: 0.1331, 3: 0.03578, 4: 0.009592}


def there_and_back(values: np.ndarray, bits: int, seed: bytes) -> np.ndarray:
    """What is reconstructed; it is what the sender takes it for, and with the residual what there was."""
    lost, told = values.copy(), np.empty_like(values)
    coded = encode(lost, bits, seed, told)
    assert coded.levels.shape == (bits, bytes_of_bits(values.size))
    assert coded.scales.shape == (scales_of(values.size),)
    held = decode(coded, values.size, bits, seed)
    assert held.tobytes() == told.tobytes()
    np.testing.assert_allclose(held + lost, values, atol=1e-5 * np.abs(values).max())
    return held


def density(x: float) -> float:
    return 0.0 if math.isinf(x) else math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def share(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


@pytest.mark.parametrize("bits", LEVELS)
def test_levels_are_means_of_their_cells(bits):
    """Lloyd and Max: bounds lie halfway between levels, levels are the means of what lies between bounds."""
    levels = LEVELS[bits]
    bounds = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(levels)), math.inf]
    cells = list(zip(levels, bounds, bounds[1:], strict=False))
    for level, low, high in cells:
        assert level == pytest.approx((density(low) - density(high)) / (share(high) - share(low)), abs=2e-6)
    lost = 1 - 2 * sum(level**2 * (share(high) - share(low)) for level, low, high in cells)
    assert pytest.approx(1 / (1 - lost) - 1, rel=1e-3) == ERROR[bits]


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("drawn", ["normal", "heavy", "one", "equal"])
def test_the_error_is_that_of_theory_whatever_the_values(drawn, bits):
    """One value alone, and equal ones, are single rows of H before the signs: they are rotated, too."""
    rng = np.random.default_rng(3)
    x = {
        "normal": rng.standard_normal(2**17),
        "heavy": rng.standard_t(3, 2**17),
        "one": np.repeat(np.eye(1, 4096, 77), 1, axis=0).reshape(-1) + 0.05 * rng.standard_normal(4096),
        "equal": np.where(np.arange(2**17) < 2**16, 1.0, 0.01),
    }[drawn].astype(np.float32)
    seeds = range(1 if x.size > 4096 else 16)
    errors = [((there_and_back(x, bits, bytes([seed])) - x) ** 2).sum() / (x**2).sum() for seed in seeds]
    assert np.mean(errors) == pytest.approx(ERROR[bits], rel=0.05)


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("size", [4096, 1500, 5001])
def test_the_mean_over_seeds_is_what_was_sent(bits, size):
    """Of N seeds the mean's squared error is an Nth of one's; the least-squares scale would leave D^2 beside it."""
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    seeds = 400
    mean = sum(there_and_back(x, bits, seed.to_bytes(2, "little")).astype(np.float64) for seed in range(seeds)) / seeds
    assert ((mean - x) ** 2).sum() / (x**2).sum() < 1.25 * ERROR[bits] / seeds + 2e-6  # and the scale's 8 bits
    assert float(mean @ x) / float(x @ x) == pytest.approx(1, abs=0.003)


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("size", [1024, 1025, 1536, 2047, 2048, 2049, 4095, 4096, 4097, 4103, 8191, 8193, 65536, 65539])
def test_any_size_has_the_same_error_and_no_padding(bits, size):
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    errors = [((there_and_back(x, bits, bytes([n])) - x) ** 2).sum() / (x**2).sum() for n in range(12)]
    assert np.mean(errors) == pytest.approx(ERROR[bits], rel=0.12 if size < 2048 else 0.06)
    coded = encode(x.copy(), bits, b"")
    assert 8 * (coded.levels.nbytes + coded.scales.nbytes) < 1.04 * bits * size
    assert 8 * coded.levels.nbytes < bits * (size + 8)


@given(st.integers(1024, 9000), st.sampled_from(sorted(LEVELS)), st.integers(0, 99))
@settings(max_examples=30)
def test_a_tail_of_other_size_has_its_own_scale(size, bits, seed):
    """What comes last is a thousand times as large: what lies before it is not drowned but in its own block."""
    x = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    x[-(size // 8) :] *= 1000
    held = there_and_back(x, bits, bytes([seed]))
    assert ((held - x) ** 2).sum() / (x**2).sum() < 1.6 * ERROR[bits]


def test_blocks_of_nothing_are_nothing():
    x = np.zeros(3 * 4096, np.float32)
    x[:4096] = np.random.default_rng(0).standard_normal(4096)
    assert not there_and_back(x, 2, b"s")[4096:].any()
    assert not there_and_back(np.zeros(1024, np.float32), 1, b"s").any()


def test_a_block_by_hand():
    """Ones under signs all alike would be one value of 64 in the rotation; with random signs no value is above 5."""
    held = there_and_back(np.ones(4096, np.float32), 4, b"seed")
    assert np.abs(held - 1).max() < 0.8
    exact = Coded(np.zeros((1, 512), np.uint8), np.array([0x3F80], np.int16))  # level 0 everywhere, scale 1
    held = decode(exact, 4096, 1, b"seed")
    place = np.flatnonzero(held)
    assert place.tolist() == [0], "H of equal values is their sum at the first place, and nothing elsewhere"
    assert abs(held[0]) == np.float32(0.7978846) * 64


def test_memory_beside_the_values_is_of_levels_and_a_piece():
    x = np.random.default_rng(0).standard_normal(2**21).astype(np.float32)
    tracemalloc.start()
    coded = encode(x, 2, b"s")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert coded.levels.nbytes == x.size / 4
    assert most < coded.levels.nbytes + 2**21  # of 8 MiB


@given(st.data())
@settings(max_examples=50)
def test_gaps_and_planes_there_and_back(data):
    size = data.draw(st.integers(1, 5000))
    at = np.array(sorted(data.draw(st.sets(st.integers(0, size - 1), max_size=400))), np.int64)
    np.testing.assert_array_equal(from_gaps(to_gaps(at, size), at.size, size), at)
    width = data.draw(st.integers(0, 13))
    numbers = at & ((1 << width) - 1)
    np.testing.assert_array_equal(from_planes(to_planes(numbers, width), at.size, np.int64), numbers)


def test_gaps_by_hand():
    """Places 0, 5 and 6 of 24: the mean gap is 7, so 2 bits are low. Gaps 0, 4, 0: quotients 0, 1, 0."""
    coded = to_gaps(np.array([0, 5, 6]), 24)
    assert coded.tolist() == [0b1101, 0b000, 0b000]
    assert to_gaps(np.array([3, 5, 6]), 24).tolist() == [0b111, 0b011, 0b001]
    with pytest.raises(ProtocolError, match="bytes behind the last"):
        from_gaps(np.array([0b1101, 0, 0, 0], np.uint8), 3, 24)


@pytest.mark.parametrize(("share", "bits"), [(0.02, 7.15), (0.1, 4.8), (0.3, 3.0)])
def test_gaps_take_little_more_than_their_entropy(share, bits):
    at = np.flatnonzero(np.random.default_rng(1).random(2**18) < share)
    taken = 8 * to_gaps(at, 2**18).size / at.size
    entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / share
    assert entropy < taken < min(bits, 1.04 * entropy)


def test_bfloat16_of_scales():
    assert from_bf16(np.array([0x3F80, 0x4000, -0x4080], np.int16)).tolist() == [1.0, 2.0, -1.0]
