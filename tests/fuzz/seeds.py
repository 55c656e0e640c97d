"""The inputs that fuzzing begins with, made by the encoders themselves: ``python -m fuzz.seeds`` writes them.

What a file is called is what it is; files that begin with ``found-`` are what fuzzing has found, and are not made here.
"""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from coordinator.runtime.object_urls import urls_of
from device_agent.core.state import DataFacts, Result, RetainedParts, Saved
from device_agent.runtime.slots import record
from edgefl.export import bundle_format as bundles
from edgefl.export.tables import encode_tables
from edgefl.methods.cluster import WIDTH
from edgefl.methods.mmic.sketches import BITS, ROWS
from edgefl.models.spec import EncoderSpec
from edgefl.plan.job import Job, RunPlan
from edgefl.process.worker import Answer, Request
from edgefl.protocol import chunks, messages, packing, topics
from edgefl.protocol import tensors as parts
from edgefl.records import PACKINGS, Attempt, Budget, Capabilities, Figure, ObjectRef, Refusal
from edgefl.run_records import BundleRow
from edgefl.storage.partials import chunk_count
from edgefl.transport.address import Address
from fuzz import disk, wire
from fuzz.seeds_people import SEEDS as SEEDS_OF_PEOPLE
from fuzz.target import CORPUS

Seeds = Iterator[tuple[str, bytes]]
ATTEMPT = Attempt("r1", 1, 2, 1, 1700000000000)
REF = ObjectRef("a" * 64, 5000)
FIGURES = {"flops": Figure(1.5e9, "counted", "FlopCounterMode"), "energy_j": Figure(reason="no sensor")}


def up() -> Seeds:
    for message in (
        messages.Hello(
            "cam-07", "s1", "0.1.0", 1, "jetson-nano", Capabilities(4 * 2**30), Budget(step_memory_bytes=2**28),
            {"acc": (8, 2)}, {"": 30, "acc": 20}, (15, 15), ATTEMPT,
        ),
        messages.Accept("cam-07", ATTEMPT),
        messages.Decline("cam-07", ATTEMPT, Refusal("memory", 2.0, 1.0, "B", "too much"), FIGURES),
        messages.Progress("cam-07", ATTEMPT, 1, 2, 30, 0.5),
        messages.Update("cam-07", ATTEMPT, {"acc/stage1": REF}, {"acc/stage1": 20}, {"loss": 0.5}, FIGURES),
        messages.Spent("cam-07", ATTEMPT, FIGURES),
        messages.Need("cam-07", "t", 1 << 32 | 1, 1024, 16, 0, {"a" * 64: b"\x1f"}),
        messages.Heartbeat("cam-07", "s1", 7, ATTEMPT, 2**30),
        messages.Presence("cam-07", "s1", online=True),
        messages.LogLines("cam-07", 3, 41, ("12:00:00   connected", "12:00:01 ! declined")),
    ):  # fmt: skip
        yield type(message).__name__.lower(), messages.encode(message)


def down() -> Seeds:
    packed = {"acc/stage1": messages.PackedPart(REF, "b" * 64, "delta+int8")}
    for message in (
        messages.Welcome("c", 1, "r1", 1700000000000),
        messages.Offer(ATTEMPT, 600.0, Job(), {"acc/stage1": REF}, "t", 1024, 16, packed),
        messages.Grant("cam-07", "t", 1 << 32 | 1, 1024, 16, 3),
        messages.Ack(ATTEMPT, accepted=False, refusal=Refusal("malformed", detail="part x")),
        messages.Abort(ATTEMPT, "deadline"),
        messages.Drain("r1", "finished", 1700000000000),
        messages.LogRequest(3, 50, 41),
    ):
        yield type(message).__name__.lower(), messages.encode(message)


def topic() -> Seeds:
    yield "up", topics.build("up", "fleet", "cam-07").encode()
    yield "presence", topics.build("presence", "fleet", "cam-07").encode()
    yield "up-object", topics.build("up-object", "fleet", "cam-07", "t1").encode()
    yield "shared-object", topics.build("shared-object", "fleet", transfer="t1").encode()


def object_url() -> Seeds:
    (url,) = urls_of("", wire.URL_KEY, "GET", "cam-07", "d-s1r1a1-0", wire.URL_SIZES, 1000.0).values()
    yield "signed", url.encode()


def chunk() -> Seeds:
    yield "small", chunks.encode_chunk(chunks.Chunk("a" * 64, 0, b"weights"))
    some = [chunks.Chunk("c" * 64, index, bytes([index]) * (index + 1)) for index in range(3)]
    yield "several", next(chunks.bundled(some, 4096))
    yield "last", chunks.encode_chunk(chunks.Chunk("b" * 64, 2**32 - 1, bytes(range(256))))


