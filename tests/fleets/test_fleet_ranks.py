"""A fleet whose budgets admit low-rank terms of other ranks: who has which dimensions, and what comes of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from memory_fleet import share

import edgefl
from coordinator.ledger.ledger import Ledger
from edgefl.api.export_run import export_run
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError
from edgefl.models.spec import is_lora, rank_start
from edgefl.protocol.tensors import decode_part
from edgefl.records import Manifest
from edgefl.registry import methods
from edgefl.report.writers import to_html
from edgefl.storage.disk import LEDGER
from edgefl.storage.objects import ObjectStore

#: Bytes of the first round, down and up, by rank: 222,152 with 16, 149,704 with 8 and 113,480 with 4.
BUDGETS = {"four": 120_000, "eight": 200_000, "sixteen": 250_000}
RANKS = {"four": 4, "eight": 8, "sixteen": 16}
LORA = {"rank": 16, "fallback_ranks": [8, 4]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ranks")
    share(110, {"a": 1.0, "b": 1.0}, seed=5).save_npz(place / "all.npz")
    return place


def fields(source: Path, budgets: Mapping[str, object] = BUDGETS, lora: object = LORA, **more: Any) -> dict[str, Any]:
    encoder = {"kind": "sensor", "width": 16, "depth": 2, "heads": 2, "patch": 4}
    return {
        "name": "ranks",
        "seed": 3,
        "data": {"source": source / "all.npz"},
        "model": {
            "stages": 2,
            "encoders": dict.fromkeys("ab", encoder),
            "head": {"width": 12, "out": 8, "dropout": 0.0},
            "fusion_width": 8,
            "lora": lora,
        },
        "training": {"rounds": [1, 1], "batch_size": 6, "lr": {"encoder": 0.01, "head": 0.01}},
        "round": {"devices": len(budgets), "join_s": 60, "quorum": 1.0},
        "fleet": [
            {"name": name, "budget": {"payload_bytes": limit} if limit else {}} for name, limit in budgets.items()
        ],
        **more,
    }


def run(given: dict[str, Any], place: Path, **options: Any) -> edgefl.Run:
    return edgefl.run(given, directory=place, export=False, page=False, **{"in_process": True, **options})


def states_of(done: edgefl.Run) -> dict[tuple[int, int], Manifest]:
    with Ledger(done.directory / LEDGER, create=False) as ledger:
        return ledger.states(done.id)


def last_parts(done: edgefl.Run) -> dict[str, dict[str, np.ndarray]]:
    with Ledger(done.directory / LEDGER, create=False) as ledger:
        names, manifest = ledger.plan(done.id).stages[-1].present, ledger.position(done.id).manifest
    store = ObjectStore(done.directory / "objects")
    return {part: decode_part(store.read(manifest[part].id)) for part in names}


@pytest.fixture(scope="module")
def one(source: Path) -> edgefl.Run:
    return run(fields(source), source / "one")


def placements(done: edgefl.Run) -> Iterator[dict[str, Any]]:
    for event in done.report.record.events:
        if event.kind == "stage_planned":
            yield from event.data["placements"]


def test_each_device_has_the_rank_that_it_can_pay(one: edgefl.Run) -> None:
    assert {placed["device"]: placed["rank"] for placed in placements(one)} == RANKS
    rows = one.report.record.assignments
    assert {row.status for row in rows} == {"done"}
    for row in rows:
        starts = {rank_start(part) for part in row.trained if is_lora(part)}
        assert starts == {start for start in (0, 4, 8) if start < RANKS[row.device]}
        sent, received = (row.measured[f"payload_{way}_bytes"].value for way in ("up", "down"))
        assert sent + received <= BUDGETS[row.device]
        assert sent == row.predicted["payload_up_bytes"].value
        assert row.measured["flops"].value == pytest.approx(row.predicted["flops"].value, rel=1e-6)
    for row in one.report.record.rounds:
        for part in ("lora/a/stage1", "lora/4/a/stage1", "lora/8/a/stage1"):
            note = row.record["parts"][part]
            assert note["devices"].keys() == {device for device, rank in RANKS.items() if rank > rank_start(part)}
            assert sum(note["devices"].values()) == pytest.approx(1)
            assert "kept" not in note
    page = to_html(one.report.record, interactive=False)
    assert "four trained low-rank terms of a smaller rank in stage 1: rank 4 (bytes over budget" in page


def test_a_plan_says_which_rank_and_why(source: Path) -> None:
    planned = edgefl.plan_run(fields(source))
    page = planned.to_html()
    assert {plan.device: (plan.placement.rank, plan.whole_rank) for plan in planned.price.devices} == {
        device: (rank, 16) for device, rank in RANKS.items()
    }
    assert "LoRA of stages 1–2, rank 4 of 16" in page
    assert "needs 0.212 MiB of payload a round, allowed 0.114 MiB" in page
    assert "four, eight train low-rank terms of a smaller rank" in page
    with pytest.raises(ConfigError, match=r"16 is not below model\.lora\.rank, 16"):
        edgefl.plan_run(fields(source, lora={"rank": 16, "fallback_ranks": [16]}))
    with pytest.raises(ConfigError, match="poverty compares whole layers"):
        edgefl.plan_run(fields(source, recipe="mmic"))
    with pytest.raises(ConfigError, match="cka compares whole models, which devices of a smaller rank lack"):
        edgefl.plan_run(fields(source, slots={"weight": "cka"}))


def test_what_no_rank_fits_is_refused(source: Path) -> None:
    (plan,) = edgefl.plan_run(fields(source, {"tiny": 60_000})).price.devices
    assert plan.placement.refusal is not None
    assert 60_000 < plan.placement.refusal.needed < 113_480  # the least that was tried: rank 4 of the last stage


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_broker_carries_the_same(source: Path, one: edgefl.Run) -> None:
    assert states_of(run(fields(source), source / "broker", in_process=False)) == states_of(one)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_that_was_cut_off_goes_on_with_the_same_ranks(source: Path, one: edgefl.Run) -> None:
    class CutError(Exception):
        pass

    def cut(event: edgefl.EventRow) -> None:
        if event.kind == "round_started" and event.round == 2:
            raise CutError

    place = source / "cut"
    with pytest.raises(CutError):
        run(fields(source), place, on_event=cut)
    (begun,) = place.iterdir()
    assert states_of(run(fields(source), place, resume=begun.name)) == states_of(one)


def test_a_device_of_the_whole_rank_gets_what_an_uncut_term_gives(source: Path) -> None:
    cut, whole = (
        last_parts(run(fields(source, {"alone": 0}, lora), source / name))
        for name, lora in (("cut", LORA), ("whole", {"rank": 16}))
    )
    assert len([part for part in whole if is_lora(part)]) == 4
    for part, tensors in whole.items():
        names = [part, *(part.replace("lora/", f"lora/{k}/") for k in (4, 8))] if is_lora(part) else [part]
        slices = [cut[name] for name in names]
        for name, value in tensors.items():
            joined = (
                np.concatenate([one[name] for one in slices], int(name.endswith(".B")))
                if slices[1:]
                else slices[0][name]
            )
            assert np.array_equal(joined, value), (part, name)
    assert max(np.abs(value).max() for name, value in cut["lora/8/a/stage2"].items() if name.endswith(".B")) > 1e-3


@pytest.mark.slow
def test_bundles_hold_all_dimensions(one: edgefl.Run) -> None:
    assert max(row.max_difference for row in export_run(one.directory).rows) < 1e-5
    test = Dataset.load_npz(one.directory / "shares" / "test.npz")
    answers = edgefl.load_bundle(one.directory / "bundles" / "a+b").predict(test.modalities)
    assert np.mean(np.array(answers.classes) == test.labels) == one.accuracy


@pytest.mark.slow
@pytest.mark.parametrize("schedule", sorted(set(methods("schedule")) - {"end_to_end"}))
def test_every_schedule_takes_them(schedule: str, source: Path) -> None:
    given = fields(source, {**BUDGETS, "four": 119_000}, slots={"schedule": schedule})
    given["training"] = {**given["training"], "cache": "f32"} if schedule == "layerwise" else given["training"]
    done = run(given, source / schedule)
    rows = done.report.record.assignments
    assert {row.status for row in rows} == {"done"}
    ranks: dict[str, set[int]] = {}
    for placed in placements(done):
        ranks.setdefault(placed["device"], set()).add(placed["rank"])
    assert ranks["sixteen"] == {16}
    assert min(ranks["four"]) < 16
    for row in rows:
        assert sum(row.measured[f"payload_{way}_bytes"].value for way in ("up", "down")) <= BUDGETS[row.device]
    assert msgspec.structs.asdict(done.report.record)["status"] == "done"
