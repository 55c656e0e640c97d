"""Known devices: introductions, requests for placements, quarantine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from coordinator.core.moves import Fail, Plan, Planned, SendDrain, SendWelcome, Steps
from coordinator.core.state import Assignment, Device, Phase, State
from edgefl.budget.fit import trained_depth
from edgefl.patterns import is_pattern_key
from edgefl.plan.job import Arrival, Candidate, Placement
from edgefl.plan.preparation import preparation_of
from edgefl.plan.privacy import is_private
from edgefl.plan.training_samples import LABEL_THEM, UNLABELLED
from edgefl.protocol.messages import Hello
from edgefl.protocol.releases import mismatch
from edgefl.records import Figure, Refusal
from edgefl.registry import offers
from edgefl.report.refusals import REVOKED
from edgefl.report.units import quantity
from edgefl.run_records import DeviceRow

replace = msgspec.structs.replace

#: Connections of a device whose joins and leaves a run's ledger records: one that goes on so would fill it.
MOST_CONNECTIONS = 100
#: The protocol from which on devices read their data as a welcome asks, and upload as a job asks.
PREPARES = 1
#: ``Device.barred`` of a device in quarantine for the rest of the run.
FOR_GOOD = -1


def replaced(known: Device, generation: int) -> Device:
    """The device once another machine has its name: what the old one said, held and did counts no more."""
    fresh = Device(Hello(known.hello.device), online=False, generation=generation, awaited=True)
    session = known.hello.session or known.previous_session
    return replace(fresh, left_out=known.left_out, connections=known.connections, previous_session=session)


def introduce(steps: Steps, hello: Hello, generation: int = 1) -> None:
    """Record a device's hello. Its rejected updates and its first claim stay, unless it was replaced."""
    name, known = hello.device, steps.state.devices.get(hello.device)
    was = known or Device(hello, generation=generation)
    if was.awaited:
        was = replace(was, hello=hello, awaited=False)
    back = known is None or not known.online
    device = replace(was, hello=hello, online=True, first_claim=was.claim, connections=was.connections + back)
    if known is None or _facts(known.hello) != _facts(hello):
        device = replace(device, placement=None, ticket=0, declined=(), factors={})
    if hello.session != was.hello.session:
        device = replace(device, previous_session=was.hello.session)
    steps.set(devices={**steps.state.devices, name: device})
    facts = (hello.profile, hello.capabilities, hello.budget, hello.samples, hello.class_counts)
    steps.do(DeviceRow(name, *facts, hello.agent_version), SendWelcome(name))
    if back and device.connections <= MOST_CONNECTIONS:
        budget = msgspec.to_builtins(hello.budget)
        steps.emit("device_joined", name, {"profile": hello.profile, "samples": hello.samples, "budget": budget})
    claimed = device.claim.samples
    if any(count > claimed.get(key, 0) for key, count in hello.samples.items() if not is_pattern_key(key)):
        now, first = hello.samples.get("", 0), claimed.get("", 0)
        steps.warn_once(name, "claim", f"it now says it has {now} samples; in this run the first {first} count")
    if hello.session != was.hello.session and hello.session == was.previous_session:
        text = "two agents use this identity and take turns at the broker; stop one, or enrol it under its own name"
        steps.warn_once(name, "twin", text)
    if device.connections > MOST_CONNECTIONS:
        text = f"it connected {device.connections} times; its joins and leaves are not recorded any more"
        steps.warn_once(name, "comings", text)


def refuse_protocol(steps: Steps, hello: Hello) -> None:
    """Refuse a device with an incompatible release, with the reason each time; warn operators once."""
    text = mismatch("this coordinator", "its agent", hello.agent_version, hello.protocol)
    steps.drop("protocol")
    steps.do(SendDrain(hello.device, text))
    if hello.device not in steps.state.incompatible:
        steps.set(incompatible=steps.state.incompatible | {hello.device})
        steps.emit("warning", hello.device, {"text": f"{hello.device} is refused: {text}", "about": "protocol"})


def is_prepared(steps: Steps, hello: Hello) -> bool:
    """True if the device has read its data as the run asks; else ask for that, or refuse it.

    An earlier hello describes other samples, and would bound the device's claims wrongly.
    """
    plan = steps.state.plan
    wanted = preparation_of(plan)
    asked = "says how data is read (windows, statistics)" if wanted.id else ""
    if is_private(plan.server) and not offers({"upload": plan.slots.upload}, "upload", "default"):
        asked = "has devices add noise to what they send"
    if asked and hello.protocol < PREPARES:
        text = f"this run {asked}, and the device's release does not know of it"
        steps.do(SendDrain(hello.device, text))
        if hello.device not in steps.state.incompatible:
            steps.set(incompatible=steps.state.incompatible | {hello.device})
            steps.emit("warning", hello.device, {"text": f"{hello.device} is refused: {text}", "about": "protocol"})
        return False
    if hello.prepared == wanted.id:
        return True
    steps.do(SendWelcome(hello.device))
    return False