def needs() -> Seeds:
    whole = {name: ((1 << chunk_count(size, 1024)) - 1) for name, size in wire.SIZES.items()}
    missing = {name: bits.to_bytes((bits.bit_length() + 7) // 8, "little") for name, bits in whole.items()}
    one = messages.Need(wire.DEVICE, "t", 1 << 32 | 1, 1024, 16, 0, missing)
    two = msgspec.structs.replace(one, device=wire.OTHER, epoch=2 << 32 | 1)
    on = [msgspec.structs.replace(one, missing={}, received=n) for n in (8, 16, 102)]
    done = msgspec.structs.replace(one, missing={}, done=True)
    yield "two", msgspec.msgpack.encode([one, two, *on, done])
    yield "again", msgspec.msgpack.encode([one, msgspec.structs.replace(one, epoch=1 << 32 | 2), done])


def chunks_in() -> Seeds:
    rows = [
        (place, i, min(1024, size - 1024 * i), True)
        for place, size in enumerate((5000, 96 * 1024, 1))
        for i in range(-(-size // 1024))
    ]
    yield "in-order", msgspec.msgpack.encode(rows)
    yield "wrong-hash", msgspec.msgpack.encode([(*row[:3], n % 9 > 0) for n, row in enumerate([*rows[:5], *rows[:5]])])


def part() -> Seeds:
    tensors = {"w": np.ones((4, 3), np.float32), "n": np.array(7), "flag": np.array([True, False])}
    for encoding in ("f32", "f16"):
        yield encoding, parts.encode_part(tensors, encoding)
    yield "empty", parts.encode_part({})


def packed() -> Seeds:
    target = {"w": np.linspace(-1, 1, 1280, dtype=np.float32).reshape(32, 40), "b": np.ones(3, np.float32)}
    base = {name: np.zeros_like(value) for name, value in target.items()}
    for place, way in enumerate(PACKINGS):
        yield way.replace("+", "-"), bytes([place]) + packing.compress(target, base, way, 0.05).data


def update() -> Seeds:
    model = {"w": np.ones((32, 40), np.float32), "n": np.zeros(1, np.int64)}
    tables = {"acc": np.ones((3, 4), np.float32), "acc.count": np.ones(3, np.float32)}
    basis = {"class.0": np.eye(WIDTH, 3, dtype=np.float32)}
    yield "part", b"\0" + parts.encode_part(model)
    yield "part-packed", b"\x40" + packing.compress(model, model, "delta+int8", 0.1).data
    yield "prototypes", b"\1" + parts.encode_part(tables)
    yield "bases", b"\x0a" + parts.encode_part(basis)
    yield "no-sketch", b"\6" + parts.encode_part({"sketch": np.ones((1, 2**BITS // ROWS), np.int16)})
    yield "strange", b"\3" + parts.encode_part(model)


def chunk_map() -> Seeds:
    for place, chunk_bytes in enumerate((100, 333, 2500, 5000)):
        count = chunk_count(len(disk.CONTENT), chunk_bytes)
        yield (
            f"of-{chunk_bytes}",
            bytes([4 * place])
            + struct.pack("<4sI", b"EFM2", chunk_bytes)
            + b"\1\0" * (count // 2)
            + b"\1" * (count % 2),
        )


def agent_state() -> Seeds:
    update = messages.Update("cam-07", ATTEMPT, {"acc/stage1": REF})
    saved = Saved(
        messages.Offer(ATTEMPT, 600.0, Job(), {"acc/stage1": REF}, "t"),
        update,
        None,
        (RetainedParts(ATTEMPT, {"x": REF}),),
    )
    yield "work", b"\0" + msgspec.msgpack.encode(saved)
    yield "identity", b"\1" + b'{"device":"cam-07","fleet":"f"}'
    yield "slot", b"\3" + record(7, msgspec.msgpack.encode(saved))
    yield "facts", b"\2" + msgspec.json.encode({"fingerprint": "x", "facts": DataFacts({"acc": (8, 2)}, {"": 3})})


def frames() -> Seeds:
    def frame(value: msgspec.Struct) -> bytes:
        data = msgspec.msgpack.encode(value)
        return struct.pack(">I", len(data)) + data

    note = frame(Answer("note", {"epoch": 1, "step": 2, "steps": 3}))
    yield "facts", note + frame(Answer("reply", msgspec.to_builtins(DataFacts({"acc": (8, 2)}))))
    yield "result", frame(Answer("reply", msgspec.to_builtins(Result({"task": REF}, {"task": 3}))))
    yield "error", frame(Answer("error", error="StoreError", message="the disk is full", remedy="Free space."))
    yield "request", frame(Request("warm", {"seat": {"device": "d"}}))


def ledger() -> Seeds:
    manifest = {"task": REF}
    given = {
        "plan": RunPlan(run="r"), "manifest": manifest, "part_bytes": {"task": 8}, "capabilities": Capabilities(1, 2),
        "budget": Budget(flops=1.0), "samples": {"": 3}, "class_counts": (1, 2), "participants": ["cam-07"],
        "metrics": {"loss": 0.5}, "record": {"select": {"choice": "all"}}, "value": {"phase": "round", "stage": 1},
    }  # fmt: skip
    for place, (table, column) in enumerate(disk.COLUMNS):
        yield f"{table}-{column}", bytes([place]) + msgspec.json.encode(given[column])


def ledger_file() -> Seeds:
    yield "head", b"\1\0\0\0" + b"SQLite format 3\0"
    yield "inside", b"\1\x40\x10\0" + b"CREATE TABLE"
    yield "no-database", b"\0garbage"


def backup() -> Seeds:
    whole = disk.copied_run()
    yield "whole", b"\0" + whole
    yield "head", b"\0" + whole[:1024]
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        yield "rows", b"\1" + archive.extractfile("r/ledger.jsonl").read()  # type: ignore[union-attr]


def bundle() -> Seeds:
    model = bundles.Manifest(
        name="acc", sha256="0" * 64, size_bytes=100, opset=20, modalities=("acc",), absent=("gyro",),
        encoders={"acc": EncoderSpec(input_shape=(8, 2))}, labels=("a", "b"),
        inputs=(bundles.Port("acc", "float32", ("batch", 8, 2)),),
        axes={"batch": bundles.Axis()}, mask="zero", masks=("zero",), capacity=3, parts={"task": REF},
        parity=(bundles.Check("zero", {"batch": 2}, {"logits": 1e-7}),),
    )  # fmt: skip
    yield "manifest", b"\0" + bundles.encode_json(model)
    yield "tables", b"\2" + encode_tables({"prototypes.acc": np.float32([[1, 0.5], [-2, 0]])})
    yield "index", b"\1" + bundles.encode_json(bundles.Index(bundles=(BundleRow("acc", "acc"),)))


def broker_url() -> Seeds:
    for place, address in enumerate(
        (
            Address("localhost", 1883),
            Address("::1", 8883, True, "u", "p:/@"),
            Address("h", 1, legacy=True, username="a b"),
        )
    ):
        yield str(place), address.secret_url().encode()


def broker_identity() -> Seeds:
    yield "identity", b'{"port":1883,"username":"edgefl","password":"abcDEF-_123"}'


def infer_request() -> Seeds:
    acc = b'{"name":"acc","shape":[1,2,2],"datatype":"FP32","data":[[[0.5,1],[2,-1e3]]]}'
    text = b'{"name":"text","shape":[2],"datatype":"BYTES","data":["a cat","a mat"]}'
    yield "json", b'{"id":"7","parameters":{"mask":"zero"},"inputs":[%s,%s],"outputs":[{"name":"acc"}]}' % (acc, text)
    tensors = (
        b'{"name":"acc","shape":[1,2],"datatype":"FP32","parameters":{"binary_data_size":8}},'
        b'{"name":"text","shape":[1],"datatype":"BYTES","parameters":{"binary_data_size":5}}'
    )
    head = b'{"inputs":[%s],"parameters":{"binary_data_output":true}}' % tensors
    yield "binary", head + b"\0" + np.array([1, 2], "<f4").tobytes() + b"\x01\0\0\0a"


SEEDS: dict[str, Callable[[], Seeds]] = {
    "message_up": up,
    "message_down": down,
    "topic": topic,
    "object_url": object_url,
    "chunk": chunk,
    "needs": needs,
    "chunks_in": chunks_in,
    "part": part,
    "packed": packed,
    "update": update,
    "infer_request": infer_request,
    "chunk_map": chunk_map,
    "agent_state": agent_state,
    "frames": frames,
    "ledger": ledger,
    "ledger_file": ledger_file,
    "backup": backup,
    "bundle": bundle,
    "broker_url": broker_url,
    "broker_identity": broker_identity,
}


def write(folder: Path = CORPUS) -> None:
    """Write every seed in place of the old ones; what was found stays."""
    for target, seeds in (SEEDS | SEEDS_OF_PEOPLE).items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for old in (folder / target).iterdir():
            if not old.name.startswith("found-"):
                old.unlink()
        for name, data in seeds():
            (folder / target / name).write_bytes(data)


if __name__ == "__main__":
    write()
