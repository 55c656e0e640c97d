"""What lies on disk and may be damaged or another's: objects on their way, the agent's state, ledgers, bundles."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import shutil
import sqlite3
import tarfile
from functools import partial

import msgspec

from coordinator.core.moves import SavedRound
from coordinator.core.state import Assignment, Device, RunPosition, SnapshotChanges, State
from coordinator.ledger.ledger import Ledger
from coordinator.runtime.backup import MANIFEST, Contents, back_up
from coordinator.runtime.restore import _finish as finish_restoring
from coordinator.runtime.restore import restore
from device_agent.core.state import DataFacts, Result
from device_agent.runtime.store import AgentStore, Owner
from edgefl.errors import BrokerError, ExportError, StoreError, WorkerError
from edgefl.export import bundle_format as bundles
from edgefl.export.folder import check_target
from edgefl.export.runtime import find_bundles
from edgefl.export.tables import read_tables
from edgefl.plan.job import Placement, RunPlan
from edgefl.process import worker
from edgefl.protocol.messages import Hello
from edgefl.records import ObjectRef
from edgefl.run_records import DeviceRow
from edgefl.storage.objects import ObjectStore, object_id
from edgefl.transport.address import parse_url
from edgefl.transport.broker import read_identity
from fuzz.target import MIB, Target, scratch

CONTENT = bytes(range(250)) * 10
REF = ObjectRef(object_id(CONTENT), len(CONTENT))


def chunk_map(data: bytes) -> None:
    """The map of an object that has arrived in part: whatever it claims, the object gets whole and right."""
    folder = scratch("chunk_map")
    shutil.rmtree(folder)
    (folder / "partial").mkdir(parents=True)
    there = (CONTENT, CONTENT[:-1], b"\0" * len(CONTENT), b"")[data[0] % 4] if data else b""
    (folder / "partial" / f"{REF.id}.data").write_bytes(there + data[1:])
    chunk_bytes = (100, 333, 2500, 5000)[data[0] // 4 % 4] if data else 100
    store = ObjectStore(folder)
    partial = store.partial(REF, chunk_bytes)
    for _ in range(2):
        missing = int.from_bytes(partial.missing(), "little")
        assert not missing >> partial.chunk_count
        for index in range(partial.chunk_count):
            if missing >> index & 1:
                partial.write(index, CONTENT[index * chunk_bytes : (index + 1) * chunk_bytes])
        if partial.verify():
            break
    store.publish([partial])
    assert store.read(REF.id) == CONTENT


def agent_state(data: bytes) -> None:
    """The first byte says which of the agent's files it is: it starts, with what can be read, or says why not."""
    folder = scratch("agent_state")
    shutil.rmtree(folder)
    folder.mkdir()
    name = ("work.msgpack", "identity.json", "facts.json", "work.2")[data[0] % 4] if data else "identity.json"
    (folder / name).write_bytes(data[1:])
    with contextlib.closing(AgentStore(folder, Owner("cam-07", "f"), fingerprint="x")) as store:
        saved, _ = store.load(), store.load_facts()
        store.save(saved)
        assert msgspec.msgpack.encode(store.load()) == msgspec.msgpack.encode(saved)


def frames(data: bytes) -> None:
    """What a worker answers, read by the parent as its callers do, and what it is asked, read by the child."""
    file = scratch("frames") / "frames"
    file.write_bytes(data)
    with file.open("rb") as stream, contextlib.suppress(WorkerError):
        while (request := worker.read_request(stream)) is not None:
            assert isinstance(request.method, str)
    _loop().run_until_complete(_answers(data))


async def _answers(data: bytes) -> None:
    stream = asyncio.StreamReader()
    stream.feed_data(data)
    stream.feed_eof()
    with contextlib.suppress(asyncio.IncompleteReadError):  # the child has ended: ``call`` says how
        while True:
            frame = await worker.read_answer(stream, lambda note: worker.understood(note, dict[str, int]))
            if frame.kind == "reply":
                worker.understood(frame.body, DataFacts)
                worker.understood(frame.body, Result)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


