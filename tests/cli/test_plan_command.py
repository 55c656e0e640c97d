"""``edgefl plan``: what it tells is what the planner and a run would do, with the device's profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from fleet_fixture import RUN, share

import edgefl
from edgefl.api.planning import plan_of, to_plan
from edgefl.api.run_inputs import CUDA_CONTEXT_BYTES, TRAINER_BYTES, PlanOptions, price_of
from edgefl.budget.fit import RunPrice
from edgefl.cli import main
from edgefl.errors import ConfigError
from edgefl.pricing.round_price import price_step, process_pricer
from edgefl.records import GPU_MEMORY, HOST
from edgefl.report.month_table import month_table
from edgefl.report.price_tables import price_grids
from edgefl.report.units import mib
from edgefl.resources.gpu_memory import SEGMENT_BYTES


def priced(
    folder: Path, *overrides: str, profiles: tuple[str, ...] = ("jetson-orin-nano-8gb",), **changes: Any
) -> RunPrice:
    share(40, "acc", "gyro").save_npz(folder / "all.npz")
    values = yaml.safe_load(RUN) | {"data": {"source": str(folder / "all.npz")}, "name": "priced"} | changes
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return price_of(str(folder / "run.yaml"), list(overrides), PlanOptions(profiles))


def test_totals_hold_what_storing_prefixes_takes_and_whole_transfers(tmp_path: Path) -> None:
    price = priced(tmp_path, "training.rounds=[1, 4]", "transfer.up=delta+int8")
    stages = [s for s in price.schedules if s.schedule == "layerwise"]
    assert stages[0].filling_flops == 0 < stages[1].filling_flops
    assert [s.filling_flops for s in price.schedules if s.schedule == "end_to_end"] == [0]
    totals = next(grid for grid in price_grids(price) if grid.title.startswith("Schedules"))
    row = {line[0].text: line for line in totals.rows}["layerwise"]
    at = {(column.group, column.name): index for index, column in enumerate(totals.columns)}
    flops = sum(s.rounds * s.flops_per_round + s.filling_flops for s in stages)
    payload = sum(s.whole_bytes + (s.rounds - 1) * (s.payload_down_bytes + s.payload_up_bytes) for s in stages)
    assert float(row[at["FLOPs", "all rounds"]].text) == pytest.approx(flops / 1e9, rel=0.01)
    assert float(row[at["bytes down + up", "all rounds"]].text) == pytest.approx(payload / 2**20, rel=0.01)
    assert payload < 2 * sum(s.rounds * s.whole_bytes for s in stages)


def test_each_device_is_told_what_a_round_costs_it(tmp_path: Path) -> None:
    price = priced(tmp_path, profiles=("jetson-orin-nano-8gb", "cpu"))
    costs = next(grid for grid in price_grids(price) if grid.title == "What a round costs each device")
    assert [column.name for column in costs.columns][2:] == [
        "down", "up", "disk", "first round", "a round", "energy",
    ]  # fmt: skip
    first = costs.rows[0]
    assert all(float(cell.text) > 0 for cell in first[2:])
    assert [cell.text for cell in costs.rows[-1][-2:]] == ["", ""]  # a profile without a speed


def test_memory_is_told_by_what_it_goes_to(tmp_path: Path) -> None:
    price = priced(tmp_path, profiles=("jetson-orin-nano-8gb", "cpu"))
    for stage in price.schedules:
        assert sum(stage.memory.values()) == stage.step_peak_bytes > 0
    grids = {grid.title: grid for grid in price_grids(price)}
    rows = grids["Memory by device"].rows
    names = [column.name for column in grids["Memory by device"].columns]
    assert [row[1].text for row in rows] == ["1", "2"]  # both devices hold the same
    for row, device in zip(rows, price.devices[:2], strict=True):
        cells = dict(zip(names, row, strict=True))
        goes = [float(cells[name].text) for name in names[2:-3] if cells[name].text]
        assert sum(goes) == pytest.approx(float(cells["step memory"].text), rel=0.02)
        process = price.trainer_base_bytes + device.placement.cost.step_peak_bytes
        assert float(cells["process"].text) == pytest.approx(process / 2**20, rel=0.01)
    assert len(grids["Tensors of a step by stage"].rows) == len(price.schedules)


def test_a_device_s_step_memory_is_a_stage_s_tensors_and_the_libraries(tmp_path: Path) -> None:
    price = priced(tmp_path, profiles=("cpu",))
    tensors = {s.stage: s for s in price.schedules if s.schedule == price.schedule}
    for device in price.devices:
        stage = tensors[device.placement.stage.index]
        assert stage.libraries_bytes > 0
        assert device.placement.cost.step_peak_bytes == stage.step_peak_bytes + stage.libraries_bytes
    note = price_grids(price)[1].notes[0]
    most = max(one.libraries_bytes for one in price.schedules)
    assert f"and, on a CPU, {mib(most)} of libraries besides." in note


def test_a_run_that_has_been_is_planned_for_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    share(40, "acc", "gyro").save_npz(tmp_path / "all.npz")
    fleet = [{"name": "a", "budget": {"payload_bytes": "1 MiB"}}, {"name": "b", "budget": {"flops": 1e9}}]
    fields = yaml.safe_load(RUN) | {"data": {"source": str(tmp_path / "all.npz")}, "name": "been", "fleet": fleet}
    run = edgefl.run(fields, directory=tmp_path / "runs", in_process=True, export=False, page=False)
    (tmp_path / "all.npz").unlink()  # a run's samples may be elsewhere
    file, past = to_plan("latest", tmp_path / "runs")
    assert past is not None
    assert file == str(run.directory / "run.yaml")
    options = PlanOptions(runs_a_month=30, past=past._replace(wire={"a": 1e6}, idle={"b": 5.0}))
    plan = plan_of(file, (), options)
    rows = {row.device: row for row in run.report.record.devices}
    assert {one.device for one in plan.price.devices} == set(rows) == {"a", "b"}
    assert plan.price.samples == round(sum(row.samples[""] for row in rows.values()) / 2)
    assert plan.assumptions[0].startswith(f"As in run {run.id}: its 2 devices, with the samples")
    first, second = plan.price.months
    assert (first.runs_bytes, first.counted) == (31_500_000, ("runs",))
    assert (second.idle_bytes, second.counted) == (5, ("waiting",))
    assert "not predicted: bytes of runs, a." in " ".join(month_table(plan.price).notes)
    assert plan_of(file, ["training.epochs=1"], options).price.months[0].counted == (), "another run"
    for text in (run.id, run.id[:6], str(run.directory)):
        assert to_plan(text, tmp_path / "runs") == (file, past)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main.main(["plan", "beem"])
    told = " ".join(capsys.readouterr().err.split())
    assert "no file and no shipped profile of this name" in told
    assert f"Nor is it a run: no run 'beem' in runs. Did you mean {run.id}?" in told or "Runs there:" in told


@pytest.mark.slow
def test_schedules_are_priced_with_each_batch_size_asked_for(tmp_path: Path) -> None:
    priced(tmp_path)  # writes the run file
    price = price_of(str(tmp_path / "run.yaml"), [], PlanOptions(["cpu"], batch_sizes=[4, 16]))
    small, large = ([s for s in price.schedules if s.batch_size == size] for size in (4, 16))
    assert [(s.schedule, s.stage) for s in small] == [(s.schedule, s.stage) for s in large]
    assert all(a.step_peak_bytes < b.step_peak_bytes for a, b in zip(small, large, strict=True))
    assert price.devices[0].placement.hyper.batch_size == 8  # the run's
    totals = price_grids(price)[1]
    assert [(row[0].text, row[1].text) for row in totals.rows][:2] == [("end_to_end", "4"), ("end_to_end", "16")]


@pytest.mark.slow
def test_plans_of_one_process_share_their_traces_and_have_the_prices_of_a_fresh_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [("seed=1",), ("seed=2",), ("training.batch_size=4",), ("seed=2", "model.stages=1", "training.rounds=[2]")]
    fresh = []
    for overrides in plans:
        process_pricer.cache_clear()
        fresh.append(priced(tmp_path, *overrides))
    process_pricer.cache_clear()
    traced = []
    monkeypatch.setattr("edgefl.pricing.round_price.price_step", lambda *job: traced.append(job) or price_step(*job))
    counts = []
    for overrides, alone in zip(plans, fresh, strict=True):
        assert priced(tmp_path, *overrides) == alone
        counts.append(len(traced))
    first, second, third, fourth = counts
    assert 0 < first == second < third < fourth
    for overrides, alone in zip(reversed(plans), reversed(fresh), strict=True):
        assert priced(tmp_path, *overrides) == alone
    assert len(traced) == fourth


def test_a_batch_that_no_share_fills_is_not_priced(tmp_path: Path) -> None:
    priced(tmp_path)  # writes the run file
    options = PlanOptions(["cpu"], batch_sizes=[4, 64])
    with pytest.raises(ConfigError, match="64 rows are more than any device's share") as caught:
        price_of(str(tmp_path / "run.yaml"), [], options)
    assert "--batch-size" in str(caught.value)
    assert price_of(str(tmp_path / "run.yaml"), [], options._replace(samples=64)).schedules


def test_a_sample_costs_the_same_whatever_is_held_out_of_the_share(tmp_path: Path) -> None:
    whole, half = (priced(tmp_path, f"training.holdout={share}") for share in (0.0, 0.5))
    for one, other in zip(whole.schedules, half.schedules, strict=True):
        assert one.flops_per_sample == other.flops_per_sample > 0
        assert one.flops_per_round > 1.2 * other.flops_per_round  # what is held out is looked at, not trained on


def test_schedules_move_what_the_recipe_exchanges(tmp_path: Path) -> None:
    local = priced(tmp_path, recipe="local")
    assert {(s.payload_down_bytes, s.payload_up_bytes) for s in local.schedules} == {(0, 0)}
    for alone, averaged in zip(local.schedules, priced(tmp_path).schedules, strict=True):
        assert alone.whole_bytes < averaged.whole_bytes  # the model comes once, and nothing goes
        there = alone.stage > 1 and alone.schedule == "freeze"  # all of it since the first stage
        assert (alone.whole_bytes == 0) == there


def test_schedules_train_the_embeddings_the_recipe_wants_trained(tmp_path: Path) -> None:
    slots = {"schedule": {"layerwise": {"embed": "frozen"}}}
    first = {
        embed: next(s for s in priced(tmp_path, **more).schedules if s.schedule == "layerwise")
        for embed, more in (("auto", {}), ("frozen", {"slots": slots}))
    }
    assert first["frozen"].payload_up_bytes < first["auto"].payload_up_bytes


def test_bf16_is_priced_where_a_device_computes_so(tmp_path: Path) -> None:
    asked, plain = (priced(tmp_path, *more, profiles=("cpu",)) for more in (["training.precision=bf16"], []))
    assert [s.step_peak_bytes for s in asked.schedules] == [s.step_peak_bytes for s in plain.schedules]
    cards = priced(tmp_path, "training.precision=bf16", profiles=("h100",))
    assert [s.step_peak_bytes for s in cards.schedules] != [s.step_peak_bytes for s in plain.schedules]


def test_bf16_is_planned_where_the_profile_says_that_a_gpu_computes(tmp_path: Path) -> None:
    price = priced(tmp_path, "training.precision=bf16", profiles=("h100", "cpu"))
    found = {device.profile: device.placement.hyper.precision for device in price.devices}
    assert found == {"h100": "bf16", "cpu": "f32"}


def test_labels_count_where_pairs_would_do(tmp_path: Path) -> None:
    terms = {"cross_entropy": {}, "clip": {}}
    price = priced(tmp_path, recipe="end_to_end", slots={"objective": terms, "missing": {"ignore": {}}})
    assert {"fusion", "task"} <= set(price.devices[0].placement.stage.trained)


def test_a_model_without_heads_has_no_schedule_of_heads(tmp_path: Path) -> None:
    model = {**yaml.safe_load(RUN)["model"], "head": {"kind": "none"}}
    price = priced(tmp_path, recipe="lw-fedmml-clip", model=model)
    assert {s.schedule for s in price.schedules} == {"end_to_end", "freeze", "progressive", "layerwise", "sampled"}


@pytest.mark.slow
def test_the_step_of_a_card_is_planned_in_the_card_s_memory(tmp_path: Path) -> None:
    price = priced(tmp_path, profiles=("h100", "jetson-orin-nano-8gb"))
    assert {device.profile: device.card for device in price.devices} == {"h100": True, "jetson-orin-nano-8gb": False}
    cost = price.devices[0].placement.cost
    table = next(grid for grid in price_grids(price) if grid.title == "Memory by device")
    process = (price.trainer_base_bytes + cost.staging_bytes) / 2**20
    assert float(table.rows[0][-1].text) == pytest.approx(process, rel=0.01)
    there = CUDA_CONTEXT_BYTES + SEGMENT_BYTES + 1000
    lines = ["name: small", f"gpu_memory_bytes: {there}", "torch_device: cuda"]
    (tmp_path / "small.yaml").write_text("\n".join(lines))
    small = priced(tmp_path, "training.batch_size=2", profiles=(str(tmp_path / "small.yaml"),))
    refusal = small.devices[0].placement.refusal
    assert (refusal.reason, refusal.allowed, refusal.detail) == ("memory", 1000.0, GPU_MEMORY)
    assert 1000 < refusal.needed <= cost.step_peak_bytes


@pytest.mark.slow  # four fleets are priced
def test_a_machine_s_memory_limits_the_step_only_where_it_is_known_to_hold_it(tmp_path: Path) -> None:
    """A profile that says cuda and no more may be of a card beside the machine's memory, or of a pool."""
    refused = {}
    for name, more in (("cpu", {}), ("pool", {"unified": True}), ("untold", {}), ("card", {"gpu_memory_bytes": 2**34})):
        on = "cpu" if name == "cpu" else "cuda"
        profile = {"name": name, "torch_device": on, "memory_bytes": TRAINER_BYTES + 1000, **more}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(profile))
        price = priced(tmp_path, "training.batch_size=2", profiles=(str(tmp_path / f"{name}.yaml"),))
        refused[name] = price.devices[0].placement.refusal
    assert refused["untold"] is None
    assert {n: why.where for n, why in refused.items() if why} == {"cpu": "", "pool": "", "card": HOST}
