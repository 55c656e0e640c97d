"""What devices write and what a disk does to the store, as operators see it: no control characters, no false blame."""

from __future__ import annotations

import asyncio
import csv
import io
import unicodedata
from pathlib import Path

import msgspec
import pytest
from test_coordinator_inbox import read
from test_coordinator_runner import Scene, one_stage, played

from coordinator.core.moves import Announced, Declined, Joined
from coordinator.runtime.inbound import MAX_ENTRIES, Inbound, cleaned
from edgefl.errors import StoreError
from edgefl.plan.job import RoundPolicy
from edgefl.protocol import messages as m
from edgefl.records import Attempt, Capabilities, Figure, Refusal, Speed, kind_of_machine
from edgefl.report.tables import COLUMNS
from edgefl.report.writers import to_csv
from edgefl.run_records import AssignmentRow, RunReport
from edgefl.storage.objects import ObjectStore

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x1b[8m\u202egnp.exe\x9b1m\r\n\x00"


def texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for one in pair for text in texts(one)]
    return [text for one in value for text in texts(one)] if isinstance(value, list | tuple) else []


SAID: list[m.UpMessage] = [
    m.Hello(
        "a",
        session=ESCAPE,
        agent_version=ESCAPE * 99,
        profile=ESCAPE + "x" * 100_000,
        capabilities=Capabilities(gpu=ESCAPE, machine=ESCAPE, runtime=ESCAPE, torch_device=ESCAPE),
        modalities={ESCAPE: (8, 3)},
        samples={ESCAPE: 3},
        working_on=Attempt(ESCAPE),
    ),
    m.Decline("a", Attempt("r1"), Refusal(ESCAPE, 1.0, 2.0, ESCAPE, ESCAPE * 999, ESCAPE), {ESCAPE: Figure(0.0)}),
    m.Update(
        "a",
        Attempt("r1"),
        metrics={ESCAPE: 1.0},
        samples={ESCAPE: 1},
        figures={"flops": Figure(None, "measured", ESCAPE, ESCAPE * 999)},
    ),
]


@pytest.mark.parametrize("said", SAID, ids=["hello", "decline", "update"])
def test_no_control_character_and_no_long_text_of_a_device_is_let_in(said: m.UpMessage) -> None:
    event = read(Inbound(10.0, 1.0), said)
    assert isinstance(event, Joined | Declined | Announced)
    found = texts(msgspec.to_builtins(event))
    assert any("\ufffd" in text for text in found)
    for text in found:
        assert not [c for c in text if unicodedata.category(c) in {"Cc", "Cf", "Zl", "Zp"}], ascii(text)
        assert len(text) <= 500
    if isinstance(event, Joined):
        assert max(map(len, found)) <= 64


def test_what_honest_devices_write_is_let_in_as_it_is() -> None:
    said = m.Decline("a", Attempt("r1"), Refusal("memory", 2.0, 1.0, "B", "β: 3 MiB → 2 MiB, ‘größer’ 🙂"))
    event = read(Inbound(10.0, 1.0), said)
    assert isinstance(event, Declined)
    assert event.refusal == said.refusal


def test_a_hello_has_no_more_entries_than_a_device_has_modalities() -> None:
    many = {f"m{i}": i for i in range(5000)}
    event = read(Inbound(10.0, 1.0), m.Hello("a", samples=many, modalities=dict.fromkeys(many, (1,))))
    assert isinstance(event, Joined)
    assert len(event.hello.samples) == len(event.hello.modalities) == MAX_ENTRIES


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_no_cell_of_the_csv_is_a_formula(start: str) -> None:
    text = start + 'HYPERLINK("http://evil")'
    row = AssignmentRow(
        1, 1, 1, "a", "done", measured={"flops": Figure(-1.5e-7, "measured", text, text)}, refusal=Refusal(text)
    )
    (line,) = list(csv.DictReader(io.StringIO(to_csv(RunReport(run="r1", assignments=(row,))))))
    assert [line[name] for name in ("source", "reason", "refusal")] == ["'" + text] * 3
    assert line["measured"] == "-1.5e-07", "numbers are numbers"
    assert set(line) == set(COLUMNS["figures"])


def test_damage_in_the_coordinators_store_is_named_and_no_device_is_blamed(tmp_path: Path) -> None:
    damaged: list[str] = []

    async def script(scene: Scene) -> None:
        plan = one_stage(RoundPolicy(devices=2, join_s=5.0, quorum=0.5, deadline_s=600.0), 2)
        running = asyncio.ensure_future(scene.coordinator(plan))
        await scene.until(lambda: "run_started" in scene.kinds())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for path in (tmp_path / "run" / "objects").iterdir():
            if path.is_file() and len(path.name) == 64:
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)
                damaged.append(path.name)
        for name in ("a", "b"):
            await scene.device(name)
        with pytest.raises(StoreError, match="is damaged: its sha256 is not its name") as failed:
            await scene.coordinator(plan, resume=True)
        assert any(name in failed.value.message for name in damaged)
        assert "put back a copy" in (failed.value.remedy or "")

    scene = played(tmp_path, script)
    assert not [event for event in scene.events if event.kind in {"declined", "rejected", "quarantined"}]


def test_a_chunk_is_hashed_once_a_process(tmp_path: Path) -> None:
    ref = ObjectStore(tmp_path).put(b"x" * 100)
    store = ObjectStore(tmp_path)
    assert store.read_chunk(ref.id, 64, 1) == b"x" * 36
    store.path(ref.id).write_bytes(b"y" * 100)
    assert store.read_chunk(ref.id, 64, 1) == b"y" * 36
    with pytest.raises(StoreError, match="is damaged"):
        ObjectStore(tmp_path).read_chunk(ref.id, 64, 1)


def test_a_long_kind_of_machine_is_the_same_after_its_hello() -> None:
    """Its name, "x86_64, 128 cores, NVIDIA …", is longer than the texts that are kept; the ratios hang on it."""
    has = Capabilities(machine="x86_64", cores=128, gpu="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition")
    has = msgspec.structs.replace(has, speed=Speed(1e12, machine=kind_of_machine(has)))
    heard = cleaned(m.Hello(device="a", capabilities=has)).capabilities
    assert heard.speed.machine == kind_of_machine(heard)
