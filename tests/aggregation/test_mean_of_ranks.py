"""A round of devices of different ranks: each rank dimension is averaged over the devices that have it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgefl.aggregation.aggregate import aggregate_round
from edgefl.aggregation.history import UpdateInfo
from edgefl.aggregation.weights import absent_from
from edgefl.protocol.tensors import decode_part, encode_part
from edgefl.storage.objects import ObjectStore

#: Rank dimensions of a part: 0-1, 2-3, 4-7.
SLICES = {"lora/m/stage1": (0, 2), "lora/2/m/stage1": (2, 4), "lora/4/m/stage1": (4, 8)}
RANKS, SAMPLES = {"two": 2, "four": 4, "eight": 8}, {"two": 10, "four": 30, "eight": 60}


def cut(a: np.ndarray, b: np.ndarray, rank: int) -> dict[str, dict[str, np.ndarray]]:
    return {
        part: {"out.A": a[start:end], "out.B": b[:, start:end]} for part, (start, end) in SLICES.items() if end <= rank
    }


@pytest.mark.parametrize("absent", ["keep", "leave_out"])
def test_the_average_is_the_papers_by_dimension(absent: str, tmp_path: Path) -> None:
    """FediLoRA: A[d] = sum_k p_k,d A_k[d], p_k,d = n_k / sum of the n of those whose rank is above d."""
    store, rng = ObjectStore(tmp_path), np.random.default_rng(1)
    drawn = {d: (rng.normal(size=(8, 5)), rng.normal(size=(6, 8))) for d in ("before", *RANKS)}
    tensors = {d: (a.astype(np.float32), b.astype(np.float32)) for d, (a, b) in drawn.items()}
    before = {part: store.put(encode_part(one)) for part, one in cut(*tensors["before"], 8).items()}
    updates = []
    for device, rank in RANKS.items():
        manifest = {part: store.put(encode_part(one)) for part, one in cut(*tensors[device], rank).items()}
        updates.append(UpdateInfo(device, manifest, dict.fromkeys(manifest, SAMPLES[device])))
    state, record = aggregate_round(updates, store, before, {"combine": {"mean": {"absent": absent}}})

    for d in range(8):
        have = [device for device in RANKS if RANKS[device] > d]
        total = sum(SAMPLES[device] for device in have)
        a = sum(SAMPLES[device] / total * tensors[device][0][d].astype(float) for device in have)
        b = sum(SAMPLES[device] / total * tensors[device][1][:, d].astype(float) for device in have)
        part, (start, _) = next(item for item in SLICES.items() if d in range(*item[1]))
        new = decode_part(store.read(state[part].id))
        np.testing.assert_allclose(new["out.A"][d - start], a, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(new["out.B"][:, d - start], b, rtol=1e-6, atol=1e-6)
    shares = {part: record["parts"][part] for part in SLICES}
    assert shares["lora/2/m/stage1"] == {"devices": {"four": pytest.approx(1 / 3), "eight": pytest.approx(2 / 3)}}
    assert shares["lora/4/m/stage1"] == {"devices": {"eight": 1.0}}


def test_who_trained_less_depth_keeps_the_dimensions_of_its_rank_and_no_others() -> None:
    trained = {
        "whole": {f"{part[:-1]}{k}": 10 for part in SLICES for k in (1, 2)},
        "narrow": {"lora/m/stage2": 20, "head/m": 20},
        "late": {"lora/m/stage2": 30, "lora/2/m/stage2": 30, "head/m": 30},
    }
    assert absent_from("lora/m/stage1", trained) == {"narrow": 20, "late": 30}
    assert absent_from("lora/2/m/stage1", trained) == {"late": 30}
    assert absent_from("lora/4/m/stage1", trained) == {}
    assert absent_from("lora/2/m/stage2", trained) == {}
