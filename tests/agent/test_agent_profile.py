"""``edgefl-agent profile``: figures that were measured, or the reason why not, in a file that can be planned with."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest
import yaml
from transport_fixtures import broker_kinds, run
from typer.testing import CliRunner

from device_agent import measured_profile as measure
from device_agent.cli import app
from edgefl.budget.fit import verdict
from edgefl.budget.stage_cost import Priced, filled, first_figures, timed
from edgefl.config.profiles import load_device
from edgefl.plan.job import Candidate, Job
from edgefl.records import Budget, Capabilities, Cost, Refusal, Speed, kind_of_machine
from edgefl.resources.hardware import capabilities
from edgefl.transport.broker import start_broker
from edgefl.transport.link import TlsFiles


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WORK_S", 0.05)
    monkeypatch.setattr(measure, "SIDE", 128)
    monkeypatch.setattr(measure, "STEPS_S", 0.05)
    monkeypatch.setattr(measure, "STEPS", measure.STEPS[:2])
    monkeypatch.setattr(measure, "give_back_at_once", lambda: None)  # it is for a process of its own
    monkeypatch.setattr(measure, "DISK_BYTES", 2**20)
    monkeypatch.setattr(measure, "LINK_BYTES", 2**20)


def test_a_file_that_is_there_is_refused_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "device_agent.measured_profile", None)  # as where torch is not installed
    (tmp_path / "there.yaml").write_text("")
    done = CliRunner().invoke(app, ["profile", "--out", str(tmp_path / "there.yaml")])
    assert (done.exit_code, "is there already" in done.output) == (10, True), done.output


def test_the_file_is_a_profile(tmp_path: Path) -> None:
    out = tmp_path / "here.yaml"
    arguments = ["profile", "--out", str(out), "--name", "here", "--torch-device", "cpu", "--state", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    profile = load_device(str(out))
    assert profile.name == "here"
    assert profile.speed.flops > 1e6
    assert {"float32"} <= set(profile.speed.matmul)
    assert 0 <= profile.speed.operation_s < 1e-2  # 0: on a machine so busy that nothing can be told apart
    assert profile.speed.machine == kind_of_machine(capabilities(tmp_path))
    assert profile.speed.disk_write_bytes > 0
    assert profile.memory_bytes
    assert (profile.speed.down_bytes, profile.speed.up_bytes) == (0, 0)
    assert any("no --broker" in note for note in profile.notes)
    assert list(tmp_path.glob(".edgefl-profile*")) == []
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 10
    assert "--force" in again.output
    assert yaml.safe_load(out.read_text())["source"].endswith("(cpu)")


@pytest.mark.parametrize("kind", broker_kinds())
def test_the_link_is_measured_through_the_broker(kind: str, tmp_path: Path) -> None:
    async def through() -> int | None:
        async with start_broker(tmp_path, kind) as broker:
            return await measure._link(measure.Link(broker.url, "default", "here", TlsFiles()), notes)

    notes: list[str] = []
    rate = run(through(), 60)
    assert notes == []
    assert rate is not None
    assert rate > 10_000


def test_without_a_broker_there_is_a_reason_and_no_figure() -> None:
    notes: list[str] = []
    assert asyncio.run(measure._link(measure.Link("mqtt://127.0.0.1:1", "default", "here", TlsFiles()), notes)) is None
    assert notes[0].startswith("down_bytes, up_bytes: ")


def test_seconds_and_joules_by_hand() -> None:
    """100 GFLOP at 10 GFLOP/s take 10 s, 5 and 20 MB at 1 and 2 MB/s 5 and 10 s; at 4 W these are 100 J."""
    cost = Cost(flops=1e11, payload_down_bytes=5_000_000, payload_up_bytes=20_000_000)
    device = Candidate(capabilities=Capabilities(speed=Speed(1e10, 1e6, 2e6, 4.0)))
    found = timed(cost, device)
    assert (found.compute_s, found.wall_s, found.energy_j) == (10.0, 25.0, 100.0)
    limited = Candidate(capabilities=device.capabilities, budget=Budget(energy_j=99.0))
    assert verdict(found, limited) == Refusal("energy", 100.0, 99.0, "J", "one round, by the profile's power")
    assert timed(cost, Candidate()) == cost  # nothing is known of it
    assert verdict(cost, Candidate(budget=Budget(energy_j=1.0))) is None
    slower = timed(cost, Candidate(capabilities=device.capabilities, factors={"compute_s": 2.0, "energy_j": 2.0}))
    assert (slower.compute_s, slower.energy_j) == (20.0, 200.0)  # not four times: joules have a factor of their own
    busy = msgspec.structs.replace(device.capabilities, speed=Speed(1e10, operation_s=1e-5))
    small = msgspec.structs.replace(cost, step_flops=8e10, operations=4e5)
    assert timed(small, Candidate(capabilities=busy)).compute_s == pytest.approx(8 + 4)  # of the steps alone
    writes = Speed(1e10, operation_s=1e-5, written_bytes=1e9)
    slow = Candidate(capabilities=msgspec.structs.replace(device.capabilities, speed=writes))
    more = timed(msgspec.structs.replace(small, written_bytes=16e9), slow)
    assert more.compute_s == pytest.approx(8 + 4 + 16)
    assert filled(more, 1e10, slow).wall_s == pytest.approx(more.wall_s + 1 + 2)  # what FLOPs write comes with them
    stored = filled(found, 1e11, device)
    assert (stored.flops, stored.compute_s, stored.wall_s, stored.energy_j) == (2e11, 10.0, 35.0, 140.0)


def test_rates_are_those_that_the_seconds_of_steps_were_made_of() -> None:
    def step(flops: float, operations: float, written: float) -> tuple[Priced, float]:
        seconds = flops / 1e10 + operations * 1e-5 + written / 1e9
        return Priced(0, flops, operations=operations, written=written), seconds

    made = [step(1e6, 500, 1e6), step(4e8, 900, 3e7), step(6e9, 500, 1e8)]
    prices = [price for price, _ in made]
    assert measure.rates_of(prices, [spent for _, spent in made]) == pytest.approx(measure.Rates(1e10, 1e-5, 1e9))
    nothing = [price._replace(written=0.0, operations=0.0) for price in prices]
    assert measure.rates_of(nothing, [price.flops / 1e10 for price in prices]) == pytest.approx((1e10, 0.0, 0.0))


def test_where_flops_take_no_time_that_can_be_seen_the_calls_still_do() -> None:
    """Of a GPU, on which small steps last as long as their calls, and noise makes FLOPs cost less than nothing."""
    prices = [
        Priced(0, flops, operations=operations, written=written)
        for flops, operations, written in ((1e6, 500, 1e6), (4e8, 900, 3e7), (6e9, 500, 1e8))
    ]
    seconds = [price.operations * 1e-5 * (1 - price.flops / 1e11) for price in prices]
    found = measure.rates_of(prices, seconds)
    assert found.operation_s == pytest.approx(1e-5, rel=0.1)
    assert found.flops == pytest.approx(6e9 / seconds[-1])


def test_no_rate_is_negative_whatever_was_measured() -> None:
    prices = [measure._trainer_step("cpu", size)[1] for size in measure.STEPS]
    for seconds in ([1.0, 1e-6], [1e-6, 1.0], [1.0, 1.0]):
        assert min(measure.rates_of(prices, seconds)) >= 0
        assert measure.rates_of(prices, seconds).flops > 0


def test_a_stages_first_round_counts_the_flops_of_each_shape_of_batches() -> None:
    speed = Speed(1e10, operation_s=1e-5, written_bytes=1e9)
    device = Candidate(capabilities=Capabilities(speed=speed))
    cost = timed(Cost(flops=1e10, operations=1e5), device)
    assert first_figures(Job(), None, cost, Priced(0, 1e10), device) == {}
    first = first_figures(Job(), None, cost, Priced(0, 1e10, counted=2000), device)
    assert first["compute_s"].value == pytest.approx(cost.compute_s + 2000 * 5e-5)
    assert first_figures(Job(), None, cost, Priced(0, 1e10, counted=2000), Candidate()) == {}
