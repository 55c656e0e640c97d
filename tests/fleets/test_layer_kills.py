"""One-layer exchange between real processes: the bytes a proxy counts, and kills that leave equal weights."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Callable
from pathlib import Path

import fleet_fixture
import pytest
from fleet_fixture import Fleet, Program, finish
from transport_fixtures import CountingProxy, mosquitto_wanted

from coordinator.ledger.ledger import Ledger
from edgefl.data.dataset import Dataset
from edgefl.records import Manifest
from edgefl.storage.disk import ledger_of

RUN = fleet_fixture.RUN.replace("width: 16, depth: 2", "width: 32, depth: 4").replace("lw-prototypes", "mmic-layer")
#: A period of four rounds, and one of one: each round long enough for a device to be killed in it.
SETTINGS = {"training.rounds": "[5, 0]", "training.epochs": 12, "round.devices": 2, "round.quorum": 1.0}
#: 5 MB of parts, of which the largest layer that travels alone is 262 kB.
LARGE = RUN.replace("width: 32, depth: 4", "width: 128, depth: 4").replace("credit: 4", "credit: 16")


def patchy(seed: int) -> Dataset:
    """A share in which one sample of four lacks gyro."""
    data = fleet_fixture.share(40, "acc", "gyro", seed=seed)
    data.present["gyro"][seed::4] = False
    data.modalities["gyro"][seed::4] = 0.0
    return data


def last_state(fleet: Fleet, run: str) -> Manifest:
    """Every part of the last state that devices see: content hashes, equal when all their tensors are."""
    with Ledger(ledger_of(fleet.runs / run), create=False) as ledger:
        states = ledger.states(run)
    return {part: ref for part, ref in states[max(states)].items() if not part.startswith("server/")}


def device_in_training(fleet: Fleet, coordinator: Program, right: Program, run: str) -> Program:
    coordinator.expect("progress", device="right", round=2)
    right.kill()
    fleet.agent("right")
    return coordinator


def device_with_an_update(fleet: Fleet, coordinator: Program, right: Program, run: str) -> Program:
    right.expect("trained", attempt=f"{run}/s1/r2/a1")
    right.kill()
    fleet.agent("right")
    return coordinator


def coordinator_in_the_round(fleet: Fleet, coordinator: Program, right: Program, run: str) -> Program:
    coordinator.expect("progress", device="right", round=2)
    coordinator.kill()
    return fleet.resume(run)


def coordinator_while_it_aggregates(fleet: Fleet, coordinator: Program, right: Program, run: str) -> Program:
    assert coordinator.wait() == -signal.SIGKILL
    done = [row.round for row in fleet.report(run).rounds if row.status == "done"]
    assert done == [1], "of the second round there are objects, and no row"
    return fleet.resume(run)


def coordinator_after_it(fleet: Fleet, coordinator: Program, right: Program, run: str) -> Program:
    coordinator.expect("round_closed", round=2)
    coordinator.kill()
    return fleet.resume(run)


Kill = Callable[[Fleet, Program, Program, str], Program]


@pytest.mark.slow  # a minute each: a run undisturbed, and one that is not
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kill", "killed"),
    [
        (device_in_training, 0),
        (device_with_an_update, 0),
        (coordinator_in_the_round, 0),
        (coordinator_while_it_aggregates, 2),
        (coordinator_after_it, 0),
    ],
)
def test_a_kill_inside_a_period_leaves_the_same_weights(tmp_path: Path, kill: Kill, killed: int) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    with Fleet(tmp_path) as fleet:
        fleet.agent("left", patchy(1))
        right = fleet.agent("right", patchy(2))
        finish(fleet.coordinator("undisturbed", SETTINGS, tmp_path / "run.yaml"))
        run = "disturbed"
        coordinator = fleet.coordinator(run, SETTINGS, tmp_path / "run.yaml", killed=killed)
        finish(kill(fleet, coordinator, right, run))
        report = fleet.report(run)
        assert last_state(fleet, run) == last_state(fleet, "undisturbed")
    rounds = [(row.round, row.participants) for row in report.rounds if row.status == "done"]
    assert rounds == [(number, ("left", "right")) for number in range(1, 6)], "nobody was out of step"
    lent = [one for row in report.rounds[:3] for one in row.record["repaired"].values() if one.get("lent")]
    assert lent


async def counts_by_round(fleet: Fleet, file: Path) -> dict[str, list[tuple[int, int]]]:
    """Device -> bytes up and down between the ends of neighbouring rounds, by a proxy of its own before the broker."""
    found: dict[str, list[tuple[int, int]]] = {"left": [], "right": []}
    async with contextlib.AsyncExitStack() as stack:
        proxies = {}
        for seed, name in enumerate(found, start=1):
            proxy = proxies[name] = await stack.enter_async_context(CountingProxy().to(fleet.broker.address.port))
            url = fleet.broker.url.replace(f":{fleet.broker.address.port}", f":{proxy.port}")
            fleet.agent(name, patchy(seed), broker=url)
        settings = SETTINGS | {"training.epochs": 1}
        coordinator = fleet.coordinator("wire", settings, file)
        for number in range(1, 6):
            await asyncio.to_thread(coordinator.expect, "round_closed", round=number)
            for name, proxy in proxies.items():
                found[name].append((proxy.up, proxy.down))
        await asyncio.to_thread(finish, coordinator)
        await asyncio.to_thread(fleet.__exit__)  # so that the proxies' connections end
    return {
        name: [(up - u, down - d) for (u, d), (up, down) in itertools.pairwise(passed)]
        for name, passed in found.items()
    }


@pytest.mark.slow  # half a minute
@pytest.mark.skipif(not mosquitto_wanted(), reason="a broker fast enough for this")
def test_a_proxy_counts_a_twentieth_of_the_model_inside_a_period(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(LARGE)
    with Fleet(tmp_path, "mosquitto") as fleet:
        counted = asyncio.run(counts_by_round(fleet, tmp_path / "run.yaml"))
        report = fleet.report("wire")
    model = sum(report.part_bytes.values())
    for passed in counted.values():
        second, third, fourth, _ = passed
        for up, down in (second, third):
            assert 0 < up < model / 20
            assert 0 < down < model / 20
        assert fourth[0] > model / 2, "and the whole upload is seen as one"
