"""What comes from the broker: messages, topics, chunks, what transfers are asked for, parts, whole updates."""

from __future__ import annotations

import functools
import io
from typing import Any

import msgspec
import numpy as np

from coordinator.runtime.inbound import Inbound
from coordinator.runtime.object_urls import LEAST_BYTES, permit_of, urls_of
from coordinator.runtime.validate_update import Rules, check_sizes, check_update
from edgefl.errors import ModelError, ProtocolError
from edgefl.plan.job import Transfer
from edgefl.protocol import chunks, messages, packing, topics
from edgefl.protocol import tensors as parts
from edgefl.protocol.messages import Ack, Need
from edgefl.records import PACKINGS, Attempt, Manifest, ObjectRef, Refusal
from edgefl.serve.limits import Refused
from edgefl.serve.tensors import Reply, decode_request, encode_reply
from edgefl.storage.objects import ObjectStore
from edgefl.transfer.receiver import ChunkIndex, Instruction, Receiver, SendChunk, StoreChunk, VerifyObject
from edgefl.transfer.sender import Sender
from fuzz.target import MIB, Target, scratch

#: Largest part the targets take: a header that claims more is refused, so that little is allocated.
PART_LIMIT = MIB // 4
SIZES = {"a" * 64: 5000, "b" * 64: 96 * 1024, "c" * 64: 1}
URL_KEY, URL_SIZES = b"k" * 32, {"d" * 64: LEAST_BYTES}
DEVICE, OTHER = "cam-07", "cam-08"


def up(data: bytes) -> None:
    """The same message again from its own bytes; the coordinator takes or counts it, whatever its topic."""
    message = messages.decode_up(data)
    _again(message, messages.decode_up)
    for channel in ("up", "presence"):
        inbound = Inbound(silence_s=30.0, introduce_s=1.0)
        event = inbound.read(topics.Topic(channel, message.device, ""), data, 1.0)
        assert event is not None or inbound.dropped.total() or channel == "presence" or message.device, message
        inbound.silent(100.0)
        inbound.strangers(100.0)


def down(data: bytes) -> None:
    _again(messages.decode_down(data), messages.decode_down)


def _again(message: Any, decode: Any) -> None:
    try:
        sent = messages.encode(message)
    except ProtocolError as error:  # with every default written out it may have become too long
        if "exceeds the limit" not in error.message:
            raise AssertionError(message) from error
        return
    assert messages.encode(decode(sent)) == sent


