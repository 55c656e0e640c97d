"""Packed parts through a whole fleet: fewer bytes, the same bits on both sides, nothing left when a stage ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from memory_fleet import plan_of, run_fleet, share, state_of

from coordinator.core.assignments import transfer_of
from coordinator.runtime.validate_update import Rules, check_update
from device_agent.core.retained import restore_residuals, retained, retained_before
from device_agent.core.state import RetainedParts, State
from device_agent.runtime.transfers import wanted
from device_agent.trainer.exchanged_parts import Sending, compress_update, decompress_offer
from edgefl.aggregation.aggregate import RoundTerms, aggregate_round
from edgefl.aggregation.history import UpdateInfo
from edgefl.aggregation.server_state import PACKED, packed_parts
from edgefl.aggregation.server_state import RESIDUAL as SERVER_RESIDUAL
from edgefl.errors import DivergedError
from edgefl.plan.job import Job, RunPlan, Slots, Stage, Transfer
from edgefl.plan.stages import RESIDUAL
from edgefl.protocol.messages import Offer, PackedPart
from edgefl.protocol.tensors import decode_part, encode_part, is_packed
from edgefl.records import PACKINGS, Attempt, ObjectRef, Refusal
from edgefl.run_records import RunReport
from edgefl.storage.objects import ObjectStore

INT8 = Transfer((("*", "delta+int8"),), (("*", "delta+int8"),))
TOP = Transfer((("*", "delta+top"),), (("*", "delta+top"),), top=0.05)


def weights(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"w": (scale * rng.normal(size=(50, 60))).astype(np.float32), "b": np.full(3, seed, np.float32)}


def put(store: ObjectStore, tensors: dict[str, np.ndarray]) -> ObjectRef:
    return store.put(encode_part(tensors))


def read(store: ObjectStore, ref: ObjectRef) -> dict[str, np.ndarray]:
    return decode_part(store.read(ref.id))


def sending_of(parts, offered, kept, transfer, store, **slots) -> Sending:
    """``compress_update`` of copies: it uses up what it is given."""
    job = Job(stage=Stage(trained=tuple(parts)), slots=Slots(**slots), transfer=transfer)
    copies = {part: {name: value.copy() for name, value in tensors.items()} for part, tensors in parts.items()}
    return compress_update(job, copies, offered, kept, store)


def test_both_ways_through_a_server_and_a_device(tmp_path: Path) -> None:
    """Three rounds; the device gets packed parts only, and what the server reads of its update is what it held."""
    server, device = ObjectStore(tmp_path / "server"), ObjectStore(tmp_path / "device")
    state = {"task": put(server, weights(0))}
    device.put(server.read(state["task"].id))
    kept: dict[str, dict[str, np.ndarray]] = {}
    for number in range(1, 4):
        offered = {"task": state["task"]}
        offer = Offer(manifest=offered, packed=packed_parts(state, offered))
        refs = wanted(offer, device)
        for ref in refs:
            device.put(server.read(ref.id))
        decompress_offer(offer, device)
        assert device.has(state["task"].id)
        if number > 1:
            assert [is_packed(device.read(ref.id)) for ref in refs] == [True]
            assert refs[0].size < 0.35 * state["task"].size
        trained = {n: v + 0.1 * weights(number)[n] for n, v in read(device, state["task"]).items()}
        sending = sending_of({"task": trained}, offered, kept, INT8, device)
        kept = {part: read(device, ref) for part, ref in sending.residuals.items()}
        assert is_packed(device.read(sending.manifest["task"].id))
        server.put(device.read(sending.manifest["task"].id))
        found = check_update(server, sending.manifest, state, Rules(transfer=INT8))
        assert isinstance(found, dict)
        arrived = read(server, found["task"])
        np.testing.assert_allclose(arrived["w"] + kept[f"{RESIDUAL}task"]["w"], trained["w"], atol=0.02)
        other = {"task": put(server, {n: v + 0.1 * weights(9)[n] for n, v in read(server, state["task"]).items()})}
        updates = [UpdateInfo(name, sent, {"task": 5}, {}, True, -1) for name, sent in (("a", found), ("b", other))]
        state, _ = aggregate_round(updates, server, state, terms=RoundTerms(transfer=INT8))
        lost = read(server, state[f"{SERVER_RESIDUAL}task"])
        assert set(lost) == {"w"}  # what travels whole is not lost
        assert 0 < np.abs(lost["w"]).max() < 0.01
    state, _ = aggregate_round([UpdateInfo("a", found, {"task": 5}, {}, True, -1)], server, state)
    assert not [key for key in state if key.startswith((SERVER_RESIDUAL, PACKED))]  # a whole round leaves nothing


def test_what_is_not_sent_now_is_sent_later(tmp_path: Path) -> None:
    """Of a change 5 % of the values are sent each round: without new changes everything has arrived after 20."""
    store = ObjectStore(tmp_path)
    state, target = {"task": put(store, weights(0))}, weights(1)
    target["b"] = weights(0)["b"]
    distances = []
    for number in range(25):
        # The first round moves to the target; afterwards devices send back what they were given.
        sent = target if number == 0 else read(store, state["task"])
        state, _ = aggregate_round(
            [UpdateInfo("a", {"task": put(store, sent)}, {"task": 1}, {}, True, -1)],
            store,
            state,
            terms=RoundTerms(transfer=TOP),
        )
        distances.append(float(np.abs(read(store, state["task"])["w"] - target["w"]).mean()))
    assert distances[0] > 0.5
    assert distances[-1] < 0.01 * distances[0]


def test_a_newcomer_fetches_whole_parts(tmp_path: Path) -> None:
    server, device = ObjectStore(tmp_path / "server"), ObjectStore(tmp_path / "device")
    state = {"task": put(server, weights(0))}
    update = UpdateInfo("a", {"task": put(server, weights(1))}, {"task": 1}, {}, True, -1)
    state, _ = aggregate_round([update], server, state, terms=RoundTerms(transfer=INT8))
    offered = {"task": state["task"]}
    assert wanted(Offer(manifest=offered, packed=packed_parts(state, offered)), device) == [state["task"]]
    whole = Transfer(down=(("*", "int8"),))  # not a change of anything: everybody takes the packed one
    state, _ = aggregate_round([update], server, state, terms=RoundTerms(transfer=whole))
    offered = {"task": state["task"]}
    offer = Offer(manifest=offered, packed=packed_parts(state, offered))
    (ref,) = wanted(offer, device)
    assert ref.size < 0.35 * state["task"].size
    device.put(server.read(ref.id))
    decompress_offer(offer, device)
    assert device.has(state["task"].id)


def test_a_part_that_can_not_be_made_is_fetched_whole_when_it_is_offered_again(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    base, whole = put(store, weights(0)), ObjectRef("0" * 64, 1)
    sent = sending_of({"task": weights(1)}, {"task": base}, {}, INT8, store).manifest["task"]
    offer = Offer(manifest={"task": whole}, packed={"task": PackedPart(sent, base.id, "delta+int8")})
    assert wanted(offer, store) == [sent]
    refusal = decompress_offer(offer, store)
    assert refusal is not None
    assert (refusal.reason, refusal.detail[:25]) == ("packed", "part 'task': it unpacks t")
    assert wanted(offer, store) == [whole]


def test_what_the_server_can_not_pack_travels_whole(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    state, large = {"task": put(store, weights(0))}, weights(1, scale=1e6)
    update = UpdateInfo("a", {"task": put(store, large)}, {"task": 1}, {}, True, -1)
    state, record = aggregate_round([update], store, state, terms=RoundTerms(transfer=Transfer(down=(("*", "f16"),))))
    assert "more than f16 holds" in record["whole"]["task"]
    np.testing.assert_allclose(read(store, state["task"])["w"], large["w"])
    assert packed_parts(state, {"task": state["task"]}) == {}


def test_a_part_nobody_trained_in_the_last_round_is_completed(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    state = {part: put(store, weights(0)) for part in ("head/a", "task")}
    both = UpdateInfo("a", {p: put(store, weights(1)) for p in state}, dict.fromkeys(state, 1), {}, True, -1)
    state, _ = aggregate_round([both], store, state, terms=RoundTerms(transfer=TOP))
    assert f"{SERVER_RESIDUAL}head/a" in state
    one = UpdateInfo("a", {"task": state["task"]}, {"task": 1}, {}, True, -1)
    state, _ = aggregate_round([one], store, state, terms=RoundTerms(transfer=Transfer(whole=True)))
    np.testing.assert_allclose(read(store, state["head/a"])["w"], weights(1)["w"], atol=1e-6)
    assert not [key for key in state if key.startswith((SERVER_RESIDUAL, PACKED))]


def test_the_closing_round_of_a_packed_run_leaves_the_finished_model_as_it_is(tmp_path: Path) -> None:
    """Matcher networks are fitted to what was sent of it: what was not sent may not come into it after them."""
    stages = (Stage(1, rounds=1), Stage(2, rounds=1, trained=("match/a",)))
    plan = RunPlan(transfer=Transfer(up=TOP.up, down=TOP.down, top=0.05, closing="packed"), stages=stages)
    store = ObjectStore(tmp_path)
    state = {part: put(store, weights(0)) for part in ("head/a", "match/a")}
    for number, part in enumerate(("head/a", "match/a"), 1):
        finished, transfer = dict(state), transfer_of(plan, Attempt("r", number, 1, 1))
        sent = sending_of({part: weights(1)}, state, {}, transfer, store).manifest
        assert is_packed(store.read(sent[part].id)) == (part == "head/a")
        found = check_update(store, sent, state, Rules(transfer=transfer))
        assert isinstance(found, dict)
        update = UpdateInfo("a", found, {part: 1}, {}, True, -1)
        state, _ = aggregate_round([update], store, state, terms=RoundTerms(transfer=transfer))
    assert f"{SERVER_RESIDUAL}head/a" in finished
    assert state["head/a"] == finished["head/a"]
    np.testing.assert_array_equal(read(store, state["match/a"])["w"], weights(1)["w"])


def test_what_goes_on_from_the_own_copy_is_not_sent_twice(tmp_path: Path) -> None:
    """A mapping that stays on its device holds by itself what was not sent: adding it again would make it grow."""
    store = ObjectStore(tmp_path)
    state, own, kept = {"head/a": put(store, weights(0))}, weights(1), {}
    distances = []
    for _ in range(12):
        sending = sending_of({"head/a": own}, state, kept, TOP, store, exchange="mappings")
        assert sending.residuals == {}
        found = check_update(store, sending.manifest, state, Rules(transfer=TOP))
        update = UpdateInfo("a", found, {"head/a": 1}, {}, True, -1)
        state, _ = aggregate_round(
            [update], store, state, {"weight": {"relationship": {}}}, terms=RoundTerms(transfer=TOP)
        )
        assert not [key for key in state if key.startswith(SERVER_RESIDUAL)]
        state = {"head/a": state["@a/head/a"]}
        distances.append(float(np.abs(read(store, state["head/a"])["w"] - own["w"]).mean()))
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.6 * distances[0]


def test_a_round_sent_whole_leaves_nothing_to_add_again() -> None:
    before = RetainedParts(Attempt("r", 1, 2, 1), {RESIDUAL + "task": ObjectRef("1" * 64, 1)})
    attempt = Attempt("r", 1, 3, 1)
    state = State(retained=retained(State(retained=(before,)), attempt, {}))
    assert state.retained == (before, RetainedParts(attempt))  # the round may be tried again, from the one before
    assert retained_before(state, Attempt("r", 2, 1, 1))[-1].manifest == {}
    assert retained_before(state, Attempt("r", 1, 3, 2))[-1] == before


def test_an_update_packed_against_the_rules_is_refused(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    state = {"task": put(store, weights(0))}
    sent = sending_of({"task": weights(1)}, state, {}, INT8, store).manifest
    assert isinstance(check_update(store, sent, state, Rules(transfer=INT8)), dict)
    strange = {"task": put(store, {"v": weights(1)["w"]})}
    assert isinstance(check_update(store, strange, state, Rules(transfer=INT8)), Refusal)
    other = {"task": put(store, {"w": np.zeros((2, 2000), np.float32), "b": weights(1)["b"]})}
    packed = sending_of({"task": {"w": np.ones((2, 2000), np.float32), "b": weights(1)["b"]}}, other, {}, INT8, store)
    refusal = check_update(store, packed.manifest, state, Rules(transfer=INT8))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "malformed"


@pytest.mark.parametrize("packing", [name for name in PACKINGS if name != "f32"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_part_that_has_diverged_is_not_compressed(packing, value, tmp_path: Path) -> None:
    """The largest tenth of NaN is nothing: a change of zero would arrive, and the residual stay NaN for good."""
    store = ObjectStore(tmp_path)
    state = {"task": put(store, weights(0))}
    for name in ("w", "b"):
        trained = weights(1)
        trained[name].reshape(-1)[1:] = value
        with pytest.raises(DivergedError, match=f"part task: '{name}' has values that are not finite"):
            sending_of({"task": trained}, state, {}, Transfer(up=(("*", packing),)), store)


def test_what_a_refused_update_left_out_is_forgotten_and_the_round_before_is_not() -> None:
    one, two = Attempt("r", 1, 1, 1), Attempt("r", 1, 2, 1)
    refs = [ObjectRef(str(i) * 64, 1) for i in range(4)]
    manifests = [{RESIDUAL + "task": refs[i], "head/a": refs[i + 1]} for i in (0, 2)]
    kept = (RetainedParts(one, manifests[0]), RetainedParts(two, manifests[1]))
    state = restore_residuals(State(retained=kept), two)
    assert state.retained[-1].manifest == {RESIDUAL + "task": refs[0], "head/a": refs[3]}
    assert restore_residuals(State(retained=kept), one).retained == kept
    assert restore_residuals(State(retained=kept[1:]), two).retained[-1].manifest == {"head/a": refs[3]}


@pytest.mark.parametrize("packing", [name for name in PACKINGS if name.startswith("delta+")])
def test_huge_scales_are_refused_without_a_warning(packing, tmp_path: Path) -> None:
    """Finite, and beyond f32 once multiplied or added: the log of a coordinator is not a device's to fill."""
    store, transfer = ObjectStore(tmp_path), Transfer(up=(("*", packing),))
    state = {"task": put(store, weights(0, scale=3e38 / 4))}
    (ref,) = sending_of({"task": weights(1)}, {"task": put(store, weights(0))}, {}, transfer, store).manifest.values()
    coded = decode_part(store.read(ref.id))
    huge = {np.dtype(np.int16): 0x7F7F, np.dtype(np.float32): 3e38}  # the largest bfloat16; of f16 it is NaN
    coded |= {
        name: np.full_like(value, huge[value.dtype])
        for name, value in coded.items()
        if name.endswith(("|scale", "|bf16", "|f16"))
    }
    refusal = check_update(store, {"task": store.put(encode_part(coded, "packed"))}, state, Rules(transfer=transfer))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "not_finite"