#: Every column of the ledger that holds JSON.
COLUMNS = [
    *(("runs", name) for name in ("plan", "manifest", "part_bytes")),
    *(("devices", name) for name in ("capabilities", "budget", "samples", "class_counts")),
    *(("rounds", name) for name in ("participants", "metrics", "record", "manifest")),
    ("snapshots", "value"),
]


@functools.cache
def _blank_ledger() -> bytes:
    file = scratch("ledger") / "blank.sqlite"
    file.unlink(missing_ok=True)
    with Ledger(file) as ledger:
        ledger.create(RunPlan(run="r"), {"task": REF}, {"task": 8}, 1.0)
        hello = Hello(device="cam-07", samples={"": 3}, class_counts=(1, 2))
        done = SavedRound(1, 1, 1, "done", participants=("cam-07",), manifest={"task": REF})
        rows = {
            ("outline", ""): msgspec.to_builtins(RunPosition()),
            ("device", "cam-07"): msgspec.to_builtins(Device(hello)),
            ("assignment", "cam-07"): msgspec.to_builtins(Assignment(Placement())),
        }
        ledger.commit(
            "r", [DeviceRow("cam-07", samples={"": 3}, class_counts=(1, 2)), done], [], 1.0, SnapshotChanges(rows)
        )
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.execute("PRAGMA journal_mode=DELETE")
    connection.close()
    return file.read_bytes()


def ledger(data: bytes) -> None:
    """A column of JSON, chosen by the first byte, holds this: everything that reads the ledger."""
    file = scratch("ledger") / "one.sqlite"
    for left in file.parent.glob("one.*"):
        left.unlink()
    file.write_bytes(_blank_ledger())
    table, column = COLUMNS[data[0] % len(COLUMNS)] if data else COLUMNS[0]
    connection = sqlite3.connect(file)
    connection.execute(f"UPDATE {table} SET {column} = ?", (data[1:].decode("utf-8", "replace"),))  # noqa: S608
    connection.commit()
    connection.close()
    errors: list[StoreError] = []
    with Ledger(file, create=False) as opened:
        state = State(RunPlan(run="r"))
        reads = (opened.plan, opened.position, opened.states, opened.report)
        for read in (*(partial(read, "r") for read in reads), partial(opened.snapshot, state)):
            try:
                read()
            except StoreError as error:
                errors.append(error)
        try:
            opened.runs()
        except StoreError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def ledger_file(data: bytes) -> None:
    """A ledger whose file begins like this, or (first byte odd) has these bytes inside."""
    file = scratch("ledger") / "other.sqlite"
    for left in file.parent.glob("other.*"):
        left.unlink()
    whole = _blank_ledger()
    at = int.from_bytes(data[1:4], "little") % len(whole)
    inside = whole[:at] + data[4:] + whole[at + len(data[4:]) :]
    file.write_bytes(inside if data[:1] and data[0] % 2 else data[1:])
    with Ledger(file, create=False) as opened:
        opened.runs()
        opened.position("r")


def copied_run() -> bytes:
    """A copy of a run, as ``back_up`` writes it, but for time, version and place."""
    place = scratch("copied")
    (place / "r" / "objects").mkdir(parents=True, exist_ok=True)
    (place / "r" / "objects" / REF.id).write_bytes(CONTENT)
    (place / "r" / "ledger.sqlite").write_bytes(_blank_ledger())
    back_up([place / "r"], place / "copy.tar")
    whole = io.BytesIO()
    with tarfile.open(place / "copy.tar") as made, tarfile.open(fileobj=whole, mode="w") as same:
        for info in made:
            text = made.extractfile(info).read()
            if info.name == MANIFEST:
                contents = msgspec.json.decode(text, type=Contents)
                contents = msgspec.structs.replace(contents, made_at=1.0, version="0", runs={"r": "/was/r"})
                text = msgspec.json.encode(contents)
            info.size = len(text)
            same.addfile(info, io.BytesIO(text))
    return whole.getvalue()