def topic(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    found = topics.parse(text)
    fleet = text.split("/")[2]
    assert topics.build(found.channel, fleet, found.device, found.transfer) == text
    for name in (fleet, found.device, found.transfer):
        assert not name or topics.check_name("name", name) == name


def object_url(data: bytes) -> None:
    """What it allows is signed: no other URL than the one that names it."""
    text = data.decode("utf-8", errors="replace")
    path, _, query = text.partition("?")
    permit = permit_of(URL_KEY, "GET", path, query.encode(errors="replace"), 1000.0)
    (url,) = urls_of(
        "", URL_KEY, "GET", permit.device, permit.transfer, {permit.object_id: permit.size}, 1000.0
    ).values()
    assert url.partition("&sign=")[2] in text


def chunk(data: bytes) -> None:
    found = chunks.decode_chunks(data)
    assert b"".join(map(chunks.encode_chunk, found)) == data
    sizes = [len(one.data) for one in found]
    assert sum(sizes) == len(data) - chunks.HEADER_BYTES * len(found)
    assert all(sizes)


def asked(data: bytes) -> None:
    """A sender that is sent these Needs: it never raises, and sends only chunks that exist, at most what is allowed."""
    try:
        needs = msgspec.msgpack.decode(data, type=list[Need])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # ``up`` sees to what is no Need
    sender = Sender("t", SIZES, (DEVICE, OTHER))
    now = 0.0
    for number, need in enumerate(needs[:50]):
        now += number % 3
        _sent(sender, sender.on_need(need.device, need, now))
        _sent(sender, sender.on_tick(now))
    for device in (DEVICE, OTHER, ""):
        _sent(sender, sender.drop(device, now))
    assert not sender._receivers.keys() & {DEVICE, OTHER}


def _sent(sender: Sender, instructions: list[Instruction]) -> None:
    sends = [one for one in instructions if isinstance(one, SendChunk)]
    for one in sends:
        assert 0 <= one.index < -(-SIZES[one.object_id] // sender.chunk_bytes)
    assert len(sends) <= 3 * 256 * 2


def received(data: bytes) -> None:
    """A receiver of these (object, index, size, verdict): it never raises, and stores each chunk once."""
    try:
        rows = msgspec.msgpack.decode(data, type=list[tuple[int, int, int, bool]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    ids = [*SIZES, "d" * 64]
    receiver = Receiver("t", DEVICE, [ObjectRef(*one) for one in SIZES.items()], 1024, 4, incarnation=1)
    whole = ChunkIndex(SIZES, 1024)
    receiver.start({name: whole.unpack(whole.whole(name))[name] for name in SIZES}, 0.0)
    stored = set()
    for now, (place, index, size, verdict) in enumerate(rows[:200]):
        name = ids[place % len(ids)]
        for one in receiver.on_chunk(name, index, size, float(now)):
            if isinstance(one, StoreChunk):
                assert (one.object_id, one.index) not in stored
                assert size == whole.length(one.object_id, one.index)
                stored.add((one.object_id, one.index))
            if isinstance(one, VerifyObject):
                if not verdict:
                    stored -= {chunk for chunk in stored if chunk[0] == one.object_id}
                receiver.on_verified(one.object_id, verdict, float(now))
        receiver.on_tick(float(now))
    assert receiver.received >= len(stored)


def part(data: bytes) -> None:
    """Tensors or a refusal; where there are tensors they are within the limit, and a file of them reads the same."""
    tensors = parts.decode_part(data, PART_LIMIT, finite=True)
    assert sum(value.nbytes for value in tensors.values()) <= PART_LIMIT
    assert parts.decode_part(parts.encode_part(tensors), PART_LIMIT).keys() == tensors.keys()
    assert parts.read_layout(io.BytesIO(data)) == {n: (v.shape, v.dtype.kind == "f") for n, v in tensors.items()}
    for name in tensors:
        name.encode()  # it will stand in messages and logs


def packed(data: bytes) -> None:
    """The first byte says how it is packed, and whether it is based on something."""
    way = PACKINGS[data[0] % len(PACKINGS)] if data else PACKINGS[0]
    base = None if data[:1] >= b"\x80" else {"w": np.ones((32, 40), np.float32), "b": np.zeros(3, np.float32)}
    with np.errstate(over="ignore", invalid="ignore"):
        held = packing.decompress(data[1:], base, way, PART_LIMIT)
    assert base is None or held.keys() == base.keys()
    assert sum(value.nbytes for value in held.values()) <= PART_LIMIT


@functools.cache
def _store() -> tuple[ObjectStore, Manifest]:
    store = ObjectStore(scratch("update"))
    model = {"w": np.ones((32, 40), np.float32), "n": np.zeros(1, np.int64)}
    return store, {"acc/stage1": store.put(parts.encode_part(model))}


def update(data: bytes) -> None:
    """A whole object of an update, of a part the first byte chooses: counted, or refused in words that can be sent."""
    store, model = _store()
    name = ("acc/stage1", "prototypes", "signature", "strange")[data[0] % 4] if data else "strange"
    kind = ("", "sketch", "bases")[data[0] // 4 % 3] if data else ""
    ref = store.put(data[1:])
    try:
        check_sizes({name: ref}, model, Transfer())
        transfer = Transfer(up=(("*", "delta+int8" if data[0] & 64 else "f16"),))
        with np.errstate(over="ignore", invalid="ignore"):
            found = check_update(store, {name: ref}, model, Rules(kind, transfer))
    finally:
        if ref not in model.values():
            store.path(ref.id).unlink()
    if isinstance(found, Refusal):
        messages.encode(Ack(Attempt(), accepted=False, refusal=found))
        raise ProtocolError(found.detail)
    assert found.keys() == {name}
    if found[name] not in {ref, *model.values()}:
        store.path(found[name].id).unlink()


def infer_request(data: bytes) -> None:
    """A request to a server: its JSON, then what is binary, between them a zero byte where there is any."""
    head, zero, rest = data.partition(b"\0")
    request, inputs = decode_request(head + rest, len(head) if zero else None)
    assert [one.name for one in request.inputs] == list(inputs)
    assert all(len(array) == one.shape[0] for one, array in zip(request.inputs, inputs.values(), strict=True))
    if {one.name for one in request.outputs or ()} <= inputs.keys():
        encode_reply(Reply("m", inputs, {}, request.id), request)


TARGETS = (
    Target("message_up", "protocol.messages.decode_up, runtime.inbound", up, (ProtocolError,), "msgpack", (MIB, 100)),
    Target("message_down", "protocol.messages.decode_down", down, (ProtocolError,), "msgpack", (MIB, 100)),
    Target("topic", "protocol.topics.parse", topic, (ProtocolError,), "text"),
    Target("object_url", "coordinator.runtime.object_urls", object_url, (ProtocolError,), "text"),
    Target("chunk", "protocol.chunks.decode_chunks", chunk, (ProtocolError,), "chunk"),
    Target("needs", "transfer.sender, window (Need, Grant)", asked, (), "msgpack", (4 * MIB, 400)),
    Target("chunks_in", "transfer.receiver, window", received, (), "msgpack", (4 * MIB, 400)),
    Target("part", "protocol.tensors.decode_part, read_layout", part, (ProtocolError,), "part", (2 * MIB, 40)),
    Target("packed", "protocol.packing.decompress", packed, (ProtocolError,), "1+part", (2 * MIB, 40)),
    Target(
        "update", "runtime.validate_update (parts, prototypes, signature)", update, (ProtocolError, ModelError),
        "1+part", (4 * MIB, 40),
    ),
    Target(
        "infer_request", "serve.tensors (requests over HTTP and MQTT)", infer_request, (Refused,), "json", (MIB, 100),
    ),
)  # fmt: skip
