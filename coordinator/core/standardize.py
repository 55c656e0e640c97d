"""Standardisation constants of sensors, fixed once from the devices' statistics. Pure."""

from __future__ import annotations

import msgspec

from coordinator.core.moves import Fail, SavePlan, Steps
from coordinator.core.state import Phase, State
from edgefl.aggregation.channel_moments import Scales, combined, doubt
from edgefl.encoder_kinds import standardized_axis
from edgefl.models.spec import EncoderSpec, unscaled

replace = msgspec.structs.replace


def standardize(steps: Steps) -> bool:
    """Fix the model's constants; True if fixed, else the run waits for a device with statistics.

    They hold for the whole run: devices that join later are scaled by them, too.
    """
    state = steps.state
    due = unscaled(state.plan.model)
    if not due:
        return True
    found: dict[str, Scales] = {}
    for m in due:
        scales, doubts = _of(state, m, state.plan.model.encoders[m])
        for device, why in doubts.items():
            steps.warn_once(device, "moments", f"its statistics of {m} are left out: {why}")
        if scales is None:
            return _wait(steps, m)
        found[m] = scales
    encoders = state.plan.model.encoders | {
        m: replace(state.plan.model.encoders[m], mean=scales.mean, std=scales.std) for m, scales in found.items()
    }
    plan = replace(state.plan, model=replace(state.plan.model, encoders=encoders))
    steps.set(plan=plan)
    steps.do(SavePlan(plan))
    data = {m: {"mean": one.mean, "std": one.std, "devices": one.devices} for m, one in found.items()}
    steps.emit("standardized", data={"modalities": data})
    return True


def _of(state: State, modality: str, encoder: EncoderSpec) -> tuple[Scales | None, dict[str, str]]:
    """The constants of a modality, and device -> reason for implausible statistics."""
    sent, doubts = {}, {}
    for name, device in sorted(state.devices.items()):
        moments = device.hello.moments.get(modality)
        if moments is None or not device.online or device.out:
            continue
        most = device.claim.samples.get(modality, 0) * (1 if encoder.kind == "table" else encoder.input_shape[0])
        if why := doubt(moments, standardized_axis(encoder), most):
            doubts[name] = why
        else:
            sent[name] = moments
    # devices' units and offsets differ by more than their steps do
    scales = combined(sent, state.policy.largest_share, 10 * state.policy.largest_change) if sent else None
    return scales, doubts | (scales.left_out if scales is not None else {})


def _wait(steps: Steps, modality: str) -> bool:
    """Wait up to ``join_s`` for a device with statistics of ``modality``, then fail; always False."""
    state = steps.state
    if state.phase is not Phase.JOINING or not state.until:
        steps.set(phase=Phase.JOINING, until=steps.at + state.policy.join_s)
    elif steps.at >= state.until:
        text = (
            f"no device sent statistics of {modality!r} within {state.policy.join_s:g} s, by which it is standardised"
        )
        remedy = (
            f"Let devices join that have samples of {modality} and send them (no --no-moments), or set model.encoders."
            f"{modality}.standardize to none."
        )
        steps.do(Fail("RunError", text, remedy))
    return False