def backup(data: bytes) -> None:
    """A copy of a run, or (first byte odd) the rows of its ledger: all of it or nothing."""
    place = scratch("backup")
    shutil.rmtree(place)
    place.mkdir()
    if data[:1] and data[0] % 2:
        (place / "r").mkdir()
        (place / "r" / "ledger.jsonl").write_bytes(data[1:])
        finish_restoring(place / "r", place / "new" / "r", "/was/r", "")
        return
    (place / "copy.tar").write_bytes(data[1:])
    try:
        restore(place / "copy.tar", place / "new")
        assert [path.name for path in (place / "new").iterdir()] == ["r"]
    except StoreError:
        assert not (place / "new").exists()
        raise
    finally:
        assert {path.name for path in place.iterdir()} <= {"copy.tar", "new"}


def bundle(data: bytes) -> None:
    """A bundle's manifest, or (first byte odd) the index of a folder of bundles, or (2) its tables."""
    folder = scratch("bundle")
    shutil.rmtree(folder)
    folder.mkdir()
    if data[:1] and data[0] % 2:
        (folder / bundles.INDEX_FILE).write_bytes(data[1:])
        check_target(folder)
        return
    if data[:1] == b"\2":
        (folder / bundles.TABLES_FILE).write_bytes(data[1:])
        ports = (bundles.Port("prototypes.acc", "float32", (2, 2)),)
        named = {"table_file": bundles.TABLES_FILE, "table_sha256": hashlib.sha256(data[1:]).hexdigest()}
        tables = read_tables(folder, bundles.Manifest(tables=ports, **named))
        assert tables["prototypes.acc"].shape == (2, 2)
        return
    (folder / bundles.MANIFEST_FILE).write_bytes(data[1:])
    found = find_bundles(folder)[folder]
    assert bundles.encode_json(msgspec.json.decode(bundles.encode_json(found), type=bundles.Manifest))
    bundles.read_model(folder, found)


def broker_url(data: bytes) -> None:
    address = parse_url(data.decode("utf-8", "surrogateescape"))
    assert parse_url(address.secret_url()) == address
    assert str(dataclasses.replace(address, password="other")) == str(address)
    assert 0 < address.port < 65536


def broker_identity(data: bytes) -> None:
    """A damaged one is no error: it is made anew."""
    file = scratch("identity") / "identity.json"
    file.write_bytes(data)
    found = read_identity(file)
    assert found is None or 0 <= found.port < 65536
    assert found is None or json.dumps([found.username, found.password]).encode()


TARGETS = (
    Target("chunk_map", "partials.PartialObject (chunk maps)", chunk_map, (), "1+bytes", (3 * MIB, 16)),
    Target("agent_state", "device_agent.runtime.store", agent_state, (StoreError,), "1+json", (MIB, 60)),
    Target("frames", "worker (pipe), trainer_link, host, desk", frames, (WorkerError,), "frames", (MIB, 60)),
    Target("ledger", "ledger.ledger, snapshot, read", ledger, (StoreError,), "1+json", (12 * MIB, 200), slow=True),
    Target("ledger_file", "ledger.database", ledger_file, (StoreError,), "1+bytes", (12 * MIB, 60), slow=True),
    Target("backup", "coordinator.runtime.restore", backup, (StoreError,), "1+bytes", (12 * MIB, 200), slow=True),
    Target("bundle", "export.manifest, export.publish", bundle, (ExportError,), "1+json", (MIB, 60)),
    Target("broker_url", "transport.address.parse_url", broker_url, (BrokerError,), "text", (MIB, 60)),
    Target("broker_identity", "transport.broker", broker_identity, (), "json", (MIB, 60)),
)