def test_a_device_sends_no_larger_share_than_the_run_asks_for(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    state = {"task": put(store, weights(0))}
    sent = sending_of({"task": weights(1)}, state, {}, TOP, store).manifest
    assert isinstance(check_update(store, sent, state, Rules(transfer=TOP)), dict)
    refusal = check_update(store, sent, state, Rules(transfer=Transfer(TOP.up, top=0.04)))
    assert isinstance(refusal, Refusal)
    assert "150 of 3000 values, at most 120 are agreed on" in refusal.detail


def test_rules_by_part_and_rounds_sent_whole(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path)
    offered = {part: put(store, weights(0)) for part in ("head/a", "task")}
    trained = {part: weights(1) for part in offered}
    sent = sending_of(trained, offered, {}, Transfer((("head/*", "int8"),)), store).manifest
    assert [is_packed(store.read(sent[part].id)) for part in ("head/a", "task")] == [True, False]
    kept = {RESIDUAL + "task": {"w": np.ones((50, 60), np.float32)}}
    whole = sending_of(trained, offered, kept, Transfer((("*", "int8"),), whole=True), store)
    assert whole.residuals == {}
    np.testing.assert_allclose(read(store, whole.manifest["task"])["w"], weights(1)["w"] + 1)


def bytes_of(report: RunReport, name: str) -> float:
    return sum(row.measured[name].value or 0 for row in report.assignments)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["delta+int8", "f16"])