def _facts(hello: Hello) -> tuple[object, ...]:
    """Facts of a device that its placement depends on; a change requires a new plan."""
    measured = hello.capabilities.trainer_base_bytes > 0
    return hello.profile, hello.budget, hello.samples, hello.modalities, hello.class_counts, measured


def ask(steps: Steps, names: Iterable[str]) -> None:
    """Request placements of these devices in the current stage; answers to earlier requests for them are void."""
    state, names = steps.state, sorted(names)
    if names:
        ticket = state.tickets + 1
        devices = state.devices | {name: replace(state.devices[name], ticket=ticket) for name in names}
        steps.set(tickets=ticket, devices=devices)
        candidates = [
            Candidate(
                device=name,
                capabilities=devices[name].hello.capabilities,
                budget=devices[name].hello.budget,
                samples=devices[name].hello.samples,
                modalities=devices[name].hello.modalities,
                class_counts=devices[name].hello.class_counts,
                declined=devices[name].declined,
                arrival=arrival_of(devices[name], state.stage, state.rounds),
                factors=devices[name].factors,
            )
            for name in names
        ]
        steps.do(Plan(ticket, state.stage, tuple(candidates)))


def arrival_of(device: Device | None, stage: int, rounds: Sequence[int]) -> Arrival:
    """State of the model held by a device at this stage; ``rounds``: of each stage.

    One that took no part in the stage before counts as joining: that stage and earlier ones changed what it holds.
    """
    before = max((s for s in range(1, stage) if rounds[s - 1]), default=0)
    if device is None or not device.holds or device.holds < before:
        return "joining"
    return "staying" if device.holds >= stage else "entering"


def take_placements(steps: Steps, answer: Planned) -> list[str]:
    """Record the planner's placements. Returns the devices with a placement still valid."""
    devices = dict(steps.state.devices)
    known = [one for one in answer.placements if one.device in devices]
    valid = [one for one in known if devices[one.device].ticket == answer.ticket]
    for one in valid:
        devices[one.device] = replace(devices[one.device], placement=one, ticket=0)
    steps.set(devices=devices)
    if valid:
        placed = [
            {
                "device": one.device,
                "ok": one.refusal is None,
                **how_data(one),
                "factors": {name: round(factor, 3) for name, factor in one.factors.items()},
                "step_peak_bytes": one.predicted.get("step_peak_bytes", Figure()).value,
                "flops": one.predicted.get("flops", Figure()).value,
                **figures_of(one.refusal or Refusal()),
                **({"shortened": figures_of(one.shortened)} if one.shortened else {}),
                **({"left_out": devices[one.device].left_out or REVOKED} if devices[one.device].out else {}),
            }
            for one in valid
        ]
        steps.emit("stage_planned", data={"placements": placed})
    else:
        steps.drop("stale plan")
    return [one.device for one in valid]


def how_data(placement: Placement) -> dict[str, object]:
    """Data for an event on a placement: the device's training."""
    hyper = placement.hyper
    return {
        "micro_batch": hyper.micro_batch,
        "cache": hyper.cache,
        "depth": trained_depth(placement.stage),
        **({"rank": placement.rank} if placement.rank else {}),
        "checkpoint": hyper.checkpoint,
        "lean": hyper.optimizer if hyper.low_memory else "",
        "precision": hyper.precision,
        **({"weights": "disk"} if hyper.weights == "disk" else {}),
    }


def figures_of(refusal: Refusal) -> dict[str, object]:
    """Data for an event on a refusal."""
    return msgspec.structs.asdict(refusal)


def wait_for_able(steps: Steps) -> None:
    """Wait for a device able to train; fail when every known one is refused or in quarantine."""
    state = steps.state
    hopeful = [device for device in state.devices.values() if device.eligible or device.placement is None]
    refusals = [device.refusal for device in state.devices.values() if device.refusal is not None]
    barred = sorted(name for name, device in state.devices.items() if device.barred)
    if refusals and not hopeful:
        if all(refusal.reason == UNLABELLED for refusal in refusals):
            steps.do(Fail("DataError", nearest_refusal(state), LABEL_THEM))
        else:
            steps.do(Fail("BudgetError", nearest_refusal(state)))
    elif barred and all(device.barred for device in hopeful):
        text = f"every device that can train stage {state.stage} is in quarantine: {', '.join(barred)}"
        steps.do(Fail("RunError", text))
    else:
        names = [device.hello.device for device in hopeful if not (device.online or device.barred or device.out)]
        steps.set(returning=dict.fromkeys(names, steps.at))  # until the first of them is back
        if state.phase is Phase.WAITING:
            return
        wait_s = state.policy.join_s
        steps.set(phase=Phase.WAITING, until=steps.at + wait_s)
        text = f"no device that can train stage {state.stage} is connected{without(state)}"
        steps.warn(f"{text}; waiting {wait_s:g} s for one")


