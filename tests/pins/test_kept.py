"""What lies on disk between two versions: snapshots, plans, the server's memory, a device's state, identities."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from coordinator.core import state as snapshot
from coordinator.core.state import Assignment, State
from device_agent.core.state import DataFacts, Saved
from device_agent.runtime.store import AgentStore, Owner
from edgefl.aggregation.history import Memory
from edgefl.export.bundle_format import Index, Manifest
from edgefl.identity import device, fleet, issued_tokens, token
from edgefl.identity.keys import Signer
from edgefl.plan.job import RunPlan
from edgefl.run_records import RunReport
from pins.filled import filled, kept
from pins.golden import WRITING, check, pinned

FILE = "kept.json"
#: In the ledger, in the server's part of the state, in the files of a fleet and of a bundle; what reports are made of.
STRUCTS = {
    "plan": RunPlan,
    "memory": Memory,
    "bundle manifest": Manifest,
    "bundle index": Index,
    "fleet": fleet.Record,
    "fleet's device": fleet.Device,
    "issued token": issued_tokens.Issued,
    "device's identity": device.Record,
    "report": RunReport,
}


@pytest.mark.parametrize("name", STRUCTS)
def test_structs(name: str):
    kind = STRUCTS[name]
    full = filled(kind)
    check(FILE, name, {"default": kept(kind()), "filled": kept(full)})
    if not WRITING:
        golden = {case: json.dumps(value) for case, value in pinned(FILE)[name].items()}
        assert msgspec.json.decode(golden["filled"], type=kind) == full
        assert msgspec.json.decode(golden["default"], type=kind) == kind()


class NamedAsBefore(State, frozen=True):
    """A state whose fields have the names that the pinned values are made from."""

    stragglers: dict[str, Assignment] = msgspec.field(default={}, name="behind")
    buffered: dict[str, Assignment] = msgspec.field(default={}, name="taken")
    last_aggregated: tuple[str, ...] = msgspec.field(default=(), name="counted")


NamedAsBefore.__name__ = "State"


def test_snapshots_of_a_coordinator():
    """Rows of every kind, and the state that a coordinator goes on from."""
    full = filled(NamedAsBefore)
    found = snapshot.changes(State(RunPlan()), full)
    check(FILE, "snapshots", {f"{kind} {name}".strip(): kept(row) for (kind, name), row in found.rows.items()})
    if not WRITING:
        rows = [(*key.partition(" ")[::2], row) for key, row in pinned(FILE)["snapshots"].items()]
        again = snapshot.decode(State(RunPlan()), rows)
        assert snapshot.position_of(again) == snapshot.position_of(full)
        assert again.devices == full.devices
        assert again.assignments == full.assignments
        assert (again.stragglers, again.buffered) == (full.stragglers, full.buffered)


def test_snapshots_that_say_little():
    """Of an earlier version: what stands for the fields it did not have."""
    hello, placement = {"hello": {"t": "hello"}}, {"placement": {}}
    rows = [("outline", "", {}), ("device", "a", hello), *((kind, "a", placement) for kind in ("assignment", "taken"))]
    found = snapshot.decode(State(RunPlan()), rows)
    little = {
        "outline": kept(msgspec.structs.replace(snapshot.position_of(found), open=None)),
        "devices": {name: kept(device) for name, device in found.devices.items()},
        "assignments": {name: kept(one) for name, one in found.assignments.items()},
        "behind": {name: kept(one) for name, one in found.stragglers.items()},
        "taken": {name: kept(one) for name, one in found.buffered.items()},
    }
    check(FILE, "snapshots that say little", little)


def test_state_of_a_device(tmp_path: Path):
    store = AgentStore(tmp_path, Owner("device", "fleet"), fingerprint="fingerprint")
    saved, facts = filled(Saved), filled(DataFacts)
    store.save(saved)
    store.save_facts(facts)
    store.close()
    texts = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.glob("*.json")}
    check(FILE, "device's files", sorted(path.name for path in tmp_path.iterdir()))
    check(FILE, "device's state", {**texts, "work.0": (tmp_path / "work.0").read_bytes().hex()})
    if not WRITING:
        (tmp_path / "work.0").write_bytes(bytes.fromhex(pinned(FILE)["device's state"]["work.0"]))
        store = AgentStore(tmp_path, Owner("device", "fleet"), fingerprint="fingerprint")
        assert store.load() == saved
        assert store.load_facts() == facts
        store.close()


def test_enrolment_and_signatures():
    secret = bytes(range(token.SECRET_BYTES))
    key = token.proof_key(secret)
    request = filled(token.Request)
    request = replace(request, proof=token.request_proof(key, "fleet", token.client_id(secret), request))
    answer = filled(token.Answer)
    signer = Signer(bytes(range(32)))
    found = {
        "token": token.encode_token(token.Token(1, "fleet", "device", "mqtts://host:1", secret, b"authority")),
        "client": token.client_id(secret),
        "request": token.encode(request).hex(),
        "answer": token.encode(replace(answer, proof=token.answer_proof(key, answer, request))).hex(),
        "signed": signer.seal("edgefl/1/fleet/d/device/down", b"body").hex(),
        "public key": signer.public.hex(),
    }
    check(FILE, "enrolment", found)