def test_a_fleet_learns_the_same_from_fewer_bytes(packing, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("edgefl.plan.packed_sizes.WHOLE_BELOW", 16)
    shares = {name: share(30, {"a": 1.0, "b": 1.0}, seed) for seed, name in enumerate(("left", "right"))}
    reports, states = [], []
    for up_and_down in ("f32", packing):
        directory = tmp_path / up_and_down
        directory.mkdir()
        changes = ["training.rounds=[4, 3]", "model.head.width=64"]
        changes += [f"transfer.up={up_and_down}", f"transfer.down={up_and_down}"]
        reports.append(run_fleet(directory, plan_of(directory, "lw-fedmml", "ab", 2, changes), shares))
        store, state = state_of(directory)
        assert not [key for key in state if key.startswith((SERVER_RESIDUAL, PACKED))]
        states.append({part: read(store, ref) for part, ref in state.items() if part.startswith("head/")})
    plain, packed = reports
    for name in ("payload_up_bytes", "payload_down_bytes"):
        assert bytes_of(packed, name) < 0.8 * bytes_of(plain, name)
    moved = [np.abs(v - states[1][part][n]).mean() for part, ts in states[0].items() for n, v in ts.items()]
    size = [np.abs(v).mean() for ts in states[0].values() for v in ts.values()]
    assert 0 < sum(moved) < 0.1 * sum(size)


def of_round(report: RunReport, stage: int, number: int) -> list[tuple[str, float, float]]:
    """(figure, measured, predicted) of every device's bytes in a round."""
    rows = [row for row in report.assignments if (row.stage, row.round) == (stage, number)]
    names = ("payload_up_bytes", "payload_down_bytes")
    return [(n, row.measured[n].value or 0.0, row.predicted[n].value or 0.0) for row in rows for n in names]


@pytest.mark.parametrize(
    "up_and_down",
    [("delta+eden1", "delta+eden2"), pytest.param(("delta+top", "delta+int4"), marks=pytest.mark.slow)],
    ids=str,
)
def test_a_fleet_that_packs_the_last_round_of_a_stage_sends_no_part_whole_twice(
    up_and_down, tmp_path, monkeypatch
) -> None:
    """Devices unpack to the hashes that they are offered, or refuse; bytes are as predicted, in every round."""
    monkeypatch.setattr("edgefl.plan.packed_sizes.WHOLE_BELOW", 256)
    shares = {name: share(30, {"a": 1.0, "b": 1.0}, seed) for seed, name in enumerate(("left", "right"))}
    reports = {}
    for closing in ("whole", "packed"):
        directory = tmp_path / closing
        directory.mkdir()
        changes = ["training.rounds=[3, 2]", "model.head.width=256", "model.head.out=64", "model.fusion_width=64"]
        changes += ["transfer.top=0.05", f"transfer.closing={closing}"]
        changes += [f"transfer.{way}={packing}" for way, packing in zip(("up", "down"), up_and_down, strict=True)]
        report = reports[closing] = run_fleet(directory, plan_of(directory, "lw-fedmml", "ab", 2, changes), shares)
        assert {row.status for row in report.assignments} == {"done"}
        _, state = state_of(directory)
        left = [key for key in state if key.startswith((SERVER_RESIDUAL, PACKED))]
        assert bool(left) == (closing == "packed"), "the residual of the run's last round is not sent"
        for stage, rounds in enumerate((3, 2), 1):
            for number in range(1, rounds + 1):
                for name, measured, predicted in of_round(report, stage, number):
                    assert measured == pytest.approx(predicted, rel=0.02), (closing, stage, number, name)
    sums = {
        closing: [sum(one[1] for one in of_round(report, *at)) for at in ((1, 2), (1, 3), (2, 1), (2, 2))]
        for closing, report in reports.items()
    }
    usual, last, first, _ = sums["whole"]
    assert last > 2 * usual
    assert sums["packed"][0] == pytest.approx(usual, rel=0.02)
    assert sums["packed"][1] == pytest.approx(usual, rel=0.02)
    assert sums["packed"][2] < 0.6 * first