def without(state: State) -> str:
    """Bracketed list of excluded devices, for the end of a sentence.

    Such as " (revoked: a; left out of the run: b)", with the space; "" for none.
    """
    found: dict[str, list[str]] = {}
    for name, device in sorted(state.devices.items()):
        if device.out:
            found.setdefault("revoked" if device.revoked else "left out of the run", []).append(name)
    clauses = [f"{word}: {', '.join(names)}" for word, names in found.items()]
    return f" ({'; '.join(clauses)})" if clauses else ""


def nearest_refusal(state: State) -> str:
    """Text of the refusal nearest to fitting, with both numbers; "" without refusals."""
    found = [(name, one.refusal) for name, one in sorted(state.devices.items()) if one.refusal is not None]
    if not found:
        return ""
    name, refusal = min(found, key=lambda pair: _excess(pair[1]))
    others = f" ({len(found)} devices were refused)" if len(found) > 1 else ""
    return f"no device can train stage {state.stage}: the nearest, '{name}', {reason_text(refusal)}{others}"


def reason_text(refusal: Refusal) -> str:
    """A refusal as a clause: limit, amount needed, amount allowed."""
    detail = f": {refusal.detail}" if refusal.detail else ""
    if refusal.needed is None or refusal.allowed is None:
        return f"is refused for {refusal.reason or 'an unknown reason'}{detail}"
    needed, allowed = (quantity(value, refusal.unit) for value in (refusal.needed, refusal.allowed))
    return f"needs {needed} and is allowed {allowed} ({refusal.reason}{detail})"


def _excess(refusal: Refusal) -> float:
    """Ratio of a refusal's numbers, larger to smaller: distance from fitting; infinite if unknown."""
    if not refusal.needed or not refusal.allowed:
        return float("inf")
    return max(refusal.needed / refusal.allowed, refusal.allowed / refusal.needed)


def ordinal(state: State) -> int:
    """Number of the open or next round, from 1 over all stages."""
    return sum(state.rounds[: state.stage - 1]) + state.number


def count_rejected(steps: Steps, device: str, refusal: Refusal) -> None:
    """Count an unusable update; after ``quarantine_after`` in a row the device is in quarantine."""
    known, policy = steps.state.devices[device], steps.state.policy
    counts = {**known.rejected, refusal.reason: known.rejected.get(refusal.reason, 0) + 1}
    bad = known.bad + 1
    steps.set_device(device, bad=bad, rejected=counts)
    steps.emit("rejected", device, figures_of(refusal))
    if policy.quarantine_after and bad >= policy.quarantine_after and not known.barred:
        rounds = policy.quarantine_rounds
        steps.set_device(device, barred=ordinal(steps.state) + rounds if rounds else FOR_GOOD)
        data = {"bad": bad, "rounds": rounds, "rejected": counts, **figures_of(refusal)}
        steps.emit("quarantined", device, data)


def readmit(steps: Steps) -> None:
    """End quarantines after their last round; these devices are asked again."""
    now = ordinal(steps.state)
    for name, device in steps.state.devices.items():
        if 0 < device.barred < now:
            steps.set_device(name, barred=0, bad=0)
            steps.emit("readmitted", name)


def not_asked(state: State) -> dict[str, Assignment]:
    """Assignments of devices refused by the planner or in quarantine, with the reason."""
    found: dict[str, Assignment] = {}
    for name, device in state.devices.items():
        if device.placement is None:
            continue
        if device.refusal is not None:
            found[name] = Assignment(device.placement, "refused", refusal=device.refusal)
        elif device.barred:
            counts = ", ".join(f"{reason} × {count}" for reason, count in sorted(device.rejected.items()))
            until = "the end of the run" if device.barred == FOR_GOOD else f"round {device.barred} of the run"
            text = f"{device.bad} updates in a row could not be used (in all: {counts}); not asked until {until}"
            most = float(state.policy.quarantine_after - 1)
            refusal = Refusal("quarantine", float(device.bad), most, "updates", text)
            found[name] = Assignment(device.placement, "quarantined", refusal=refusal)
    return found
